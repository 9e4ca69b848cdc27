"""A series of random faults on a session over four hosts; the end must equal that of a run without a loss; prints JSON.

    python bench/soak_session_nodes.py --faults 20
    python bench/soak_session_nodes.py --faults 500 --spares 1 --output bench/results/soak_session_nodes.json

Four hosts (network namespaces, which need root and iproute2) with a supervisor and two workers each. The model and its training
are those of soak_sessions.py, with ``copies=4``. Faults follow one another, some during the recovery from the previous one:

- one worker, two workers, a supervisor, two supervisors, or the node with the store is killed;
- a worker and the supervisor of another host are killed at once;
- a worker is stopped (SIGSTOP) and found by ``--step-timeout``; a host is stopped for longer than the lease;
- a cable is cut and reconnected; a node is preempted.

Killed supervisors are started again on the same host. After each fault all workers must complete further steps. If no rank has
what a lost one needs, all workers may start over; the result says how often. The exit code is 1 if a rank ends differently than
in the undisturbed run, if anything hangs, or if a process, a socket or shared memory is left. See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from hosts import Network, address, available, named_things, processes_with
from jobs import RALLY, Progress, machine, publish, spread
from soak_elastic import (
    HOSTS,
    LEASE,
    MARK,
    PORT,
    Host,
    cut_cable,
    kill_together,
    kill_worker,
    preempt,
    stop_and_continue,
)
from soak_sessions import TRAIN, Board


WORKERS_PER_HOST = 2
RANKS = HOSTS * WORKERS_PER_HOST
# Seconds within which all workers must have completed a step after a fault.
PATIENCE = 120.0
STEP_TIMEOUT = 5.0


class SessionHost(Host):
    """A host whose workers are in a session."""

    def __init__(
        self,
        index: int,
        network: Network,
        folder: Path,
        mark: str,
        steps: int,
        kind: str,
        spares: int,
    ) -> None:
        super().__init__(index, network, folder, mark)
        self._script = [str(folder / "train.py"), str(folder), str(steps), kind]
        self._spares = spares

    def words(self) -> list[str]:
        endpoint = ",".join(f"{address(i)}:{PORT}" for i in range(HOSTS))
        conf = f"lease={LEASE},last_call_timeout=2,join_timeout=120"
        return [
            *RALLY,
            *("--nnodes", f"{HOSTS}:{HOSTS}", "--nproc-per-node", str(WORKERS_PER_HOST)),
            *("--rdzv-endpoint", endpoint, "--rdzv-conf", conf, "--insecure"),
            *("--max-restarts", "100000", "--max-losses", "100000", "--shutdown-timeout", "5"),
            *("--spares", str(self._spares), "--step-timeout", str(STEP_TIMEOUT)),
            *self._script,
        ]


# -- faults ---------------------------------------------------------------------------------------


def stop_worker(host: Host, network: Network) -> None:
    worker = host.worker()
    if worker is not None:
        worker.suspend()


def kill_a_worker(host: Host, network: Network) -> None:
    if host.worker() is not None:  # it may not have started yet
        with contextlib.suppress(AssertionError, psutil.Error):
            kill_worker(host, network)


def blow(name: str, hosts: list[Host], network: Network, rng: random.Random) -> Callable[[], None]:
    """What a fault does."""
    host, other = rng.sample(hosts, 2)
    match name:
        case "kill a worker":
            return partial(kill_a_worker, host, network)
        case "kill two workers":
            return lambda: (kill_a_worker(host, network), kill_a_worker(other, network))[0]
        case "stop a worker":
            return partial(stop_worker, host, network)
        case "kill a supervisor":
            return partial(kill_together, [host])
        case "kill two supervisors":
            return partial(kill_together, [host, other])
        case "kill the store's node":
            return lambda: kill_together([max(hosts, key=lambda each: each.served())])
        case "kill a worker and a supervisor":
            return lambda: (kill_a_worker(other, network), kill_together([host]))[1]
        case "preempt a node":
            return partial(preempt, host, network)
        case "stop a host":
            return partial(stop_and_continue, host, network)
        case _:
            return partial(cut_cable, host, network)


KINDS = (
    *("kill a worker", "kill two workers", "stop a worker", "kill a supervisor"),
    *("kill two supervisors", "kill the store's node", "kill a worker and a supervisor"),
    *("preempt a node", "stop a host", "cut a cable"),
)
# With --meetings: all nodes have to meet again after each.
MEETINGS = (
    *("preempt a node", "preempt a node", "stop a host", "cut a cable"),
    *("kill the store's node", "kill a supervisor"),
)
# The share of faults that the next one follows at once.
AT_ONCE, AT_ONCE_IN_MEETINGS = 0.25, 0.5


# -- runs -----------------------------------------------------------------------------------------


def run(options: argparse.Namespace, steps: int, faults: int, progress: Progress) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="rally-soak-"))
    # Three nodes may be lost before the first is back, so what only one rank has is kept on all.
    script = TRAIN.replace(
        "elastic.session(net, optimizer)", f"elastic.session(net, optimizer, copies={HOSTS})"
    )
    assert script != TRAIN
    (folder / "train.py").write_text(script)
    board = Board(folder, RANKS)
    mark = f"soak-{os.getpid()}-{faults}"
    rng = random.Random(options.seed)
    random.seed(options.seed)
    found: dict[str, Any] = {"faults": 0}
    before = named_things()
    with Network(HOSTS) as network:
        hosts: list[Host] = [
            SessionHost(index, network, folder, mark, steps, options.kind, options.spares)
            for index in range(HOSTS)
        ]
        try:
            for host in hosts:
                host.start()
            if faults:
                found = torment(
                    *(hosts, network, board, rng, faults, progress, folder, mark),
                    meetings=options.meetings,
                )
            codes = [] if found.get("hangs") else [wait(host, PATIENCE + steps) for host in hosts]
        finally:
            left = processes_with(MARK, mark)
            sockets = network.open_sockets()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
    ends = [folder / f"end {rank}" for rank in range(RANKS)]
    found["ends"] = [json.loads(each.read_text()) if each.exists() else None for each in ends]
    found["codes"], found["left"] = codes, len(left)
    found["left_sockets"] = sockets
    found["left_names"] = sorted(named_things() - before)
    logs = "".join((folder / f"host{index}.log").read_text() for index in range(HOSTS))
    found["restarts_of_all"] = logs.count("; restarting all workers") // HOSTS
    found["random_states_lost"] = logs.count("was lost with its node: it continues")
    found["folder"] = str(folder)
    return found


def wait(host: Host, patience: float) -> int | None:
    assert host.process is not None
    try:
        return host.process.wait(patience)
    except subprocess.TimeoutExpired:
        return None


def torment(
    hosts: list[Host],
    network: Network,
    board: Board,
    rng: random.Random,
    faults: int,
    progress: Progress,
    folder: Path,
    mark: str,
    *,
    meetings: bool,
) -> dict[str, Any]:
    kinds, at_once = (MEETINGS, AT_ONCE_IN_MEETINGS) if meetings else (KINDS, AT_ONCE)
    struck: Counter[str] = Counter()
    times: dict[str, list[float]] = defaultdict(list)
    hangs: list[str] = []
    kept = lost = 0
    if not stepping(board, hosts, 0.0):
        raise SystemExit("the job did not start")
    for number in range(faults):
        if not all(host.alive() for host in hosts):
            break  # the job has ended
        name = rng.choice(kinds)
        time.sleep(rng.uniform(0.0, 0.6))  # a bench may wait by the clock
        before = [pid for pid, *_ in board.lines()]
        blow(name, hosts, network, rng)()
        at = time.monotonic()
        struck[name] += 1
        progress.step(f"fault {number}: {name}")
        if rng.random() < at_once:
            continue  # the next fault strikes during this recovery
        if not stepping(board, hosts, at):
            hangs.append(f"fault {number}: {name}")
            keep_stacks(folder, mark)
            break
        times[name].append(time.monotonic() - at)
        same = sum(old == new for old, (new, *_) in zip(before, board.lines(), strict=True))
        kept, lost = kept + same, lost + RANKS - same
    return {
        "faults": sum(struck.values()),
        "kinds": dict(struck),
        "hangs": hangs,
        "workers_kept": kept,
        "workers_replaced": lost,
        "seconds_to_the_next_step_of_all": {k: spread(v) for k, v in sorted(times.items())},
    }


def keep_stacks(folder: Path, mark: str) -> None:
    """Keep where each process of the job is, if py-spy is installed."""
    program = shutil.which("py-spy")
    if program is None:
        return
    for each in processes_with(MARK, mark):
        with (
            contextlib.suppress(psutil.Error, subprocess.SubprocessError),
            (folder / f"stacks {each.pid}").open("w") as file,
        ):
            print(*each.cmdline(), file=file, flush=True)
            words = [program, "dump", "--pid", str(each.pid)]
            subprocess.run(words, stdout=file, stderr=file, timeout=30, check=False)


def stepping(board: Board, hosts: list[Host], since: float) -> bool:
    """Wait until all ranks have completed a step since then, or the job has ended."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        lines = board.lines()
        if all(steps >= 1 and last > since for _, steps, last in lines):
            return True
        if not any(host.alive() for host in hosts):
            return True
        time.sleep(0.005)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50, help="how many (50)")
    parser.add_argument("--spares", type=int, default=0, help="per node (0)")
    parser.add_argument(
        "--kind", choices=("ddp", "fsdp2"), default="ddp", help="of the model (ddp)"
    )
    parser.add_argument(
        "--meetings",
        action="store_true",
        help="only faults behind which all nodes meet again, half of them while they meet",
    )
    parser.add_argument("--seed", type=int, default=7, help="of instants, kinds and victims (7)")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    if not available():
        raise SystemExit("needs root and iproute2")
    # About three steps are completed between two faults. A few more, so that the job does not end before the last one.
    steps = max(100, options.faults * 6 // 50 * 50)
    progress = Progress(options.faults + 1)
    progress.step("a run without a loss")
    calm = run(options, steps, 0, progress)
    found = run(options, steps, options.faults, progress)
    equal = [a == b and a is not None for a, b in zip(calm["ends"], found["ends"], strict=True)]
    left = sum(map(len, (found["left_sockets"], found["left_names"])), found["left"])
    good = all(equal) and not found["hangs"] and not left
    for each in (calm, found):
        if good:
            shutil.rmtree(each.pop("folder"))
        del each["ends"]
    result = {
        "benchmark": "soak_session_nodes",
        "machine": machine(),
        **{name: getattr(options, name) for name in ("kind", "spares", "meetings", "seed")},
        "steps": steps,
        **found,
        "ranks_with_an_equal_end": sum(equal),
        "targets": [
            {"what": "every rank ends bit by bit as without a loss", "holds": all(equal)},
            {"what": "no fault is followed by a standstill", "holds": not found["hangs"]},
            {"what": "no process, socket or shared memory is left", "holds": not left},
        ],
    }
    return 1 if publish(result, options.output) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())

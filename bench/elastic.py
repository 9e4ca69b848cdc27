"""How soon an elastic job of four hosts detects a loss and trains again, compared with torchrun; prints JSON.

    python bench/elastic.py --quick
    python bench/elastic.py --output bench/results/elastic.json

Four hosts (network namespaces, which need root and iproute2) with two workers each run all-reduces in a loop over
Gloo. Each loss is repaired before the next trial. See bench/README.md.
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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from hosts import Network, address, available, processes_with
from jobs import BIN, RALLY, TORCHRUN, Progress, machine, publish, spread


HOSTS = 4
WORKERS = 2
LEASE = 5.0
LAST_CALL = 1
PORT = 29400
# A job that does not train again within this time never will.
GIVE_UP = 60.0
MARK = "RALLY_BENCH_ELASTIC"
# The start of our supervisor's lines. torchrun does not report when it knows of a loss.
LAUNCHER = "rally: "

TRAIN = """
import json, os, signal, socket, sys, threading, time
import torch, torch.distributed as dist

def note(**what):
    line = json.dumps({"at": time.monotonic(), "host": int(os.environ["BENCH_HOST"]), **what})
    fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode() + b"\\n")  # one write: all ranks share the file
    os.close(fd)

def listen():
    ours.recv(1)
    note(signal=True)  # even while the main thread is inside a collective
    os._exit(143)

ours, theirs = socket.socketpair()
theirs.setblocking(False)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
threading.Thread(target=listen, daemon=True).start()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.ones(1)
dist.all_reduce(x)
note(rank=rank, world=world, pid=os.getpid())
while True:
    dist.all_reduce(x.fill_(1))
    time.sleep(0.01)
"""


# -- a job ----------------------------------------------------------------------------------------


class Host:
    """One host's launcher, and what it printed when."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def first_word_after(self, at: float) -> float | None:
        """When the launcher itself (not a worker) first printed something after ``at``."""
        return next(
            (when for when, line in list(self.lines) if when > at and LAUNCHER in line), None
        )

    def said(self, text: str) -> float | None:
        """When it last printed ``text``."""
        return max((at for at, line in list(self.lines) if text in line), default=None)

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


class ElasticJob:
    """A job on its own hosts, started host by host."""

    def __init__(self, network: Network, rival: str, nnodes: str, folder: Path) -> None:
        self._network = network
        self._rival = rival
        self._nnodes = nnodes
        self._folder = folder
        self._notes = folder / "notes.jsonl"
        (folder / "train.py").write_text(TRAIN)
        self._mark = folder.name
        self.hosts: dict[int, Host] = {}

    def start(self, index: int) -> None:
        conf = f"last_call_timeout={LAST_CALL},join_timeout=120"
        endpoint = f"{address(0)}:{PORT}"
        if self._rival == "rally":
            # Any host may have to serve the store; a newcomer looks for it on all of them.
            endpoint = ",".join(f"{address(i)}:{PORT}" for i in range(HOSTS))
            words = [*RALLY, "--rdzv-conf", f"{conf},lease={LEASE:g}", "--shutdown-timeout", "2"]
        else:
            is_host = str(index == 0).lower()
            words = [*TORCHRUN, "--rdzv-backend", "c10d", "--local-addr", address(index)]
            words += ["--rdzv-id", "bench", "--rdzv-conf", f"{conf},is_host={is_host}"]
        words += ["--nnodes", self._nnodes, "--nproc-per-node", str(WORKERS)]
        words += ["--max-restarts", "1000", "--rdzv-endpoint", endpoint]
        words += [str(self._folder / "train.py"), str(self._notes)]
        env = {
            **os.environ,
            MARK: self._mark,
            "BENCH_HOST": str(index),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._folder),
        }
        self.hosts[index] = Host(self._network.command(index, words), env)

    def _read_notes(self) -> list[dict[str, Any]]:
        if not self._notes.exists():
            return []
        return [json.loads(line) for line in self._notes.read_text().splitlines()]

    def training_since(self, at: float, hosts: int) -> tuple[float, list[int]] | None:
        """When the last worker of ``hosts`` hosts had its first all-reduce after ``at``, and all their pids by rank."""
        firsts: dict[int, tuple[float, int]] = {}
        world = hosts * WORKERS
        for note in self._read_notes():
            if note["at"] <= at or "rank" not in note:
                continue
            if note["world"] != world:
                firsts.clear()
                continue
            firsts[note["rank"]] = (note["at"], note["pid"])
        if len(firsts) < world:
            return None
        return max(at for at, _ in firsts.values()), [firsts[rank][1] for rank in range(world)]

    def wait_training(self, since: float, hosts: int) -> tuple[float, list[int]] | None:
        deadline = time.monotonic() + GIVE_UP
        while time.monotonic() < deadline:
            found = self.training_since(since, hosts)
            if found is not None:
                return found
            time.sleep(0.01)
        return None

    def serving(self) -> int:
        """The host that serves the store."""
        text = "serving it here"
        said = {i: at for i, host in self.hosts.items() if (at := host.said(text)) is not None}
        return max(said, key=lambda index: said[index], default=0)

    def known_after(self, at: float, but: int | None = None) -> list[float]:
        """Seconds until each host (except ``but``) knew that something had happened.

        Its launcher reports it or stops its workers, whichever we see first.
        """
        signs: dict[int, float] = {}
        for note in self._read_notes():
            if note["at"] > at and "signal" in note:
                signs.setdefault(note["host"], note["at"])
        for index, host in self.hosts.items():
            said = host.first_word_after(at)
            if said is not None:
                signs[index] = min(said, signs.get(index, said))
        return [moment - at for index, moment in signs.items() if index != but]

    def said_by_all(self) -> str:
        return "\n".join(
            f"{at:.3f} host {index}: {line}"
            for at, index, line in sorted(
                (at, index, line) for index, host in self.hosts.items() for at, line in host.lines
            )
        )

    def close(self) -> None:
        for host in self.hosts.values():
            with contextlib.suppress(ProcessLookupError):
                host.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 10.0
        for host in self.hosts.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(max(0.1, deadline - time.monotonic()))
        for process in processes_with(MARK, self._mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for host in self.hosts.values():
            host.process.wait()


@contextlib.contextmanager
def job(network: Network, rival: str, nnodes: str) -> Iterator[ElasticJob]:
    folder = Path(tempfile.mkdtemp(prefix="rally-elastic-"))
    running = ElasticJob(network, rival, nnodes, folder)
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(folder)


# -- the faults -----------------------------------------------------------------------------------
# Each returns when it struck, the host that is lost with it (or None), and how to repair the damage.

Strike = Callable[[ElasticJob, Network, list[int]], tuple[float, int | None, Callable[[], None]]]


def kill_worker(running: ElasticJob, network: Network, pids: list[int]) -> Any:
    at = time.monotonic()
    os.kill(random.choice(pids), signal.SIGKILL)
    return at, None, lambda: None


def _kill(running: ElasticJob, index: int) -> Any:
    process = running.hosts[index].process
    at = time.monotonic()
    process.kill()

    def again() -> None:
        process.wait()
        running.start(index)

    return at, index, again


def kill_supervisor(running: ElasticJob, network: Network, pids: list[int]) -> Any:
    return _kill(running, _not_serving(running))


def kill_store_host(running: ElasticJob, network: Network, pids: list[int]) -> Any:
    return _kill(running, running.serving())


def _cut(network: Network, index: int) -> Any:
    network.cable(index, "down")
    return time.monotonic(), index, lambda: network.cable(index, "up")


def cut_off(running: ElasticJob, network: Network, pids: list[int]) -> Any:
    return _cut(network, _not_serving(running))


def cut_off_store_host(running: ElasticJob, network: Network, pids: list[int]) -> Any:
    return _cut(network, running.serving())


def stop_store_host(running: ElasticJob, network: Network, pids: list[int]) -> Any:
    """Stop all of the host's processes. Its kernel keeps answering."""
    index = running.serving()
    stopped = running.hosts[index].tree()
    at = time.monotonic()
    for process in stopped:
        process.suspend()

    def resume() -> None:
        for process in stopped:
            with contextlib.suppress(psutil.Error):
                process.resume()

    return at, index, resume


def _not_serving(running: ElasticJob) -> int:
    return random.choice([index for index in running.hosts if index != running.serving()])


@dataclass
class Result:
    """The result for one kind of fault."""

    trials: int = 0
    failed: list[str] = field(default_factory=list)
    known: list[float] = field(default_factory=list)
    known_to_training: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    whole_again: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "trials": self.trials,
            "succeeded": self.trials - len(self.failed),
            "failures": [text.replace(f"{BIN.parent}/", "")[-3000:] for text in self.failed[:2]],
            "until_known_on_every_host_s": spread(self.known),
            "first_known_to_training_s": spread(self.known_to_training),
            "until_training_s": spread(self.training),
            "mended_until_all_hosts_train_s": spread(self.whole_again),
        }


def strike_often(network: Network, rival: str, strike: Strike, trials: int) -> Result:
    """One fault after another on one job; a job that does not recover is replaced."""
    result = Result()
    while result.trials < trials:
        with job(network, rival, f"1:{HOSTS}") as running:
            for index in range(HOSTS):
                running.start(index)
            training = running.wait_training(0.0, HOSTS)
            if training is None:
                result.trials += 1
                result.failed.append(f"did not start:\n{running.said_by_all()}")
                continue
            while training is not None and result.trials < trials:
                training = _once(running, network, strike, training[1], result)
    return result


def _once(
    running: ElasticJob, network: Network, strike: Strike, pids: list[int], result: Result
) -> tuple[float, list[int]] | None:
    time.sleep(1.0 + random.random())
    result.trials += 1
    at, lost, mend = strike(running, network, pids)
    training = running.wait_training(at, HOSTS - (lost is not None))
    if training is None:
        result.failed.append(f"struck at {at:.3f} (host {lost}):\n{running.said_by_all()}")
        mend()
        return None
    known = running.known_after(at, lost)
    result.known.append(max(known, default=0.0))
    result.known_to_training.append(training[0] - at - min(known, default=0.0))
    result.training.append(training[0] - at)
    if lost is None:
        return training
    mend()
    mended = time.monotonic()
    whole = running.wait_training(mended, HOSTS)
    if whole is None:
        result.failed.append(
            f"mended at {mended:.3f} (host {lost}), and did not come back:\n{running.said_by_all()}"
        )
        return None
    result.whole_again.append(whole[0] - mended)
    return whole


def scale_up(network: Network, rival: str, trials: int) -> Result:
    """Two hosts train; a third joins, then a fourth."""
    result = Result()
    for _ in range(trials):
        result.trials += 1
        with job(network, rival, f"2:{HOSTS}") as running:
            running.start(0)
            running.start(1)
            at = 0.0
            for hosts in (2, 3, 4):
                if hosts > 2:
                    time.sleep(0.5)
                    at = time.monotonic()
                    running.start(hosts - 1)
                training = running.wait_training(at, hosts)
                if training is None:
                    result.failed.append(f"to {hosts} hosts:\n{running.said_by_all()}")
                    break
                if hosts > 2:
                    result.training.append(training[0] - at)
    return result


# -- the plan -------------------------------------------------------------------------------------

STRIKES: dict[str, tuple[Strike, int]] = {
    "worker killed": (kill_worker, 20),
    "supervisor killed": (kill_supervisor, 20),
    "host cut off": (cut_off, 5),
    "store's host: supervisor killed": (kill_store_host, 20),
    "store's host: cut off": (cut_off_store_host, 5),
    "store's host: all processes stopped": (stop_store_host, 5),
}
SCALE_UP, SCALE_UPS = "scale-up 2 to 3 to 4", 20
# torchrun gets one trial of what it can hardly do: each failure takes a minute.
TORCH_TRIALS = 1
TORCH_STRIKES = ("worker killed", "supervisor killed", "store's host: supervisor killed")


def targets(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What we promise, with the worst value measured; None if this run did not measure it."""

    def worst(name: str, what: str) -> float | None:
        value: float | None = found.get(name, {}).get(what, {}).get("max")
        return value

    def share(name: str) -> float | None:
        tried = found.get(name)
        return None if not tried else tried["succeeded"] / tried["trials"]

    known, after = "until_known_on_every_host_s", "first_known_to_training_s"
    rows: list[tuple[str, float | None, float]] = [
        ("a worker's death is known on every host, s", worst("worker killed", known), 0.1),
        ("a supervisor's death is known on every host, s", worst("supervisor killed", known), 1.5),
        ("a silent host is known on every host, s", worst("host cut off", known), LEASE + 1.0),
        ("worker killed: first notice to next all-reduce, s", worst("worker killed", after), 1.0),
        (
            "supervisor killed: first notice to next all-reduce, s",
            worst("supervisor killed", after),
            1.0,
        ),
        ("host cut off: first notice to next all-reduce, s", worst("host cut off", after), 1.0),
        (
            "store's host killed until next all-reduce, s",
            worst("store's host: supervisor killed", "until_training_s"),
            LEASE + 2.0,
        ),
    ]
    checks = [
        {
            "what": what,
            "measured": value,
            "limit": limit,
            "holds": None if value is None else value <= limit,
        }
        for what, value, limit in rows
    ]
    for name in ("worker killed", SCALE_UP, "store's host: supervisor killed"):
        value = share(name)
        holds = None if value is None else value == 1.0
        checks.append(
            {
                "what": f"{name}: share that succeeds",
                "measured": value,
                "limit": 1.0,
                "holds": holds,
            }
        )
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="each case once, as a quick check")
    parser.add_argument("--only", help="only faults whose name contains this")
    parser.add_argument(
        "--trials", type=int, help="trials of each kind (default 20; 5 for silent hosts)"
    )
    parser.add_argument("--no-torch", action="store_true", help="do not run torchrun")
    args = parser.parse_args()
    if not available():
        print("needs root and iproute2 for network namespaces", file=sys.stderr)
        return 2
    # A script's background jobs ignore Ctrl-C, and the launchers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def trials(default: int) -> int:
        return 1 if args.quick else args.trials or default

    plan: list[tuple[str, str, Callable[[Network], Result]]] = [
        ("rally", name, partial(strike_often, rival="rally", strike=strike, trials=trials(count)))
        for name, (strike, count) in STRIKES.items()
    ]
    plan.append(("rally", SCALE_UP, partial(scale_up, rival="rally", trials=trials(SCALE_UPS))))
    if not (args.no_torch or args.quick):
        often = partial(strike_often, rival="torchrun", trials=TORCH_TRIALS)
        plan += [
            ("torchrun", name, partial(often, strike=STRIKES[name][0])) for name in TORCH_STRIKES
        ]
        plan.append(
            ("torchrun", SCALE_UP, partial(scale_up, rival="torchrun", trials=TORCH_TRIALS))
        )
    if args.only:
        plan = [each for each in plan if args.only in each[1]]
    progress = Progress(len(plan))
    found: dict[str, dict[str, dict[str, Any]]] = {"rally": {}, "torchrun": {}}
    result: dict[str, Any] = {
        "benchmark": "elastic",
        "quick": args.quick,
        "machine": machine(),
        "hosts": HOSTS,
        "workers_per_host": WORKERS,
        "lease_s": LEASE,
        "last_call_s": LAST_CALL,
        "given_up_after_s": GIVE_UP,
    }
    with Network(HOSTS) as network:
        for rival, name, measure in plan:
            progress.step(f"{rival}: {name}")
            found[rival][name] = measure(network).as_dict()
    progress.close()
    result |= found
    result["targets"] = targets(found["rally"])
    missed = publish(result, args.output)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

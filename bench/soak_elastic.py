"""A series of random faults on one elastic job of four hosts; prints JSON.

    python bench/soak_elastic.py --faults 20
    python bench/soak_elastic.py --faults 200 --output bench/results/soak_elastic.json --seed 7

Four hosts (network namespaces, which need root and iproute2), each with one supervisor, train a small model with DDP and
save a checkpoint in every step. Faults follow one another:

- a worker, a supervisor, or two supervisors at once are killed;
- the node with the store is killed, twice in a row;
- all processes of a host are stopped for longer than the lease;
- a cable is cut and reconnected;
- a node is preempted, or all nodes in turn (a rolling restart).

Killed processes are started again on the same host. After each fault the job must continue with all four hosts, and must
not resume below the last step that all ranks had committed. At the end no process of the job may be left. The exit code
is 1 if anything failed. See bench/README.md.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from hosts import Network, address, available, processes_with
from jobs import RALLY, Progress, machine, publish, spread


HOSTS = 4
LEASE = 2.0
PORT = 29400
# The job must train again with all hosts within this many seconds after a fault was repaired.
PATIENCE = 60.0
MARK = "RALLY_SOAK_JOB"

TRAIN = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
generation = int(os.environ["RALLY_GENERATION"])

def note(**what):  # one write: all ranks share the file
    line = json.dumps({"generation": generation, "rank": rank, "at": time.monotonic(), **what}) + "\\n"
    fd = os.open(f"{folder}/notes.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
steps = sorted(int(name[5:-3]) for name in os.listdir(folder) if name.startswith("step-"))
step = 0
if steps:
    saved = torch.load(f"{folder}/step-{steps[-1]}.pt")
    step = saved["step"]
    model.load_state_dict(saved["model"])
resumed = torch.tensor([step])
dist.all_reduce(resumed, dist.ReduceOp.MIN)
step = int(resumed)  # the newest that all of us see
if steps and step != steps[-1]:
    model.load_state_dict(torch.load(f"{folder}/step-{step}.pt")["model"])
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
note(resumed=step, world=world)
while True:
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    ((ddp(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
    optimizer.step()
    step += 1
    if rank == 0:
        new = f"{folder}/new-{generation}-{step}"
        torch.save({"step": step, "model": model.state_dict()}, new)
        os.rename(new, f"{folder}/step-{step}.pt")
        old = f"{folder}/step-{step - 50}.pt"
        if os.path.exists(old):
            os.unlink(old)
    dist.barrier()  # it is there: from now on nobody may fall behind this step
    note(committed=step)
    time.sleep(0.02)
"""


@dataclass
class Notes:
    """What the workers write, read as it grows."""

    path: Path
    position: int = 0
    resumed: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    worlds: dict[int, int] = field(default_factory=dict)
    committed: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    first_commit: dict[int, float] = field(default_factory=dict)
    below: list[str] = field(default_factory=list)
    all_committed: int = 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self.position)
            while line := file.readline():
                if not line.endswith("\n"):
                    break
                self.position = file.tell()
                self._take(json.loads(line))

    def _take(self, note: dict[str, Any]) -> None:
        generation, rank = note["generation"], note["rank"]
        if "resumed" in note:
            self.resumed[generation][rank] = note["resumed"]
            self.worlds[generation] = note["world"]
            if note["resumed"] < self.all_committed:
                self.below.append(
                    f"generation {generation} resumed at {note['resumed']}, all had committed"
                    f" {self.all_committed}"
                )
            return
        ranks = self.committed[generation]
        ranks[rank] = note["committed"]
        if len(ranks) == self.worlds.get(generation):
            self.all_committed = max(self.all_committed, min(ranks.values()))
            self.first_commit.setdefault(generation, note["at"])

    def whole(self) -> int:
        """The newest generation that trains with all hosts, or -1."""
        good = [g for g in self.first_commit if self.worlds[g] == HOSTS]
        return max(good, default=-1)


class Host:
    """One host's supervisor."""

    def __init__(self, index: int, network: Network, folder: Path, mark: str) -> None:
        self.index = index
        self._network = network
        self._folder = folder
        self._env = {
            **os.environ,
            MARK: mark,
            "GLOO_SOCKET_IFNAME": "eth0",
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def words(self) -> list[str]:
        endpoint = ",".join(f"{address(i)}:{PORT}" for i in range(HOSTS))
        conf = f"lease={LEASE},last_call_timeout=2,join_timeout=120"
        return [
            *RALLY,
            *("--nnodes", f"1:{HOSTS}", "--rdzv-endpoint", endpoint, "--rdzv-conf", conf),
            *("--max-restarts", "100000", "--shutdown-timeout", "2"),
            *(str(self._folder / "train.py"), str(self._folder)),
        ]

    def start(self) -> None:
        with (self._folder / f"host{self.index}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._network.command(self.index, self.words()),
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def worker(self) -> psutil.Process | None:
        """A process that runs the training script."""
        workers = [p for p in self.tree() if " ".join(_words(p)[1:2]).endswith("train.py")]
        return random.choice(workers) if workers else None

    def connections_served(self) -> int:
        """How many connections from other hosts its supervisor has on ports where a store may be."""
        assert self.process is not None
        found: list[Any] = psutil.Process(self.process.pid).net_connections("tcp")
        listening = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
        return sum(
            each.laddr.port in listening and each.status == psutil.CONN_ESTABLISHED
            for each in found
        )

    def served(self) -> int:
        """How many connections there are to the job's store on this host, which a separate process may serve."""
        assert self.process is not None
        found = 0
        for table in ("tcp", "tcp6"):  # of the host's network namespace
            for line in Path(f"/proc/{self.process.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                found += state == "01" and int(local.rpartition(":")[2], 16) == PORT
        return found

    def connections(self) -> tuple[int, int]:
        """How many connections its supervisor has on ports where it listens, and how many others."""
        assert self.process is not None
        proc = Path(f"/proc/{self.process.pid}")
        own = set()
        for fd in proc.glob("fd/*"):
            with contextlib.suppress(OSError):
                own.add(os.readlink(fd))
        ports, peers = set(), []
        for table in ("tcp", "tcp6"):  # of its own network namespace
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *more = line.split()
                if f"socket:[{more[5]}]" not in own:
                    continue
                port = local.rpartition(":")[2]
                if state == "0A":
                    ports.add(port)
                elif state == "01":
                    peers.append(port)
        served = sum(port in ports for port in peers)
        return served, len(peers) - served

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# -- faults ---------------------------------------------------------------------------------------


def kill_worker(host: Host, network: Network) -> None:
    worker = host.worker()
    assert worker is not None, [_words(process) for process in host.tree()]
    worker.send_signal(signal.SIGKILL)


def kill_supervisor(host: Host, network: Network) -> None:
    assert host.process is not None
    host.process.send_signal(signal.SIGKILL)
    host.process.wait(20)
    host.start()


def preempt(host: Host, network: Network) -> None:
    assert host.process is not None
    host.process.send_signal(signal.SIGTERM)
    host.process.wait(30)
    host.start()


def stop_and_continue(host: Host, network: Network) -> None:
    stopped = []
    for process in host.tree():
        with contextlib.suppress(psutil.Error):
            process.suspend()
            stopped.append(process)
    time.sleep(LEASE * 1.6)
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.resume()


def stop_supervisor_only(host: Host, network: Network) -> None:
    assert host.process is not None
    host.process.send_signal(signal.SIGSTOP)
    time.sleep(LEASE * 1.6)
    host.process.send_signal(signal.SIGCONT)


def cut_cable(host: Host, network: Network) -> None:
    network.cable(host.index, "down")
    time.sleep(LEASE * 1.6)
    network.cable(host.index, "up")


def blink(host: Host, network: Network) -> None:
    """Cut the cable for less than the lease: no host is lost."""
    network.cable(host.index, "down")
    time.sleep(LEASE * 0.3)
    network.cable(host.index, "up")


Fault = Callable[[Host, Network], None]

# Each strikes one host.
FAULTS: dict[str, Callable[[Host, Network], None]] = {
    "kill a worker": kill_worker,
    "kill a supervisor": kill_supervisor,
    "preempt a node": preempt,
    "stop a host": stop_and_continue,
    "stop a supervisor": stop_supervisor_only,
    "cut a cable": cut_cable,
    "a cable blinks": blink,
}
# These strike several.
TWO, TWICE = "kill two supervisors at once", "kill the store's node twice in a row"
ROLLING, HASTY = "restart all nodes in turn", "restart all nodes in turn, in haste"
# After these the job need not restart.
HARMLESS = {"a cable blinks", "stop a supervisor"}

Blow = tuple[str, Callable[[], None]]


def blows(name: str, hosts: list[Host], network: Network, rng: random.Random) -> Iterator[Blow]:
    """The blows of a fault: what each strikes, and how. After each the job must be whole again."""
    host = rng.choice(hosts)
    if name in FAULTS:
        yield f"host {host.index}", partial(FAULTS[name], host, network)
    elif name == TWO:
        victims = rng.sample(hosts, 2)
        yield f"hosts {sorted(each.index for each in victims)}", partial(kill_together, victims)
    elif name == TWICE:
        for _ in range(2):
            server = max(hosts, key=lambda each: each.served())
            yield f"host {server.index}", partial(kill_supervisor, server, network)
    elif name == ROLLING:
        for each in hosts:
            yield f"host {each.index}", partial(preempt, each, network)
    else:
        yield "all hosts", partial(preempt_all, hosts, network)


def kill_together(victims: list[Host]) -> None:
    for host in victims:
        assert host.process is not None
        host.process.send_signal(signal.SIGKILL)
    for host in victims:
        assert host.process is not None
        host.process.wait(20)
        host.start()


def preempt_all(hosts: list[Host], network: Network) -> None:
    """Preempt each host as soon as the previous one has reached the job's store again, whether or not it is in a round.

    (Any sooner, and no node of the job would be left: a new job would start, with generations from 0.)
    """
    for host in hosts:
        preempt(host, network)
        deadline = time.monotonic() + PATIENCE
        while not any(host.connections()) and time.monotonic() < deadline:
            time.sleep(0.02)


def soak(faults: int, seed: int, patience: float, progress: Progress) -> dict[str, Any]:
    rng = random.Random(seed)
    random.seed(seed)
    folder = Path(tempfile.mkdtemp(prefix="rally-soak-"))
    (folder / "train.py").write_text(TRAIN)
    notes = Notes(folder / "notes.jsonl")
    mark = f"soak-{os.getpid()}"
    hangs: list[str] = []
    times: dict[str, list[float]] = defaultdict(list)
    struck: Counter[str] = Counter()
    with Network(HOSTS) as network:
        hosts = [Host(index, network, folder, mark) for index in range(HOSTS)]
        try:
            for host in hosts:
                host.start()
            if not _wait_until_whole(notes, -1, hosts, patience):
                raise SystemExit(f"the job did not start: see {folder}")
            kinds = [*FAULTS, TWO, TWICE, ROLLING, HASTY]
            for number in range(faults):
                name = rng.choice(kinds)
                for whom, strike in blows(name, hosts, network, rng):
                    time.sleep(rng.uniform(0.0, 0.5))
                    notes.read()
                    before, committed = notes.whole(), notes.all_committed
                    strike()
                    mended = time.monotonic()
                    harmless = committed if name in HARMLESS else None
                    if not _wait_until_whole(notes, before, hosts, patience, harmless):
                        hangs.append(f"fault {number}: {name} on {whom}")
                        break
                    times[name].append(time.monotonic() - mended)
                    ended = [each.index for each in hosts if not each.alive()]
                    if ended:
                        hangs.append(f"fault {number}: {name}: supervisors of {ended} have ended")
                        break
                struck[name] += 1
                if hangs:
                    break
                progress.step(f"{name}, last on {whom}")
            for host in hosts:
                if host.alive():
                    assert host.process is not None
                    host.process.send_signal(signal.SIGINT)
            for host in hosts:
                assert host.process is not None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    host.process.wait(30)
            time.sleep(2)
        finally:
            left = processes_with(MARK, mark)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
    good = not hangs and not notes.below and not left
    if good:
        shutil.rmtree(folder)
    return {
        "faults": sum(struck.values()),
        "kinds": dict(struck),
        "hangs": hangs,
        "resumes_below_a_committed_step": notes.below,
        "processes_left": len(left),
        "generations": max(notes.first_commit, default=-1) + 1,
        "steps_committed": notes.all_committed,
        "seconds_until_all_hosts_train_again": {k: spread(v) for k, v in sorted(times.items())},
        "folder": None if good else str(folder),
        "passed": good,
    }


def _wait_until_whole(
    notes: Notes,
    after: int,
    hosts: list[Host],
    patience: float,
    steps_beyond: int | None = None,
) -> bool:
    """Wait until a generation after ``after`` trains with all hosts (or the same one continues, if that is allowed)."""
    deadline = time.monotonic() + patience
    quiet_since = time.monotonic()
    while time.monotonic() < deadline:
        notes.read()
        if notes.whole() > after:
            newest = max(notes.resumed, default=-1)
            if newest == notes.whole():
                return True
        elif (
            steps_beyond is not None
            and notes.all_committed > steps_beyond + 5
            and max(notes.resumed) == after
            and time.monotonic() - quiet_since > 2 * LEASE
        ):
            return True
        time.sleep(0.02)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="time limit in seconds; raise it on a busy machine",
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if not available():
        print("needs root and iproute2 for network namespaces", file=sys.stderr)
        return 2
    # A script's background jobs ignore Ctrl-C, and the launchers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    progress = Progress(args.faults)
    result = soak(args.faults, args.seed, args.patience, progress)
    progress.close()
    document = {
        "machine": machine(),
        "seed": args.seed,
        "lease_seconds": LEASE,
        "patience_seconds": args.patience,
        "seconds": round(time.monotonic() - started, 1),
        **result,
    }
    publish(document, args.output)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""A series of random faults on a session whose number of nodes changes; every sample must count once per epoch; prints JSON.

    python bench/soak_resizes.py --faults 20
    python bench/soak_resizes.py --faults 200 --output bench/results/soak_resizes.json

Four hosts (network namespaces, which need root and iproute2) with a supervisor and two workers each run a session that continues
with two to four of them (``in_place=True``, ``elastic.Sampler``, checkpoints). Faults are those of soak_session_nodes.py, but a
killed or preempted host returns at once, after 3 s or after 8 s. Meanwhile the others continue with fewer ranks, then with more.

Each sample adds 1 to its own number in the model, on whichever rank it is trained. At the end each must equal the number of
epochs, and all ranks must have the same model and optimizer, bit by bit. The exit code is 1 if not, if anything hangs, or if a
process is left. See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
from hosts import Network, address, available, processes_with
from jobs import RALLY, Progress, machine, publish, spread
from soak_elastic import HOSTS, LEASE, MARK, PORT, Host, cut_cable, stop_and_continue
from soak_session_nodes import (
    KINDS,
    PATIENCE,
    STEP_TIMEOUT,
    WORKERS_PER_HOST,
    kill_a_worker,
    stop_worker,
    wait,
)


SAMPLES = 1024
# Seconds until a host returns.
ABSENCES = (0.0, 0.0, 3.0, 8.0)

TRAIN = """
import hashlib, json, os, sys, time
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, samples, keep = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(samples))
        self.other = torch.nn.Linear(8, 1000)
    def forward(self, ids):
        return self.counts[ids].sum(), self.other(ids[:, None].expand(-1, 8) / samples).square().mean()

net = DistributedDataParallel(Net())
counting = torch.optim.SGD([net.module.counts], lr=1.0)
training = torch.optim.Adam(net.module.other.parameters())
sampler = elastic.Sampler(samples, batch_size=64 if keep == "global" else 16, keep=keep)
loader = torch.utils.data.DataLoader(range(samples), batch_sampler=sampler)
session = elastic.session(net, counting, training, checkpoint=f"{folder}/checkpoints", checkpoint_every=25)
session.on_resize(lambda before, now: None, in_place=True)
with session:
    for epoch in session.epochs(1_000_000):
        for ids in session.batches(loader):
            with session.step():
                count, loss = net(ids)
                (loss - count * dist.get_world_size()).backward()
                counting.step()
                training.step()
                counting.zero_grad()
                training.zero_grad()
            with open(f"{folder}/at {os.getpid()}", "w") as file:
                file.write(str(session.position))
            time.sleep(0.01)
        def over():
            stop = torch.tensor([float(os.path.exists(f"{folder}/stop"))])
            dist.all_reduce(stop)
            session.local["stop"] = bool(stop.item())
        session.run(over)
        if session.local["stop"]:
            break
    bits = hashlib.sha256()
    optimizer = [state["exp_avg_sq"] for state in training.state_dict()["state"].values()]
    for tensor in (*net.parameters(), *optimizer):
        bits.update(tensor.detach().contiguous().numpy().tobytes())
    counts = net.module.counts.detach()
    end = [epoch + 1, counts.min().item(), counts.max().item(), session.position, bits.hexdigest()]
with open(f"{folder}/end {dist.get_rank()} of {dist.get_world_size()}", "w") as file:
    json.dump(end, file)
dist.destroy_process_group()
"""


class ComingHost(Host):
    """A host whose workers are in a session of two to four nodes."""

    def __init__(
        self, index: int, network: Network, folder: Path, mark: str, keep: str, spares: int
    ) -> None:
        super().__init__(index, network, folder, mark)
        self._script = [str(folder / "train.py"), str(folder), str(SAMPLES), keep]
        self._spares = spares

    def words(self) -> list[str]:
        endpoint = ",".join(f"{address(i)}:{PORT}" for i in range(HOSTS))
        conf = f"lease={LEASE},last_call_timeout=1,join_timeout=120"
        return [
            *RALLY,
            *("--nnodes", f"2:{HOSTS}", "--nproc-per-node", str(WORKERS_PER_HOST)),
            *("--rdzv-endpoint", endpoint, "--rdzv-conf", conf, "--insecure"),
            *("--max-restarts", "100000", "--max-losses", "100000", "--shutdown-timeout", "5"),
            *("--spares", str(self._spares), "--step-timeout", str(STEP_TIMEOUT)),
            *self._script,
        ]


class Park:
    """The hosts, some of which are due to return."""

    def __init__(self, hosts: list[ComingHost], network: Network, rng: random.Random) -> None:
        self.hosts, self._network, self._rng = hosts, network, rng
        self._due: dict[ComingHost, float] = {}
        self.returned = 0

    @property
    def present(self) -> list[ComingHost]:
        return [host for host in self.hosts if host not in self._due and host.alive()]

    @property
    def is_complete(self) -> bool:
        return len(self.present) == HOSTS

    def bring_back(self) -> None:
        """Start hosts that are due, and those that left on their own (workers were killed before they had met the others)."""
        for host in self.hosts:
            if host not in self._due and not host.alive():
                host.start()
                self.returned += 1
        for host, at in list(self._due.items()):
            if time.monotonic() >= at:
                del self._due[host]
                host.start()

    def take(self, hosts: list[ComingHost], number: signal.Signals) -> None:
        """Kill or preempt hosts at the same time."""
        for host in hosts:
            assert host.process is not None
            host.process.send_signal(number)
        for host in hosts:
            assert host.process is not None
            host.process.wait(40)
            self._due[host] = time.monotonic() + self._rng.choice(ABSENCES)

    def strike(self, name: str) -> None:
        """Cause one fault. At least one host is left alone, since otherwise a new job would start."""
        present = self._rng.sample(self.present, len(self.present))
        host, others = present[0], present[1:]
        match name:
            case "kill a worker":
                kill_a_worker(host, self._network)
            case "kill two workers":
                for each in present[:2]:
                    kill_a_worker(each, self._network)
            case "stop a worker":
                stop_worker(host, self._network)
            case "kill a supervisor" if others:
                self.take([host], signal.SIGKILL)
            case "kill two supervisors" if len(others) > 1:
                self.take([host, others[0]], signal.SIGKILL)
            case "kill the store's node" if others:
                self.take([max(present, key=lambda each: each.served())], signal.SIGKILL)
            case "kill a worker and a supervisor" if others:
                kill_a_worker(others[0], self._network)
                self.take([host], signal.SIGKILL)
            case "preempt a node" if others:
                self.take([host], signal.SIGTERM)
            case "stop a host" if others:
                stop_and_continue(host, self._network)
            case "cut a cable" if others:
                cut_cable(host, self._network)


def trains(folder: Path, park: Park, since: int, nodes: int = 2) -> bool:
    """Wait until workers of ``nodes`` nodes have completed a step after ``since`` (by the clock of file times)."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        park.bring_back()
        fresh = [path for path in folder.glob("at *") if path.stat().st_mtime_ns > since]
        if len(fresh) >= nodes * WORKERS_PER_HOST:
            return True
        time.sleep(0.01)
    return False


def run(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="rally-soak-"))
    (folder / "train.py").write_text(TRAIN)
    mark = f"soak-{os.getpid()}"
    rng = random.Random(options.seed)
    random.seed(options.seed)
    struck: Counter[str] = Counter()
    times: dict[str, list[float]] = defaultdict(list)
    hangs: list[str] = []
    with Network(HOSTS) as network:
        hosts = [
            ComingHost(index, network, folder, mark, options.keep, options.spares)
            for index in range(HOSTS)
        ]
        park = Park(hosts, network, rng)
        try:
            for host in hosts:
                host.start()
            if not trains(folder, park, 0):
                raise SystemExit(f"the job did not start: see {folder}")
            for number in range(options.faults):
                time.sleep(rng.uniform(0.0, 1.0))  # a bench may wait by the clock
                park.bring_back()
                name = rng.choice(KINDS)
                park.strike(name)
                at, began = time.time_ns(), time.monotonic()
                struck[name] += 1
                progress.step(f"fault {number}: {name}; {len(park.present)} hosts")
                if rng.random() < 0.25:
                    continue  # the next one while this one is being recovered from
                if not trains(folder, park, at):
                    hangs.append(f"fault {number}: {name}")
                    break
                times[name].append(time.monotonic() - began)
            if not hangs:
                while not park.is_complete:
                    park.bring_back()
                    time.sleep(0.05)
                # A host that arrives after the job has ended would wait for another one.
                if not trains(folder, park, time.time_ns(), HOSTS):
                    hangs.append("behind the last fault")
            (folder / "stop").touch()
            codes = [] if hangs else [wait(host, PATIENCE) for host in hosts]
        finally:
            left = processes_with(MARK, mark)
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
    logs = "".join((folder / f"host{index}.log").read_text() for index in range(HOSTS))
    ends = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("end *"))}
    return {
        "faults": sum(struck.values()),
        "kinds": dict(struck),
        "hangs": hangs,
        "seconds_to_the_next_steps": {k: spread(v) for k, v in sorted(times.items())},
        "codes": codes,
        "left": len(left),
        "nodes_that_left_by_themselves": park.returned,
        "changes_of_size": logs.count(" ranks go on instead of "),
        "restarts_of_all": logs.count("; restarting all workers"),
        "ends": ends,
        "folder": str(folder),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50, help="how many (50)")
    parser.add_argument("--spares", type=int, default=0, help="per node (0)")
    parser.add_argument(
        "--keep", choices=("global", "local"), default="global", help="which batch stays (global)"
    )
    parser.add_argument("--seed", type=int, default=7, help="of instants, kinds and victims (7)")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    if not available():
        raise SystemExit("needs root and iproute2")
    found = run(options, Progress(options.faults))
    ends = list(found.pop("ends").values())
    is_whole = bool(ends) and all(end[0] == end[1] == end[2] for end in ends)
    is_equal = len(ends) >= 2 * WORKERS_PER_HOST and len({end[4] for end in ends}) == 1
    good = is_whole and is_equal and not found["hangs"] and not found["left"]
    if good:
        shutil.rmtree(found.pop("folder"))
    result = {
        "benchmark": "soak_resizes",
        "machine": machine(),
        **{name: getattr(options, name) for name in ("keep", "spares", "seed")},
        **found,
        "epochs": ends[0][0] if ends else 0,
        "steps": ends[0][3] if ends else 0,
        "ranks_at_the_end": len(ends),
        "targets": [
            {"what": "every sample counts once in every epoch", "holds": is_whole},
            {"what": "all ranks end alike, bit by bit", "holds": is_equal},
            {"what": "no fault is followed by a standstill", "holds": not found["hangs"]},
            {"what": "no process is left", "holds": not found["left"]},
        ],
    }
    return 1 if publish(result, options.output) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())

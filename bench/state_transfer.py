"""How fast a lost worker's state arrives, compared with a bare copy and socket, and what sending costs the survivor; prints JSON.

    python bench/state_transfer.py --quick
    python bench/state_transfer.py --output bench/results/state_transfer.json

DistributedDataParallel and Adam, 100 million parameters, two workers: on one host, and on two (network namespaces, which need
root and iproute2; without them, this part is left out). One worker is killed in its step, repeatedly in the same job, and the
other one sends the state. For comparison, as many bytes are copied as often from one process to another through shared memory,
and sent from one host to the other over a plain TCP connection, into newly allocated memory, as in a replacement.
The growth of the survivor's resident memory is measured while it sends. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from hosts import Network, address, available
from jobs import RALLY, Job, Progress, adopt_orphans, machine, publish, spread


SMALL = (1000, 10)
LARGE = (2000, 25)  # 100 million parameters
GIVE_UP = 120.0
PORT = 29517
# MiB: DistributedDataParallel's, by default.
BUCKET = 25
HALF = 0.5

TRAIN = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from rallypoint import elastic
from torch.nn.parallel import DistributedDataParallel as DDP

folder, width, depth, turns = Path(sys.argv[1]), *map(int, sys.argv[2:5])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
net = DDP(torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth))))
optimizer = torch.optim.Adam(net.parameters())
x = torch.ones(8, width)
EVERY = 4
with elastic.session(net, optimizer) as session:
    rank = dist.get_rank()
    while session.position < EVERY * (turns + 1):
        with session.step():
            turn, place = divmod(session.position, EVERY)
            if turn and not place and rank == 1 and not (folder / f"held{turn}").exists():
                (folder / f"held{turn}").write_text(str(os.getpid()))
                time.sleep(600)  # it is killed
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            (folder / "survivor").write_text(str(os.getpid()))
"""

# One process writes shared memory, and the other one copies it into its own memory.
COPY = """
import mmap, os, sys, time
import numpy
size, step = int(sys.argv[1]), 16 << 20
shared = numpy.frombuffer(mmap.mmap(-1, size), numpy.uint8)
source = numpy.ones(size, numpy.uint8)
(ready, tell), (done, finish) = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(tell)
    target = numpy.empty(size, numpy.uint8)
    for start in range(0, size, step):
        assert os.read(ready, 1)
        target[start : start + step] = shared[start : start + step]
    os.write(finish, b"x")
    os._exit(0)
# Whoever is left alone notices.
os.close(ready), os.close(finish)
began = time.perf_counter()
for start in range(0, size, step):
    shared[start : start + step] = source[start : start + step]
    os.write(tell, b"x")
assert os.read(done, 1)
print(time.perf_counter() - began)
"""
RECEIVE = """
import socket, sys, time
import numpy
size = int(sys.argv[1])
with socket.create_server((sys.argv[2], int(sys.argv[3]))) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
view = memoryview(numpy.empty(size, numpy.uint8))
connection.sendall(b"x")
began, at = time.perf_counter(), 0
while at < size:
    got = connection.recv_into(view[at:])
    assert got
    at += got
print(time.perf_counter() - began)
"""
SEND = """
import socket, sys
import numpy
size = int(sys.argv[1])
view = memoryview(numpy.ones(size, numpy.uint8))
connection = socket.create_connection((sys.argv[2], int(sys.argv[3])))
assert connection.recv(1)
connection.sendall(view)
assert not connection.recv(1)
"""


# -- the comparisons --------------------------------------------------------------------------------


def bare_copy(size: int) -> float:
    command = [sys.executable, "-c", COPY, str(size)]
    return float(subprocess.run(command, capture_output=True, check=True, timeout=GIVE_UP).stdout)


def bare_socket(size: int, network: Network) -> float:
    words = [str(size), address(0), str(PORT)]
    receiver = subprocess.Popen(
        network.command(0, [sys.executable, "-c", RECEIVE, *words]), stdout=subprocess.PIPE
    )
    with receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = network.command(1, [sys.executable, "-c", SEND, *words])
        subprocess.run(sender, check=True, timeout=GIVE_UP)
        return float(receiver.stdout.read())


# -- a session ------------------------------------------------------------------------------------


def wait_for(path: Path, jobs: list[Job]) -> str:
    deadline = time.monotonic() + GIVE_UP
    while not path.exists() or not path.read_text():
        if time.monotonic() > deadline or any(each.popen.poll() is not None for each in jobs):
            said = "\n".join(each.stderr.read_text()[-2000:] for each in jobs)
            raise SystemExit(f"{path.name} does not come:\n{said}")
        time.sleep(0.002)  # a bench may poll what it measures
    return path.read_text()


def recoveries(folder: Path) -> list[dict[str, Any]]:
    found = [
        json.loads(line)
        for file in folder.glob("events*")
        for line in file.read_text().rpartition("\n")[0].splitlines()
    ]
    return [each for each in found if each["kind"] == "session_recovered"]


def kill_one(folder: Path, turn: int, jobs: list[Job]) -> int:
    """Kill the worker with rank 1, which waits in a step. Returns how much the other one's memory grew while it sent."""
    victim = int(wait_for(folder / f"held{turn}", jobs))
    survivor = psutil.Process(int(wait_for(folder / "survivor", jobs)))
    time.sleep(1.0)  # by then the survivor also waits for it
    os.kill(victim, signal.SIGKILL)
    seen, deadline = [(time.monotonic(), survivor.memory_info().rss)], time.monotonic() + GIVE_UP
    # A bench may poll what it measures.
    while len(done := [each for each in recoveries(folder) if each["bytes_received"]]) < turn:
        if time.monotonic() > deadline:
            raise SystemExit(f"no state arrives:\n{jobs[0].stderr.read_text()[-2000:]}")
        time.sleep(0.003)
        seen.append((time.monotonic(), survivor.memory_info().rss))
    began = seen[-1][0] - done[-1]["transferred"]
    before = [size for at, size in seen if at <= began][-1]
    return max(size for at, size in seen if at >= began) - before


def session(shape: tuple[int, int], kills: int, network: Network | None, progress: Progress) -> Any:
    """A job in which workers are killed."""
    where = "one host" if network is None else "two hosts"
    with tempfile.TemporaryDirectory() as path, ExitStack() as stack:
        folder = Path(path)
        (folder / "train.py").write_text(TRAIN)
        script = [str(folder / "train.py"), path, *map(str, shape), str(kills)]
        jobs = []
        for host in range(1 if network is None else 2):
            (folder / f"host{host}").mkdir()
            words = [*RALLY, "--max-losses", "1000"]
            if network is None:
                words += ["--nproc-per-node", "2", *script]
            else:
                words += ["--nnodes", "2:2", "--rdzv-endpoint", f"{address(0)}:{PORT}"]
                words = network.command(host, [*words, "--insecure", *script])
            job = Job(
                words,
                folder / f"host{host}",
                RALLY_EVENTS=str(folder / f"events{host}"),
                TMPDIR=str(folder / f"host{host}"),
                **({} if network is None else {"GLOO_SOCKET_IFNAME": "eth0"}),
            )
            stack.callback(job.clean_up)
            jobs.append(job)
        grown = []
        for turn in range(1, kills + 1):
            progress.step(f"{where}: kill {turn}")
            grown.append(kill_one(folder, turn, jobs))
        for job in jobs:
            if job.wait(GIVE_UP) != 0:
                raise SystemExit(job.stderr.read_text()[-2000:])
        came = [each for each in recoveries(folder) if each["bytes_received"]]
    return {
        "bytes": max(each["bytes_received"] for each in came),
        "transfer_s": spread([each["transferred"] for each in came]),
        "survivor_grew_mib": spread([each / 2**20 for each in grown], 1),
    }


# -- command --------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one kill, 10 million parameters")
    parser.add_argument("--kills", type=int, default=5, help="of each job (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    adopt_orphans()
    shape, kills = (SMALL, 1) if options.quick else (LARGE, options.kills)
    result: dict[str, Any] = {"benchmark": "state_transfer", "machine": machine()}
    result["targets"] = targets = []
    with ExitStack() as stack:
        network = stack.enter_context(Network(2)) if available() else None
        progress = Progress(2 * kills * (1 if network is None else 2))
        for name, hosts in (("one_host", None), ("two_hosts", network)):
            if name == "two_hosts" and hosts is None:
                continue
            row = result[name] = session(shape, kills, hosts, progress)
            bare = []
            for number in range(1, kills + 1):
                progress.step(f"{name.replace('_', ' ')}: bare {number}")
                size = row["bytes"]
                bare.append(bare_copy(size) if hosts is None else bare_socket(size, hosts))
            row["bare_s"] = spread(bare)
            share = statistics.median(bare) / row["transfer_s"]["median"]
            what = "a bare copy through shared memory" if hosts is None else "a bare TCP connection"
            holds = None if options.quick else share >= HALF
            targets.append(
                {
                    "what": f"state arrives at half the speed of {what} or more",
                    "value": round(share, 2),
                    "holds": holds,
                }
            )
            more = row["survivor_grew_mib"]["max"]
            targets.append(
                {
                    "what": f"{name.replace('_', ' ')}: the survivor's memory grows by a bucket ({BUCKET} MiB) at most while it sends, MiB",
                    "value": more,
                    "holds": None if options.quick else more <= BUCKET,
                }
            )
        progress.close()
    return 1 if publish(result, options.output) else 0


if __name__ == "__main__":
    sys.exit(main())

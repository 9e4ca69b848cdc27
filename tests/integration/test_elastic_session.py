"""Sessions: workers are killed, and the others keep their processes; the result equals that of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic import listens, wait_until
from ports import free_port
from supervisors import Popen, run


pytestmark = pytest.mark.integration

SCRIPT = """
import hashlib, json, os, pathlib, random, signal, sys, threading, time, warnings
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
# [step, rank, where]: each happens once. Rank -1: that of the node which serves the store.
FAULTS = json.loads(sys.argv[2])

def supervisor():
    pid = os.getpid()
    while b"rallypoint run" not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" "):
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid

def fault(where):
    for number, (step, rank, at) in enumerate(FAULTS):
        if at != where or step != session.position:
            continue
        if rank == -1 and supervisor() == int((FOLDER / "serves").read_text()):
            rank = dist.get_rank()
        if rank != dist.get_rank():
            continue
        try:
            with open(FOLDER / f"fault {number}", "x") as file:
                file.write(str(rank))
        except FileExistsError:
            continue
        if where == "raise":
            raise ValueError("a bad batch")
        if where == "hang":
            threading.Event().wait()
        if where == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if where in {"node", "node behind", "leave"}:
            os.kill(supervisor(), signal.SIGTERM if where == "leave" else signal.SIGKILL)
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)

def left_behind():
    return sum(each.name == "rally-elastic-disposal" for each in threading.enumerate())

torch.manual_seed(0)
torch.set_num_threads(1)  # as many on every number of nodes, or sums come out differently
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
(FOLDER / f"supervisor of {rank}").write_text(str(supervisor()))
while (FOLDER / "wait").exists():
    time.sleep(0.02)
# What a set-up does: the newcomer gets the same answers.
told = [{"run": f"of rank {rank}"}]
dist.broadcast_object_list(told)
assert told == [{"run": "of rank 0"}], told
everybody = [None] * size
dist.all_gather_object(everybody, rank)
assert everybody == list(range(size)), everybody
total = torch.tensor([float(rank)])
dist.all_reduce(total)
assert total.item() == sum(range(size))
scattered = torch.zeros(1)
dist.scatter(scattered, [torch.tensor([10.0 * r]) for r in range(size)] if rank == 0 else None)
assert scattered.item() == 10.0 * rank
pair = dist.new_group([0, 1])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)  # DDP does not count it
        self.first = torch.nn.Linear(16, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.last = torch.nn.Linear(32, 4)
    def forward(self, x):
        return self.last(torch.nn.functional.dropout(self.norm(self.first(self.frozen(x))).relu(), 0.2))

net = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
# Changes behind a step's last collective, and counts that in a buffer.
average = torch.optim.swa_utils.AveragedModel(net.module)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
early = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=18)  # stepped before anything communicates
data = torch.utils.data.TensorDataset(torch.randn(100, 16), torch.randint(4, (100,)))
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
torch.manual_seed(100 + rank)
random.seed(rank)
seen, scores, pid = [], [], os.getpid()
with elastic.session(net, optimizer, scheduler, early, average) as session:
    net.module.first.weight.register_post_accumulate_grad_hook(lambda _: fault("backward"))
    optimizer.register_step_pre_hook(lambda *_: fault("optimizer"))
    optimizer.register_step_pre_hook(lambda *_: fault("node behind"))
    optimizer.register_step_post_hook(lambda *_: fault("after"))
    for epoch in session.epochs(2):
        for x, y in session.batches(loader):
            with session.step():
                with warnings.catch_warnings(action="ignore"):
                    early.step()
                fault("forward")
                fault("raise")
                fault("hang")
                fault("stop")
                fault("node")
                fault("leave")
                session.local["sum"] = session.local.get("sum", rank) * 0.9 + x.sum().item()
                session.local.setdefault("steps", []).append(session.position)
                loss = torch.nn.functional.cross_entropy(net(x) * (1 + random.random()), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                average.update_parameters(net.module)
            fault("between")
        def score():
            fault("validation")
            value = torch.tensor([sum(p.sum().item() for p in net.parameters())])
            dist.all_reduce(value)
            if rank < 2:
                dist.broadcast(value, 0, group=pair)
            return value.item()
        scores.append(session.run(score))
    kept = (*net.parameters(), *net.buffers(), *average.parameters(), *average.buffers())
    bits = b"".join(t.detach().numpy().tobytes() for t in kept)
    state = optimizer.state_dict()["state"]
    bits += b"".join(each["exp_avg_sq"].numpy().tobytes() for each in state.values())
    end = {
        "steps": session.position,
        "bits": hashlib.sha256(bits).hexdigest(),
        "random": [torch.rand(1).item(), random.random()],
        "rate": scheduler.get_last_lr(),
        "score": scores[-1],
        "local": session.local,
        "pid": pid,
        "recoveries": len(session.history),
        # Where Gloo has lost a message, a group's threads and descriptors stay until its time-out.
        "threads": len(os.listdir("/proc/self/task")) - 4 * left_behind(),
        "files": len(os.listdir("/proc/self/fd")) - 3 * left_behind(),
    }
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""


def trained(
    folder: Path, faults: object, *flags: str, script: str = SCRIPT
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(script)
    done = run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "3"),
            *("--preload", "torch._dynamo", *flags, str(path), str(folder), json.dumps(faults)),
        ],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "RALLY_LOG"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    ends = [folder / f"end {rank}" for rank in range(3)]
    return done, [json.loads(end.read_text()) for end in ends if end.exists()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    done, ends = trained(tmp_path_factory.mktemp("jobs") / "undisturbed", [])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return ends


def assert_same_end(ends: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, (end, wanted) in enumerate(zip(ends, expected, strict=True)):
        for what in ("steps", "bits", "random", "rate", "score", "local"):
            assert end[what] == wanted[what], f"rank {rank}: {what}"


def test_killed_workers_are_replaced_and_nothing_else_changes(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    faults = [
        (0, 1, "forward"),
        (1, 2, "backward"),
        (5, 0, "optimizer"),
        (6, 0, "after"),
        (9, 1, "between"),
        (10, 2, "validation"),
        (14, 0, "backward"),
        (14, 1, "forward"),
        (21, 1, "validation"),
    ]
    done, ends = trained(tmp_path / "job", faults)
    assert done.returncode == 0, done.stderr
    assert_same_end(ends, undisturbed)
    assert done.stderr.count("takes its place, the others keep theirs") == len(faults)
    assert "rank 0 was killed by SIGKILL" in done.stderr


def test_survivors_keep_their_process_and_leak_nothing(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    faults = [(step, 1, "forward") for step in (3, 7, 11, 15, 19)]
    done, ends = trained(tmp_path / "job", faults)
    assert done.returncode == 0, done.stderr
    assert_same_end(ends, undisturbed)
    assert [end["recoveries"] for end in ends] == [5, 1, 5]
    for end, calm in zip((ends[0], ends[2]), (undisturbed[0], undisturbed[2]), strict=True):
        assert end["threads"] <= calm["threads"] + 1
        assert end["files"] <= calm["files"] + 2


def test_a_worker_is_replaced_on_each_of_two_nodes(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    # Node 1 has one worker: nobody on it survives.
    faults = [(2, 0, "backward"), (5, 2, "optimizer"), (9, 1, "forward"), (9, 2, "forward")]
    (tmp_path / "train.py").write_text(SCRIPT)
    port = str(free_port())
    nodes = [
        Popen(
            [
                *(sys.executable, "-m", "rallypoint", "run", "--nnodes", "2", "--insecure"),
                *("--node-rank", str(node), "--nproc-per-node", str(2 - node)),
                *("--master-addr", "127.0.0.1", "--master-port", port),
                *("--preload", "torch._dynamo"),
                *(str(tmp_path / "train.py"), str(tmp_path), json.dumps(faults)),
            ],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [each.communicate(timeout=150)[1] for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0], said
    ends = [json.loads((tmp_path / f"end {rank}").read_text()) for rank in range(3)]
    assert_same_end(ends, undisturbed)
    assert "rank 2 on node 1 was killed by SIGKILL; another process takes its place" in said[0]
    for each in said:
        assert each.count("another process takes its place") == len(faults)


def trained_on_nodes(
    folder: Path, faults: list[tuple[int, int, str]], size: str, *, spares: int, late: int = 0
) -> tuple[list[int], list[str], list[dict[str, Any]]]:
    """Three nodes with a worker each, the first of which serves the store; spares; and nodes that come after the first fault."""
    (folder / "train.py").write_text(SCRIPT)
    port = free_port()

    def node() -> subprocess.Popen[str]:
        return Popen(
            [
                *(sys.executable, "-m", "rallypoint", "run", "--nnodes", size, "--insecure"),
                *("--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"),
                *("--rdzv-id", "nodes", "--preload", "torch._dynamo"),
                *(str(folder / "train.py"), str(folder), json.dumps(faults)),
            ],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )

    (folder / "wait").touch()
    started = [node()]
    (folder / "serves").write_text(str(started[0].pid))
    try:
        wait_until(lambda: listens(port), "a store")
        started += [node() for _ in range(2)]
        # The three are in the round before others arrive.
        for rank in range(3):
            wait_until((folder / f"supervisor of {rank}").exists, "a worker")
        started += [node() for _ in range(spares)]
        for each in started[3:]:
            wait_until(lambda pid=each.pid: is_connected(pid, port), "a spare node")
        (folder / "wait").unlink()
        if late:
            wait_until((folder / "fault 0").exists, "a fault")
            started += [node() for _ in range(late)]
        said = [each.communicate(timeout=150)[1] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    ends = [folder / f"end {rank}" for rank in range(3)]
    codes = [each.returncode for each in started]
    return codes, said, [json.loads(end.read_text()) for end in ends if end.exists()]


def is_connected(pid: int, port: int) -> bool:
    found = psutil.Process(pid).net_connections("tcp")
    return any(each.raddr and each.raddr.port == port for each in found)


def assert_taken_over(
    ends: list[dict[str, Any]], wanted: list[dict[str, Any]], said: list[str], lost: list[int]
) -> None:
    for rank, (end, calm) in enumerate(zip(ends, wanted, strict=True)):
        for what in ("steps", "bits", "random", "rate", "score"):
            assert end[what] == calm[what], f"rank {rank}: {what}"
    told = "".join(said)
    for rank in lost:
        assert told.count(f"another process takes its place (rank {rank})") == 2, said
        assert told.count(f"this node takes over rank {rank}") == 1, said
    assert "random state" not in told, said
    assert "restarting" not in told, said


def test_a_lost_node_is_replaced_by_one_that_comes_and_a_preempted_one_by_a_waiting_one(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    # After its last collective: the others complete that step.
    faults = [(9, 1, "leave"), (15, 2, "node behind")]
    codes, said, ends = trained_on_nodes(tmp_path, faults, "3:3", spares=1, late=1)
    assert sorted(codes) == [-signal.SIGKILL, 0, 0, 0, 128 + signal.SIGTERM], said
    assert_taken_over(ends, undisturbed, said, [1, 2])
    assert [end["recoveries"] for end in ends] == [2, 2, 1]


def test_the_node_that_serves_the_store_is_replaced_too(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    codes, said, ends = trained_on_nodes(tmp_path, [(9, -1, "node")], "2:3", spares=1)
    assert codes == [-signal.SIGKILL, 0, 0, 0], said
    lost = int((tmp_path / "fault 0").read_text())
    assert_taken_over(ends, undisturbed, said, [lost])
    assert [end["recoveries"] for end in ends] == [1, 1, 1]


def test_a_worker_that_the_others_wait_for_in_vain_is_ended_and_replaced(
    tmp_path: Path, undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RALLY_EVENTS", str(tmp_path / "events"))
    faults = [(3, 1, "hang"), (6, 2, "stop")]
    done, ends = trained(tmp_path / "job", faults, "--step-timeout", "2")
    assert done.returncode == 0, done.stderr
    assert_same_end(ends, undisturbed)
    assert [end["recoveries"] for end in ends] == [2, 2, 1]
    assert "rank 1 hung; another process takes its place" in done.stderr
    assert "the others waited for it in a collective for 2 s" in done.stderr
    assert "in fault" in done.stderr
    assert "elastic/worker/link.py" not in done.stderr
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    lost = [each for each in told if each["kind"] == "worker_replaced"]
    assert [(each["rank"], each["replaced"], each["error"]) for each in lost] == [
        (1, 1, "hung"),
        (2, 2, "hung"),
    ]
    back = [each for each in told if each["kind"] == "session_recovered"]
    assert [(each["replaced"], each["steps"], each["repeated"]) for each in back] == [
        (1, 3, True),
        (2, 6, True),
    ]


STOPS_ANOTHER = """
(FOLDER / f"pid of {rank}").write_text(str(os.getpid()))
if rank == 1 and os.environ.get("RALLY_TAKES_OVER"):
    time.sleep(1)  # by then the others wait for this process
    os.kill(int((FOLDER / "pid of 2").read_text()), signal.SIGSTOP)
while (FOLDER / "wait")"""


def test_of_those_that_wait_for_a_newcomer_only_one_that_stopped_meanwhile_is_ended(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    script = SCRIPT.replace('\nwhile (FOLDER / "wait")', STOPS_ANOTHER)
    faults = [(3, 1, "forward")]
    done, ends = trained(tmp_path / "job", faults, "--step-timeout", "3", script=script)
    assert done.returncode == 0, done.stderr
    assert_same_end(ends, undisturbed)
    assert "rank 2 hung; another process takes its place" in done.stderr
    pids = [int((tmp_path / "job" / f"pid of {rank}").read_text()) for rank in range(3)]
    assert [end["pid"] for end in ends] == pids
    assert [end["recoveries"] for end in ends] == [1, 1, 1], "in one meeting"


NEEDS_ANOTHER = """
(FOLDER / f"{rank} is {os.getpid()}").touch()
if rank == 1 and os.environ.get("RALLY_TAKES_OVER"):
    [other] = FOLDER.glob("2 is *")
    os.kill(int(other.name.split()[-1]), signal.SIGSTOP)
    while len(list(FOLDER.glob("2 is *"))) == 1:  # until another process takes its place
        time.sleep(0.02)
while (FOLDER / "wait")"""


def test_a_worker_that_hangs_is_ended_while_the_set_up_of_a_newcomer_waits_for_it(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    script = SCRIPT.replace('\nwhile (FOLDER / "wait")', NEEDS_ANOTHER)
    faults = [(3, 1, "forward")]
    done, ends = trained(tmp_path / "job", faults, "--step-timeout", "2", script=script)
    assert done.returncode == 0, done.stderr
    assert_same_end(ends, undisturbed)
    assert "rank 2 hung; another process takes its place" in done.stderr


HANGS_IN_ITS_SET_UP = """
if os.environ.get("RALLY_TAKES_OVER") and not (FOLDER / "hung").exists():
    (FOLDER / "hung").touch()
    threading.Event().wait()
while (FOLDER / "wait")"""


def test_a_newcomer_that_hangs_in_its_set_up_is_ended_and_replaced(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    script = SCRIPT.replace('\nwhile (FOLDER / "wait")', HANGS_IN_ITS_SET_UP)
    faults = [(3, 1, "forward")]
    done, ends = trained(tmp_path / "job", faults, "--step-timeout", "2", script=script)
    assert done.returncode == 0, done.stderr
    assert_same_end(ends, undisturbed)
    assert "rank 1 hung; another process takes its place" in done.stderr
    assert "it used no CPU or storage for 2 s, and the others wait for it to recover" in done.stderr
    assert [end["recoveries"] for end in ends] == [1, 1, 1], "in one meeting"


def test_a_worker_that_raises_is_replaced_once(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    done, ends = trained(tmp_path / "job", [(4, 1, "raise")])
    assert done.returncode == 0, done.stderr
    assert_same_end(ends, undisturbed)
    assert "rank 1 raised ValueError: a bad batch" in done.stderr


def test_the_same_error_at_the_same_step_ends_the_job(tmp_path: Path) -> None:
    done, _ = trained(tmp_path / "job", [(4, 1, "raise"), (4, 1, "raise")])
    assert done.returncode == 1
    assert done.stderr.count("takes its place") == 1
    assert "ValueError: a bad batch" in done.stderr
    assert "\n  not replaced the same error came at the same step before\n" in done.stderr


def test_losses_are_limited(tmp_path: Path) -> None:
    faults = [(step, 1, "forward") for step in (2, 3)]
    done, _ = trained(tmp_path / "job", faults, "--max-losses", "1")
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.count("takes its place") == 1
    why = "--max-losses is used up (1 in 600 s)"
    assert f"\n  not replaced {why}\n" in done.stderr
    (written,) = re.findall(r"  report       (.*)\n", done.stderr)
    assert json.loads(Path(written).read_text())["not_replaced"] == why


def test_a_restart_says_why_a_lost_worker_is_not_replaced(tmp_path: Path) -> None:
    faults = [(2, 1, "forward")]
    done, _ = trained(tmp_path / "job", faults, "--max-losses", "0", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    said = "restarting all workers (attempt 2 of 2); not replaced: --max-losses is 0"
    assert said in done.stderr


def alone(tmp_path: Path, source: str, *command: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(source)
    return run(
        [sys.executable, *command, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )


COUNTS = """
import torch
from rallypoint import elastic

net = torch.nn.Linear(2, 2)
with elastic.session(net) as session:
    for epoch in session.epochs(2):
        for x in session.batches([1, 2, 3]):
            with session.step():
                pass
    print(session.position, session.run(lambda: "scored"), session.history)
"""


def test_without_rally_run_a_session_counts_and_says_so(tmp_path: Path) -> None:
    done = alone(tmp_path, COUNTS)
    assert (done.returncode, done.stdout) == (0, "6 scored ()\n"), done.stderr
    assert done.stderr.count("not started by `rally run`") == 1


def test_a_late_import_is_said(tmp_path: Path) -> None:
    source = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n" + COUNTS
    done = alone(tmp_path, source, "-m", "rallypoint", "run", "--nproc-per-node", "1")
    assert done.returncode == 1
    assert "after `import rallypoint.elastic`" in done.stderr


LATE = """
import os, time
from datetime import timedelta
from rallypoint import elastic
from rallypoint.elastic.communication import connections
import torch.distributed as dist

connections.FORMING = 0.3  # seconds that Gloo waits for a connection
is_late = os.environ["RANK"] == "1"
time.sleep(1.5 * is_late)
dist.init_process_group("gloo")
time.sleep(1.5 * is_late)
dist.barrier(dist.new_group([0, 1]))
time.sleep(4.0 * is_late)
dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
"""


def test_a_rank_may_come_late_to_a_group_within_the_time_out(tmp_path: Path) -> None:
    done = alone(tmp_path, LATE, "-m", "rallypoint", "run", "--nproc-per-node", "2")
    assert done.returncode == 1
    assert "only 1 of 2 ranks came to group '2' within 0.5 s" in done.stderr, done.stderr
    assert "wait timeout after" not in done.stderr


# Bodies with two steps and a validation now and then, then a loop without batches.
BODIES = """
import hashlib, json, os, pathlib, random, signal, sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
FAULTS = json.loads(sys.argv[2])

def fault(where):
    for number, (step, rank, at) in enumerate(FAULTS):
        if (step, rank, at) != (session.position, dist.get_rank(), where):
            continue
        try:
            (FOLDER / f"fault {number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()

def net():
    layers = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
    return DistributedDataParallel(torch.nn.Sequential(*layers))

first, second = net(), net()
optimizers = [torch.optim.Adam(each.parameters()) for each in (first, second)]
data = torch.utils.data.TensorDataset(torch.randn(40, 8))
loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
torch.manual_seed(rank)
random.seed(rank)
scores, losses = {}, []

def train(net, optimizer, x):
    optimizer.zero_grad()
    session.local["sum"] = session.local.get("sum", rank) / 2 + x.sum().item()
    fault("forward")
    loss = (net(x) * random.random()).square().mean()
    loss.backward()
    fault("backward")
    optimizer.step()
    fault("after")
    losses.append(loss.item())

def log():
    if not session.is_rehearsing:
        with (FOLDER / f"log {rank}").open("a") as file:
            print(session.position, losses[-1], file=file)

def score():
    fault("score")
    value = torch.stack([each.detach().sum() for each in first.parameters()]).sum() + torch.rand(1)
    dist.all_reduce(value)
    return value.item()

with elastic.session(first, second, *optimizers) as session:
    for epoch in session.epochs(2):
        session.run(score)
        for (x,) in session.batches(loader):
            x = x + torch.rand(1)
            with session.step():
                train(first, optimizers[0], x)
            log()
            if session.position % 3 == 0:
                at = session.position
                if (value := session.run(score)) is not None:
                    scores[at] = value
            with session.step():
                train(second, optimizers[1], x)
            log()
        session.run(score)
    bits = b"".join(
        t.detach().numpy().tobytes() for each in (first, second) for t in (*each.parameters(), *each.buffers())
    )
    end = {
        "steps": session.position,
        "bits": hashlib.sha256(bits).hexdigest(),
        "random": [torch.rand(1).item(), random.random()],
        "rate": 0,
        "score": session.run(score),
        "scores": scores,
        "local": session.local,
    }
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""


def test_a_body_may_have_several_steps_and_functions(tmp_path: Path) -> None:
    _, calm = trained(tmp_path / "calm", [], script=BODIES)
    faults = [
        *((1, 1, "forward"), (2, 0, "backward"), (6, 2, "score"), (7, 1, "backward")),
        *((8, 0, "after"), (10, 1, "after"), (24, 1, "score"), (31, 2, "forward")),
        (47, 0, "score"),
    ]
    done, ends = trained(tmp_path / "job", faults, "--max-losses", "30", script=BODIES)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "job").glob("fault *"))) == len(faults)
    assert_same_end(ends, calm)
    assert any(end["scores"] for end in ends)
    for rank, (end, wanted) in enumerate(zip(ends, calm, strict=True)):
        assert end["scores"].items() <= wanted["scores"].items()
        lines, all_lines = (
            (tmp_path / name / f"log {rank}").read_text().splitlines() for name in ("job", "calm")
        )
        # In order, and each once; but a rank that was lost just after it wrote a line may repeat that step, with all others.
        once, rest = [line for line, _ in itertools.groupby(lines)], iter(all_lines)
        assert all(line in rest for line in once), (lines, all_lines)
        assert len(lines) - len(once) <= sum(each[1] == rank for each in faults)
        # A rank that did not see the end of a step, which others have completed, lacks that line.
        assert len(all_lines) - len(once) <= len(faults)


# Two loops over batches in each epoch, the first of them left early in epoch 1.
LOOPS = """
import hashlib, json, os, pathlib, signal, sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
FAULTS = json.loads(sys.argv[2])

def fault(where):
    for number, (step, rank, at) in enumerate(FAULTS):
        if (step, rank, at) != (session.position, dist.get_rank(), where):
            continue
        try:
            (FOLDER / f"fault {number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGKILL)

def loader_of(name):
    data = [(name, number, torch.randn(4)) for number in range(15)]
    # Random generators of their own, which go on from epoch to epoch.
    own = torch.Generator().manual_seed(dist.get_rank())
    if name == "labelled":
        return torch.utils.data.DataLoader(data, batch_size=3, shuffle=True, generator=own)
    return torch.utils.data.DataLoader(data, batch_size=3, sampler=torch.utils.data.RandomSampler(data, generator=own))

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
loaders = [loader_of("labelled"), loader_of("unlabelled")]
torch.manual_seed(rank)

def score():
    fault("score")
    value = torch.rand(1)
    dist.all_reduce(value)
    return value.item()

with elastic.session(net, optimizer) as session:
    for epoch in session.epochs(2):
        session.run(score)
        for number, loader in enumerate(loaders):
            for (name, *_), numbers, x in session.batches(loader):
                with session.step():
                    fault("forward")
                    session.local.setdefault("seen", []).append([epoch, name, numbers.tolist()])
                    (net(x) * torch.rand(1)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if session.position == 17:
                    break
            session.run(score)
    bits = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    end = {
        "steps": session.position,
        "bits": hashlib.sha256(bits).hexdigest(),
        "random": [torch.rand(1).item()],
        "rate": 0,
        "score": session.run(score),
        "local": session.local,
    }
(FOLDER / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""


def test_an_epoch_may_have_several_loops_over_batches(tmp_path: Path) -> None:
    _, calm = trained(tmp_path / "calm", [], script=LOOPS)
    names = [name for _, name, _ in calm[0]["local"]["seen"]]
    counts = (("labelled", 5), ("unlabelled", 5), ("labelled", 3), ("unlabelled", 5))
    assert names == [name for name, count in counts for _ in range(count)]
    faults = [
        *((3, 1, "forward"), (6, 0, "score"), (8, 2, "forward"), (10, 0, "forward")),
        *((12, 1, "score"), (13, 2, "score"), (14, 1, "forward"), (17, 0, "score")),
        (20, 2, "forward"),
    ]
    done, ends = trained(tmp_path / "job", faults, script=LOOPS)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "job").glob("fault *"))) == len(faults)
    assert_same_end(ends, calm)


def test_a_loop_of_ones_own_may_run_functions_now_and_then(tmp_path: Path) -> None:
    start, end = BODIES.index("    for epoch in"), BODIES.index("    bits = ")
    script = f"""{BODIES[:start]}
    while session.position < 24:
        with session.step():
            train(first, optimizers[0], data[session.position : session.position + 4][0])
        if session.position % 4 == 1:
            scores[session.position] = session.run(score)
{BODIES[end:]}"""
    _, calm = trained(tmp_path / "calm", [], script=script)
    faults = [
        (5, 0, "score"),
        (3, 2, "backward"),
        (7, 1, "after"),
        (9, 1, "score"),
        (11, 0, "forward"),
    ]
    done, ends = trained(tmp_path / "job", faults, script=script)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "job").glob("fault *"))) == len(faults)
    assert_same_end(ends, calm)


EARLY = """
import os, pathlib, signal, sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
FAULTS = {number: tuple(each.split(".")) for number, each in enumerate(sys.argv[2:])}
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(30, 8), torch.randn(30, 1))
loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True)
inputs, targets = torch.randn(50, 8), torch.randn(50, 1)

def fault(where):
    for number, each in FAULTS.items():
        if each == (str(session.position), str(rank), where):
            try:
                (FOLDER / f"fault {number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

def validate():
    with torch.no_grad():
        total = torch.nn.functional.mse_loss(net.module(inputs), targets)
    fault("before")
    dist.all_reduce(total)
    fault("after")
    loss, local = total.item(), session.local
    local.setdefault("losses", []).append(loss)
    is_better = loss < local.get("best", float("inf"))
    local["best"], local["bad"] = (loss, 0) if is_better else (local["best"], local.get("bad", 0) + 1)
    fault("set")

with elastic.session(net, optimizer) as session:
    for epoch in session.epochs(100):
        for x, y in session.batches(loader):
            with session.step():
                torch.nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            fault("step")
        session.run(validate)
        fault("behind")
        if session.local["bad"] >= 3:
            break
    end = f"{session.position} {session.local} {[each.tolist() for each in net.parameters()]}"
(FOLDER / f"end {rank}").write_text(end)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_decision_by_local_values_is_the_same_after_losses(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EARLY)
    faults = ["3.0.before", "7.1.after", "11.2.set", "12.0.behind", "13.1.step", "15.0.set"]
    ends: dict[str, set[str]] = {}
    for name, words in {"calm": [], "job": faults}.items():
        (folder := tmp_path / name).mkdir()
        launch = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "3"]
        command = [*launch, "--max-losses", "20", str(script), str(folder), *words]
        done = run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        ends[name] = {(folder / f"end {rank}").read_text() for rank in range(3)}
    assert len(list((tmp_path / "job").glob("fault *"))) == len(faults)
    assert ends["job"] == ends["calm"]
    assert len(ends["calm"]) == 1


def test_what_a_loop_of_ones_own_draws_before_a_step_comes_again(tmp_path: Path) -> None:
    begin, _, rest = LOOPS.partition("    for epoch in session.epochs(2):\n")
    script = (
        begin
        + """
    while session.position < 12:
        if session.position in (4, 9):
            session.run(score)
        x = torch.randn(3, 4)
        with session.step():
            fault("forward")
            session.local.setdefault("seen", []).append([x.sum().item(), torch.rand(1).item()])
            net(x).square().mean().backward()
            fault("backward")
            optimizer.step()
            optimizer.zero_grad()
        fault("between")
"""
        + rest[rest.index("    bits =") :]
    )
    _, calm = trained(tmp_path / "calm", [], script=script)
    faults = [
        *((0, 2, "forward"), (2, 1, "backward"), (3, 0, "forward"), (4, 1, "score")),
        *((6, 2, "backward"), (7, 0, "between"), (9, 0, "score"), (11, 1, "forward")),
    ]
    done, ends = trained(tmp_path / "job", faults, script=script)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "job").glob("fault *"))) == len(faults)
    assert_same_end(ends, calm)


def test_a_loop_of_ones_own_goes_on_at_a_step_that_others_have_completed(tmp_path: Path) -> None:
    """Rank 2 skips the rest of step 2, and draws for step 3; when that fails, too, it draws the same again."""
    begin, _, rest = LOOPS.partition("    for epoch in session.epochs(2):\n")
    script = (
        begin
        + """
    import time
    me = dist.get_rank()
    behind = {(2, 2), (3, 1), (3, 2)} if FAULTS else set()
    while session.position < 6:
        x = torch.randn(3, 4)
        with session.step():
            session.local.setdefault("seen", []).append([x.sum().item(), torch.rand(1).item()])
            net(x).square().mean().backward()
            fault("backward")
            here = session.position, me
            if here in behind:
                # Until the next loss: this rank's step fails after the others' part of it.
                behind.discard(here)
                while not (FOLDER / f"fault {session.position - 2}").exists():
                    time.sleep(0.01)
                dist.all_reduce(torch.ones(1))
            optimizer.step()
            optimizer.zero_grad()
"""
        + rest[rest.index("    bits =") :]
    )
    _, calm = trained(tmp_path / "calm", [], script=script)
    faults = [(2, 1, "backward"), (3, 0, "backward")]
    done, ends = trained(tmp_path / "job", faults, script=script)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "job").glob("fault *"))) == len(faults)
    assert_same_end(ends, calm)


# Steps in which no optimizer steps.
SKIPS = """
import sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

KIND = sys.argv[1]
torch.manual_seed(0)
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
if "sharded" in KIND:
    for each in (*net, net):
        fully_shard(each)
else:
    net = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)  # the first steps overflow
skipped = 0
with elastic.session(net, optimizer, scaler) as session:
    while session.position < 12:
        with session.step():
            if "scaler" in KIND:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = net(torch.randn(32, 8)).square().mean()
                before = scaler.get_scale()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                skipped += scaler.get_scale() < before
            else:
                loss = net(torch.randn(32, 8)).square().mean()
                if "skips" in KIND:
                    optimizer.zero_grad(set_to_none=False)
                loss.backward()
                # A rule of the script's own.
                if session.position % 3:
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    skipped += 1
if dist.get_rank() == 0:
    print("skipped", skipped)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "kind", ["scaler", "skips", "sharded skips", "accumulates", "sharded accumulates"]
)
def test_a_step_without_the_optimizers_is_refused_only_if_its_gradients_are_used(
    tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SKIPS)
    words = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", str(script), kind]
    done = run(words, capture_output=True, text=True, timeout=150)
    if "accumulates" in kind:
        assert done.returncode == 1
        assert "all passes of an accumulation into one session.step()" in " ".join(
            done.stderr.split()
        )
    else:
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.split()[1]) >= 3


def test_parameters_that_change_before_a_loss_are_no_state_to_go_on_from(tmp_path: Path) -> None:
    """A sharpness-aware optimizer changes them so between its two passes. In the first step, nothing is known of that."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, pathlib, signal, sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
net = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with elastic.session(net, optimizer) as session:
    while session.position < 4:
        with session.step():
            net(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                for each in net.parameters():
                    each.add_(0.05 * each.grad)
            if session.position == 0 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
    )
    words = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", str(script)]
    done = run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the step failed after it had changed parameters" in " ".join(done.stderr.split())


OWN_LOOPS = """
import sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def train():
    with session.step():  # the place
        net(torch.ones(2, 4) * session.position).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

with elastic.session(net, optimizer) as session:
    KIND = sys.argv[1]
    if KIND == "counts":
        for _ in range(4):
            train()
    elif KIND == "two steps":
        while session.position < 4:
            train()
            train()
    elif KIND == "asks":
        while session.position < 4:
            train()
    else:
        for x in session.batches(range(3)):
            train()
            train()
"""


@pytest.mark.parametrize("kind", ["counts", "two steps", "asks", "batches"])
def test_a_loop_that_counts_its_steps_itself_is_told(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(OWN_LOOPS)
    words = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", str(script), kind]
    done = run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [each for each in done.stderr.splitlines() if "asked for session.position" in each]
    place = OWN_LOOPS[: OWN_LOOPS.index("# the place")].count("\n") + 1
    assert len(told) == (kind in ("counts", "two steps"))
    assert all(f"elastic.session: train.py:{place} begins a step" in each for each in told)


OUTSIDE = """
import sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def validate():
    loss = net(torch.ones(2, 4)).sum().detach()
    dist.all_reduce(loss)  # the place

dist.barrier()
with elastic.session(net, optimizer) as session:
    for epoch in session.epochs(2):
        for x in session.batches(range(3)):
            with session.step():
                net(torch.ones(2, 4) * x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        validate() if sys.argv[1] == "outside" else session.run(validate)
dist.barrier()
"""


@pytest.mark.parametrize("kind", ["outside", "in a function"])
def test_a_collective_outside_of_a_step_is_named(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(OUTSIDE)
    words = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", str(script), kind]
    done = run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [each for each in done.stderr.splitlines() if "outside of a step" in each]
    place = OUTSIDE[: OUTSIDE.index("# the place")].count("\n") + 1
    assert len(told) == (kind == "outside")
    assert all(
        f"elastic.session: train.py:{place} communicates (allreduce)" in each for each in told
    )


# Rank 0 needs nobody, so it has its result before rank 2, for which rank 1 waits, is lost.
UNEQUAL = """
import os, pathlib, signal, sys, time
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, pid = dist.get_rank(), os.getpid()
net = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def hands_over():
    value = torch.zeros(1)
    if rank == 0:
        (FOLDER / "rank 0 has run it").touch()
    elif rank == 1:
        dist.recv(value, 2)
    else:
        while not (FOLDER / "rank 0 has run it").exists():
            time.sleep(0.01)
        time.sleep(0.3)  # it may be on its way to the next step
        try:
            (FOLDER / "fault").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
        dist.send(torch.full((1,), 7.0), 1)
    return value.item()

with elastic.session(net, optimizer) as session:
    for _ in range(3):
        with session.step():
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = session.run(hands_over)
    with session.step():
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = session.position
(FOLDER / f"end {rank}").write_text(f"{found} {steps} {os.getpid() == pid} {len(session.history)}")
dist.destroy_process_group()
"""


def test_whoever_is_interrupted_in_a_function_gets_its_result(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNEQUAL)
    words = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "3", str(script)]
    done = run([*words, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "takes its place" in done.stderr
    assert (tmp_path / "fault").exists()
    ends = [(tmp_path / f"end {rank}").read_text() for rank in range(3)]
    # One recovery; the survivors keep their process.
    assert ends == ["0.0 5 True 1", "7.0 5 True 1", "0.0 5 True 1"]


# Gloo forgets messages in flight when their connection ends: whoever waits for one is not woken.
MID_MESSAGE = """
import os, pathlib, signal, sys, threading, time
from rallypoint import elastic
import torch
import torch.distributed as dist

FOLDER = pathlib.Path(sys.argv[1])
def once(number):
    try:
        (FOLDER / f"fault {number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def killed_when_it_changes(tensor, number):
    before = tensor.flatten()[0].item()
    def watch():
        while tensor.flatten()[0].item() == before:
            pass
        if once(number):
            os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.Embedding(5000, 4000, sparse=True)  # much to send, and little to train
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
big = torch.zeros(20_000_000)
if rank == 1 and (FOLDER / "fault 1").exists() and not (FOLDER / "fault 2").exists():
    with torch.no_grad():
        net.weight.zero_()
    killed_when_it_changes(net.weight, 2)
with elastic.session(net, optimizer) as session:
    while session.position < 6:
        with session.step():
            if session.position in (0, 1, 4):
                big.fill_(0)
                dist.barrier()
                if rank == 0:
                    big.fill_(1)
                elif session.position > 0 and rank == 1 and not (FOLDER / f"fault {session.position}").exists():
                    killed_when_it_changes(big, session.position)
                dist.broadcast(big, 0)
                assert big[-1] == 1
            if session.position == 5:
                # Longer than groups may take to form: Gloo must not take that time for this one.
                message = torch.zeros(1)
                if rank == 0:
                    time.sleep(11)
                    dist.send(message + 7, 1)
                else:
                    assert dist.recv(message) == 0 and message == 7
            net(torch.zeros(1, dtype=torch.int64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
(FOLDER / f"end {rank}").write_text(str(len(session.history)))
dist.destroy_process_group()
"""


def test_a_rank_that_dies_amid_a_large_message_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(MID_MESSAGE)
    done = run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2"),
            *(str(path), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("fault *"))) == 3
    assert (tmp_path / "end 0").read_text() in ("2", "3")


DIFFERENT = """
from rallypoint import elastic
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = torch.nn.Linear(2, 2)
with elastic.session(net):
    pass
"""


def test_ranks_that_do_not_match_are_an_error_and_nobody_takes_their_place(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "3")
    done = alone(tmp_path, DIFFERENT, "-m", "rallypoint", "run", *flags)
    assert done.returncode == 1
    assert "takes its place" not in done.stderr, done.stderr
    assert "begin with different parameters" in done.stderr, done.stderr


COMPILED = """
import json, os, pathlib, signal, sys
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, how = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.last(self.first(x).relu())

net = DistributedDataParallel(Net())
graphs = []

def backend(graph, _):
    graphs.append(session.position)
    return graph.forward

compiled = net if how == "eager" else torch.compile(net, backend=backend)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
with elastic.session(net, optimizer) as session:
    while session.position < 12:
        with session.step():
            if how == "killed" and session.position == 6 and dist.get_rank() == 1:
                try:
                    (folder / "fault").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
            compiled(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
bits = [parameter.tolist() for parameter in net.parameters()]
told = {"bits": bits, "graphs": graphs, "recoveries": len(session.history)}
(folder / f"end {dist.get_rank()}").write_text(json.dumps(told))
"""


@pytest.mark.long
def test_compiled_ddp_survives_a_loss_without_being_compiled_again(tmp_path: Path) -> None:
    found = {}
    for how in ("eager", "calm", "killed"):
        done, found[how] = trained(tmp_path / how, how, script=COMPILED)
        assert done.returncode == 0, done.stderr
    for eager, calm, killed in zip(*found.values(), strict=True):
        assert calm["bits"] == killed["bits"] == eager["bits"]
    survivor = found["killed"][0]
    assert survivor["recoveries"] == 1
    # Where each graph was compiled: in the first step.
    assert survivor["graphs"] == found["calm"][0]["graphs"] == [0] * len(survivor["graphs"]) != []


CHANGED = """
import json, os, pathlib, signal, sys, time
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(__file__).parent
torch.manual_seed(0)
dist.init_process_group("gloo")
pair = dist.new_group([0, 2])
net = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rank = dist.get_rank()
caught = []

def attempt(what, collective):
    try:
        collective()
    except elastic.MembershipChanged as changed:
        caught.append([what, list(changed.ranks), "SIGKILL" in str(changed)])

with elastic.session(net, optimizer) as session:
    while session.position < 6:
        if session.position == 3 and rank == 1 and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            while len(list(FOLDER.glob("waits *"))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if session.position == 3 and rank != 1 and not caught:
            pending = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
            (FOLDER / f"waits {rank}").touch()
            attempt("pending", lambda: dist.all_reduce(torch.ones(1)))
            attempt("also pending", pending[1].wait)
            attempt("next", dist.barrier)
            attempt("of a group without the lost one", lambda: dist.all_reduce(torch.ones(1), group=pair))
            attempt("message", lambda: dist.send(torch.ones(1), 1))
        with session.step():
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
(FOLDER / f"caught {rank}").write_text(json.dumps([caught, len(session.history)]))
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 3
"""


def test_every_collective_after_a_loss_raises_that_the_members_have_changed(tmp_path: Path) -> None:
    done = alone(tmp_path, CHANGED, "-m", "rallypoint", "run", "--nproc-per-node", "3")
    assert done.returncode == 0, done.stderr
    whats = ["pending", "also pending", "next", "of a group without the lost one", "message"]
    for rank in (0, 2):
        caught, recoveries = json.loads((tmp_path / f"caught {rank}").read_text())
        assert caught == [[what, [1], True] for what in whats]
        assert recoveries == 1
    assert json.loads((tmp_path / "caught 1").read_text()) == [[], 1]


BEHIND = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from rallypoint import elastic

FOLDER = Path(__file__).parent
dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rank, caught = dist.get_rank(), []
with elastic.session(net, optimizer) as session:
    for batch in session.batches([torch.full((1, 2), float(i)) for i in range(6)]):
        try:
            with session.step():
                if session.position == 3:
                    (FOLDER / f"in {rank}").touch()
                    if rank == 1 and not (FOLDER / "killed").exists():
                        # Who is not in the step yet has none to leave.
                        while not all((FOLDER / f"in {other}").exists() for other in (0, 2)):
                            time.sleep(0.01)
                        (FOLDER / "killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                net(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            total = torch.ones(1)
            dist.all_reduce(total)  # the process in the lost one's place does not come here
        except elastic.MembershipChanged as changed:
            if sys.argv[1] == "raise":
                raise
            caught.append(str(changed))
(FOLDER / f"told {rank}").write_text("|".join(map(str, [session.position, *caught])))
"""


@pytest.mark.parametrize("what", ["catch", "raise"])
def test_a_collective_behind_a_step_that_was_left_raises_instead_of_waiting(
    tmp_path: Path, what: str
) -> None:
    arguments = ["run", "--nproc-per-node", "3"]
    source = BEHIND.replace("sys.argv[1]", repr(what))
    done = alone(tmp_path, source, "-m", "rallypoint", *arguments)
    if what == "raise":
        assert done.returncode != 0
        assert "MembershipChanged: lost rank 1" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told 1").read_text() == "6"
    for rank in (0, 2):
        steps, told = (tmp_path / f"told {rank}").read_text().split("|")
        assert steps == "6"
        assert told.startswith("lost rank 1: was killed by SIGKILL; the interrupted step")


STRAYED = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from rallypoint import elastic

FOLDER = Path(__file__).parent
dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with elastic.session(net, optimizer) as session:
    for epoch in session.epochs(3):
        for batch in session.batches([torch.full((1, 2), float(i)) for i in range(4)]):
            with session.step():
                if session.position == 2:
                    (FOLDER / f"in {dist.get_rank()}").touch()
                    if dist.get_rank() == 1 and not (FOLDER / "killed").exists():
                        while not (FOLDER / "in 0").exists():  # it has no step to leave yet
                            time.sleep(0.01)
                        (FOLDER / "killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                net(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if session.position % 2 == 0:  # also where the first step of an epoch was left
                break
"""


def test_leaving_the_loop_behind_a_step_that_was_left_is_an_error(tmp_path: Path) -> None:
    done = alone(
        tmp_path, STRAYED, "-m", "rallypoint", "run", "--nproc-per-node", "2", "--max-losses", "1"
    )
    assert done.returncode != 0
    assert "was left (break, return) after a step that a loss had ended" in done.stderr


TWICE = """
import torch
import torch.distributed as dist
from torch import nn
from rallypoint import elastic

dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for part in ("first", "second"):
    with elastic.session(net, optimizer) as session:
        with session.step():
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(part)
"""


def test_a_second_session_is_refused_by_its_name(tmp_path: Path) -> None:
    done = alone(tmp_path, TWICE, "-m", "rallypoint", "run", "--nproc-per-node", "2")
    assert done.returncode != 0
    assert done.stdout.split() == ["first", "first"]
    assert "this script has had a session already" in done.stderr


AUGMENTED = """
import hashlib, json, os, pathlib, random, signal, sys
import numpy as np
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = pathlib.Path(sys.argv[1])
FAULTS = json.loads(sys.argv[2])

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, index):
        return torch.randn(8) + index * random.random() + np.random.rand()

torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
net = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
sampler = elastic.Sampler(96, 12)
loader = torch.utils.data.DataLoader(Noisy(), batch_sampler=sampler, num_workers=1)
with elastic.session(net, optimizer) as session:
    for epoch in session.epochs(2):
        for x in session.batches(loader):
            with session.step():
                for number, (step, who) in enumerate(FAULTS):
                    mark = FOLDER / f"fault {number}"
                    if (step, who) == (session.position, rank) and not mark.exists():
                        mark.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                net(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    bits = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
(FOLDER / f"end {rank}").write_text(json.dumps(hashlib.sha256(bits).hexdigest()))
dist.destroy_process_group()
"""


def test_random_transforms_in_worker_processes_are_the_same_after_a_loss(tmp_path: Path) -> None:
    _, calm = trained(tmp_path / "calm", [], script=AUGMENTED)
    done, ends = trained(tmp_path / "job", [[3, 1], [9, 0]], script=AUGMENTED)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "job").glob("fault *"))) == 2
    assert len(ends) == 3 and ends == calm


def test_a_loader_in_which_the_ranks_communicate_is_refused(tmp_path: Path) -> None:
    """A process that takes over a lost rank would iterate alone, and wait forever."""
    script = tmp_path / "train.py"
    script.write_text(
        """
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Together:
    def __iter__(self):
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        yield from torch.ones(4, 1, 4)

dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(4, 4))
with elastic.session(net, torch.optim.SGD(net.parameters(), lr=0.1)) as session:
    for batch in session.batches(Together()):
        pass
"""
    )
    words = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", str(script)]
    done = run(words, capture_output=True, text=True)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "the ranks communicate (broadcast) while this loader is iterated" in said

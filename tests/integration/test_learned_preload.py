"""Restarted workers have the parts of torch and of this package that their predecessors imported, unnoticed by the script."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import supervisors
from pace import pace
from ports import free_port


pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# Fork servers have these at once. What is to be learned is not among them, but half of what that imports in turn.
IMPORTS = (
    *supervisors.TORCH[:2],
    *("sympy", "torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp"),
)

SCRIPT = """
import json, os, sys, time
at_start = [name for name in sys.modules if name.partition(".")[0] == "torch"]
cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
if "--sets" in sys.argv:
    os.environ["TORCHDYNAMO_VERBOSE"] = "1"
own = "near" in sys.modules
import near, torch, torch.distributed as dist
had = "torch._dynamo" in sys.modules
dist.init_process_group("gloo")
rank, generation = dist.get_rank(), int(os.environ["RALLY_GENERATION"])
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
facts = {"at start": at_start, "own": own, "had": had, "cache": cache, "parent": os.getppid(),
         "verbose": torch._dynamo.config.verbose, "session": os.getsid(0) == os.getpid()}
with open(f"facts.{generation}.{rank}", "w") as file:
    json.dump(facts, file)
again = generation > 0 and not had and "--sets" not in sys.argv
if generation == 0:
    while not os.path.exists("go"):  # the template is ready
        time.sleep(0.02)
elif again:
    # What this rank reported later than the other one led to another template, which was not ready yet.
    time.sleep(10)
if generation == 0 or again:
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
"""


def preloaded(lines: list[str]) -> Iterator[str]:
    """The packages that these lines of rally's name as preloaded, together for each line."""
    for line in lines:
        yield line.partition("preloaded for restarted workers: ")[2].partition(";")[0]


def said_by(folder: Path, env: dict[str, str], package: str, *words: str) -> str:
    """What a job of two workers says. It finds the file ``go`` once a package, or a part of it, is preloaded."""
    with supervisors.Popen(
        [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node=2", *words],
        cwd=folder,
        env={**env, "LOGLEVEL": "INFO"},
        stderr=subprocess.PIPE,
        text=True,
        imports=IMPORTS,
    ) as job:
        late = threading.Timer(240, job.send_signal, [signal.SIGTERM])
        late.start()
        said = ""
        assert job.stderr is not None
        for line in job.stderr:
            said += line
            if any(package in told for told in preloaded([line])):
                (folder / "go").touch()
        late.cancel()
    assert job.returncode == 0, said
    return said


def facts_of(folder: Path, *words: str, flags: tuple[str, ...] = ()) -> tuple[list, str]:
    """What the two workers of the first and the last generation noted, and what rally said."""
    (folder / "probe.py").write_text(SCRIPT)
    (folder / "near.py").write_text("")
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")
    }
    said = said_by(folder, env, "torch", "--max-restarts=3", *flags, "probe.py", *words)
    last = max(int(each.name.split(".")[1]) for each in folder.glob("facts.*"))
    found = [
        [json.loads((folder / f"facts.{g}.{rank}").read_text()) for rank in range(2)]
        for g in (0, last)
    ]
    return found, said


def test_restarted_workers_have_torch_dynamo_and_nothing_else_differs(tmp_path: Path) -> None:
    (first, second), said = facts_of(tmp_path)
    assert "preloaded for restarted workers: torch._dynamo" in said
    assert [each.pop("had") for each in first] == [False, False]
    assert [each.pop("had") for each in second] == [True, True]
    # Nothing of torch, nor what its import sets in the environment, is visible before the script imports
    # torch; the script's own modules never are; and workers stay children of the fork server.
    assert first == second
    assert first[0]["at start"] == []
    assert not first[0]["own"]


def test_what_reads_a_variable_that_the_script_sets_is_not_preloaded(tmp_path: Path) -> None:
    (first, second), said = facts_of(tmp_path, "--sets")
    assert "torch._dynamo: the import reads TORCHDYNAMO_VERBOSE, which workers set" in said
    assert [each["had"] for each in second] == [False, False]
    assert [each["verbose"] for each in (*first, *second)] == [True] * 4


def next_workers(job: int) -> set[int]:
    """The processes below a supervisor that are forked but not started."""
    found = set()
    for each in psutil.Process(job).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(each.cmdline()).startswith("rally: next worker"):
                found.add(each.pid)
    return found


ON_NODES = """
import json, os, sys, time
import torch
had = "torch.distributed.checkpoint" in sys.modules
import torch.distributed as dist
dist.init_process_group("gloo")
import torch.distributed.checkpoint  # takes a fraction of the time that torch._dynamo takes
open(f"had.{os.environ['NODE']}.{had}.{os.getpid()}", "w").close()
while not os.path.exists("end"):
    time.sleep(0.05)
"""


def test_a_node_that_waits_has_imported_what_the_others_did(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_NODES)
    words = [sys.executable, "-m", "rallypoint", "run", "--nnodes", "2:2", "--max-restarts", "1"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--insecure", "train.py"]
    logs = [tmp_path / f"log{node}" for node in range(3)]
    nodes = []

    def start() -> None:
        number = len(nodes)
        env = {**os.environ, "LOGLEVEL": "INFO", "NODE": str(number)}
        with logs[number].open("wb") as log:
            nodes.append(
                supervisors.Popen(
                    words, cwd=tmp_path, env=env, stdout=log, stderr=log, imports=IMPORTS
                )
            )

    def wait_for(condition: Callable[[], object], what: str) -> None:
        until = time.monotonic() + 60 * pace()
        while not condition():
            assert time.monotonic() < until, (what, [log.read_text() for log in logs[: len(nodes)]])
            time.sleep(0.05)

    try:
        for _ in range(2):
            start()
        wait_for(lambda: len(list(tmp_path.glob("had.*.False.*"))) == 2, "both have begun")
        start()
        wait_for(lambda: "waiting as a spare" in logs[2].read_text(), "the third one waits")
        ready = "preloaded for restarted workers: torch.distributed.checkpoint"
        wait_for(lambda: ready in logs[2].read_text(), "it has imported what the others did")
        wait_for(lambda: next_workers(nodes[2].pid), "its worker is forked")
        ahead = next_workers(nodes[2].pid)
        nodes[1].kill()
        wait_for(lambda: list(tmp_path.glob("had.2.*")), "it takes part")
        (worker,) = ahead
        assert [each.name for each in tmp_path.glob("had.2.*")] == [f"had.2.True.{worker}"]
    finally:
        (tmp_path / "end").touch()
        for each in nodes:
            each.terminate()
        for each in nodes:
            each.wait(60)


SESSION = """
import json, os, sys, time

def at_hand():  # hidden until it is imported
    return any(getattr(each, "package", "") == "rallypoint.elastic" for each in sys.meta_path)

facts = {"pid": os.getpid(), "had": at_hand()}
facts["at start"] = [each for each in sys.modules if each.startswith("rallypoint.elastic")]
if "torch first" in sys.argv:
    import torch
    facts["behind torch"] = "rallypoint.elastic" in sys.modules
from rallypoint import elastic
facts["torch"] = "torch" in sys.modules
import rallypoint.elastic.loops.sampler
import torch, torch.distributed as dist
facts |= {"same": rallypoint.elastic is elastic, "left": at_hand()}
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
new = "RALLY_TAKES_OVER" in os.environ
with elastic.session(net, optimizer) as session:
    while session.position < 5:
        with session.step():
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if session.position == 3 and dist.get_rank() == 1 and not new:
            while not os.path.exists("go"):
                time.sleep(0.02)
            os.kill(os.getpid(), 9)
with open(f"facts.{int(new)}.{dist.get_rank()}", "w") as file:
    json.dump(facts, file)
"""


@dataclasses.dataclass
class TakenOver:
    """A job of two workers that has lost one.

    Args:
        old, new: what a worker that stayed noted, and what the one in the lost one's place did.
        said: what rally said.
        ahead: the processes that were forked ahead of the loss.
    """

    old: dict[str, Any]
    new: dict[str, Any]
    said: str
    ahead: set[int]


@pytest.fixture(scope="module", params=["torch first", "elastic first"])
def taken_over(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TakenOver:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SESSION)
    words = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node=2", "train.py"]
    log = folder / "log"
    with (
        log.open("wb") as stderr,
        supervisors.Popen(
            [*words, request.param],
            cwd=folder,
            env={**os.environ, "LOGLEVEL": "INFO"},
            stderr=stderr,
            imports=IMPORTS,
        ) as job,
    ):
        try:
            until = time.monotonic() + 120 * pace()
            while not any(
                "rallypoint.elastic" in told for told in preloaded(log.read_text().splitlines())
            ):
                assert time.monotonic() < until and job.poll() is None, log.read_text()
                time.sleep(0.1)
            while len(ahead := next_workers(job.pid)) < 2:
                assert time.monotonic() < until and job.poll() is None, log.read_text()
                time.sleep(0.1)
            if request.param == "elastic first":
                for pid in ahead:
                    os.kill(pid, signal.SIGTERM)  # as a batch system signals the workers of then
            (folder / "go").touch()
            assert job.wait(120 * pace()) == 0, log.read_text()
        finally:
            job.terminate()
    old, new = (json.loads((folder / f"facts.{each}").read_text()) for each in ("0.0", "1.1"))
    return TakenOver(old, new, log.read_text(), ahead)


def test_who_takes_a_lost_worker_over_has_sessions_at_hand(taken_over: TakenOver) -> None:
    """A session starts where the script imports it, whatever has loaded its modules."""
    assert "rank 1 is back at step 3" in taken_over.said
    old, new = dict(taken_over.old), dict(taken_over.new)
    assert (old.pop("had"), new.pop("had")) == (False, True)
    assert old.pop("pid") != new.pop("pid")
    assert old == new
    assert (new["at start"], new["torch"], new["same"], new["left"]) == ([], True, True, False)
    assert not new.get("behind torch")


def test_who_takes_a_lost_worker_over_was_forked_before(taken_over: TakenOver) -> None:
    assert taken_over.new["pid"] in taken_over.ahead
    assert not any(map(psutil.pid_exists, taken_over.ahead))

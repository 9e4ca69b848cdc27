"""Gloo's threads do not interrupt others when they wake up, wherever a worker's groups come from."""

import os
import threading
from pathlib import Path

import pytest

from rallypoint._core import scheduling
from rallypoint.testing import run_ranks
from supervisors import RALLY, run


GROUPS = """
import contextlib, os, sys
import torch, torch.distributed as dist
from rallypoint import elastic

POLICIES = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}

def policies():
    found = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            if file.read().startswith("gloo_tcp_loop"):
                found.append(POLICIES[os.sched_getscheduler(int(thread))])
    return found

if "idle" in sys.argv:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
own = os.sched_getscheduler(0)
dist.init_process_group("gloo")
group = dist.new_group([0, 1])
torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
inside = elastic.session(model) if "session" in sys.argv else contextlib.nullcontext()
with inside:
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 0:
        print(*policies())
assert os.sched_getscheduler(0) == own, "the script's own thread is scheduled as before"
"""


@pytest.mark.parametrize(
    ("words", "policy"),
    [([], "batch"), (["session"], "batch"), (["idle"], "idle")],
    ids=["groups", "a session", "a policy of the script's own"],
)
def test_the_threads_of_a_workers_groups(tmp_path: Path, words: list[str], policy: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUPS)
    done = run(
        [RALLY, "run", "--nproc-per-node", "2", str(script), *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {policy}, done.stdout


def test_the_threads_of_ranks_in_tests() -> None:
    def policies() -> list[int]:
        import os

        return [os.sched_getscheduler(int(each)) for each in os.listdir("/proc/self/task")]

    for each in run_ranks(policies, 2):
        assert os.SCHED_BATCH in each
        assert os.SCHED_OTHER in each, "the main thread"


def test_only_threads_that_start_in_the_block_are_scheduled_so() -> None:
    found = {}

    def note(when: str) -> None:
        thread = threading.Thread(target=lambda: found.update({when: os.sched_getscheduler(0)}))
        thread.start()
        thread.join()

    note("before")
    with scheduling.batch_threads():
        note("in it")
    note("after")
    assert found == {"before": os.SCHED_OTHER, "in it": os.SCHED_BATCH, "after": os.SCHED_OTHER}


def test_a_kernel_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with scheduling.batch_threads():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_an_error_in_the_block_is_raised() -> None:
    with pytest.raises(OSError, match="mine"), scheduling.batch_threads():
        raise OSError("mine")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER

"""The work of a reduce-scatter: it ends with its all-reduces, in time, or when one of them fails."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rallypoint.elastic.communication.reduce_scatter import ReduceScatter, begun
from rallypoint.elastic.communication.works import KeptWork, Lives


class Part(dist.Work):
    """Acts like Gloo's all-reduce."""

    def __init__(self, state: str = "pending") -> None:
        super().__init__()
        self.state = state

    def is_completed(self) -> bool:
        return self.state != "pending"

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.state == "failed":
            raise RuntimeError("closed by peer")
        if self.state == "pending":
            assert timeout is not None, "it waits for ever"
            assert timeout > timedelta(0), "torch waits without a limit"
            raise RuntimeError("timed out")
        return True


def test_the_outputs_are_written_once_all_is_there() -> None:
    output, parts = torch.zeros(2), [Part("done"), Part()]
    work = ReduceScatter(list(parts), [(output, torch.ones(2))])
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(seconds=0.01))
    assert output.tolist() == [0.0, 0.0]
    parts[1].state = "done"
    assert work.is_completed()
    assert work.wait()
    assert output.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("states", [["failed", "pending"], ["pending", "failed"]])
def test_one_that_fails_is_not_waited_for_behind_the_others(states: list[str]) -> None:
    work = ReduceScatter([Part(each) for each in states], [])
    with pytest.raises(RuntimeError, match="closed by peer"):
        KeptWork(work, Lives()).wait()
    assert work.is_completed()


class EndsAsItsTimeDoes(Part):
    def wait(self, timeout: timedelta | None = None) -> bool:
        was_pending, self.state = self.state == "pending", "done"
        if was_pending:
            raise RuntimeError("timed out")
        return True


def test_one_that_ends_as_its_time_does_has_not_failed() -> None:
    work = ReduceScatter([EndsAsItsTimeDoes(), Part()], [])
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(seconds=0.01))
    assert not work.is_completed()


def test_it_is_given_up_with_the_connections() -> None:
    lives = Lives()
    lives.end()
    with pytest.raises(RuntimeError, match="a member was lost"):
        KeptWork(ReduceScatter([Part()], []), lives).wait()


def test_options_are_passed_on() -> None:
    seen = []

    def all_reduce(_: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work:
        seen.append((options.reduceOp, options.timeout))
        return Part("done")

    given = dist.ReduceScatterOptions()
    given.reduceOp, given.timeout = dist.ReduceOp.MAX, timedelta(seconds=3)
    begun(all_reduce, 0, 2, (torch.zeros(1), torch.zeros(2), given))
    begun(all_reduce, 0, 2, (torch.zeros(1), [torch.zeros(1)] * 2, dist.ReduceOp.MIN, timedelta(1)))
    begun(all_reduce, 0, 2, (torch.zeros(1), [torch.zeros(1)] * 2, dist.ReduceOp.MIN, None))
    assert seen[0] == (dist.ReduceOp.MAX, timedelta(seconds=3))
    assert seen[1] == (dist.ReduceOp.MIN, timedelta(1))
    assert len(seen) == 5

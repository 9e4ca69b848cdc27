"""Waiting for works that Gloo never wakes."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rallypoint.elastic.communication.works import (
    KeptWork,
    Lives,
    attended,
    dispose,
)


class Stuck(dist.Work):
    """Like Gloo's works: a wait with a timeout raises, and the work goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.error: RuntimeError | None = None
        self.future: Any = torch.futures.Future()

    def end(self, error: RuntimeError | None = None) -> None:
        self.error = error
        self.ended.set()
        if error is None:
            self.future.set_result([torch.ones(2)])
        else:
            self.future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def get_future(self) -> Any:
        return self.future


def in_thread(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_wait_ends_with_the_work() -> None:
    inner, lives = Stuck(), Lives()
    work = KeptWork(inner, lives)
    in_thread(lambda: threading.Event().wait(0.4) or inner.end())
    assert work.wait()
    assert work.is_completed()


def test_a_wait_raises_what_went_wrong_in_the_work() -> None:
    inner = Stuck()
    in_thread(lambda: threading.Event().wait(0.4) or inner.end(RuntimeError("closed by peer")))
    with pytest.raises(RuntimeError, match="closed by peer"):
        KeptWork(inner, Lives()).wait()


def test_a_wait_is_given_up_with_the_connections() -> None:
    inner, lives = Stuck(), Lives()
    in_thread(lives.end)
    with pytest.raises(RuntimeError, match="a member was lost"):
        KeptWork(inner, lives).wait()


def test_a_work_that_has_ended_well_is_not_given_up() -> None:
    inner, lives = Stuck(), Lives()
    lives.end()
    inner.end()
    assert KeptWork(inner, lives).wait()


def test_a_wait_keeps_to_the_time_that_its_caller_has() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        KeptWork(Stuck(), Lives()).wait(timedelta(seconds=0.3))


@pytest.mark.parametrize("first", ["work", "lives"])
def test_a_future_is_completed_once_by_whoever_comes_first(first: str) -> None:
    inner, lives = Stuck(), Lives()
    future = KeptWork(inner, lives).get_future()
    ends = [inner.end, lives.end]
    for end in ends if first == "work" else reversed(ends):
        end()
    if first == "work":
        assert torch.equal(future.wait()[0], torch.ones(2))
    else:
        with pytest.raises(RuntimeError, match="a member was lost"):
            future.wait()


def test_a_future_that_is_asked_for_too_late_fails_at_once() -> None:
    lives = Lives()
    lives.end()
    with pytest.raises(RuntimeError, match="a member was lost"):
        KeptWork(Stuck(), lives).get_future().wait()


def test_a_future_fails_with_its_work() -> None:
    inner = Stuck()
    future = KeptWork(inner, Lives()).get_future()
    inner.end(RuntimeError("closed by peer"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        future.wait()


def test_a_transfer_returns_raises_and_is_given_up() -> None:
    lives, never = Lives(), threading.Event()
    assert attended(lambda: 5, lives) == 5
    with pytest.raises(KeyError):
        attended(lambda: {}["x"], lives)
    in_thread(lives.end)
    with pytest.raises(RuntimeError, match="a member was lost"):
        attended(never.wait, lives)
    never.set()


def test_a_group_is_dropped_beside_the_caller() -> None:
    dropped, left = threading.Event(), threading.Event()

    class Group:
        def __del__(self) -> None:
            left.wait(10)
            dropped.set()

    groups = [Group()]
    dispose(groups)
    assert not dropped.is_set()
    left.set()
    assert dropped.wait(10)

"""Questions to a worker, which a thread of its process answers: here one of the test's process."""

import os
import threading
from collections.abc import Iterator

import pytest

from rallypoint._core import stack_line
from rallypoint.control.collectives import collective_probe
from rallypoint.launch.worker import collective_thread


PATIENCE = 30.0
ME = os.getpid()


class SlowCounter:
    """Takes the place of what counts a worker's collectives. It answers once it may."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.asked.set()
        assert self.may_answer.wait(PATIENCE)
        return 7


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> SlowCounter:
    made = SlowCounter()
    monkeypatch.setattr(collective_thread, "_begun", made)
    return made


@pytest.fixture
def line() -> Iterator[int]:
    """The supervisor's end of the worker's line."""
    ours, theirs = stack_line.line()
    named = threading.Event()
    thread = threading.Thread(
        target=collective_thread._answer, args=(theirs, os.fstat(theirs).st_ino, named)
    )
    thread.start()
    assert named.wait(PATIENCE)
    yield ours
    os.close(ours)
    thread.join(PATIENCE)
    os.close(theirs)


def test_a_worker_answers(line: int, counter: SlowCounter) -> None:
    counter.may_answer.set()
    assert collective_probe.begun({ME: line}, PATIENCE) == {ME: 7}
    assert ":" in collective_probe.places({ME: line}, PATIENCE)[ME]


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(
    line: int, counter: SlowCounter
) -> None:
    assert collective_probe.begun({ME: line}, 0.01) == {}
    assert counter.asked.wait(PATIENCE), "the worker has begun to answer"
    threading.Timer(0.2, counter.may_answer.set).start()
    assert ME in collective_probe.places({ME: line}, PATIENCE)


def test_what_a_worker_says_late_is_not_taken_for_what_it_says_now(
    line: int, counter: SlowCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert collective_probe.begun({ME: line}, 0.01) == {}
    assert counter.asked.wait(PATIENCE), "the worker has begun to answer"

    def answer_and_go_on() -> None:
        monkeypatch.setattr(collective_thread, "_begun", lambda: 8)
        counter.may_answer.set()

    threading.Timer(0.2, answer_and_go_on).start()
    assert collective_probe.begun({ME: line}, PATIENCE) == {ME: 8}

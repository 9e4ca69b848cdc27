"""Calls that cannot be interrupted, made in other threads."""

from __future__ import annotations

import os
import threading

import pytest

from rallypoint.elastic.communication.waiters import Call


PATIENCE = 30.0


def waiting() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "rally-elastic-waiter"]


@pytest.fixture(autouse=True)
def _none_free() -> None:
    for thread in waiting():  # left by the previous test
        thread.join(PATIENCE)


def outcome(call: Call[object]) -> object:
    assert call.ends_within(PATIENCE)
    return call.result()


def test_a_call_returns_or_raises_in_the_thread_that_needs_it() -> None:
    assert outcome(Call(threading.get_ident)) != threading.get_ident()
    with pytest.raises(KeyError):
        outcome(Call(lambda: {}["x"]))


def test_one_thread_makes_calls_that_follow_one_another() -> None:
    assert len({outcome(Call(threading.get_ident)) for _ in range(20)}) == 1


def test_a_call_that_does_not_end_delays_no_other() -> None:
    go_on = threading.Event()
    stuck = Call(lambda: go_on.wait(PATIENCE))
    assert not stuck.ends_within(0.1)
    assert outcome(Call(lambda: 5)) == 5
    go_on.set()
    assert outcome(stuck)


def test_a_thread_without_calls_ends() -> None:
    assert outcome(Call(lambda: 5)) == 5
    (thread,) = waiting()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert outcome(Call(lambda: 6)) == 6


def test_a_fork_has_threads_of_its_own() -> None:
    assert outcome(Call(lambda: 5)) == 5
    child = os.fork()
    if child == 0:
        call = Call(lambda: 6)
        os._exit(0 if call.ends_within(PATIENCE) and call.result() == 6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

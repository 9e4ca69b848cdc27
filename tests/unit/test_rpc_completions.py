"""Calls that are completed together: one of them must not delay the others."""

from collections import deque

from rallypoint.rpc.connections.calls import Call
from rallypoint.rpc.connections.completions import complete_soon


def call(on_done, *, has_callbacks=False):
    made = Call("f", None, 0.0, on_done)
    made.has_callbacks = has_callbacks
    return made


def test_calls_are_completed_in_order_and_once():
    done, jobs = [], deque()
    calls = [call(done.append) for _ in range(5)]
    complete_soon(calls, jobs)
    while jobs:
        jobs.popleft().run()
    assert done == calls


def test_whoever_leads_next_goes_on_where_one_is_held_up():
    """The first waits for the last, as a callback added at this moment might."""
    done, jobs = [], deque()

    def wait_for_the_others(me):
        jobs.popleft().run()
        assert done == calls[1:]
        done.append(me)

    calls = [call(wait_for_the_others), call(done.append), call(done.append)]
    complete_soon(calls, jobs)
    jobs.popleft().run()
    assert len(done) == 3


def test_those_with_code_of_the_users_are_jobs_of_their_own():
    done, jobs = [], deque()
    calls = [call(done.append), call(done.append, has_callbacks=True), call(done.append)]
    complete_soon(calls, jobs)
    assert len(jobs) == 2
    jobs.pop().run()
    assert done == [calls[1]]


def test_a_callback_that_raises_does_not_keep_the_others_from_being_completed(caplog):
    done, jobs = [], deque()

    def raise_it(_):
        raise ValueError("of the callback")

    complete_soon([call(raise_it), call(done.append)], jobs)
    jobs.popleft().run()
    assert len(done) == 1
    assert "of the callback" in caplog.text


class CallbackComesNow(Call):
    """The user adds a callback right after the leader has looked for one."""

    __slots__ = ("looks",)

    @property
    def has_callbacks(self) -> bool:
        self.looks = getattr(self, "looks", 0) + 1
        return self.looks > 1

    @has_callbacks.setter
    def has_callbacks(self, value: bool) -> None:
        pass


def test_a_callback_that_is_added_meanwhile_completes_no_call_twice():
    done, jobs = [], deque()
    calls = [CallbackComesNow("f", None, 0.0, done.append), call(done.append, has_callbacks=True)]
    complete_soon(calls, jobs)
    while jobs:
        jobs.popleft().run()
    assert len(done) == 2

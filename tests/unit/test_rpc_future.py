"""A failure that somebody looks at is not reported as one that nobody has looked at."""

import dataclasses
import logging
import threading

import pytest

from rallypoint.errors import RpcError
from rallypoint.rpc.future import RpcFuture


def fail_after(future, act):
    act(future)
    future.fail(RpcError("lost"))


def wait_in_a_thread(future):
    looks = threading.Event()

    class Watched(type(future)):
        def _look(self):
            super()._look()
            looks.set()

    future.__class__ = Watched

    def look():
        with pytest.raises(RpcError):
            future.wait()

    thread = threading.Thread(target=look)
    thread.start()
    looks.wait(5)
    return thread


def test_who_waited_before_the_failure_has_seen_it(caplog):
    future = RpcFuture()
    thread = wait_in_a_thread(future)
    future.fail(RpcError("lost"))
    thread.join(5)
    del future, thread
    assert not caplog.records


def test_a_callback_that_was_there_before_the_failure_sees_it(caplog):
    for act in (lambda future: future.add_done_callback(id), lambda future: future.then(id)):
        fail_after(RpcFuture(), act)
    assert not caplog.records


def test_a_failure_that_nobody_looks_at_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        fail_after(RpcFuture(), lambda future: None)
    assert "its error was never looked at: lost" in caplog.text


def test_a_mistake_in_a_callback_is_a_runtime_error_as_with_torchs_futures():
    future = RpcFuture()
    following = future.then(lambda done: done + 1)
    future.set_result(1)
    with pytest.raises(
        RuntimeError, match=r"the callback: TypeError: unsupported operand"
    ) as caught:
        following.wait()
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_callback_may_raise_what_has_no_text_or_cannot_be_changed():
    @dataclasses.dataclass(frozen=True)
    class Strange(Exception):
        code: int

        def __str__(self):
            raise ValueError("I have no text")

    def spoil(_):
        raise Strange(3)

    future = RpcFuture()
    following = future.then(spoil)
    future.set_result(1)
    assert following.done()
    with pytest.raises(RuntimeError, match="Strange") as caught:
        following.wait()
    assert caught.value.__cause__.code == 3


def test_a_failure_that_a_callback_passes_on_stays_what_it_was():
    future = RpcFuture()
    following = future.then(lambda done: done.value())
    future.fail(KeyError("k"))
    with pytest.raises(KeyError, match="k"):
        following.wait()

"""The supervisor's descriptors and timers."""

from __future__ import annotations

import os
import select
import socket

from rallypoint._core import clock
from rallypoint.launch.supervision.event_loop import EventLoop


def test_ready_descriptors_are_told_until_they_are_forgotten() -> None:
    loop = EventLoop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.watch(ours)
        now = clock.MONOTONIC.now()
        assert loop.wait(now) == set()
        theirs.send(b"x")
        assert loop.wait(now + 60) == {ours.fileno()}
        loop.watch(theirs, select.POLLOUT)
        assert loop.wait(now + 60) == {ours.fileno(), theirs.fileno()}
        loop.forget(ours)
        loop.forget(ours)
        assert loop.wait(now + 60) == {theirs.fileno()}
        loop.forget(theirs)
    loop.forget(ours)  # closed


def test_a_timer_wakes_the_loop_and_may_set_the_next_one() -> None:
    loop = EventLoop()
    called: list[str] = []
    read, write = os.pipe()
    try:
        loop.watch(read)

        def first() -> None:
            called.append("first")
            loop.after(0.0, lambda: called.append("second"))

        loop.after(0.01, first)
        loop.after(60.0, lambda: called.append("never"))
        loop.call_due()
        assert called == []
        while not called:
            assert loop.wait() == set()
            loop.call_due()
        assert called == ["first"]
        loop.wait()
        loop.call_due()
        assert called == ["first", "second"]
    finally:
        os.close(read)
        os.close(write)


def test_a_time_weeks_away_is_no_error() -> None:
    loop = EventLoop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.watch(ours)
        theirs.send(b"x")
        assert loop.wait(clock.MONOTONIC.now() + 1e12) == {ours.fileno()}
        loop.after(1e12, lambda: None)
        assert loop.wait() == {ours.fileno()}

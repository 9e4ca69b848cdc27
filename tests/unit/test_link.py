"""What a kept worker hears from its supervisor, and what it waits for."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint._core import supervisor_line
from rallypoint.elastic.worker.link import Link


GENERATION = 3
LOST = {"kind": "lost", "generation": GENERATION + 1, "host": "h", "port": 1, "ranks": [2]}


@pytest.fixture(name="ends")
def _ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, socket.socket]]:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        monkeypatch.setattr(supervisor_line, "held", theirs.fileno)
        link = Link(lambda _: None)
        yield link, ours
        ours.shutdown(socket.SHUT_RDWR)
        link._thread.join()
        link._socket.close()


def tell(supervisor: socket.socket, record: dict[str, Any]) -> None:
    supervisor.sendall(json.dumps(record).encode() + b"\n")


def test_who_waits_for_a_notice_is_told_twice_that_there_will_be_one(
    ends: tuple[Link, socket.socket],
) -> None:
    link, supervisor = ends
    told: list[int] = []

    def on_hold() -> None:
        told.append(1)
        if len(told) == 2:
            # The lock is not held here: the notice that this leads to is heard meanwhile.
            tell(supervisor, LOST)

    threading.Timer(0.1, tell, (supervisor, {"kind": "hold"})).start()
    notice = link.wait(GENERATION, 60.0, on_hold)
    assert notice is not None and notice.ranks == (2,)
    assert told == [1, 1]


def test_time_does_not_count_once_there_will_be_a_notice(ends: tuple[Link, socket.socket]) -> None:
    link, supervisor = ends
    assert link.wait(GENERATION, 0.01) is None
    tell(supervisor, {"kind": "hold"})
    held = threading.Event()
    threading.Timer(0.3, tell, (supervisor, LOST)).start()
    assert link.wait(GENERATION, 60.0, held.set) is not None
    assert held.is_set()
    assert link.wait(GENERATION, 0.01) is not None


def test_nobody_is_told_of_a_hold_that_a_notice_has_ended(ends: tuple[Link, socket.socket]) -> None:
    link, supervisor = ends
    tell(supervisor, {"kind": "hold"})
    tell(supervisor, LOST)
    assert link.wait(GENERATION, 60.0) is not None
    told: list[int] = []
    assert link.wait(GENERATION, 60.0, lambda: told.append(1)) is not None
    assert link.wait(GENERATION + 1, 0.05, lambda: told.append(1)) is None
    assert not told


def test_connections_are_cut_once_more_even_if_the_loss_is_heeded_at_once() -> None:
    theirs, supervisor = socket.socketpair()
    cut = threading.Semaphore(0)
    with theirs, supervisor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor_line, "held", theirs.fileno)
        link = Link(lambda _: cut.release())
        link.meet(GENERATION + 1)
        tell(supervisor, LOST)
        assert cut.acquire(timeout=60) and cut.acquire(timeout=60)
        assert not cut.acquire(timeout=0.5), "it is enough"
        supervisor.shutdown(socket.SHUT_RDWR)
        link._thread.join()
        link._socket.close()

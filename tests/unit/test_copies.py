"""Copies of a rank's state at a partner on another node: sent, kept, never torn, and accepted from nobody else."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pace import pace
from rallypoint._core import secret, threaded_listener
from rallypoint.elastic.loops.own_state import OwnState, Place, parted
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.replication import copy_line, guests
from rallypoint.elastic.replication.copies import Copies
from rallypoint.elastic.replication.copy_line import Door
from rallypoint.elastic.storage.memory import Memory
from rallypoint.elastic.storage.schedule import Held
from rallypoint.elastic.storage.slots import Slots


NODES = (0, 1)


class End:
    """A rank."""

    def __init__(self, rank: int) -> None:
        self.memory = Memory()
        self.copies = Copies(self.memory.fd, rank, 2, count=2)
        self.door = self.copies.open("127.0.0.1", 1)

    def own(self, steps: int) -> None:
        state = OwnState(steps, Place(batch=steps), RandomState.now())
        self.copies.keep(steps, state.pack())

    def snapshot(self, slots: Slots, held: Held, size: int) -> bool:
        slots.write(held, size, [(0, torch.full((size,), held.number, dtype=torch.uint8))])
        self.copies.begin(held, *slots.place(held))
        return self.copies.wait()

    def close(self) -> None:
        self.copies.close()
        self.memory.close()


@pytest.fixture(params=["secret", "open"])
def ends(request: pytest.FixtureRequest) -> Iterator[list[End]]:
    secret.hold(os.urandom(32) if request.param == "secret" else None)
    found = [End(0), End(1)]
    for each in found:
        each.copies.connect(0, NODES, [one.door for one in found])
    yield found
    for each in found:
        each.close()
    secret.hold(None)


def test_the_own_state_of_two_steps_is_kept(ends: list[End]) -> None:
    for steps in range(5):
        ends[0].own(steps)
    ends[1].copies.drain()
    kept = parted(ends[1].copies.guests.own_of(0))
    assert [each.steps for each in kept] == [4, 3]
    assert ends[1].copies.guests.own_of(1) == b""
    # In a process that takes the partner's place, after a step that was not sent.
    memory = Memory(os.dup(ends[1].memory.fd))
    successor = Copies(memory.fd, 1, 2, count=2)
    door = successor.open("127.0.0.1", 1)
    ends[0].copies.drain()
    ends[0].copies.connect(1, NODES, [None, door])
    ends[0].own(5)
    successor.drain()
    assert [each.steps for each in parted(successor.guests.own_of(0))] == [5, 4]
    successor.close()
    memory.close()


def test_snapshots_are_kept_and_one_that_was_not_finished_is_not(ends: list[End]) -> None:
    slots = Slots(ends[0].memory.fd)
    for number in (1, 2, 3):
        assert ends[0].snapshot(slots, Held(number, 10 * number), 1 << 20)
    there = ends[1].copies.guests
    assert there.held() == ((0, (Held(2, 20), Held(3, 30))),)
    assert there.contents(0, Held(3, 30))[0].eq(3).all()
    # The next transfer breaks off: the older slot is given up for it, the newer one stays.
    line = copy_line.dial(ends[1].door, "127.0.0.1", 0)
    line.send(copy_line.offer(Held(4, 40), 1 << 20, 1))
    while not line.read(None):
        pass
    ends[1].copies.drain()
    line.close()
    assert there.held() == ((0, (Held(3, 30),)),)
    there.drop_after(2)
    assert there.held() == ()
    slots.close()


def test_a_damaged_snapshot_does_not_count(ends: list[End]) -> None:
    slots = Slots(ends[0].memory.fd)
    assert ends[0].snapshot(slots, Held(1, 10), 4096)
    begin, size, checksum = slots.place(Held(1, 10))
    ends[0].copies.begin(Held(2, 20), begin, size, checksum + 1)
    assert not ends[0].copies.wait()
    assert ends[1].copies.guests.held() == ((0, (Held(1, 10),)),)
    slots.close()


def test_who_does_not_know_the_secret_gets_nowhere(ends: list[End]) -> None:
    mine, door = secret.held(), ends[1].door
    secret.hold(os.urandom(32))
    with pytest.raises(Exception, match="secret"):
        copy_line.dial(Door(door.host, door.port, os.urandom(32).hex()), "127.0.0.1", 0)
    secret.hold(mine)
    assert ends[1].copies.guests.own_of(0) == b""


def test_a_loss_ends_the_wait_for_a_silent_partner() -> None:
    end, silent = End(0), socket.create_server(("127.0.0.1", 0))
    token = os.urandom(32).hex()
    door = Door("127.0.0.1", silent.getsockname()[1], token)

    def accept() -> None:
        sock, _ = silent.accept()
        lines.append(copy_line.welcome(sock, token, 1, bytearray)[1])

    lines: list[object] = []
    thread = threading.Thread(target=accept)
    thread.start()
    end.copies.connect(0, NODES, [None, door])
    thread.join()
    slots = Slots(end.memory.fd)
    threading.Timer(0.2, lambda: end.copies.cut(1)).start()
    assert not end.snapshot(slots, Held(1, 1), 4096)
    slots.close()
    end.close()
    lines[0].close()  # type: ignore[attr-defined]
    silent.close()


@pytest.mark.parametrize("bind", ["127.0.0.1", "*", None])
def test_a_rank_listens_where_the_job_was_told_to(
    bind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bind is not None:
        monkeypatch.setenv("RALLY_BIND", bind)
    end = End(0)
    listener = end.copies.guests._listener
    assert listener is not None
    where = listener._listener.getsockname()[0]
    # Nodes that meet at a loopback address are not necessarily on one host.
    assert where == bind if bind == "127.0.0.1" else where in {"::", "0.0.0.0"}
    end.close()


def test_strangers_take_few_threads_and_few_lines(
    ends: list[End], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=guests.__name__)
    many = 3 * threaded_listener.MOST_STRANGERS
    strangers = [
        socket.create_connection(("127.0.0.1", ends[1].door.port), timeout=10.0 * pace())
        for _ in range(many)
    ]
    ends[0].own(1)
    deadline = time.monotonic() + 10.0 * pace()
    # Plus the other rank at each of the two ends. A refused stranger's thread logs that before it ends.
    most = threaded_listener.MOST_STRANGERS + 2
    while len(caplog.records) < many - threaded_listener.MOST_STRANGERS or guest_threads() > most:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for each in strangers:
        each.close()
    slots = Slots(ends[0].memory.fd, 0)
    assert ends[0].snapshot(slots, Held(1, 10), 1000), "the partner is still there"
    slots.close()
    assert [each.levelno for each in caplog.records].count(logging.WARNING) == 1


def guest_threads() -> int:
    return [each.name for each in threading.enumerate()].count("rally-guest")


def test_regions_of_guests_do_not_overlap() -> None:
    size = 2 * guests.STRIDE + (1 << 20)
    begins = [0, *(guests.region(rank) for rank in range(100))]
    assert all(later - earlier > size for earlier, later in itertools.pairwise(begins))


def test_two_guests_that_come_at_once_do_not_cut_off_each_others_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each reads the file's size, then extends the file: what the other did in between must stay."""
    own = Memory()
    before = os.fstat(own.fd)
    later = Memory(own.fd, guests.region(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", lambda _: before)
        earlier = Memory(own.fd, guests.region(0))
    assert os.fstat(own.fd).st_size > guests.region(1)
    later.keep(b"mine")  # SIGBUS if it is beyond the end of the file
    later.close()
    earlier.close()
    own.close()

"""Strangers who hold connections open, and listeners that hang up: members get in nevertheless, and nobody is declared lost."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rallypoint import rpc
from rallypoint._core.clock import Deadline
from rallypoint._core.half_open import HalfOpen
from rallypoint.errors import PeerLost, RpcTimeout
from rallypoint.rpc.agent.agent import Agent
from rallypoint.rpc.connections import acceptor
from rallypoint.rpc.connections.dialer import is_late
from rallypoint.rpc.connections.handshake import introduce
from rallypoint.rpc.groups.member import Member
from rallypoint.wire import auth, tcp, uds
from rallypoint.wire.transport import Way
from rpc_workers import lone_agent


SECRET = b"known to all the members"
ROOM = 64
PATIENCE = 20.0

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with lone_agent(tmp_path_factory.mktemp("group"), SECRET) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(agent: Agent) -> Iterator[None]:
    rpc.rpc_sync("w0", torch.add, (torch.ones(2), 1))
    before = descriptors()
    yield
    until(lambda: not agent.acceptor.strangers, "strangers are left over")
    until(lambda: len(descriptors()) <= len(before), lambda: f"{descriptors()}, was {before}")


def descriptors() -> list[str]:
    """What is open in this process."""
    found = []
    for each in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.append(os.readlink(each.path))
    return sorted(found)


def until(is_so: Callable[[], bool], what: str | Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.005)


def knock(agent: Agent, kind: str) -> socket.socket:
    """Connect, and say nothing."""
    (address,) = (each.address for each in agent.acceptor.listeners if each.kind == kind)
    if kind == "uds":
        return uds.connect(address, Deadline(PATIENCE))
    return tcp.connect(("127.0.0.1", address[1]), Deadline(PATIENCE), 5.0)


def join(agent: Agent, kind: str) -> None:
    """Come in as a member does, and leave."""
    me = {**agent.roster.introduction(), "name": "late", "id": 77, "incarnation": "ab" * 8}
    (address,) = (each.address for each in agent.acceptor.listeners if each.kind == kind)
    way: Any = (
        {"channel": Way(tcp.TRANSPORT).channel(address), "seals": auth.SEALS()}
        if kind == "tcp"
        else {}
    )
    with knock(agent, kind) as sock:
        peer, _, _, _ = introduce(sock, SECRET, me, Deadline(PATIENCE), side=False, **way)
        assert peer["name"] == "w0"


@pytest.mark.parametrize("kind", ["uds", "tcp"])
def test_members_get_in_however_many_strangers_hold_connections(
    agent: Agent, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(agent.acceptor, "_warn_in", 0.05)
    monkeypatch.setattr(acceptor, "_NEXT_WARNING", 0.05)
    (listener,) = (each for each in agent.acceptor.listeners if each.kind == kind)
    monkeypatch.setitem(agent.acceptor._half_open, listener, HalfOpen(ROOM))
    with contextlib.ExitStack() as held:
        for number in range(5 * ROOM):
            held.enter_context(knock(agent, kind))
            if number % 40 == 0:
                join(agent, kind)
        join(agent, kind)
        held.enter_context(knock(agent, kind))
        until(lambda: len(agent.acceptor.strangers) == ROOM, "the oldest were not closed")
        # The other transports have room of their own.
        join(agent, "tcp" if kind == "uds" else "uds")
        whose = "user " if kind == "uds" else "this host"

        def is_told() -> bool:
            # The first warning may also count those of the previous test.
            held.enter_context(knock(agent, kind))
            return f"of them by {kind} from {whose}" in caplog.text

        until(is_told, "no warning")
    assert "too many unauthenticated connections" in caplog.text


def test_a_burst_does_not_hold_up_calls_that_are_under_way(agent: Agent) -> None:
    """Not all connections that wait are accepted before anybody else is heard."""
    (listener,) = (each for each in agent.acceptor.listeners if each.kind == "uds")
    rounds: list[int] = []
    accept = agent.acceptor._admit

    def count(*args: Any) -> None:
        rounds[-1] += 1
        accept(*args)

    agent._poller.change(listener.fileno(), off=acceptor.READ)
    ends = [knock(agent, "uds") for _ in range(100)]
    agent.acceptor._admit = count  # type: ignore[method-assign]
    try:
        while not rounds or rounds[-1]:
            rounds.append(0)
            agent.acceptor.admit(listener)
    finally:
        del agent.acceptor._admit  # type: ignore[method-assign]
        agent._poller.change(listener.fileno(), on=acceptor.READ)
        for end in ends:
            end.close()
    assert sum(rounds) == 100
    assert 1 < max(rounds) <= 32


# -- the dialing side ------------------------------------------------------------------------------


class Curt:
    """A listener that hangs up on whoever connects.

    Args:
        reset: it hangs up with a reset instead of in good order.
        reads: it hangs up only after something has arrived.
    """

    def __init__(self, *, reset: bool = False, reads: bool = False) -> None:
        self._reset = reset
        self._reads = reads
        self.came = 0
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._sock.getsockname()[1])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._sock.accept()
            except OSError:
                return
            self.came += 1
            with line:
                if self._reads:
                    line.recv(9000)
                if self._reset:
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(PATIENCE)


def member_at(agent: Agent, port: int) -> Member:
    """This worker, at another address."""
    assert agent.group is not None
    return dataclasses.replace(agent.group.me, host="", addresses={"tcp": ("127.0.0.1", port)})


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_handshake_that_is_cut_off_is_tried_again(
    agent: Agent, reset: bool, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    curt = Curt(reset=reset, reads=reads)
    connect = tcp.connect

    def connect_at_last(address: Any, *args: Any) -> socket.socket:
        return connect(address if curt.came >= 5 else ("127.0.0.1", curt.port), *args)

    monkeypatch.setattr(tcp, "connect", connect_at_last)
    with contextlib.closing(curt):
        assert agent.group is not None
        me = agent.group.me
        # By TCP, as from another host.
        member = dataclasses.replace(me, host="", addresses={"tcp": me.addresses["tcp"]})
        found = agent.dialer.dial(member, Deadline(PATIENCE), agent.connections)
        assert curt.came >= 5
        found.line.shut()
        found.close()


def test_a_peer_that_hangs_up_each_time_is_late_and_not_lost(agent: Agent) -> None:
    with contextlib.closing(Curt()) as curt:
        member = member_at(agent, curt.port)
        with pytest.raises(PeerLost) as caught:
            agent.dialer.dial(member, Deadline(0.3), agent.connections)
        assert is_late(caught.value)
        words = r"closed the connection \d+ times during the handshake: it is ending, or too many"
        assert curt.came > 1
        # A call that needs the connection says that its time is up.
        with pytest.raises(RpcTimeout, match=words):
            agent.connections.connect(
                dataclasses.replace(member, name="w9", id=9), time.monotonic() + 0.3, 0.3
            )
        assert curt.came < 100


def test_a_peer_that_hangs_up_and_is_gone_then_is_lost_at_once(agent: Agent) -> None:
    curt = Curt()
    member = member_at(agent, curt.port)
    threading.Timer(0.2, curt.close).start()
    with pytest.raises(PeerLost, match="refused") as caught:
        agent.dialer.dial(member, Deadline(None), agent.connections)
    assert not is_late(caught.value)


def test_whoever_tries_again_is_told_when_the_worker_leaves(agent: Agent) -> None:
    dialer = copy.copy(agent.dialer)
    dialer._stopped = threading.Event()
    with contextlib.closing(Curt()) as curt:
        threading.Timer(0.2, dialer.stop).start()
        with pytest.raises(PeerLost, match="during the handshake"):
            dialer.dial(member_at(agent, curt.port), Deadline(None), agent.connections)

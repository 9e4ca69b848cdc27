"""Workers that speak TLS: all that calls carry, and who is kept out."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_workers
import tls_ends
from rallypoint import rpc
from rallypoint.rpc import PeerLost
from rallypoint.wire import tcp
from rpc_workers import Workers, eventually, timed
from tls_relay import TlsRelay


pytestmark = pytest.mark.integration

TCP = ("tcp",)
MARKER = "a marker that nobody else may read"
join = functools.partial(rpc_workers.join, transports=TCP)


def double(x: Any) -> Any:
    return x * 2


def same(x: Any) -> Any:
    return x


def count(n: int) -> Iterator[torch.Tensor]:
    for i in range(n):
        yield torch.full((1000,), i)


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    """w0 and w1, with certificates that they have made themselves."""
    with Workers(2) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(functools.partial(join, tls=True))
        yield workers
        workers.run(rpc_workers.leave)
        after = workers.run(rpc_workers.resources)
        assert [(each["threads"], each["fds"]) for each in after] == [
            (each["threads"], each["fds"]) for each in before
        ]


# -- what goes through -------------------------------------------------------------------------------


def test_calls_go_by_tls_alone(pair: Workers) -> None:
    assert pair.on(0, lambda: rpc.rpc_sync("w1", double, (21,))) == 42
    assert pair.on(1, lambda: rpc.rpc_sync("w0", double, ("ab",))) == "abab"
    for rank in (0, 1):
        peers = pair.on(rank, lambda: rpc.statistics()["peers"])
        assert {each["transport"] for each in peers} == {"tcp+tls"}
    assert list(pair.on(0, addresses)) == ["tcp+tls"]


def test_large_tensors_both_ways(pair: Workers) -> None:
    def exchange() -> None:
        sent = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8)
        found = rpc.rpc_sync("w1", same, (sent,))
        assert torch.equal(found, sent)

    with timed(20):
        pair.on(0, exchange)


def test_streams_and_references(pair: Workers) -> None:
    def use() -> None:
        with rpc.rpc_stream("w1", count, (200,)) as stream:
            assert [int(each[-1]) for each in stream] == list(range(200))
        counter = rpc.remote("w1", Counter)
        assert counter.rpc_sync().add(2) == 2
        assert counter.rpc_sync().add(3) == 5
        assert counter.to_here().value == 5

    pair.on(0, use)


def test_many_threads_in_both_directions(pair: Workers) -> None:
    def use(other: str) -> None:
        def one(number: int) -> None:
            for turn in range(15):
                size = [1, 3_000, 300_000][(number + turn) % 3]
                sent = torch.full((size,), number * 100 + turn)
                assert torch.equal(rpc.rpc_sync(other, double, (sent,), timeout=20), sent * 2)
            waiting = [rpc.rpc_async(other, double, (i,)) for i in range(50)]
            assert [each.wait() for each in waiting] == [2 * i for i in range(50)]

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(one, range(6)))

    both = [pair.begin(0, use, "w1"), pair.begin(1, use, "w0")]
    for each in both:
        each.result(20)


def test_garbage_costs_nobody_else_anything(pair: Workers) -> None:
    where = pair.on(1, addresses)["tcp+tls"]
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"RLY1" + b"\0" * 4,
        os.urandom(5_000),
        b"\x16\x03\x01",
    ):
        with socket.create_connection(where) as stranger:
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    # And some that say nothing, or half of what is due, and stay.
    silent = [socket.create_connection(where) for _ in range(20)]
    for each in silent[10:]:
        each.send(b"\x16\x03\x01\x02\x00\x01")
    with timed(2):
        assert pair.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2
    for each in silent:
        each.close()
    eventually(
        lambda: not pair.on(1, lambda: len(rpc.api._get_current_rpc_agent().acceptor.strangers))
    )
    told = pair.on(1, lambda: rpc_workers.logged)
    assert any("does not use TLS, which this worker requires" in each for each in told)


def test_one_that_dies_is_noticed_at_once() -> None:
    with Workers(2) as workers:
        workers.run(functools.partial(join, tls=True))
        waiting = workers.begin(0, lost)
        time.sleep(0.3)
        workers.kill(1)
        with timed(3):
            assert "w1" in waiting.result(5)


def lost() -> str:
    with pytest.raises(PeerLost) as caught:
        rpc.rpc_sync("w1", time.sleep, (20,))
    return str(caught.value)


# -- who is kept out ---------------------------------------------------------------------------------


def addresses() -> dict[str, Any]:
    return dict(rpc.api._get_current_rpc_agent().group.me.addresses)


def refusal(other: str) -> str:
    with timed(3), pytest.raises(PeerLost) as caught:
        rpc.rpc_sync(other, double, (1,))
    return str(caught.value)


def test_one_with_tls_and_one_without_tell_each_other() -> None:
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=TCP, tls=rpc_workers.rank == 0))
        said = workers.on(0, refusal, "w1")
        assert "'w1'" in said
        assert (
            "it does not use TLS, which this worker requires: give all workers the same tls="
            in said
        )
        said = workers.on(1, refusal, "w0")
        assert "'w0'" in said
        assert (
            "it requires TLS and this worker does not use it: give all workers the same tls="
            in said
        )


def test_certificates_of_one_authority_are_taken_and_others_are_not(tmp_path: Path) -> None:
    ours = tls_ends.Authority(tmp_path, "ours")
    files = [
        ours.sign("w0"),
        ours.sign("w1"),
        tls_ends.Authority(tmp_path, "theirs").sign("w2"),
    ]
    with Workers(3) as workers:
        workers.run(
            lambda: rpc_workers.join(transports=TCP, tls=rpc.Tls(**files[rpc_workers.rank]))
        )
        assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (1,))) == 2
        assert workers.on(1, lambda: rpc.rpc_sync("w0", double, (1,))) == 2
        for caller, callee in ((0, "w2"), (2, "w0")):
            said = workers.on(caller, refusal, callee)
            assert "the other end's certificate is rejected (" in said
            assert "certificates from one authority" in said


def lead_astray(worker: str, kind: str, where: tuple[str, int]) -> None:
    """Have this worker reach another by an address that is not its own."""
    agent = rpc.api._get_current_rpc_agent()
    agent.group.find(worker).addresses[kind] = where


def divert(where: tuple[str, int]) -> None:
    """Redirect this worker's connections without it noticing, as a router would."""
    connect = tcp.connect
    tcp.connect = lambda _, *rest: connect(where, *rest)


@pytest.mark.parametrize("tls", [True, False])
def test_who_listens_reads_nothing(tls: bool) -> None:
    kind = "tcp+tls" if tls else "tcp"
    with Workers(2) as workers:
        workers.run(functools.partial(join, tls=tls))
        between = TlsRelay(tuple(workers.on(1, addresses)[kind]), takes_part=False)
        try:
            workers.on(0, divert, between.address)
            assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (MARKER,))) == MARKER * 2
            seen = bytes(between.seen)
        finally:
            workers.close()
            between.close()
    # Without TLS it can be read: a MAC hides nothing.
    assert (MARKER.encode() in seen) == (not tls)
    assert (b"incarnation" in seen) == (not tls)
    assert len(seen) > 200


def test_who_relays_the_proofs_with_a_certificate_of_his_own_is_refused() -> None:
    with Workers(2) as workers:
        workers.run(functools.partial(join, tls=True))
        between = TlsRelay(tuple(workers.on(1, addresses)["tcp+tls"]), takes_part=True)
        try:
            workers.on(0, lead_astray, "w1", "tcp+tls", between.address)
            said = workers.on(0, refusal, "w1")
            relay = "a relay between the two"
            # w1 is told once it has read the answer, which may be later.
            eventually(
                lambda: any(relay in each for each in workers.on(1, lambda: rpc_workers.logged))
            )
        finally:
            workers.close()
            between.close()
    assert "do not share a secret" in said
    # The relay was in the middle of it: both hellos and a proof passed through its hands.
    assert b'"role":"connecting"' in between.seen
    assert b'"role":"accepting"' in between.seen
    assert b'"proof"' in between.seen

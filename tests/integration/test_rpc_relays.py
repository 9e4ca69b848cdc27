"""A relay between two workers that can change what they send each other: over TCP, with the defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import rpc_workers
from rallypoint import rpc
from rallypoint.errors import RpcError
from rallypoint.rpc import PeerLost, RpcTimeout
from rallypoint.wire import tcp
from relays import ALTERED, Relay, flip_in_the_middle, unchanged
from rpc_workers import Workers


TCP = ("tcp",)

done: list[int] = []


def note(number: int) -> int:
    done.append(number)
    return number


def total(data: bytes) -> int:
    return sum(data)


def address() -> tuple[str, int]:
    host, port = rpc.api._get_current_rpc_agent().group.me.addresses["tcp"]
    return host, port


def lead_astray(worker: str, where: tuple[str, int]) -> None:
    """Put the relay's address into the worker's record."""
    rpc.api._get_current_rpc_agent().group.find(worker).addresses["tcp"] = where


def divert(where: tuple[str, int]) -> None:
    """Redirect this worker's connections without it noticing, as a router would."""
    connect = tcp.connect
    tcp.connect = lambda _, *rest: connect(where, *rest)


@pytest.fixture(scope="module")
def group() -> Iterator[tuple[Workers, Relay]]:
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=TCP))
        relay = Relay(workers.on(1, address))
        workers.on(0, divert, relay.address)
        try:
            yield workers, relay
        finally:
            relay.alter = unchanged
            workers.close()
            relay.close()


def call(number: int) -> str:
    try:
        # A request that does not arrive is like one that is not answered: nobody can tell until the next one arrives.
        return str(rpc.rpc_sync("w1", note, (number,), timeout=3.0))
    except (PeerLost, RpcTimeout) as error:
        return f"lost: {error}"


@pytest.mark.parametrize("how", ALTERED)
def test_what_a_relay_alters_is_refused_and_the_group_goes_on(
    group: tuple[Workers, Relay], how: str
) -> None:
    workers, relay = group
    relay.alter = unchanged
    assert workers.on(0, call, 1) == "1"
    before = workers.on(1, lambda: (len(done), rpc.statistics()["changed_frames"]))
    # In a connection that has been used already: messages are numbered along the stream.
    altered = relay.alter_next(how)
    said = [workers.on(0, call, 2), workers.on(0, call, 3), workers.on(0, call, 4)]
    assert altered
    # One call was lost with the connection, at most two if the answer had already arrived; the next has a new connection.
    assert said[2] == "4"
    lost = [each for each in said if each.startswith("lost")]
    assert lost or how == "said twice"
    calls = workers.on(1, lambda: list(done))[before[0] :]
    assert sorted(set(calls)) == calls, "nothing is done twice, and nothing that was not asked for"
    assert set(calls) <= {2, 3, 4}
    assert workers.on(1, lambda: rpc.statistics()["changed_frames"]) == before[1] + 1
    logged = workers.on(1, lambda: rpc_workers.logged)
    assert sum("a message was altered in transit" in each for each in logged) == 1


def test_a_large_tensor_that_is_altered_on_the_way_does_not_arrive(
    group: tuple[Workers, Relay],
) -> None:
    workers, relay = group

    def send() -> str:
        try:
            return str(rpc.rpc_sync("w1", total, (bytes(3_000_000),)))
        except PeerLost as error:
            return str(error)

    relay.alter = unchanged
    assert workers.on(0, send) == "0"
    relay.alter = lambda _, record: flip_in_the_middle(record) if len(record) > 99_999 else [record]
    assert "connection" in workers.on(0, send)
    relay.alter = unchanged
    assert workers.on(0, send) == "0"


def test_a_relay_at_an_address_of_its_own_is_not_believed() -> None:
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=TCP))
        relay = Relay(workers.on(1, address))
        try:
            workers.on(0, lead_astray, "w1", relay.address)
            said = workers.on(0, call, 1)
            assert "do not share a secret" in said
            assert "relay" in said
            assert workers.on(1, lambda: done) == []
            assert relay.connections
        finally:
            workers.close()
            relay.close()


# -- another user of the host, who reads and writes the store ----------------------------------------


def try_to_join() -> list[str]:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    store = rpc_workers.store()
    held = dist.PrefixStore("rpc_prefix_0", store).get("job")
    said = []
    for given in ({}, {"secret": held}, {"secret": b"a guess at the secret"}, {"insecure": True}):
        try:
            rpc.init_rpc(
                "stranger",
                rpc_backend_options=rpc.NativeRpcBackendOptions(rpc_timeout=5.0, **given),
                store=store,
            )
            said.append("it is in")
            rpc.shutdown(graceful=False)
        except RpcError as error:
            said.append(str(error))
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("secret", [None, "a secret of the job's"])
def test_another_user_who_reads_the_store_does_not_get_in(secret: str | None) -> None:
    with Workers(2) as workers:
        for rank in (0, 1):
            workers.on(rank, lambda: rpc_workers.join_dynamic(secret=secret))
        stranger = workers.more()
        said = workers.on(stranger, try_to_join)
        assert len(said) == 4
        assert all("do not share a secret" in each for each in said), said
        assert secret is None or not any(secret in each for each in said)
        assert workers.on(0, call, 7) == "7"
        assert [each.name for each in workers.on(0, rpc.members)[1]] == ["w0", "w1"]

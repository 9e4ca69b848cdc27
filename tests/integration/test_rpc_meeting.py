"""Where members meet when they bring no store: whoever comes first waits for it, quietly and not forever."""

import ctypes
import os
import re
import threading

import pytest

import rpc_workers
from ports import free_port
from rallypoint import rpc
from rallypoint._core import resolver
from rallypoint.errors import ConfigError
from rallypoint.rpc.groups import stores
from rpc_workers import CaseFailed, Workers, timed


pytestmark = pytest.mark.integration


def come(init_method: str, world_size: int | None, *, ranked: bool = True, seconds: float = 20):
    rank = rpc_workers.rank
    rpc.init_rpc(
        f"w{rank}",
        rank=rank if ranked else -1,
        world_size=world_size,
        rpc_backend_options=rpc.NativeRpcBackendOptions(
            init_method=init_method, rpc_timeout=seconds
        ),
    )


def come_by_env(port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    come("env://", 2)


def assert_silent(workers: Workers) -> None:
    """No library has said anything: c10d has much to say."""
    assert [workers.output(rank) for rank in range(2)] == ["", ""]


@pytest.mark.parametrize("world_size", [2, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_who_comes_before_the_store_waits_for_it(host, world_size):
    address = f"tcp://{host}:{free_port()}"
    with Workers(2) as workers:
        early = workers.begin(1, come, address, world_size)
        # As long as c10d's client would wait between its first tries.
        threading.Event().wait(0.3)
        workers.on(0, come, address, world_size)
        early.result()
        workers.run(rpc.shutdown)
        assert_silent(workers)


@pytest.mark.parametrize("world_size", [2, None], ids=["static", "dynamic"])
def test_a_store_that_nobody_serves_is_told_in_one_line_and_in_time(world_size):
    port = free_port()
    said = (
        f"no store at 127.0.0.1:{port} after 1 s (Connection refused):"
        " is rank 0 running, and is this its address?"
    )
    with Workers(2) as workers:
        with timed(5), pytest.raises(CaseFailed, match=re.escape(f"DistNetworkError: {said}")):
            workers.on(1, lambda: come(f"tcp://127.0.0.1:{port}", world_size, seconds=1))
        assert_silent(workers)


def test_members_without_ranks_meet_at_whoever_was_first():
    address = f"tcp://localhost:{free_port()}"
    with Workers(2) as workers:
        for rank in range(2):
            workers.on(rank, lambda: come(address, None, ranked=False))
        assert workers.on(1, lambda: rpc.rpc_sync("w0", os.getpid)) == workers.pids[0]
        workers.on(1, rpc.shutdown)
        workers.on(0, rpc.shutdown)
        assert_silent(workers)


@pytest.mark.parametrize("world_size", [2, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("port", ["99999", "abc"])
def test_a_port_that_is_none_is_named(port, world_size, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    for where in (f"tcp://127.0.0.1:{port}", f"tcp://[::1]:{port}", "env://"):
        with pytest.raises(ConfigError, match=f"'{port}': expected a port: a number from 0 to"):
            stores.open_store(where, 1, world_size, 1.0)


@pytest.mark.parametrize("rank", [0, 1, -1])
def test_the_launchers_store_is_served_by_no_member(rank, monkeypatch, capfd):
    import torch.distributed as dist

    served = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    capfd.readouterr()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(served.port))
    stores.open_store("env://", rank, None, 5.0).set("a", "b")
    assert served.get("a") == b"b"
    assert capfd.readouterr().err == ""


def test_env_says_where():
    port = free_port()
    with Workers(2) as workers:
        workers.run(come_by_env, port)
        workers.run(rpc.shutdown)
        assert_silent(workers)


def test_what_c10d_prints_is_as_it_was_when_the_last_thread_has_connected():
    import torch.distributed  # noqa: F401  # its library has the level

    def level() -> int:
        found = resolver._log_level()
        assert isinstance(found, ctypes.c_int)
        return int(found.value)

    before = level()
    inside, leave = threading.Event(), threading.Event()

    def connect() -> None:
        with resolver.connecting_to("127.0.0.1"):
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=connect)
    other.start()
    assert inside.wait(10)
    with resolver.connecting_to("::1"):
        assert level() == 2
    assert level() == 2
    leave.set()
    other.join()
    assert level() == before
    with resolver.connecting_to("a.name"):
        assert level() == before

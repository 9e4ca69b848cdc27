"""Backends by name: members that somebody holds stay valid, whoever registers what, and third parties are found."""

import pickle
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from rallypoint import rpc
from rallypoint.rpc import (
    BackendType,
    WorkerInfo,
    api,
    backend_registered,
    register_backend,
    registry,
)


class Stub:
    """The minimal agent of a third party."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.ended: list[bool] = []

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [WorkerInfo("me", 0)]

    def call_sync(
        self, to: Any, kind: Any, what: Any, content: Any, timeout: float, flags: int = 0
    ):
        func, args, kwargs = content
        return ("stub", to, func(*args, **(kwargs or {})))

    def shutdown(self, graceful: bool, timeout: float) -> None:
        self.ended.append(graceful)


class StubOptions(rpc.RpcBackendOptions):
    def __init__(self, rpc_timeout: float, init_method: str, **more: Any) -> None:
        super().__init__(rpc_timeout, init_method)
        self.more = more


construct_rpc_backend_options_handler = StubOptions


def init_backend_handler(**arguments: Any) -> Stub:
    return Stub(**arguments)


@pytest.fixture(autouse=True)
def _what_is_registered_is_put_back() -> Iterator[None]:
    before = dict(BackendType._members)
    yield
    BackendType._members.clear()
    BackendType._members.update(before)


def register(name: str) -> Any:
    return register_backend(name, StubOptions, init_backend_handler)


def test_ours_and_torchs_are_there():
    for name in ("RALLYPOINT", "RALLYPOINT_FAULTY", "TENSORPIPE"):
        assert backend_registered(name)
        assert getattr(BackendType, name) is BackendType[name]
        assert getattr(BackendType, name).name == name
    assert len(list(BackendType)) == len(BackendType)


def test_a_name_is_registered_once():
    register("MINE")
    with pytest.raises(RuntimeError, match=r"^RPC backend MINE: already registered$"):
        register("MINE")
    with pytest.raises(RuntimeError, match=r"^RPC backend .+: already registered$"):
        register("TENSORPIPE")


def test_members_that_somebody_holds_stay_valid_when_another_backend_comes():
    """torch recreates its enum each time: its earlier members become invalid, and init_rpc refuses them."""
    held = BackendType.RALLYPOINT
    for number in range(5):
        register(f"MINE{number}")
    assert isinstance(held, BackendType)
    assert held in BackendType
    assert held is BackendType.RALLYPOINT is BackendType["RALLYPOINT"]
    assert held == BackendType.RALLYPOINT
    assert {held: 1}[BackendType.RALLYPOINT] == 1
    assert pickle.loads(pickle.dumps(held)) is held
    assert repr(held) == "BackendType.RALLYPOINT"


def test_an_unknown_name_says_which_there_are():
    assert not backend_registered("NOTHING")
    with pytest.raises(AttributeError, match=r"no RPC backend 'NOTHING' \(known: .*RALLYPOINT"):
        _ = BackendType.NOTHING
    with pytest.raises(KeyError, match="no RPC backend 'NOTHING'"):
        BackendType["NOTHING"]


def test_of_many_that_register_one_name_at_once_one_wins():
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def attempt() -> None:
        start.wait()
        try:
            register("CONTESTED")
            outcomes.append("won")
        except RuntimeError:
            outcomes.append("lost")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]


def test_options_are_made_by_the_backend():
    mine = register("MINE")
    options = rpc.construct_rpc_backend_options(mine, 7.0, "tcp://a:1", colour="red")
    assert (options.rpc_timeout, options.init_method, options.more) == (
        7.0,
        "tcp://a:1",
        {"colour": "red"},
    )
    native = rpc.construct_rpc_backend_options(BackendType.RALLYPOINT, num_worker_threads=4)
    assert (native.num_worker_threads, native.rpc_timeout) == (4, 60.0)
    faulty = rpc.construct_rpc_backend_options(BackendType.RALLYPOINT_FAULTY, num_fail_sends=2)
    assert faulty.num_fail_sends == 2


def test_a_backend_of_somebody_else_is_used_by_all_functions():
    import torch.distributed as dist

    mine = register("MINE")
    rpc.init_rpc("me", backend=mine, rank=0, world_size=1, store=dist.HashStore())
    agent = api._get_current_rpc_agent()
    try:
        assert isinstance(agent, Stub)
        assert agent.arguments["name"] == "me"
        assert (agent.arguments["rank"], agent.arguments["world_size"]) == (0, 1)
        assert isinstance(agent.arguments["rpc_backend_options"], StubOptions)
        assert rpc.rpc_sync("anyone", max, (1, 2)) == ("stub", "anyone", 2)
        with pytest.raises(rpc.RpcError, match="already initialized"):
            rpc.init_rpc("me", backend=mine, rank=0, world_size=1, store=dist.HashStore())
    finally:
        rpc.shutdown(graceful=False)
    assert agent.ended == [False]
    assert not api._is_current_rpc_agent_set()


def test_the_backend_is_told_by_its_options():
    import torch.distributed as dist

    register("MINE")
    options = StubOptions(5.0, "env://")
    rpc.init_rpc("me", rank=0, world_size=1, store=dist.HashStore(), rpc_backend_options=options)
    try:
        assert api._get_current_rpc_agent().arguments["rpc_backend_options"] is options
    finally:
        rpc.shutdown(graceful=False)


def test_third_parties_are_found_by_their_entry_points_and_loaded_when_asked_for(monkeypatch):
    loads: list[str] = []

    class Entry(EntryPoint):
        def load(self) -> Any:
            loads.append(self.name)
            import types

            return types.SimpleNamespace(
                construct_rpc_backend_options_handler=StubOptions,
                init_backend_handler=init_backend_handler,
            )

    entries = [Entry(name="THEIRS", value="their.module:backend", group=registry.GROUP)]

    def found(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "rallypoint.rpc_backends"
        return [each for each in entries if name in (None, each.name)]

    monkeypatch.setattr(registry, "entry_points", found)
    with pytest.raises(AttributeError, match="THEIRS"):
        _ = BackendType.NOTHING
    assert loads == []
    member = BackendType.THEIRS
    assert member is BackendType["THEIRS"]
    assert backend_registered("THEIRS")
    assert loads == ["THEIRS"]
    assert member.value.construct_rpc_backend_options_handler is StubOptions


def test_a_store_that_is_none_is_named_before_anything_is_started() -> None:
    options = registry.construct_rpc_backend_options(BackendType.RALLYPOINT)
    for store in (None, "localhost:29500", {}):
        with pytest.raises(TypeError, match=r"`store` must be a c10d::Store.*not <class"):
            registry.init_backend(
                BackendType.RALLYPOINT,
                store=store,
                name="one",
                rank=0,
                world_size=1,
                rpc_backend_options=options,
            )

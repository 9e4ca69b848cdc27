"""The backends that are built in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rallypoint._core import env
from rallypoint._core.addresses import address_towards, hostname, is_loopback
from rallypoint._core.host import host_identity
from rallypoint.errors import ConfigError

from . import constants, trust as trusts
from .agent.agent import Agent
from .agent.devices import node_devices
from .connections.acceptor import Site
from .faulty import FaultyAgent, FaultyRpcBackendOptions
from .groups.dynamic_group import DynamicGroup
from .groups.group_store import NO_LIMIT, innermost
from .groups.member import Member, check_name
from .groups.static_group import StaticGroup
from .options import (
    NativeRpcBackendOptions,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
)
from .registry import BackendType, backend_registered, register_backend
from .time_limits import limit_of


NATIVE = "RALLYPOINT"


def _construct_native(
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: Any = None,
    _channels: Any = None,
    **kwargs: Any,
) -> NativeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        **kwargs,
    )


def _construct_faulty(
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> FaultyRpcBackendOptions:
    return FaultyRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init_native(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Agent:
    return _init(Agent, NativeRpcBackendOptions, store, name, rank, world_size, rpc_backend_options)


def _init_faulty(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Agent:
    return _init(
        FaultyAgent, FaultyRpcBackendOptions, store, name, rank, world_size, rpc_backend_options
    )


def _init(
    kind: type[Agent],
    options_kind: type[NativeRpcBackendOptions],
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    options: Any,
) -> Agent:
    """Join the group. The agent serves once it is started. Releases everything if joining fails.

    Raises:
        TypeError: store or options have the wrong type.
    """
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it by *

    given: object = store
    if not isinstance(given, Store):
        raise TypeError(f"`store` must be a c10d::Store (a TCPStore, say), not {type(store)}")
    options = adopt_options(options, options_kind)
    check_name(name)
    timeout = limit_of(options.rpc_timeout, "rpc_timeout")
    if timeout is not None:
        store.set_timeout(min(timedelta(seconds=timeout), NO_LIMIT))
    trust = trusts.agree(store, options.secret, world_size, insecure=options.insecure)
    agent = kind(name, options, trust)
    try:
        addresses = agent.listen(_site(store, world_size))
        me = Member(
            name=name,
            id=max(rank, 0),
            incarnation=agent.incarnation,
            host=host_identity(),
            pid=os.getpid(),
            addresses=addresses,
            devices=node_devices(options),
        )
        if world_size:
            group: Any = StaticGroup.form(store, me, world_size, timeout, trust.signer)
        else:
            given = rank if rank >= 0 else None
            group = DynamicGroup.join(store, me, given, timeout, signer=trust.signer)
        agent.enter(group)
    except BaseException:
        agent.close()
        raise
    return agent


def adopt_options(options: Any, kind: type[NativeRpcBackendOptions]) -> NativeRpcBackendOptions:
    """The options, converted for the native backend.

    Raises:
        TypeError: they belong to another backend.
    """
    if isinstance(options, kind):
        return options
    if type(options) is RpcBackendOptions:
        return kind(rpc_timeout=options.rpc_timeout, init_method=options.init_method)
    raise TypeError(
        f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions` (or {kind.__name__}), not"
        f" {type(options).__name__}"
    )


def _site(store: Any, world_size: int | None) -> Site:
    """This worker's address for others: by the route to the store's host, or else the host's name."""
    inner = innermost(store)
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        try:
            addr = address_towards(host, port)
        except ConfigError:
            return Site(hostname())
        size = env.get("WORLD_SIZE", "")
        # The launcher started all workers on this host.
        alone = bool(size) and size == env.get("LOCAL_WORLD_SIZE")
        if is_loopback(host) or (alone and is_loopback(addr)):
            # Only this host reaches the store. The launcher's workers share one user and one view of the file system.
            return Site(addr, addr, one_host=alone and size == str(world_size))
        # Many hosts resolve their own name to 127.0.1.1; others can still reach them by the name.
        return Site(host) if is_loopback(addr) else Site(addr, addr)
    return Site(hostname())


def _init_tensorpipe(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Any:
    from .tensorpipe import TensorPipe

    return TensorPipe(store, name, rank, world_size, rpc_backend_options)


def _construct_tensorpipe(
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def register_built_in() -> None:
    """Register the built-in backends. Idempotent."""
    if not backend_registered(NATIVE):
        register_backend(NATIVE, _construct_native, _init_native)
        register_backend("RALLYPOINT_FAULTY", _construct_faulty, _init_faulty)
        register_backend("TENSORPIPE", _construct_tensorpipe, _init_tensorpipe)


def stand_in(names: Mapping[str, str]) -> None:
    """Register our backends under torch's names, for ``compat``."""
    for name, ours in names.items():
        value = BackendType[ours].value
        if backend_registered(name):
            BackendType[name].value = value
        else:
            register_backend(name, *value)


def restore_tensorpipe() -> None:
    """The inverse of :func:`stand_in`."""
    from .registry import BackendValue

    BackendType["TENSORPIPE"].value = BackendValue(_construct_tensorpipe, _init_tensorpipe)


register_built_in()

"""Joining a group: choose the backend, open the store, start the agent."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from typing import Any

from rallypoint._core import forks
from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError, RpcError

from . import finalization, gather
from .agent.agent import Agent
from .current_agent import current_agent, member_agent, required_agent, set_current_agent
from .finalization import finalize
from .groups import stores
from .options import NativeRpcBackendOptions, RpcBackendOptions
from .registry import BackendType, construct_rpc_backend_options, init_backend
from .torch_private import init_autograd


# Whether a rank is required, as in torch; set by ``compat``.
_torch_rules = False
_init_count = 0
_init_lock = threading.Lock()


def is_available() -> bool:
    """Whether RPC is available. For torch's own RPC, this depends on how torch was built.

    Returns:
        Always True.
    """
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    *,
    store: Any = None,
) -> None:
    """Join a group. From then on, this worker can make calls and serves calls from others.

    In a static group, this is collective: every member calls it, and it blocks until all have joined. A worker that was
    :class:`Expelled` can call it again.

    Args:
        name: this worker's name, unique in the group.
        backend: the backend; by default the one that the options belong to, else ``BackendType.RALLYPOINT``.
        rank: this worker's id, unique in the group. Optional in a dynamic group.
        world_size: the number of members; None: a dynamic group, which members join and leave at any time.
        rpc_backend_options: the backend's options. Its defaults meet at ``env://``.
        store: a c10d store for the members to meet in, instead of ``init_method``.

    Raises:
        RpcError: this process is already a member, the name is taken, or the group cannot be formed.
        DeadlineExceeded: some members did not join in time; the error names them.
        TypeError: ``rank``, ``world_size``, ``backend`` or the options have the wrong type.
        ConfigError: ``rank`` does not fit ``world_size``.
    """
    backend, options = _choose(backend, rpc_backend_options)
    rank = _whole("rank", rank, "int(os.environ['RANK'])")
    if world_size is not None:
        world_size = _whole("world_size", world_size, "int(os.environ['WORLD_SIZE'])")
    if not _torch_rules:
        _check_rank(rank, world_size)
    agent = member_agent()
    if isinstance(agent, Agent) and agent.roster.expelled is not None:
        finalize()
    if member_agent() is not None:
        raise RpcError(
            "RPC is already initialized in this process: call rpc.shutdown() before another init_rpc"
        )
    if current_agent() is not None:
        raise RpcError(
            "this worker is still leaving its group, in another thread: wait until rpc.shutdown() has returned there,"
            " then call init_rpc"
        )
    if not store:
        store = stores.open_store(
            options.init_method, rank, world_size, options.rpc_timeout, torch_rules=_torch_rules
        )
    global _init_count  # noqa: PLW0603  # groups that this process was in: each has its own keys
    number = _init_count if world_size else 0
    prefixed = stores.prefixed(f"rpc_prefix_{number}", store)
    _init_rpc_backend(backend, prefixed, name, rank, world_size, options)
    # A failed attempt does not count: the others still use this number.
    with _init_lock:
        _init_count += 1


def _whole(name: str, value: Any, example: str) -> int:
    if not is_whole(value):
        raise TypeError(f"{name} is {value!r}: expected an integer, as in {name}={example}")
    return operator.index(value)


def _check_rank(rank: int, world_size: int | None) -> None:
    if world_size is None:
        return
    if world_size < 1:
        raise ConfigError(
            "world_size", world_size, "expected at least 1, or None for a dynamic group"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            "rank",
            rank,
            f"expected 0 to {world_size - 1}: each worker of a static group has its own rank",
            "under rally run, pass rank=int(os.environ['RANK'])",
        )


def _of_torch(value: Any) -> str:
    """What to do about an argument from torch's own module."""
    if not type(value).__module__.startswith("torch."):
        return ""
    return (
        f": this is torch's own; take {type(value).__name__} from rallypoint.rpc, or call rallypoint.compat.install() before"
        " torch.distributed.rpc is imported"
    )


def _choose(backend: Any, options: Any) -> tuple[BackendType, Any]:
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(
            f"Argument backend must be a member of BackendType, but got {backend!r}{_of_torch(backend)}"
        )
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, but got {options!r}{_of_torch(options)}"
        )
    if backend is None:
        if (
            options is None
            or type(options) is RpcBackendOptions
            or isinstance(options, NativeRpcBackendOptions)
        ):
            backend = BackendType["RALLYPOINT"]
        else:
            for candidate in BackendType:
                with contextlib.suppress(Exception):
                    if type(options) is type(construct_rpc_backend_options(candidate)):
                        backend = candidate
                        break
            else:
                raise TypeError(f"Could not infer backend for options {options}")
    if options is None:
        options = construct_rpc_backend_options(backend)
    return backend, options


def _init_rpc_backend(
    backend: BackendType | None = None,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    if member_agent() is not None:
        raise RpcError("RPC is already initialized in this process")
    backend, options = _choose(backend, rpc_backend_options)
    agent = init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=options,
    )
    _init_rpc_states(agent)


def _init_rpc_states(agent: Any) -> None:
    gather.forget_all()
    if isinstance(agent, Agent) and _torch_rules and "torch.distributed.autograd" in sys.modules:
        # Programs and torch's tests ask torch.distributed.autograd for debug information. Its other functions raise.
        with contextlib.suppress(Exception):
            init_autograd(agent.me.id)
    _set_and_start_rpc_agent(agent)


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Start to serve calls, once this process can make calls itself."""
    forks.call_in_child(_abandon)
    # A shutdown in another thread waits until the agent has started.
    with finalization.turn:
        set_current_agent(agent)
        if isinstance(agent, Agent):
            agent.monitor.on_lost = functools.partial(gather.lose, agent.me.name)
            try:
                agent.start()
            except BaseException:
                finalize()
                raise


def _abandon() -> None:
    """In a forked child: a thread of the parent may have held the lock."""
    global _init_lock  # noqa: PLW0603  # of this process
    _init_lock = threading.Lock()


def _get_current_rpc_agent() -> Any:
    return required_agent()


def _is_current_rpc_agent_set() -> bool:
    return member_agent() is not None

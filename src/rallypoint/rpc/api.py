"""The functions of torch.distributed.rpc, including private ones that programs use, and Rallypoint's own."""

from __future__ import annotations

from .calling import (
    _set_rpc_timeout,
    _use_rpc_pickler,
    _wait_all,
    get_rpc_timeout,
    rpc_async,
    rpc_stream,
    rpc_sync,
)
from .collect import wait_all
from .diagnostics import (
    _get_debug_info,
    _rref_context_get_debug_info,
    enable_gil_profiling,
    statistics,
)
from .finalization import (
    _delete_all_user_and_unforked_owner_rrefs,
    _wait_all_workers,
    shutdown,
)
from .gather import (
    AllGatherStates,
    _all_gather,
    _barrier,
    _broadcast_to_followers,
    _gather_to_leader,
)
from .initialization import (
    _get_current_rpc_agent,
    _init_rpc_backend,
    _init_rpc_states,
    _is_current_rpc_agent_set,
    _set_and_start_rpc_agent,
    init_rpc,
    is_available,
)
from .references.rref import remote
from .workers import _to_worker_info, get_worker_info, members, on_join, on_leave, wait_for


__all__ = [
    "AllGatherStates",
    "_all_gather",
    "_barrier",
    "_broadcast_to_followers",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_gather_to_leader",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_init_rpc_backend",
    "_init_rpc_states",
    "_is_current_rpc_agent_set",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_to_worker_info",
    "_use_rpc_pickler",
    "_wait_all",
    "_wait_all_workers",
    "enable_gil_profiling",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "members",
    "on_join",
    "on_leave",
    "remote",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "shutdown",
    "statistics",
    "wait_all",
    "wait_for",
]

"""Calls between processes: torch.distributed.rpc's, over an agent that is faster, authenticated and elastic."""

from __future__ import annotations

import torch
from torch.futures import Future

from rallypoint._core.tested_torch import warn_if_untested
from rallypoint.errors import (
    CallCancelled,
    Expelled,
    MessageTooLarge,
    NotAllowed,
    PeerLost,
    RemoteError,
    RpcError,
    RpcTimeout,
)
from rallypoint.wire.transport import ListenConfig, Listener, Reach, Transport
from rallypoint.wire.transports import register_transport

from . import (
    api as api,
    autograd as autograd,
    backends as backends,
    optim as optim,
    registry as backend_registry,
)
from .api import (
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    members,
    on_join,
    on_leave,
    remote,
    rpc_async,
    rpc_stream,
    rpc_sync,
    shutdown,
    statistics,
    wait_for,
)
from .certificates import Tls
from .current_call import CurrentCall, current_call
from .device_map import Device, NodeDevices, device_list, find_problem, reverse_maps
from .faulty import FaultyRpcBackendOptions
from .functions import async_execution, export
from .options import NativeRpcBackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions
from .references.rref import RRef
from .registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from .remote_module import RemoteModule
from .stream import RpcStream
from .worker_info import WorkerInfo


__all__ = [
    "BackendType",
    "BackendValue",
    "CallCancelled",
    "CurrentCall",
    "Device",
    "Expelled",
    "FaultyRpcBackendOptions",
    "Future",
    "ListenConfig",
    "Listener",
    "MessageTooLarge",
    "NativeRpcBackendOptions",
    "NodeDevices",
    "NotAllowed",
    "PeerLost",
    "RRef",
    "Reach",
    "RemoteError",
    "RemoteModule",
    "RpcBackendOptions",
    "RpcError",
    "RpcStream",
    "RpcTimeout",
    "TensorPipeRpcBackendOptions",
    "Tls",
    "Transport",
    "WorkerInfo",
    "async_execution",
    "autograd",
    "backend_registered",
    "backend_registry",
    "construct_rpc_backend_options",
    "current_call",
    "device_list",
    "export",
    "find_problem",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "members",
    "on_join",
    "on_leave",
    "optim",
    "register_backend",
    "register_transport",
    "remote",
    "reverse_maps",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "shutdown",
    "statistics",
    "wait_for",
]

warn_if_untested(torch.__version__)

"""torch's own agent as a backend, for comparison and for step-by-step migration."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from rallypoint.errors import ConfigError, RpcError

from . import torch_private
from .worker_info import WorkerInfo


class TensorPipe:
    """Forwards to ``torch.distributed.rpc``. One per process, since torch keeps its agent in globals.

    Raises:
        RpcError: this torch has no RPC.
        ConfigError: ``tls`` is set, which torch's agent does not support.
    """

    def __init__(
        self, store: Any, name: str, rank: int, world_size: int | None, options: Any
    ) -> None:
        if options.tls:
            # The one option that must not be ignored.
            raise ConfigError(
                "tls", None, "torch's own agent has no encryption", "use the backend RALLYPOINT"
            )
        self._torch = torch_rpc()
        theirs = self._torch.TensorPipeRpcBackendOptions(
            num_worker_threads=options.num_worker_threads,
            rpc_timeout=options.rpc_timeout,
            init_method=options.init_method,
        )
        for worker, pairs in options.device_maps.items():
            theirs.set_device_map(worker, {str(a): str(b) for a, b in pairs.items()})
        torch_private.start_torch_agent(
            self._torch,
            store=store,
            name=name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=theirs,
        )
        self.group = None
        own = self._torch.get_worker_info()
        self.me = WorkerInfo(own.name, own.id)

    @property
    def default_timeout(self) -> float:
        seconds: float = self._torch.get_rpc_timeout()
        return seconds

    @default_timeout.setter
    def default_timeout(self, seconds: float) -> None:
        torch_private.set_torch_timeout(self._torch, seconds)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def info(self, to: Any = None) -> WorkerInfo:
        found = self._torch.get_worker_info(to) if to is not None else self._torch.get_worker_info()
        return WorkerInfo(found.name, found.id)

    def infos(self) -> list[WorkerInfo]:
        infos = torch_private.torch_agent(self._torch).get_worker_infos()
        return [WorkerInfo(each.name, each.id) for each in infos]

    get_worker_info = info
    get_worker_infos = infos

    def call_sync(
        self, to: Any, kind: int, what: Any, content: Any, timeout: float, flags: int = 0
    ) -> Any:
        del kind, what, flags
        func, args, kwargs = content
        return self._torch.rpc_sync(_plain(to), func, args, kwargs, timeout)

    def call_async(
        self, to: Any, kind: int, what: Any, content: Any, timeout: float, flags: int = 0
    ) -> Any:
        del kind, what, flags
        func, args, kwargs = content
        return self._torch.rpc_async(_plain(to), func, args, kwargs, timeout)

    def remote(self, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> Any:
        return self._torch.remote(_plain(to), func, args, kwargs, timeout)

    def call_stream(self, *_: Any) -> Iterator[Any]:
        raise RpcError("TensorPipe has no streams: use BackendType.RALLYPOINT")

    def get_debug_info(self) -> dict[str, str]:
        return dict(torch_private.torch_agent(self._torch).get_debug_info())

    def rref_debug_info(self) -> dict[str, str]:
        return torch_private.torch_rref_info(self._torch)

    def enable_gil_profiling(self, flag: bool) -> None:
        self._torch.enable_gil_profiling(flag)

    def shutdown(self, graceful: bool, timeout: float) -> None:
        self._torch.shutdown(graceful, timeout)


def _plain(to: Any) -> Any:
    return to.id if isinstance(to, WorkerInfo) else to


def torch_rpc() -> Any:
    """torch's own module, even while ``compat`` replaces it.

    Raises:
        RpcError: this torch has none.
    """
    found = sys.modules.get("torch.distributed.rpc")
    if found is None:
        found = importlib.import_module("torch.distributed.rpc")
    if not hasattr(found, "TensorPipeAgent") or not found.is_available():
        raise RpcError("the installed torch was built without RPC: use BackendType.RALLYPOINT")
    return found

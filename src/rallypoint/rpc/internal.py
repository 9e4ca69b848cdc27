"""The contents of ``torch.distributed.rpc.internal``: pickling, for code that uses torch's private names."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from .serialization.payload import _REDUCERS, Writer, register_reducer


class RPCExecMode(Enum):
    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call: a function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """How torch sends an exception; Rallypoint sends them as data (``wire/remote_error.py``)."""

    msg: str
    exception_type: Any


class _Tables(threading.local):
    """The tensors of the message that is being read. Messages can nest, in ``__setstate__``."""

    reading: tuple[torch.Tensor, ...] | None = None


_tables = _Tables()


def _take_tensor(index: int) -> torch.Tensor:
    reading = _tables.reading
    if reading is None:
        raise pickle.UnpicklingError("this pickle is part of a message, and cannot be read alone")
    return reading[index]


class _TableWriter(Writer):
    """Puts tensors into a table."""

    def __init__(self, file: io.BytesIO, own: dict[type, Callable[[Any], Any]]) -> None:
        super().__init__(file, None, None, apart=False)
        # Not a worker's id: in torch's tests, messages are written but not sent.
        self.to = -1
        self.table: list[torch.Tensor] = []
        self._own = own

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self.table.append(obj)
            return _take_tensor, (len(self.table) - 1,)
        own = self._own.get(kind)
        if own is not None:
            return own(obj)
        reducer = _REDUCERS.get(kind)
        return NotImplemented if reducer is None else reducer(self, obj)


class _InternalRPCPickler:
    """Pickles to bytes and a table of tensors."""

    def __init__(self) -> None:
        self._own: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        self._own.setdefault(obj_class, reducer)
        if obj_class not in _REDUCERS:
            # Also for calls, which do not use this object.
            register_reducer(obj_class, lambda _, obj: reducer(obj))

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        file = io.BytesIO()
        writer = _TableWriter(file, self._own)
        writer.dump(obj)
        return file.getvalue(), writer.table

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        before, _tables.reading = _tables.reading, tuple(tensor_table)
        try:
            return pickle.loads(binary_data)  # noqa: S301  # the sender has proved the job's secret
        finally:
            _tables.reading = before


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """torch's name for a call in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


__all__ = [
    "PythonUDF",
    "RPCExecMode",
    "RemoteException",
    "deserialize",
    "serialize",
]

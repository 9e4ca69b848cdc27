"""Every private name of torch, NumPy and Python that this package uses, and its purpose.

No other module of ``rpc`` uses one, as ``tests/test_architecture.py`` checks. ``tests/unit/test_torch_private.py`` checks
each name and signature in the installed torch, to show what a new version breaks.
"""

from __future__ import annotations

import _thread
import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.jit._builtins import _get_builtin_table


# Starts a thread from a signal handler: Thread.start takes locks that the interrupted code may hold.
start_thread = _thread.start_new_thread

# The unpickler in Python. The one in C does not let a subclass decide at each instruction.
PythonUnpickler: Any = pickle._Unpickler

# The C++ base class of futures: its methods bypass what torch.futures.Future and RpcFuture add, and ``then`` returns it.
NativeFuture = torch._C.Future


def _raise(error: BaseException) -> None:
    raise error


def fail_future(future: NativeFuture[Any], error: BaseException) -> None:
    """``torch.futures.Future.set_exception``, which calls the future's own ``set_result``."""
    future._set_unwrap_func(_raise)
    NativeFuture.set_result(future, error)


# -- functions that are sent by name --------------------------------------------------------------------------


@cache
def operator_names() -> dict[int, str]:
    """The operator (``aten::add``) that each of torch's built-in functions stands for, by the function's ``id``."""
    return dict(_get_builtin_table())  # type: ignore[no-untyped-call]


def operator_schemas(name: str) -> list[Any]:
    """The overloads of an operator (``aten::add``)."""
    return list(torch._C._jit_get_schemas_for_operator(name))


def script_name(function: Any) -> tuple[str, str]:
    """Module and name of a TorchScript function."""
    full = torch._jit_internal._qualified_name(function).removeprefix("__torch__.")
    module, _, name = full.rpartition(".")
    return module, name


# -- tensors -----------------------------------------------------------------------------------------------------

# Autograd's tensors of zeros, which have no memory.
is_zero_tensor = torch.Tensor._is_zerotensor
# References from C++.
tensor_uses = torch.Tensor._use_count  # type: ignore[attr-defined]


def storage_uses(storage: torch.UntypedStorage) -> int:
    """References to a tensor's memory from C++."""
    return torch._C._storage_Use_Count(storage._cdata)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse COO tensor; the public methods require it to be coalesced."""
    return tensor._indices(), tensor._values()


def stand_in(tensor: Tensor) -> str | None:
    """The kind of a tensor without data of its own; None for any other tensor."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if fakes is not None and isinstance(tensor, fakes.FakeTensor):
        return "a fake tensor (FakeTensorMode, torch.compile, torch.export)"
    functorch = torch._C._functorch  # torch itself asks there
    if functorch.is_batchedtensor(tensor):
        return "a tensor inside torch.func.vmap"
    if functorch.is_gradtrackingtensor(tensor):
        return "a tensor inside torch.func.grad, vjp or jvp"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor (torch.func.functionalize, torch.compile)"
    return None


# Public names of the classes that define the methods of tensors and storages.
PUBLIC_NAMES: dict[type, str] = {
    torch._C.TensorBase: "torch.Tensor",
    torch._C.StorageBase: "torch.storage.UntypedStorage",
    torch.storage._StorageBase: "torch.storage.UntypedStorage",
}
# Functions that rebuild pickled arrays, in NumPy 1 (core) and 2 (_core).
NUMPY_REBUILDERS = frozenset(
    f"numpy.{core}.{name}"
    for core in ("core", "_core")
    for name in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
)


# -- memory of GPUs in other processes ----------------------------------------------------------------------


def share_cuda(storage: Any) -> tuple[Any, ...]:
    """The data with which another process can map a storage; see ``cuda_ipc.Block``."""
    _, *block = storage._share_cuda_()
    return tuple(block)


def open_cuda(index: int, block: tuple[Any, ...]) -> torch.UntypedStorage:
    """Map the result of another process's :func:`share_cuda`, on the GPU with this index."""
    return torch.UntypedStorage._new_shared_cuda(index, *block)


def release_cuda(counter: bytes, offset: int) -> None:
    """Decrement the counter of a block that is not mapped."""
    torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)


def gradients(
    outputs: Sequence[Any], given: Sequence[Tensor], inputs: Sequence[Any], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """Like ``torch.autograd.grad`` of edges, but without its checks in Python, which take as long as a small graph.

    The engine checks shapes itself. Inputs that the outputs do not depend on have no gradient.
    """
    run: Callable[..., tuple[Tensor | None, ...]]
    run = torch.autograd.Variable._execution_engine.run_backward
    return run(tuple(outputs), tuple(given), retain_graph, False, tuple(inputs), True)


def is_any_autocast_enabled() -> bool:
    """Whether autocast is enabled in this thread, for any type of device."""
    return bool(torch._C._is_any_autocast_enabled())


@cache
def autocast_kinds() -> tuple[str, ...]:
    """The types of devices that autocast supports."""
    return tuple(torch._C._autocast_supported_devices())


# -- torch.distributed.rpc's own agent, and torch.distributed.autograd ----------------------------------------


def init_autograd(rank: int) -> None:
    """Required by torch's agent and by its debug information; torch's init_rpc does it first."""
    importlib.import_module("torch.distributed.autograd")._init(rank)


def autograd_debug_info() -> dict[str, str]:
    """torch's part of the debug information; raises if :func:`init_autograd` was not called."""
    return dict(importlib.import_module("torch.distributed.autograd")._get_debug_info())


def start_torch_agent(torch_rpc: Any, **options: Any) -> None:
    """Join a group with torch's own agent."""
    init_autograd(options["rank"])
    torch_rpc._init_rpc_backend(backend=torch_rpc.BackendType.TENSORPIPE, **options)


def torch_agent(torch_rpc: Any) -> Any:
    """The agent that :func:`start_torch_agent` started."""
    return torch_rpc.api._get_current_rpc_agent()


def set_torch_timeout(torch_rpc: Any, seconds: float) -> None:
    """The default timeout of its calls."""
    torch_rpc._set_rpc_timeout(seconds)


def torch_rref_info(torch_rpc: Any) -> dict[str, str]:
    """The debug information of its RRefs."""
    return dict(torch_rpc._rref_context_get_debug_info())

"""The modules that stand in for torch's, and how they are installed and removed."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from rallypoint import rpc
from rallypoint.rpc import (
    api as public_api,
    backends,
    calling,
    collect,
    constants,
    diagnostics,
    finalization,
    functions,
    gather,
    initialization,
    internal,
    options,
    registry as backend_registry,
    rref_proxy,
    workers,
)
from rallypoint.rpc.agent.agent import Agent
from rallypoint.rpc.current_agent import member_agent, required_agent
from rallypoint.rpc.references import rref

from . import torch_private
from .autograd import StandIn
from .window import Window


_NAME = "torch.distributed.rpc"
_TESTING = f"{_NAME}.{torch_private.TESTING}"
_PROFILER = f"{_NAME}.{torch_private.PROFILER}"
# The modules whose contents torch has in one: the calls, their state, and their building blocks.
_API_HOMES = (
    calling,
    workers,
    gather,
    initialization,
    finalization,
    diagnostics,
    rref,
    public_api,
)
api: Any = Window(f"{_NAME}.api", _API_HOMES)
_SUBMODULES: dict[str, ModuleType] = {
    "api": api,
    "backend_registry": backend_registry,
    "constants": constants,
    "functions": functions,
    "internal": internal,
    "options": options,
    "rref_proxy": rref_proxy,
}
# torch's names of the backends that ours replace, and our names.
_BACKENDS = {"TENSORPIPE": "RALLYPOINT", "FAULTY_TENSORPIPE": "RALLYPOINT_FAULTY"}
# Names in torch's C++ module that programs use in isinstance() checks, or call.
_NATIVE_NAMES = ("PyRRef", "WorkerInfo", torch_private.IS_AGENT_SET, "get_rpc_timeout")
# torch's versions miss our failures: they return early only for failures that C++ code has set.
_FUTURES = {"collect_all": collect.collect_all, "wait_all": collect.wait_all}

# DDP looks for RRefs in its module's outputs, and imported torch's class when torch was imported.
_ddp: Any = importlib.import_module("torch.nn.parallel.distributed")
_MISSING = object()
_lock = threading.Lock()
_before: dict[str, Any] | None = None
_autograd = StandIn()


def install() -> None:
    """Replace ``torch.distributed.rpc`` with ``rallypoint.rpc`` in this process. A second call does nothing.

    Code that imported functions from ``torch.distributed.rpc`` earlier keeps torch's. Until :func:`uninstall`, torch's
    backend names (``TENSORPIPE``) select Rallypoint's backends. No communication; call it on every worker.

    Raises:
        RpcError: this process is a member of an RPC group.
    """
    global _before  # noqa: PLW0603  # what to restore; None: not installed
    with _lock:
        if _before is not None:
            return
        _refuse_in_group("install")
        _before = {
            "modules": {name: sys.modules.get(name, _MISSING) for name in _module_names()},
            "attribute": getattr(torch.distributed, "rpc", _MISSING),
            "native": _native_names(),
        }
        backends.stand_in(_BACKENDS)
        facade = _facade()
        sys.modules[_NAME] = facade
        for name in _SUBMODULES:
            sys.modules[f"{_NAME}.{name}"] = _SUBMODULES[name]
        sys.modules[_TESTING] = _testing(facade)
        sys.modules[_PROFILER] = _profiler()
        torch.distributed.rpc = facade
        _before["futures"] = {name: getattr(torch.futures, name) for name in _FUTURES}
        for name, replacement in _FUTURES.items():
            setattr(torch.futures, name, replacement)
        initialization._torch_rules = True
        _patch_native()
        _before["ddp"] = getattr(_ddp, "RRef", _MISSING)
        if _before["ddp"] is not _MISSING:
            _ddp.RRef = rpc.RRef
        _autograd.begin()


def uninstall() -> None:
    """Restore torch's own modules. A second call does nothing.

    Raises:
        RpcError: this process is a member of an RPC group.
    """
    global _before
    with _lock:
        if _before is None:
            return
        _refuse_in_group("uninstall")
        before, _before = _before, None
        for name, module in before["modules"].items():
            if module is _MISSING:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        if before["attribute"] is _MISSING:
            del torch.distributed.rpc
        else:
            torch.distributed.rpc = before["attribute"]
        native = torch_private.native_rpc()
        for name, value in before["native"].items():
            setattr(native, name, value)
        for name, value in before["futures"].items():
            setattr(torch.futures, name, value)
        _autograd.end()
        if before["ddp"] is not _MISSING:
            _ddp.RRef = before["ddp"]
        initialization._torch_rules = False
        backends.restore_tensorpipe()


@contextmanager
def installed() -> Iterator[None]:
    """Use Rallypoint for the length of a block.

    Returns:
        A context manager: :func:`install` on entry, :func:`uninstall` on exit.

    Raises:
        RpcError: this process is a member of an RPC group.
    """
    install()
    try:
        yield
    finally:
        uninstall()


def is_installed() -> bool:
    """Whether Rallypoint stands in for ``torch.distributed.rpc``.

    Returns:
        True from :func:`install` to :func:`uninstall`.
    """
    return _before is not None


def _refuse_in_group(what: str) -> None:
    if member_agent() is not None:
        raise rpc.RpcError(
            f"cannot {what} while this process is a member of an RPC group; call rpc.shutdown() first"
        )


def _require_initialized(func: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator for functions that need an RPC group."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        required_agent()
        return func(*args, **kwargs)

    return wrapper


torch_private.set_name(api, torch_private.REQUIRE_INITIALIZED, _require_initialized)


def _module_names() -> list[str]:
    names = [_NAME, *(f"{_NAME}.{name}" for name in _SUBMODULES)]
    return [*names, _TESTING, _PROFILER]


def _facade() -> ModuleType:
    """A module like ``torch.distributed.rpc``: public names, submodules, and private names at the top level."""
    facade = ModuleType(_NAME, rpc.__doc__)
    facade.__path__ = []  # so that it can have submodules
    for name in rpc.__all__:
        setattr(facade, name, getattr(rpc, name))
    for name, module in _SUBMODULES.items():
        setattr(facade, name, module)
    for name in dir(api):
        if name.startswith("_") and not name.startswith("__") and callable(getattr(api, name)):
            setattr(facade, name, getattr(api, name))
    extra: dict[str, Any] = {
        "PyRRef": rpc.RRef,
        "TensorPipeAgent": Agent,
        "RpcAgent": Agent,
        "AllGatherStates": api.AllGatherStates,
        "enable_gil_profiling": api.enable_gil_profiling,
        torch_private.PROFILE: _no_profiler,
        torch_private.UNSET_TIMEOUT: constants.UNSET_RPC_TIMEOUT,
        torch_private.DEFAULT_TIMEOUT: constants.DEFAULT_RPC_TIMEOUT_SEC,
        torch_private.DEFAULT_INIT_METHOD: constants.DEFAULT_INIT_METHOD,
        torch_private.DEFAULT_THREADS: constants.DEFAULT_NUM_WORKER_THREADS,
        "__all__": [*rpc.__all__],
    }
    for name, value in extra.items():
        setattr(facade, name, value)
    return facade


def _profiler() -> ModuleType:
    module = ModuleType(_PROFILER)
    torch_private.set_name(module, torch_private.PROFILE, _no_profiler)
    return module


def _no_profiler(*_: Any, **__: Any) -> Any:
    raise rpc.RpcError(
        "Rallypoint does not support torch's profiling across processes, which depends on torch's C++ agent;"
        " profile each process with torch.profiler"
    )


def _testing(facade: ModuleType) -> ModuleType:
    """Stands in for torch's module whose import registers the fault-injecting backend; ours is already registered."""
    module = ModuleType(_TESTING)
    module.__path__ = []
    module.is_available = api.is_available  # type: ignore[attr-defined]
    torch_private.set_name(facade, torch_private.TESTING, module)
    return module


def _native_names() -> dict[str, Any]:
    native = torch_private.native_rpc()
    if native is None:
        return {}
    return {name: getattr(native, name) for name in _NATIVE_NAMES if hasattr(native, name)}


def _patch_native() -> None:
    native = torch_private.native_rpc()
    if native is None:
        return
    replacements = {
        "PyRRef": rpc.RRef,
        "WorkerInfo": rpc.WorkerInfo,
        torch_private.IS_AGENT_SET: initialization._is_current_rpc_agent_set,
        "get_rpc_timeout": api.get_rpc_timeout,
    }
    for name in _native_names():
        setattr(native, name, replacements[name])

"""Modules that stand in for torch's: what they are, and how they are put in place and taken out again."""

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
from rallypoint.rpc.agent_in_use import member_agent, required_agent
from rallypoint.rpc.references import rref

from . import torch_private
from .autograd import Refusal
from .window import Window


_NAME = "torch.distributed.rpc"
_TESTING = f"{_NAME}.{torch_private.TESTING}"
_PROFILER = f"{_NAME}.{torch_private.PROFILER}"
# torch has the calls, their state, and what they are made of in one module.
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
# What torch calls the backends whose place ours take.
_BACKENDS = {"TENSORPIPE": "RALLYPOINT", "FAULTY_TENSORPIPE": "RALLYPOINT_FAULTY"}
# Names of torch's C++ module that programs test objects with, or ask.
_NATIVE_NAMES = ("PyRRef", "WorkerInfo", torch_private.IS_AGENT_SET, "get_rpc_timeout")
# torch's do not end early when a call has failed: only failures that C++ has set count there.
_FUTURES = {"collect_all": collect.collect_all, "wait_all": collect.wait_all}

# Which DDP asks of its module's outputs, and has imported with torch.
_ddp: Any = importlib.import_module("torch.nn.parallel.distributed")
_MISSING = object()
_lock = threading.Lock()
_before: dict[str, Any] | None = None
_refusal = Refusal()


def install() -> None:
    """Put ``rallypoint.rpc`` in the place of ``torch.distributed.rpc``; a second call does nothing.

    Code that has imported functions of torch's before keeps them. Backends of torch's names (``TENSORPIPE``) are
    Rallypoint's until :func:`uninstall`.

    Raises:
        RpcError: this process is a member of a group right now.
    """
    global _before  # noqa: PLW0603  # what to restore; None: nothing is installed
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
        _refusal.begin()


def uninstall() -> None:
    """Put torch's own modules back. A second call does nothing.

    Raises:
        RpcError: this process is a member of a group right now.
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
        _refusal.end()
        if before["ddp"] is not _MISSING:
            _ddp.RRef = before["ddp"]
        initialization._torch_rules = False
        backends.restore_tensorpipe()


@contextmanager
def installed() -> Iterator[None]:
    """:func:`install` for the length of a block."""
    install()
    try:
        yield
    finally:
        uninstall()


def is_installed() -> bool:
    """Whether :func:`install` is in effect."""
    return _before is not None


def _refuse_in_group(what: str) -> None:
    if member_agent() is not None:
        raise rpc.RpcError(
            f"cannot {what} while this process is a member of an RPC group: shut it down first"
        )


def _require_initialized(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of torch's: the function needs a group."""

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
    """``torch.distributed.rpc`` as torch has it: public names, submodules, and private names at its top."""
    facade = ModuleType(_NAME, rpc.__doc__)
    facade.__path__ = []  # it has submodules
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
        "profiling of calls across processes is torch's own, and was bound to its C++ agent; profile each"
        " process with torch.profiler"
    )


def _testing(facade: ModuleType) -> ModuleType:
    """torch's module whose import registers the fault-injecting backend; here it is registered already."""
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

"""Makes torch's distributed autograd raise while Rallypoint stands in for torch's RPC, and restores it afterwards.

Its contexts record calls of torch's own agent only. With ours they would stay empty, and gradients would silently be
wrong.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd

from rallypoint.errors import RpcError

from . import torch_private


# Imported with the rest of torch.distributed.optim, by programs that use one of its optimizers.
_OPTIMIZER = "torch.distributed.optim.optimizer"
_FUNCTIONS = ("backward", "get_gradients", torch_private.NEW_CONTEXT)
_MISSING = object()


class Refusal:
    """Replaces the entry points of distributed autograd from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        native = torch_private.native_autograd()
        if native is None:
            # This torch was built without it.
            return
        module: Any = torch.distributed.autograd
        for name in _FUNCTIONS:
            shown = "context()" if name == torch_private.NEW_CONTEXT else f"{name}()"
            self._replace((module, native), name, f"torch.distributed.autograd.{shown}")
        # In the class itself: programs may have imported it already.
        self._replace((module.context,), "__init__", "torch.distributed.autograd.context()")
        if _OPTIMIZER in sys.modules:
            self._refuse_optimizer(sys.modules[_OPTIMIZER])
        else:
            finder = _AfterImport(_OPTIMIZER, self._refuse_optimizer)
            sys.meta_path.insert(0, finder)
            self._undo.callback(_remove, sys.meta_path, finder)

    def end(self) -> None:
        self._undo.close()

    def _refuse_optimizer(self, module: Any) -> None:
        name = "torch.distributed.optim.DistributedOptimizer"
        self._replace((module.DistributedOptimizer,), "__init__", name)

    def _replace(self, owners: Sequence[Any], name: str, what: str) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise RpcError(
                f"{what} does not work over Rallypoint: it does not record Rallypoint's calls, so gradients would stop"
                " there; use rallypoint.rpc.autograd and rallypoint.rpc.optim, or torch's own RPC"
                " (rallypoint.compat.uninstall())"
            )

        for owner in owners:
            self._undo.callback(_put_back, owner, name, vars(owner).get(name, _MISSING))
            setattr(owner, name, refuse)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _remove(finders: list[Any], finder: MetaPathFinder) -> None:
    with contextlib.suppress(ValueError):
        finders.remove(finder)


class _AfterImport(MetaPathFinder):
    """Calls ``act`` with a module right after its import."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                self._act(module)

        loader.exec_module = exec_module
        return spec

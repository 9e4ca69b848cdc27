"""Replaces torch's distributed autograd and optimizer with Rallypoint's, and restores torch's afterwards.

torch's contexts record only calls of torch's own agent. With our agent they would stay empty, and gradients would silently
be wrong.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rallypoint.rpc import autograd
from rallypoint.rpc.autograd.context import Context
from rallypoint.rpc.current_agent import required_agent
from rallypoint.rpc.optim import DistributedOptimizer

from . import torch_private
from .autograd_contexts import FUNCTIONS


# Imported with the rest of torch.distributed.optim, by programs that use one of its optimizers.
_OPTIMIZER = "torch.distributed.optim.optimizer"
_MISSING = object()


class StandIn:
    """Replaces torch's distributed autograd from :meth:`begin` to :meth:`end`.

    Methods are replaced in torch's classes themselves: programs may have imported those already.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        native = torch_private.native_autograd()
        if native is None:
            # This torch was built without distributed autograd.
            return
        module: Any = torch.distributed.autograd
        ours = {"backward": _backward, "get_gradients": autograd.get_gradients, **FUNCTIONS}
        for owner in (module, native):
            for name, replacement in ours.items():
                self._replace(owner, name, replacement)
        self._replace(Context, "keeps_received", True)
        self._replace(DistributedDataParallel, "__init__", _averaging(DistributedDataParallel))
        self._replace(module.context, "__enter__", _enter)
        self._replace(module.context, "__exit__", _exit)
        if _OPTIMIZER in sys.modules:
            self._replace_optimizer(sys.modules[_OPTIMIZER])
        else:
            finder = _AfterImport(_OPTIMIZER, self._replace_optimizer)
            sys.meta_path.insert(0, finder)
            self._undo.callback(_remove, sys.meta_path, finder)

    def end(self) -> None:
        self._undo.close()

    def _replace_optimizer(self, module: Any) -> None:
        self._replace(module.DistributedOptimizer, "__init__", _make_optimizer)
        self._replace(module.DistributedOptimizer, "step", _step)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._undo.callback(_put_back, owner, name, vars(owner).get(name, _MISSING))
        setattr(owner, name, replacement)


# Methods for torch's classes. Each of torch's objects holds one of ours.


def _enter(self: Any) -> int:
    self.autograd_context = autograd.context()
    context_id: int = self.autograd_context.__enter__()
    return context_id


def _exit(self: Any, *error: Any) -> None:
    self.autograd_context.__exit__(*error)


def _make_optimizer(
    self: Any, optimizer_class: Any, params_rref: Any, *args: Any, **kwargs: Any
) -> None:
    self.optimizer = DistributedOptimizer(optimizer_class, params_rref, *args, **kwargs)


def _step(self: Any, context_id: int) -> None:
    self.optimizer.step(context_id)


def _averaging(kind: Any) -> Callable[..., None]:
    """DDP's ``__init__``, but for modules that also average gradients in contexts."""
    initialize = kind.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        initialize(self, *args, **kwargs)
        autograd.average(self)

    return __init__


def _backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    try:
        autograd.backward(context_id, roots, retain_graph)
    except (RuntimeError, TypeError):
        raise
    except Exception as error:
        # Raise it as torch's engine does for what a node raised, on whichever worker.
        rank = required_agent().info(getattr(error.__cause__, "worker", None)).id
        raise RuntimeError(f"Error on Node {rank}: {error}") from error


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

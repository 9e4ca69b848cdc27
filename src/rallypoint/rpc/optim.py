"""An optimizer over parameters on several workers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import constants
from .autograd import get_gradients
from .autograd.context import within
from .calling import rpc_async
from .current_agent import required_agent
from .references.rref import RRef, remote
from .worker_info import WorkerInfo


__all__ = ["DistributedOptimizer"]

# A worker's own steps follow one another: parameters may be shared by several optimizers.
_lock = threading.Lock()


class _LocalOptimizer:
    """The part of a :class:`DistributedOptimizer` on one worker: an optimizer for the parameters there."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        parameters: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer_class(parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        gradients = get_gradients(context_id)
        with _lock:
            before = [each.grad for each in self._parameters]
            try:
                for each in self._parameters:
                    each.grad = gradients.get(each)
                self._optimizer.step()
            finally:
                for each, gradient in zip(self._parameters, before, strict=True):
                    each.grad = gradient


def make_local(
    optimizer_class: type[torch.optim.Optimizer],
    parameters: Sequence[RRef[Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _LocalOptimizer:
    """Runs on the owner of the parameters."""
    # A message may contain anything.
    kind: Any = optimizer_class
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise TypeError(f"{optimizer_class!r} is not a class of optimizers (torch.optim.Optimizer)")
    return _LocalOptimizer(
        optimizer_class, [each.local_value() for each in parameters], args, kwargs
    )


def step_local(optimizer: RRef[_LocalOptimizer], context_id: int) -> None:
    """Runs on the owner of the parameters."""
    found = optimizer.local_value()
    if type(found) is not _LocalOptimizer:
        raise TypeError(f"the reference is to a {type(found).__name__}, not to an optimizer")
    found.step(context_id)


class DistributedOptimizer:
    """One optimizer on each worker that has some of the parameters. They step together.

    Steps of different workers run at the same time, and those on one worker one after the other. The parameters' own
    ``.grad`` is neither read nor changed.

    Args:
        optimizer_class: a class of optimizers that needs no closure, such as ``torch.optim.Adam``. Under an allow-list,
            the workers' must contain it.
        params_rref: references to the parameters. A list of a module's parameters is
            ``[rpc.RRef(p) for p in module.parameters()]`` on the worker that has it.
        args, kwargs: for each of the optimizers, after its parameters.

    Raises:
        PeerLost: a worker that has parameters is gone.
        Exception: what the optimizer's class raised. All workers have answered by then; errors of further workers are
            notes of the first one.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Sequence[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        by_owner: dict[WorkerInfo, list[RRef[Any]]] = defaultdict(list)
        for each in params_rref:
            by_owner[each.owner()].append(each)
        if not by_owner:
            raise ValueError("params_rref is empty: expected references to parameters")
        self._optimizers = [
            (owner, remote(owner, make_local, (optimizer_class, owned, args, kwargs)))
            for owner, owned in by_owner.items()
        ]
        # References are made without waiting: an error shows when the value is used.
        _gather(
            [(owner, rpc_async(owner, check_made, (each,))) for owner, each in self._optimizers]
        )

    def step(self, context_id: int, *, timeout: float = constants.UNSET_RPC_TIMEOUT) -> None:
        """Update all parameters that have a gradient in a context. Blocks until all workers have done it.

        Args:
            context_id: from :func:`rpc.autograd.context`.
            timeout: seconds, as for ``rpc_sync``.

        Raises:
            PeerLost: a worker that has parameters is gone.
            RpcError: this worker does not know the context.
            Exception: what a step raised. All workers have answered by then; errors of further workers are notes of the
                first one.
        """
        # The calls are part of the context, so that workers which it has not reached yet know it.
        with within(required_agent().contexts.get(context_id)):
            steps = [
                (owner, rpc_async(owner, step_local, (each, context_id), timeout=timeout))
                for owner, each in self._optimizers
            ]
        _gather(steps)


def check_made(optimizer: RRef[_LocalOptimizer]) -> None:
    """Runs on the owner of the parameters: raises what creating the optimizer raised."""
    optimizer.local_value()


def _gather(calls: Sequence[tuple[WorkerInfo, Any]]) -> None:
    """Wait for all; raise the first error, with the others as notes."""
    first: Exception | None = None
    for owner, each in calls:
        try:
            each.wait()
        except Exception as error:  # noqa: BLE001  # raised below
            if first is None:
                first = error
                first.add_note(f"This was raised on worker {owner.name!r}.")
            else:
                first.add_note(f"Worker {owner.name!r} raised {type(error).__name__}: {error}")
    if first is not None:
        raise first

"""An optimizer over parameters on several workers."""

from __future__ import annotations

import inspect
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rallypoint._core import raised
from rallypoint.errors import RpcError
from rallypoint.rpc.current_context import within
from rallypoint.wire.remote_error import message_of

from . import constants
from .calling import rpc_async
from .connections.messages import Kind
from .current_agent import required_agent
from .references.rref import RRef, remote
from .worker_info import WorkerInfo


__all__ = ["DistributedOptimizer"]

# Steps on one worker run one after the other: several optimizers may share parameters.
_lock = threading.Lock()
# The optimizers on this worker. References keep them alive; a step names one by its number, which is faster.
_local: WeakValueDictionary[int, _LocalOptimizer] = WeakValueDictionary()
# It wraps an existing optimizer and averages over a process group, which calls know nothing about.
_POST_LOCAL_SGD = "PostLocalSGDOptimizer"


def _check_class(kind: Any) -> None:
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_class is {kind!r}: expected a class derived from torch.optim.Optimizer, such as torch.optim.SGD"
            " (functional optimizers of torch.distributed.optim are not)"
        )
    if kind.__name__ == _POST_LOCAL_SGD and kind.__module__.startswith("torch."):
        raise TypeError(
            f"optimizer_class is {_POST_LOCAL_SGD}, which averages over a process group: use it there without a"
            " DistributedOptimizer, or pass the class of the optimizer that it wraps"
        )
    try:
        inspect.signature(kind.step).bind("self")
    except TypeError:
        raise TypeError(
            f"optimizer_class is {kind.__name__}, whose step() needs a closure that computes the loss again: a step in a"
            " context has only gradients"
        ) from None


def _not_references(what: str, found: Any) -> TypeError:
    return TypeError(
        f"params_rref {what} a {type(found).__name__}: expected a list of references to parameters, as in"
        " [rpc.RRef(p) for p in module.parameters()]"
    )


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
        self.number = secrets.randbits(62)
        _local[self.number] = self

    def step(self, context_id: int) -> None:
        try:
            gradients = required_agent().contexts.get(context_id).gradients
        except RpcError:
            # The context exists, since the caller knows it. It has not reached this worker.
            gradients = {}
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
    _check_class(optimizer_class)
    return _LocalOptimizer(
        optimizer_class, [each.local_value() for each in parameters], args, kwargs
    )


def step_local(number: int, context_id: int) -> None:
    """Runs on the owner of the parameters."""
    found = _local.get(number)
    if found is None:
        raise RpcError("this worker has no such optimizer")
    found.step(context_id)


class DistributedOptimizer:
    """One optimizer on each worker that has some of the parameters. They step together.

    Steps on different workers run at the same time, steps on one worker one after the other. The parameters' own
    ``.grad`` is neither read nor changed.

    Args:
        optimizer_class: an optimizer class that needs no closure, such as ``torch.optim.Adam``. If a worker has an
            allow-list, it must contain the class.
        params_rref: references to the parameters. A list of a module's parameters is
            ``[rpc.RRef(p) for p in module.parameters()]`` on the worker that has it.
        args, kwargs: each optimizer's further arguments, after its parameters.

    Raises:
        TypeError: ``optimizer_class`` is not an optimizer class, averages over a process group, or needs a closure; or
            ``params_rref`` does not contain references.
        PeerLost: a worker that has parameters is gone.
        Exception: what the optimizer's class raised. All workers have answered by then; errors from other workers are
            notes on the first one.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Sequence[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class)
        by_owner: dict[WorkerInfo, list[RRef[Any]]] = defaultdict(list)
        if isinstance(params_rref, RRef) or not isinstance(params_rref, Iterable):
            raise _not_references("is", params_rref)
        for each in params_rref:
            if not isinstance(each, RRef):
                raise _not_references("contains", each)
            by_owner[each.owner()].append(each)
        if not by_owner:
            raise ValueError("params_rref is empty: expected references to parameters")
        made = [
            (owner, remote(owner, make_local, (optimizer_class, owned, args, kwargs)))
            for owner, owned in by_owner.items()
        ]
        # remote() does not wait: an error shows only when the value is used.
        numbers = _gather([(owner, rpc_async(owner, number_of, (each,))) for owner, each in made])
        self._optimizers = [
            (owner, reference, number)
            for (owner, reference), number in zip(made, numbers, strict=True)
        ]

    def step(self, context_id: int, *, timeout: float = constants.UNSET_RPC_TIMEOUT) -> None:
        """Update all parameters that have a gradient in a context. Blocks until all workers have done so.

        Args:
            context_id: from :func:`rpc.autograd.context`.
            timeout: seconds, as for ``rpc_sync``.

        Raises:
            PeerLost: a worker that has parameters is gone.
            RpcError: this worker does not know the context.
            Exception: what a step raised. All workers have answered by then; errors from other workers are notes on the
                first one.
        """
        agent = required_agent()
        agent.contexts.get(context_id)
        own = None
        steps: list[tuple[WorkerInfo, Any]] = []
        with within(None):
            for owner, _, number in self._optimizers:
                if owner.id == agent.me.id:
                    own = owner, number
                else:
                    steps.append((owner, _Step(agent, owner, number, context_id, timeout)))
        if own is not None:
            # While the other workers run theirs.
            steps.append((own[0], _OwnStep(own[1], context_id)))
        _gather(steps)


class _Begun:
    """A step that may have failed already."""

    _error: Exception | None = None

    def _raise_error(self) -> None:
        # It refers to frames, which refer to this step: the cycle would last until the next garbage collection.
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


class _Step(_Begun):
    """A step on another worker. This thread waits for the answer."""

    def __init__(
        self, agent: Any, owner: WorkerInfo, number: int, context_id: int, timeout: float
    ) -> None:
        self._finish = agent.finish_call
        content = (step_local, (number, context_id), None)
        try:
            self._call = agent.begin_call(owner, Kind.CALL, step_local, content, timeout)
        except Exception as error:  # noqa: BLE001  # raised by wait()
            self._error = error

    def wait(self) -> Any:
        self._raise_error()
        return self._finish(*self._call)


class _OwnStep(_Begun):
    """A step on this worker. It runs at once."""

    def __init__(self, number: int, context_id: int) -> None:
        try:
            step_local(number, context_id)
        except Exception as error:  # noqa: BLE001  # raised by wait()
            self._error = error

    def wait(self) -> None:
        self._raise_error()


def number_of(optimizer: RRef[_LocalOptimizer]) -> int:
    """Runs on the owner of the parameters: raises what creating the optimizer raised."""
    return optimizer.local_value().number


def _gather(calls: Sequence[tuple[WorkerInfo, Any]]) -> list[Any]:
    """Wait for all; raise the first error, with the others as notes."""
    first: Exception | None = None
    values = []
    for owner, each in calls:
        try:
            values.append(each.wait())
        except Exception as error:  # noqa: BLE001  # raised below
            if first is None:
                first = error
                raised.add_note(first, f"This was raised on worker {owner.name!r}.")
            else:
                text = f"{type(error).__name__}: {message_of(error)}"
                raised.add_note(first, f"Worker {owner.name!r} raised {text}")
    if first is not None:
        try:
            raise first
        finally:
            del first  # it refers to this frame
    return values

"""One worker's part in a backward pass: runs torch's autograd on the local graph as gradients arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rallypoint.errors import RpcError
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.torch_private import NativeFuture

from .context import Context
from .reach import Reached, reach
from .schedule import Schedule, Step
from .search import Sent


# Sends the gradient of a received tensor back: worker, number there, gradient. The future is done when it has arrived.
Send = Callable[[int, int, Tensor | None], Any]


class LocalPass:
    """One worker's part in one backward pass. Thread-safe.

    First :meth:`extend` says what the outputs depend on. Then :meth:`start` runs what can run, and so does each
    gradient that arrives. Autograd runs on the thread that brings the gradient, one run at a time.

    Args:
        retain_graph: whether the graph can be used again.
        send: sends gradients to other workers.

    Attributes:
        done: completed when all gradients have been computed and have arrived where they belong.
    """

    def __init__(self, context: Context, *, retain_graph: bool, send: Send) -> None:
        self._context = context
        self._retain_graph = retain_graph
        self._send = send
        self._lock = threading.Lock()
        self._edges: dict[Hashable, GradientEdge] = {}
        self._inputs: dict[Hashable, Reached] = {}
        self._gradients: dict[Hashable, Tensor | None] = {}
        # Gradients that came before start().
        self._early: list[Hashable] = []
        self._schedule: Schedule | None = None
        self._is_running = False
        self._in_flight = 0
        self._is_over = False
        self.done: RpcFuture[None] = RpcFuture()
        self.done.is_watched = True

    # -- before the first gradient --------------------------------------------------------------------

    def extend(self, outputs: Mapping[Hashable, GradientEdge]) -> list[Sent]:
        """These outputs take part. Returns the received tensors that they depend on.

        Raises:
            RpcError: they depend on a tensor of another context.
        """
        found = reach(outputs, self._context.id)
        with self._lock:
            self._edges.update(outputs)
            for key, each in found.items():
                known = self._inputs.setdefault(key, each)
                if known is not each:
                    known.needs.extend(each.needs)
        return [each.source for each in found.values() if each.source is not None]

    def start(self, gradients: Mapping[Hashable, Tensor] | None = None) -> None:
        """All outputs are known: run as far as possible.

        Args:
            gradients: of the roots.
        """
        with self._lock:
            if self._is_over or self._schedule is not None:
                return
            self._gradients.update(gradients or {})
            needs = {key: each.needs for key, each in self._inputs.items()}
            self._schedule = Schedule(self._edges, needs)
            for each in [*(gradients or {}), *self._early]:
                self._schedule.arrive(each)
            self._early = []
        self._advance()

    # -- gradients --------------------------------------------------------------------------------------

    def arrive(self, number: int, gradient: Tensor | None) -> None:
        """The gradient of a sent tensor; None: nothing depends on it.

        Raises:
            RpcError: no such gradient is expected.
        """
        with self._lock:
            if self._is_over:
                return
            if number not in self._edges or number in self._gradients:
                raise RpcError(f"no gradient is expected for sent tensor number {number!r}")
            self._gradients[number] = gradient
            if self._schedule is None:
                self._early.append(number)
                return
            self._schedule.arrive(number)
        self._advance()

    def _advance(self) -> None:
        while True:
            with self._lock:
                schedule = self._schedule
                if self._is_over or self._is_running or schedule is None:
                    return
                step = schedule.next_step()
                if step is None:
                    break
                self._is_running = True
                given = {each: self._gradients[each] for each in step.outputs}
                for each in step.outputs:
                    if not schedule.is_needed(each):
                        # Still known, but no longer kept.
                        self._gradients[each] = None
            try:
                self._run(step, given)
            except BaseException as error:  # noqa: BLE001  # raised by backward()
                self.fail(error)
            finally:
                with self._lock:
                    self._is_running = False
        self._look_whether_done()

    def _run(self, step: Step, given: dict[Hashable, Tensor | None]) -> None:
        known = {key: each for key, each in given.items() if each is not None}
        inputs = [self._inputs[each] for each in step.inputs]
        results: Iterable[Tensor | None] = [None] * len(inputs)
        if known:
            results = torch.autograd.grad(
                [self._edges[each] for each in known],
                [each.target for each in inputs],
                list(known.values()),
                retain_graph=self._retain_graph or not step.frees,
                allow_unused=True,
            )
        taken = {_memory(each) for each in known.values()}
        for each, gradient in zip(inputs, results, strict=True):
            if each.leaf is not None:
                if gradient is not None:
                    self._context.accumulate(each.leaf, _own(gradient, each.leaf, taken))
            else:
                assert each.source is not None
                self._send_back(each.source, gradient)

    def _send_back(self, source: Sent, gradient: Tensor | None) -> None:
        with self._lock:
            self._in_flight += 1

        def finish(sent: Any) -> None:
            try:
                sent.value()
            except BaseException as error:  # noqa: BLE001  # raised by backward()
                self.fail(error)
            with self._lock:
                self._in_flight -= 1
            self._look_whether_done()

        future = self._send(*source, gradient)
        NativeFuture.add_done_callback(future, finish)

    # -- the end ----------------------------------------------------------------------------------------

    def _look_whether_done(self) -> None:
        with self._lock:
            if (
                self._is_over
                or self._is_running
                or self._in_flight
                or self._schedule is None
                or not self._schedule.is_done
            ):
                return
            self._release()
        self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Stop, and have ``done`` raise this."""
        with self._lock:
            if self._is_over:
                return
            self._release()
        self.done.fail(error)

    def _release(self) -> None:
        self._is_over = True
        self._gradients = {}
        self._schedule = None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _own(gradient: Tensor, leaf: Tensor, taken: set[int]) -> Tensor:
    """A leaf's gradient in memory of its own, which the program may change in place."""
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient
    at = _memory(gradient)
    if at not in taken and gradient.stride() == leaf.stride():
        taken.add(at)
        return gradient
    with torch.no_grad():
        return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)

"""One worker's part in a backward pass: runs torch's autograd on the local graph as gradients arrive."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rallypoint.errors import RpcError
from rallypoint.rpc.future import again, copy_of
from rallypoint.rpc.torch_private import gradients as run_autograd, sparse_parts

from .averaging import accumulate, computed_together, is_averaged
from .context import Context
from .reach import Reached, reach
from .schedule import Schedule, Step
from .search import Sent


Gradients = Sequence[tuple[Hashable, Tensor | None]]


class Computed(NamedTuple):
    """What a part of a pass has computed.

    Args:
        back: by worker, the gradients of tensors that it sent, each with the tensor's number.
        change: the change in the number of workers where something waits.
    """

    back: dict[int, list[tuple[int, Tensor | None]]]
    change: int


class LocalPass:
    """One worker's part in one backward pass. Thread-safe.

    Autograd runs on the thread that brings a gradient, one run at a time.

    Args:
        retain_graph: whether the graph can be used again.
        roots: where the roots' gradients enter, on the worker that has them.

    Attributes:
        told: the workers that gradients are sent to.
    """

    def __init__(
        self,
        context: Context,
        *,
        retain_graph: bool,
        roots: Mapping[Hashable, GradientEdge] | None = None,
    ) -> None:
        self._context = context
        self._retain_graph = retain_graph
        self._lock = threading.Lock()
        # What is sent from now on does not depend on anything in this pass.
        edges = context.edges()
        edges.update(roots or {})
        self._edges = edges
        self._inputs = computed_together(reach(edges))
        self._schedule = Schedule(edges, {key: each.needs for key, each in self._inputs.items()})
        self._gradients: dict[Hashable, Tensor | None] = {}
        # By id, gradients that arrived from other workers, and so are in memory that nothing else uses.
        self._received: set[int] = set()
        self._is_running = False
        self._was_waiting = False
        self._error: BaseException | None = None
        self.told: set[int] = set()

    @property
    def is_active(self) -> bool:
        return self._error is None and (self._is_running or self._was_waiting)

    # -- the search -----------------------------------------------------------------------------------

    def sources(self, outputs: Collection[Hashable]) -> list[Sent]:
        """The received tensors that outputs depend on.

        Raises:
            RpcError: they depend on a tensor of another context.
        """
        found = []
        for each in self._inputs.values():
            if each.source is not None and not set(outputs).isdisjoint(each.needs):
                self._check(each)
                found.append(each.source)
        return found

    def settle(self, outputs: Collection[Hashable]) -> Computed:
        """Only these outputs take part. Returns as :meth:`arrive`."""
        with self._lock:
            self._raise_error()
            self._schedule.settle(outputs)
        return self._advance()

    # -- gradients --------------------------------------------------------------------------------------

    def arrive(self, gradients: Gradients, *, is_own: bool = True) -> Computed:
        """Take some outputs' gradients; None: nothing depends on the output. Computes all that is now possible.

        Args:
            is_own: whether nothing else uses the gradients' memory.

        Raises:
            RpcError: no such gradient is expected, or the pass was given up.
            Exception: what a node raised.
        """
        with self._lock:
            self._raise_error()
            for key, _ in gradients:
                if not self._schedule.expects(key):
                    raise RpcError(f"no gradient is expected for sent tensor number {key!r}")
            for key, gradient in gradients:
                self._gradients[key] = gradient
                self._schedule.arrive(key)
                if is_own and gradient is not None:
                    self._received.add(id(gradient))
        return self._advance()

    def _advance(self) -> Computed:
        back: dict[int, list[tuple[int, Tensor | None]]] = {}
        is_mine = False
        while True:
            with self._lock:
                self._raise_error()
                if self._is_running and not is_mine:
                    # The running thread also computes what has just become possible, and answers for it.
                    return Computed(back, 0)
                step = self._schedule.next_step()
                if step is None:
                    self._is_running = False
                    before, self._was_waiting = self._was_waiting, self._schedule.has_waiting
                    return Computed(back, self._was_waiting - before)
                self._is_running = is_mine = True
                given = {each: self._gradients[each] for each in step.outputs}
                for each in step.outputs:
                    if self._schedule.is_needed(each):
                        # A later step uses it.
                        self._received.discard(id(given[each]))
                    else:
                        self._gradients[each] = None
            try:
                self._run(step, given, back)
            except BaseException as error:
                self._is_running = False
                self.fail(error)
                raise

    def _run(
        self,
        step: Step,
        given: dict[Hashable, Tensor | None],
        back: dict[int, list[tuple[int, Tensor | None]]],
    ) -> None:
        known = {key: each for key, each in given.items() if each is not None}
        inputs = [self._inputs[each] for each in step.inputs]
        for each in inputs:
            self._check(each)
        results: Iterable[Tensor | None] = [None] * len(inputs)
        retain_graph = self._retain_graph or not step.frees
        outputs = [self._edges[each] for each in known]
        if known and any(is_averaged(each.leaf) for each in inputs):
            results = accumulate(outputs, list(known.values()), inputs, retain_graph=retain_graph)
        elif known:
            targets = [each.target for each in inputs]
            results = run_autograd(
                outputs, list(known.values()), targets, retain_graph=retain_graph
            )
        taken = {_memory(each) for each in known.values() if id(each) not in self._received}
        for each, gradient in zip(inputs, results, strict=True):
            if each.source is not None:
                worker, number = each.source
                back.setdefault(worker, []).append((number, gradient))
            elif gradient is not None:
                assert each.leaf is not None
                self._context.accumulate(each.leaf, _own(gradient, each.leaf, taken))
        self.told.update(back)

    def _check(self, reached: Reached) -> None:
        if reached.context_id is not None and reached.context_id != self._context.id:
            raise RpcError(
                f"a gradient of context {self._context.id} would have to pass through a tensor that was received in context"
                f" {reached.context_id}: send the tensor again in this context, or use tensor.detach()"
            )

    # -- the end ----------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> bool:
        """Stop: what arrives later gets this error. False if the pass has already failed."""
        with self._lock:
            if self._error is not None:
                return False
            # Without its frames, which refer to this pass: the cycle would last until the next garbage collection.
            self._error = copy_of(error)
            self._gradients = {}
            return True

    def check(self, waiting: int) -> None:
        """After a pass: raise the error with which it failed.

        Args:
            waiting: the number of workers where something still waits.
        """
        self._raise_error()
        if waiting:
            raise RpcError("some gradients of the backward pass have not arrived")

    def _raise_error(self) -> None:
        if self._error is not None:
            # A copy: several messages may get it.
            raise again(self._error)


def _memory(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        tensor = sparse_parts(tensor)[1]
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _own(gradient: Tensor, leaf: Tensor, taken: set[int]) -> Tensor:
    """A leaf's gradient in memory of its own, which the program may change in place."""
    at = _memory(gradient)
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        if at and at not in taken and sparse_parts(gradient)[1].is_contiguous():
            taken.add(at)
            return gradient
        return gradient.clone()
    if at not in taken and gradient.stride() == leaf.stride():
        taken.add(at)
        return gradient
    with torch.no_grad():
        return torch.empty_like(leaf, dtype=gradient.dtype).copy_(gradient)

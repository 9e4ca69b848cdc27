"""A backward pass over all workers, as the worker that begins it directs it.

First the pass finds out which sent tensors take part: each worker says what its own depend on. Then all workers run
their parts as gradients arrive. Tensors that were sent and do not take part cost nothing, and nobody waits for them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rallypoint.errors import RpcError
from rallypoint.rpc import constants
from rallypoint.rpc.current_agent import required_agent
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.torch_private import NativeFuture

from .context import Context, PassId
from .local_pass import LocalPass
from .search import Search, Sent
from .served import call, explore, finish_pass, run_pass, sender
from .transfer import edge_of


_count = itertools.count(1).__next__


def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> None:
    """Compute the gradients of all leaves that the roots depend on, on all workers of the context. Blocks.

    Gradients are added to the context's on each worker (:func:`get_gradients`), never to ``.grad``.

    Args:
        context_id: from :func:`context`.
        roots: scalars on this worker that require a gradient.
        retain_graph: whether the graph can be used for another backward pass.
        timeout: seconds for the whole pass; 0: no limit. The default is the ``rpc_timeout`` of the options. If this code
            serves a call, the remaining time of that call is an upper limit.

    Raises:
        RpcError: this worker does not know the context, or a root is not a scalar that requires a gradient.
        RpcTimeout: the pass took longer than the timeout.
        PeerLost: a worker that takes part is gone.
        Exception: what a part of the graph raised, on whichever worker.
    """
    agent = required_agent()
    context: Context = agent.contexts.get(context_id)
    outputs, gradients = _roots(roots)
    deadline, _ = agent.deadline(timeout)
    pass_id = agent.me.id, _count()
    _Direction(context, pass_id, agent.me.id, deadline, retain_graph).go(outputs, gradients)


def _roots(roots: Any) -> tuple[dict[Hashable, GradientEdge], dict[Hashable, Tensor]]:
    """The roots as outputs, and their gradients."""
    if isinstance(roots, Tensor) or not isinstance(roots, Sequence):
        raise TypeError(
            "backward(): incompatible function arguments: roots is"
            f" {type(roots).__name__}, expected a list of tensors"
        )
    if not roots:
        raise RpcError("No tensors provided for gradient computation.")
    for at, each in enumerate(roots):
        if not isinstance(each, Tensor):
            raise TypeError(
                "backward(): incompatible function arguments: roots contains"
                f" {type(each).__name__}, expected tensors"
            )
        # torch's words.
        if not each.requires_grad:
            raise RpcError(f"requires_grad not set on root {at}")
        if each.numel() != 1:
            raise RpcError(f"root {at} is not a scalar, all roots need to be scalar")
        if each.grad_fn is None:
            raise RpcError(f"root {at} does not have a valid gradient function")
    names: list[Hashable] = [f"root {at}" for at in range(len(roots))]
    edges = {name: edge_of(each) for name, each in zip(names, roots, strict=True)}
    with torch.no_grad():
        ones = {name: torch.ones_like(each) for name, each in zip(names, roots, strict=True)}
    return edges, ones


class _Direction:
    """Directs one pass."""

    def __init__(
        self,
        context: Context,
        pass_id: PassId,
        me: int,
        deadline: float | None,
        retain_graph: bool,
    ) -> None:
        self._context = context
        self._pass_id = pass_id
        self._me = me
        self._deadline = deadline
        self._retain_graph = retain_graph
        self._local = LocalPass(
            context, retain_graph=retain_graph, send=sender(context, pass_id, deadline)
        )
        self._asked: set[int] = set()

    def go(self, outputs: dict[Hashable, GradientEdge], gradients: dict[Hashable, Tensor]) -> None:
        self._context.begin(self._pass_id, self._local)
        try:
            self._find(self._local.extend(outputs))
            ran = [
                call(worker, run_pass, (self._context.id, self._pass_id), self._left())
                for worker in self._asked
            ]
            self._local.start(gradients)
            _all([self._local.done, *ran])
        except BaseException as error:
            self._local.fail(error)
            raise
        finally:
            self._context.passes.pop(self._pass_id, None)
            for worker in self._asked:
                # Not waited for: what is left of the pass ends with the context at the latest.
                with contextlib.suppress(RpcError):
                    call(worker, finish_pass, (self._context.id, self._pass_id), 0.0)

    def _find(self, reached: list[Sent]) -> None:
        """Ask the workers until it is known which sent tensors take part."""
        search = Search()
        ask = search.reached(reached)
        while ask:
            reached = []
            own = ask.pop(self._me, None)
            self._asked.update(ask)
            answers = [
                call(
                    worker,
                    explore,
                    (self._context.id, self._pass_id, numbers, self._retain_graph),
                    self._left(),
                )
                for worker, numbers in ask.items()
            ]
            if own is not None:
                reached += self._local.extend({each: self._context.edge(each) for each in own})
            _all(answers)
            for each in answers:
                reached += each.wait()
            ask = search.reached(reached)

    def _left(self) -> float:
        if self._deadline is None:
            return 0.0
        return max(0.001, self._deadline - time.monotonic())


def _all(futures: Sequence[RpcFuture[Any]]) -> None:
    """Wait for all, or for the first error."""
    outcome: RpcFuture[None] = RpcFuture()
    lock = threading.Lock()
    left = len(futures)
    if not left:
        return

    def finish(done: Any) -> None:
        nonlocal left
        failed: BaseException | None = None
        try:
            done.value()
        except BaseException as error:  # noqa: BLE001  # raised below
            failed = error
        with lock:
            if left <= 0:
                return
            left = 0 if failed is not None else left - 1
            if left:
                return
        if failed is not None:
            outcome.fail(failed)
        else:
            outcome.set_result(None)

    for each in futures:
        NativeFuture.add_done_callback(each, finish)
    outcome.wait()

"""A backward pass over all workers, directed by the worker that starts it.

Gradients travel from worker to worker, and each computes what it can as they arrive: all inputs whose gradient can no
longer change, whichever of the tensors that it sent take part. In most programs this is everything. A message is answered
when all that it led to is done. If something still waits by then, the pass finds out which sent tensors take part: each
worker says what its own depend on. Then the rest is computed. So the pass never waits for sent tensors that take no part.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rallypoint.errors import RpcError
from rallypoint.rpc import constants
from rallypoint.rpc.current_agent import current_agent, required_agent
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.torch_private import NativeFuture

from .context import Context, PassId
from .local_pass import Computed, LocalPass
from .search import Search, Sent
from .served import Post, call, explore, left_until, settle, tell_given_up
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
        Exception: what a part of the graph raised, on any worker.
    """
    agent = required_agent()
    if type(context_id) is not int:
        raise TypeError(
            "backward(): incompatible function arguments: context_id is"
            f" {type(context_id).__name__}, expected a number"
        )
    context: Context = agent.contexts.get(context_id)
    outputs, gradients = _roots(roots)
    deadline, _ = agent.deadline(timeout)
    pass_id = agent.me.id, _count()
    _Direction(context, pass_id, deadline, retain_graph).go(outputs, gradients)


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
        deadline: float | None,
        retain_graph: bool,
    ) -> None:
        self._context = context
        self._pass_id = pass_id
        self._me, self._count = pass_id
        self._deadline = deadline
        self._retain_graph = retain_graph
        self._asked: set[int] = set()

    def go(self, outputs: dict[Hashable, GradientEdge], gradients: dict[Hashable, Tensor]) -> None:
        context, pass_id = self._context, self._pass_id
        local = LocalPass(context, retain_graph=self._retain_graph, roots=outputs)
        context.begin(pass_id, local)
        try:
            self._first = context.first_pass(self._me)
            self._post = Post(context, pass_id, self._first, self._retain_graph, self._deadline)
            computed = local.arrive(list(gradients.items()), is_own=False)
            incomplete = self._drive(local, computed, [])
            if incomplete:
                incomplete += self._search_and_settle(local, list(outputs))
            local.check(incomplete)
        except BaseException as error:
            local.fail(error)
            tell_given_up(context.id, pass_id, (local.told | self._asked) - {self._me})
            raise
        finally:
            context.passes.pop(pass_id, None)

    def _drive(
        self, local: LocalPass, computed: Computed, sent: list[tuple[int, RpcFuture[Any]]]
    ) -> int:
        """Send on what was computed, and wait until nothing is on its way.

        Args:
            sent: messages that were already sent, each with its receiver.

        Returns:
            The change in the number of workers where something waits.
        """
        done: SimpleQueue[tuple[int, Any]] = SimpleQueue()

        def expect(worker: int, future: RpcFuture[Any]) -> None:
            # Only a notification: this thread reads the answer.
            NativeFuture.add_done_callback(future, lambda each: done.put((worker, each)))

        change = 0
        left = len(sent)
        for each in sent:
            expect(*each)
        while True:
            change += computed.change
            if not left and len(computed.back) == 1:
                ((worker, gradients),) = computed.back.items()
                answer = self._post.send_and_wait(worker, gradients)
            else:
                for worker, gradients in computed.back.items():
                    left += 1
                    expect(worker, self._post.send(worker, gradients))
                if not left:
                    return change
                with current_agent().waiting():
                    worker, future = done.get()
                left -= 1
                answer = future.value()
            computed = self._post.read(local, worker, answer)

    def _search_and_settle(self, local: LocalPass, roots: list[Hashable]) -> int:
        """No gradient is on its way, but inputs still wait for some: find out which of those will never arrive.

        Returns:
            The change in the number of workers where something waits.
        """
        search = self._find(local, roots)
        sent = [
            (worker, self._call(worker, settle, numbers))
            for worker, numbers in search.found.items()
            if worker != self._me
        ]
        return self._drive(local, local.settle({*roots, *search.found.get(self._me, ())}), sent)

    def _find(self, local: LocalPass, roots: list[Hashable]) -> Search:
        """Ask the workers until it is known which sent tensors take part."""
        search = Search()
        ask = search.reached(local.sources(roots))
        while ask:
            reached: list[Sent] = []
            own = ask.pop(self._me, None)
            answers = [self._call(worker, explore, numbers) for worker, numbers in ask.items()]
            if own is not None:
                reached += local.sources(own)
            done: SimpleQueue[Any] = SimpleQueue()
            for each in answers:
                NativeFuture.add_done_callback(each, done.put)
            for _ in answers:
                with current_agent().waiting():
                    future = done.get()
                reached += future.value()
            ask = search.reached(reached)
        return search

    def _call(self, worker: int, what: Any, numbers: list[int]) -> RpcFuture[Any]:
        self._asked.add(worker)
        args = (self._context.id, *self._pass_id, self._first, self._retain_graph, numbers)
        return call(worker, what, args, left_until(self._deadline))

"""What workers do for one another in contexts. Each function checks its arguments and its caller."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rallypoint.errors import RpcError
from rallypoint.rpc import constants
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.current_agent import current_agent
from rallypoint.rpc.current_call import current_call
from rallypoint.rpc.current_context import CURRENT
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.rref_proxy import AnswerLater

from .context import Context, PassId, owner_of, unknown
from .contexts import Contexts
from .local_pass import Computed, LocalPass
from .search import Sent


# Bytes of a gradient that is copied for a faster message.
_SMALL = 4096


def call(
    to: int, what: Any, args: tuple[Any, ...], timeout: float = constants.UNSET_RPC_TIMEOUT
) -> RpcFuture[Any]:
    """Call one of these functions, outside any context."""
    token = CURRENT.set(None)
    try:
        future: RpcFuture[Any] = current_agent().call_async(
            to, Kind.CALL, what, (what, args, None), timeout
        )
    finally:
        CURRENT.reset(token)
    future.is_watched = True
    return future


def left_until(deadline: float | None) -> float:
    """A timeout that ends at a deadline in monotonic seconds."""
    return 0.0 if deadline is None else max(0.001, deadline - time.monotonic())


class Post:
    """Sends gradients for a backward pass.

    Args:
        first: passes that the same worker began before this number are over.
        deadline: in monotonic seconds.
    """

    def __init__(
        self,
        context: Context,
        pass_id: PassId,
        first: int,
        retain_graph: bool,
        deadline: float | None,
    ) -> None:
        self._context = context
        self._head = (context.id, *pass_id, first, retain_graph)
        self._deadline = deadline

    def send(self, worker: int, gradients: list[tuple[int, Tensor | None]]) -> RpcFuture[Any]:
        """Send gradients. The future's value is for :meth:`read`."""
        args = (*self._head, *flat(gradients))
        return call(worker, receive_gradients, args, left_until(self._deadline))

    def send_and_wait(self, worker: int, gradients: list[tuple[int, Tensor | None]]) -> Any:
        """Send gradients and wait. The calling thread reads the answer, so no other one has to wake up."""
        content = (receive_gradients, (*self._head, *flat(gradients)), None)
        token = CURRENT.set(None)
        try:
            return current_agent().call_sync(
                worker, Kind.CALL, receive_gradients, content, left_until(self._deadline)
            )
        finally:
            CURRENT.reset(token)

    def read(self, part: LocalPass, worker: int, answer: Any) -> Computed:
        """A worker has done all that a message led to. Its answer may contain gradients for this worker."""
        if type(answer) is not tuple:
            return Computed({}, answer or 0)
        change, *gradients = answer
        computed = part.arrive(checked(self._context, worker, gradients))
        return Computed(computed.back, computed.change + change)


def flat(gradients: list[tuple[int, Tensor | None]]) -> list[Any]:
    """Gradients in a flat list: a message of plain values and ordinary tensors is pickled faster."""
    found: list[Any] = []
    for number, gradient in gradients:
        found += number, None if gradient is None else _ordinary(gradient)
    return found


def _ordinary(gradient: Tensor) -> Tensor:
    """A small gradient made contiguous: that of a sum, for example, has all its elements in one place."""
    if gradient.layout is not torch.strided or gradient.nbytes > _SMALL or gradient.is_contiguous():
        return gradient
    return gradient.contiguous()


def checked(
    context: Context, sender: int, gradients: Sequence[Any]
) -> list[tuple[int, Tensor | None]]:
    """The inverse of :func:`flat`, for gradients from a worker.

    Raises:
        RpcError: the worker did not receive a tensor of this number, or something is not a gradient.
    """
    pairs = list(zip(gradients[::2], gradients[1::2], strict=True))
    for number, gradient in pairs:
        if gradient is not None and not isinstance(gradient, Tensor):
            raise RpcError(f"a gradient is a {type(gradient).__name__}: expected a tensor")
        if context.receiver(number) != sender:
            raise RpcError(f"sent tensor number {number} was sent to another worker")
    return pairs


class _Errand:
    """Everything that one message leads to.

    Args:
        caller: the sender of the message.
    """

    def __init__(self, part: LocalPass, post: Post, caller: int) -> None:
        self._part = part
        self._post = post
        self._caller = caller
        self._lock = threading.Lock()
        self._left = 0
        self._has_failed = False
        self._change = 0
        self._outcome: RpcFuture[Any] | None = None

    def begin(self, computed: Computed) -> Any:
        """What to answer: the change in the number of workers where something waits, and gradients for the caller."""
        is_over, answer = self._proceed(computed, 0)
        if is_over:
            return answer
        assert self._outcome is not None
        return AnswerLater(self._outcome)

    def _proceed(self, computed: Computed, answered: int) -> tuple[bool, Any]:
        """Send on what was computed. Returns whether nothing is left to wait for, and if so the answer."""
        back = computed.back
        with self._lock:
            self._change += computed.change
            self._left -= answered
            held: list[tuple[int, Tensor | None]] = []
            if not self._left and len(back) == 1 and self._caller in back:
                # The caller waits for nothing else: the answer takes the gradients along.
                held = back.pop(self._caller)
            self._left += len(back)
            is_over = not self._left and not self._has_failed
            if back and self._outcome is None:
                self._outcome = RpcFuture()
                self._outcome.is_watched = True
        for worker, gradients in back.items():
            future = self._post.send(worker, gradients)
            # The callback runs autograd, and so needs a thread of its own.
            future.add_done_callback(functools.partial(self._answered, worker))
        if held:
            return True, (self._change, *flat(held))
        return is_over, self._change or None

    def _answered(self, worker: int, done: Any) -> None:
        outcome = self._outcome
        assert outcome is not None
        try:
            computed = self._post.read(self._part, worker, done.value())
            is_over, answer = self._proceed(computed, 1)
        except BaseException as error:  # noqa: BLE001  # raised by backward()
            with self._lock:
                is_first, self._has_failed = not self._has_failed, True
            if is_first:
                outcome.fail(error)
            return
        if is_over:
            outcome.set_result(answer)


def receive_gradients(
    context_id: int, began: int, count: int, first: int, retain_graph: bool, *gradients: Any
) -> Any:
    """Gradients of tensors that this worker sent to the caller. Computes what is now possible, and sends it on.

    Args:
        began, count: the pass.
        first: passes that the same worker began before this number are over.
        gradients: numbers of sent tensors, each followed by the gradient or None.

    Returns:
        Once everything that this led to is done: the change in the number of workers where something waits (None: 0). If
        there are gradients for the caller, they follow it in a tuple.
    """
    serving = _serving()
    context = _contexts().get(context_id)
    pairs = checked(context, serving.caller.id, gradients)
    part = _part(context, (began, count), first, retain_graph)
    post = Post(context, (began, count), first, bool(retain_graph), serving.deadline)
    return _Errand(part, post, serving.caller.id).begin(part.arrive(pairs))


def explore(
    context_id: int,
    began: int,
    count: int,
    first: int,
    retain_graph: bool,
    numbers: Sequence[int],
) -> list[Sent]:
    """Some tensors that this worker sent take part in a backward pass. Returns what they depend on."""
    context = _contexts().get(context_id)
    _check_began(began)
    found: list[Sent] = _part(context, (began, count), first, retain_graph).sources(numbers)
    return found


def settle(
    context_id: int,
    began: int,
    count: int,
    first: int,
    retain_graph: bool,
    numbers: Sequence[int],
) -> Any:
    """Only these of the tensors that this worker sent take part. Returns as :func:`receive_gradients`."""
    context = _contexts().get(context_id)
    _check_began(began)
    serving = _serving()
    part = _part(context, (began, count), first, retain_graph)
    post = Post(context, (began, count), first, bool(retain_graph), serving.deadline)
    return _Errand(part, post, serving.caller.id).begin(part.settle(frozenset(numbers)))


def give_up(context_id: int, began: int, count: int) -> None:
    """A backward pass has failed."""
    with contextlib.suppress(RpcError):
        part = _contexts().get(context_id).passes.get((began, count))
        if part is not None and part.fail(
            RpcError("the backward pass was given up, as it failed elsewhere")
        ):
            tell_given_up(context_id, (began, count), part.told)


def tell_given_up(context_id: int, pass_id: PassId, workers: Iterable[int]) -> None:
    """Tell workers that a pass was given up. Does not wait: what is left of it ends with the context at the latest."""
    for worker in workers:
        with contextlib.suppress(RpcError):
            call(worker, give_up, (context_id, *pass_id), 0.0)


def enrol(context_id: int) -> bool:
    """The caller has received a message of a context of this worker. Returns whether the context still lives."""
    if type(context_id) is not int:
        raise RpcError(f"a context's id is a {type(context_id).__name__}: expected a number")
    return _contexts().enrol(context_id, _serving().caller.id)


def release(context_ids: list[int]) -> None:
    """Some contexts of the caller have ended."""
    caller, contexts = _serving().caller.id, _contexts()
    for each in context_ids:
        if owner_of(each) != caller:
            raise RpcError(f"autograd context {each} can only be ended by the worker that began it")
        contexts.forget(each)


def _contexts() -> Contexts:
    contexts: Contexts | None = getattr(current_agent(), "contexts", None)
    if contexts is None:
        raise unknown("of another agent")
    return contexts


def _serving() -> Any:
    serving = current_call()
    if serving is None:
        raise RpcError("this function is only called by other workers")
    return serving


def _check_began(worker: int) -> None:
    if worker != _serving().caller.id:
        raise RpcError("a backward pass can only be directed by the worker that began it")


def _part(context: Context, pass_id: PassId, first: int, retain_graph: bool) -> LocalPass:
    part: LocalPass | None = context.passes.get(pass_id)
    if part is None:
        context.end_passes(pass_id[0], first)
        part = context.begin(pass_id, LocalPass(context, retain_graph=bool(retain_graph)))
    return part

"""What workers do for one another in contexts. Each function checks its arguments, and who calls it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rallypoint.errors import RpcError
from rallypoint.rpc import constants
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.current_agent import current_agent
from rallypoint.rpc.current_call import current_call
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.rref_proxy import AnswerLater

from .context import CURRENT, Context, PassId, owner_of, unknown
from .contexts import Contexts
from .local_pass import LocalPass, Send
from .search import Sent


def call(
    to: int, what: Any, args: tuple[Any, ...], timeout: float = constants.UNSET_RPC_TIMEOUT
) -> RpcFuture[Any]:
    """Call one of these functions, which is not part of any context."""
    token = CURRENT.set(None)
    try:
        future: RpcFuture[Any] = current_agent().call_async(
            to, Kind.CALL, what, (what, args, None), timeout
        )
    finally:
        CURRENT.reset(token)
    future.is_watched = True
    return future


def sender(context: Context, pass_id: PassId, deadline: float | None) -> Send:
    """Sends gradients for a backward pass, until the deadline in monotonic seconds."""

    def send(worker: int, number: int, gradient: Tensor | None) -> RpcFuture[Any]:
        left = 0.0 if deadline is None else max(0.001, deadline - time.monotonic())
        return call(worker, receive_gradient, (context.id, pass_id, number, gradient), left)

    return send


def explore(
    context_id: int, pass_id: PassId, numbers: Sequence[int], retain_graph: bool
) -> list[Sent]:
    """Some tensors that this worker sent take part in a backward pass. Returns what they depend on."""
    context = _contexts().get(context_id)
    _check_began(pass_id)
    part = context.passes.get(pass_id)
    if part is None:
        send = sender(context, pass_id, _serving().deadline)
        part = LocalPass(context, retain_graph=bool(retain_graph), send=send)
        context.begin(pass_id, part)
    found: list[Sent] = part.extend({each: context.edge(each) for each in numbers})
    return found


def run_pass(context_id: int, pass_id: PassId) -> AnswerLater:
    """Compute gradients as they arrive. Answered when all have been passed on."""
    context = _contexts().get(context_id)
    _check_began(pass_id)
    part = _part(context, pass_id)
    done: RpcFuture[None] = part.done
    part.start()
    return AnswerLater(done)


def receive_gradient(
    context_id: int, pass_id: PassId, number: int, gradient: Tensor | None
) -> None:
    """The gradient of a tensor that this worker sent to the caller."""
    if gradient is not None and not isinstance(gradient, Tensor):
        raise RpcError(f"a gradient is a {type(gradient).__name__}: expected a tensor")
    context = _contexts().get(context_id)
    part = _part(context, pass_id)
    if context.receiver(number) != _serving().caller.id:
        raise RpcError(f"sent tensor number {number} was sent to another worker")
    part.arrive(number, gradient)


def finish_pass(context_id: int, pass_id: PassId) -> None:
    """The backward pass is over, or has failed."""
    _check_began(pass_id)
    try:
        context = _contexts().get(context_id)
    except RpcError:
        return
    part = context.passes.pop(pass_id, None)
    if part is not None:
        part.fail(RpcError("the backward pass was given up"))


def enrol(context_id: int) -> bool:
    """The caller has received a message of a context of this worker. Returns whether the context still lives."""
    if type(context_id) is not int:
        raise RpcError(f"a context's id is a {type(context_id).__name__}: expected a number")
    return _contexts().enrol(context_id, _serving().caller.id)


def release(context_id: int) -> None:
    """A context of the caller has ended."""
    if owner_of(context_id) != _serving().caller.id:
        raise RpcError(
            f"autograd context {context_id} can only be ended by the worker that began it"
        )
    _contexts().forget(context_id)


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


def _check_began(pass_id: PassId) -> None:
    if type(pass_id) is not tuple or pass_id[0] != _serving().caller.id:
        raise RpcError("a backward pass can only be directed by the worker that began it")


def _part(context: Context, pass_id: PassId) -> LocalPass:
    part: LocalPass | None = context.passes.get(pass_id)
    if part is None:
        raise RpcError("the backward pass is over, or this worker takes no part in it")
    return part

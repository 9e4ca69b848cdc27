"""Tensors that pass between workers within a context: the ends of their graphs on both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rallypoint.errors import RpcError
from rallypoint.rpc.current_agent import current_agent
from rallypoint.rpc.serialization.payload import current_sender, receive_with

from .context import Context, SentTensor


class _Sent(torch.autograd.Function):
    """Stands for a leaf that is sent and has no views: it gives the leaf a node of its own."""

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Received(torch.autograd.Function):
    """Starts the graph of a tensor that has arrived. Gradients leave here: a backward pass collects them, and usually does
    not run this node.
    """

    @staticmethod
    def forward(ctx: Any, _: Tensor, plain: Tensor, source: tuple[int, int, int]) -> Tensor:
        ctx.source = source
        return plain.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.source in CAPTURED:
            CAPTURED[ctx.source] = gradients[0]
            return None, None, None
        raise RpcError(
            "a gradient has reached a tensor that came from another worker, where backward() and torch.autograd.grad()"
            " end: call rpc.autograd.backward(context_id, roots)"
        )


# By source, the gradients of received tensors in a pass that runs their nodes.
CAPTURED: dict[tuple[int, int, int], Any] = {}
# Makes the outputs of _Received require a gradient.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
# The type of the node of a received tensor. Its ``source``: the context, the worker that sent it, and its number there.
RECEIVED: Any = type(_Received.apply(_ANCHOR, torch.empty(0, device="cpu"), (0, 0, 0)).grad_fn)  # type: ignore[no-untyped-call]


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where a tensor's gradient enters the graph. In-place changes of the tensor after this call do not matter."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    if tensor.grad_fn is None:
        # A leaf that is sent gets a node of its own.
        if torch.is_inference_mode_enabled():
            # Inference mode would leave it without one, even where gradients are enabled.
            with torch.inference_mode(False):
                return edge_of(tensor)
        with torch.enable_grad():
            tensor = tensor.view_as(tensor) if is_plain else _Sent.apply(tensor)  # type: ignore[no-untyped-call]
    if is_plain:
        return get_gradient_edge(tensor)
    # get_gradient_edge makes a view, which such a tensor does not have. The tensor keeps the node alive.
    token: Any = tensor
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr, token)


class Recorder:
    """Records the tensors of one message.

    Args:
        to: the id of the receiver.
    """

    __slots__ = ("_context", "_next", "_to")

    def __init__(self, context: Context, to: int) -> None:
        self._context = context
        self._to = to
        self._next = 0

    def record(self, tensor: Tensor) -> tuple[int, int]:
        """The context of a tensor that is sent, and its number there."""
        context = self._context
        number = self._next or context.new_message()
        self._next = number + 1
        context.record(number, SentTensor(edge_of(tensor), self._to, tensor.grad_fn is None))
        return context.id, number

    def reduce(self, tensor: Tensor) -> Any:
        """As ``__reduce__``."""
        return rebuild_received, (*self.record(tensor), tensor.detach())


def recorder(context: Context | None, to: int) -> Recorder | None:
    """A recorder for a message to a worker; None outside any context, and once the context is over."""
    if context is None or not context.sends_to(to):
        return None
    return Recorder(context, to)


def rebuild_received(context_id: int, number: int, plain: Tensor) -> Tensor:
    """A tensor that has arrived, with a graph if its context lives. Pickles refer to this function by name."""
    return _received(context_id, number, plain, current_sender())


def _received(context_id: int, number: int, plain: Tensor, sender: int | None) -> Tensor:
    if type(context_id) is not int or type(number) is not int or not isinstance(plain, Tensor):
        raise TypeError("a received tensor does not consist of two numbers and a tensor")
    contexts = getattr(current_agent(), "contexts", None)
    context = None
    if contexts is not None and sender is not None:
        context = contexts.arriving(context_id, sender)
    if context is None:
        return plain.requires_grad_()
    with torch.enable_grad():
        made: Tensor = _Received.apply(_ANCHOR, plain, (context_id, sender, number))  # type: ignore[no-untyped-call]
    if context.keeps_received:
        context.received.append(made.grad_fn)
    return made


receive_with(_received)

"""Shows our distributed-autograd contexts as torch shows its own, for programs and tests that look into a context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.errors import RpcError
from rallypoint.rpc.autograd.context import (
    Context,
    SentTensor,
    context_id_of,
    message_of,
    owner_of,
)
from rallypoint.rpc.autograd.transfer import RECEIVED
from rallypoint.rpc.current_agent import required_agent
from rallypoint.rpc.current_context import CURRENT

from . import torch_private


_SEND = "torch::distributed::autograd::SendRpcBackward"
_RECEIVE = "torch::distributed::autograd::RecvRpcBackward"
_MOST_CONTEXTS = (1 << 48) - 1


class ContextView:
    """A context under torch's names."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        return self._context.peers

    def _send_functions(self) -> dict[int, Node]:
        """For each message, a node above all tensors that were sent in it."""
        messages: dict[int, list[SentTensor]] = {}
        for number, each in self._context.sent().items():
            messages.setdefault(message_of(number), []).append(each)
        return {number: _Send(sent) for number, sent in messages.items()}

    def _recv_functions(self) -> dict[tuple[int, int], Node]:
        """For each sender and message, the node of all tensors that were received in it."""
        found: dict[tuple[int, int], Node] = {}
        for each in self._context.received:
            found.setdefault(_message(each), Node(each))
        return found


class Node:
    """A node of torch's autograd, and what follows it. All tensors that were received in one message share one node."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def name(self) -> str:
        return _RECEIVE if type(self.node) is RECEIVED else str(self.node.name())

    @property
    def next_functions(self) -> tuple[tuple[Node | None, int], ...]:
        return tuple(
            (None if node is None else Node(node), at) for node, at in self.node.next_functions
        )

    @property
    def variable(self) -> Any:
        return self.node.variable

    def __eq__(self, other: object) -> bool:
        theirs = other.node if isinstance(other, Node) else other
        if type(self.node) is RECEIVED and type(theirs) is RECEIVED:
            return _message(self.node) == _message(theirs)
        return self.node is theirs

    def __hash__(self) -> int:
        return hash(_message(self.node) if type(self.node) is RECEIVED else self.node)


class _Send(Node):
    """Stands above all tensors that were sent in one message."""

    def __init__(self, sent: list[SentTensor]) -> None:
        super().__init__(None)
        self._sent = sent

    def name(self) -> str:
        return _SEND

    @property
    def next_functions(self) -> tuple[tuple[Node | None, int], ...]:
        below: list[tuple[Node | None, int]] = []
        for each in self._sent:
            node: Any = each.edge.node
            at = each.edge.output_nr
            if each.is_leaf:
                # Unlike us, torch has no node that stands for a leaf.
                node, at = node.next_functions[0]
            below.append((Node(node), at))
        return tuple(below)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _message(received: Any) -> tuple[int, int]:
    _, sender, number = received.source
    return sender, message_of(number)


# -- torch's functions ------------------------------------------------------------------------------------------


def _new_context() -> ContextView:
    if CURRENT.get() is not None:
        raise RpcError("Already have an autograd context id for this thread")
    made: Context = required_agent().contexts.begin()
    CURRENT.set(made)
    return ContextView(made)


def _release_context(context_id: int) -> None:
    agent = required_agent()
    context: Context = agent.contexts.get(context_id)
    if owner_of(context_id) != agent.me.id:
        raise RpcError(
            f"autograd context {context_id} can only be ended by the worker that began it"
        )
    if CURRENT.get() is context:
        CURRENT.set(None)
    agent.contexts.end(context)


def _current_context() -> ContextView:
    context = CURRENT.get()
    if context is None:
        # torch's own message.
        raise RpcError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: `with"
            " torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return ContextView(context)


def _retrieve_context(context_id: int) -> ContextView:
    return ContextView(required_agent().contexts.get(context_id))


def _is_valid_context(context_id: int) -> None:
    required_agent().contexts.get(context_id)


def _max_id() -> int:
    return context_id_of(required_agent().me.id, _MOST_CONTEXTS)


def _debug_info() -> dict[str, str]:
    contexts, passes = required_agent().contexts.counts()
    return {"num_current_backward_passes": str(passes), "num_autograd_contexts": str(contexts)}


# Our functions, by torch's names.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    torch_private.NEW_CONTEXT: _new_context,
    torch_private.RELEASE_CONTEXT: _release_context,
    torch_private.CURRENT_CONTEXT: _current_context,
    torch_private.RETRIEVE_CONTEXT: _retrieve_context,
    torch_private.IS_VALID_CONTEXT: _is_valid_context,
    torch_private.MAX_ID: _max_id,
    torch_private.AUTOGRAD_DEBUG_INFO: _debug_info,
}

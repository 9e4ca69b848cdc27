"""A context of distributed autograd, as one worker knows it."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rallypoint.errors import RpcError


# Ids are unique without communication: the owner's id, then the owner's count.
_COUNT_BITS = 48
# The upper half of the count is the owner's term in the group: others remember ids of ended contexts.
_TERM_BITS = 24
# A sent tensor's number: that of its message, then its place in the message.
_PLACE_BITS = 20

# A backward pass: the id of the worker that began it, and its number there.
PassId = tuple[int, int]


def context_id_of(owner: int, count: int) -> int:
    return (owner << _COUNT_BITS) + count


def first_count(term: int) -> int:
    return (term % (1 << _TERM_BITS) << (_COUNT_BITS - _TERM_BITS)) + 1


def owner_of(context_id: int) -> int:
    """The id of the worker that began the context."""
    return context_id >> _COUNT_BITS


def message_of(number: int) -> int:
    """The number of the message in which a tensor was sent."""
    return number >> _PLACE_BITS


class SentTensor(NamedTuple):
    """A tensor that was sent.

    Args:
        edge: where its gradient enters the graph.
        to: the worker that received it.
        is_leaf: whether the edge leads to a node that only stands for the leaf that was sent.
    """

    edge: GradientEdge
    to: int
    is_leaf: bool


class Part(Protocol):
    """A worker's part in a backward pass, which ends with its context."""

    @property
    def is_active(self) -> bool: ...

    def fail(self, error: BaseException) -> bool: ...


class Context:
    """What a worker keeps for one context. Thread-safe.

    Attributes:
        id: the context's.
        gradients: the gradients of this worker's leaves, by leaf.
        passes: the backward passes that this worker takes part in.
        is_over: whether it has ended. Then nothing more is recorded.
        received: the nodes of received tensors, if ``keeps_received``.
    """

    # Set by the stand-in for torch's contexts, which shows them.
    keeps_received = False

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.gradients: dict[Tensor, Tensor] = {}
        self.passes: dict[PassId, Any] = {}
        self.is_over = False
        self._lock = threading.Lock()
        self._peers: set[int] = set()
        self._sent: dict[int, SentTensor] = {}
        self.received: list[Any] = []
        # By worker, the number of its first pass that may still be in progress.
        self._first: dict[int, int] = {}
        self._count = 0

    # -- forward ------------------------------------------------------------------------------------

    def sends_to(self, worker: int) -> bool:
        """Record that a message of this context goes to a worker; False if the context is over."""
        with self._lock:
            if not self.is_over:
                self._peers.add(worker)
            return not self.is_over

    def new_message(self) -> int:
        """The number of the first tensor of a new message; the others follow it."""
        with self._lock:
            self._count += 1
            return self._count << _PLACE_BITS

    def record(self, number: int, sent: SentTensor) -> None:
        """Record that a tensor was sent."""
        with self._lock:
            if not self.is_over:
                self._sent[number] = sent

    @property
    def peers(self) -> set[int]:
        """The workers to which messages of this context go."""
        return set(self._peers)

    def sent(self) -> dict[int, SentTensor]:
        """The tensors that were sent so far, by number."""
        with self._lock:
            return dict(self._sent)

    # -- backward -----------------------------------------------------------------------------------

    def edges(self) -> dict[Hashable, GradientEdge]:
        """The edges of the tensors that were sent so far, by number."""
        with self._lock:
            return {number: each.edge for number, each in self._sent.items()}

    def receiver(self, number: int) -> int:
        """The worker to which a tensor was sent."""
        found = self._sent.get(number)
        if found is None:
            raise RpcError(f"context {self.id} has no sent tensor number {number!r}")
        return found.to

    def begin(self, pass_id: PassId, part: Part) -> Any:
        """Take part in a backward pass. Returns the part in it: this one, or an earlier one.

        Raises:
            RpcError: the context or the pass is over.
        """
        with self._lock:
            if self.is_over:
                raise unknown(self.id)
            worker, count = pass_id
            if count < self._first.get(worker, 0):
                raise RpcError("the backward pass is over")
            return self.passes.setdefault(pass_id, part)

    def end_passes(self, worker: int, first: int) -> None:
        """The passes that a worker began before this number are over."""
        with self._lock:
            self._first[worker] = max(first, self._first.get(worker, 0))
            for each in [one for one in self.passes if one[0] == worker and one[1] < first]:
                del self.passes[each]

    def first_pass(self, worker: int) -> int:
        """The number of the first pass in progress that a worker began."""
        with self._lock:
            return min((count for began, count in self.passes if began == worker), default=0)

    def num_active_passes(self) -> int:
        with self._lock:
            return sum(each.is_active for each in self.passes.values())

    def accumulate(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a leaf."""
        with self._lock:
            if self.is_over:
                return
            before = self.gradients.get(leaf)
            with torch.no_grad():
                self.gradients[leaf] = gradient if before is None else before + gradient

    # -- end ------------------------------------------------------------------------------------------

    def end(self) -> set[int]:
        """Release everything. Returns the workers that have received a message of this context."""
        with self._lock:
            self.is_over = True
            peers, self._peers = self._peers, set()
            passes, self.passes = self.passes, {}
            self._sent = {}
            self.received = []
            self.gradients = {}
        for each in passes.values():
            each.fail(RpcError(f"autograd context {self.id} ended during a backward pass"))
        return peers


def unknown(context_id: object) -> RpcError:
    # torch's words.
    return RpcError(
        f"Could not find autograd context with id: {context_id}. It has ended, or this worker takes no part in it"
    )

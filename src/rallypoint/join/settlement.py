"""The end of a block: ranks that ran out early take the final state from a rank that did not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakKeyDictionary

from torch import nn

from . import exchange, torch_private
from .hooks.ddp import DdpMember
from .members import Member
from .passes import Pass
from .run import Run
from .state import digest


# The order of forward and backward passes of several DDP modules in one step, by the first of the modules.
_orders: WeakKeyDictionary[nn.Module, list[Pass]] = WeakKeyDictionary()


class Settlement:
    """Compares the members' state across ranks, and copies what differs.

    Args:
        members: the members of the block; the same on all ranks.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._models = [member for member in members if isinstance(member, DdpMember)]

    def digests(self) -> list[int]:
        """One digest for each part of each member, on this rank."""
        return [digest(part.values()) for member in self._members for part in member.parts()]

    def gather_digests(self, run: Run) -> list[list[int]]:
        """Every rank's digests.   Collective: one all-gather, if any member has parts."""
        own = self.digests()
        return exchange.gather(own, len(own), run.device, run.group) if own else []

    def settle(
        self, run: Run, to_the_end: Sequence[bool], digests: Sequence[Sequence[int]]
    ) -> None:
        """Copy what differs to the ranks that only matched the last steps.

        Collective.
        Args:
            run: this rank's run.
            to_the_end: for each rank, whether it had inputs in the last step.
            digests: for each rank, the digests of its parts.
        """
        source = max(rank for rank, had in enumerate(to_the_end) if had)
        out = [rank for rank, had in enumerate(to_the_end) if not had]
        keep = to_the_end[run.rank]
        for model in self._models:
            torch_private.set_buffer_source(model.ddp, source)
        numbers = count()
        for member in self._members:
            if not run.replays:
                member.post_hook(keep)
            for part in member.parts():
                i = next(numbers)
                if any(digests[rank][i] != digests[source][i] for rank in out):
                    part.take(source, keep)

    # -- the order of passes, for several DDP modules -------------------------------------------

    @property
    def known_order(self) -> list[Pass] | None:
        """The order that an earlier block remembered."""
        return _orders.get(self._models[0].ddp) if self._models else None

    def remember_order(self, order: list[Pass] | None) -> None:
        """Keep the order, which is the same on all ranks, for a later block in which some rank has no inputs to learn it from."""
        if len(self._models) > 1 and order:
            _orders[self._models[0].ddp] = order

    def share_order(self, run: Run, source: int) -> None:
        """Remember the order that rank ``source`` saw.   Collective, with several models: two broadcasts."""
        if len(self._models) < 2:
            return
        own = " ".join(f"{each.module},{int(each.forward)}" for each in run.passes.order or ())
        sent = exchange.broadcast_text(own, source, run.device, run.group)
        pairs = [each.split(",") for each in sent.split()]
        self.remember_order([Pass(int(i), bool(int(forward))) for i, forward in pairs])

"""What a rank keeps while it trains, so that it can be replaced, and so that it can repeat a step.

There are two ways: :mod:`.replicated` and :mod:`.sharded`. A session has one of them, and calls it at these places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rallypoint.elastic.loops.own_state import OwnState
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.state.modes import Flags
from rallypoint.elastic.storage.schedule import Held

from .agreement import Verdict


@dataclass(frozen=True, slots=True)
class Begun:
    """What the step under way began with.

    Args:
        random: the generators.
        buffers: all modules' buffers, and copies (:class:`.Buffers`); none with sharded state.
        gradients: all gradients, and how often each was changed in place.
        settings: of optimizers and the like (:class:`.Settings`); none with sharded state.
        changes: how often parameters had been changed; None with sharded state.
        fingerprint: of the parameters, for a function that may change them and put them back, as one that validates with averaged
            ones does; None: no change is put back.
        modes: whether modules train, and which parameters are trained.
    """

    random: RandomState
    buffers: list[Any]
    gradients: list[tuple[torch.Tensor, int] | None]
    settings: list[Any] | None = None
    changes: int | None = None
    fingerprint: int | None = None
    modes: Flags | None = None


class Keeping(Protocol):
    """How a session keeps what a loss would take.

    Attributes:
        communicates: the ranks agree on something: a collective that begins is not the script's.
    """

    communicates: bool

    @property
    def random(self) -> RandomState | None:
        """The generators to begin the next step with, if they are not the present ones."""

    @property
    def ranks(self) -> int:
        """How many ranks the state is for that :meth:`settle` has led back to; 0 if it leads back to none."""

    def held(self) -> tuple[Held, ...] | None:
        """The whole snapshots of this rank; None if it needs none."""

    def fingerprint(self) -> int:
        """Of what all ranks must have alike at the beginning; 0 if nothing is."""

    def begin(self) -> None:
        """The session begins, at its first start."""

    def begin_batches(self, *, anew: bool) -> None:
        """A loop over batches begins, or (``anew``) its iteration, at an earlier batch than the one in hand."""

    def approach_batch(self) -> None:
        """Nothing is under way, and a batch is to be fetched."""

    def random_before_fetch(self) -> RandomState | None:
        """The generators, if :meth:`reach_end_of_batches` needs them."""

    def reach_end_of_batches(self, random: RandomState | None) -> bool:
        """The loader has no more batches. Returns False if a loss leads back to an earlier one."""

    def end_batches(self) -> None:
        """A loop over batches is left, by its end or by a break."""

    def continue_body(self) -> RandomState | None:
        """A batch is in hand, and steps of its body are complete. Returns the generators behind the last, if they are known."""

    def reach_task(self) -> bool:
        """Before a function is run. Returns False if a loss leads back to before it."""

    def leave_task(self, before: int) -> bool:
        """After it. Returns False if it must run again: a loss leads back to ``before`` steps or fewer."""

    def begin_step(
        self, *, is_task: bool, may_swap: bool = False, behind: RandomState | None = None
    ) -> Begun:
        """A step begins, with effect.

        Args:
            is_task: a function's.
            may_swap: it may change parameters and put them back.
            behind: outside of a batch's body, the generators behind the step before, if there was one.
        """

    def note_collective(self) -> None:
        """A collective of the step under way is about to begin."""

    def buffers_behind(self, steps: int) -> bytes:
        """Digests of this rank's buffers before the last collective of the step after which so many are complete; empty if they are
        not known."""

    def settle(
        self,
        verdict: Verdict,
        begun: Begun | None,
        *,
        receives: bool,
        is_new: bool,
        buffers: bytes,
    ) -> None:
        """All ranks have met and have the state: make this rank's own as it was at the beginning of the next step.

        Args:
            verdict: the next step.
            begun: what the step began with that was under way.
            receives: this rank was not where the others are.
            is_new: it takes a lost one's place.
            buffers: :meth:`buffers_behind` of the rank whose state is right.
        """

    def reach_end(self) -> None:
        """The session's block has ended."""

    def close(self) -> None:
        """Give back what was mapped."""

    def own_at(self, steps: int) -> bytes:
        """This rank's own state after so many steps, packed; empty if it is not known or nobody else can use it."""

    def take_own(self, record: bytes, steps: int) -> bool:
        """In a process whose memory was lost with its node: take what a partner has kept of it. Returns whether it holds what
        is needed after so many steps."""

    def copy(self, copied: Sequence[Held]) -> None:
        """All have met, and new partners are connected: begin to send them what they lack.

        Args:
            copied: the snapshots that all partners have.
        """

    def await_copies(self) -> None:
        """Wait until they have it, or a loss prevents it."""

    def take_copy(
        self,
        held: Held,
        size: int,
        checksum: int,
        receive: Callable[[torch.Tensor], None],
        *,
        is_own: bool,
    ) -> None:
        """In a process whose memory was lost with its node, or that is one more: take its part of a snapshot from another.

        Args:
            held: which.
            size: in bytes.
            checksum: of the contents.
            receive: fills a tensor of so many bytes.
            is_own: it is a copy of this rank's; False: the part of a rank at the same place of another replica.
        """

    def contents(self, held: Held) -> tuple[torch.Tensor, int]:
        """This rank's part of a snapshot, which is not to be kept: ``[n]``, uint8; and its checksum."""

    def before_batch(self) -> OwnState:
        """This rank's own state before the batch in hand was fetched, of whose body nothing is complete."""

    def take_place(self, data: bytes) -> None:
        """In a process whose memory was lost with its node: take another rank's own state (:meth:`own_at`) for what it tells of the
        place in the data."""

"""What a rank keeps while it trains, so that it can be replaced and can repeat a step.

There are two implementations: :mod:`.replicated` and :mod:`.sharded`. A session has one of them, and calls the methods below.
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
        fingerprint: of the parameters, for a function that may change them and put them back, such as a validation with averaged
            parameters; None: no change is put back.
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
        communicates: the ranks are agreeing on something, so a collective that starts now is not the script's.
    """

    communicates: bool

    @property
    def random(self) -> RandomState | None:
        """The generators to begin the next step with, if they differ from the current ones."""

    @property
    def ranks(self) -> int:
        """How many ranks the snapshot that :meth:`settle` went back to was for; 0 if it did not go back to one."""

    def held(self) -> tuple[Held, ...] | None:
        """The complete snapshots of this rank; None if it needs none."""

    def fingerprint(self) -> int:
        """The fingerprint of what all ranks must have alike at the beginning; 0 if there is no such state."""

    def begin(self) -> None:
        """The session begins, in a process that does not take a lost one's place."""

    def begin_batches(self, *, anew: bool) -> None:
        """A loop over batches begins, or (``anew``) its iteration restarts at an earlier batch than the one in hand."""

    def approach_batch(self) -> None:
        """Nothing is under way, and a batch is about to be fetched."""

    def random_before_fetch(self) -> RandomState | None:
        """The generators, if :meth:`reach_end_of_batches` needs them."""

    def reach_end_of_batches(self, random: RandomState | None) -> bool:
        """The loader has no more batches. Returns False if a loss leads back to an earlier batch."""

    def end_batches(self) -> None:
        """A loop over batches has ended, or the script has left it with a break."""

    def continue_body(self) -> RandomState | None:
        """A batch is in hand, and steps of its body are complete. Returns the generators after the last of them, if known."""

    def reach_task(self) -> bool:
        """A function is about to run. Returns False if a loss leads back to an earlier step."""

    def leave_task(self, before: int) -> bool:
        """A function has run. Returns False if it must run again: a loss leads back to ``before`` steps or fewer."""

    def begin_step(
        self, *, is_task: bool, may_swap: bool = False, behind: RandomState | None = None
    ) -> Begun:
        """A step begins that is not rehearsed.

        Args:
            is_task: it is a function's.
            may_swap: it may change parameters and put them back.
            behind: outside of a batch's body, the generators after the previous step, if there was one.
        """

    def note_collective(self) -> None:
        """A collective of the step under way is about to begin."""

    def buffers_behind(self, steps: int) -> bytes:
        """Digests of this rank's buffers before the last collective of the step that completed this many steps; empty if they are
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
            begun: what the step under way began with.
            receives: this rank gets the state from another one.
            is_new: this process takes a lost one's place.
            buffers: :meth:`buffers_behind` of the rank whose state is right.
        """

    def reach_end(self) -> None:
        """The session's block has ended."""

    def close(self) -> None:
        """Release the mapped memory."""

    def own_at(self, steps: int) -> bytes:
        """This rank's own state after this many steps, packed; empty if it is not known or nobody else can use it."""

    def take_own(self, record: bytes, steps: int) -> bool:
        """In a process whose memory was lost with its node: take what a partner has kept of it. Returns whether the record has
        what is needed after this many steps."""

    def copy(self, copied: Sequence[Held]) -> None:
        """All have met, and new partners are connected: start to send the partners what they lack.

        Args:
            copied: the snapshots that all partners have.
        """

    def await_copies(self) -> None:
        """Wait until the partners have it, or a loss prevents it."""

    def take_copy(
        self,
        held: Held,
        size: int,
        checksum: int,
        receive: Callable[[torch.Tensor], None],
        *,
        is_own: bool,
    ) -> None:
        """In a process whose memory was lost with its node, or an additional one: take its part of a snapshot from another rank.

        Args:
            held: the snapshot.
            size: in bytes.
            checksum: of the contents.
            receive: fills a tensor of this many bytes.
            is_own: it is a copy of this rank's part; False: the part of the rank that has the same place in another replica.
        """

    def contents(self, held: Held) -> tuple[torch.Tensor, int]:
        """This rank's part of a snapshot (``[n]``, uint8; the caller must not keep it), and its checksum."""

    def before_batch(self) -> OwnState:
        """This rank's own state before the batch in hand was fetched. Nothing of that batch's body is complete."""

    def take_place(self, data: bytes) -> None:
        """In a process whose memory was lost with its node: take the place in the data from another rank's own state
        (:meth:`own_at`)."""

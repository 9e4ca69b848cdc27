"""One use of a Join: this rank's progress through its steps, as the members see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from rallypoint.errors import JoinError

from .leaving import Deserted, all_have_left
from .notes import Notes
from .passes import Passes
from .schedule import Schedule


@dataclass(slots=True)
class Run:
    """State shared by the context and its members.

    Args:
        group: the ranks that train together.
        device: where the group's collectives work.
        accumulation: gradients are exchanged once in this many steps.
        schedule: all ranks' inputs, for the steps from ``base`` on. None: ranks count each other in each step (classic).
        step: the current step, from 0; -1 before the first.
        first: the loop's first step.
        base: the schedule's first step: the loop's, or the current window's.
        ends: whether the schedule's last step is also the loop's.
        own: the number of steps in this loop in which this rank had inputs.
        exchanged: whether the last shadowed step exchanged gradients.
        counted: whether a module or our own loop marks the start of each step; otherwise an optimizer does.
        calm: until this step, this rank's factor stays the same and the rank goes on.
        replays: whether ranks that have run out keep running the loop's body.
        notes: notes of ranks that left their loops early. None: in a classic block.
        passes: the order in which DDP modules run forward and backward.
        modules: the number of DDP modules.
        averaged: ``id`` of each parameter whose gradients are averaged over the ranks.
        scaler: the scaler that optimizers step through, or None.
        scaled: whether an optimizer has stepped through it since its last update.
        shadows: whether this rank matches the others' steps by hooks.
        told: in a classic block, the all-reduce and the tensor that count the ranks exchanging gradients in this step.
        began_with: the number of ranks that had inputs at the start of the accumulation still open from the last
            schedule.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    accumulation: int = 1
    schedule: Schedule | None = None
    step: int = -1
    first: int = 0
    base: int = 0
    ends: bool = True
    own: int = 0
    exchanged: bool = True
    counted: bool = True
    calm: int = 0
    replays: bool = False
    notes: Notes | None = None
    averaged: set[int] = field(default_factory=set)
    scaler: GradScaler | None = None
    scaled: bool = False
    shadows: bool = False
    told: tuple[dist.Work, torch.Tensor] | None = None
    began_with: int = 0
    passes: Passes = field(default_factory=lambda: Passes(0))
    modules: int = 0
    rank: int = field(init=False)
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.began_with = self.world_size

    def add_module(self) -> int:
        """Count one more DDP module, and return its position."""
        self.modules += 1
        self.passes = Passes(self.modules)
        return self.modules - 1

    def begin_loop(self) -> None:
        """Start a new loop with the next step."""
        self.first = self.base = self.step + 1
        self.shadows = False
        self.own = 0

    def begin_schedule(self, schedule: Schedule) -> None:
        """Start ``schedule`` with the next step."""
        self.began_with = self.sharing(self.step + 1)
        self.schedule, self.base = schedule, self.step + 1

    def accumulation_at(self, step: int) -> int:
        """The first step of the accumulation that ``step`` belongs to."""
        return step - (step - self.first) % self.accumulation

    def sharing(self, step: int) -> int:
        """The number of ranks that had inputs when this step's accumulation started.

        Gradients kept from before are the same on all of these ranks, and no other rank contributes them.
        """
        start = self.accumulation_at(step)
        if self.schedule is None or start < self.base:
            return self.began_with
        return self.schedule.num_active(start - self.base)

    @property
    def num_active(self) -> int:
        """The number of ranks that have inputs in this step."""
        assert self.schedule is not None
        return self.schedule.num_active(self.step - self.base)

    def confirm(self) -> None:
        """Check that the step took place. A shadowing rank calls this after a step's exchange, before it uses the gradients.

        Raises:
            Deserted: every rank that was expected in this step left its loop before it.
        """
        if self.notes is None or self.schedule is None:
            return
        notes = self.notes.read()
        if not notes:
            return
        index = self.step - self.base
        ranks = range(self.world_size)
        needed = ranks if self.replays else [r for r in ranks if self.schedule.is_active(r, index)]
        if all_have_left(notes, needed, self.step):
            raise Deserted

    @property
    def factor(self) -> float:
        """The factor for this rank's gradient in this step."""
        schedule = self.schedule
        return 1.0 if schedule is None else schedule.factor(self.rank, self.step - self.base)

    @property
    def source(self) -> int:
        """The rank whose buffers the others use in this step."""
        assert self.schedule is not None
        return self.schedule.source(self.step - self.base)

    @property
    def active(self) -> bool:
        """Whether this rank has inputs in this step."""
        schedule = self.schedule
        return schedule is None or schedule.is_active(self.rank, self.step - self.base)

    @property
    def is_out(self) -> bool:
        """Whether this rank only matches this step by hooks."""
        return self.shadows or not self.active

    @property
    def someone_is_out(self) -> bool:
        """Whether any rank only matches this step by hooks; the same answer on all ranks, False if unknown.

        Blocks: in a classic block, until all ranks have started the step.
        """
        if self.replays:
            return False
        if self.schedule is not None:
            return self.num_active < self.world_size
        if self.shadows or self.told is None:
            return self.shadows and self.modules > 0
        work, count = self.told
        work.wait()
        return int(count.item()) < self.world_size

    @property
    def syncs(self) -> bool:
        """Whether gradients are exchanged in this step."""
        schedule = self.schedule
        done = self.step + 1
        last = self.ends and schedule is not None and done - self.base >= schedule.total
        return last or (done - self.first) % self.accumulation == 0

    @property
    def pending(self) -> bool:
        """Whether this rank has run out since the last exchange, with accumulated gradients not yet exchanged."""
        if self.schedule is None or self.active:
            return False
        since = self.step - self.first
        return self.own % self.accumulation != 0 and self.own > since - since % self.accumulation

    def check_sync(self, name: str, asked: bool) -> None:
        """Check that a module exchanges gradients in the steps that the ranks agreed on.

        Args:
            name: the module's class, for the message.
            asked: whether it is about to exchange gradients in this step.

        Raises:
            JoinError: the module breaks the agreement, and the other ranks would hang.
        """
        if asked != self.syncs:
            every = f"every {self.accumulation} steps" if self.accumulation > 1 else "in every step"
            raise JoinError(
                f"rank {self.rank} runs step {self.step} {'without' if asked else 'under'} no_sync() of {name}, but"
                f" Join expects gradients to be exchanged {every}; pass accumulation=<steps per exchange> to Join,"
                " and in a loop over join.batches(loader) use no_sync() where join.syncs is False"
            )

"""One use of a Join: where this rank is in its steps, as its members see it."""

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
        group: over which the inputs are uneven.
        device: for messages.
        accumulation: gradients are exchanged in every so many-th step.
        schedule: of all ranks, for the steps from ``base`` on; None: each step tells (torch's protocol).
        step: the one that runs, from 0; -1 before the first.
        first: the step at which the loop began.
        base: the schedule's first step: the loop's, or that of a window of a loader without length.
        ends: whether the schedule's last step is the loop's.
        own: in how many steps of the loop this rank had inputs.
        exchanged: whether the step that was shadowed last exchanged gradients.
        counted: whether somebody else than an optimizer tells when a step begins.
        calm: before this step nothing changes for this rank: neither its factor nor whether it goes on.
        replays: whether ranks that have run out go on running the loop's body.
        notes: of the ranks that have left their loops early; None: nobody could tell (classic).
        passes: in which order the modules that hooks can match go forward and backward.
        modules: how many there are of them.
        averaged: the parameters whose gradients are averaged over the ranks, by identity.
        scaler: through which optimizers step; None: none.
        scaled: whether one has, since the scaler was updated last.
        shadows: whether this rank matches the others' steps by hooks.
        told: what tells how many ranks exchange gradients in this step, where each step tells.
        began_with: how many ranks had inputs when the accumulation began that the last schedule left open.
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
        """Its position."""
        self.modules += 1
        self.passes = Passes(self.modules)
        return self.modules - 1

    def begin_loop(self) -> None:
        """The next step is the first of a loop."""
        self.first = self.base = self.step + 1
        self.shadows = False
        self.own = 0

    def begin_schedule(self, schedule: Schedule) -> None:
        """The next step is the schedule's first."""
        self.began_with = self.sharing(self.step + 1)
        self.schedule, self.base = schedule, self.step + 1

    def accumulation_at(self, step: int) -> int:
        """The first of the steps whose gradients are exchanged together with this one's."""
        return step - (step - self.first) % self.accumulation

    def sharing(self, step: int) -> int:
        """How many ranks had inputs when the accumulation began that this step is part of.

        What stands in their gradients from before is the same on all of them; nobody else contributes it.
        """
        start = self.accumulation_at(step)
        if self.schedule is None or start < self.base:
            return self.began_with
        return self.schedule.num_active(start - self.base)

    def confirm(self) -> None:
        """Called by a rank that shadows, when a step's gradients are exchanged, before they are used.

        Raises:
            Deserted: all who should have been in this step have left their loops before it.
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
        """Of this rank's gradient in this step."""
        schedule = self.schedule
        return 1.0 if schedule is None else schedule.factor(self.rank, self.step - self.base)

    @property
    def source(self) -> int:
        """The rank whose buffers count in this step."""
        assert self.schedule is not None
        return self.schedule.source(self.step - self.base)

    @property
    def active(self) -> bool:
        """Whether this rank has inputs in this step."""
        schedule = self.schedule
        return schedule is None or schedule.is_active(self.rank, self.step - self.base)

    @property
    def is_out(self) -> bool:
        """Whether this rank only matches this step, by hooks."""
        return self.shadows or not self.active

    @property
    def someone_is_out(self) -> bool:
        """Whether some rank does, as all ranks know; False where nothing tells them.

        Blocks: where each step tells, until all ranks have begun it.
        """
        if self.replays:
            return False
        if self.schedule is not None:
            return self.schedule.num_active(self.step - self.base) < self.world_size
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
        """Whether this rank ran out since the last exchange, and holds a gradient that nobody has seen."""
        if self.schedule is None or self.active:
            return False
        since = self.step - self.first
        return self.own % self.accumulation != 0 and self.own > since - since % self.accumulation

    def check_sync(self, name: str, asked: bool) -> None:
        """Whether a module's ``no_sync`` is where all ranks expect it.

        Raises:
            JoinError: it is not; the others would wait for ever.
        """
        if asked != self.syncs:
            every = f"every {self.accumulation} steps" if self.accumulation > 1 else "in every step"
            raise JoinError(
                f"step {self.step} of rank {self.rank} runs {'without' if asked else 'under'} no_sync() of"
                f" {name}, and the ranks agreed to exchange gradients {every}: give Join accumulation=the"
                " steps between two exchanges; join.batches(loader) tells in join.syncs where they are"
            )

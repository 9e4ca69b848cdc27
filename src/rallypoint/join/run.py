"""One use of a Join: where this rank is in its steps, as its members see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rallypoint.errors import JoinError

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
    rank: int = field(init=False)
    world_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)

    def begin_loop(self) -> None:
        """The next step is the first of a loop."""
        self.first = self.base = self.step + 1
        self.own = 0

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

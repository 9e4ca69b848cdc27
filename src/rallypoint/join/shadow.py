"""Matches the other ranks' steps by hooks, on a rank that has run out or left its loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from rallypoint.errors import JoinError

from .hooks.ddp import DdpMember
from .leaving import Deserted
from .members import Member
from .passes import Pass
from .run import Run
from .schedule import Schedule


_log = logging.getLogger(__name__)


class Shadow:
    """Issues the collectives of other ranks' steps, with empty contributions.

    Args:
        members: the members of the block.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._models = [member for member in members if isinstance(member, DdpMember)]

    def level(self, schedule: Schedule) -> None:
        """If some rank has no inputs, equalize what the ranks hold from before.   Collective, in this case only."""
        if schedule.least == 0 < schedule.total:
            for member in self._members:
                member.level()

    def next_exchange(self, run: Run) -> int:
        """The first step in which this rank has not issued all collectives."""
        begun = run.step < 0 or all(member.begun_in(run.step) for member in self._members)
        return run.step + 1 if begun else run.step

    def others_have_inputs(self, run: Run) -> bool:
        """Whether any other rank has inputs in the next step.   Collective: the all-reduce that counts them (classic)."""
        count = torch.zeros(1, device=run.device)
        dist.all_reduce(count, group=run.group)
        return bool(count.item())

    def match(self, run: Run) -> None:
        """Match one step, or the rest of a step that this rank has started.   Collective.

        Raises:
            Deserted: all ranks have left their loops.
        """
        passes = run.passes.missing(run.step)
        if _in_turn(passes):
            for member in self._members:
                member.main_hook()
            return
        for each in passes:
            self._models[each.module].match(forward=each.forward)
        for member in self._members:
            if not isinstance(member, DdpMember):
                member.main_hook()

    def match_all(self, run: Run, next_step: int, steps: Iterator[int], left: bool) -> None:
        """Match the given steps, or fewer if all other ranks leave their loops, too.   Collective, in each step.

        Args:
            run: this rank's run.
            next_step: the first step that this rank does not take part in.
            steps: the steps to match.
            left: whether this rank left its loop early. It then writes a note for the others.

        Raises:
            JoinError: this rank left early, and the others' steps cannot be matched.
        """
        run.shadows = True
        if left:
            assert run.notes is not None
            run.notes.write(next_step)
        told = not left
        try:
            for run.step in steps:
                self.match(run)
                if not told and run.exchanged:
                    told = True
                    _log.warning(
                        "rank %d left its loop before step %d, and other ranks did not. It matches their remaining"
                        " steps; then all ranks raise JoinError",
                        run.rank,
                        next_step - run.first,
                    )
        except Deserted:
            return
        except RuntimeError as error:
            if not left:
                raise
            raise JoinError(
                f"rank {run.rank} left its loop after {next_step - run.first} steps, and other ranks did not; break"
                " out of the loop in the same step on all ranks, or on none"
            ) from error


def _in_turn(passes: Sequence[Pass]) -> bool:
    """Whether each module finishes its passes before the next one in the list starts."""
    modules = [each.module for each in passes]
    return modules == sorted(modules)

"""Ranks that leave their loop before their last step, and whether all have: pure.

Theory of operation
-------------------
Leaving early is fine if all ranks do so in the same step, and a mistake otherwise. A rank that leaves cannot know
which it is: the others may have left, too, or they may wait for it in the next step's collectives. So it writes a
note into the group's store, then matches the next step as if it had run out of inputs. That exchange is complete only
when every rank has taken part; a rank that had left has written its note before. If every rank that should have been
there has a note, nobody computed anything: what was exchanged is thrown away, and the loop is over (``Deserted``).
Otherwise the rank keeps the others company to their end, so that nobody hangs, and then all of them raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rallypoint.errors import JoinError


class Deserted(Exception):
    """All ranks have left their loops; the step that was just matched is none."""


@dataclass(frozen=True, slots=True)
class Stay:
    """How one rank's loop ended.

    Args:
        steps: in so many steps it exchanged gradients, or would have.
        left: whether it had more.
    """

    steps: int
    left: bool


def all_have_left(notes: Mapping[int, int], needed: Iterable[int], step: int) -> bool:
    """Whether nobody is in ``step``: every rank in ``needed`` has left before it, according to its note."""
    return all(rank in notes and notes[rank] <= step for rank in needed)


def steps_of_all(stays: Sequence[Stay]) -> int:
    """How many steps there were.

    Raises:
        JoinError: some ranks left while others went on.
    """
    steps = max(stay.steps for stay in stays)
    early = [rank for rank, stay in enumerate(stays) if stay.left and stay.steps < steps]
    if early:
        raise JoinError(
            "; ".join(
                f"rank {rank} left its loop after {_steps(stays[rank].steps)}" for rank in early
            )
            + f"; {names_of(r for r, stay in enumerate(stays) if stay.steps == steps)} went on to step {steps}:"
            " leave the loop in the same step on all ranks, or on none"
        )
    return steps


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def names_of(ranks: Iterable[int]) -> str:
    """For a message."""
    every = [str(rank) for rank in ranks]
    return f"rank {every[0]}" if len(every) == 1 else f"ranks {', '.join(every)}"

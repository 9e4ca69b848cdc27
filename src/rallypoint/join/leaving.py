"""Ranks that leave their loop before their last step, and whether all of them did. Pure.

Theory of operation
-------------------
Leaving early is fine if all ranks do so in the same step, and a mistake otherwise. A rank that leaves cannot tell which
case it is in: the others may have left, too, or may be waiting for it in the next step's collectives. So it writes a note
to the group's store, then matches the next step as if it had run out of inputs. That exchange completes only when
every rank has taken part, and a rank that left has written its note before that. If every rank that was expected in the
step has a note, no rank computed anything: the result is discarded, and the loop is over (``Deserted``). Otherwise
the rank matches the others' remaining steps, so that none of them hangs, and then all ranks raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rallypoint.errors import JoinError


class Deserted(Exception):
    """All ranks have left their loops; the step that was just matched did not take place."""


@dataclass(frozen=True, slots=True)
class Stay:
    """How one rank's loop ended.

    Args:
        steps: the number of steps in which it exchanged gradients, or would have.
        left: whether it left before its last step.
    """

    steps: int
    left: bool


def all_have_left(notes: Mapping[int, int], needed: Iterable[int], step: int) -> bool:
    """Whether, by their notes, all ranks in ``needed`` left before ``step``."""
    return all(rank in notes and notes[rank] <= step for rank in needed)


def steps_of_all(stays: Sequence[Stay]) -> int:
    """The number of steps that all ranks took part in.

    Raises:
        JoinError: some ranks left their loops while others went on.
    """
    steps = max(stay.steps for stay in stays)
    early = [rank for rank, stay in enumerate(stays) if stay.left and stay.steps < steps]
    if early:
        raise JoinError(
            "; ".join(
                f"rank {rank} left its loop after {_steps(stays[rank].steps)}" for rank in early
            )
            + f"; {names_of(r for r, stay in enumerate(stays) if stay.steps == steps)} went on to step {steps};"
            " break out of the loop in the same step on all ranks, or on none"
        )
    return steps


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def names_of(ranks: Iterable[int]) -> str:
    """Ranks as text for a message: "rank 0", or "ranks 0, 2"."""
    every = [str(rank) for rank in ranks]
    return f"rank {every[0]}" if len(every) == 1 else f"ranks {', '.join(every)}"

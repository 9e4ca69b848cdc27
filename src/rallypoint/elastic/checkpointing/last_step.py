"""The step before which a job that is told to stop takes its last checkpoint: the same on all ranks, without a collective.

Ranks learn of the stop at different times, and none may wait before a step: the others may still need it in the previous one. So
each rank posts where it was when it learned of the stop, and continues training. At the first boundary past all these places,
every rank finds all of them posted, as no rank completes a step without the others. That is where all stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.elastic.communication.board import Board


def is_last(steps: int, posted: Sequence[int | None]) -> bool:
    """Whether all ranks stop at the boundary after this many steps.

    Args:
        steps: how many are complete.
        posted: for each rank, how many were complete when it learned of the stop; None if that is not known.
    """
    known = [each for each in posted if each is not None]
    return len(known) == len(posted) and max(known) < steps


class LastStep:
    """One rank's part in the agreement.

    Args:
        board: to the other ranks; None if there are none.
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, board: Board | None, rank: int, size: int) -> None:
        self._board = board
        self._rank = rank
        self._posted: list[int | None] = [None] * size

    def is_here(self, steps: int) -> bool:
        """At a boundary, once this rank is told to stop: whether this boundary is the last one."""
        if self._board is None:
            return True
        if self._posted[self._rank] is None:
            self._board.post(_key(self._rank), str(steps).encode())
            self._posted[self._rank] = steps
        for rank, known in enumerate(self._posted):
            if known is None and (note := self._board.peek(_key(rank))) is not None:
                self._posted[rank] = int(note)
        return is_last(steps, self._posted)


def _key(rank: int) -> str:
    return f"stop/{rank}"

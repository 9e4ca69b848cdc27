"""The step before which a job that is told to stop takes its last checkpoint: the same on all ranks, without a collective.

Ranks hear of the stop at different times, and nobody may wait for the others before a step: they may need it in the one before. So
each rank posts where it was when it heard of it, and goes on training. Whoever passes the first boundary behind all
these places finds all of them posted, as nobody completes a step without the others. That is where all stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.elastic.communication.board import Board


def is_last(steps: int, posted: Sequence[int | None]) -> bool:
    """Whether all ranks stop at the boundary behind so many steps.

    Args:
        steps: how many are complete.
        posted: of each rank: how many were complete when it heard of the stop; None if it has not.
    """
    known = [each for each in posted if each is not None]
    return len(known) == len(posted) and max(known) < steps


class LastStep:
    """One rank's part in it.

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
        """At a boundary, after the stop was told: whether it is the last one."""
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

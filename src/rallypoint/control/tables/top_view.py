"""What ``rally top`` shows about a job."""

from __future__ import annotations

from typing import Any

from rallypoint.control import client
from rallypoint.errors import ControlError

from . import worker_table


class View:
    """What is shown about a job, as of the last look.

    Args:
        job: the job to ask.
        sort: the key by which ranks are sorted.

    Attributes:
        chosen: the rank that keys apply to; None: all.
    """

    def __init__(self, job: client.RunningJob, sort: str) -> None:
        self.job = job
        self.sort = sort
        self.chosen: int | None = None
        self._rows: list[worker_table.Row] = []
        self._last: list[dict[str, Any]] = []
        self._status: dict[str, Any] = {}
        self._problem = ""

    def look_again(self) -> bool:
        """Ask the job. If it does not answer, keep its last answer, and add the reason. Returns whether it still runs."""
        try:
            self.look()
        except ControlError as error:
            self._problem = str(error)
            return client.is_running(self.job)
        return True

    def look(self) -> None:
        """Ask the job.

        Raises:
            ControlError: it has ended, or does not answer.
        """
        self._status = self.job.status()
        self._problem = ""
        now = self.job.usage()
        self._rows = worker_table.rows(now, self._last)
        self._last = now

    def choose(self, by: int) -> None:
        """Move the choice down by that many rows (up if negative). If no rank is chosen, choose the first or the last."""
        ranks = [row.rank for row in self._ordered()]
        if not ranks:
            self.chosen = None
        elif self.chosen not in ranks:
            self.chosen = ranks[0] if by > 0 else ranks[-1]
        else:
            self.chosen = ranks[(ranks.index(self.chosen) + by) % len(ranks)]

    def lines(self, width: int, room: int | None = None) -> list[str]:
        """The table: a title, a header, and a line per rank.

        Args:
            width: the width in columns.
            room: the most lines to return, with the chosen rank among them; None: all.
        """
        head, *table = worker_table.lines(self._ordered(), width)
        first, last = self._window(room)
        title = worker_table.title(self._status, width)
        if self._problem:
            title = f"{self._status['id']}: {self._problem}"[:width]
        return [title, head, *table[first:last], *self._rest(first, last, width)]

    def marks(self, room: int | None = None) -> tuple[set[int], int | None]:
        """Which of :meth:`lines` show odd ranks, and which one shows the chosen rank."""
        first, last = self._window(room)
        rows = list(enumerate(self._ordered()[first:last], 2))
        chosen = next((place for place, row in rows if row.rank == self.chosen), None)
        return {place for place, row in rows if row.remark}, chosen

    def _ordered(self) -> list[worker_table.Row]:
        return list(worker_table.ordered(self._rows, self.sort))

    def _window(self, room: int | None) -> tuple[int, int]:
        """Which rows are shown. There are two lines above them, and one below if some rows are left out."""
        count = len(self._rows)
        if room is None or count + 2 <= room:
            return 0, count
        size = max(1, room - 3)
        ranks = [row.rank for row in self._ordered()]
        place = ranks.index(self.chosen) if self.chosen in ranks else 0
        first = min(max(0, place - size // 2), count - size)
        return first, first + size

    def _rest(self, first: int, last: int, width: int) -> list[str]:
        hidden = len(self._rows) - (last - first)
        return [f"({hidden} more ranks; arrow keys)"[:width]] if hidden else []

"""Two jobs that take turns of a few steps each, so that neighbouring turns saw the same machine.

On a shared machine turns vary by a tenth. Each turn of the second job is compared with the mean of the first job's two turns
around it, so what changes with time cancels out, and thousands of turns reveal differences of a few thousandths.
"""

from __future__ import annotations

import mmap
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any


FIRST, SECOND = 0, 1
# Turns that are not counted, while the workers settle.
SETTLING = 20
# The share of the ratios at either end that is replaced by the next value inside.
EDGE = 0.05


def take(folder: Path, job: int, rank: int, turns: int) -> Iterator[int]:
    """In a worker: ``turns`` turns, each when it is due. After the last one, it waits for :meth:`Turns.end`."""
    mine, other = (_baton(folder, each, rank) for each in (job, 1 - job))
    count = _counter(folder)
    _mark(folder, job, rank).touch()
    for number in range(turns):
        os.read(mine, 1)
        yield number
        if rank == 0 and job == SECOND:
            count[:] = (number + 1).to_bytes(8, "little")
        os.write(other, b".")
    for _ in range(2 if job == FIRST else 1):
        os.read(mine, 1)
    os.write(other, b".")


class Turns:
    """Both jobs' turns, in the process that has started them.

    Args:
        folder: shared with the workers.
        ranks: workers of each job.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        (folder / "turns").write_bytes(bytes(8))
        self._count = _counter(folder)
        self._batons = [_baton(folder, FIRST, rank) for rank in range(ranks)]

    def are_there(self, job: int) -> bool:
        """Whether all workers of this job wait for their turn."""
        return all(_mark(self._folder, job, rank).exists() for rank in range(self._ranks))

    def begin(self) -> None:
        """Start the first job's turn."""
        self._pass_on()

    def done(self) -> int:
        """How many turns the second job has had."""
        return int.from_bytes(self._count[:], "little")

    def end(self) -> None:
        """After the last turn: let the workers continue."""
        self._pass_on()

    def _pass_on(self) -> None:
        for each in self._batons:
            os.write(each, b".")


def compare(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """How much longer each turn of the second job took than those around it, as a share."""
    first, second = first[SETTLING:], second[SETTLING:]
    around = [(a + b) / 2 for a, b in pairwise(first)]
    return [b / a - 1 for a, b in zip(around, second, strict=False)]


def mean(ratios: Sequence[float]) -> dict[str, Any]:
    """The mean, winsorized, and its standard error."""
    ordered = sorted(ratios)
    least, most = (ordered[int(each * (len(ordered) - 1))] for each in (EDGE, 1 - EDGE))
    cut = [min(max(each, least), most) for each in ratios]
    error = statistics.pstdev(cut) / len(cut) ** 0.5
    return {"n": len(cut), "mean": round(statistics.mean(cut), 4), "error": round(error, 4)}


def median_error(values: Sequence[float]) -> float | None:
    """The standard error of the median, as for a normal distribution with the same quartiles."""
    if len(values) < 4:
        return None
    first, _, third = statistics.quantiles(values)
    return round(1.25 * (third - first) / 1.35 / float(len(values)) ** 0.5, 4)


def _baton(folder: Path, job: int, rank: int) -> int:
    """A pipe from which this worker reads a byte when its turn comes."""
    path = folder / f"baton-{job}-{rank}"
    with suppress(FileExistsError):
        os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _counter(folder: Path) -> mmap.mmap:
    with (folder / "turns").open("r+b") as file:
        return mmap.mmap(file.fileno(), 8)


def _mark(folder: Path, job: int, rank: int) -> Path:
    return folder / f"there-{job}-{rank}"

"""The output of a node's workers, as an answer to a reader on another node.

A question has ``ask`` (``logs``), ``generation`` (None: the newest), ``since`` (seconds ago, or None), ``room`` (the most bytes
of lines in the answer; :data:`BUDGET` is the default and the maximum), and what :mod:`.log_readers` needs to continue where
the last answer ended. A reader that wants more asks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rallypoint._core import addresses, clock, log_folder
from rallypoint._core.log_folder import LogFile
from rallypoint._core.log_records import Line, Origin

from . import log_reading
from .log_lines import Choice


# An answer is one record in the job's store, where a record has at most 1 MiB.
BUDGET = 512 * 1024
# The answers of all nodes are in the store at once. The limit for all together, and what each node gets in any case.
ALL_NODES, LEAST = 64 * 1024 * 1024, 16 * 1024


def room(num_nodes: int) -> int:
    """Bytes of lines in the answer of each node of a job."""
    return min(BUDGET, max(LEAST, ALL_NODES // num_nodes))


def told(
    folder: Path | None, places: Mapping[str, Any], question: Mapping[str, Any]
) -> dict[str, Any]:
    """This node's answer.

    Args:
        folder: the folder of this node's run, if it has one.
        places: where to continue, by file; other files are read from near their end.
        question: see above.
    Returns:
        ``host``, ``now`` (by its monotonic clock), ``generation``, ``files``.
    """
    files: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"host": addresses.hostname(), "files": files, "generation": None}
    try:
        known = [] if folder is None else log_folder.generations(folder)
        generation = question.get("generation")
        if generation is None and known:
            generation = known[-1]
        if folder is not None and generation in known:
            answer["generation"] = generation
            found = log_folder.log_files(folder, generation)
            wanted = question.get("room")
            most = min(wanted, BUDGET) if type(wanted) is int and wanted > 0 else BUDGET
            budget = max(1, most // max(1, len(found)))
            files += [_told_of(each, places, question, budget) for each in found]
            # The last lines of earlier workers, for a reader that has read their output.
            for older in (each for each in known if each < generation):
                files += [
                    _told_of(each, places, question, budget)
                    for each in log_folder.log_files(folder, older)
                    if _key(each) in places
                ]
    except OSError:
        pass  # the folder was removed: there is no output
    answer["now"] = clock.MONOTONIC.now()
    return answer


def _told_of(
    file: LogFile, places: Mapping[str, Any], question: Mapping[str, Any], budget: int
) -> dict[str, Any]:
    origin = file.origin
    key = _key(file)
    place = _place(places.get(key)) or log_reading.end_of(file, budget)
    lines, following = log_reading.read(file, place, budget)
    since = question.get("since")
    if isinstance(since, int | float):
        choice = Choice(since=clock.wall() - since)
        lines = list(choice.of(lines))
        if place is not None and file.path.stat().st_mtime < clock.wall() - since:
            lines = []
    return {
        "key": key,
        "rank": origin.rank,
        "local_rank": origin.local_rank,
        "stream": origin.stream,
        "place": following,
        "lines": [[each.monotonic, each.text] for each in lines],
    }


def _key(file: LogFile) -> str:
    origin = file.origin
    return f"{origin.generation}/{origin.local_rank}/{file.replaced}/{origin.stream}"


def _place(value: object) -> log_reading.Place | None:
    match value:
        case [int(inode), int(offset)] if offset >= 0:
            return inode, offset
        case _:
            return None


def places_after(places: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Where to continue after an answer of this node.

    Args:
        places: where the answer began.
        answer: the result of :func:`told`.
    """
    after = dict(places)
    for file in answer["files"]:
        key = file["key"]
        after[key] = file["place"]
        if int(key.partition("/")[0]) < answer["generation"] and not file["lines"]:
            del after[key]  # it has been read to its end
    return after


def read(answer: Mapping[str, Any], now: float) -> list[list[Line]]:
    """The lines in another node's answer, file by file, their times shifted to this host's clock.

    A line's age is the same on both clocks, except for the time that the answer took.

    Args:
        answer: the result of :func:`told`.
        now: when the answer arrived, by this host's monotonic clock.
    Raises:
        ValueError: it is not such an answer.
    """
    try:
        shift = now - float(answer["now"])
        found = []
        for file in answer["files"]:
            generation = int(str(file["key"]).partition("/")[0])
            origin = Origin(
                host=str(answer["host"]),
                rank=int(file["rank"]),
                local_rank=int(file["local_rank"]),
                generation=generation,
                stream=str(file["stream"]),
            )
            first = Line(origin=origin, time=None, monotonic=None, text="")
            found.append(
                [
                    replace(first, monotonic=None if at is None else at + shift, text=str(text))
                    for at, text in file["lines"]
                ]
            )
        return found
    except (KeyError, TypeError) as error:
        raise ValueError(f"no answer about logs: {error}") from None

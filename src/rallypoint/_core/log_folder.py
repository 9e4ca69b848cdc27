"""The folder of a run: ``attempt_<generation>/<local-rank>/{stdout,stderr}.log``, older parts as ``stdout.log.1``, and so on.

A worker of a session that takes a lost one's place has ``attempt_<generation>.<losses>``, with the generation in which the
workers of its node were started together. ``ranks.json`` in ``attempt_<generation>`` says which ranks they have now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import private
from .log_records import Origin


# Full files that are kept beside the current one.
OLDER = 4
STREAMS = ("stdout", "stderr")
_RANKS = "ranks.json"
_ATTEMPT = re.compile(r"attempt_(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFile:
    """The output of one stream of one worker.

    Args:
        path: the newest part's path.
        origin: whose output it is; the rank is -1 if it is not known.
        replaced: the number of the loss after which the worker was started, or 0.
    """

    path: Path
    origin: Origin
    replaced: int

    def parts(self) -> list[Path]:
        """All parts, the oldest first."""
        every = (*(older(self.path, number) for number in range(OLDER, 0, -1)), self.path)
        return [each for each in every if each.exists()]


def older(path: Path, number: int) -> Path:
    """The name of a full file; 1 is the most recent one."""
    return path.with_name(f"{path.name}.{number}")


def note_ranks(attempt: Path, host: str, ranks: Mapping[int, int]) -> None:
    """Write which rank each local rank of a generation has.

    Raises:
        OSError: it cannot be written.
    """
    record = {"version": 1, "host": host, "ranks": {str(each): ranks[each] for each in ranks}}
    written = attempt / f"new {_RANKS}"
    private.write_text(written, json.dumps(record) + "\n")
    written.replace(attempt / _RANKS)  # it may be read at the same time


def generations(folder: Path) -> list[int]:
    """The generations that have a folder, the oldest first."""
    return sorted({generation for _, generation, _ in _attempts(folder)})


def log_files(folder: Path, generation: int) -> list[LogFile]:
    """All log files of a generation, in the order of ranks and of time."""
    found: list[LogFile] = []
    attempts = [each for each in _attempts(folder) if each[1] == generation]
    host, ranks = "", dict[str, int]()
    for attempt, _, _ in attempts:
        host, ranks = _read_ranks(attempt) or (host, ranks)
    for attempt, _, replaced in sorted(attempts, key=lambda each: each[2]):
        for worker in attempt.iterdir():
            if not worker.name.isdigit():
                continue
            for stream in STREAMS:
                path = worker / f"{stream}.log"
                if not path.exists():
                    continue
                origin = Origin(
                    host=host,
                    rank=ranks.get(worker.name, -1),
                    local_rank=int(worker.name),
                    generation=generation,
                    stream=stream,
                )
                found.append(LogFile(path=path, origin=origin, replaced=replaced))
    return sorted(found, key=lambda each: (each.origin.local_rank, each.replaced))


def _attempts(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Folders with their generation and number of losses."""
    for each in folder.iterdir():
        match = _ATTEMPT.fullmatch(each.name)
        if match and each.is_dir():
            yield each, int(match[1]), int(match[2] or 0)


def _read_ranks(attempt: Path) -> tuple[str, dict[str, int]] | None:
    try:
        record = json.loads((attempt / _RANKS).read_text())
        return str(record["host"]), {str(key): int(record["ranks"][key]) for key in record["ranks"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""A line of a worker's output as a JSON object: ``rally run --log-format json`` writes it, ``rally logs`` reads it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass


# The version of the records; new keys do not change it.
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Whose line it is.

    Args:
        host: the worker's host.
        rank, local_rank, generation: the worker's; -1 for lines of the supervisor.
        stream: ``stdout``, ``stderr``, or ``rally`` for lines of the supervisor.
    """

    host: str
    rank: int
    local_rank: int
    generation: int
    stream: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line with its time.

    Args:
        origin: whose it is.
        time: seconds since 1970, by the clock of the host; None if it is not known.
        monotonic: seconds since the host was started, by its monotonic clock.
        text: without the end of the line.
    """

    origin: Origin
    time: float | None
    monotonic: float | None
    text: str


def pack(origin: Origin, time: float, monotonic: float, text: bytes) -> bytes:
    """A record, without the end of the line. Bytes that are not UTF-8 are replaced."""
    record = {
        "version": VERSION,
        "time": round(time, 6),
        "monotonic": round(monotonic, 6),
        "host": origin.host,
        "rank": None if origin.rank < 0 else origin.rank,
        "local_rank": None if origin.local_rank < 0 else origin.local_rank,
        "generation": None if origin.generation < 0 else origin.generation,
        "stream": origin.stream,
        "text": text.decode(errors="replace").removesuffix("\r"),
    }
    return json.dumps(record, ensure_ascii=False).encode()


def parse(data: bytes, usual: Origin) -> Line:
    """A line of a log file: a record, or the text itself.

    Args:
        data: without the end of the line.
        usual: whose it is if it does not say so.
    """
    if data.startswith(b'{"version": '):
        try:
            return _line(json.loads(data), usual)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # the script prints JSON of its own
    # The last state of a progress bar.
    text = data.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return Line(origin=usual, time=None, monotonic=None, text=text)


def _line(record: dict[str, object], usual: Origin) -> Line:
    time, monotonic, text = record["time"], record["monotonic"], record["text"]
    host, stream, rank = record["host"], record["stream"], record["rank"]
    if not isinstance(time, float | int) or not isinstance(monotonic, float | int):
        raise TypeError("times are numbers")
    if not isinstance(rank, int) or not isinstance(text, str):
        raise TypeError("a worker's line")
    origin = Origin(
        host=str(host),
        rank=rank,
        local_rank=usual.local_rank,
        generation=usual.generation,
        stream=str(stream),
    )
    return Line(origin=origin, time=float(time), monotonic=float(monotonic), text=text)

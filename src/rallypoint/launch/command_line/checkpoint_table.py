"""``rally checkpoints``: what a folder of checkpoints holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rallypoint._core.checkpoint_folder import damage, entries
from rallypoint._core.checkpoint_records import Entry
from rallypoint._core.storage import Storage, storage_at
from rallypoint.errors import ConfigError


HELP = """\
usage: rally checkpoints [--json] PLACE

List the checkpoints that sessions (rallypoint.elastic) have written: step, time, size, number of ranks, and
whether each is complete. The last complete one is what the next start loads.

  PLACE     a directory, or a URL that fsspec understands (s3://bucket/run)
  --json    one JSON object per line, sizes in bytes, times in seconds since 1970

A checkpoint is damaged if a file is missing or has the wrong size. Loading also compares digests."""


def command(words: Sequence[str]) -> str:
    """Run ``rally checkpoints``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown, or the place cannot be read.
    """
    if {"-h", "--help"} & set(words):
        return HELP
    places = [word for word in words if word != "--json"]
    for place in places:
        if place.startswith("-"):
            raise ConfigError(
                "checkpoints", place, "no such flag (known: --json)", "rally checkpoints --help"
            )
    if len(places) != 1:
        raise ConfigError(
            "checkpoints", None, f"expected one place, got {len(places)}", "rally checkpoints PLACE"
        )
    if not places[0]:  # an empty path would mean the current folder
        raise ConfigError(
            "checkpoints", "", "expected a place", "is a variable of the shell not set?"
        )
    rows = _rows(places[0])
    if "--json" in words:
        return "\n".join(json.dumps(each) for each in rows)
    return _table(rows) if rows else f"no checkpoints in {places[0]}"


def _rows(place: str) -> list[dict[str, Any]]:
    try:
        storage = storage_at(place)
        exists = storage.exists("")
        rows = [_row(storage, each) for each in entries(storage)]
    except NotADirectoryError:
        hint = "name the folder that the session got as checkpoint="
        raise ConfigError("checkpoints", place, "a file, expected a folder", hint) from None
    except Exception as error:  # noqa: BLE001  drivers of URLs have exceptions of their own
        raise ConfigError("checkpoints", place, str(error)) from None
    if not exists:
        raise ConfigError("checkpoints", place, "no such place")
    return rows


def _row(storage: Storage, entry: Entry) -> dict[str, Any]:
    record = entry.record
    problem = damage(storage, entry)
    state = "damaged" if problem else "incomplete" if record is None else "complete"
    row: dict[str, Any] = {"step": entry.step, "name": entry.name, "state": state}
    if problem:
        row["problem"] = problem
    if record is not None:
        row |= {
            "epoch": record.epoch,
            "time": record.time,
            "bytes": record.size,
            "ranks": record.ranks,
            "objects": list(record.objects),
        }
    return row


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [("STEP", "EPOCH", "TIME", "SIZE", "RANKS", "STATE")]
    for row in rows:
        told = row["state"] + (f": {row['problem']}" if "problem" in row else "")
        if "time" not in row:
            cells.append((str(row["step"]), "-", "-", "-", "-", told))
            continue
        time = datetime.fromtimestamp(row["time"], UTC).astimezone()
        cells.append(
            (
                *(str(row["step"]), str(row["epoch"]), f"{time:%Y-%m-%d %H:%M:%S}"),
                *(_size(row["bytes"]), str(row["ranks"]), told),
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = []
    for *first, last in cells:
        shown = [each.rjust(width) for each, width in zip(first, widths, strict=True)]
        lines.append("  ".join([*shown, last]))
    return "\n".join(lines)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"

"""What a folder of checkpoints holds: names, the record that completes a checkpoint, which to load, which to remove.

A checkpoint is a folder of its own. Its record is written last: a checkpoint without one is incomplete, whatever else is
in it. This also works where nothing can be renamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


# The record, within the checkpoint's folder.
RECORD = "checkpoint.json"
# Changes whenever an older version could not read a checkpoint.
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The folder of the checkpoint after this many steps. Sorting names sorts steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of a checkpoint.

    Args:
        size: bytes.
        digest: SHA-256 of its content, in hexadecimal.
    """

    size: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is known about a complete checkpoint.

    Args:
        step: how many steps were complete.
        epoch: how many epochs were.
        batch: how many batches of the current epoch were.
        ranks: how many ranks trained.
        time: when it was taken, in seconds since 1970; for people.
        objects: the names of the objects that the session was given.
        files: the checkpoint's files, by name.
        format: the checkpoint's format.
    """

    step: int
    epoch: int
    batch: int
    ranks: int
    time: float
    objects: tuple[str, ...]
    files: Mapping[str, File] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files.values())

    def to_bytes(self) -> bytes:
        """The record as JSON."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """Read what :meth:`to_bytes` returned.

        Raises:
            ValueError: it is something else, or of a later version.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields["format"] != FORMAT:
                raise ValueError(f"its format is {fields['format']!r}, expected {FORMAT}")
            files = {
                str(name): File(size=int(each["size"]), digest=str(each["digest"]))
                for name, each in fields["files"].items()
            }
            return cls(
                step=int(fields["step"]),
                epoch=int(fields["epoch"]),
                batch=int(fields["batch"]),
                ranks=int(fields["ranks"]),
                time=float(fields["time"]),
                objects=tuple(map(str, fields["objects"])),
                files=files,
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a record of a checkpoint ({error!r})") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A checkpoint in a folder.

    Args:
        name: its folder's name.
        step: the step that the name gives.
        record: None if it is incomplete.
        problem: why its record cannot be read; empty if there is none, or it can.
    """

    name: str
    step: int
    record: Record | None = None
    problem: str = ""


def to_load(entries: Iterable[Entry]) -> list[Entry]:
    """The complete checkpoints, newest first: the order in which to try them."""
    complete = (each for each in entries if each.record is not None)
    return sorted(complete, key=lambda each: each.step, reverse=True)


def to_remove(
    entries: Sequence[Entry], *, written: str, keep: int, passed_over: Collection[str] = ()
) -> list[str]:
    """The checkpoints to remove once one is complete.

    An incomplete one of a later step stays: other ranks may be writing their parts of it.


    Args:
        entries: all that the folder holds.
        written: the one that was completed just now; it stays.
        keep: how many complete ones stay.
        passed_over: complete ones that could not be loaded. They stay: someone may want to look at them.
    Returns:
        Names: earlier incomplete ones, and the oldest complete ones.
    """
    done = step_of(written) or 0
    left = [
        each
        for each in entries
        if each.name not in passed_over and (each.record is not None or each.step <= done)
    ]
    stay = {each.name for each in to_load(left) if each.name != written}
    newest = sorted(stay, key=lambda name: step_of(name) or 0, reverse=True)[: max(keep - 1, 0)]
    return [each.name for each in left if each.name not in {*newest, written}]

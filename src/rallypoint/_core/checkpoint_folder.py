"""A folder of checkpoints: reading its records."""

from __future__ import annotations

from .checkpoint_records import RECORD, Entry, Record, step_of
from .storage import Storage


def entries(storage: Storage) -> list[Entry]:
    """All checkpoints of a folder, the complete ones with their records, in the order of their steps.

    Raises:
        OSError: the folder cannot be read; drivers of URLs also raise other exceptions.
    """
    found = []
    for name in storage.names():
        step = step_of(name)
        if step is not None:
            found.append(_entry(storage, name, step))
    return found


def _entry(storage: Storage, name: str, step: int) -> Entry:
    path = f"{name}/{RECORD}"
    try:
        data = storage.read(path)
    except FileNotFoundError:
        return Entry(name=name, step=step)
    except Exception as error:  # noqa: BLE001  drivers of URLs have exceptions of their own; one bad file hides no others
        return Entry(name=name, step=step, problem=f"{RECORD}: {error}")
    try:
        return Entry(name=name, step=step, record=Record.parse(data))
    except ValueError as error:
        return Entry(name=name, step=step, problem=f"{RECORD}: {error}")


def damage(storage: Storage, entry: Entry) -> str:
    """What is wrong with a checkpoint, as far as file sizes tell; empty if nothing is, or it is incomplete."""
    for path, expected in ({} if entry.record is None else entry.record.files).items():
        try:
            size = storage.size(f"{entry.name}/{path}")
        except FileNotFoundError:
            return f"{path} is absent"
        if size != expected.size:
            return f"{path} has {size:,} bytes, expected {expected.size:,}"
    return entry.problem

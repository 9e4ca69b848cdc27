"""Nodes meet in a folder that all share: :mod:`.file_store`."""

from __future__ import annotations

import hashlib
from functools import partial

from rallypoint.rendezvous.backend import Backend, Meeting, Scheme
from rallypoint.rendezvous.fixed_home import fixed_home
from rallypoint.rendezvous.home import Home


# A file name has at most 255 bytes everywhere.
MAX_NAME = 255


def _home(meeting: Meeting) -> Home:
    from .file_store import FileStore

    # Each job has its own folder, which the last node to leave removes.
    above = meeting.endpoint.path.rstrip("/")
    opened = partial(FileStore, f"{above}/{_folder('rally-', meeting.name)}")
    opened().close()  # raises now if the folder cannot be used
    return fixed_home(
        meeting,
        opened,
        clear=FileStore.remove,
        open_ended=partial(FileStore, f"{above}/{_folder('ended-', meeting.name)}"),
        age=FileStore.age,
    )


def _folder(prefix: str, name: str) -> str:
    """The name of a job's folder: a long one is hashed, as long keys are."""
    if len(prefix) + len(name) <= MAX_NAME:
        return prefix + name
    return f"{prefix}hash.{hashlib.sha256(name.encode()).hexdigest()}"


FILE = Backend(
    name="file",
    help="a folder that all nodes share",
    schemes=(Scheme(name="file", example="file:///shared/jobs", takes="path"),),
    home=_home,
)

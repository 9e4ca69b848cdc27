"""Ids of values and references, and a reference in transit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RRefId(NamedTuple):
    """The id of a value, unique over all workers. Never kept in a table with :class:`ForkId`, which may compare equal."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class ForkId(NamedTuple):
    """The id of a user reference. ``created_on`` is the worker that created it, not the one that holds it."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A reference in transit, as it is pickled.

    Args:
        rref_id: the value.
        fork_id: the reference that the receiver will hold.
        owner: the worker that has the value.
        parent: the sender.
        type_text: the value's type, if the sender knows it.
    """

    rref_id: RRefId
    fork_id: ForkId
    owner: int
    parent: int
    type_text: str = ""

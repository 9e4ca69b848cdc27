"""What values and references to them are called, and a reference on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RRefId(NamedTuple):
    """A value's, over all workers. An equal :class:`ForkId` is not the same: they never share a table."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


class ForkId(NamedTuple):
    """A user reference's: ``created_on`` is the worker that made it, not the one that holds it."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A reference on its way: what is pickled in its place.

    Args:
        rref_id: the value.
        fork_id: the reference that the receiver will hold.
        owner: where the value lives.
        parent: who sends it.
        type_text: the value's type, as far as the sender knows it.
    """

    rref_id: RRefId
    fork_id: ForkId
    owner: int
    parent: int
    type_text: str = ""

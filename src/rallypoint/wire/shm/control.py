"""The control page of a connection: a byte for each segment, which says which end has it. See the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


MAX_SEGMENTS: Final = 4096
"""Per connection: the size of its control page."""

FREE: Final = 0
SENT: Final = 1  # the lowest bit of a byte alone tells whether it is in use
GONE: Final = 2
HELD: Final = 3
HOME: Final = 5


@dataclass(frozen=True, slots=True)
class Statistics:
    """The present state of one end of a connection.

    Args:
        segments: their number.
        leased: how many of them are in messages or held by the receiver.
        bytes: capacity of all.
        idle_bytes: capacity of those that are not leased.
    """

    segments: int
    leased: int
    bytes: int
    idle_bytes: int

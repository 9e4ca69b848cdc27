"""The control page of a connection: a byte for each segment, which says who has it. See the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


MAX_SEGMENTS: Final = 4096
"""Of one connection: the bytes of its control page."""

FREE: Final = 0
SENT: Final = 1  # the lowest bit of a byte alone tells whether it is in use
GONE: Final = 2
HELD: Final = 3
HOME: Final = 5


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one end of a connection, at one moment.

    Args:
        segments: how many there are.
        leased: how many of them are on their way or held by the receiver.
        bytes: capacity of all.
        idle_bytes: capacity of those that are not leased.
    """

    segments: int
    leased: int
    bytes: int
    idle_bytes: int

"""What the protocol asks its shell to do, one operation at a time.

:mod:`.protocol` yields them and is sent ``(now, result)``; :mod:`.dynamic` carries them out on a store, the tests
on a table.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """Put a record if there is none; the result is the present body."""

    key: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Increment:
    """Add 1 to a counter; the result is the sum."""

    key: str


@dataclass(frozen=True, slots=True)
class Write:
    key: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for a record; the result is its body, or None after ``timeout`` seconds."""

    key: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Look:
    """The bodies of several records as they are now, None where there is none (or none that counts)."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """A counter's value, 0 if there is none."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The ids of nodes that this node knows to be lost or to have left."""


@dataclass(frozen=True, slots=True)
class Identify:
    """This node leads the round after one of its own, whose members have these ids, by rank: it has heard of their ends by rank."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Needed:
    """How many of the last round's members must be present, given those known to have ended."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Others rely on this node from now on: it beats (:mod:`.liveness`), if it does not yet."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the user.

    Args:
        text: what.
        where: how the text goes on after the place at which nodes meet, if it is to be named.
    """

    text: str
    where: str | None = None


@dataclass(frozen=True, slots=True)
class IsNew:
    """Whether the store has taken the place of a lost one since the last round: what nodes had noted there is lost."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A round has formed without this node, which waits for the next one."""


Operation = (
    Claim
    | Increment
    | Write
    | Await
    | Look
    | Count
    | Delete
    | Gone
    | Identify
    | Needed
    | Beat
    | Tell
    | IsNew
    | LeftOut
)
Steps = Generator[Operation, tuple[float, Any], Any]

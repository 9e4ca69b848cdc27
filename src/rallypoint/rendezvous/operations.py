"""The operations that the protocol asks its shell to carry out, one at a time.

:mod:`.protocol` yields them and is sent ``(now, result)``; :mod:`.dynamic` carries them out on a store, the tests
on a table.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Claim:
    """Put a record if there is none; the result is the body now in place."""

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
    """Note the ids, by rank, of the members of this node's last round; it leads the next one. Losses were reported by rank."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Needed:
    """How many of the last round's members must be present, given those known to have ended."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Beat from now on (:mod:`.liveness`), unless this node already does: others rely on it."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the user.

    Args:
        text: the message, or its first part.
        where: the part after the place where nodes meet; None: the place is not named.
    """

    text: str
    where: str | None = None


@dataclass(frozen=True, slots=True)
class IsNew:
    """Whether the store has replaced a lost one since the last round, so that what nodes noted in the old one is lost."""


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

"""Commands of the reference counting: messages to other workers, and events in this process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import ForkId, RRefId


class Kind(StrEnum):
    """Messages between workers about references. Each is repeated until it is acknowledged."""

    FORK_REQUEST = (
        "fork_request"  # user to owner: register me; the answer confirms or fails the fork
    )
    CHILD_ACCEPT = "child_accept"  # child to parent: you need not cover me any more
    USER_DELETE = "user_delete"  # user to owner: this fork is no longer held


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message until it is acknowledged. ``to`` is another worker that is not known to be lost."""

    to: int
    kind: Kind
    rref_id: RRefId
    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The owner has registered this fork: functions that wait for it may run."""

    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class Lost:
    """This reference is dead for good: fail what waits for it."""

    fork_id: ForkId
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the current FORK_REQUEST with this failure. Without this command, the answer is yes."""

    fork_id: ForkId
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Release the value, or its future result if the function still runs."""

    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The value will never be created: fail those that fetch it."""

    rref_id: RRefId
    reason: str


Command = Send | Confirmed | Lost | Refuse | Release | Orphaned


@dataclass(frozen=True, slots=True)
class Received:
    """The result of receiving a reference.

    Args:
        fork_id: the user reference to hold, until ``dropped``; None: the value lives here, and is held once until
            ``owner_local_dropped``, unless it is ``gone``.
        commands: to execute.
        gone: why it cannot be used; empty if it can.
    """

    fork_id: ForkId | None
    commands: list[Command]
    gone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Numbers of references.

    Args:
        num_owner_rrefs: this worker's values that others refer to.
        num_forks: the others' references to these values, including those in transit.
        num_users: references to values of others; at shutdown, 0 means that all are deleted.
        num_pending_users: how many of these the owner has not confirmed yet.
        num_pending_children: references that were passed on but not accepted yet.
    """

    num_owner_rrefs: int
    num_forks: int
    num_users: int
    num_pending_users: int
    num_pending_children: int

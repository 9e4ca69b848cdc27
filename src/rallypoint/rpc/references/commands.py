"""What the reference counting wants done: messages to others, and news for this process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .ids import ForkId, RRefId


class Kind(StrEnum):
    """What workers tell each other about references. Each is acknowledged, and sent again if it was not."""

    FORK_REQUEST = (
        "fork_request"  # user to owner: register me; its answer confirms or fails the fork
    )
    CHILD_ACCEPT = "child_accept"  # child to parent: you need not cover me any more
    USER_DELETE = "user_delete"  # user to owner: nobody holds this fork any more


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message until it is acknowledged. ``to`` is another worker, and none that is known to be lost."""

    to: int
    kind: Kind
    rref_id: RRefId
    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The owner has registered this fork: functions that waited for it may run."""

    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class Lost:
    """This reference is dead, and will remain so: end what waits for it."""

    fork_id: ForkId
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the FORK_REQUEST that was just given with this failure. Without it, the answer is yes."""

    fork_id: ForkId
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Forget the value, if it is there; if its function still runs, forget the result when it comes."""

    rref_id: RRefId


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The value that others wait for will not be made: fail those who ask for it."""

    rref_id: RRefId
    reason: str


Command = Send | Confirmed | Lost | Refuse | Release | Orphaned


@dataclass(frozen=True, slots=True)
class Received:
    """What has become of a reference that came.

    Args:
        fork_id: the user reference to hold (then ``dropped``); None: the value lives here.
        commands: to be carried out.
        gone: why it can not be used; if not, and it lives here, it is held once (then ``owner_local_dropped``).
    """

    fork_id: ForkId | None
    commands: list[Command]
    gone: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How many there are now.

    Args:
        num_owner_rrefs: own values that others refer to.
        num_forks: their references, those on their way included.
        num_users: references to values of others; at shutdown, 0 means that all are deleted.
        num_pending_users: those of them that the owner has not confirmed yet.
        num_pending_children: references that were passed on and are not accepted yet.
    """

    num_owner_rrefs: int
    num_forks: int
    num_users: int
    num_pending_users: int
    num_pending_children: int

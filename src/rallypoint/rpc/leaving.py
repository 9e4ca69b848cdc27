"""Who does what when several threads of a worker call ``shutdown``: one leads, the others wait for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Part(enum.Enum):
    """What a call of ``shutdown`` has to do."""

    # Nobody has begun: this call ends the membership.
    LEAD = enum.auto()
    # Another thread ends it: wait for that, and have its outcome.
    FOLLOW = enum.auto()
    # Somebody ends it gracefully: end it at once instead.
    CUT_SHORT = enum.auto()
    # Another thread, or the interrupted code, closes the agent already; waiting for that would hold it up.
    RETURN = enum.auto()
    # It would wait for itself.
    REFUSE = enum.auto()


@dataclass
class Roles:
    """The threads that end a membership, from the first ``shutdown`` on.

    Attributes:
        leader: the one whose call of ``shutdown`` waits for other workers; None if the worker leaves without one.
        closer: the one that closes the agent, as soon as there is one.
    """

    leader: int | None = None
    closer: int | None = None


def part_of(roles: Roles | None, me: int, *, graceful: bool, serving: bool) -> Part:
    """The part of a call of ``shutdown``.

    Args:
        roles: who ends the membership already; None: nobody.
        me: the calling thread.
        graceful: as in ``shutdown``.
        serving: whether the caller is a function that serves a call, for which a graceful end waits.
    """
    if roles is None:
        return Part.LEAD
    if me in (roles.leader, roles.closer):
        # A signal handler that interrupted it.
        if graceful:
            return Part.REFUSE
        return Part.CUT_SHORT if roles.closer is None else Part.RETURN
    if graceful:
        return Part.FOLLOW
    if roles.closer is None:
        return Part.CUT_SHORT
    return Part.RETURN if serving else Part.FOLLOW

"""The roles of threads that call ``shutdown`` at the same time: one leads, the others wait for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Part(enum.Enum):
    """What a call of ``shutdown`` has to do."""

    # No other call has started: this one ends the membership.
    LEAD = enum.auto()
    # Another thread is ending it: wait, then return or raise as that thread does.
    FOLLOW = enum.auto()
    # Another call is ending it gracefully: end it at once instead.
    CUT_SHORT = enum.auto()
    # Another thread, or the interrupted code, is already closing the agent; waiting for it would hold it up.
    RETURN = enum.auto()
    # This call would wait for itself.
    REFUSE = enum.auto()


@dataclass
class Roles:
    """The threads that end a membership, from the first ``shutdown`` on.

    Attributes:
        leader: the thread whose ``shutdown`` waits for other workers; None if the worker leaves without a ``shutdown``.
        closer: the thread that closes the agent, once there is one.
    """

    leader: int | None = None
    closer: int | None = None


def part_of(roles: Roles | None, me: int, *, graceful: bool, serving: bool) -> Part:
    """The part that a call of ``shutdown`` plays.

    Args:
        roles: the threads that are already ending the membership; None: there are none.
        me: the calling thread.
        graceful: as in ``shutdown``.
        serving: whether the caller is a function that serves a call. A graceful shutdown waits for that call.
    """
    if roles is None:
        return Part.LEAD
    if me in (roles.leader, roles.closer):
        # A signal handler that interrupted the leader or closer.
        if graceful:
            return Part.REFUSE
        return Part.CUT_SHORT if roles.closer is None else Part.RETURN
    if graceful:
        return Part.FOLLOW
    if roles.closer is None:
        return Part.CUT_SHORT
    return Part.RETURN if serving else Part.FOLLOW

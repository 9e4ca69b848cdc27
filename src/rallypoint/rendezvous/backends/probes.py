"""Asks what serves a place, for a node that looks for the store."""

from __future__ import annotations

from rallypoint._core import addresses

from . import door
from .greeting import SILENT, Door, Reply
from .places import Answer


# Seconds for each attempt to connect.
ATTEMPT = 1.0
# Seconds for an answer at the endpoint.
FIRST_ANSWER = 3.0


def listens(host: str, port: int) -> Answer:
    """Whether anything listens there."""
    try:
        addresses.connect(host, port, ATTEMPT).close()
    except ConnectionRefusedError:
        return Answer.DEAD
    except OSError:
        return Answer.SILENT
    return Answer.SERVES


def who_is_at(host: str, port: int) -> Reply:
    """What listens at a port of this host."""
    reply = door.greet(host, port, FIRST_ANSWER)
    if reply is SILENT:
        reply = door.ask(host, port)
    return reply if reply.door is not Door.REFUSED else Reply(Door.REFUSED)


def cannot_reach(names: str, reply: Reply, *, starting: bool) -> str:
    """Why no store was found, and what to do.

    Args:
        names: the places that were asked.
        reply: what said the most there.
        starting: whether a store is being started there.
    """
    if starting:
        return f"the rendezvous at {names} did not start in time; check the node there"
    ask = "is `rally run` started there, is --rdzv-endpoint (or --master-addr) right, and is the port open?"
    if reply.door is Door.STRANGER:
        ask = "is --rdzv-endpoint (or --master-addr) right, and is the port free for the job?"
    return f"cannot reach the rendezvous at {names}: {reply.why}; {ask}"


def store_at(
    host: str, port: int, timeout: float = ATTEMPT, *, reach: float | None = None
) -> Answer:
    """Whether a store answers there."""
    match door.greet(host, port, timeout, reach=reach).door:
        case Door.SERVES:
            return Answer.SERVES
        case Door.STARTING:
            return Answer.ALIVE
        case Door.REFUSED:
            return Answer.DEAD
        case _:
            return Answer.SILENT

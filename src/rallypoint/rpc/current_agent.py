"""The agent of this process: at most one. A process that was forked from a worker has none."""

from __future__ import annotations

from typing import Any

from rallypoint._core import forks
from rallypoint.errors import RpcError


_NOT_INITIALIZED = "RPC has not been initialized in this process: call init_rpc first"
# Of calls, futures and streams that a child has of its parent.
ELSEWHERE = (
    "it belongs to the worker from which this process was forked, and its answer comes there"
)

_current: Any = None
# The same, from when it may make calls until it begins to leave.
_member: Any = None
# In a child: the name of the worker that it was forked from.
_parent: str | None = None
# In a child: the parent's agent, where it knows nothing of forks. Its destructor would wait for threads that a child
# has not.
_inherited: list[Any] = []


def current_agent() -> Any:
    """The agent of this process, or None.

    It is the native one, or another backend's: who asks says with a Protocol what it needs of it.
    """
    return _current


def member_agent() -> Any:
    """The agent of this process, or None; None as well while it leaves."""
    return _member


def required_agent() -> Any:
    """The agent of this process, to make calls.

    Raises:
        RpcError: it has none, or it is leaving.
    """
    agent = _member
    if agent is None:
        raise RpcError(without_agent(_NOT_INITIALIZED))
    return agent


def set_current_agent(agent: Any) -> None:
    """None: there is none any more."""
    global _current, _member, _parent  # noqa: PLW0603  # the one agent of the process
    if agent is not None:
        forks.call_in_child(_abandon)
        _parent = None
    _current = _member = agent


def leave_group() -> Any:
    """The agent leaves: no further calls are made, while those under way still find it. Returns it."""
    global _member  # the one agent of the process
    agent, _member = _member, None
    return agent


def without_agent(text: str) -> str:
    """Why there is none: ``text``, or more if this process is a forked child."""
    if _parent is None:
        return text
    return (
        f"{text}. This process was forked from worker {_parent!r}, and the connections stay with that one: init_rpc"
        " makes this process a worker of its own, under another name"
    )


def _abandon() -> None:
    global _current, _member, _parent  # noqa: PLW0603  # of this process
    if _current is not None:
        me = getattr(_current, "me", None)
        _parent = None if me is None else me.name
        if not hasattr(_current, "abandon"):
            _inherited.append(_current)
    _current = _member = None

"""The agent of this process: at most one. A process that was forked from a worker has none."""

from __future__ import annotations

from typing import Any

from rallypoint._core import forks
from rallypoint.errors import RpcError


_NOT_INITIALIZED = "RPC has not been initialized in this process: call init_rpc first"
# Said of the parent's calls, futures and streams in a forked child.
ELSEWHERE = "it belongs to the worker from which this process was forked, which receives the answer"

_current: Any = None
# The same agent, but only while it may make calls: until it starts to leave.
_member: Any = None
# In a forked child: the name of the parent's worker.
_parent: str | None = None
# The name of the worker that left its group by a shutdown, until this process is in a group again.
_shut_down: str | None = None
# In a forked child: keeps the parent's agent alive if it does not handle forks. Its destructor would wait for threads
# that the child does not have.
_inherited: list[Any] = []


def current_agent() -> Any:
    """The agent of this process, or None. It may be another backend's: callers use Protocols."""
    return _current


def member_agent() -> Any:
    """The agent of this process; None if there is none or it is leaving."""
    return _member


def required_agent() -> Any:
    """The agent of this process, for calls.

    Raises:
        RpcError: there is none, or it is leaving.
    """
    agent = _member
    if agent is None:
        raise RpcError(without_agent(_NOT_INITIALIZED))
    return agent


def set_current_agent(agent: Any) -> None:
    """Set or remove (None) the agent of this process."""
    global _current, _member, _parent, _shut_down  # noqa: PLW0603  # the one agent of the process
    if agent is not None:
        forks.call_in_child(_abandon)
        _parent = _shut_down = None
    _current = _member = agent


def leave_group(*, shut_down: bool) -> Any:
    """The agent starts to leave: no new calls, but those in progress still find it. Returns the agent.

    Args:
        shut_down: whether the user asked for it, which later errors mention.
    """
    global _member, _shut_down  # noqa: PLW0603  # the one agent of the process
    agent, _member = _member, None
    if agent is not None and shut_down:
        _shut_down = _name_of(agent)
    return agent


def without_agent(text: str) -> str:
    """Why there is no agent: ``text``, and more after a shutdown or in a forked child."""
    if _shut_down is not None:
        return f"{text}. Worker {_shut_down!r} was in a group here, which it has left: rpc.shutdown() was called"
    if _parent is None:
        return text
    return (
        f"{text}. This process was forked from worker {_parent!r}, which keeps the connections: call init_rpc with"
        " another name to make this process a worker, too"
    )


def _name_of(agent: Any) -> str | None:
    # Another backend's agent may have none.
    me = getattr(agent, "me", None)
    return None if me is None else str(me.name)


def _abandon() -> None:
    global _current, _member, _parent, _shut_down  # noqa: PLW0603  # of this process
    _shut_down = None
    if _current is not None:
        _parent = _name_of(_current)
        if not hasattr(_current, "abandon"):
            _inherited.append(_current)
    _current = _member = None

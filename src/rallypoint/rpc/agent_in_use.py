"""The agent of this process: at most one. A process that was forked from a worker has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rallypoint._core import forks


if TYPE_CHECKING:
    from .agent.agent import Agent

# Of calls, futures and streams that a child has of its parent.
ELSEWHERE = (
    "it belongs to the worker from which this process was forked, and its answer comes there"
)

_current: Any = None
# In a child: the name of the worker that it was forked from.
_parent: str | None = None


def current_agent() -> Agent | None:
    """The agent of this process, if it has one and it is the native one or derived from it."""
    found: Agent | None = _current
    return found


def set_current_agent(agent: Any) -> None:
    """None: there is none any more."""
    global _current, _parent  # noqa: PLW0603  # the one agent of the process
    if agent is not None:
        forks.call_in_child(_abandon)
        _parent = None
    _current = agent


def without_agent(text: str) -> str:
    """Why there is none: ``text``, or more if this process is a forked child."""
    if _parent is None:
        return text
    return (
        f"{text}. This process was forked from worker {_parent!r}, and the connections stay with that one: init_rpc"
        " makes this process a worker of its own, under another name"
    )


def _abandon() -> None:
    global _current, _parent  # noqa: PLW0603  # of this process
    if _current is not None:
        _parent = _current.me.name
    _current = None

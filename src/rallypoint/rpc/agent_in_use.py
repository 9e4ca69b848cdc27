"""The agent of this process: at most one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .agent.agent import Agent

_current: Any = None


def current_agent() -> Agent | None:
    """The agent of this process, if it has one and it is the native one or derived from it."""
    found: Agent | None = _current
    return found


def set_current_agent(agent: Any) -> None:
    """None: there is none any more."""
    global _current  # noqa: PLW0603  # the one agent of the process
    _current = agent

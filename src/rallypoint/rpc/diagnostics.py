"""Statistics and debug information of a worker."""

from __future__ import annotations

import contextlib
from typing import Any

from rallypoint.errors import RpcError

from .agent.agent import Agent
from .current_agent import required_agent
from .torch_private import autograd_debug_info


def statistics() -> dict[str, Any]:
    """Statistics of this worker, as values that JSON can represent. Does not block.

    Returns:
        ``calls``: numbers of calls that were sent, served, failed, or are in progress; ``latency_s``: quantiles in seconds;
        ``peers``; ``rrefs``; ``changed_frames``: messages that were altered in transit; ``transports_skipped``: transports
        that are not used, with the reason. Counts may lag by a call.

    Raises:
        RpcError: the backend is not ``BackendType.RALLYPOINT``, or this process is not in a group.
    """
    agent = required_agent()
    if not isinstance(agent, Agent):
        raise RpcError(
            f"the backend {type(agent).__name__} has no statistics: use BackendType.RALLYPOINT"
        )
    counters = agent.counters
    return {
        "worker": {"name": agent.me.name, "id": agent.me.id},
        "calls": {
            "sent": counters.sent,
            "served": counters.served,
            "failed": counters.failed,
            "under_way": int(agent.debug_info()["agent.client_active_calls"]),
            "being_served": int(agent.debug_info()["agent.server_active_calls"]),
            "queue": agent.queue(),
        },
        "latency_s": {
            "p50": counters.quantile(0.5),
            "p99": counters.quantile(0.99),
        },
        "changed_frames": agent.lines.num_changed,
        "peers": agent.peers(),
        "rrefs": agent.rrefs.diagnostics(),
        "transports_skipped": dict(agent.skipped),
    }


def _rref_context_get_debug_info() -> dict[str, str]:
    agent = required_agent()
    source = agent.rrefs.debug_info if isinstance(agent, Agent) else agent.rref_debug_info
    info: dict[str, str] = source()
    return info


def _get_debug_info() -> dict[str, str]:
    info = dict(_rref_context_get_debug_info())
    info.update(required_agent().get_debug_info())
    with contextlib.suppress(Exception):
        info.update(autograd_debug_info())
    return info


def enable_gil_profiling(flag: bool) -> None:
    """torch's switch for a measurement of its C++ agent; here it only adds the key to the debug information."""
    required_agent().enable_gil_profiling(flag)

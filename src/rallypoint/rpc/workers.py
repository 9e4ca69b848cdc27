"""The workers of the group: who they are, and hearing of those that come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rallypoint.errors import RpcError

from .agent.agent import Agent
from .current_agent import required_agent
from .groups.dynamic_group import DynamicGroup
from .groups.member import Member
from .worker_info import WorkerInfo


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and rank of a worker.

    Args:
        worker_name: name or rank; None: this worker.

    Raises:
        RpcError: there is no such worker, or this process is in no group.
    """
    found: WorkerInfo = required_agent().info(worker_name)
    return found


def _to_worker_info(to: Any) -> WorkerInfo:
    found: WorkerInfo = to if isinstance(to, WorkerInfo) else required_agent().info(to)
    return found


def wait_for(names: str | Sequence[str], timeout: float | None = None) -> tuple[WorkerInfo, ...]:
    """Wait until workers of these names are members of the dynamic group. Blocks.

    Args:
        names: one name, or several.
        timeout: seconds; None: for ever.

    Returns:
        Their infos, in the order of ``names``.

    Raises:
        DeadlineExceeded: some have not come; says which.
        RpcError: the group is a static one, or this process is in none.
    """
    group = _dynamic_group()
    wanted = [names] if isinstance(names, str) else list(names)
    found: Collection[Member] = group.wait_for(wanted, timeout)
    return tuple(WorkerInfo(each.name, each.id) for each in found)


def members() -> tuple[int, tuple[WorkerInfo, ...]]:
    """Who is in the group now. Does not ask the store.

    Returns:
        The membership's epoch, a number that only grows (in a static group it is 1), and the members by rank.

    Raises:
        RpcError: this process is in no group.
    """
    agent = required_agent()
    if not isinstance(agent, Agent):
        return 1, tuple(agent.infos())
    epoch, found = agent.group.members()  # type: ignore[union-attr]  # it is in one
    return epoch, tuple(WorkerInfo(each.name, each.id) for each in found)


def on_join(callback: Callable[[WorkerInfo], None]) -> None:
    """Have each worker announced that joins the dynamic group from here on.

    Args:
        callback: called as ``callback(worker)`` on a thread of the group's, one call after the other. What it raises is logged.

    Raises:
        RpcError: the group is a static one, or this process is in none.
    """
    _dynamic_group().on_join(lambda member: callback(WorkerInfo(member.name, member.id)))


def on_leave(callback: Callable[[WorkerInfo, str], None]) -> None:
    """Have each worker announced that leaves the dynamic group or is lost from here on.

    Args:
        callback: called as ``callback(worker, reason)``, as for :func:`on_join`.

    Raises:
        RpcError: the group is a static one, or this process is in none.
    """
    _dynamic_group().on_leave(
        lambda member, reason: callback(WorkerInfo(member.name, member.id), reason)
    )


def _dynamic_group() -> DynamicGroup:
    group = required_agent().group
    if not isinstance(group, DynamicGroup):
        raise RpcError(
            "this group's members are fixed: only in a dynamic one (init_rpc without world_size) do"
            " members come and go"
        )
    return group

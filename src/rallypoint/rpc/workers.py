"""The members of the group, and callbacks for those that join and leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rallypoint.errors import RpcError

from .agent.agent import Agent
from .current_agent import required_agent
from .groups.dynamic_group import DynamicGroup
from .groups.member import Member
from .time_limits import is_negative, limit_of
from .worker_info import WorkerInfo


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Look up a worker. Does not block.

    Args:
        worker_name: name or rank; None: this worker.

    Returns:
        Its name and rank.

    Raises:
        RpcError: there is no such worker, or this process is not in a group.
    """
    found: WorkerInfo = required_agent().info(worker_name)
    return found


def _to_worker_info(to: Any) -> WorkerInfo:
    found: WorkerInfo = to if isinstance(to, WorkerInfo) else required_agent().info(to)
    return found


def wait_for(names: str | Sequence[str], timeout: float | None = None) -> tuple[WorkerInfo, ...]:
    """Wait until workers are members of the dynamic group. Blocks.

    Args:
        names: the name of one worker, or several names.
        timeout: seconds; None: no limit.

    Returns:
        Their infos, in the order of ``names``.

    Raises:
        DeadlineExceeded: some did not join in time; the error names them.
        RpcError: the group is static, or this process is not in a group.
        TypeError: one of the arguments has the wrong type.
    """
    group = _dynamic_group()
    if not isinstance(names, Iterable):
        raise TypeError(f"names is {names!r}: expected the name of a worker, or several in a list")
    wanted = [names] if isinstance(names, str) else list(names)
    for each in wanted:
        if not isinstance(each, str):
            raise TypeError(f"names contains {each!r}: expected the name of a worker")
    # Unlike elsewhere, None means no limit, so 0 is a limit, and a negative timeout has already passed.
    has_passed = timeout is not None and (timeout == 0 or is_negative(timeout))
    limit = timeout if timeout is None or has_passed else limit_of(timeout)
    found: Collection[Member] = group.wait_for(wanted, limit)
    return tuple(WorkerInfo(each.name, each.id) for each in found)


def members() -> tuple[int, tuple[WorkerInfo, ...]]:
    """The current members of the group. Does not block.

    Returns:
        The membership's epoch, a number that only grows (in a static group it is 1), and the members by rank.

    Raises:
        RpcError: this process is not in a group.
    """
    agent = required_agent()
    if not isinstance(agent, Agent):
        return 1, tuple(agent.infos())
    epoch, found = agent.group.members()  # type: ignore[union-attr]  # it is in one
    return epoch, tuple(WorkerInfo(each.name, each.id) for each in found)


def on_join(callback: Callable[[WorkerInfo], None]) -> None:
    """Call a function for each worker that joins the dynamic group from now on.

    Args:
        callback: called as ``callback(worker)`` on a background thread, one call at a time. Exceptions are logged.

    Raises:
        RpcError: the group is static, or this process is not in a group.
        TypeError: ``callback`` is not a function.
    """
    _check_callback(callback)
    _dynamic_group().on_join(lambda member: callback(WorkerInfo(member.name, member.id)))


def on_leave(callback: Callable[[WorkerInfo, str], None]) -> None:
    """Call a function for each worker that leaves the dynamic group, or is lost, from now on.

    Args:
        callback: called as ``callback(worker, reason)``, as for :func:`on_join`.

    Raises:
        RpcError: the group is static, or this process is not in a group.
        TypeError: ``callback`` is not a function.
    """
    _check_callback(callback)
    _dynamic_group().on_leave(
        lambda member, reason: callback(WorkerInfo(member.name, member.id), reason)
    )


def _check_callback(callback: Any) -> None:
    # Otherwise the first sign would be a line in the log when a worker joins or leaves.
    if not callable(callback):
        raise TypeError(f"callback is {callback!r}: expected a function")


def _dynamic_group() -> DynamicGroup:
    group = required_agent().group
    if not isinstance(group, DynamicGroup):
        raise RpcError(
            "this group is static: its members do not change. For a dynamic group, call init_rpc without world_size"
        )
    return group

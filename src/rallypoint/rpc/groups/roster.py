"""A worker's view of its group: itself, the other members, and those that are gone."""

from __future__ import annotations

import operator
import secrets
import threading
from typing import Any

from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import Expelled, RpcError
from rallypoint.rpc.worker_info import WorkerInfo

from .dynamic_group import DynamicGroup
from .member import Member
from .static_group import StaticGroup


Group = StaticGroup | DynamicGroup


class Roster:
    """The group as one worker sees it.

    Args:
        name: this worker's name.
        job: distinguishes this group from others at the same addresses.
    """

    def __init__(self, name: str, job: str) -> None:
        self.me = WorkerInfo(name, -1)
        self.incarnation = secrets.token_hex(8)
        self.group: Group | None = None
        self._job = job
        self._lock = threading.Lock()
        # Set once the group has removed this worker.
        self.expelled: Expelled | None = None
        # Incarnations that are gone, and why. Written under the lock.
        self.dead: dict[str, str] = {}

    def enter(self, group: Group) -> None:
        """Become a member of ``group``."""
        self.group = group
        self.me = WorkerInfo(group.me.name, group.me.id)

    def introduction(self) -> dict[str, Any]:
        """How this worker introduces itself on a new connection."""
        return {
            "job": self._job,
            "generation": 0,
            "name": self.me.name,
            "id": self.me.id,
            "incarnation": self.incarnation,
        }

    def find(self, to: str | int | WorkerInfo) -> Member:
        """The member with this name, rank or info.

        Raises:
            RpcError: there is none.
            Expelled: the group has removed this worker.
            ValueError: ``to`` is of another type.
        """
        if self.expelled is not None:
            raise Expelled(*self.expelled.args)
        if isinstance(to, WorkerInfo):
            to = to.id
        elif isinstance(to, bool) or not isinstance(to, (str, int)):
            if not is_whole(to):
                raise ValueError(
                    f"expected the name, rank or WorkerInfo of a worker, but got {to!r}"
                )
            to = operator.index(to)  # a NumPy integer
        assert self.group is not None
        return self.group.find(to)

    def info(self, to: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Name and id of a worker; None: this worker."""
        if to is None:
            return self.me
        member = self.find(to)
        return WorkerInfo(member.name, member.id)

    def infos(self) -> list[WorkerInfo]:
        assert self.group is not None
        return [WorkerInfo(each.name, each.id) for each in self.group.members()[1]]

    def is_gone(self, worker: int) -> bool:
        """Whether this worker is gone, or not in the group."""
        try:
            return self.find(worker).incarnation in self.dead
        except RpcError:
            return True

    def strike(self, member: Member, reason: str) -> bool:
        """Record that a member is gone; False if that was already known."""
        with self._lock:
            if member.incarnation in self.dead:
                return False
            self.dead[member.incarnation] = reason
            return True

"""Finding out whether a broken connection means that a peer is lost, and telling the other parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from rallypoint import events
from rallypoint._core.clock import Deadline
from rallypoint.errors import Expelled, PeerLost, RpcError
from rallypoint.rpc.autograd.contexts import Contexts
from rallypoint.rpc.connections.connections import Connections
from rallypoint.rpc.connections.dialer import Dialer, is_late
from rallypoint.rpc.connections.incoming import Incoming
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.groups.dynamic_group import DynamicGroup
from rallypoint.rpc.groups.member import Member
from rallypoint.rpc.groups.roster import Roster
from rallypoint.rpc.references.rref_table import RRefTable
from rallypoint.rpc.threads.task_queue import TaskQueue
from rallypoint.rpc.worker_info import WorkerInfo


logger = logging.getLogger(__name__)

# Seconds for a peer with a broken connection to answer a probe.
_PROBE_SECONDS = 1.0
# A peer that accepts connections but does not answer is probed again, with pauses of up to this many seconds.
_MOST_PAUSE = 64.0


class PeerMonitor:
    """Finds out which peers are gone, and tells the other parts of the agent.

    Args:
        roster: the members of the group, and those that are gone.
        dialer: probes peers.
        tasks: run the probes, which block.

    Attributes:
        on_lost: called with the name of a lost worker and the reason.
    """

    # Set by the agent before anything is served.
    rrefs: RRefTable
    contexts: Contexts

    def __init__(
        self, roster: Roster, connections: Connections, dialer: Dialer, tasks: TaskQueue
    ) -> None:
        self._roster = roster
        self._connections = connections
        self._dialer = dialer
        self._tasks = tasks
        self.on_lost: Callable[[str, str], None] = lambda name, reason: None

    def suspect(self, info: WorkerInfo, reason: str, ended: Outgoing | Incoming | None) -> None:
        """A connection has ended, or was refused: probe the peer in the background."""
        self._tasks.now(lambda: self._investigate(info, reason, ended))

    def left(self, member: Member, reason: str) -> None:
        """The group's log says that a member, perhaps this worker, has left or was lost."""
        group = self._roster.group
        if member.incarnation == self._roster.incarnation:
            if isinstance(group, DynamicGroup) and group.expelled is not None:
                self._tasks.now(lambda: self._expelled(reason))
            return
        self._tasks.now(lambda: self._bury(WorkerInfo(member.name, member.id), member, reason))

    def came(self, member: Member) -> None:
        """A worker has joined the group, perhaps with the id of one that is gone."""
        if member.incarnation not in self._roster.dead:
            self.rrefs.peer_came(member.id)

    def _expelled(self, reason: str) -> None:
        """The group has removed this worker: end all outgoing connections."""
        expelled = Expelled(self._roster.me.name, reason)
        self._roster.expelled = expelled
        logger.warning("%s", expelled)
        for each in self._connections.all_outgoing():
            each.fail(str(expelled))

    def _investigate(
        self,
        info: WorkerInfo,
        reason: str,
        ended: Outgoing | Incoming | None,
        pause: float = _PROBE_SECONDS,
    ) -> None:
        """Find out whether the peer of a broken connection is gone.

        Args:
            pause: seconds until the next probe if it accepts connections but does not answer.
        """
        if ended is not None:
            self._connections.close_ended(ended)
        if self._connections.is_closed or self._roster.expelled is not None:
            return
        try:
            member = self._roster.find(info.id)
        except RpcError:
            self._bury(info, None, reason)
            return
        if member.name != info.name or member.incarnation in self._roster.dead:
            return
        try:
            probe = Deadline(_PROBE_SECONDS)
            self._dialer.dial(member, probe, self._connections, probe=True).close()
        except PeerLost as error:
            if not is_late(error):
                self._bury(info, member, reason)
                return
            following = min(2 * pause, _MOST_PAUSE)
            self._tasks.later(pause, lambda: self._investigate(info, reason, ended, following))
        else:
            if ended is not None and ended.sent_references:
                self.rrefs.inquire(info.id, ended.sent_references.all())

    def _bury(self, info: WorkerInfo, member: Member | None, reason: str) -> None:
        """A peer is gone: fail what waits for it."""
        if member is not None and (
            self._connections.is_closed or not self._roster.strike(member, reason)
        ):
            return
        self._connections.hang_up(info.id, member, self._tasks.later)
        logger.info("worker %s is gone: %s", info.name, reason)
        events.emit(events.MemberGone(worker=info.name, id=info.id, reason=reason))
        self.rrefs.peer_lost(info.id, reason)
        self.contexts.peer_lost(info.id)
        group = self._roster.group
        if isinstance(group, DynamicGroup):
            for each in group.members()[1]:
                if each.id == info.id:
                    self.came(each)
        if member is not None and isinstance(group, DynamicGroup):
            with contextlib.suppress(RpcError, OSError):
                group.report_lost(member, reason)
        self.on_lost(info.name, reason)

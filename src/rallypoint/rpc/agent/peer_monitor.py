"""The loss of a peer: whether a connection that broke means one, and what follows from it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from rallypoint import events
from rallypoint._core.clock import Deadline
from rallypoint.errors import Expelled, PeerLost, RpcError
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

# A peer whose connection broke is asked again before it is taken for dead.
_PROBE_SECONDS = 1.0
# One that is there and does not answer stands still: it is asked again later, and less and less often.
_MOST_PAUSE = 64.0


class PeerMonitor:
    """Finds out which peers are gone, and tells the other parts of the agent.

    Args:
        roster: who is in the group, and who is gone.
        dialer: asks a peer whether it is still there.
        tasks: probes take time, and may have to wait.

    Attributes:
        on_lost: called with the name of a worker that is gone, and why.
    """

    # Set by the agent before anything is served.
    rrefs: RRefTable

    def __init__(
        self, roster: Roster, connections: Connections, dialer: Dialer, tasks: TaskQueue
    ) -> None:
        self._roster = roster
        self._connections = connections
        self._dialer = dialer
        self._tasks = tasks
        self.on_lost: Callable[[str, str], None] = lambda name, reason: None

    def suspect(self, info: WorkerInfo, reason: str, ended: Outgoing | Incoming | None) -> None:
        """A connection has ended, or nobody listens there: have it looked into. Does not wait."""
        self._tasks.now(lambda: self._investigate(info, reason, ended))

    def left(self, member: Member, reason: str) -> None:
        """The group says that a member has left, or was lost: another one, or this worker itself."""
        group = self._roster.group
        if member.incarnation == self._roster.incarnation:
            if isinstance(group, DynamicGroup) and group.expelled is not None:
                self._tasks.now(lambda: self._expelled(reason))
            return
        self._tasks.now(lambda: self._bury(WorkerInfo(member.name, member.id), member, reason))

    def _expelled(self, reason: str) -> None:
        """The group goes on without this worker: nobody is called any more."""
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
        """A connection has broken: is it only that, or is the peer gone?

        Args:
            pause: seconds until it is asked again if it is there and does not answer.
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
        """A peer is gone: nobody waits for it any more."""
        if member is not None and (
            self._connections.is_closed or not self._roster.strike(member, reason)
        ):
            return
        # Answers that have come already are still read.
        self._connections.hang_up(info.id, None if member is None else info.name)
        logger.info("worker %s has gone: %s", info.name, reason)
        events.emit(events.MemberGone(worker=info.name, id=info.id, reason=reason))
        self.rrefs.peer_lost(info.id, reason)
        self.on_lost(info.name, reason)
        group = self._roster.group
        if member is not None and isinstance(group, DynamicGroup):
            with contextlib.suppress(RpcError, OSError):
                group.report_lost(member, reason)

"""How a connection to another worker is made: by the best way that works, and with proof on both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, PeerLost, ProtocolError
from rallypoint.rpc.groups.member import Member
from rallypoint.rpc.groups.roster import Roster
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire import memory, tcp, tls, uds
from rallypoint.wire.transport import Address, choose, why_none

from .handshake import introduce
from .lines import Lines
from .outgoing import Outgoing, Watch


def is_late(error: PeerLost) -> bool:
    """Whether :meth:`Dialer.dial` has found a member that is there: connected to, and silent since. It stands still."""
    return isinstance(error.__cause__, DeadlineExceeded)


class Dialer:
    """Connects one worker to others.

    Args:
        roster: its group.
        lines: what connections are made of.
        secret: what all members know.
        transports: that it may use.
        identity: what it shows under TLS.
        heartbeat: as in the options.
    """

    def __init__(
        self,
        roster: Roster,
        lines: Lines,
        secret: bytes,
        transports: Sequence[str],
        identity: tls.Identity | None,
        heartbeat: float,
    ) -> None:
        self._roster = roster
        self._lines = lines
        self._secret = secret
        self._transports = transports
        self._identity = identity
        self._heartbeat = heartbeat

    def dial(
        self,
        member: Member,
        deadline: Deadline,
        watch: Watch,
        *,
        probe: bool = False,
        refused: Callable[[str], None] | None = None,
    ) -> Outgoing:
        """A new connection to a member, which nobody reads yet.

        Args:
            watch: is given to the connection.
            probe: it is only to be seen whether the member is there.
            refused: called with the reasons if nobody listens there at all.

        Raises:
            PeerLost: no way works; says why each did not.
        """
        group = self._roster.group
        assert group is not None
        ways = choose(
            self._transports,
            member.addresses,
            same_host=group.me.shares_host(member),
            same_process=member.incarnation == self._roster.incarnation,
        )
        reasons = []
        late: DeadlineExceeded | None = None
        num_refused = 0
        for kind, address in ways:
            try:
                return self._dial_by(kind, address, member, deadline, watch, probe=probe)
            except (OSError, ProtocolError, DeadlineExceeded) as error:
                late = error if isinstance(error, DeadlineExceeded) else late
                num_refused += isinstance(error, ConnectionRefusedError)
                text = getattr(error, "strerror", None) or str(error)
                reasons.append(f"{kind}: {text}")
        if not ways:
            reasons = [why_none(self._transports, member.addresses)]
        elif num_refused == len(ways) and refused is not None:
            refused("; ".join(reasons))
        raise PeerLost(member.name, f"it cannot be reached ({'; '.join(reasons)})") from late

    def _dial_by(
        self,
        kind: str,
        address: Address,
        member: Member,
        deadline: Deadline,
        watch: Watch,
        *,
        probe: bool,
    ) -> Outgoing:
        sock: tls.Connection
        match kind:
            case memory.KIND:
                sock = memory.connect(address, deadline)
            case uds.KIND:
                sock = uds.connect(address, deadline)
            case _:
                sock = tcp.connect(address, deadline, self._heartbeat)
                if kind == tls.KIND:
                    assert self._identity is not None
                    sock = tls.TlsSocket(sock, self._identity, accepts=False)
        sharing = None
        try:
            me = self._roster.introduction()
            if probe:
                me["probe"] = True
            peer, rest, side = introduce(
                sock, self._secret, me, deadline, side=kind == uds.KIND and not probe
            )
            if peer.get("incarnation") != member.incarnation:
                if side is not None:
                    side.close()
                raise ProtocolError(
                    f"{peer.get('name')!r} listens there now, not the worker that was looked for"
                )
            if side is not None:
                sharing = self._lines.share(side)
            line = self._lines.line(sock, kind)
            outgoing = Outgoing(
                line, WorkerInfo(member.name, member.id), watch, sharing, bool(member.devices.maps)
            )
            line.parse(rest)
        except BaseException:
            sock.close()
            if sharing is not None:
                sharing.close()
            raise
        return outgoing

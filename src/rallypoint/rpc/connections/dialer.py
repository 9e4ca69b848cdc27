"""Connecting to another worker: by the best transport that works, with authentication in both directions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence

from rallypoint._core import forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, PeerLost, ProtocolError
from rallypoint.rpc.groups.member import Member
from rallypoint.rpc.groups.roster import Roster
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire import tls
from rallypoint.wire.transport import Address, HungUp, Way, choose, why_none

from .handshake import introduce
from .lines import Lines
from .outgoing import Outgoing, Watch


# Seconds before a broken-off handshake is retried: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
# Attempts with the best transport before slower ones are tried: a connection keeps its transport for life.
_TRIES_OF_THE_BEST = 4


def is_late(error: PeerLost) -> bool:
    """Whether :meth:`Dialer.dial` failed only for lack of time.

    The member accepted the connection, but no handshake was completed: it is stopped, or its port is crowded.
    """
    return isinstance(error.__cause__, DeadlineExceeded)


def _is_cut(error: Exception) -> bool:
    """Whether the other end hung up or had no room. A further attempt may succeed."""
    return isinstance(
        error,
        (HungUp, ConnectionResetError, ConnectionAbortedError, BrokenPipeError, BlockingIOError),
    )


def _pauses() -> Iterator[float]:
    """Seconds between attempts. Random: many workers may be refused at once, and should not all retry at once."""
    pause = _FIRST_PAUSE
    while True:
        yield random.uniform(pause / 2, pause)  # noqa: S311  # nothing secret
        pause = min(2 * pause, _LONGEST_PAUSE)


class Dialer:
    """Connects one worker to others.

    Args:
        roster: its group.
        lines: makes lines and shared memory for connections.
        secret: the group's secret.
        seals: the MACs allowed on connections without TLS, best first.
        ways: the allowed transports, best first.
        identity: its TLS certificate and key.
        heartbeat: as in the options.
    """

    def __init__(
        self,
        roster: Roster,
        lines: Lines,
        secret: bytes,
        seals: Sequence[str],
        ways: Sequence[Way],
        identity: tls.Identity | None,
        heartbeat: float,
    ) -> None:
        self._roster = roster
        self._lines = lines
        self._secret = secret
        self._seals = seals
        self._ways = ways
        self._identity = identity
        self._heartbeat = heartbeat
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make no further attempts. Callers that wait for one return now."""
        self._stopped.set()

    def dial(
        self,
        member: Member,
        deadline: Deadline,
        watch: Watch,
        *,
        probe: bool = False,
        refused: Callable[[str], None] | None = None,
    ) -> Outgoing:
        """Open a connection to a member. No thread reads it yet.

        If the other end breaks off the handshake, it is retried until the deadline: the member may have closed it to
        make room for others.

        Args:
            watch: passed to the connection.
            probe: only find out whether the member is there.
            refused: called with the reasons if every transport is refused.

        Raises:
            PeerLost: no transport works; the error gives the reason for each. It need not mean a loss: :func:`is_late`.
        """
        group = self._roster.group
        assert group is not None
        ways = choose(
            self._ways,
            member.addresses,
            same_host=group.me.shares_host(member),
            same_process=member.incarnation == self._roster.incarnation,
        )
        if not ways:
            why = why_none(self._ways, member.addresses)
            raise PeerLost(member.name, f"it cannot be reached ({why})")
        num_cut = 0
        for pause in _pauses():
            reasons = []
            late: DeadlineExceeded | None = None
            again = False
            num_refused = 0
            for way, address in ways:
                try:
                    return self._dial_by(way, address, member, deadline, watch, probe=probe)
                except (OSError, ProtocolError, DeadlineExceeded) as error:
                    text = getattr(error, "strerror", None) or str(error)
                    reasons.append(f"{way.kind}: {text}")
                    if _is_cut(error):
                        num_cut += 1
                        again = True
                        if num_cut < _TRIES_OF_THE_BEST:
                            break
                    elif isinstance(error, TimeoutError) and num_cut:
                        again = True
                    elif isinstance(error, DeadlineExceeded):
                        # Without its frames, this one among them: the cycle would keep all callers' variables.
                        late = error.with_traceback(None)
                    num_refused += isinstance(error, ConnectionRefusedError)
            if again and not self._wait(pause, deadline):
                raise PeerLost(member.name, _crowded(num_cut)) from DeadlineExceeded(
                    _crowded(num_cut)
                )
            if not again:
                break
        if num_refused == len(ways) and refused is not None:
            refused("; ".join(reasons))
        raise PeerLost(member.name, f"it cannot be reached ({'; '.join(reasons)})") from late

    def _wait(self, seconds: float, deadline: Deadline) -> bool:
        """Wait before the next attempt; False if there will be none."""
        left = deadline.remaining()
        if left is not None:
            seconds = min(seconds, left)
        return not self._stopped.wait(seconds) and not deadline.expired()

    def _dial_by(
        self,
        way: Way,
        address: Address,
        member: Member,
        deadline: Deadline,
        watch: Watch,
        *,
        probe: bool,
    ) -> Outgoing:
        made = forks.close_in_child(way.connect(address, deadline, self._heartbeat))
        sock: tls.Connection = made
        if way.tls:
            assert self._identity is not None
            sock = tls.TlsSocket(made, self._identity, accepts=False)
        sharing = None
        try:
            me = self._roster.introduction()
            if probe:
                me["probe"] = True
            peer, rest, side, keys = introduce(
                sock,
                self._secret,
                me,
                deadline,
                side=way.transport.shares_memory and not probe,
                channel=way.channel(address),
                seals=() if way.transport.private else self._seals,
            )
            if peer.get("incarnation") != member.incarnation:
                if side is not None:
                    side.close()
                raise ProtocolError(
                    f"another worker, {peer.get('name')!r}, now listens at this address"
                )
            if side is not None:
                sharing = self._lines.share(side)
            line = self._lines.line(sock, way.kind, keys)
            outgoing = Outgoing(
                line, WorkerInfo(member.name, member.id), watch, sharing, bool(member.devices.maps)
            )
            outgoing.incarnation = member.incarnation
            line.parse(rest)
        except BaseException:
            sock.close()
            if sharing is not None:
                sharing.close()
            raise
        return outgoing


def _crowded(times: int) -> str:
    often = "once" if times == 1 else f"{times} times"
    return (
        f"the other end closed the connection {often} during the handshake: it is ending, or too many unauthenticated"
        " clients connect to its port (its log says from where)"
    )

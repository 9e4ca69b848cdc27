"""When a TCP peer's host is gone, and not only its process standing still. No I/O.

Theory of operation
-------------------
A process that is stopped, or holds the interpreter's lock for long, reads nothing. Its kernel goes on: it acknowledges
what comes until its buffer is full, then it announces a window of zero and answers each *window probe*. So a host owes
us an answer while something is unacknowledged or probed, and it is gone once it has owed one for too long. How long a
window stays shut says nothing.

Linux has no time-out that means this. ``TCP_USER_TIMEOUT`` also counts the time that a window is shut, however faithfully
probes are answered, and ends the connection to a process that lives. Keep-alive probes are not sent while data waits
to be sent. Without either, the kernel gives up after a quarter of an hour. So we look ourselves, at ``TCP_INFO``, at
intervals that are short against the time-out. For idle connections, where nothing is owed, keep-alive does what it should.

A look that comes late counts as one interval: then it was this process, or the whole machine, that stood still.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Self


# struct tcp_info (linux/tcp.h): eight single bytes, then 32-bit numbers; the fields below have been there since Linux 2.6.
_LAYOUT = struct.Struct("=3xB20xI24xII")
INFO_SIZE = _LAYOUT.size
# Looks in one time-out.
LOOKS = 5


class TcpState(NamedTuple):
    """What the kernel knows of a connection.

    Args:
        probes: window and keep-alive probes that have not been answered.
        unacked: segments that have not been acknowledged.
        quiet: seconds since the last segment of the other host.
    """

    probes: int
    unacked: int
    quiet: float

    @classmethod
    def parse(cls, info: bytes) -> Self:
        """From what ``getsockopt(TCP_INFO)`` returns."""
        probes, unacked, data_received, ack_received = _LAYOUT.unpack_from(info)
        return cls(probes, unacked, min(data_received, ack_received) / 1000.0)


class Silence:
    """How long one host has owed us an answer.

    Args:
        limit: seconds after which it is gone.
    """

    __slots__ = ("_interval", "_limit", "_looked", "_owed", "_owes")

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._interval = limit / LOOKS
        self._looked = 0.0
        self._owes = False
        self._owed = 0.0

    def is_gone(self, now: float, state: TcpState) -> bool:
        """Whether the host is gone; asked every ``limit / LOOKS`` seconds.

        Args:
            now: monotonic seconds.
        """
        looked, self._looked = self._looked, now
        owed_before, self._owes = self._owes, bool(state.probes or state.unacked)
        if not (owed_before and self._owes) or now - state.quiet >= looked:
            # Nothing was owed at the last look, or nothing is now, or something has come in between.
            self._owed = 0.0
            return False
        self._owed += min(now - looked, 1.5 * self._interval)
        return self._owed >= self._limit - 0.5 * self._interval

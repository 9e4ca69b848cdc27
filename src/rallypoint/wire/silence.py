"""Whether a TCP peer's host is gone, as opposed to its process being stopped. No I/O.

Theory of operation
-------------------
A process that is stopped, or holds the GIL for long, reads nothing. But its kernel acknowledges data until the buffer is
full, then announces a window of zero, and answers each *window probe*. So a host owes us an answer while there are
unacknowledged segments or probes, and it is gone once it has owed one for too long. The time that a window is closed
means nothing.

Linux has no timeout for this. ``TCP_USER_TIMEOUT`` also counts the time that a window is closed, even if probes are
answered, and so ends connections to live processes. Keep-alive probes are not sent while there is unsent data. Without
either, the kernel gives up after a quarter of an hour. So this module checks ``TCP_INFO`` at intervals that are short
compared with the timeout. Keep-alive covers idle connections, where nothing is owed.

A check that comes late counts as one interval: then this process or the whole machine was stopped.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Self


# struct tcp_info (linux/tcp.h): eight single bytes, then 32-bit numbers; the fields below have been there since Linux 2.6.
_LAYOUT = struct.Struct("=3xB20xI24xII")
INFO_SIZE = _LAYOUT.size
# Checks per timeout.
LOOKS = 5


class TcpState(NamedTuple):
    """The kernel's state of a connection.

    Args:
        probes: unanswered window and keep-alive probes.
        unacked: unacknowledged segments.
        quiet: seconds since the last segment from the other host.
    """

    probes: int
    unacked: int
    quiet: float

    @classmethod
    def parse(cls, info: bytes) -> Self:
        """Parse the result of ``getsockopt(TCP_INFO)``."""
        probes, unacked, data_received, ack_received = _LAYOUT.unpack_from(info)
        return cls(probes, unacked, min(data_received, ack_received) / 1000.0)


class Silence:
    """Measures how long a host has owed us an answer.

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
        """Whether the host is gone. Called every ``limit / LOOKS`` seconds.

        Args:
            now: monotonic seconds.
        """
        looked, self._looked = self._looked, now
        owed_before, self._owes = self._owes, bool(state.probes or state.unacked)
        if not (owed_before and self._owes) or now - state.quiet >= looked:
            # Nothing was owed at the last check, or nothing is now, or something arrived in between.
            self._owed = 0.0
            return False
        self._owed += min(now - looked, 1.5 * self._interval)
        return self._owed >= self._limit - 0.5 * self._interval

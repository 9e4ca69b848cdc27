"""What comes back from a call: a value, or the error that the function has raised."""

from __future__ import annotations

from typing import Any

from rallypoint.errors import PeerLost, ProtocolError, RemoteError
from rallypoint.rpc.connections.calls import Call
from rallypoint.rpc.connections.messages import FAILURE, FLAG_PACKED, NOTHING
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.serialization import payload as payloads
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.wire.frames import Frame
from rallypoint.wire.remote_error import rebuild


class Replies:
    """Reads them.

    Args:
        allowed: what they may name; None: anything.
    """

    def __init__(self, allowed: AllowList | None) -> None:
        self.allowed = allowed

    def decode(self, call: Call, outgoing: Outgoing) -> Any:
        """What a completed call has returned; raises what it has raised."""
        if call.error is not None:
            raise call.error
        frame = call.frame
        assert frame is not None
        if frame.kind == NOTHING:
            return None
        return self.read(frame, outgoing)

    def read(self, frame: Frame, outgoing: Outgoing) -> Any:
        """The content of a reply; raises the error that it tells of."""
        buffers = frame.buffers
        if buffers and outgoing.sharing is not None:
            try:
                buffers = outgoing.sharing.take(buffers)
            except ProtocolError as error:
                # Of the connection's two sockets one may end before the other.
                outgoing.fail(str(error))
                raise PeerLost(outgoing.peer, str(error)) from error
        allowed = self.allowed
        content = payloads.loads(frame.payload, buffers, sender=outgoing.info.id, allowed=allowed)
        if frame.flags & FLAG_PACKED:
            return payloads.unpacked(content, buffers)
        if frame.kind == FAILURE:
            load = None if allowed is None else payloads.checked(allowed)
            raise _harmless(rebuild(content, outgoing.peer, load), outgoing.peer)
        return content


def _harmless(error: BaseException, worker: str) -> BaseException:
    """What ends a program (SystemExit, KeyboardInterrupt) over there does not end this one."""
    if isinstance(error, Exception):
        return error
    traceback = getattr(error.__cause__, "traceback", "")
    return RemoteError(type(error).__name__, str(error), traceback, worker)

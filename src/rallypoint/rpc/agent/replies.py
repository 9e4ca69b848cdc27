"""Replies to calls: the function's result, or the error that it raised."""

from __future__ import annotations

from typing import Any

import torch

from rallypoint.errors import PeerLost, ProtocolError, RemoteError
from rallypoint.rpc.connections.calls import Call
from rallypoint.rpc.connections.messages import FAILURE, FLAG_PACKED, NOTHING
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.serialization import payload as payloads
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.wire.frames import Frame
from rallypoint.wire.remote_error import message_of, rebuild


_is_inference = torch.is_inference_mode_enabled
_is_grad_enabled = torch.is_grad_enabled


class Replies:
    """Reads replies.

    Args:
        allowed: the names that a reply may contain; None: any.
    """

    def __init__(self, allowed: AllowList | None) -> None:
        self.allowed = allowed

    def decode(self, call: Call, outgoing: Outgoing) -> Any:
        """The result of a completed call. Raises its error."""
        if call.error is not None:
            raise call.error
        frame = call.frame
        assert frame is not None
        if frame.kind == NOTHING:
            return None
        return self.read(frame, outgoing)

    def read(self, frame: Frame, outgoing: Outgoing) -> Any:
        """The content of a reply. Raises the error that it carries."""
        if _is_inference() or not _is_grad_enabled():
            # The modes belong to the thread that happens to read; the call may be another thread's. Under them, tensors
            # would become inference tensors, and views could not be changed in place later.
            with torch.inference_mode(False):  # which enables gradients as well
                return self.read(frame, outgoing)
        buffers = frame.buffers
        if buffers and outgoing.sharing is not None:
            try:
                buffers = outgoing.sharing.take(buffers)
            except ProtocolError as error:
                # The side socket may end before the connection itself.
                outgoing.fail(str(error))
                raise PeerLost(outgoing.peer, str(error)) from error
        allowed = self.allowed
        content = payloads.loads(frame.payload, buffers, sender=outgoing.info.id, allowed=allowed)
        if frame.flags & FLAG_PACKED:
            return payloads.unpacked(content, buffers, outgoing.info.id)
        if frame.kind == FAILURE:
            load = None if allowed is None else payloads.checked(allowed)
            raise _harmless(rebuild(content, outgoing.peer, load), outgoing.peer)
        return content


def _harmless(error: BaseException, worker: str) -> BaseException:
    """Turn exceptions that would end this program, such as SystemExit, into RemoteError."""
    if isinstance(error, Exception):
        return error
    traceback = getattr(error.__cause__, "traceback", "")
    return RemoteError(type(error).__name__, message_of(error), traceback, worker)

"""Authentication of a new connection: the protocol of ``wire.auth`` over a socket, inside TLS if that is used."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rallypoint._core import forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, ProtocolError
from rallypoint.rpc.threads.thread_pool import Job
from rallypoint.wire.auth import NONCE_BYTES, Accepting, Connecting
from rallypoint.wire.seal import Keys
from rallypoint.wire.tls import Connection, Identity, TlsSocket
from rallypoint.wire.transport import HungUp


_CHUNK = 8192
_FD = struct.Struct("i")
# Seconds for a client to authenticate.
PATIENCE = 10.0


class Introduced(NamedTuple):
    """The result of a handshake.

    Args:
        peer: the introduction of the other end.
        rest: bytes that followed its last message.
        side: our end of the side socket.
        keys: MAC keys for the data that follows, as in ``wire.auth``.
    """

    peer: dict[str, Any]
    rest: bytes
    side: socket.socket | None
    keys: tuple[Keys, Keys] | None


def introduce(
    sock: Connection,
    secret: bytes,
    me: Mapping[str, Any],
    deadline: Deadline,
    *,
    side: bool,
    channel: bytes = b"",
    seals: Sequence[str] = (),
) -> Introduced:
    """The connecting side's handshake. Blocks.

    Args:
        side: also set up a second socket, for descriptors. Not possible through TLS.
        channel: identifies the connection; TLS has its own.
        seals: the allowed MACs for what follows, if there is no TLS.

    Raises:
        AuthenticationError: the other end does not know the secret, or rejects ours.
        HungUp: it closed the connection without a message.
        ProtocolError: it is not a worker.
        DeadlineExceeded: it does not answer.
        OSError: the connection broke.
    """
    if isinstance(sock, TlsSocket):
        _secure(sock, deadline)
        channel, seals = sock.channel, ()
    talk = Connecting(secret, me, secrets.token_bytes(NONCE_BYTES), channel, seals)
    ours: socket.socket | None = None
    theirs: socket.socket | None = None
    try:
        if side:
            with forks.opening():
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours, theirs = map(forks.close_in_child, pair)
        first = talk.start()
        sock.settimeout(deadline.remaining())
        if theirs is not None:
            assert isinstance(sock, socket.socket)
            sent = socket.send_fds(sock, [first], [theirs.fileno()])
            first = first[sent:]
        if first:
            # If the peer rejected our certificate it has closed the connection, but its reason can still be read.
            is_tls = isinstance(sock, TlsSocket)
            with contextlib.suppress(ConnectionError) if is_tls else contextlib.nullcontext():
                sock.sendall(first)
        while not talk.done:
            left = deadline.remaining()
            if left == 0.0:
                raise DeadlineExceeded("the other end did not complete the handshake in time")
            sock.settimeout(left)
            try:
                data = sock.recv(_CHUNK)
            except TimeoutError:
                raise DeadlineExceeded(
                    "the other end did not complete the handshake in time"
                ) from None
            except BlockingIOError:
                # An incomplete TLS record.
                continue
            if not data:
                raise HungUp(str(talk.ended()))
            try:
                answer = talk.receive(data)
            except ProtocolError:
                with contextlib.suppress(OSError):
                    sock.sendall(talk.refusal)
                raise
            if answer:
                sock.sendall(answer)
    except BaseException:
        if ours is not None:
            ours.close()
        raise
    finally:
        if theirs is not None:
            theirs.close()
    assert talk.peer is not None
    return Introduced(talk.peer, talk.rest, ours, talk.keys)


def _secure(sock: TlsSocket, deadline: Deadline) -> None:
    """The connecting side's TLS handshake. Blocks; raises the same errors as :func:`introduce`."""
    late = "the other end did not complete the TLS handshake in time"
    try:
        sock.settimeout(deadline.remaining())
        while not sock.step():
            left = deadline.remaining()
            if left == 0.0:
                raise DeadlineExceeded(late)
            sock.settimeout(left)
    except BlockingIOError:
        # The deadline had passed: a timeout of 0 makes the socket non-blocking.
        raise DeadlineExceeded(late) from None
    except TimeoutError as error:
        raise (error if isinstance(error, DeadlineExceeded) else DeadlineExceeded(late)) from None


class Welcome:
    """An accepted connection that has not authenticated yet. Lives in the poller.

    Args:
        sock: passed on to ``accepted``, or closed.
        identity: for a TLS handshake before authentication; None: no TLS.
        channel, seals: as for :func:`introduce`.
        accepted: called with the socket and its peer.
        ended: called when authentication has succeeded or failed.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        me: Mapping[str, Any],
        *,
        takes_side: bool,
        identity: Identity | None = None,
        channel: bytes = b"",
        seals: Sequence[str] = (),
        accepted: Callable[[Connection, Introduced, deque[Job]], None],
        ended: Callable[[Welcome, str], None],
    ) -> None:
        sock.setblocking(False)
        self.sock: Connection = sock
        self._tls: TlsSocket | None = None
        if identity is not None:
            self.sock = self._tls = TlsSocket(sock, identity, accepts=True)
            channel, seals = identity.fingerprint, ()
        self.until = time.monotonic() + PATIENCE
        self._begin: Callable[[], Accepting] = lambda: Accepting(
            secret, me, secrets.token_bytes(NONCE_BYTES), channel, seals
        )
        self._begun: Accepting | None = None
        self._takes_side = takes_side
        self._accepted = accepted
        self._ended = ended
        self._side: socket.socket | None = None
        self._outbox = b""

    @property
    def _talk(self) -> Accepting:
        # Created lazily: most connections in a flood never send anything.
        if self._begun is None:
            self._begun = self._begin()
        return self._begun

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        try:
            if self._tls is not None and not self._tls.is_open and not self._secure(self._tls):
                return
            if mask & select.EPOLLOUT and self._outbox:
                self._send(b"")
            data = self._receive()
            if data is None:
                return
            if not data:
                raise self._talk.ended()
            self._send(self._talk.receive(data))
        except ProtocolError as error:
            if not self._outbox:
                with contextlib.suppress(OSError):
                    self.sock.send(self._talk.refusal)
            self.close(str(error))
            return
        except OSError as error:
            self.close(error.strerror or str(error))
            return
        if self._talk.done and not self._outbox:
            talk = self._talk
            assert talk.peer is not None
            known = Introduced(talk.peer, talk.rest, self._side, talk.keys)
            self._side = None
            self._ended(self, "")
            self._accepted(self.sock, known, jobs)

    def _secure(self, sock: TlsSocket) -> bool:
        try:
            return sock.step()
        except BlockingIOError:
            return False

    def _receive(self) -> bytes | None:
        try:
            if not self._takes_side or isinstance(self.sock, TlsSocket):
                return self.sock.recv(_CHUNK)
            with forks.opening():
                return self._receive_with_side(self.sock)
        except BlockingIOError:
            return None

    def _receive_with_side(self, sock: socket.socket) -> bytes:
        # Not socket.recv_fds, which drops the flag: children would inherit the descriptors.
        data, ancillary, _, _ = sock.recvmsg(
            _CHUNK, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC
        )
        fds = [fd for _, _, each in ancillary for (fd,) in _FD.iter_unpack(each)]
        for fd in fds:
            if self._side is not None or len(fds) > 1:
                os.close(fd)
                continue
            try:
                self._side = forks.close_in_child(socket.socket(fileno=fd))
            except OSError:
                os.close(fd)
                raise ProtocolError("received a descriptor that is not a socket") from None
            if self._side.family != socket.AF_UNIX:
                raise ProtocolError("received a descriptor that is not a Unix socket")
        return data

    def _send(self, data: bytes) -> None:
        self._outbox += data
        if not self._outbox:
            return
        try:
            sent = self.sock.send(self._outbox)
        except BlockingIOError:
            sent = 0
        self._outbox = self._outbox[sent:]

    def close(self, reason: str) -> None:
        self._ended(self, reason or "it has left")
        self.sock.close()
        if self._side is not None:
            self._side.close()
            self._side = None

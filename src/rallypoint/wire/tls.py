"""TLS 1.3 on a connected socket, for lines: sends never block, and one thread may receive while others send.

Theory of operation
-------------------
OpenSSL does no I/O here: an ``SSLObject`` converts between data and records in two memory BIOs, and this module uses the
socket with the flags that :class:`Line` needs. OpenSSL objects are not thread-safe, so a lock guards each use. It is not
held while the kernel sends or receives.

*Sending.* Once bytes are encrypted, their records must be sent exactly once and in order. So a chunk counts as sent only
when the kernel has accepted all of its records. The rest of the records stays here, and the caller must begin the next
send with the bytes that were not counted. They are not encrypted again.

*Receiving.* Data that OpenSSL has decrypted does not make the descriptor readable. So :class:`TlsLine` takes all
available data at each read.

Guarantees and limits
---------------------
Others on the network can neither read nor change the data. ``wire.auth`` identifies the peer: both proofs cover the
SHA-256 of the accepting end's certificate (RFC 5929, ``tls-server-end-point``). A man in the middle must show another
certificate, whose key he has, so the proofs that he relays are invalid. With an authority, both ends also verify each
other's chain, but not host names, since jobs use addresses. Limits:

- The size and time of messages are visible.
- The accepting end's key allows a man in the middle, and the job's secret allows posing as either end. Neither allows
  decrypting recorded traffic: each connection has its own keys.
- Keys are not updated during a connection, since Python cannot. RFC 8446 (5.5) advises it after about 400 GB.
- A missing ``close_notify`` is not reported: frames contain their lengths, so truncation is detected anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from select import POLLIN
from typing import Any, NoReturn, TypeAlias, cast

from rallypoint.errors import AuthenticationError, ProtocolError

from .buffers import on_demand
from .frames import Frame, FrameParser
from .line import MOST_AT_ONCE, PATIENCE, Closed, Line, Piece, Sleeper
from .silence import Silence
from .transport import HungUp
from .wrapped_socket import WrappedSocket, drop


# Four full records: few calls for large tensors, but little encrypted data that must wait.
_CHUNK = 64 * 1024
_RECORD = 16 * 1024
# Bytes per receive. OpenSSL decrypts them in about 50 µs, during which nothing can be sent.
_RECEIVE = 128 * 1024
_DONT_WAIT = socket.MSG_DONTWAIT
_SAME = "give all workers the same tls=..."
# The first bytes of our handshake without TLS.
_PLAIN = b"RLY1"


@dataclass(frozen=True, eq=False, slots=True)
class Identity:
    """The certificate of an end, and the peers that it accepts.

    Args:
        accepting: the context of accepted connections.
        connecting: the context of opened connections.
        fingerprint: SHA-256 of the certificate of ``accepting``.
    """

    accepting: ssl.SSLContext
    connecting: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def of(cls, accepting: ssl.SSLContext, connecting: ssl.SSLContext) -> Identity:
        """An identity that accepts itself, as tested by a handshake in memory.

        Raises:
            ssl.SSLError: it does not. :func:`told` gives the reason.
        """
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = connecting.wrap_bio(back, there)
        theirs = accepting.wrap_bio(there, back, server_side=True)
        for end in (ours, theirs, ours, theirs):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        return cls(accepting, connecting, _fingerprint(ours))


def new_context(*, accepts: bool) -> ssl.SSLContext:
    """A context for one side, which verifies no certificates yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if accepts:
        # No resumption: the proofs need the certificate on each connection.
        context.num_tickets = 0
    return context


class TlsSocket(WrappedSocket):
    """A connected socket with TLS, with the methods that handshakes and lines use.

    One thread at a time may receive, and one may send.

    Args:
        sock: connected; this object owns it.
        accepts: whether the other end opened the connection.
    """

    def __init__(self, sock: socket.socket, identity: Identity, *, accepts: bool) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = identity.accepting if accepts else identity.connecting
        self._lock = threading.Lock()
        # Under the lock, with both BIOs:
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        self._accepts = accepts
        self._own = identity.fingerprint
        self._is_open = False
        self._heard = False
        # Records that the kernel has not accepted yet.
        self._pending = memoryview(b"")
        # How many bytes are encrypted but not counted as sent.
        self._uncounted = 0
        self._scratch = memoryview(on_demand(_RECEIVE))
        # OpenSSL's error in receiving.
        self._failure: ssl.SSLError | None = None

    # -- the handshake ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete."""
        return self._is_open

    @property
    def channel(self) -> bytes:
        """The fingerprint of the accepting end's certificate, once the handshake is complete."""
        return self._own if self._accepts else _fingerprint(self._tls)

    def step(self) -> bool:
        """Continue the handshake. Receives once, and blocks as the socket does. True when the handshake is complete.

        Raises:
            AuthenticationError: one end rejects the other's certificate.
            HungUp: the other end closed the connection without a reason.
            ProtocolError: the other end does not use TLS, or not with our settings.
            BlockingIOError, TimeoutError: nothing was received; call again.
            OSError: the connection broke.
        """
        if self._shake():
            return True
        count = self._sock.recv_into(self._scratch)
        if not count:
            why = f"it has ended, or does not use TLS: {_SAME}"
            if self._heard:
                why = "its log says why"
            raise HungUp(f"the other end closed the connection in the TLS handshake: {why}")
        if not self._heard and _PLAIN.startswith(bytes(self._scratch[: min(count, len(_PLAIN))])):
            raise ProtocolError(
                f"the other end does not use TLS, which this worker requires: {_SAME}"
            )
        self._heard = True
        with self._lock:
            self._incoming.write(self._scratch[:count])
        return self._shake()

    def _shake(self) -> bool:
        if not self._is_open:
            try:
                with self._lock:
                    self._tls.do_handshake()
                self._is_open = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._refuse(error)
        with contextlib.suppress(BlockingIOError):
            self._hand_over(0)
        return self._is_open

    def recv(self, _size: int) -> bytes:
        """All received data, decrypted; empty at the end of the stream. For use before there is a line.

        Raises:
            AuthenticationError, ProtocolError: the other end rejects us late, as TLS 1.3 allows, or the data is damaged.
            BlockingIOError, TimeoutError: no complete record was received; call again.
            OSError: the connection broke.
        """
        found = self._decrypted()
        if not found and self._failure is None:
            if not self.fetch(0):
                return b""
            found = self._decrypted()
        if found or isinstance(self._failure, ssl.SSLZeroReturnError):
            return found
        if self._failure is not None:
            self._refuse(self._failure)
        raise BlockingIOError

    def _decrypted(self) -> bytes:
        found = b""
        space = memoryview(bytearray(_RECORD))
        while count := self.recv_into(space):
            found += space[:count]
        return found

    def _refuse(self, error: ssl.SSLError) -> NoReturn:
        with contextlib.suppress(OSError):
            self._hand_over(_DONT_WAIT)  # send the alert
        text = told(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            problem = f"the other end's certificate is rejected ({text})"
        elif "certificate" in text or text == "unknown ca":
            problem = f"the other end rejects this worker's certificate ({text})"
        else:
            raise ProtocolError(f"the TLS handshake failed ({text}): {_SAME}") from None
        raise AuthenticationError(
            f"{problem}: {next_step(text, 'give all workers certificates from one authority')}"
        ) from None

    # -- sending ---------------------------------------------------------------------------------

    def send(self, data: Piece, flags: int = 0) -> int:
        """As ``socket.send``, but the next call must begin with the bytes that were not counted."""
        return self.sendmsg((data,), (), flags)

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest) :]

    def sendmsg(
        self, pieces: Iterable[Piece], _ancillary: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """:meth:`send` for several pieces.

        Raises:
            BlockingIOError: the kernel did not accept all of the encrypted data.
            OSError: the connection broke.
        """
        left = deque(view for each in pieces if (view := memoryview(each).cast("B")))
        sent = 0
        try:
            while True:
                self._hand_over(flags)
                if self._uncounted:
                    count, self._uncounted = self._uncounted, 0
                    drop(left, count)
                    sent += count
                if not left or sent >= MOST_AT_ONCE:
                    return sent
                chunk = _first(left)
                with self._lock:
                    self._tls.write(chunk)
                self._uncounted = len(chunk)
        except BlockingIOError:
            if not sent:
                raise
            return sent
        except ssl.SSLError as error:
            raise _broken(error) from None

    def _hand_over(self, flags: int) -> None:
        """Send all encrypted data. Raises BlockingIOError if the kernel does not accept it all."""
        while True:
            if not self._pending:
                with self._lock:
                    self._pending = memoryview(self._outgoing.read())
                if not self._pending:
                    return
            self._pending = self._pending[self._sock.send(self._pending, flags) :]

    # -- receiving -------------------------------------------------------------------------------

    def fetch(self, flags: int) -> bool:
        """Receive once; False at the end of the stream.

        Raises:
            BlockingIOError: nothing was received.
            OSError: the connection broke, or earlier data was damaged.
        """
        if self._failure is not None:
            if isinstance(self._failure, ssl.SSLZeroReturnError):
                return False
            raise _broken(self._failure)
        count = self._sock.recv_into(self._scratch, 0, flags)
        with self._lock:
            self._incoming.write(self._scratch[:count])
        return bool(count)

    def recv_into(self, buffer: memoryview, _size: int = 0, _flags: int = 0) -> int:
        """Decrypt fetched data into ``buffer``; 0: nothing is left. Does not receive.

        Damage is reported by the next :meth:`fetch`; the descriptor becomes readable.
        """
        if self._failure is not None:
            return 0
        filled = 0
        with self._lock:
            # Checked first: without data, OpenSSL would only raise.
            while filled < len(buffer) and (self._incoming.pending or self._tls.pending()):
                part = buffer[filled : filled + _RECORD]
                try:
                    # With a buffer it returns an int, unlike the stubs say.
                    count = cast("int", self._tls.read(len(part), part))
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLError as error:
                    self._fail(error)
                    break
                if not count:
                    self._fail(ssl.SSLZeroReturnError())
                    break
                filled += count
        return filled

    def _fail(self, error: ssl.SSLError) -> None:
        self._failure = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    # -- other methods of a socket ---------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)


Connection: TypeAlias = socket.socket | TlsSocket


class TlsLine(Line):
    """A line whose socket is a :class:`TlsSocket`."""

    _sock: TlsSocket

    def read_now(self) -> list[Frame]:
        return self._take(_DONT_WAIT)

    def read(self, left: float | None, sleeper: Sleeper | None = None) -> list[Frame]:
        rest = None if sleeper is None else sleeper.rest()
        if rest is not None:
            # Data is taken in several steps, none of which may sleep.
            wait = PATIENCE if left is None else min(left, PATIENCE)
            return self._take(_DONT_WAIT) if self._wait(POLLIN, wait, rest) else []
        if left is not None and left < PATIENCE and not self._wait(POLLIN, left):
            return []
        return self._take(0)

    def _take(self, flags: int) -> list[Frame]:
        """All frames that one receive completes. No decrypted data may be left in OpenSSL."""
        sock, parser = self._sock, self._parser
        try:
            goes_on = sock.fetch(flags)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._gone(error) from None
        if not goes_on:
            raise Closed("the other end has closed the connection")
        frames: list[Frame] = []
        while count := sock.recv_into(parser.space()):
            self.bytes_received += count
            frames += parser.received(count)
        return frames


def new_line(
    sock: Connection, parser: FrameParser, kind: str, silence: Silence | None = None
) -> Line:
    made = TlsLine if isinstance(sock, TlsSocket) else Line
    return made(sock, parser, kind, silence=silence)


def next_step(text: str, otherwise: str) -> str:
    """What to do about a certificate that is rejected with this reason of OpenSSL's.

    Args:
        text: the reason, as :func:`told` returns it.
        otherwise: the step if the time is not to blame.
    """
    if "expired" in text or "not yet valid" in text:
        return "renew it (a worker reads it when it joins), or correct the clocks"
    return otherwise


def told(error: ssl.SSLError) -> str:
    """OpenSSL's reason in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    words = (error.reason or str(error)).lower().replace("_", " ")
    return (
        words.removeprefix("tlsv1 alert ")
        .removeprefix("tlsv13 alert ")
        .removeprefix("sslv3 alert ")
    )


def _broken(error: ssl.SSLError) -> OSError:
    return ConnectionError(f"TLS: {told(error)}")


def _fingerprint(end: ssl.SSLObject) -> bytes:
    """SHA-256 of the other end's certificate."""
    shown = end.getpeercert(True)
    assert shown is not None
    return hashlib.sha256(shown).digest()


def _first(left: deque[memoryview]) -> bytes | memoryview:
    """The next bytes to encrypt together. Does not remove them."""
    if len(left) == 1 or len(left[0]) >= _CHUNK:
        return left[0][:_CHUNK]
    taken, room = [], _CHUNK
    for each in left:
        taken.append(each[:room])
        room -= len(taken[-1])
        if not room:
            break
    return b"".join(taken)

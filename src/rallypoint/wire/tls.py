"""TLS 1.3 on a connected socket, for lines: sends never wait, and one thread may receive while others send.

Theory of operation
-------------------
OpenSSL does no I/O here: an ``SSLObject`` turns bytes into records between two memory BIOs, and the socket is ours, with
the flags that :class:`Line` wants. OpenSSL's objects take one thread at a time, so one lock is around every use of
them; it is not held while the kernel sends or receives.

*Sending.* Once bytes are encrypted, their records must go out, each exactly once and in order: a record that is lost or
encrypted again ends the connection. So a chunk counts as sent when the kernel has all of its records, and not before.
What the kernel did not take stays here, and the chunk stays with the caller, who offers it again: the next bytes to be
sent must begin with those that did not count. They are not encrypted again.

*Receiving.* What has been decrypted and not been fetched does not make the descriptor readable. So :class:`TlsLine`
takes all there is at each read.

What it gives, and what not
---------------------------
Nobody on the way reads or changes what is sent. To whom we speak is a matter of ``wire.auth``: both ends put the SHA-256
of the accepting end's certificate (RFC 5929, ``tls-server-end-point``) into their proofs. Who sits between the two has
to show the connecting end a certificate whose key he has; it is another one, and the proofs that he relays are wrong.
With an authority both ends look at each other's chain beforehand, at no host names: jobs use addresses. What this does
not do:

- The length and the time of messages can be seen.
- Who has the accepting end's key can be in the middle; who has the job's secret can be either end. Neither can read what
  he has only recorded: each connection has keys of its own.
- Keys are not renewed within a connection; Python has no call for it. RFC 8446 (5.5) advises that after some 400 GB.
- An end without ``close_notify`` is an end: frames say how long they are, so nothing shorter is taken for whole.
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

from .frames import Frame, FrameParser
from .line import MOST_AT_ONCE, PATIENCE, Closed, Line, Piece, Sleeper
from .silence import Silence
from .transport import HungUp
from .wrapped_socket import WrappedSocket, drop


# Four full records: few calls for large tensors, and little that is encrypted and must wait.
_CHUNK = 64 * 1024
_RECORD = 16 * 1024
# How much is received at once: what takes OpenSSL some 50 us, in which nobody sends.
_RECEIVE = 128 * 1024
_DONT_WAIT = socket.MSG_DONTWAIT
_SAME = "give all workers the same tls=..."
# How a handshake of ours begins where there is no TLS around it.
_PLAIN = b"RLY1"


@dataclass(frozen=True, eq=False, slots=True)
class Identity:
    """What an end of a connection shows, and whom it takes.

    Args:
        accepting: the context of connections that come.
        connecting: the context of those that are made.
        fingerprint: SHA-256 of the certificate that ``accepting`` shows.
    """

    accepting: ssl.SSLContext
    connecting: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def of(cls, accepting: ssl.SSLContext, connecting: ssl.SSLContext) -> Identity:
        """An identity that takes itself: tried out, without a socket.

        Raises:
            ssl.SSLError: it does not. :func:`told` says why.
        """
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = connecting.wrap_bio(back, there)
        theirs = accepting.wrap_bio(there, back, server_side=True)
        for end in (ours, theirs, ours, theirs):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        return cls(accepting, connecting, _fingerprint(ours))


def new_context(*, accepts: bool) -> ssl.SSLContext:
    """A context for one of the two sides, which looks at nobody's certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if accepts:
        # Nobody resumes anything: each connection shows its certificate, which the proofs need.
        context.num_tickets = 0
    return context


class TlsSocket(WrappedSocket):
    """A connected socket behind TLS, with those methods of a socket that a handshake and a line use.

    One thread at a time receives, and one at a time sends.

    Args:
        sock: connected; it is taken over.
        accepts: whether the other end has opened the connection.
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
        # Records that the kernel has not taken yet.
        self._pending = memoryview(b"")
        # How many bytes are encrypted, and not counted as sent.
        self._uncounted = 0
        self._scratch = memoryview(bytearray(_RECEIVE))
        # What OpenSSL has failed with, in receiving.
        self._failure: ssl.SSLError | None = None

    # -- the handshake ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the handshake is over."""
        return self._is_open

    @property
    def channel(self) -> bytes:
        """What both ends know of this connection, and nobody between them has; after the handshake."""
        return self._own if self._accepts else _fingerprint(self._tls)

    def step(self) -> bool:
        """Go on with the handshake: receives once, as the socket is set to. True when it is over.

        Raises:
            AuthenticationError: one of the two does not take the other's certificate.
            HungUp: it has closed the connection without a word.
            ProtocolError: the other end does not speak TLS, or not ours.
            BlockingIOError, TimeoutError: nothing has come; call again.
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
                f"the other end does not use TLS and this worker requires it: {_SAME}"
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
        """All that has come, decrypted; empty at the end. For the time before there is a line.

        Raises:
            AuthenticationError, ProtocolError: the other end refuses us only now (TLS 1.3), or what came is damaged.
            BlockingIOError, TimeoutError: nothing has come, or less than a record; call again.
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
            self._hand_over(_DONT_WAIT)  # the other end is told why
        text = told(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            problem = f"the other end's certificate is refused ({text})"
        elif "certificate" in text or text == "unknown ca":
            problem = f"the other end refuses this worker's certificate ({text})"
        else:
            raise ProtocolError(f"the TLS handshake failed ({text}): {_SAME}") from None
        raise AuthenticationError(
            f"{problem}: give all workers certificates of one authority"
        ) from None

    # -- sending ---------------------------------------------------------------------------------

    def send(self, data: Piece, flags: int = 0) -> int:
        """As a socket's, but for what the caller owes: the next call begins with the bytes that did not count."""
        return self.sendmsg((data,), (), flags)

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest) :]

    def sendmsg(
        self, pieces: Iterable[Piece], _ancillary: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """The same for several, one after the other.

        Raises:
            BlockingIOError: the kernel takes nothing, or not all of what is encrypted.
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
        """Give the kernel all that is encrypted; raises BlockingIOError if it does not take it."""
        while True:
            if not self._pending:
                with self._lock:
                    self._pending = memoryview(self._outgoing.read())
                if not self._pending:
                    return
            self._pending = self._pending[self._sock.send(self._pending, flags) :]

    # -- receiving -------------------------------------------------------------------------------

    def fetch(self, flags: int) -> bool:
        """Receive once; False at the end.

        Raises:
            BlockingIOError: nothing has come.
            OSError: the connection broke, or what came before was damaged.
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
        """Decrypt into ``buffer`` what was fetched; 0: nothing is left. Receives nothing itself.

        Of damage, the next :meth:`fetch` tells; the descriptor can be read from then.
        """
        if self._failure is not None:
            return 0
        filled = 0
        with self._lock:
            # Where there is nothing to be read, to ask OpenSSL would only raise that more must come.
            while filled < len(buffer) and (self._incoming.pending or self._tls.pending()):
                part = buffer[filled : filled + _RECORD]
                try:
                    # A number, where there is a buffer; the stubs know of bytes only.
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

    # -- as any socket ---------------------------------------------------------------------------

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
            # What comes is taken in several steps: none of them sleeps.
            wait = PATIENCE if left is None else min(left, PATIENCE)
            return self._take(_DONT_WAIT) if self._wait(POLLIN, wait, rest) else []
        if left is not None and left < PATIENCE and not self._wait(POLLIN, left):
            return []
        return self._take(0)

    def _take(self, flags: int) -> list[Frame]:
        """All frames that one look at the kernel completes: nothing that is decrypted may stay behind."""
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
    """The line for a socket."""
    made = TlsLine if isinstance(sock, TlsSocket) else Line
    return made(sock, parser, kind, silence=silence)


def told(error: ssl.SSLError) -> str:
    """What OpenSSL has to say, in a few words."""
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
    """Of the certificate that the other end has shown."""
    shown = end.getpeercert(True)
    assert shown is not None
    return hashlib.sha256(shown).digest()


def _first(left: deque[memoryview]) -> bytes | memoryview:
    """The next bytes to be encrypted together; they stay."""
    if len(left) == 1 or len(left[0]) >= _CHUNK:
        return left[0][:_CHUNK]
    taken, room = [], _CHUNK
    for each in left:
        taken.append(each[:room])
        room -= len(taken[-1])
        if not room:
            break
    return b"".join(taken)

"""An unencrypted end for a sealed TCP connection, for tests that speak to a worker byte by byte."""

from __future__ import annotations

import hmac
import socket

from rallypoint.wire.seal import LENGTH, MOST, SHORT, TAG_BYTES, Keys, Seal, Sealer


def records(sealer: Sealer, data: bytes) -> bytes:
    """``data`` as records."""
    made = []
    for at in range(0, len(data), MOST):
        part = data[at : at + MOST]
        if len(part) > SHORT:
            made.append(bytes(sealer.long([memoryview(part)])))
        else:
            made.append(sealer.short(part))
    return b"".join(made)


class SealedEnd:
    """Has the methods of a socket that tests use: bytes in, bytes out.

    Args:
        keys: to seal what is sent and to open what arrives.
        rest: what has already arrived.
    """

    def __init__(self, sock: socket.socket, keys: tuple[Keys, Keys], rest: bytes = b"") -> None:
        self.sock = sock
        self.sealer, self._seal = Sealer(keys[0]), Seal(keys[1])
        self._rest = rest
        self.settimeout, self.close, self.shutdown = sock.settimeout, sock.close, sock.shutdown

    def sendall(self, data: bytes) -> None:
        self.sock.sendall(records(self.sealer, data))

    def recv(self, _: int) -> bytes:
        """The content of the next record; empty at the end."""
        while True:
            if len(self._rest) >= LENGTH.size:
                (size,) = LENGTH.unpack_from(self._rest)
                end = LENGTH.size + size + TAG_BYTES
                if len(self._rest) >= end:
                    content = self._rest[LENGTH.size : LENGTH.size + size]
                    tag = self._rest[end - TAG_BYTES : end]
                    assert hmac.compare_digest(self._seal.tag(content), tag)
                    self._rest = self._rest[end:]
                    return content
            more = self.sock.recv(1 << 18)
            if not more:
                return b""
            self._rest += more

"""Connections on which copies of a rank's state travel to its partner on another node.

Both ends prove that they know the job's secret, and every byte is under a MAC (:mod:`rallypoint.wire.auth`,
:mod:`~rallypoint.wire.seal`). A job without a secret has no MACs; its token is known to whoever can read the workers' store.

The rank sends, and its partner answers. A frame's ``call`` holds a number:

- ``OWN``, steps: the rank's own state in this step, as payload. Not answered.
- ``OFFER``, number: a snapshot, described by :data:`OFFERED`; answered by ``READY``.
- ``CONTENTS``, number: the snapshot's contents as the only buffer; answered by ``DONE`` once they are kept.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rallypoint._core import addresses, forks, secret
from rallypoint._core.clock import Deadline
from rallypoint.elastic.storage.schedule import Held
from rallypoint.errors import ProtocolError
from rallypoint.wire.auth import NONCE_BYTES, NONE, SEALS, Accepting, Connecting
from rallypoint.wire.frames import FrameParser, encode
from rallypoint.wire.line import Line
from rallypoint.wire.seal import SealedParser
from rallypoint.wire.sealed_line import SealedLine, SealedSocket
from rallypoint.wire.tcp import prepare


OWN, OFFER, READY, CONTENTS, DONE = range(1, 6)
# Steps, bytes and checksum of a snapshot.
OFFERED = struct.Struct("=QQQ")
# Seconds for a connection and its handshake.
PATIENCE = 5.0
# Seconds of silence after which the kernel gives up an idle connection. Losses are reported by the supervisor.
HEARTBEAT = 30.0
_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank takes copies.

    Args:
        host: where it listens; empty: the host of the workers' store.
        port: the port there.
        token: as hex; identifies the listener.
    """

    host: str
    port: int
    token: str


def offer(held: Held, size: int, checksum: int) -> list[bytes | memoryview]:
    """A frame that offers a snapshot of this many bytes."""
    return encode(OFFER, held.number, OFFERED.pack(held.steps, size, checksum))


def dial(door: Door, store_host: str, rank: int) -> Line:
    """Connect to a partner.   Blocks: for at most :data:`PATIENCE`.

    Args:
        door: the partner's.
        store_host: as this process knows it.
        rank: of this process.
    Raises:
        OSError: nobody answers.
        ProtocolError: the partner does not know the job's secret.
    """
    deadline = Deadline(PATIENCE)
    sock = addresses.connect(door.host or store_host, door.port, PATIENCE)
    return _introduced(sock, Connecting, door.token, rank, deadline)[1]


def welcome(
    sock: socket.socket, token: str, rank: int, allocate: Callable[[int], Any]
) -> tuple[int, Line]:
    """The accepting end of :func:`dial`.

    Args:
        sock: an accepted socket, which this takes over.
        token: the door's.
        rank: of this process.
        allocate: provides memory for the contents of a snapshot.
    Returns:
        The rank at the other end, and the line.
    Raises:
        OSError: the other end is gone.
        ProtocolError: the other end does not know the job's secret.
    """
    peer, line = _introduced(sock, Accepting, token, rank, Deadline(PATIENCE), allocate)
    return peer, line


def _introduced(
    sock: socket.socket,
    kind: type[Connecting | Accepting],
    token: str,
    rank: int,
    deadline: Deadline,
    allocate: Callable[[int], Any] = bytearray,
) -> tuple[int, Line]:
    forks.close_in_child(sock)
    held = secret.held()
    key = bytes.fromhex(token) if held is None else secret.derive(held, "copies of a session")
    me: dict[str, Any] = {"job": "copies of a session", "generation": 0, "rank": rank}
    seals = (NONE,) if held is None else SEALS()
    talk = kind(key, me, secrets.token_bytes(NONCE_BYTES), token.encode(), seals)
    try:
        prepare(sock, HEARTBEAT)
        _shake(sock, talk, deadline)
    except BaseException:
        sock.close()
        raise
    peer = (talk.peer or {}).get("rank")
    if not isinstance(peer, int):
        sock.close()
        raise ProtocolError("the other end does not say which rank it is")
    if talk.keys is None:
        return peer, Line(sock, FrameParser(allocate=allocate))
    sending, receiving = talk.keys
    parser = SealedParser(receiving, allocate=allocate)
    return peer, SealedLine(SealedSocket(sock, sending, allocate), parser)


def _shake(sock: socket.socket, talk: Connecting | Accepting, deadline: Deadline) -> None:
    sock.settimeout(deadline.remaining())
    sock.sendall(talk.start())
    while not talk.done:
        left = deadline.remaining()
        if left == 0.0:
            raise TimeoutError("the other end did not complete the handshake in time")
        sock.settimeout(left)
        data = sock.recv(_CHUNK)
        if not data:
            raise talk.ended()
        try:
            answer = talk.receive(data)
        except ProtocolError:
            sock.sendall(talk.refusal)
            raise
        sock.sendall(answer)

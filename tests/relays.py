"""A relay between two workers: it forwards handshakes unchanged, and may alter what one of them sends afterwards.

In a test's own process, use :class:`Relay`. As a program, for a relay in another network namespace or under another user::

    python relays.py sealed 10.78.0.3 0 10.78.0.2 45555 [--uid 65534] [--transparent]

It reads one command per line: ``alter NAME`` (the next record, as in :data:`ALTERED`), ``to HOST PORT``, ``cut`` (all
connections) and ``counts``. It answers each with a line of JSON; the first line it prints is its own address.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Records:
    """How a stream divides into records.

    Args:
        messages: number of messages in each end's handshake, before the first record.
        head: bytes before the content.
        length: where in the head the length is, as for :mod:`struct`.
        more: bytes after the content, which the length does not count.
        forged: what the head of a forged record starts with.
    """

    messages: int
    head: int
    length: struct.Struct
    more: int
    forged: bytes = b""

    def size(self, head: bytes) -> int:
        return int(self.length.unpack(head[-self.length.size :])[0]) + self.more

    def with_size(self, head: bytes, more: int) -> bytes:
        at = len(head) - self.length.size
        return head[:at] + self.length.pack(self.length.unpack(head[at:])[0] + more)


SEALED = Records(2, 4, struct.Struct("<I"), 16)
# In a TLS connection everything, the handshake included, looks alike.
TLS = Records(0, 5, struct.Struct(">H"), 0, b"\x17\x03\x03")
KINDS = {"sealed": SEALED, "tls": TLS}

# Given a record of one direction and its number (the first after the handshake is 0): what is sent instead.
Alter = Callable[[int, bytes], list[bytes]]


def flip_in_the_middle(record: bytes) -> list[bytes]:
    at = len(record) // 2
    return [record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]]


def _longer(kind: Records, record: bytes) -> list[bytes]:
    return [kind.with_size(record[: kind.head], 1) + record[kind.head :] + b"x"]


def _own(kind: Records, record: bytes) -> list[bytes]:
    size = 24 - kind.more
    return [kind.forged + kind.length.pack(size) + b"a frame!" + bytes(16), record]


ALTERED: dict[str, Callable[[Records, bytes], list[bytes]]] = {
    "changed": lambda _, record: flip_in_the_middle(record),
    "longer": _longer,
    "said twice": lambda _, record: [record, record],
    "of the relay's own": _own,
    "left out": lambda _, record: [],
}


def unchanged(_: int, record: bytes) -> list[bytes]:
    return [record]


class Relay:
    """Forwards handshakes as they are, and then what ``alter`` makes of each record sent to the worker that was called."""

    def __init__(
        self,
        to: tuple[str, int],
        kind: Records = SEALED,
        listener: socket.socket | None = None,
    ) -> None:
        self.to = to
        self.kind = kind
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self.alter: Alter = unchanged
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def alter_next(self, how: str) -> list[int]:
        """Alter the next record; returns a list that will hold its number."""
        altered: list[int] = []

        def alter(number: int, record: bytes) -> list[bytes]:
            if not altered:
                altered.append(number)
                return ALTERED[how](self.kind, record)
            return [record]

        self.alter = alter
        return altered

    def cut(self) -> None:
        """Close all connections."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                try:
                    server = socket.create_connection(self.to, 10.0)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                self._sockets += (client, server)
                for source, target, alters in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(
                        target=self._pass, args=(source, target, alters), daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)

    def _pass(self, source: socket.socket, target: socket.socket, alters: bool) -> None:
        kind = self.kind
        with contextlib.suppress(OSError, EOFError):
            reader = source.makefile("rb")
            for _ in range(kind.messages):
                head = _exactly(reader, 8)
                target.sendall(head + _exactly(reader, int.from_bytes(head[4:], "little")))
            number = 0
            while True:
                head = _exactly(reader, kind.head)
                record = head + _exactly(reader, kind.size(head))
                for each in self.alter(number, record) if alters else [record]:
                    target.sendall(each)
                number += 1
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10.0)
        for each in self._sockets:
            each.close()


def _exactly(reader: Any, size: int) -> bytes:
    data: bytes = reader.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("to_host")
    parser.add_argument("to_port", type=int)
    parser.add_argument("--uid", type=int, default=0)
    parser.add_argument("--transparent", action="store_true", help="for packets to other hosts")
    given = parser.parse_args()
    listener = socket.socket()
    if given.transparent:
        listener.setsockopt(socket.SOL_IP, socket.IP_TRANSPARENT, 1)
    listener.bind((given.host, given.port))
    listener.listen()
    become(given.uid)
    relay = Relay((given.to_host, given.to_port), KINDS[given.kind], listener)
    altered: list[int] = []
    say(relay.address)
    for line in sys.stdin:
        match line.split(" ", 1)[0].strip():
            case "alter":
                altered = relay.alter_next(line.split(" ", 1)[1].strip())
            case "to":
                _, host, port = line.split()
                relay.to = host, int(port)
            case "cut":
                relay.cut()
        say({"connections": relay.connections, "altered": len(altered)})


def become(uid: int) -> None:
    """Become that user, in no group."""
    "".encode("idna")  # loaded on first use, and only another user may be able to read the file
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

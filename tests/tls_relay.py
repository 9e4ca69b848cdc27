"""A relay between two workers that use TLS, in a test's own process or, as a program, under another user on another host.

    python tls_relay.py HOST PORT TO_HOST TO_PORT UID

It speaks TLS with each of the two, with a certificate of its own. It answers every line with the number of its connections
and what it has read; the first line it prints is its own address.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
from typing import Any

import tls_ends
from rallypoint.rpc.certificates import identity_of
from rallypoint.wire.tls import TlsSocket
from relays import become, say


class TlsRelay:
    """A man in the middle between two workers: sees all bytes, and may speak TLS with each of the two.

    Args:
        takes_part: with its own certificate; otherwise it only forwards bytes.
    """

    def __init__(
        self,
        to: tuple[str, int],
        *,
        takes_part: bool,
        listener: socket.socket | None = None,
    ) -> None:
        self._to = to
        self._takes_part = takes_part
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self.seen = bytearray()
        self.connections = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        threads = []
        while True:
            client, _ = self._listener.accept()
            if self._is_over:
                client.close()
                break
            self.connections += 1
            server = socket.create_connection(self._to)
            threads.append(threading.Thread(target=self._relay, args=(client, server)))
            threads[-1].start()
        for each in threads:
            each.join()

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        ends: Any = (client, server)
        if self._takes_part:
            own = identity_of(True)
            assert own is not None
            ends = TlsSocket(client, own, accepts=True), TlsSocket(server, own, accepts=False)
            tls_ends.shake(*ends)
        for each in ends:
            each.setblocking(False)
        with client, server:
            while not self._is_over:
                # Data that arrived with the end of a handshake does not make a descriptor readable, so both are asked.
                select.select(ends, [], [], 0.02)
                for source in ends:
                    try:
                        data = source.recv(1 << 16)
                    except BlockingIOError:
                        continue
                    except OSError:
                        data = b""
                    if not data:
                        return
                    self.seen += data
                    other = ends[source is ends[0]]
                    other.settimeout(5.0)
                    with contextlib.suppress(OSError):
                        other.sendall(data)
                    other.setblocking(False)

    def close(self) -> None:
        self._is_over = True
        socket.create_connection(self.address).close()
        self._thread.join()
        self._listener.close()


def main() -> None:
    host, port, to_host, to_port, uid = sys.argv[1:]
    identity_of(True)  # so that everything it needs is loaded
    listener = socket.create_server((host, int(port)))
    become(int(uid))
    relay = TlsRelay((to_host, int(to_port)), takes_part=True, listener=listener)
    say(relay.address)
    for _ in sys.stdin:
        say({"connections": relay.connections, "seen": relay.seen.decode(errors="replace")})


if __name__ == "__main__":
    main()

"""A transport as a third party would write it: Unix sockets with names in a folder, through a relay.

It uses only public names. The relay records what passes. It can change data, as a man in the middle could, and delay
answers, as a network that loses packets does.
"""

import os
import secrets
import socket
import tempfile
import threading
import time

from rallypoint.rpc import ListenConfig, Reach, Transport


class Folder:
    """Listens in a folder of its own."""

    def __init__(self, config: ListenConfig) -> None:
        self._pid = os.getpid()
        self.address = os.path.join(
            tempfile.gettempdir(), f"{config.advertise}-{secrets.token_hex(4)}"
        )
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(self.address)
        self._sock.listen(128)
        self._sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> socket.socket:
        return self._sock.accept()[0]

    def source(self, sock: socket.socket) -> str:
        return "this host"

    def close(self) -> None:
        self._sock.close()
        if os.getpid() == self._pid and os.path.exists(self.address):
            os.unlink(self.address)


passed: list[bytes] = []
change: list[bytes] = []
# Seconds by which answers are delayed.
lags: list[float] = []


def connect(
    address: str | tuple[str, int], timeout: float | None, heartbeat: float
) -> socket.socket:
    there = socket.socket(socket.AF_UNIX)
    try:
        there.settimeout(timeout)
        there.connect(str(address))
        there.settimeout(None)
    except OSError:
        there.close()
        raise
    ours, theirs = socket.socketpair()
    for source, target in ((theirs, there), (there, theirs)):
        order = (source, target, source is there)
        threading.Thread(target=_relay, args=order, daemon=True).start()
    return ours


def _relay(source: socket.socket, target: socket.socket, is_back: bool) -> None:
    try:
        while data := source.recv(65536):
            passed.append(data)
            if is_back:
                time.sleep(sum(lags))
            for each in change:
                data = data.replace(each, each[::-1])
            target.sendall(data)
    except OSError:
        pass
    for each in (source, target):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


TRANSPORT = Transport(kind="folder", reach=Reach.HOST, listen=Folder, connect=connect)

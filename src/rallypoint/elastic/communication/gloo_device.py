"""A Gloo device, whose sockets can be shut from another thread.

Gloo has no way to abort a collective. But all sockets of a device are watched by one epoll instance, and Linux shows what an
epoll instance watches (proc(5), fdinfo). So these sockets can be found and shut down, including those that Gloo opens later, and
no others.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rallypoint._core import env as environment, linux, scheduling
from rallypoint.elastic import torch_private
from rallypoint.errors import ElasticError


# Seconds for a connection to a listener of this process.
KNOCKING = 1.0
# What Gloo's connecting side sends to name the pair: gloo/transport/tcp/listener.cc, sequence_number_t.
_PAIR = struct.Struct("=q")
_FIELD = re.compile(r"(\w+):\s*([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Watch:
    """One descriptor that an epoll instance watches.

    Args:
        fd: the descriptor.
        inode: of its file.
        events: the events it is watched for.
        data: what the instance reports with each event.
    """

    fd: int
    inode: int
    events: int
    data: int


class GlooDevice:
    """A Gloo device: a listener, and the thread that serves all its connections."""

    def __init__(self, interface: str = "") -> None:
        # Inodes, not descriptors: an older device may end meanwhile, and its descriptor numbers be reused. Another thread
        # may open sockets at the same moment, but only Gloo's epoll instance watches a listener as soon as it exists.
        before = _sockets()
        with scheduling.batch_threads():
            self.handle = torch_private.gloo_device(interface)
        new = _sockets() - before
        self._epolls = [
            epoll
            for epoll in _epolls()
            if any(each.inode in new and _listens(each.fd) for each in _watched(epoll))
        ]
        if not self._epolls:
            raise ElasticError(
                "Gloo's connections cannot be found in /proc/self/fdinfo, so they could not be shut after a loss"
            )

    def shut(self, pairs: int) -> None:
        """Shut all connections.

        Args:
            pairs: upper bound of the connections awaited. A member that dies while a group forms leaves the others waiting
                for its connection, which has no socket yet. So this process connects to itself in the member's place,
                with the number by which Gloo knows the pair, and closes that connection at once.
        """
        for epoll in self._epolls:
            for each in _watched(epoll):
                if (address := _shut(each)) is not None:
                    for number in range(pairs):
                        _knock(address, number)

    def quiet(self) -> None:
        """Report each connection's events only once (``EPOLLET``), after it was shut and Gloo has had time to notice.

        Gloo leaves data unread that has arrived for a collective which has failed meanwhile, and does not send what one still
        had to send. Its thread would be told of these connections again and again, and keep a core busy until the group is gone:
        for as long as the others need to replace a lost member. No group may be forming.
        """
        for epoll in self._epolls:
            for each in _watched(epoll):
                if _is_connected(each):
                    with suppress(OSError):  # closed meanwhile
                        linux.watch_edges(epoll, each.fd, each.events, each.data)


def devices() -> list[GlooDevice]:
    """The devices that torch would choose: the interfaces of ``GLOO_SOCKET_IFNAME``, else the address of this host's name."""
    names = environment.snapshot().get("GLOO_SOCKET_IFNAME", "")
    interfaces = [name for name in names.split(",") if name]
    return [GlooDevice(name) for name in interfaces] or [GlooDevice()]


def _epolls() -> list[int]:
    return [fd for fd, target in _open_files() if target == "anon_inode:[eventpoll]"]


def _sockets() -> set[int]:
    """The inodes of this process's sockets."""
    return {int(target[8:-1]) for _, target in _open_files() if target.startswith("socket:[")}


def _open_files() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # closed meanwhile


def _watched(epoll: int) -> list[Watch]:
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as file:
            return watched(file.read())
    except OSError:
        return []


def watched(text: str) -> list[Watch]:
    """What an epoll instance watches.

    Args:
        text: of ``/proc/PID/fdinfo/FD``: lines such as ``tfd: 6 events: 19 data: 5633 pos:0 ino:998a sdev:9``.
    """
    found = []
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        with suppress(KeyError, ValueError):
            numbers = (int(fields[name], 16) for name in ("ino", "events", "data"))
            found.append(Watch(int(fields["tfd"]), *numbers))
    return found


def _listens(fd: int) -> bool:
    with _copied(fd) as copy:
        return copy is not None and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut(watch: Watch) -> Any:
    """Shut a connected socket down. A listener stays open, as Gloo ends the process if it fails: returns its address."""
    with _copied(watch.fd) as copy:
        if copy is None or os.fstat(copy.fileno()).st_ino != watch.inode:
            return None  # closed meanwhile, and the descriptor may belong to another file
        try:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return copy.getsockname()
            # Gloo closes it once it has read everything. If it were not writable until then, Gloo would drop unsent data.
            copy.shutdown(socket.SHUT_RD)
        except OSError:
            pass  # closed by the peer
    return None


def _is_connected(watch: Watch) -> bool:
    """Whether it is a socket, still the same one, and no listener."""
    with _copied(watch.fd) as copy:
        return (
            copy is not None
            and os.fstat(copy.fileno()).st_ino == watch.inode
            and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )


def _knock(address: Any, number: int) -> None:
    """Connect to a listener of this process as one of the pairs that Gloo awaits, then close the connection."""
    try:
        with socket.create_connection(address[:2], timeout=KNOCKING) as knock:
            knock.sendall(_PAIR.pack(number))
    except OSError:
        pass  # the device has ended meanwhile


@contextmanager
def _copied(fd: int) -> Iterator[socket.socket | None]:
    """A duplicate of a socket's descriptor; None if it is not a socket, or closed."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with sock:
        yield sock

"""Asks what serves an endpoint, and answers while the store is still starting."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from rallypoint._core import addresses, forks
from rallypoint._core.clock import Deadline, milliseconds
from rallypoint.rendezvous.held_lines import HeldLines

from . import greeting
from .greeting import Door, Reply


# Seconds to wait for the answer to a second question, after a listener did not answer the greeting.
SECOND_TRY = 1.0
# Seconds after which another attempt to connect starts beside one that is still pending: the kernel takes a whole second
# to retransmit a lost packet (RFC 6298).
ANOTHER_TRY = 0.15


def greet(host: str, port: int, timeout: float, *, reach: float | None = None) -> Reply:
    """What serves the endpoint. Blocks for at most ``timeout`` seconds, plus the time of a name look-up.

    A stopped process still accepts connections, because its kernel does. c10d's client would then wait for its
    first answer without limit, and block other clients of this process from connecting elsewhere.

    Args:
        host: a name or an address.
        port: the port there.
        timeout: seconds for the connection, and for each part of the answer.
        reach: seconds for the connection, if fewer: a kernel answers at once, however busy its host is.
    """
    reply, line = enter(host, port, timeout, reach=reach)
    if line is not None:
        line.close()
    return reply


def enter(
    host: str, port: int, timeout: float, *, reach: float | None = None
) -> tuple[Reply, socket.socket | None]:
    """As :func:`greet`. If a store serves there, its client goes on with this connection: the greeting is what it begins with."""
    try:
        line = _connected(host.strip("[]"), port, timeout if reach is None else reach)
    except ConnectionRefusedError:
        return Reply(Door.REFUSED, "nothing listens there yet"), None
    except socket.gaierror as error:
        why = error.strerror or str(error)
        return Reply(Door.UNKNOWN, f"{host} has no address yet: {why}"), None
    except OSError as error:
        return Reply(Door.UNREACHED, error.strerror or str(error)), None
    answer = _answer(line, timeout)
    reply = greeting.SILENT if answer is None else greeting.read(answer)
    if answer == greeting.ECHO:
        return reply, line
    line.close()
    return reply, None


def _answer(line: socket.socket, timeout: float) -> bytes | None:
    """The answer to the greeting; None if none came in time."""
    line.settimeout(timeout)
    try:
        line.sendall(greeting.GREETING)
        return _receive(line)
    except TimeoutError:
        return None
    except OSError:
        return b""


def ask(host: str, port: int, timeout: float = SECOND_TRY) -> Reply:
    """What serves an endpoint that did not answer the greeting: asks a question that HTTP servers answer."""
    try:
        with addresses.connect(host, port, timeout) as sock:
            sock.sendall(greeting.QUESTION)
            answer = sock.recv(greeting.LONGEST_ANSWER)
    except OSError:
        return greeting.SILENT
    return greeting.read(answer) if answer else greeting.SILENT


def _connected(host: str, port: int, timeout: float) -> socket.socket:
    """As ``socket.create_connection``, but starts further attempts beside those that have had no answer yet."""
    failure = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        addresses.as_asked(host), port, type=socket.SOCK_STREAM
    ):
        make = partial(_new, family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            return _reached(make, address, Deadline(timeout))
        except OSError as error:
            failure = error
    raise failure


def _new(family: int, kind: int, protocol: int) -> socket.socket:
    """A socket of which forks get no copy: it may be the store's for a long time."""
    with forks.opening():
        return forks.close_in_child(socket.socket(family, kind, protocol))


def _reached(make: Callable[[], socket.socket], address: Any, deadline: Deadline) -> socket.socket:
    """A connection to one address.

    Raises:
        OSError: the connection was refused, or there is no route. TimeoutError: there was no answer.
    """
    poller, pause = select.poll(), ANOTHER_TRY
    begun: dict[int, socket.socket] = {}
    try:
        while not deadline.expired():
            sock = make()
            begun[sock.fileno()] = sock
            code = sock.connect_ex(address)
            if code not in {0, errno.EINPROGRESS}:
                raise OSError(code, os.strerror(code))
            poller.register(sock, select.POLLOUT)
            for fd, _ in poller.poll(milliseconds(min(pause, deadline.remaining() or 0.0))):
                code = begun[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                return begun.pop(fd)
            pause *= 2
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    finally:
        for each in begun.values():
            each.close()


def _receive(sock: socket.socket) -> bytes:
    """The four bytes of a known answer, or the start of an unknown one."""
    answer = b""
    while len(answer) < len(greeting.ECHO):
        more = sock.recv(greeting.LONGEST_ANSWER)
        if not more:
            break
        answer += more
    return answer


class Doorman:
    """Answers connections to a listening socket until the socket is handed on.

    A connection that sends the greeting is told that the store is starting; any other is closed.

    Args:
        listener: bound and listening.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rally-doorman", daemon=True)
        listener.setblocking(False)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def hand_on(self) -> socket.socket:
        """Stop answering. Returns the socket; new connections wait in its queue."""
        os.close(self._write)
        self._thread.join()
        os.close(self._read)
        self._listener.setblocking(True)
        return self._listener

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._read, 0)  # its other end is closed
        poller.register(self._listener, select.POLLIN)
        lines = HeldLines(self._listener, poller)
        while True:
            for fd, _ in lines.newcomers_last(poller.poll()):
                if fd == self._read:
                    lines.close()
                    return
                if fd == self._listener.fileno():
                    if not lines.accept():
                        select.select([self._read], [], [], 0.1)
                elif fd in lines:
                    self._reply(lines.take(fd))

    def _reply(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            if line.recv(64) == greeting.GREETING:
                line.sendall(greeting.STARTING)

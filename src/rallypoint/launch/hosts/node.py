"""``rally node``: a host's part of a job that another host's terminal started. Reads orders from standard input.

It watches the supervisor, which is a child, and the line to the terminal. Whatever happens to that line or to this
process, nothing is left behind: the supervisor gets SIGTERM and, after a moment, SIGKILL, and the fork server ends the
workers of a supervisor that is gone.
"""

from __future__ import annotations

import base64
import os
import select
import signal
import subprocess
import sys

from rallypoint._core import env as environment, linux, process, standard_streams
from rallypoint._core.clock import Deadline

from . import call_files, report_file
from .call_files import CallFiles
from .merging import told
from .orders import BEAT, PAUSE, SILENCE, Orders


# How long the supervisor may take to end once the terminal is gone, before it is killed.
_PATIENCE = 1.5
_MAX_ORDERS = 16 * 1024 * 1024
_PIECE = 24 * 1024


def command() -> int:
    """Run until the supervisor has ended. Returns its exit code."""
    line = _first_line()
    if line is None:
        return 1
    orders = Orders.from_line(line)
    _tell(told(orders.token, "started"))
    report_fd = report_file.make()
    files = _take_call(orders) if orders.answers else None
    code = _run(orders, report_fd, files)
    if files is not None:
        _tell_answer(orders.token, call_files.read(files.answer))
    end = report_file.read(report_fd)
    ended = told(
        orders.token, "ended", exit_code=code, report=end.report, troubles=list(end.troubles)
    )
    _tell(ended)
    return code


def _first_line() -> bytes | None:
    """Read byte by byte: what follows is for :func:`_take_call` and :func:`_watch`."""
    line = bytearray()
    while len(line) < _MAX_ORDERS:
        byte = os.read(0, 1)
        if not byte:
            return None
        if byte == b"\n":
            return bytes(line)
        line += byte
    return None


def _take_call(orders: Orders) -> CallFiles:
    call = linux.memfd_create("rally-call", 0) if orders.call_size else None
    left = orders.call_size
    while left:
        data = os.read(0, min(left, 1 << 20))
        if not data:
            raise SystemExit(1)  # the terminal is gone
        left -= len(data)
        while data and call is not None:
            data = data[os.write(call, data) :]
    return CallFiles(call=call, answer=call_files.make(), path=orders.path)


def _tell_answer(token: str, answer: bytes) -> None:
    """Send the answer in pieces: the terminal takes whole lines."""
    for at in range(0, len(answer), _PIECE):
        data = base64.b64encode(answer[at : at + _PIECE]).decode()
        _tell(told(token, "answer", data=data))


def _run(orders: Orders, report_fd: int, files: CallFiles | None) -> int:
    try:
        os.chdir(orders.folder)
    except OSError as error:
        _say(f"the working directory {orders.folder} is not on this host: {error.strerror}")
        return 2
    words, passed = list(orders.words), [report_fd]
    secret_fd = None
    if orders.secret is not None:
        secret_fd = _file_with(orders.secret.encode("utf-8", "surrogateescape"))
        words.insert(0, f"--secret-file=/dev/fd/{secret_fd}")
        passed.append(secret_fd)
    env = environment.snapshot() | dict(orders.env)
    env[report_file.VARIABLE] = str(report_fd)
    if files is not None:
        env |= files.in_environment()
        passed += files.descriptors
    me = os.getpid()
    child = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "run", *words],
        stdin=subprocess.DEVNULL,
        env=env,
        pass_fds=passed,
        start_new_session=True,
        preexec_fn=lambda: process.die_with_parent(me),  # there are no threads here
    )
    if secret_fd is not None:
        os.close(secret_fd)
    return _watch(child)


def _file_with(data: bytes) -> int:
    """A file in memory that nobody else may read. Opened through ``/dev/fd``, it starts at 0 each time."""
    fd = linux.memfd_create("rally-secret", 0)
    os.fchmod(fd, 0o600)
    os.write(fd, data)
    return fd


def _watch(child: subprocess.Popen[bytes]) -> int:
    pidfd = linux.pidfd_open(child.pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(0, select.POLLIN)
    heard = Deadline(SILENCE)
    try:
        while True:
            left = heard.remaining()
            ready = {fd for fd, _ in poller.poll(None if left is None else 1000 * left)}
            if pidfd in ready:
                return _code(child.wait())
            orders = os.read(0, 4096) if 0 in ready else b""
            if not orders:
                return _end(child)  # closed, or silent for too long
            heard = Deadline(SILENCE)
            for word in orders.split():
                if word in (BEAT, PAUSE):
                    heard = Deadline(None if word == PAUSE else SILENCE)
                else:
                    child.send_signal(int(word))
    finally:
        os.close(pidfd)


def _end(child: subprocess.Popen[bytes]) -> int:
    child.terminate()
    try:
        return _code(child.wait(_PATIENCE))
    except subprocess.TimeoutExpired:
        child.kill()
        return _code(child.wait())


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status


def _tell(line: bytes) -> None:
    try:
        sys.stdout.flush()
        while line:
            line = line[os.write(1, line) :]
    except OSError:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # nobody is left to tell


def _say(text: str) -> None:
    standard_streams.say(f"rally: {text}")

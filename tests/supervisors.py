"""`rally run` in a fork of a process that has imported it: less than starting Python for it.

Everything below the supervisor (fork server, workers) is started as ever.

    with Supervisors() as supervisors:
        code, out, err = supervisors.run(["--nproc-per-node", "2", "train.py"], cwd=folder, env=env)
        node = supervisors.start(words, cwd=folder, env=env)  # much like a Popen
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Self

from rallypoint._core import process


_SERVER = """\
import ctypes, importlib, json, os, runpy, signal, socket, sys
import rallypoint.launch.cli, rallypoint.launch.supervisor

line = socket.socket(fileno=int(sys.argv[1]))
for name in sys.argv[2:]:
    importlib.import_module(name)

def become(order, fds):
    line.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(3, max(fds) + 1)
    if order["net"]:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(order["net"]) as file:
            assert libc.setns(file.fileno(), 0x40000000) == 0, "CLONE_NEWNET"
        assert libc.unshare(0x04000000) == 0, "CLONE_NEWUTS"
        socket.sethostname(order["host"])
    if order["apart"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[0] = order["cwd"]  # as `python -m` has it
    sys.argv = ["rally", "run", *order["words"]]
    runpy.run_module("rallypoint", run_name="__main__", alter_sys=True)

while True:
    message, fds, _, _ = socket.recv_fds(line, 1 << 20, 3)
    if not message:
        break
    order = json.loads(message)
    pid = os.fork()
    if not pid and order["apart"]:
        pid = os.fork()  # its parent ends: it becomes the child of who reaps here
        if pid:
            line.send(json.dumps([pid]).encode())
            os._exit(0)
    if not pid:
        become(order, fds)
        os._exit(0)  # it exits by itself
    for fd in fds:
        os.close(fd)
    if not order["apart"]:
        line.send(json.dumps([pid]).encode())
    line.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
"""


class Supervisors:
    """A process that supervisors are forked from.

    Args:
        imports: what it imports beforehand, beside what `rally run` does.
        env: its variables, for what is read when it is imported.
    """

    def __init__(self, *imports: str, env: Mapping[str, str] | None = None) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno()), *imports],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(env or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._server.wait(240)

    def run(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdin: bytes = b"",
        stdout: int | None = None,
        timeout: float = 240.0,
    ) -> tuple[int, bytes, bytes]:
        """Run ``rally run WORDS``: its exit code (as of Popen), stdout and stderr.

        Args:
            stdout: a descriptor in place of the pipe; then nothing of it is returned.

        Raises:
            TimeoutError: it did not end in time, and was killed.
        """
        stdin_end, to = os.pipe()
        from_stdout, stdout_end = os.pipe() if stdout is None else (-1, stdout)
        from_stderr, stderr_end = os.pipe()
        order = _order(words, cwd, env)
        ends = [stdin_end, stdout_end, stderr_end]
        socket.send_fds(self._line, [json.dumps(order).encode()], ends)
        for end in ends:
            if end != stdout:
                os.close(end)
        self._line.settimeout(timeout)
        with ThreadPoolExecutor(3) as pool:
            pool.submit(_feed, to, stdin)
            out, err = pool.submit(_read, from_stdout), pool.submit(_read, from_stderr)
            (pid,) = json.loads(self._line.recv(1 << 10))
            try:
                code = json.loads(self._line.recv(1 << 10))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise
            return code, out.result(), err.result()

    def start(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        net: str = "",
        host: str = "",
        files: tuple[int, int] | None = None,
    ) -> Forked:
        """Begin ``rally run WORDS`` in a session of its own, as a child of this process.

        Args:
            net: path of a network namespace; ``host``: its host name there.
            files: its stdout and stderr; else stderr is a pipe, and stdout goes nowhere.
        """
        null = os.open(os.devnull, os.O_RDWR)
        from_stderr, stderr_end = os.pipe() if files is None else (-1, -1)
        stdout, stderr = files or (null, stderr_end)
        was_subreaper = process.is_subreaper()
        process.set_subreaper(True)
        try:
            order = _order(words, cwd, env) | {"apart": True, "net": net, "host": host}
            socket.send_fds(self._line, [json.dumps(order).encode()], [null, stdout, stderr])
            (pid,) = json.loads(self._line.recv(1 << 10))
            assert json.loads(self._line.recv(1 << 10)) == 0
        finally:
            process.set_subreaper(was_subreaper)
            os.close(null)
            if files is None:
                os.close(stderr_end)
        return Forked(pid, os.fdopen(from_stderr, "rb") if files is None else None)


class Forked:
    """A child of this process, with the methods of a Popen that tests need."""

    def __init__(self, pid: int, stderr: BinaryIO | None) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            fd = os.pidfd_open(self.pid)
            try:
                select.select([fd], [], [], timeout)
            finally:
                os.close(fd)
            if self.poll() is None:
                raise subprocess.TimeoutExpired("rally run", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def shared() -> Supervisors:
    """One for all tests of this process."""
    made = Supervisors()
    atexit.register(made.__exit__)
    return made


def may_be_forked(env: Mapping[str, str]) -> bool:
    """Whether none of these variables is read when Python or torch starts."""
    return not any(name.startswith(("PYTHON", "TORCH_CPP", "LD_")) for name in env)


def _order(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> dict[str, object]:
    place = {"cwd": str(cwd), "env": dict(env), "words": list(words)}
    return place | {"apart": False, "net": "", "host": ""}


def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as file:
        file.write(data)


def _read(fd: int) -> bytes:
    if fd < 0:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()

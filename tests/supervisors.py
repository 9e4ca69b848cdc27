"""`rally run` in a fork of a process that has imported it: a fifth of a second less than starting Python for it.

Everything below the supervisor (fork server, workers) is started as ever.

    with Supervisors() as supervisors:
        code, out, err = supervisors.run(["--nproc-per-node", "2", "train.py"], cwd=folder, env=env)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self


_SERVER = """\
import json, os, runpy, signal, socket, sys
import rallypoint.launch.cli, rallypoint.launch.supervisor

line = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, fds, _, _ = socket.recv_fds(line, 1 << 20, 3)
    if not message:
        break
    order = json.loads(message)
    pid = os.fork()
    if not pid:
        line.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, max(fds) + 1)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        sys.path[0] = order["cwd"]  # as `python -m` has it
        sys.argv = ["rally", "run", *order["words"]]
        runpy.run_module("rallypoint", run_name="__main__", alter_sys=True)
        os._exit(0)  # it exits by itself
    for fd in fds:
        os.close(fd)
    line.send(json.dumps([pid]).encode())
    line.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
"""


class Supervisors:
    """A process that supervisors are forked from, one at a time."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
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
        order = {"cwd": str(cwd), "env": dict(env), "words": list(words)}
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


def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as file:
        file.write(data)


def _read(fd: int) -> bytes:
    if fd < 0:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()

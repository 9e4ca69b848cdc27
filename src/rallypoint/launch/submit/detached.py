"""The first host's side of ``rally submit ssh``: starts a job that continues on its own, and shows its output.

There are three processes: one shows the output until the connection or the job ends; a keeper, in a session of its own,
waits for the job and notes how it ended; the third is the job, `rally run --hosts`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from rallypoint._core import addresses, env as environment, linux, private, standard_streams

from .ssh import DetachedOrders


# Seconds between two looks at the output.
_INTERVAL = 0.25
_OUTPUT, _PID, _EXIT_CODE = "output", "pid", "exit-code"


def command(words: Sequence[str]) -> int:
    """Start the job that standard input describes, and show its output. Returns its exit code."""
    if words:
        return _keep(Path(words[0]))
    told = DetachedOrders.from_line(sys.stdin.buffer.readline())
    env = environment.snapshot() | dict(told.env)
    if not os.path.isdir(told.folder):
        _say(f"the working directory {told.folder} is not on this host")
        return 2
    folder = _state_folder(env) / f"{told.name}-{uuid.uuid4().hex[:8]}"
    try:
        private.make_folder(folder)
    except OSError as error:
        _say(
            f"cannot make {folder}: {error.strerror}; set XDG_STATE_HOME on this host to a writable folder"
        )
        return 2
    output = private.open_to_append(folder / _OUTPUT)
    keeper = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "submit", "--detached", str(folder)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=told.folder,
        env=env,
        start_new_session=True,
    )
    os.close(output)
    assert keeper.stdin is not None
    with keeper.stdin:
        keeper.stdin.write(json.dumps(list(told.words)).encode())
    _say(f"the job goes on without this terminal; its output is in {folder / _OUTPUT}")
    _say(f"to end it: ssh {addresses.hostname()} 'kill $(cat {folder / _PID})'")
    return _follow(keeper, folder)


def _state_folder(env: dict[str, str]) -> Path:
    state = env.get("XDG_STATE_HOME") or f"{Path.home()}/.local/state"
    return Path(state, "rallypoint", "jobs")


def _keep(folder: Path) -> int:
    words = json.load(sys.stdin)
    job = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "run", *words], stdin=subprocess.DEVNULL
    )
    private.write_text(folder / _PID, f"{job.pid}\n")
    status = job.wait()
    private.write_text(folder / _EXIT_CODE, f"{status if status >= 0 else 128 - status}\n")
    return 0


def _follow(keeper: subprocess.Popen[bytes], folder: Path) -> int:
    poller = select.poll()
    pidfd = linux.pidfd_open(keeper.pid)
    poller.register(pidfd, select.POLLIN)
    poller.register(1, 0)  # only errors: nobody reads any longer
    ended = False
    with open(folder / _OUTPUT, "rb") as file:
        while True:
            while data := file.read(65536):
                sys.stdout.buffer.write(data)
            sys.stdout.flush()
            if ended:
                break
            ready = [fd for fd, _ in poller.poll(1000 * _INTERVAL)]
            if 1 in ready:
                return 1
            ended = pidfd in ready
    os.close(pidfd)
    keeper.wait()
    try:
        return int((folder / _EXIT_CODE).read_text())
    except (OSError, ValueError):
        return 1  # the keeper was killed


def _say(text: str) -> None:
    standard_streams.say(f"rally: {text}")

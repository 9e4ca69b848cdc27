"""How a worker shows where it is: its stacks on a signal, without Python's help; its collectives, when asked."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import socket


# Asks a process for its stacks; no other use of this signal is known.
STACK_SIGNAL = signal.SIGRTMIN + 22
# Ask the thread of this name, if there is one, for the worker's last collectives, how many it has started, when it entered
# them, where its main thread is, or the memory of its devices (:func:`question`). The answer is a line of JSON.
ASK_COLLECTIVES, ASK_BEGUN, ASK_ENTERED, ASK_PLACE = b"?", b"#", b"@", b"^"
ASK_DEVICES = b"$"
# Has it record what the process does: followed by JSON and a newline (:mod:`rallypoint.launch.worker.profiling`).
PROFILE = b"*"
THREAD = "rally-line"
# In an answer: the number of the question.
TO = "to"
_NUMBER = re.compile(rb"(\d+);")
# Bytes of stacks that a pipe holds: some 3,000 frames. All pipes of a user may hold 64 MiB.
_ROOM = 256 << 10


def answer(fd: int) -> None:
    """In a worker: write the stacks of all threads here on each :data:`STACK_SIGNAL`. Forked children inherit that.

    The handler is C code. It needs no GIL, and interrupted system calls are restarted where the kernel can.
    """
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


def question(kind: bytes, number: int) -> bytes:
    """One of the questions above. Its number tells the answer from a late one to an earlier question."""
    return kind + b"%d;" % number


def last_number(asked: bytes) -> int:
    """The number of the last of these questions."""
    numbers = _NUMBER.findall(asked)
    return int(numbers[-1]) if numbers else 0


def pipe() -> tuple[int, int]:
    """The supervisor's end of a pipe for stacks, and the worker's. Neither blocks: a worker must not wait for a reader.

    A pipe, because faulthandler writes word by word. A socket keeps each of them in a buffer of its own, and is full
    after a few dozen frames.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # Fails if this user has many pipes. The usual 64 KiB are enough for most processes.
    with contextlib.suppress(OSError):
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _ROOM)
    return ours, theirs


def line() -> tuple[int, int]:
    """The supervisor's end of a socket for questions, and the worker's. Neither blocks."""
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    return ours.detach(), theirs.detach()

"""How a worker shows its stacks without Python's help: a signal, and a pipe that the answer is written to."""

from __future__ import annotations

import faulthandler
import os
import signal


# Asks a process for its stacks; no other use of this signal is known.
STACK_SIGNAL = signal.SIGRTMIN + 22


def answer(fd: int) -> None:
    """In a worker: write the stacks of all threads here whenever :data:`STACK_SIGNAL` comes. Forked children inherit that.

    The handler is C code. It needs no GIL, and interrupted system calls are restarted where the kernel can.
    """
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)


def pipe() -> tuple[int, int]:
    """A pipe for stacks: reading end, writing end. Neither blocks: a worker must not wait for a reader that is not there."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

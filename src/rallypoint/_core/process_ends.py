"""Descriptors that tell the end of a process, where the kernel has no pidfds.

That is Linux before 5.3, and a container whose seccomp profile refuses them. Each descriptor is the reading end of a pipe. For the
calling process, the kernel closes the other end when the process ends. For any other, a thread looks into /proc fifty times
a second, since the kernel tells the end of a process to nobody but its parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading

from . import forks, proc_stat


# Seconds between two looks.
PAUSE = 0.02
_ENDED = frozenset("ZXx")


class _Pipe:
    """A pipe, the writing end of which no other process has."""

    def __init__(self) -> None:
        with forks.opening():
            self.reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            forks.close_in_child(self)

    def fileno(self) -> int:
        return self._writing

    def tell(self) -> None:
        """Make the reading end readable."""
        try:
            os.write(self._writing, b".")
        except BrokenPipeError:
            pass  # it is closed

    def close(self) -> None:
        # Forgotten first: a fork meanwhile must not close whatever has the number by then.
        writing, self._writing = self._writing, -1
        if writing >= 0:
            os.close(writing)


_lock = forks.Lock()
# Under the lock:
_own: _Pipe | None = None  # tells this process's end
_wake: tuple[int, int] | None = None  # a pipe that wakes the thread, if it runs
_watched: dict[_Pipe, tuple[int, int]] = {}  # pids, and when the processes started


def descriptor(pid: int) -> int:
    """A descriptor that is readable once the process has ended, or, of this process itself, has all but ended. Not inherited.

    Raises:
        OSError: there is no such process, or no descriptor or thread is left.
    """
    global _own  # noqa: PLW0603  of this process
    forks.call_in_child(_forget)
    if pid == os.getpid():
        with _lock:
            if _own is None:
                _own = _Pipe()
            return os.dup(_own.reading)
    started = proc_stat.started(pid)
    if not started:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    pipe = _Pipe()
    if _has_ended(pid, started):
        pipe.tell()
        pipe.close()
        return pipe.reading
    with _lock:
        _watched[pipe] = pid, started
        try:
            _wake_thread()
        except OSError:
            del _watched[pipe]
            pipe.close()
            os.close(pipe.reading)
            raise
    return pipe.reading


def _wake_thread() -> None:
    """Have the thread look; start it if it does not run."""
    global _wake  # noqa: PLW0603  of this process
    if _wake is not None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread will look
            os.write(_wake[1], b".")
        return
    with forks.opening():
        _wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        threading.Thread(target=_run, args=_wake, name="rally-process-ends", daemon=True).start()
    except RuntimeError as error:
        _close_wake()
        raise OSError(errno.EAGAIN, str(error)) from None


def _run(reading: int, _: int) -> None:
    while True:
        with _lock:
            if not _watched:
                _close_wake()
                return
            watched = dict(_watched)
        poller = select.poll()
        poller.register(reading, select.POLLIN)
        by_fd = {pipe.fileno(): pipe for pipe in watched}
        for fd in by_fd:
            poller.register(fd, 0)  # an error is reported once the reading end is closed
        done = set()
        for fd, _ in poller.poll(PAUSE * 1000):
            if fd == reading:
                os.read(reading, 4096)
            else:
                done.add(by_fd[fd])
        for pipe in [each for each, who in watched.items() if _has_ended(*who)]:
            pipe.tell()
            done.add(pipe)
        with _lock:
            for pipe in done:
                del _watched[pipe]
                pipe.close()


def _close_wake() -> None:
    global _wake
    fds, _wake = _wake, None  # forgotten first, as above
    for fd in fds or ():
        os.close(fd)


def _has_ended(pid: int, started: int) -> bool:
    found = proc_stat.fields(pid)
    return not found or found[0] in _ENDED or int(found[19]) != started


def _forget() -> None:
    """In a forked child: what is watched is its parent's."""
    global _own  # noqa: PLW0603  of this process
    if _own is not None:
        os.close(_own.reading)
    _own = None
    _watched.clear()
    _close_wake()

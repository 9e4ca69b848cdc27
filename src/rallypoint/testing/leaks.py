"""What a piece of code leaves behind in its process: descriptors, threads, children, shared memory.

[Note: Waiting]
Some of it ends shortly after the code that used it, such as a thread that was told to stop, or a killed child. So threads
are joined and children waited for, up to the time allowed. Descriptors and shared memory are checked once, after a
garbage collection.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator

from rallypoint._core import linux, process
from rallypoint._core.clock import Deadline


_SHARED = (b"/dev/shm/", b"/memfd:")


class Leak(AssertionError):
    """Something is left behind; the message names each thing."""


@contextlib.contextmanager
def no_leaks(
    patience: float = 5.0, *, ignore: Callable[[str], bool] | None = None
) -> Iterator[None]:
    """Check that a block leaves nothing in this process that was not there before.

    Checks open descriptors, threads (daemons as well), child processes, and shared memory
    (files in ``/dev/shm`` that this process has mapped, and anonymous memory files). Blocks until threads and children
    have ended, for at most ``patience``.

    Args:
        patience: seconds that threads and child processes have to end.
        ignore: called with the description of each thing left behind; returns true for what may stay.

    Yields:
        Nothing.

    Raises:
        Leak: something is left behind. Not raised if the block raises.
    """
    may_stay = ignore or (lambda _: False)
    imported = "torch.distributed" in sys.modules
    if imported:
        _open_what_stays()
    before = _holdings()
    known = set(threading.enumerate()), set(process.children(os.getpid()))
    yield
    new = {what: target for what, target in _holdings().items() if what not in before}
    threads = set(threading.enumerate()) - known[0]
    children = set(process.children(os.getpid())) - known[1]
    if not (new or threads or children):
        return
    deadline = Deadline(patience)
    for thread in threads:
        if not may_stay(_of_thread(thread)):
            thread.join(deadline.remaining())
    for pid in children:
        if not may_stay(_of_child(pid)):
            _wait_for_end(pid, deadline)
    gc.collect()
    left = [target for what, target in _holdings().items() if what not in before]
    left += [_of_thread(each) for each in threads if each.is_alive()]
    left += [_of_child(pid) for pid in children if process.is_running(pid)]
    if not imported and "torch.distributed" in sys.modules:
        left = _without_a_pipe(left)
    left = sorted(each for each in left if not may_stay(each))
    if left:
        raise Leak(f"left behind: {'; '.join(left)}")


@functools.cache
def _open_what_stays() -> None:
    """The first c10d store of a process opens a pipe that stays: libuv's, for signals, shared by all event loops."""
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available():
        distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _without_a_pipe(left: list[str]) -> list[str]:
    """Leave out both ends of one pipe. The block has imported torch, so it may have opened the pipe that stays."""
    ends: dict[str, list[str]] = {}
    for each in left:
        ends.setdefault(each.rpartition(" of ")[2], []).append(each)
    for target, both in ends.items():
        if target.startswith("pipe:") and len(both) == 2:
            return [each for each in left if each not in both]
    return left


def _of_thread(thread: threading.Thread) -> str:
    return f"thread {thread.name}"


def _of_child(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "ended"
    return f"child process {pid} ({command[:80]})"


def _wait_for_end(pid: int, deadline: Deadline) -> None:
    try:
        pidfd = linux.pidfd_open(pid)
    except OSError:
        return
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll((deadline.remaining() or 0.0) * 1000)
    finally:
        os.close(pidfd)


def _holdings() -> dict[tuple[str, str], str]:
    """Descriptors and shared memory: a unique key for each, and how to name it."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one used for reading the list
            continue
        found["descriptor", f"{fd} {target}"] = f"descriptor {fd} of {target}"
    with open("/proc/self/maps", "rb") as file:
        maps = file.read()
    # Most processes have none of these, and hundreds of other lines.
    if any(b" " + start in maps for start in _SHARED):
        for line in maps.splitlines():
            path = line.split(maxsplit=5)[-1].strip()
            if path.startswith(_SHARED):
                inode, name = line.split(maxsplit=5)[4].decode(), path.decode(errors="replace")
                found["memory", f"{inode} {name}"] = f"shared memory {name}"
    return found

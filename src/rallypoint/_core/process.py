"""Processes on Linux: trees, parent-death signals, subreapers, through ``prctl`` and ``/proc``."""

from __future__ import annotations

import ctypes
import functools
import glob
import mmap
import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rallypoint._core import clock, linux, proc_stat


# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
# In the command lines of processes that remove what others have left: multiprocessing's, loky's, torch's.
_CLEANERS = (b"resource_tracker import main", b"torch_shm_manager")
# How long they may wait once the others are gone. The end of a pipe tells them, within milliseconds.
_CLEAN_UP = 0.5


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def die_with_parent(parent: int) -> None:
    """Make the kernel SIGKILL this process when its parent ends. Call it early in the child.

    Args:
        parent: the expected parent's pid; if another one is the parent, the expected one has died, and this process exits.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def live_without_parent() -> None:
    """Undo :func:`die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(0))


def is_subreaper() -> bool:
    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def set_subreaper(on: bool) -> None:
    """Adopt orphaned descendants: daemons and double forks become our children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(int(on)))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process a subreaper within a block. Blocks of several threads may overlap."""
    held = _adoption
    with held.lock:
        if held.pid != os.getpid():  # a fork does not inherit the attribute
            held.pid, held.blocks = os.getpid(), 0
        if held.blocks == 0:
            held.before = is_subreaper()
            set_subreaper(True)
        held.blocks += 1
    try:
        yield
    finally:
        with held.lock:
            held.blocks -= 1
            if held.blocks == 0:
                set_subreaper(held.before)


@dataclass(slots=True)
class _Adoption:
    """Counts the blocks that need this process to be a subreaper, which is an attribute of the process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pid: int = 0
    blocks: int = 0
    before: bool = False


_adoption = _Adoption()


def is_proc_mounted() -> bool:
    """Whether there is a ``/proc``, without which no process is found here."""
    return os.path.exists("/proc/self/stat")


def is_proc_ours() -> bool:
    """Whether ``/proc`` numbers processes as this process does: in an outer pid namespace, its numbers are those of others here."""
    return os.readlink("/proc/self") == str(os.getpid())


def children(pid: int) -> list[int]:
    """The direct children of a process, including zombies; empty if it is gone."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found  # the last: another user's (a set-uid program), and /proc hides those
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found.extend(int(word) for word in file.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return _children_by_scan(pid)  # a kernel without CONFIG_PROC_CHILDREN
        except (ProcessLookupError, PermissionError):
            continue
    return found


def ancestors() -> list[list[str]]:
    """Command lines of this process's ancestors, nearest first, up to the first that cannot be read."""
    found: list[list[str]] = []
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found.append(os.fsdecode(file.read()).rstrip("\0").split("\0"))
        except OSError:
            break
        fields = proc_stat.fields(pid)
        pid = int(fields[1]) if fields else 0
    return found


def find_command(name: str, variable: str, value: str) -> list[str] | None:
    """The command line of a process of this user on this machine.

    Args:
        name: its program, without folders.
        variable: a variable of its environment.
        value: the variable's value.
    Returns:
        Its words; None if there is no such process.
    """
    wanted = os.fsencode(f"{variable}={value}")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = os.fsdecode(file.read()).rstrip("\0").split("\0")
            if words[0].rpartition("/")[2] != name:
                continue
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    return words
        except OSError:
            continue  # it has ended, or belongs to another user
    return None


def _children_by_scan(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = proc_stat.fields(int(name))
            if stat and int(stat[1]) == pid:
                found.append(int(name))
    return found


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    return _has_signal(f"/proc/{pid}/status", "SigCgt:", number)


def is_pending(pid: int, number: int) -> bool:
    """Whether this signal was sent to the process, and no thread has taken it yet."""
    return _has_signal(f"/proc/{pid}/status", "ShdPnd:", number)


def blocking(pid: int, number: int) -> frozenset[int]:
    """The ids of the process's threads that block this signal. One that is in the signal's handler does, too."""
    try:
        tids = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    return frozenset(
        int(tid) for tid in tids if _has_signal(f"/proc/{pid}/task/{tid}/status", "SigBlk:", number)
    )


def _has_signal(path: str, name: str, number: int) -> bool:
    """Whether the set of signals of this name, in a status file below /proc, has the signal."""
    try:
        with open(path, errors="replace") as file:
            lines = [line for line in file if line.startswith(name)]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return bool(lines) and bool(int(lines[0].split()[1], 16) >> (number - 1) & 1)


def has_thread(pid: int, name: str) -> bool:
    """Whether the process has a thread of this name."""
    for path in glob.iglob(f"/proc/{pid}/task/*/comm"):
        try:
            with open(path, errors="replace") as file:
                if file.read().rstrip("\n") == name:
                    return True
        except OSError:
            continue  # it has just ended
    return False


def is_running(pid: int) -> bool:
    """False if the process is gone or a zombie."""
    if fields := proc_stat.fields(pid):
        return fields[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # another user's, and /proc hides those
    except OSError:
        pass
    return False


def state(pid: int) -> str:
    """The process's state letter from /proc (R, S, D, T, t, Z …); empty if it is gone."""
    fields = proc_stat.fields(pid)
    return fields[0] if fields else ""


def descendants(pid: int, keep: Iterable[int] = ()) -> list[int]:
    """The running descendants of ``pid``, parents first, without ``keep`` and their descendants."""
    kept = set(keep)
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children(queue.pop(0)):
            if child in kept:
                continue
            queue.append(child)
            if is_running(child):
                found.append(child)
    return found


def marked_processes(marker: bytes, exclude: Iterable[int]) -> list[int]:
    """Running processes of this user that were started with ``marker`` in their environment.

    Finds the orphans of a killed fork server if the caller has other children.
    """
    left_out = set(exclude)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in left_out:
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = marker in file.read().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if marked and is_running(int(name)):
            found.append(int(name))
    return found


def leave_mark(marker: str) -> None:
    """Mark this process and its forks with ``marker``, for :func:`bears_mark`.

    A fork cannot change its environment in /proc, which is the one its program was started with. So
    the mark is the name of a mapped, empty memory file: /proc shows it, and forks inherit the mapping.
    """
    fd = linux.memfd_create(marker, linux.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    _marks.append(mmap.mmap(fd, mmap.PAGESIZE))
    os.close(fd)


_marks: list[mmap.mmap] = []


def bears_mark(pid: int, marker: bytes) -> bool:
    """Whether a process has, or has inherited, a mark of :func:`leave_mark`."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return b"/memfd:" + marker in file.read()
    except OSError:  # it is gone, or another user's
        return False


def marked_in_memory(marker: bytes, since: int) -> list[int]:
    """Running processes that bear a mark of :func:`leave_mark`, wherever in the tree they are.

    Args:
        marker: the mark.
        since: when the first of them started (:func:`started`); older ones are not looked at.
    """
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if proc_stat.started(pid) >= since
        and pid != os.getpid()
        and bears_mark(pid, marker)
        and is_running(pid)
    ]


def reap(pids: Iterable[int], patience: float = 0.0) -> None:
    """Reap the children among ``pids`` that end within ``patience`` seconds."""
    deadline = clock.Deadline(patience)
    for pid in pids:
        try:
            pidfd = linux.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if poller.poll((deadline.remaining() or 0.0) * 1000):
                os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass  # not a child, or reaped by a waitpid(-1)
        finally:
            os.close(pidfd)


def io_priority() -> int | None:
    """Class and level of this process's I/O, as ``ionice`` sets them (ioprio_get(2)). None: not known here."""
    number = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
    return None if number is None else int(ctypes.CDLL(None).syscall(number, 1, 0))


def cleans_up(pid: int) -> bool:
    """Whether a process removes what others leave behind (shared memory, named semaphores) once these have ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
    except OSError:
        return False
    return any(each in words for each in _CLEANERS)


class Ending:
    """Which processes to kill, and when. Those that clean up after others get a moment once the others have ended: otherwise
    what was shared stays in /dev/shm forever.

    Args:
        patience: seconds for those that are at work, or have only started and want a CPU; half a second for idle ones.
    """

    def __init__(self, patience: float) -> None:
        self._most = patience
        self._end: clock.Deadline | None = None
        self._waits: clock.Deadline | None = None

    def due(self, pids: Iterable[int]) -> list[int]:
        """Those to kill now.

        Args:
            pids: all that are left.
        """
        left = list(pids)
        users = [pid for pid in left if not cleans_up(pid)]
        if users or not left:
            self._end = self._waits = None
            return users
        if self._end is None:
            self._end = clock.Deadline(self._most)
        if self._waits is None or any(state(pid) in ("R", "D") for pid in left):
            self._waits = clock.Deadline(_CLEAN_UP)
        return left if self._end.expired() or self._waits.expired() else []


def send(pids: Iterable[int], number: int) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            pass  # a set-uid child; the parent-death signal does not reach it either


def wake(pids: Iterable[int]) -> None:
    """Continue these processes and their descendants, if stopped: a signal that was sent to them takes effect only then."""
    for pid in pids:
        send([each for each in (pid, *descendants(pid)) if state(each) == "T"], signal.SIGCONT)


def set_title(text: str) -> None:
    """Show ``text`` as this process's command line, so that ``ps`` and ``pgrep -f`` find the script.

    Otherwise a fork shows its parent's command line. The kernel reads the command line from the
    process's memory (``arg_start`` to ``arg_end`` in /proc/self/stat), which we may write. If its last
    byte is not zero, the kernel shows only the text before the first zero, so the padding is hidden.
    Longer texts are cut.
    """
    start, size = _place_of_arguments()
    if size > 2:
        _arguments()  # before they are gone
        data = os.fsencode(text).replace(b"\0", b" ")[: size - 2]
        ctypes.memmove(start, data.ljust(size - 1, b"\0") + b".", size)


def set_title_as_arguments(text: str) -> None:
    """Show ``text``, in a memory that looks like the arguments that this process has been started with.

    The package ``setproctitle`` writes where it finds those: as many strings before the first variable, of which the first is the
    interpreter's name. Blanks that fill the rest are visible, unlike after :func:`set_title`.
    """
    start, size = _place_of_arguments()
    name, *rest = _arguments().split(b"\0")[:-1] or [b""]
    room = size - len(name) - len(rest) - 1
    if rest and room > 0:
        data = os.fsencode(text).replace(b"\0", b" ").partition(b" ")[2][:room]
        ends = b"\0" * len(rest)
        ctypes.memmove(start, name + b"\0" + data.ljust(room) + ends, size)


@functools.cache
def _arguments() -> bytes:
    """Those that this process, or the one that it is a fork of, was started with, as in /proc/PID/cmdline. Kept from the first call on."""
    return ctypes.string_at(*_place_of_arguments())


def _place_of_arguments() -> tuple[int, int]:
    """Where they are in the memory of this process, and their size; (0, 0) if that is unknown."""
    fields = proc_stat.fields(os.getpid())
    if len(fields) < 47 or int(fields[45]) <= 0:
        return 0, 0
    return int(fields[45]), int(fields[46]) - int(fields[45])

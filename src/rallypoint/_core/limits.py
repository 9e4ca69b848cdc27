"""The system's limits for processes, and messages that say which one was reached."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping
from pathlib import Path


# Descriptors that a supervisor needs for each worker, at least: its line, its stacks and the socket for questions.
FILES_PER_WORKER = 3
# Private memory of a fork of a Python process with torch, at least.
MEMORY_PER_WORKER = 8 << 20
# The most processes that Linux allows on 64-bit machines (include/linux/threads.h).
PID_MAX_LIMIT = 4 * 1024 * 1024
# How /proc/PID/limits begins the line of RLIMIT_CPU.
_CPU_TIME = "Max cpu time"


def explain(error: BaseException) -> str | None:
    """A sentence about the limit behind an error, with its value and the next step; None if there is no such limit."""
    if isinstance(error, RuntimeError):
        return _too_many_processes() if "can't start new thread" in str(error) else None
    if not isinstance(error, OSError):
        return None
    match error.errno:
        case errno.EMFILE:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            more = f"ulimit -n {hard}" if hard > soft else "its hard limit has to be raised"
            return f"no more than {soft} files may be open in a process (RLIMIT_NOFILE): {more}"
        case errno.ENFILE:
            return "the system has no room for more open files (fs.file-max): raise it with sysctl"
        case errno.EFBIG if (most := file_size()) is not None:
            return f"no file may be larger than {most} bytes, also in memory (RLIMIT_FSIZE): raise it with ulimit -f"
        case errno.EAGAIN if not error.filename:
            return _too_many_processes()
        case _:
            return None


def file_size() -> int | None:
    """The most bytes that a file which this process writes may have, also a file in memory; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def working_directory() -> str | None:
    """Why the working directory cannot be used, or None."""
    try:
        os.getcwd()
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        return "it has been deleted" if gone else f"cannot be used: {error.strerror}"
    return None


def most_processes() -> tuple[int, str]:
    """The tightest limit on the number of processes, and its name."""
    found = [(_number("/proc/sys/kernel/pid_max"), "kernel.pid_max")]
    found.append((_number("/proc/sys/kernel/threads-max"), "kernel.threads-max"))
    found += [(limit, str(path)) for limit, _, path in _pid_cgroups()]
    if os.geteuid() != 0:  # root is exempt
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        found.append((None if soft == resource.RLIM_INFINITY else soft, "RLIMIT_NPROC, ulimit -u"))
    known = ((limit, name) for limit, name in found if limit is not None)
    # Without /proc, the kernel's own bound is what is left.
    return min(known, default=(PID_MAX_LIMIT, "PID_MAX_LIMIT"))


def why_not(workers: int) -> str | None:
    """Why this machine cannot run that many workers at all, or None."""
    most, name = most_processes()
    if workers >= most:
        return f"no more than {most} processes may run here ({name})"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = workers * FILES_PER_WORKER
    if hard != resource.RLIM_INFINITY and files > hard:
        return f"workers need {files} open files, and no more than {hard} are allowed (RLIMIT_NOFILE, ulimit -Hn)"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if workers * MEMORY_PER_WORKER > memory:
        need = workers * MEMORY_PER_WORKER >> 30
        return f"workers need at least {need} GiB of memory, and this machine has {memory >> 30}"
    return None


def allow_open_files() -> int | None:
    """Raise the soft limit on open files to the hard limit. Returns the old soft limit if it was lower, else None."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def limit_open_files(soft: int) -> None:
    """Undo :func:`allow_open_files`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _too_many_processes() -> str:
    for limit, current, path in _pid_cgroups():
        if current >= limit - 1:
            return _of_cgroup(limit, path)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:
        return (
            f"user {os.geteuid()} may run no more than {soft} processes and threads"
            " (RLIMIT_NPROC): raise it with ulimit -u, or start fewer workers"
        )
    most, name = most_processes()
    return f"no further process can be started (at most {most}: {name}): start fewer workers"


def _of_cgroup(limit: int | None, path: str | Path) -> str:
    return (
        f"no more than {limit} processes and threads may run in this cgroup ({path}):"
        " raise that (systemd TasksMax=, docker --pids-limit), or start fewer workers"
    )


def refused_starts() -> dict[str, int]:
    """How many processes and threads each limit of our cgroups has refused so far, by the limit's file."""
    found = {}
    for _, _, path in _pid_cgroups():
        try:
            words = path.with_name("pids.events").read_text().split()
        except OSError:
            continue
        if len(words) == 2 and words[0] == "max":
            found[str(path)] = int(words[1])
    return found


def explain_refusal(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """A sentence if a limit has refused a process or thread between the two readings of :func:`refused_starts`, else None."""
    for path, count in after.items():
        if count > before.get(path, count):
            return _of_cgroup(_number(path), path)
    return None


def _pid_cgroups() -> list[tuple[int, int, Path]]:
    """Limit, current number of processes, and file, of our cgroup and its ancestors."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        base = Path("/sys/fs/cgroup")
        if controllers == "pids":
            base /= "pids"
        elif controllers:
            continue
        folder = base / name.lstrip("/")
        for each in (folder, *folder.parents):
            limit, current = _number(each / "pids.max"), _number(each / "pids.current")
            if limit is not None and current is not None:
                found.append((limit, current, each / "pids.max"))
            if each == base:
                break
    return found


def _number(path: str | Path) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None


def cpu_seconds(pid: int) -> tuple[int | None, int | None]:
    """The soft and the hard limit of a process's CPU time, in seconds; None where it has none. A zombie's can still be read."""
    try:
        with open(f"/proc/{pid}/limits") as file:
            lines = file.read().splitlines()
    except OSError:
        return None, None
    (line,) = [each for each in lines if each.startswith(_CPU_TIME)] or [_CPU_TIME]
    soft, hard = [*line.removeprefix(_CPU_TIME).split(), "", ""][:2]
    return _seconds(soft), _seconds(hard)


def _seconds(word: str) -> int | None:
    return int(word) if word.isdecimal() else None

"""System calls that the kernel has, but not every Python.

A Python that was built on an old system, to run on all later ones, lacks what that system lacked: conda's and uv's have
neither ``os.pidfd_open`` nor ``os.memfd_create``. The numbers and flags are those of the kernel's headers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
from functools import cache
from typing import Any

from . import process_ends


MFD_CLOEXEC = 0x1
MFD_ALLOW_SEALING = 0x2

F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
F_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8

# What a kernel without a system call answers, and a container that forbids it.
_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
# The same on all architectures that torch runs on.
_NR_PIDFD_SEND_SIGNAL = 424
_NR_PIDFD_OPEN = 434

_EPOLL_CTL_MOD = 3
_EPOLLET = 1 << 31
# ``struct epoll_event`` has no padding on x86-64, and its natural alignment elsewhere.
_EPOLL_EVENT = struct.Struct("=IQ" if os.uname().machine == "x86_64" else "@IQ")


def pidfd_open(pid: int) -> int:
    """``os.pidfd_open``: a descriptor of a process, readable once it has ended. Not inherited.

    Where the kernel refuses it, a pipe takes its place (:mod:`.process_ends`).

    Raises:
        OSError: there is no such process, or no descriptor is left.
    """
    return _pidfd_open(pid) if has_pidfds() else process_ends.descriptor(pid)


def _pidfd_open(pid: int) -> int:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _syscall(_NR_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: int, pid: int) -> None:
    """``signal.pidfd_send_signal``.

    Args:
        pidfd: from :func:`pidfd_open`.
        number: the signal.
        pid: the process's pid, for a kernel that has no pidfds.
    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    if not has_pidfds():
        if select.select([pidfd], [], [], 0)[0]:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        os.kill(pid, number)
    elif hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _syscall(_NR_PIDFD_SEND_SIGNAL, pidfd, number, 0, 0)


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """``os.memfd_create``: a file in memory that has no place in the file system.

    Args:
        name: shown in ``/proc/PID/fd``.
        flags: ``MFD_CLOEXEC``, ``MFD_ALLOW_SEALING``.
    Raises:
        OSError: there are too many open files, or not enough memory.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _call("memfd_create", os.fsencode(name), flags)


def act_by_default(number: int) -> None:
    """Have a signal act as in a process without a handler. Any thread may call this, unlike ``signal.signal``.

    Python's own record of the handler stays as it was: for a process that is about to die of this signal.

    Raises:
        OSError: the signal does not exist, or cannot be handled.
    """
    import ctypes

    handle = _libc().signal
    handle.argtypes, handle.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    if handle(number, signal.SIG_DFL.value or None) == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def watch_edges(epoll: int, fd: int, events: int, data: int) -> None:
    """Have an epoll instance report each event of a descriptor only once. ``select.epoll.modify`` would change the data, too.

    Args:
        epoll: the instance's descriptor.
        fd: a descriptor that it watches.
        events: those that it is watched for.
        data: what the instance reports with an event, as 64 bits.
    Raises:
        OSError: the instance does not watch it.
    """
    _call("epoll_ctl", epoll, _EPOLL_CTL_MOD, fd, _EPOLL_EVENT.pack(events | _EPOLLET, data))


@cache
def has_pidfds() -> bool:
    """Whether the kernel gives descriptors of processes. Old ones do not, nor do some containers."""
    try:
        os.close(_pidfd_open(os.getpid()))
    except OSError as error:
        return error.errno not in _REFUSED
    return True


def _syscall(number: int, *args: int) -> int:
    return _call("syscall", number, *args)


def _call(function: str, *args: int | bytes) -> int:
    import ctypes

    words = [each if isinstance(each, bytes) else ctypes.c_long(each) for each in args]
    result: int = getattr(_libc(), function)(*words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def _libc() -> Any:
    import ctypes  # not needed where Python has all calls

    return ctypes.CDLL(None, use_errno=True)

"""System calls that not every Python offers: with Python's own function, and without."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import subprocess
from collections.abc import Iterator

import pytest

from rallypoint._core import linux


@pytest.fixture(params=["a Python that has them", "one that has not"], autouse=True)
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one that has not":
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(signal, "pidfd_send_signal")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as made:
        yield made
        made.kill()


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_process_has_a_descriptor_that_tells_its_end(child: subprocess.Popen[bytes]) -> None:
    with closing(linux.pidfd_open(child.pid)) as fd:
        assert not os.get_inheritable(fd)
        assert select.select([fd], [], [], 0)[0] == []
        linux.pidfd_send_signal(fd, signal.SIGTERM, child.pid)
        assert select.select([fd], [], [], 60)[0] == [fd]
        assert child.wait() == -signal.SIGTERM
        with pytest.raises(ProcessLookupError) as raised:
            linux.pidfd_send_signal(fd, signal.SIGTERM, child.pid)
        assert raised.value.errno == errno.ESRCH


def test_a_process_that_has_ended_has_none(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(child.pid)
    with pytest.raises(OSError, match="Bad file descriptor"):
        linux.pidfd_send_signal(1 << 20, signal.SIGTERM, child.pid)


def test_files_in_memory_are_as_they_are_asked_for() -> None:
    with closing(linux.memfd_create("of-test")) as fd:
        assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:of-test (deleted)"
        assert not os.get_inheritable(fd)
        os.write(fd, b"abc")
        assert os.pread(fd, 9, 0) == b"abc"
    with closing(linux.memfd_create("given-on", 0)) as fd:
        assert os.get_inheritable(fd)
    with pytest.raises(OSError, match="Invalid argument"):
        linux.memfd_create("x", 1 << 20)


def test_sealed_files_stay_as_they_are() -> None:
    seals = linux.F_SEAL_SEAL | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_WRITE
    flags = linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING
    with closing(linux.memfd_create("sealed", flags)) as fd:
        os.write(fd, b"abc")
        fcntl.fcntl(fd, linux.F_ADD_SEALS, seals)
        assert fcntl.fcntl(fd, linux.F_GET_SEALS) == seals
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1)):
            with pytest.raises(PermissionError):
                change()


def test_the_flags_are_those_of_a_python_that_has_them() -> None:
    for name in ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW"):
        assert getattr(linux, name) == getattr(fcntl, name)
    assert linux.F_SEAL_WRITE == fcntl.F_SEAL_WRITE
    assert (linux.MFD_CLOEXEC, linux.MFD_ALLOW_SEALING) == (os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING)


@pytest.mark.parametrize(
    ("code", "has"), [(errno.ENOSYS, False), (errno.EPERM, False), (errno.EMFILE, True)]
)
def test_a_kernel_or_a_container_may_refuse_descriptors_of_processes(
    code: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    linux.has_pidfds.cache_clear()
    monkeypatch.setattr(linux, "_pidfd_open", refuses)
    try:
        assert linux.has_pidfds() == has
    finally:
        linux.has_pidfds.cache_clear()
    monkeypatch.undo()
    assert linux.has_pidfds()
    linux.has_pidfds.cache_clear()

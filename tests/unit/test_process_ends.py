"""Descriptors that tell the end of a process on a kernel without pidfds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pace import pace
from rallypoint._core import linux, process_ends


SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def is_ready(fd: int, seconds: float = 0.0) -> bool:
    return select.select([fd], [], [], seconds)[0] == [fd]


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10 * pace()
    while not holds():
        assert time.monotonic() < until
        threading.Event().wait(0.005)


def watchers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "rally-process-ends"]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    wait_until(lambda: not watchers())
    if process_ends._own is not None:  # kept for as long as the process lives
        process_ends._own.close()
    process_ends._forget()


def test_the_end_of_a_child_and_of_a_stranger_is_told() -> None:
    middle = f"import subprocess; print(subprocess.Popen({SLEEP!r}).pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        stranger = int(parent.stdout.readline())
    with sleeping() as child:
        first, second, third = (
            process_ends.descriptor(pid) for pid in (child.pid, stranger, child.pid)
        )
        with closing(first), closing(second), closing(third):
            assert not any(map(os.get_inheritable, (first, second, third)))
            assert not any(map(is_ready, (first, second, third)))
            os.kill(stranger, signal.SIGKILL)
            assert is_ready(second, 10 * pace())
            assert not is_ready(first)
            child.kill()
            assert is_ready(first, 10 * pace())
            assert is_ready(third, 10 * pace())
            assert child.returncode is None, "not reaped: a zombie has ended, too"
            with closing(process_ends.descriptor(child.pid)) as late:
                assert is_ready(late), "known at once"


def test_who_has_gone_has_none() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    with pytest.raises(ProcessLookupError):
        process_ends.descriptor(child.pid)


def test_a_descriptor_that_is_closed_is_no_longer_watched() -> None:
    with sleeping() as child:
        os.close(process_ends.descriptor(child.pid))
        wait_until(lambda: not watchers())
        with closing(process_ends.descriptor(child.pid)) as again:
            assert watchers() == ["rally-process-ends"]
            assert not is_ready(again)
            child.kill()
            assert is_ready(again, 10 * pace())


def forked(work: Callable[[], bool]) -> int:
    """The pid of a fork that exits with 0 if ``work`` returns True."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return pid


def test_the_end_of_a_process_itself_is_told_without_a_thread() -> None:
    """Its children, and programs that it starts, do not keep the pipe open."""
    told, tell = os.pipe()

    def child() -> bool:
        own = process_ends.descriptor(os.getpid())

        def grandchild() -> bool:  # outlives its parent, and waits for its end
            return os.write(tell, b"ended" if is_ready(own, 10 * pace()) else b"?") > 0

        forked(grandchild)
        subprocess.Popen([*SLEEP[:-1], "import time; time.sleep(2)"])
        return not watchers() and not is_ready(own, 0.2)

    pid = forked(child)
    os.close(tell)
    assert os.waitpid(pid, 0)[1] == 0
    with open(told, "rb") as file:
        assert file.read() == b"ended"


def test_a_forked_child_watches_on_its_own() -> None:
    with sleeping() as watched, closing(process_ends.descriptor(watched.pid)) as ours:

        def child() -> bool:
            assert not watchers()
            with closing(process_ends.descriptor(watched.pid)) as theirs:
                os.kill(watched.pid, signal.SIGKILL)
                return is_ready(theirs, 10 * pace())

        assert os.waitpid(forked(child), 0)[1] == 0
        assert is_ready(ours, 10 * pace())


def test_without_pidfds_a_signal_goes_to_a_living_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linux, "has_pidfds", lambda: False)
    with sleeping() as child, closing(linux.pidfd_open(child.pid)) as fd:
        linux.pidfd_send_signal(fd, signal.SIGTERM, child.pid)
        assert is_ready(fd, 10 * pace())
        with pytest.raises(ProcessLookupError):
            linux.pidfd_send_signal(fd, signal.SIGTERM, child.pid)
        assert child.wait() == -signal.SIGTERM


def test_without_a_thread_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with sleeping() as child:
        before = sorted(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            with pytest.raises(OSError, match="can't start new thread"):
                process_ends.descriptor(child.pid)
        assert sorted(os.listdir("/proc/self/fd")) == before
        with closing(process_ends.descriptor(child.pid)) as fd:
            child.kill()
            assert is_ready(fd, 10 * pace())

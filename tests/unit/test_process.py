"""What we ask Linux about processes, asked about real ones."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic import wait_until
from rallypoint._core import proc_stat, process
from rallypoint.control import usage
from rallypoint.control.slowness import surroundings


# A process that lives until its stdin ends, and says when it is up.
WAIT = "import sys; print('up', flush=True); sys.stdin.read()"
# Starts such a process as its child, prints the child's pid, and waits too.
PARENT = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {WAIT!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\nprint(child.pid, flush=True)\nsys.stdin.read()"
)
IMPORT = "from rallypoint._core import process; "


@contextmanager
def started(code: str, *args: str, **kwargs: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", code, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **kwargs,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def run_code(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout.strip()


def ended(pid: int, timeout: float = 10.0) -> bool:
    """Wait for the end of a process that need not be our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(timeout * 1000))
    finally:
        os.close(fd)


def test_descendants_are_found_parents_first_and_kept_subtrees_left_out() -> None:
    with started(PARENT) as parent:
        grandchild = int(first_line(parent))
        assert process.children(parent.pid) == [grandchild]
        found = process.descendants(os.getpid())
        assert found.index(parent.pid) < found.index(grandchild)
        without = process.descendants(os.getpid(), keep=[parent.pid])
        assert parent.pid not in without
        assert grandchild not in without


def test_a_child_of_another_thread_is_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel lists children by the thread that started them.
    code = (
        "import subprocess, sys, threading\n"
        "def start():\n"
        "    global child\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    print(child.pid, flush=True)\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=start, daemon=True).start()\n"
        "sys.stdin.read()\nchild.kill()"
    )
    with started(code) as parent:
        child = int(first_line(parent))
        assert process.children(parent.pid) == [child]
        # A kernel without CONFIG_PROC_CHILDREN:
        assert process._children_by_scan(parent.pid) == [child]
        os.kill(child, signal.SIGKILL)


def test_a_zombie_is_a_child_but_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert ended(child.pid)
    try:
        assert child.pid in process.children(os.getpid())
        assert not process.is_running(child.pid)
        assert child.pid not in process.descendants(os.getpid())
    finally:
        child.wait()
    assert process.children(child.pid) == []
    assert not process.is_running(child.pid)


def test_a_name_with_brackets_and_spaces_is_read_as_a_name(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to(os.path.realpath(sys.executable))
    child = subprocess.Popen(
        [str(program), "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        first_line(child)
        assert proc_stat.fields(child.pid)[1] == str(os.getpid())
        assert process.is_running(child.pid)
    finally:
        child.kill()
        child.communicate()


def test_die_with_parent_ends_a_child_of_a_killed_parent() -> None:
    child_code = IMPORT + f"import os; process.die_with_parent(os.getppid()); {WAIT}"
    parent_code = PARENT.replace(repr(WAIT), repr(child_code))
    with started(parent_code) as parent:
        child = int(first_line(parent))
        parent.kill()
        assert ended(child)


def test_live_without_parent_undoes_it(tmp_path: Path) -> None:
    mark = tmp_path / "lived"
    child_code = IMPORT + (
        "import os, time; process.die_with_parent(os.getppid()); process.live_without_parent()\n"
        f"{WAIT}\ntime.sleep(0.2); open({str(mark)!r}, 'w').close()"
    )
    with started(PARENT.replace(repr(WAIT), repr(child_code))) as parent:
        child = int(first_line(parent))
        parent.kill()
        assert ended(child)
    assert mark.exists()


def test_die_with_parent_ends_at_once_if_the_parent_has_gone_already() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT + "process.die_with_parent(1 << 22)"],
        check=False,
        timeout=240,
    )
    assert done.returncode == 128 + signal.SIGKILL


def test_orphans_are_adopted_for_the_length_of_the_block_only() -> None:
    code = IMPORT + (
        "import threading\n"
        "seen = [process.is_subreaper()]\n"
        "with process.adopting_orphans():\n"
        "    def other():\n"
        "        with process.adopting_orphans():\n            entered.set(); leave.wait()\n"
        "    entered, leave = threading.Event(), threading.Event()\n"
        "    thread = threading.Thread(target=other); thread.start(); entered.wait()\n"
        "    seen.append(process.is_subreaper())\n"
        "seen.append(process.is_subreaper())\n"  # the other thread is still in its block
        "leave.set(); thread.join()\n"
        "seen.append(process.is_subreaper())\n"
        "process.set_subreaper(True)\n"
        "with process.adopting_orphans(): pass\n"
        "seen.append(process.is_subreaper())\n"
        "print(*seen)"
    )
    assert run_code(code) == "False True True False True"


def test_an_orphan_comes_back_to_the_subreaper() -> None:
    code = IMPORT + (
        "import os\n"
        "with process.adopting_orphans():\n"
        "    read, write = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0:\n"
        "            os.close(write); os.read(read, 1); os._exit(7)\n"
        "        os._exit(0)\n"
        "    os.close(read)\n"
        "    os.wait()\n"
        "    found = process.children(os.getpid())\n"
        "    os.close(write)\n"
        "    pid, status = os.wait()\n"
        "    print(found == [pid], os.waitstatus_to_exitcode(status))\n"
    )
    assert run_code(code) == "True 7"


def test_only_processes_with_the_mark_are_found() -> None:
    env = {**os.environ, "RALLY_JOB": "one"}
    with started(WAIT, env=env) as marked, started(WAIT) as other:
        first_line(marked)
        first_line(other)
        assert process.marked_processes(b"RALLY_JOB=one", exclude=[]) == [marked.pid]
        assert process.marked_processes(b"RALLY_JOB=on", exclude=[]) == []
        assert process.marked_processes(b"RALLY_JOB=one", exclude=[marked.pid]) == []


def test_a_signal_to_a_process_that_is_gone_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    with started(WAIT) as alive:
        first_line(alive)
        process.send([child.pid, alive.pid], signal.SIGTERM)
        assert alive.wait(10) == -signal.SIGTERM


SHOW = (
    IMPORT
    + "import sys; process.set_title(sys.argv[1]); print(ascii(open('/proc/self/cmdline').read()))"
)


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        ("python train.py --lr 0.1", "python train.py --lr 0.1\0"),
        ("prüfung", "prüfung\0"),
        ("one\ntwo", "one\ntwo\0"),
        ("", "\0"),
    ],
)
def test_a_title_is_shown_without_padding(title: str, shown: str) -> None:
    assert run_code(SHOW, title) == ascii(shown)


def test_a_title_longer_than_its_room_is_cut() -> None:
    # The title's room is what the process was started with; the environment comes after it.
    code = IMPORT + (
        "import os; room = len(open('/proc/self/cmdline').read())\n"
        "process.set_title('x' * 10_000 + chr(0))\n"
        "shown = open('/proc/self/cmdline').read()\n"
        "import subprocess\n"
        "environ = open('/proc/self/environ').read()\n"
        "print(shown == 'x' * (room - 2) + chr(0), environ.startswith('FIRST=1'), os.environ['FIRST'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"FIRST": "1", **os.environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.split() == ["True", "True", "1"]


def test_a_child_of_another_user_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a /proc with hidepid, where a worker runs a set-uid program (sudo, ping)."""
    with sleeper() as pid:
        real_list, real_kill = os.listdir, os.kill

        def listed(path: str) -> list[str]:
            if str(path).startswith(f"/proc/{pid}/"):
                raise PermissionError(path)
            return real_list(path)

        def opened(path: str, *args: object, **more: object) -> object:
            if str(path).startswith(f"/proc/{pid}/"):
                raise PermissionError(path)
            return open(path, *args, **more)  # type: ignore[call-overload]

        def killed(target: int, number: int) -> None:
            if target == pid:
                raise PermissionError(target)
            real_kill(target, number)

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", listed)
            for module in (process, proc_stat):
                patch.setattr(module, "open", opened, raising=False)
            patch.setattr(os, "kill", killed)
            assert process.children(pid) == []
            assert process.state(pid) == ""
            assert process.is_running(pid)
            assert not process.catches(pid, signal.SIGTERM)
            assert pid in process.descendants(os.getpid())


@contextmanager
def sleeper() -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield started.pid
    finally:
        started.kill()
        started.wait()


def test_a_name_that_is_cut_within_a_character_is_read(tmp_path: Path) -> None:
    """The kernel keeps 15 bytes of a program's name."""
    script = tmp_path / "обработка.sh"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o700)
    with subprocess.Popen([str(script)], stdin=subprocess.PIPE) as child:
        wait_until(lambda: b"\xd0" in Path(f"/proc/{child.pid}/comm").read_bytes(), "its name")
        with pytest.raises(UnicodeDecodeError):
            Path(f"/proc/{child.pid}/comm").read_text()
        assert process.is_running(child.pid)
        assert process.state(child.pid) in "SR"
        assert not process.catches(child.pid, signal.SIGUSR1)
        assert not process.has_thread(child.pid, "x")
        assert child.pid in process.descendants(os.getpid())
        used = usage.usage(os.getpid())
        assert used["children"] >= 1 and used["memory"] > 0
        assert usage.usage(child.pid)["state"] in "SR"
        assert surroundings.counters(child.pid) is not None
        child.communicate(b"x\n")


# -- processes that clean up ----------------------------------------------------------------------------------------

# Uses as much CPU as a start of Python may on a busy host, and then waits forever. The first line says that it is at work.
CLEANER = (
    "import sys, time; 'resource_tracker import main'; print('up', flush=True)\n"
    "end = time.monotonic() + float(sys.argv[1])\n"
    "while time.monotonic() < end: pass\n"
    "print('done', flush=True); sys.stdin.read()"
)


def end_of(child: subprocess.Popen[str], ending: process.Ending) -> bool:
    """Kill it when that is due; returns whether it had done its work."""
    while child.poll() is None:
        process.send(ending.due([child.pid]), signal.SIGKILL)
        time.sleep(0.05)
    assert child.stdout is not None
    return child.stdout.read() == "done\n"


def test_one_that_cleans_up_is_ended_only_once_it_does_nothing() -> None:
    with started(CLEANER, "1.5") as child, started(WAIT) as user:
        assert first_line(child) == first_line(user) == "up"
        ending = process.Ending(60.0)
        assert ending.due([child.pid, user.pid]) == [user.pid]
        assert end_of(child, ending)


def test_one_that_cleans_up_for_ever_is_ended() -> None:
    with started(CLEANER, "inf") as child:
        assert first_line(child) == "up"
        assert not end_of(child, process.Ending(1.0))

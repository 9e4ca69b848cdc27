"""Whatever is killed, and however often: no process of the job is left, and a living supervisor says why."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from elastic import wait_until
from pace import pace
from rallypoint._core import process
from supervisors import RALLY, Popen, run


pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

# Well below the default time between SIGTERM and SIGKILL (30 s), and long enough for a machine that is busy with other things.
SOON = 20.0

UNPLEASANT = ("--daemon", "--grandchild", "--loaders")
FAST = ("--start-method", "exec")  # with workers that do without torch
REPORT = "rally: the job failed"


def two(*flags: str) -> tuple[str, ...]:
    return ("--nproc-per-node", "2", *flags)


def one_report(job) -> str:
    text = job.stderr()
    assert text.count(REPORT) == 1, text
    assert "Traceback" not in text.split(REPORT)[1].replace("Traceback (most recent", ""), text
    return text.split(REPORT)[1]


# -- kill -9 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "torch"), [("forkserver", ()), ("exec", ()), ("exec", ("--no-torch",))]
)
def test_kill_9_of_the_supervisor(start, method, torch):
    job = start(*two("--start-method", method), worker=(*UNPLEASANT, *torch))
    job.workers(2)
    # supervisor, server, store, 2 workers, each with a daemon, 2 loaders, a child and a grandchild
    assert len(job.alive()) >= 5 + 2 * 5
    job.kill(job.supervisor)
    job.assert_nothing_left()
    assert job.end() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("method", "torch"), [("forkserver", ()), ("exec", ("--no-torch",))], ids=["forkserver", "exec"]
)
def test_kill_9_of_the_fork_server(start, method, torch):
    job = start(*two("--start-method", method), worker=(*UNPLEASANT, *torch))
    job.workers(2)
    server = job.server()
    job.kill(server)
    job.assert_nothing_left()
    assert job.end() == 1
    assert f"its fork server (pid {server}) was killed by SIGKILL" in one_report(job)


@pytest.mark.parametrize(
    ("method", "torch"), [("forkserver", ()), ("exec", ("--no-torch",))], ids=["forkserver", "exec"]
)
def test_kill_9_of_a_worker(start, method, torch):
    job = start(*two("--start-method", method), worker=(*UNPLEASANT, *torch))
    pids = job.workers(2)
    job.kill(pids[1])
    job.assert_nothing_left()
    assert job.end() == 128 + signal.SIGKILL
    report = one_report(job)
    assert "rank 1 was killed by SIGKILL" in report
    assert f"pid {pids[1]}" in report
    assert "rank 0: " in report.split("victims")[1]


@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_kill_9_of_the_store(start, method):
    torch = ("--no-torch",) if method == "exec" else ()
    job = start(*two("--start-method", method), worker=(*UNPLEASANT, *torch))
    job.workers(2)
    job.kill(job.store())
    job.assert_nothing_left()
    assert job.end() == 1
    assert "the process that serves the workers' store ended (signal 9)" in one_report(job)


def test_kill_9_of_the_supervisor_while_torch_is_being_imported(start):
    job = start(*two(), forked=False)
    server = job.server()
    _wait_for_title(server)
    assert not job.notes("loop.*")
    job.kill(job.supervisor)
    job.assert_nothing_left()
    assert not job.notes("loop.*")


def test_kill_9_of_the_fork_server_while_it_imports_torch(start):
    job = start(*two(), forked=False)
    server = job.server()
    _wait_for_title(server)
    job.kill(server)
    job.assert_nothing_left()
    assert job.end() == 1
    assert "was killed by SIGKILL" in one_report(job)


def test_kill_9_of_the_supervisor_in_the_middle_of_a_restart(start):
    """Workers are being stopped: two of them are deaf and have the whole grace period ahead of them."""
    job = start("--nproc-per-node", "3", "--max-restarts", "3", *FAST, worker=("--deaf", "--daemon", "--no-torch"))  # fmt: skip
    pids = job.workers(3)
    job.kill(pids[0])
    time.sleep(0.1)
    assert process.is_running(pids[1])
    job.kill(job.supervisor)
    job.assert_nothing_left()


@pytest.mark.parametrize("after", [0.0, 0.02])
def test_kill_9_of_the_supervisor_while_the_next_generation_starts(start, after):
    job = start(*two("--max-restarts", "3"), worker=("--daemon",))
    pids = job.workers(2)
    job.kill(pids[0])
    _wait_for_text(job, "restarting all workers")
    time.sleep(after)
    job.kill(job.supervisor)
    job.assert_nothing_left()


# -- jobs that end well and leave something ---------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "torch"), [("forkserver", ()), ("exec", ("--no-torch",))], ids=["forkserver", "exec"]
)
def test_workers_that_end_well_and_leave_daemons_are_a_success(start, method, torch):
    job = start(*two("--start-method", method), worker=("--ends-well", *UNPLEASANT, *torch))
    assert job.end() == 0
    assert not job.alive(), "the command returned before everything was gone"
    assert len(job.notes("ended.*")) == 2
    assert len(job.notes("daemon.*")) == 2, "the test's daemons were there to be found"
    assert REPORT not in job.stderr()


def test_a_program_and_its_children_end_with_its_group(start, tmp_path):
    job = start(
        "--no-python", "sh", "-c", 'echo $$ > "$WORKER_NOTES/loop.0.0"; sleep 600 & sleep 600'
    )
    job.workers(1)
    job.kill(job.supervisor, signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert not job.alive()


# -- a worker that does not run --------------------------------------------------------------------


@pytest.mark.parametrize("deaf", [False, True])
def test_a_stopped_worker_goes_on_to_its_end(start, deaf):
    """Like any other: it ends by SIGTERM, or is killed after the grace if it ignores that."""
    worker = ("--no-torch", "--deaf") if deaf else ("--no-torch",)
    grace = "0.7" if deaf else "60"
    job = start(*two("--shutdown-timeout", grace, *FAST), worker=worker)
    pids = job.workers(2)
    job.kill(pids[1], signal.SIGSTOP)
    stopped = psutil.Process(pids[1])
    while stopped.status() != psutil.STATUS_STOPPED:  # else it might take our SIGTERM first
        time.sleep(0.005)
    began = time.monotonic()
    job.kill(pids[0])
    assert job.end() == 128 + signal.SIGKILL
    assert (0.6 if deaf else 0.0) < time.monotonic() - began < SOON * pace()
    assert not job.alive()
    report = one_report(job)
    assert "rank 0 was killed by SIGKILL" in report, "not the one that we killed later"
    assert f"rank 1: stopped ({'SIGKILL' if deaf else 'SIGTERM'})" in report


# -- signals to the supervisor -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_workers_save(start, number):
    if number == signal.SIGHUP:  # nobody catches it: only the exit code is checked
        job = start(*two(*FAST), worker=("--no-torch",))
    else:
        job = start(
            *two("--max-restarts", "3", *FAST), worker=("--no-torch", "--saves", "--loaders")
        )
    job.workers(2)
    job.kill(job.supervisor, number)
    assert job.end() == 128 + number
    assert not job.alive()
    if number != signal.SIGHUP:
        assert len(job.notes("saved.*")) == 2
    assert not job.notes("loop.1.*"), "a signal is no reason to restart"
    assert REPORT not in job.stderr()
    assert f"stopped by {signal.Signals(number).name}" in job.stderr()


def test_a_signal_lets_forked_workers_save(start):
    job = start(*two(), worker=("--saves", "--no-torch", "--loaders"))
    job.workers(2)
    job.kill(job.supervisor, signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert len(job.notes("saved.*")) == 2
    assert not job.alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_a_second_signal_ends_it_now(start, number, method):
    job = start(*two("--start-method", method), worker=("--no-torch", "--deaf", "--daemon"))
    pids = job.workers(2)
    job.kill(job.supervisor, number)
    _wait_for_text(job, "waiting for ranks 0, 1 (")  # two that arrive together count as one
    assert all(map(process.is_running, pids)), "they had the whole grace time left"
    began = time.monotonic()
    job.kill(job.supervisor, number)
    assert job.end() == 128 + number
    assert time.monotonic() - began < SOON * pace()
    assert not job.alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_waited_for_is_said_and_what_to_do(start, number):
    job = start(*two(*FAST), worker=("--no-torch", "--deaf"))
    job.workers(2)
    job.kill(job.supervisor, number)
    again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
    _wait_for_text(job, f"waiting for ranks 0, 1 ({number.name}), up to ")
    job.kill(job.supervisor, number)
    assert job.end() == 128 + number
    assert job.stderr().count(f" s; {again} kills them\n") == 1


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_while_torch_is_being_imported_starts_nothing(start, times):
    job = start(*two("--nproc-per-node", "2"), forked=False)
    _wait_for_title(job.server())
    began = time.monotonic()
    for _ in range(times):
        job.kill(job.supervisor, signal.SIGINT)
        time.sleep(0.002)
    # The second may arrive after the first has done everything and the handlers are Python's own again.
    assert job.end() in {128 + signal.SIGINT, -signal.SIGINT}
    assert time.monotonic() - began < SOON * pace(), "there was nothing to wait for"
    assert not job.alive()
    assert not job.notes("loop.*")
    assert "Traceback" not in job.stderr()


def test_a_signal_in_the_middle_of_a_restart_ends_the_job(start):
    job = start(*two("--max-restarts", "3", "--shutdown-timeout", "1", *FAST), worker=("--no-torch", "--deaf"))  # fmt: skip
    pids = job.workers(2)
    job.kill(pids[0])
    time.sleep(0.2)
    job.kill(job.supervisor, signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert not job.notes("loop.1.*")
    assert not job.alive()


def test_under_nohup_sighup_stays_ignored(start):
    def ignore_sighup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    job = start(*two(), worker=("--no-torch",), preexec_fn=ignore_sighup)
    pids = job.workers(2)
    for pid in (job.supervisor, job.server(), *pids):
        job.kill(pid, signal.SIGHUP)
    time.sleep(0.3)
    assert job.popen.poll() is None
    assert all(map(process.is_running, pids))
    job.kill(job.supervisor, signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM


# -- a real terminal -------------------------------------------------------------------------------


@pytest.fixture
def terminal():
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def in_foreground_of(theirs: int):
    """Popen options that make a job the foreground group of the terminal, as a shell would."""

    def become_foreground() -> None:
        import fcntl
        import termios

        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    return {
        "stdin": theirs,
        "stdout": theirs,
        "stderr": theirs,
        "start_new_session": True,
        "preexec_fn": become_foreground,
    }


def test_ctrl_c_in_a_terminal_lets_workers_save(start, terminal):
    ours, theirs = terminal
    job = start(*two(), worker=("--no-torch", "--saves", "--loaders"), **in_foreground_of(theirs))
    job.workers(2)
    os.write(ours, b"\x03")
    assert job.end() == 128 + signal.SIGINT
    assert len(job.notes("saved.*")) == 2
    assert not job.alive()
    shown = os.read(ours, 65536).decode()
    assert "stopped by SIGINT" in shown
    assert "Traceback" not in shown


def test_ctrl_c_twice_in_a_terminal_ends_it_now(start, terminal):
    ours, theirs = terminal
    job = start(
        *two(*FAST), worker=("--no-torch", "--deaf", "--daemon"), **in_foreground_of(theirs)
    )
    pids = job.workers(2)
    os.write(ours, b"\x03")
    shown = b""
    while b"waiting for ranks 0, 1 (" not in shown:  # two that arrive together count as one
        assert select.select([ours], [], [], 120.0)[0], shown
        shown += os.read(ours, 65536)
    assert all(map(process.is_running, pids))
    began = time.monotonic()
    os.write(ours, b"\x03")
    assert job.end() == 128 + signal.SIGINT
    assert time.monotonic() - began < SOON * pace()
    assert not job.alive()


def test_a_closed_terminal_ends_the_job(start):
    ours, theirs = pty.openpty()
    job = start(*two(*FAST), worker=("--no-torch", "--saves"), **in_foreground_of(theirs))
    job.workers(2)
    os.close(theirs)
    os.close(ours)  # the kernel sends SIGHUP to the session's leader
    assert job.end() == 128 + signal.SIGHUP
    assert not job.alive()


# -- other programs' children ------------------------------------------------------------------------


def test_children_that_were_there_before_us_are_left_alone(start, tmp_path):
    """`helper & exec rally run …` in a shell: the helper is our child, but not part of our job."""
    script = 'sleep 600 & echo $! > "$WORKER_NOTES/helper"; exec "$@"'

    job = start(*two(*FAST), worker=("--no-torch", "--daemon"), through=("sh", "-c", script, "sh"))
    job.workers(2)
    helper = int(job.notes("helper")["helper"])
    job.kill(next(pid for pid in process.children(job.supervisor) if pid != helper))
    assert job.end() == 1
    assert list(job.alive()) == [helper]
    os.kill(helper, signal.SIGKILL)
    job.assert_nothing_left()


# -- helpers -----------------------------------------------------------------------------------------


def _wait_for_title(server: int, timeout: float = 120.0) -> None:
    """Wait until the fork server has been told what to do; right after that, it imports torch."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with open(f"/proc/{server}/cmdline", "rb") as file:
            if b": fork server of " in file.read():
                return
        time.sleep(0.005)
    raise AssertionError("the fork server was not told what to do")


def _wait_for_text(job, text: str, timeout: float = 120.0) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if text in job.stderr():
            return
        time.sleep(0.002)
    raise AssertionError(f"{text!r} was not said: {job.stderr()}")


def test_the_hunt_finds_what_hides():
    """The fixture finds a daemon without an environment, so the tests above can fail."""
    was = process.is_subreaper()
    process.set_subreaper(True)
    before = set(process.descendants(os.getpid()))
    try:
        hidden = subprocess.run(
            ["sh", "-c", "env -i setsid sleep 600 >/dev/null 2>&1 & echo $!"],
            capture_output=True,
            text=True,
            check=True,
        )
        found = set(process.descendants(os.getpid())) - before
        assert found == {int(re.findall(r"\d+", hidden.stdout)[0])}
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    finally:
        process.set_subreaper(was)


# -- shared memory -----------------------------------------------------------------------------------

SHARES = """
import os, pathlib, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
block = SharedMemory(create=True, size=4096)
pathlib.Path("block-" + os.environ["RANK"]).write_text(block.name)
while not all(os.path.exists(f"block-{rank}") for rank in range(2)):
    time.sleep(0.02)
if os.environ["RANK"] == "1" and sys.argv[1] == "a worker":
    os._exit(3)
time.sleep(600)
"""


@pytest.mark.parametrize("who", ["a worker", "the supervisor", "the fork server"])
def test_what_workers_shared_is_removed_when_they_are_killed(tmp_path: Path, who: str) -> None:
    """By multiprocessing's resource tracker, which has to outlive them for a moment."""
    (tmp_path / "shares.py").write_text(SHARES)
    words = [RALLY, "run", "--nproc-per-node", "2", "--shutdown-timeout", "0.2", "shares.py", who]
    job = Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        notes = [tmp_path / f"block-{rank}" for rank in range(2)]
        wait_until(lambda: all(each.exists() and each.read_text() for each in notes), "blocks")
        blocks = [Path("/dev/shm", each.read_text()) for each in notes]
        if who == "the supervisor":
            job.kill()
        if who == "the fork server":
            (server,) = process.children(job.pid)
            os.kill(server, signal.SIGKILL)
        assert job.wait(120) != 0
        wait_until(lambda: not any(each.exists() for each in blocks), f"{blocks} are gone")
    finally:
        job.kill()
        job.wait(60)


# -- a death ahead of its signal ---------------------------------------------------------------------

AHEAD = """
import os, pathlib, signal, time
if os.environ["RALLY_GENERATION"] == "0":
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    raise ValueError("of its own")
time.sleep(3)
"""


def test_a_death_that_was_held_back_is_not_one_of_the_next_generation(tmp_path: Path) -> None:
    (tmp_path / "ahead.py").write_text(AHEAD)
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "0.3")
    done = run([RALLY, "run", *flags, "ahead.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

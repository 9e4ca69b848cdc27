"""Querying a running job: ``rally ps``, ``rally stacks`` and their Python form, on real jobs."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from rallypoint._core import user_folder
from rallypoint._core.stack_line import STACK_SIGNAL
from rallypoint.control import client, messages, sockets
from rallypoint.control.client import RunningJob, connect, running
from rallypoint.control.server import MAX_CONNECTIONS, ControlServer
from rallypoint.control.stacks.stack_probe import find_py_spy
from rallypoint.errors import ControlError
from rallypoint.launch.cli import main
from supervisors import RALLY, Popen


PATIENCE = 30.0

# Each rank is stuck in a different place; `stands` is written once all of a rank's processes are.
HANGS = """
import ctypes, os, sys, threading, time

rank, folder = int(os.environ["RANK"]), sys.argv[1]

def stands(what="rank"):
    open(f"{folder}/{what}-{rank}", "w").close()

def reads_a_pipe():
    read, write = os.pipe()
    stands()
    os.read(read, 1)

def waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    stands()
    lock.acquire()

def runs_a_loop():
    stands()
    while True:
        pass

def holds_the_gil_in_c():
    stands()
    while True:
        ctypes.PyDLL(None).sleep(1000)

def has_a_child():
    if os.fork() == 0:
        stands("child")
        time.sleep(1000)
    stands()
    os.wait()

[reads_a_pipe, waits_for_a_lock, runs_a_loop, holds_the_gil_in_c, has_a_child][min(rank, 4)]()
"""


def wait_until(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for this test's sockets alone. Their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="rp-") as base:
        folder = Path(base) / "of-user"
        monkeypatch.setattr(user_folder, "candidates", lambda: (folder, Path(base) / "none" / "x"))
        yield folder


class Job:
    def __init__(self, folder: Path, count: int, name: str, *flags: str) -> None:
        folder.mkdir()
        script = folder / "hangs.py"
        script.write_text(HANGS)
        words = [RALLY, "run", "--nproc-per-node", str(count), "--rdzv-id", name, *flags]
        self.process = Popen(
            [*words, str(script), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        last = count - 1
        marks = [f"rank-{rank}" for rank in range(count)] + (["child-4"] if last >= 4 else [])
        wait_until(lambda: all((folder / mark).exists() for mark in marks), "all ranks stand")
        self.name = name

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.process.stderr.close()


@pytest.fixture(scope="module")
def _job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    name = f"control-{os.getpid()}"
    made = Job(tmp_path_factory.mktemp("job") / "a", 5, name)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def job(_job: Job) -> Iterator[Job]:
    """One for all tests. The rank that runs a loop stands still while others run: it would keep a core busy."""
    loop = _loop_of(_job)
    os.kill(loop, signal.SIGCONT)
    yield _job
    os.kill(loop, signal.SIGSTOP)


@pytest.fixture
def quiet_job(_job: Job) -> Job:
    """The same one, whose loop stands still: for tests that ask nothing of that rank."""
    os.kill(_loop_of(_job), signal.SIGSTOP)
    return _job


def _loop_of(job: Job) -> int:
    (loop,) = (each["pid"] for each in connect(job.name).status()["workers"] if each["rank"] == 2)
    return loop


def test_status_says_what_the_job_is_and_does(job: Job) -> None:
    told = connect(job.name).status()
    assert (told["id"], told["pid"], told["state"]) == (job.name, job.process.pid, "running")
    assert told["target"].endswith("hangs.py")
    assert (told["world_size"], told["nodes"], told["node_rank"]) == (5, 1, 0)
    assert [each["rank"] for each in told["workers"]] == list(range(5))
    assert all(each["state"] == "running" and each["pid"] > 0 for each in told["workers"])
    assert 0 < told["seconds"] < PATIENCE


def test_ps_lists_it(quiet_job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 0
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(quiet_job.name)
    ]
    assert str(quiet_job.process.pid) in row and "5 of 5" in row and "running" in row
    assert main(["ps", "--json"]) == 0
    ids = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
    assert quiet_job.name in ids


@pytest.mark.parametrize("how", ["signal", "py-spy"])
def test_every_rank_shows_where_it_stands(job: Job, how: str) -> None:
    """In a system call, a lock, a loop, C code that holds the GIL, a child: none of them cooperates."""
    if how == "py-spy" and find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    found = connect(job.name).stacks(by_signal=how == "signal")
    ends = {each["rank"]: each for each in found if not each["name"]}
    last = {rank: each["threads"][0]["frames"][-1]["function"] for rank, each in ends.items()}
    assert last == {
        0: "reads_a_pipe",
        1: "waits_for_a_lock",
        2: "runs_a_loop",
        3: "holds_the_gil_in_c",
        4: "has_a_child",
    }
    assert all(each["threads"][0]["frames"][0]["function"] == "<module>" for each in ends.values())
    (child,) = [each for each in found if each["name"]]
    assert child["rank"] == 4
    (sleeps, begins) = (child["threads"][0]["frames"][-1], ends[4]["threads"][0]["frames"][-1])
    assert sleeps["function"] == "has_a_child" and sleeps["line"] < begins["line"]


HAS_MANY_THREADS = """
import os, sys, threading

def wait(depth):
    if depth:
        wait(depth - 1)
    else:
        open(f"{sys.argv[1]}/{os.getpid()}-{threading.get_ident()}", "w").close()
        threading.Event().wait()

def main():
    wait(10)

for _ in range(20):
    threading.Thread(target=wait, args=(20,), daemon=True).start()
main()
"""


def test_stacks_are_whole_however_many_threads_there_are(tmp_path: Path) -> None:
    script = tmp_path / "many.py"
    script.write_text(HAS_MANY_THREADS)
    stands = tmp_path / "stands"
    stands.mkdir()
    name = f"many-{os.getpid()}"
    words = [RALLY, "run", "--nproc-per-node", "4", "--rdzv-id", name, str(script), str(stands)]
    made = Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(os.listdir(stands)) == 4 * 21, "all threads wait")
        found = connect(name).stacks(by_signal=True)
    finally:
        made.terminate()
        made.wait(PATIENCE)
    functions = [
        [[frame["function"] for frame in thread["frames"]] for thread in each["threads"]]
        for each in found
    ]
    main_thread = ["<module>", "main", *["wait"] * 11]
    others = [["_bootstrap", "_bootstrap_inner", "run", *["wait"] * 21]] * 20
    in_the_script = [
        [thread[: 13 if not at else 24] for at, thread in enumerate(each)] for each in functions
    ]
    assert in_the_script == [[main_thread, *others]] * 4


def test_stacks_as_people_read_them(quiet_job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks", quiet_job.name, "--rank", "3,0", "--signal"]) == 0
    heads = [
        line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")
    ]
    assert [head.partition(" (")[0] for head in heads] == ["rank 0", "rank 3"]
    assert heads[1].endswith("in holds_the_gil_in_c:")


def test_a_stopped_rank_is_told_as_stopped(quiet_job: Job) -> None:
    pid = connect(quiet_job.name).status()["workers"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        (record,) = connect(quiet_job.name).stacks([0], by_signal=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not record["threads"] and "SIGSTOP" in record["why"]
    (record,) = connect(quiet_job.name).stacks([0], by_signal=True)
    assert record["threads"][0]["frames"][-1]["function"] == "reads_a_pipe"


def test_nobody_notices_that_stacks_were_asked_for(job: Job) -> None:
    for _ in range(5):
        connect(job.name).stacks(by_signal=True)
    assert {each["state"] for each in connect(job.name).status()["workers"]} == {"running"}


def test_ctrl_backslash_shows_the_stacks_and_the_job_goes_on(tmp_path: Path) -> None:
    made = Job(tmp_path / "e", 2, f"quit-{os.getpid()}")
    try:
        os.kill(made.process.pid, signal.SIGQUIT)
        shown = b""
        while b"waits_for_a_lock" not in shown or b"reads_a_pipe" not in shown:
            line = made.process.stderr.readline()
            assert line, shown
            shown += line
        assert b"SIGQUIT received: the stacks of the workers" in shown
        assert {each["state"] for each in connect(made.name).status()["workers"]} == {"running"}
    finally:
        made.end()


def test_sigquit_ends_a_job_that_names_it(tmp_path: Path) -> None:
    made = Job(tmp_path / "f", 1, f"named-{os.getpid()}", "--signals-to-handle", "SIGTERM,SIGQUIT")
    os.kill(made.process.pid, signal.SIGQUIT)
    assert made.process.wait(PATIENCE) == 128 + signal.SIGQUIT
    made.process.stderr.close()


def test_a_rank_that_is_not_here_is_named(
    quiet_job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ControlError, match=r"no rank 9 on this node \(it has ranks 0-4\)"):
        connect(quiet_job.name).stacks([9])
    assert main(["stacks", quiet_job.name, "--rank", "x"]) == 2
    assert "expected ranks, such as 3 or 0,3" in capsys.readouterr().err


def test_two_jobs_must_be_told_apart(quiet_job: Job, tmp_path: Path) -> None:
    other = Job(tmp_path / "b", 1, f"{quiet_job.name}-b")
    try:
        assert connect(str(other.process.pid)).status()["id"] == other.name
        assert connect(quiet_job.name).status()["id"] == quiet_job.name, "an exact name wins"
        with pytest.raises(ControlError, match=r"several jobs match 'control-\d+'|several jobs"):
            connect("control-")
    finally:
        other.end()
    with pytest.raises(ControlError, match=f"no job '{other.name}' of this user runs on this host"):
        connect(other.name)


def test_no_job_is_one_line(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no job of this user runs on this host\n"
    assert main(["stacks", "no-such-job"]) == 1
    assert capsys.readouterr().err == "rally: no job of this user runs on this host\n"
    for wrong in (["ps", "--all"], ["stacks", "--what"], ["stacks", "a", "b"]):
        assert main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_socket_that_somebody_else_removes_meanwhile_is_no_job(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two callers that list jobs at the same time find the same dead ones."""
    monkeypatch.setattr(sockets, "present", lambda: [own_folder / "jobs" / "gone.1.a.sock"])
    assert list(running()) == []


def test_the_socket_of_a_killed_supervisor_is_removed(tmp_path: Path) -> None:
    made = Job(tmp_path / "c", 1, f"killed-{os.getpid()}")
    path = connect(made.name).path
    assert (
        path.exists() and path.stat().st_mode & 0o77 == 0
    ) or path.parent.stat().st_mode & 0o77 == 0
    made.process.kill()
    made.process.wait(PATIENCE)
    made.process.stderr.close()
    assert path not in [each.path for each, _ in running()]
    assert not path.exists()


def test_the_socket_goes_with_the_job(tmp_path: Path) -> None:
    made = Job(tmp_path / "d", 1, f"ends-{os.getpid()}")
    path = connect(made.name).path
    made.end()
    assert not path.exists()


# -- the socket itself ----------------------------------------------------------------------------


@pytest.fixture
def served(own_folder: Path) -> Iterator[ControlServer]:
    made = ControlServer("a job", lambda question: {"heard": question["ask"]})
    try:
        yield made
    finally:
        made.close()


def exchange(server: ControlServer, sent: bytes) -> bytes:
    """Run the server by hand. Returns what comes back."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.fspath(server.path))
        line.sendall(sent)
        line.settimeout(0.01)
        received = b""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            server.serve()
            try:
                data = line.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                return received
            if not data:
                return received
            received += data
        raise AssertionError(received)


def test_another_version_is_told(served: ControlServer) -> None:
    told = json.loads(exchange(served, b'{"version": 99, "ask": "status"}\n'))
    assert "speaks version 99 of the control protocol, this is version 1" in told["error"]


@pytest.mark.parametrize("sent", [b"nonsense\n", b"[]\n", b"{}\n", b'{"version": true, "a": 1}\n'])
def test_nonsense_is_answered_with_an_error(served: ControlServer, sent: bytes) -> None:
    answer = json.loads(exchange(served, sent))
    assert answer["version"] == messages.VERSION
    assert "error" in answer or answer.get("heard") is None


def test_a_request_without_end_is_dropped(served: ControlServer) -> None:
    assert exchange(served, b"x" * (messages.MAX_REQUEST + 1)) == b""


def test_too_many_connections_are_refused_and_the_next_is_served(served: ControlServer) -> None:
    idle = []
    for _ in range(MAX_CONNECTIONS + 4):
        line = socket.socket(socket.AF_UNIX)
        line.connect(os.fspath(served.path))
        idle.append(line)
        served.serve()
    for line in idle:
        line.close()
    served.serve()
    assert json.loads(exchange(served, messages.pack({"ask": "x"})))["heard"] == "x"


def test_who_may_not_enter_the_folder_gets_no_socket(own_folder: Path) -> None:
    own_folder.mkdir(mode=0o777)
    own_folder.chmod(0o777)
    assert sockets.present() == []
    with pytest.raises(OSError):
        sockets.bind("job")


def test_what_a_killed_supervisor_has_left_goes_when_the_next_one_starts(own_folder: Path) -> None:
    """Nodes may be lost and replaced for weeks without anybody ever running `rally ps`."""
    killed = f"""
import os, signal
from pathlib import Path
from rallypoint._core import user_folder
from rallypoint.control import sockets
user_folder.candidates = lambda: (Path({os.fspath(own_folder)!r}),)
kept = sockets.bind("job")
os.kill(os.getpid(), signal.SIGKILL)
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", killed], check=False)
        assert len(sockets.present()) == 1
    listener, path = sockets.bind("job")
    with listener:
        assert sockets.present() == [path]
    path.unlink()


def test_what_no_supervisor_has_made_stays_and_does_no_harm(own_folder: Path) -> None:
    listener, path = sockets.bind("job")
    for name in ("a.sock", "a.1x.00000000.sock", f"a.{'9' * 30}.00000000.sock", "a.1.b.sock"):
        path.with_name(name).touch()
    listener.close()
    path.unlink()
    listener, path = sockets.bind("job")
    with listener:
        assert sockets.present() == [path]
        assert len(list(path.parent.iterdir())) == 5
    path.unlink()


def test_a_socket_of_another_container_stays(own_folder: Path) -> None:
    """Its pid means nothing here, but somebody listens."""
    first, path = sockets.bind("job")
    there = path.with_name(f"job.{2**22 + 1}.{'0' * 8}.sock")  # higher than any pid here
    path.rename(there)
    second, path = sockets.bind("job")
    with first, second:
        assert sockets.present() == sorted([there, path])
    third, newest = sockets.bind("job")
    with third:
        # The second one belongs to this process, which is alive.
        assert sockets.present() == sorted([path, newest])
    path.unlink()
    newest.unlink()


def test_a_supervisor_that_does_not_answer_is_told(own_folder: Path) -> None:
    listener, path = sockets.bind("mute")
    with listener:
        with pytest.raises(ControlError, match="does not answer within 0.1 s: is its supervisor"):
            RunningJob(path).ask({"ask": "status"}, 0.1)
    path.unlink()


@pytest.mark.parametrize("job", ["", "mute", "my job", "pid"])
def test_a_job_that_does_not_answer_is_not_said_to_be_absent(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str
) -> None:
    monkeypatch.setattr(client, "ANSWER_PATIENCE", 0.1)
    listener, path = sockets.bind("my job" if job == "my job" else "mute")
    with listener:
        with pytest.raises(ControlError, match="does not answer within 0.1 s: is its supervisor"):
            connect(str(os.getpid()) if job == "pid" else job)
        with pytest.raises(ControlError, match="no job of this user runs"):
            connect("other")
        assert main(["ps"]) == 0
        row = capsys.readouterr().out.splitlines()[1]
        assert row.startswith(path.name.partition(".")[0])
        assert "does not answer" in row
    path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_sees_nothing_and_is_not_heard(served: ControlServer) -> None:
    served.path.parent.parent.chmod(0o755)
    served.path.parent.chmod(0o755)
    served.path.chmod(0o777)
    code = (
        "import os, socket, sys; os.setuid(65534); line = socket.socket(socket.AF_UNIX);"
        f"line.connect({os.fspath(served.path)!r}); print('in', flush=True);"
        'line.sendall(b\'{"version": 1, "ask": "x"}\\n\'); print(line.recv(100))'
    )
    for folder in served.path.parents:
        if folder.stat().st_mode & 0o1 == 0:
            folder.chmod(folder.stat().st_mode | 0o1)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        if other.stdout.readline() == "in\n":  # a folder above may bar the way
            deadline = time.monotonic() + PATIENCE
            while other.poll() is None and time.monotonic() < deadline:
                served.serve()
                time.sleep(0.01)
            assert "heard" not in other.stdout.read()


def test_the_signal_is_nobody_elses() -> None:
    from rallypoint.launch.worker.job import ASK_SIGNAL

    assert signal.SIGRTMIN < STACK_SIGNAL < signal.SIGRTMAX and STACK_SIGNAL != ASK_SIGNAL


# -- several nodes --------------------------------------------------------------------------------


def test_stacks_come_from_all_nodes(tmp_path: Path) -> None:
    """Two supervisors, one of which is asked. A node whose supervisor is stopped is reported as silent, within the patience."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    port = free_port()
    words = [
        RALLY,
        "run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-id",
        "far",
        "--insecure",
    ]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    folder = tmp_path / "marks"
    folder.mkdir()
    nodes = [Popen([*words, str(script), str(folder)], stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        wait_until(lambda: len(list(folder.glob("rank-*"))) == 4, "all ranks stand")
        found = {told["pid"]: job for job, told in running() if isinstance(told, dict)}
        asked = found[nodes[0].pid]
        processes = asked.stacks(by_signal=True)
        assert [each["rank"] for each in processes] == [0, 1, 2, 3]
        ends = [each["threads"][0]["frames"][-1]["function"] for each in processes]
        assert ends == ["reads_a_pipe", "waits_for_a_lock", "runs_a_loop", "holds_the_gil_in_c"]
        own = {each["rank"] for each in asked.status()["workers"]}
        assert {each["rank"] for each in asked.stacks(by_signal=True, here=True)} == own
        (there,) = {0, 1, 2, 3} - own - {max({0, 1, 2, 3} - own)}
        assert [each["rank"] for each in asked.stacks([there], by_signal=True)] == [there]
        with pytest.raises(ControlError, match=r"no rank 4 in this job \(it has ranks 0-3\)"):
            asked.stacks([4])
        there_too = found[nodes[1].pid].status()["workers"]
        # The loop, if it is there, would keep a core busy meanwhile.
        stopped = [nodes[1].pid, *(each["pid"] for each in there_too if each["rank"] == 2)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            answer = asked.ask({"ask": "stacks", "by_signal": True, "patience": 0.2}, PATIENCE)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert {each["rank"] for each in answer["processes"]} == own
        assert len(answer["silent"]) == 1
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(PATIENCE)


# -- rally top ------------------------------------------------------------------------------------


def test_usage_is_of_a_worker_and_its_children(job: Job) -> None:
    first = connect(job.name).usage()
    assert [each["rank"] for each in first] == list(range(5))
    assert [each["children"] for each in first] == [0, 0, 0, 0, 1]
    assert all(each["memory"] > 1 << 20 and each["threads"] >= 1 for each in first)
    loops = next(each for each in first if each["rank"] == 2)
    then = wait_until(
        lambda: next(
            (
                each
                for each in connect(job.name).usage()
                if each["rank"] == 2 and each["cpu"] > loops["cpu"]
            ),
            None,
        ),
        "the loop uses a core",
    )
    assert then["at"] > loops["at"]


def test_top_once(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", job.name, "--once", "--interval", "0.3"]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{job.name}: running, 5 ranks, generation 0, 0 of 0 restarts")
    assert columns.split()[:4] == ["RANK", "HOST", "PID", "CPU%"]
    assert [row.split()[0] for row in rows] == list("01234")
    assert all(row.split()[3].isdigit() for row in rows), "percent of a core"
    assert main(["top", job.name, "--interval", "0"]) == 2
    assert "--interval '0': expected seconds" in capsys.readouterr().err
    assert main(["top", job.name, "--once", "--sort", "speed"]) == 2
    assert "--sort 'speed': expected rank, cpu, memory or gpu" in capsys.readouterr().err


def test_top_on_a_terminal_of_80_columns(job: Job) -> None:
    """Keys sort, show stacks and quit; the terminal is left as it was."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(RALLY, ["rally", "top", job.name, "--interval", "0.5"])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(fd)
    shown = bytearray()

    def wait_shown(text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in shown:
            assert time.monotonic() < deadline, (text, bytes(shown[-3000:]))
            if select.select([fd], [], [], 0.2)[0]:
                shown.extend(os.read(fd, 65536))

    try:
        wait_shown("CPU%")
        wait_shown("q quit   r c m sort")
        widths = [
            len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip("\r"))
            for line in re.split(r"\n|\x1b\[\d*;?\d*H", shown.decode())
        ]
        assert max(widths) <= 80
        os.write(fd, b"s")
        wait_shown("in waits_for_a_lock")
        os.write(fd, b"x")
        del shown[:]
        wait_shown("q quit   r c m sort")
        os.write(fd, b"\x1b[B\x1b[B")
        wait_shown("of rank 1")
        wait_shown("\x1b[7m   1 ")
        os.write(fd, b"\x1b[As")
        wait_shown("rank 0 (pid")
        os.write(fd, b"x\x1b")
        del shown[:]
        wait_shown("l log")
        os.write(fd, b"l")
        wait_shown("any key: back")
        os.write(fd, b"xq")
        wait_shown("\x1b[?1049l")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert termios.tcgetattr(fd) == before
    finally:
        os.close(fd)


def test_top_goes_on_while_the_job_does_not_answer_and_puts_the_terminal_back(
    quiet_job: Job,
) -> None:
    """`rally run` is stopped by Ctrl-Z, say; then a signal ends `rally top`."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(RALLY, ["rally", "top", quiet_job.name, "--interval", "0.2"])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(fd)
    shown = bytearray()

    def wait_shown(text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in shown:
            assert time.monotonic() < deadline, (text, bytes(shown[-3000:]))
            if select.select([fd], [], [], 0.2)[0]:
                shown.extend(os.read(fd, 65536))

    try:
        wait_shown("CPU%")
        quiet_job.process.send_signal(signal.SIGSTOP)
        wait_shown("does not answer")
        quiet_job.process.send_signal(signal.SIGCONT)
        del shown[:]
        wait_shown(f"{quiet_job.name}: running")
        os.write(fd, b"\x1a")  # Ctrl-Z is a key like any other
        os.kill(pid, signal.SIGTERM)
        wait_shown("\x1b[?1049l")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
        assert termios.tcgetattr(fd) == before
    finally:
        quiet_job.process.send_signal(signal.SIGCONT)
        os.close(fd)


# -- a job that hangs -----------------------------------------------------------------------------


def read_until(job: Any, *texts: str) -> str:
    """What the job prints on stderr, until all of these texts have come."""
    shown = ""
    while not all(each in shown for each in texts):
        line = job.stderr.readline().decode()
        assert line, shown
        shown += line
    return shown


WAITS = """
import hashlib, os, sys, threading, time
import torch, torch.distributed as dist

def reads_a_pipe():
    read, write = os.pipe()
    os.read(read, 1)

def computes():
    while True:
        pass

def forks():
    # its child does not answer for it
    if os.fork() == 0:
        time.sleep(1000)
    reads_a_pipe()

how = sys.argv[1]
if how == "busy":
    # As if all waited for a GPU: each keeps a core busy.
    threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha1", b"", b"", 10**9), daemon=True).start()
dist.init_process_group("gloo")
assert how == "busy" or threading.enumerate() == [threading.main_thread()]
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    {
        "read": reads_a_pipe,
        "compute": computes,
        "serve": reads_a_pipe,
        "fork": forks,
        "busy": reads_a_pipe,
        "other": lambda: dist.barrier(),
        "sizes": lambda: dist.all_reduce(torch.ones(1 << 20)),
    }[how]()
if how == "serve":
    reads_a_pipe()
dist.all_reduce(torch.ones(1))
"""

NOT_ENTERED = "has not entered all_reduce #2 (float32 [1], 4 B) of the default group, in which ranks 0, 2 wait"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("read", f"rank 1 {NOT_ENTERED}"),
        ("compute", f"rank 1 {NOT_ENTERED}"),
        ("busy", f"rank 1 {NOT_ENTERED}"),
        ("fork", f"rank 1 {NOT_ENTERED}"),
        ("other", "the calls #2 of the default group do not match: rank 1 calls barrier at "),
        ("serve", ""),
    ],
)
def test_a_job_that_hangs_says_who_does_not_come(tmp_path: Path, how: str, says: str) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    events = tmp_path / "events.jsonl"
    # Some keep cores busy meanwhile.
    after = "0.2" if how in {"compute", "busy"} else "1"
    words = [RALLY, "run", "--nproc-per-node", "3", "--hang-after", after, str(script), how]
    env = {**os.environ, "RALLY_EVENTS": os.fspath(events)}
    job = Popen(words, stderr=subprocess.PIPE, env=env)
    try:
        if says:
            # With so short a time, a slow start is reported as a hang first; the right report follows.
            read_until(job, says, "\nranks 0, 2, in")
            wait_until(lambda: '"job_hangs"' in events.read_text(), "the event")
        else:
            wait_until(lambda: events.exists() and "worker_started" in events.read_text(), "starts")
            time.sleep(4)  # nothing is said
            assert "job_hangs" not in events.read_text()
        assert job.poll() is None, "the job goes on"
    finally:
        job.terminate()
        job.wait(PATIENCE)
        job.stderr.close()


def test_those_who_ask_at_the_same_time_do_not_take_each_others_answers(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    name = f"asked-{os.getpid()}"
    job = Popen([RALLY, "run", "--nproc-per-node", "3", "--rdzv-id", name, str(script), "serve"])
    has_asked = threading.Event()

    def ask_for_memory() -> None:
        while not has_asked.is_set():
            connect(name).ask({"ask": "memory", "ranks": []}, PATIENCE)

    asks = threading.Thread(target=ask_for_memory)
    try:
        wait_until(lambda: json.dumps(_stacks(name)).count("reads_a_pipe") == 3, "all ranks wait")
        asks.start()
        for _ in range(20):
            found = connect(name).stacks(by_signal=True)
            assert [each["why"] for each in found] == [""] * 3
            assert all(each["threads"][0]["frames"] for each in found)
    finally:
        has_asked.set()
        if asks.ident is not None:
            asks.join()
        job.terminate()
        job.wait(PATIENCE)


def _stacks(name: str) -> list[dict[str, Any]]:
    try:
        return connect(name).stacks(by_signal=True)
    except ControlError:  # it is starting
        return []


LEAVES = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit()
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def test_a_rank_that_has_ended_is_said_to_be_what_the_others_wait_for(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    words = [RALLY, "run", "--nproc-per-node", "3", "--hang-after", "1", str(script)]
    job = Popen(words, stderr=subprocess.PIPE)
    try:
        shown = read_until(job, f"{script}:6 in <module>")
        assert "rank 1 does not come to a collective in which ranks 0, 2 wait" in shown
        assert "; rank 1 has ended\n" in shown
        words = [RALLY, "stacks", str(job.pid)]
        asked = subprocess.run(words, capture_output=True, timeout=PATIENCE, check=True)
        assert asked.stdout.endswith(b"\n\nrank 1 has ended\n")
    finally:
        job.kill()
        job.wait(PATIENCE)
        job.stderr.close()


def test_collectives_of_other_sizes_are_told_although_gloo_aborts_another_rank(
    tmp_path: Path,
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    words = [RALLY, "run", "--nproc-per-node", "4", str(script), "sizes"]
    job = Popen(words, stderr=subprocess.PIPE)
    _, shown = job.communicate(timeout=PATIENCE)
    told = " ".join(shown.decode().split())
    assert job.returncode != 0
    assert (
        "the calls #2 of the default group do not match: rank 1 calls all_reduce (float32 [1048576], 4.0 MiB)"
        in told
    )


@pytest.mark.parametrize("what", ["restart", "fail"])
def test_a_job_that_hangs_is_restarted_or_fails_on_request(tmp_path: Path, what: str) -> None:
    script = tmp_path / "waits.py"
    # It hangs in the first generation.
    script.write_text(
        WAITS.replace(
            "dist.get_rank() == 1", 'dist.get_rank() == int(os.environ["RALLY_GENERATION"]) + 1'
        )
    )
    words = [
        RALLY,
        "run",
        "--nproc-per-node",
        "2",
        "--hang-after",
        "1",
        "--on-hang",
        what,
        "--stacks-on-hang" if what == "restart" else "--no-stacks-on-hang",
        "--max-restarts",
        "1",
    ]
    job = Popen([*words, str(script), "read"], stderr=subprocess.PIPE)
    _, shown = job.communicate(timeout=PATIENCE)
    told = " ".join(shown.decode().split())
    why = "it hangs: rank 1 has not entered all_reduce #2"
    assert ("in reads_a_pipe" in told) == (what == "restart")
    if what == "restart":
        assert (
            job.returncode == 0
            and why in told
            and "restarting all workers (attempt 2 of 2)" in told
        )
    else:
        assert job.returncode != 0 and f"the job failed: {why}" in told


MISSES_A_RECOVERY = """
import os, signal
from rallypoint import elastic
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["RALLY_GENERATION"] == "0"
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with elastic.session(model, optimizer) as session:
    while session.position < 3:
        with session.step():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if first and session.position == 2 and rank == 1:
            os.read(os.pipe()[0], 1)
        if first and session.position == 2 and rank == 0 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_recovery_to_which_a_rank_does_not_come_is_a_hang(tmp_path: Path) -> None:
    script = tmp_path / "misses.py"
    script.write_text(MISSES_A_RECOVERY)
    words = [RALLY, "run", "--nproc-per-node", "3", "--hang-after", "1", str(script)]
    job = Popen(words, stderr=subprocess.PIPE, cwd=tmp_path)
    says = "rally: ranks 0, 2 wait for rank 1 to recover from a loss: no worker has"
    try:
        # With so short a time, a slow start is reported first.
        read_until(job, says, f"{script}:17 in <module>")
        wait_until(lambda: connect(str(job.pid)).status()["state"] == "HANGING: rank 1", "status")
    finally:
        job.terminate()
        job.wait(PATIENCE)
        job.stderr.close()


IS_LEFT_ALONE = """
import os, threading, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    threading.Event().wait()
"""


def test_a_rank_that_is_left_alone_is_reported_and_not_ended(tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    script.write_text(IS_LEFT_ALONE)
    words = [RALLY, "run", "--nproc-per-node", "3", "--hang-after", "1", "--on-hang", "fail"]
    job = Popen([*words, str(script)], stderr=subprocess.PIPE)
    says = "rally: rank 1 is still running, although rank"
    try:
        read_until(job, says, f"{script}:6 in <module>")
        wait_until(lambda: connect(str(job.pid)).status()["state"] == "HANGING: rank 1", "status")
        time.sleep(2)
        assert job.poll() is None, "the job goes on"
    finally:
        job.terminate()
        job.wait(PATIENCE)
        job.stderr.close()


HANGS_IN_A_CALL = """
import os, threading
from rallypoint import rpc

def hangs():
    threading.Event().wait()

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
if rank == 0:
    rpc.rpc_sync("worker1", hangs, timeout=0)
rpc.shutdown()
"""


def test_a_call_that_hangs_is_reported_with_what_serves_it(tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(HANGS_IN_A_CALL)
    job = Popen(
        [RALLY, "run", "--nproc-per-node", "3", "--hang-after", "1", str(script)],
        stderr=subprocess.PIPE,
    )
    says = "rally: rank 0 waits for the answer to a call; rank 1 still serves one: no worker has"
    try:
        read_until(job, says, f"{script}:6 in hangs")
    finally:
        job.terminate()
        job.wait(PATIENCE)
        job.stderr.close()


CALLS_ON_AND_ON = """
import os, time
from rallypoint import rpc

def takes_its_time():
    time.sleep(1.5)

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    for _ in range(6):
        rpc.rpc_sync("worker1", takes_its_time)
rpc.shutdown()
"""


def test_slow_calls_that_go_on_are_no_hang(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(CALLS_ON_AND_ON)
    words = [RALLY, "run", "--nproc-per-node", "2", "--hang-after", "3", str(script)]
    job = Popen(words, stderr=subprocess.PIPE)
    _, shown = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0 and b"answer to a call" not in shown, shown


@pytest.mark.long
def test_a_hang_on_another_node_restarts_all_nodes(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        WAITS.replace(
            "dist.get_rank() == 1", 'dist.get_rank() == 3 and os.environ["RALLY_GENERATION"] == "0"'
        )
    )
    endpoint = f"127.0.0.1:{free_port()}"
    words = [
        RALLY,
        "run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--hang-after",
        "2",
        "--on-hang",
        "restart",
    ]
    words += [
        "--max-restarts",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
        "--insecure",
    ]
    jobs = [Popen([*words, str(script), "read"], stderr=subprocess.PIPE) for _ in range(2)]
    shown = [" ".join(job.communicate(timeout=2 * PATIENCE)[1].decode().split()) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], shown
    assert all("it hangs: rank 3 has not entered all_reduce #2" in each for each in shown)

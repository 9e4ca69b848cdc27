"""What the system does not allow is answered in a sentence: the limit, its value, the next step; and nothing leaks."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import supervisors
from rallypoint._core import limits
from stub_torch import STUB


pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PIDS = Path("/sys/fs/cgroup/pids")
# Launches under every limit from hardly any descriptors to enough, and checks what is left after each.
SWEEP = """
import os, resource, sys, torch.distributed
from rallypoint.errors import LaunchError, WorkersFailed
from rallypoint.launch import MultiprocessConfig, launch_subprocesses

def open_files():
    return sorted(os.listdir("/proc/self/fd"), key=int)

def work():
    return os.environ["RANK"]

def launch():
    return launch_subprocesses(work, MultiprocessConfig(world_size=2, launch_method="fork"))

assert launch() == ["0", "1"]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before = open_files()
outcomes = []
for more in range(1, 48, 3):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + more, hard))
    try:
        outcomes.append(" ".join(launch()))
    except LaunchError as error:
        outcomes.append(type(error).__name__)
        if not isinstance(error, WorkersFailed):
            assert "(RLIMIT_NOFILE): ulimit -n" in str(error), error
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert open_files() == before, (more, [os.readlink(f"/proc/self/fd/{fd}") for fd in open_files()[3:-1]])
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        assert not file.read(), more
print(sorted(set(outcomes)), outcomes[-1])
"""


def rally(tmp_path: Path, *words: str, through: tuple[str, ...] = (), **more) -> str:
    """What `rally run WORDS` says when it fails: one line, and no traceback."""
    (tmp_path / "t.py").write_text("print('here')")
    script = "t.py" if through else str(tmp_path / "t.py")
    done = subprocess.run(
        [*through, sys.executable, "-m", "rallypoint", "run", "--start-method", "exec", *words, script],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120, "check": False, **more},
    )  # fmt: skip
    assert done.returncode in {1, 2}, done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("rally: "), done.stderr
    return str(done.stderr)


def test_open_files_of_a_function_launch(tmp_path):
    (tmp_path / "sweep.py").write_text(SWEEP)
    done = supervisors.run(
        [sys.executable, str(tmp_path / "sweep.py")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "LaunchError" in done.stdout
    assert done.stdout.endswith("0 1\n"), done.stdout
    assert "Traceback" not in done.stderr


STORE = """
import os, resource, socket, torch.distributed
from rallypoint.launch.server import store_host

listener = socket.create_server(("localhost", 0))
most = max(map(int, os.listdir("/proc/self/fd"))) + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
store_host.serve(listener.fileno(), listener.getsockname()[1])
"""


def test_a_store_that_may_open_no_file_says_so_in_a_line():
    done = supervisors.run(
        [sys.executable, "-c", STORE],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("rally: the workers' store cannot be served at port ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("most", [12, 20])
def test_open_files_of_a_command(tmp_path, most):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    said = rally(tmp_path, "--nproc-per-node", "4", preexec_fn=limit)
    assert f"no more than {most} files may be open in a process (RLIMIT_NOFILE)" in said


LISTENS = """
import os, resource
from rallypoint._core.addresses import bind_store

most = max(map(int, os.listdir("/proc/self/fd"))) + 1  # one, for the socket; looking up the name takes another
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
try:
    bind_store("localhost", 0)
except OSError as error:
    print(error.errno)
"""


def test_open_files_are_not_the_fault_of_a_port():
    done = subprocess.run(
        [sys.executable, "-c", LISTENS], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{errno.EMFILE}\n"


def test_a_size_of_files_that_leaves_no_room_for_those_in_memory(tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    said = rally(tmp_path, preexec_fn=limit)
    assert "no file may be larger than 0 bytes, also in memory (RLIMIT_FSIZE)" in said


def test_more_workers_than_the_machine_takes_are_refused_before_any_starts(tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    most, name = limits.most_processes()
    said = rally(tmp_path, "--nproc-per-node", "100000", preexec_fn=limit)
    # By default Linux gives a small machine fewer process ids than that.
    why = (
        f"no more than {most} processes may run here ({name})"
        if most <= 100000
        else "workers need 300000 open files, and no more than 512 are allowed"
    )
    assert f"--nproc-per-node '100000': {why}" in said and "start fewer workers" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "t.py"]
    if most > 200:
        said = rally(tmp_path, "--nproc-per-node", "200", preexec_fn=limit)
        assert "workers need 600 open files, and no more than 512 are allowed" in said


def test_workers_have_the_limit_that_was_set_and_there_may_be_more_of_them(tmp_path):
    script = tmp_path / "t.py"
    script.write_text("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")

    def limit() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))

    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", "--start-method", "exec", "--nproc-per-node", "8", str(script)],
        preexec_fn=limit, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.count("24") == 8


@pytest.fixture
def pids_cgroup() -> Iterator[Callable[[int], Callable[[], None]]]:
    if not (PIDS / "cgroup.procs").exists() or os.geteuid() != 0:
        pytest.skip("needs root and the pids controller of cgroup v1")
    folder = PIDS / f"rally-{uuid.uuid4().hex[:8]}"
    folder.mkdir()

    def most(number: int) -> Callable[[], None]:
        (folder / "pids.max").write_text(str(number))
        return lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None

    yield most
    folder.rmdir()


@pytest.mark.parametrize("most", [3, 4])
def test_processes_of_a_cgroup(tmp_path, pids_cgroup, most):
    """Which of our processes and threads is the first that cannot start depends on their timing."""
    said = rally(tmp_path, "--nproc-per-node", "2", preexec_fn=pids_cgroup(most))
    assert "Traceback" not in said
    if "no further process can be started" in said:
        assert f"(at most {most}: /sys/fs/" in said and "start fewer workers" in said
        return
    assert "cannot start" in said
    assert f"no more than {most} processes and threads may run in this cgroup (/sys/fs/" in said
    assert "pids.max): raise that (systemd TasksMax=" in said


def test_threads_that_a_worker_cannot_start(tmp_path, pids_cgroup):
    many = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "t.py").write_text(f"import threading\nfor _ in range(50): {many}\n")
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", str(tmp_path / "t.py")],
        env={**os.environ, "PYTHONPATH": str(STUB)},
        preexec_fn=pids_cgroup(30), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = " ".join(done.stderr.split())
    assert "RuntimeError: can't start new thread" in said
    assert "because no more than 30 processes and threads may run in this cgroup (/sys/fs/" in said


@pytest.mark.parametrize("most", [2, 3, 4])
def test_processes_of_a_user(tmp_path, most):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and util-linux to become another user, for whom the limit holds")
    # A user that no other test becomes, as processes are counted by user. It may read the interpreter's files.
    user = str(40_000 + os.getpid() % 20_000)
    reads = "+dac_override,+dac_read_search"
    become = ("setpriv", "--reuid", user, "--regid", user, "--clear-groups")
    become += ("--inh-caps", reads, "--ambient-caps", reads)
    os.chown(
        tmp_path, int(user), int(user)
    )  # without a privilege: reached from there, and not by its path

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    said = rally(tmp_path, "--nproc-per-node", "2", through=become, preexec_fn=limit)
    if most == 2:  # known before anything starts
        assert "no more than 2 processes may run here (RLIMIT_NPROC, ulimit -u)" in said
        return
    assert f"user {user} may run no more than {most} processes and threads (RLIMIT_NPROC):" in said
    assert "raise it with ulimit -u, or start fewer workers" in said


def test_a_working_directory_that_has_been_deleted(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()

    def leave() -> None:
        os.chdir(gone)
        os.rmdir(gone)

    said = rally(tmp_path, preexec_fn=leave, cwd=None)
    assert said == "rally: working directory: it has been deleted (cd to another one)\n"


@pytest.mark.netns
def test_a_loopback_interface_that_is_down(tmp_path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and util-linux for a network namespace")
    (tmp_path / "t.py").write_text("")
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "rallypoint", "run", str(tmp_path / "t.py")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "this machine cannot reach itself at localhost" in done.stderr
    assert "ip link set lo up" in done.stderr and done.stderr.count("\n") == 1


def test_an_interpreter_that_may_not_be_executed(tmp_path):
    python = tmp_path / "python"
    python.write_text("")
    said = rally(tmp_path, env={**os.environ, "PYTHON_EXEC": str(python)})
    assert f"PYTHON_EXEC '{python}': not executable" in said

"""``rally run --warm``: jobs that start from a process that has imported torch already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint._core import process
from rallypoint.launch.server import warm_client
from rallypoint.launch.server.channel import Channel
from rallypoint.launch.server.warm_server import WarmServer
from stub_torch import STUB
from supervisors import RALLY


PATIENCE = 30.0

# What a worker tells about itself; argv: a file to write it to, and a file to wait for.
TELLS = """
import json, os, pathlib, sys, time
import torch

def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

try:
    import helper
    said = helper.SAID
except ImportError:
    said = None
told = {
    "pid": os.getpid(), "server": parent(os.getppid()), "fork_server": os.getppid(), "env": dict(os.environ),
    "folder": os.getcwd(), "path": sys.path[0], "said": said, "torch": torch.__file__,
}
target = pathlib.Path(sys.argv[1] + os.environ["RANK"])
target.with_suffix(".part").write_text(json.dumps(told))
target.with_suffix(".part").rename(target)
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""


class Jobs:
    """Runs jobs that share a warm server with no other test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(TELLS)
        self.started: list[subprocess.Popen[str]] = []
        self.env = {
            **os.environ,
            "PYTHONPATH": str(STUB),
            "TORCH_TEST": uuid.uuid4().hex,  # a name of its own
        }

    def start(self, *words: str, flags: tuple[str, ...] = (), **more: Any) -> subprocess.Popen[str]:
        env = {**self.env, **more.pop("env", {})}
        job = subprocess.Popen(
            [RALLY, "run", "--warm", *flags, str(self.script), *words],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **{"cwd": self.folder, **more},
        )
        self.started.append(job)
        return job

    def run(self, name: str = "told", **more: Any) -> dict[str, Any]:
        """Run a job with one worker; returns what it tells, and what was printed on stderr."""
        job = self.start(str(self.folder / name), **more)
        _, printed = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, printed
        return {**json.loads((self.folder / f"{name}0").read_text()), "printed": printed}

    def server(self) -> dict[str, Any]:
        """The warm server of these jobs."""
        (found,) = self.servers()
        return found

    def servers(self) -> list[dict[str, Any]]:
        mark = self.env["TORCH_TEST"].encode()
        found = []
        for told in warm_client.running():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{told['pid']}/environ").read_bytes():
                    found.append(told)
        return found


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    used = Jobs(tmp_path)
    yield used
    for job in used.started:
        job.kill()
        job.communicate()
    # Jobs of other tests may stop it as well: they make room for a server of their own.
    if pids := [told["pid"] for told in used.servers()]:
        warm_client.stop(pids)
    until(lambda: not used.servers())


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def read(file: Path) -> dict[str, Any]:
    until(file.exists)
    told: dict[str, Any] = json.loads(file.read_text())
    return told


def test_the_next_job_starts_from_the_same_server(jobs: Jobs) -> None:
    first, second = jobs.run(), jobs.run()
    assert first["printed"] == second["printed"] == ""
    assert first["server"] == second["server"] == jobs.server()["pid"]
    assert first["fork_server"] != second["fork_server"]
    until(lambda: jobs.server()["jobs"] == [])
    listed = subprocess.run([RALLY, "ps"], capture_output=True, text=True, check=True).stdout
    assert f"warm server {first['server']}: torch" in listed
    told = subprocess.run(
        [RALLY, "warm", "--stop", str(first["server"])], capture_output=True, text=True, check=True
    ).stdout
    assert told == f"ended: {first['server']}\n"
    assert not process.is_running(first["server"])


def test_each_job_has_its_own_environment_and_folder(jobs: Jobs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    first = jobs.run(env={"MINE": "1", "WANDB_API_KEY": "hidden", "RALLY_SECRET": "s" * 32})
    second = jobs.run(env={"YOURS": "2"}, cwd=other)
    assert first["server"] == second["server"]
    assert first["env"]["MINE"] == "1"
    assert "MINE" not in second["env"]
    assert second["env"]["YOURS"] == "2"
    assert (first["folder"], second["folder"]) == (str(tmp_path), str(other))
    assert first["path"] == second["path"] == str(tmp_path)
    memory = Path(f"/proc/{jobs.server()['pid']}/environ").read_bytes()
    assert b"hidden" not in memory
    assert b"s" * 32 not in memory


def test_edited_modules_are_seen_anew(jobs: Jobs, tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("SAID = 'before'\n")
    first = jobs.run()
    helper.write_text("SAID = 'afterwards'\n")
    second = jobs.run()
    assert (first["said"], second["said"]) == ("before", "afterwards")
    assert first["server"] == second["server"]


def test_a_variable_that_torch_reads_leads_to_another_server(jobs: Jobs) -> None:
    first, second = jobs.run(), jobs.run(env={"OMP_NUM_THREADS": "7"})
    assert first["server"] != second["server"]
    assert second["env"]["OMP_NUM_THREADS"] == "7"


def test_a_module_beside_the_script_that_torch_would_import(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run()
    (tmp_path / "inspect").mkdir()  # a package of this name, as Python would see it
    (tmp_path / "inspect" / "__init__.py").touch()
    (tmp_path / "json").mkdir()
    job = jobs.start(str(tmp_path / "told"))
    _, printed = job.communicate(timeout=PATIENCE)
    assert "--warm has no effect" in printed
    assert "takes the place of a module" in printed


def test_a_new_torch_leads_to_a_new_server(jobs: Jobs, tmp_path: Path) -> None:
    copy = tmp_path / "lib"
    subprocess.run(["cp", "-r", str(STUB), str(copy)], check=True)
    jobs.env["PYTHONPATH"] = str(copy)
    first = jobs.run()
    # A module of torch, but not the one whose modification time is in the server's name.
    os.utime(copy / "torch" / "distributed" / "__init__.py", ns=(1, 1))
    second = jobs.run()
    assert second["server"] != first["server"]
    assert second["server"] == jobs.server()["pid"]
    until(lambda: not process.is_running(first["server"]))


def test_two_jobs_at_once(jobs: Jobs, tmp_path: Path) -> None:
    """Both find no server: one of them starts it."""
    go = tmp_path / "go"
    running = [jobs.start(str(tmp_path / name), str(go)) for name in ("a", "b")]
    told = [read(tmp_path / name) for name in ("a0", "b0")]
    assert told[0]["server"] == told[1]["server"] == jobs.server()["pid"]
    assert sorted(jobs.server()["jobs"]) == sorted(each["fork_server"] for each in told)
    assert jobs.server()["idle"] is None
    running[0].kill()  # its supervisor: its worker goes, the other job does not notice
    until(lambda: not process.is_running(told[0]["pid"]))
    assert process.is_running(told[1]["pid"])
    go.touch()
    assert running[1].wait(PATIENCE) == 0


def test_a_job_outlives_its_server(jobs: Jobs, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = jobs.start(str(tmp_path / "a"), str(go))
    first = read(tmp_path / "a0")
    os.kill(first["server"], signal.SIGKILL)
    until(lambda: not process.is_running(first["server"]))
    second = jobs.run()  # its socket was left, and leads nowhere
    assert second["server"] not in {first["server"], 0}
    assert second["server"] == jobs.server()["pid"]
    go.touch()
    assert job.wait(PATIENCE) == 0


@pytest.mark.long
def test_a_stopped_server_is_not_waited_for_long(jobs: Jobs) -> None:
    server = jobs.run()["server"]
    os.kill(server, signal.SIGSTOP)
    try:
        told = jobs.run()
        assert "--warm has no effect: the warm server has not answered for 5 s" in told["printed"]
        assert told["server"] != server
        words = [RALLY, "warm", "--stop", str(server)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "no answer (is it stopped?) from the warm server at /" in done.stderr
    finally:
        os.kill(server, signal.SIGCONT)


def test_a_killed_fork_server_leaves_nothing(jobs: Jobs, tmp_path: Path) -> None:
    jobs.script.write_text(
        TELLS.replace("import torch", "import torch, subprocess\nsubprocess.Popen(['sleep', '99'])")
    )
    job = jobs.start(str(tmp_path / "a"), str(tmp_path / "go"))
    told = read(tmp_path / "a0")
    below = process.descendants(told["fork_server"])
    assert len(below) >= 3  # a worker, its store, what the worker has started
    os.kill(told["fork_server"], signal.SIGKILL)
    _, printed = job.communicate(timeout=PATIENCE)
    assert job.returncode != 0
    assert f"fork server (pid {told['fork_server']}) has ended" in printed
    until(lambda: not any(map(process.is_running, below)))
    assert jobs.server()["pid"] == told["server"]


def test_it_ends_when_it_has_had_no_job_for_a_while(jobs: Jobs) -> None:
    told = jobs.run(flags=("--warm-timeout", "0.3"))
    until(lambda: not process.is_running(told["server"]))
    assert not jobs.servers()


def test_a_failing_script_and_a_signal(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run()
    go = tmp_path / "go"
    job = jobs.start(str(tmp_path / "a"), str(go))
    told = read(tmp_path / "a0")
    job.send_signal(signal.SIGINT)
    _, printed = job.communicate(timeout=PATIENCE)
    assert job.returncode == 128 + signal.SIGINT, printed
    assert not process.is_running(told["pid"])
    jobs.script.write_text("raise ValueError('no data')")
    failed = jobs.start()
    _, printed = failed.communicate(timeout=PATIENCE)
    assert failed.returncode == 1
    assert "ValueError: no data" in printed


def test_no_effect_with_several_nodes_or_plain_interpreters(jobs: Jobs) -> None:
    told = jobs.run(flags=("--start-method", "exec"))
    assert "--warm has no effect without --start-method forkserver" in told["printed"]
    assert not jobs.servers()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_other_users_are_not_served(open_folder: Path) -> None:
    path = open_folder / "x.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    pid = os.fork()
    if pid == 0:
        try:
            WarmServer(listener, path, 60.0).run(("json",))
        finally:
            os._exit(1)
    try:
        listener.close()
        until(lambda: path.stat().st_mode & 0o777 == 0o700)
        path.chmod(0o777)
        code = (
            "import os, socket, sys; os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
            'try: s.send(b\'{"do": "stop"}\')\n'
            "except BrokenPipeError: pass\n"
            "try: print(s.recv(100))\n"
            "except ConnectionResetError: print(b'')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.stdout == "b''\n", done.stderr
        own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.connect(str(path))
        channel = Channel(own)
        channel.send({"do": "status"})
        answers: list[Any] = []
        until(lambda: answers.extend(channel.receive()) or answers)
        assert answers[0][0]["pid"] == pid
        channel.close()
    finally:
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == 0
    assert not path.exists()

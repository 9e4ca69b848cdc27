"""The processes that serve a generation's store and the job's, as interpreters of their own (``--start-method exec``)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from rallypoint.launch.server.store_host import GO, READY


SERVE = "from rallypoint.launch.server.store_host import serve; serve({fd}, {port})"
SERVE_JOB = (
    "from rallypoint.launch.server.store_host import serve_job; serve_job({fd}, {port}, {line})"
)
# With a torch of another kind: its libraries alone cannot be loaded.
NEEDS_MORE = """\
import sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C" and not hasattr(sys.modules["torch"], "__file__"):
            raise AttributeError("torch has no VERSION")
sys.meta_path.insert(0, Refuses())
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        yield listener


@pytest.fixture(params=["libraries", "all"])
def env(request, tmp_path) -> dict[str, str]:
    """Has the store's process load torch's libraries alone, or all of torch."""
    (tmp_path / "sitecustomize.py").write_text(NEEDS_MORE if request.param == "all" else "")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "LOADS": request.param}


def assert_serves(listener: socket.socket) -> None:
    store = TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False)
    store.set("name", "value")
    assert store.get("name") == b"value"
    assert store.add("count", 2) == 2


def test_a_generations_store(env, listener):
    code = SERVE.format(fd=listener.fileno(), port=listener.getsockname()[1])
    command, passed = [sys.executable, "-c", code], [listener.fileno()]
    with subprocess.Popen(command, pass_fds=passed, env=env) as process:
        try:
            assert_serves(listener)
            code = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[2]
            assert code.startswith("import torch.distributed; ") == (env["LOADS"] == "all")
        finally:
            process.kill()


def test_the_jobs_store_serves_when_it_is_told_to(env, listener):
    ours, theirs = socket.socketpair()
    fd, port = listener.fileno(), listener.getsockname()[1]
    code = SERVE_JOB.format(fd=fd, port=port, line=theirs.fileno())
    command, passed = [sys.executable, "-c", code], [fd, theirs.fileno()]
    with ours, theirs, subprocess.Popen(command, pass_fds=passed, env=env) as process:
        try:
            assert ours.recv(1) == READY
            ours.send(GO)
            assert_serves(listener)
            ours.shutdown(socket.SHUT_RDWR)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_without_torch_it_says_so(listener, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    done = subprocess.run(
        [sys.executable, "-c", SERVE.format(fd=listener.fileno(), port=1)],
        pass_fds=[listener.fileno()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named torch"

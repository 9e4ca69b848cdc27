"""The process that serves a generation's store, as an interpreter of its own (``--start-method exec``)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore


SERVE = "from rallypoint.launch.server.store_host import serve; serve({fd}, {port})"
# A torch of another kind: its libraries alone do not serve a store.
NEEDS_MORE = """\
from rallypoint.launch import torch_private
import sys, types
def store_class(found=torch_private.store_class):
    if "torch.nn" not in sys.modules:
        sys.modules["torch"] = types.ModuleType("torch")
        raise AttributeError("_c10d_init")
    return found()
torch_private.store_class = store_class
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        yield listener


@pytest.mark.parametrize("kind", [pytest.param("", id="libraries"), pytest.param(NEEDS_MORE, id="all")])  # fmt: skip
def test_it_serves_with_torchs_libraries_alone_or_with_all_of_torch(kind, listener):
    code = kind + SERVE.format(fd=listener.fileno(), port=listener.getsockname()[1])
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, pass_fds=[listener.fileno()]) as process:
        try:
            store = TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False)
            store.set("name", "value")
            assert store.get("name") == b"value"
            assert store.add("count", 2) == 2
            words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
            assert words[2].startswith("import torch.distributed; ") == bool(kind)
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

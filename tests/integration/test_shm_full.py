"""A worker that writes to shared memory for which no space is left, as NCCL does in a container with Docker's 64 MiB."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from supervisors import RALLY


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small /dev/shm")

SCRIPT = """
import mmap
with open("/dev/shm/of-a-job", "w+b") as file:
    file.truncate(64 << 20)
    shared = mmap.mmap(file.fileno(), 64 << 20)
    shared[:] = b"x" * len(shared)
"""


def test_a_bus_error_names_the_full_file_system(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'
    alone = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
    done = subprocess.run(
        [*alone, RALLY, "run", "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 128 + 7, done.stderr
    assert "rank 0 was killed by SIGBUS" in done.stderr
    assert "because      /dev/shm is full; it has 8 MiB (docker run --shm-size=8g" in done.stderr

"""What a process and its children have used, as read from a real /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.control import usage


def test_the_time_of_children_that_have_ended_stays() -> None:
    before = usage.usage(os.getpid())["cpu"]
    work = "import time\nwhile time.process_time() < 0.3: pass"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", work], check=True)
    assert usage.usage(os.getpid())["cpu"] - before >= 0.85


def test_a_kernel_that_does_not_count_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text

    def read(path: Path, **_: str) -> str:
        if path.name == "io":
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(Path, "read_text", read)
    found = usage.usage(os.getpid())
    assert found["state"]
    assert found["memory"] > 0
    assert (found["read"], found["written"]) == (0, 0)

"""What a fork server leaves behind when it ends is killed, whatever it is."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint._core import process
from rallypoint.launch.server.server_process import ServerProcess


def test_a_process_of_another_user_does_not_save_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    real = os.kill

    def kill(pid: int, number: int) -> None:
        if pid == first.pid:
            raise PermissionError(pid)
        real(pid, number)

    def left() -> list[int]:
        return [each.pid for each in (first, second) if process.is_running(each.pid)]

    monkeypatch.setattr(os, "kill", kill)
    server: Any = SimpleNamespace(wait=lambda _: None, _left=left)
    assert ServerProcess.kill_orphans(server, 0.3) == [first.pid]
    monkeypatch.undo()
    assert not process.is_running(second.pid)
    first.kill()
    for each in (first, second):
        each.wait()

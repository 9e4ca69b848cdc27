"""The system's limits, where they cannot be read."""

from __future__ import annotations

import pytest

from rallypoint._core import limits


def test_a_machine_that_tells_no_limit_may_run_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # A container without /proc.
    monkeypatch.setattr(limits, "_number", lambda path: None)
    monkeypatch.setattr(limits.os, "geteuid", lambda: 0)
    assert limits.most_processes() == (4_194_304, "PID_MAX_LIMIT")
    assert limits.why_not(2) is None

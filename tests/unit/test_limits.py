"""The system's limits, where they cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint._core import limits


def test_a_machine_that_tells_no_limit_may_run_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # A container without /proc.
    monkeypatch.setattr(limits, "_number", lambda path: None)
    monkeypatch.setattr(limits.os, "geteuid", lambda: 0)
    assert limits.most_processes() == (4_194_304, "PID_MAX_LIMIT")
    assert limits.why_not(2) is None


def test_only_a_limit_that_has_refused_something_meanwhile_is_named(tmp_path: Path) -> None:
    limit = tmp_path / "pids.max"
    limit.write_text("30\n")
    path, other = str(limit), "/sys/fs/cgroup/pids/other/pids.max"
    assert limits.explain_refusal({path: 2, other: 1}, {path: 2, other: 1}) is None
    assert limits.explain_refusal({}, {path: 2}) is None, "it is not known since when"
    said = limits.explain_refusal({path: 2, other: 1}, {path: 3, other: 1})
    assert said is not None and said.startswith(
        f"no more than 30 processes and threads may run in this cgroup ({path})"
    )

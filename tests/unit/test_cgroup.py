"""Limits of control groups, at any level of the hierarchy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rallypoint.launch.doctor import cgroup


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(own: str, files: Mapping[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "sys")
        monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")

    return make


USER = "user.slice/user-7.slice"


def test_the_limits_of_a_slice_hold_for_its_scopes(tree) -> None:
    tree(
        f"0::/{USER}/session-3.scope\n",
        {
            f"{USER}/session-3.scope/memory.max": "max\n",
            f"{USER}/session-3.scope/memory.current": "100\n",
            f"{USER}/session-3.scope/cpu.max": "max 100000\n",
            f"{USER}/memory.max": "8000\n",
            f"{USER}/memory.current": "3000\n",
            f"{USER}/memory.stat": "inactive_file 500\n",
            f"{USER}/cpu.max": "200000 100000\n",
            "user.slice/memory.max": "100000\n",
            "user.slice/memory.current": "5000\n",
            "user.slice/cpu.max": "800000 100000\n",
        },
    )
    assert cgroup.available_memory() == 5500
    assert cgroup.cpu_quota() == 2.0


def test_the_same_by_version_1(tree) -> None:
    tree(
        "4:memory:/job/step\n3:cpu,cpuacct:/job/step\n",
        {
            "memory/job/step/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/job/step/memory.usage_in_bytes": "10\n",
            "memory/job/memory.limit_in_bytes": "1000\n",
            "memory/job/memory.usage_in_bytes": "900\n",
            "cpu/job/step/cpu.cfs_quota_us": "-1\n",
            "cpu/job/step/cpu.cfs_period_us": "100000\n",
            "cpu/job/cpu.cfs_quota_us": "150000\n",
            "cpu/job/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup.available_memory() == 100
    assert cgroup.cpu_quota() == 1.5


def test_in_a_container_whose_path_is_the_hosts(tree) -> None:
    tree("0::/docker/abc\n", {"memory.max": "1000\n", "memory.current": "300\n"})
    assert cgroup.available_memory() == 700
    assert cgroup.cpu_quota() is None


def test_without_control_groups(tree) -> None:
    tree("", {})
    assert cgroup.available_memory() is None
    assert cgroup.cpu_quota() is None

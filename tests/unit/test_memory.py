"""The memory of processes: from the kernel's text to numbers and to a table."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.control.memory import mappings, memory_table
from rallypoint.launch.coordination import node_answers
from rallypoint.launch.worker import device_memory


SMAPS = """\
55d0c0a00000-55d0c0b00000 r-xp 00000000 08:01 131 /usr/bin/python3.11
Size:               1024 kB
Rss:                1000 kB
Pss:                 500 kB
Shared_Clean:       1000 kB
Private_Dirty:         0 kB
Swap:                  0 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
Rss:                 600 kB
Pss:                 600 kB
Private_Dirty:       600 kB
Swap:                 40 kB
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
Rss:                 100 kB
Pss:                 100 kB
Private_Clean:       100 kB
7f0000400000-7f0000500000 rw-s 00000000 00:17 9 /dev/shm/torch 1 (deleted)
Rss:                  64 kB
Pss:                  32 kB
Shared_Dirty:         64 kB
"""


def test_totals_and_names() -> None:
    found = mappings.memory(SMAPS)
    sizes = {key: found[key] // 1024 for key in mappings.KEYS}
    assert sizes == {
        "rss": 1764,
        "pss": 1232,
        "shared": 1064,
        "private": 700,
        "swap": 40,
        "huge": 0,
    }
    assert [(each["name"], each["count"]) for each in found["mappings"]] == [
        ("anonymous", 2),
        ("/usr/bin/python3.11", 1),
        ("/dev/shm/torch 1", 1),
    ]
    assert [each["name"] for each in found["shared_memory"]] == ["/dev/shm/torch 1"]


def test_of_this_process() -> None:
    with open("/proc/self/smaps") as file:
        found = mappings.memory(file.read())
    assert found["rss"] == found["private"] + found["shared"] > 1 << 20
    assert len(found["mappings"]) == mappings.MOST


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert mappings.memory(text)["rss"] >= 0


def process(rank: int, **more: Any) -> dict[str, Any]:
    usual = {"rank": rank, "pid": 100 + rank, "name": "", "host": "h", "why": "", "devices": []}
    return {**usual, **mappings.memory(SMAPS), **more}


def test_ranks_that_are_alike_are_shown_once() -> None:
    shown = memory_table.text([process(0), process(1), process(1, name="pt_data_worker")])
    assert "ranks 0, 1, largest mappings:" in shown
    assert "40K of it swapped out" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith(" all")]
    assert row.split() == ["all", "h", "3.6M", "2.1M", "120K"]
    assert "/dev/shm/torch 1 (ranks 0, 1)" in shown


def test_a_process_that_cannot_be_read_is_told() -> None:
    shown = memory_table.text([process(0, why="it has ended")])
    assert shown.splitlines()[1].endswith("it has ended")


class FakeCuda(types.ModuleType):
    """torch.cuda with one device, as its documentation describes it."""

    def is_initialized(self) -> bool:
        return True

    def max_memory_allocated(self, device: int) -> int:
        return 900

    def memory_snapshot(self) -> list[dict[str, Any]]:
        blocks = [
            {"state": "active_allocated", "size": 600},
            {"state": "inactive", "size": 300},
            {"state": "inactive", "size": 100},
        ]
        segment = {"device": 1, "total_size": 1000, "allocated_size": 600, "blocks": blocks}
        return [segment, segment]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("torch")
    fake.cuda = FakeCuda("torch.cuda")
    monkeypatch.setitem(sys.modules, "torch", fake)
    (found,) = device_memory.devices()
    assert found == {
        "device": "cuda:1",
        "allocated": 1200,
        "most_allocated": 900,
        "reserved": 2000,
        "segments": 2,
        "free": 800,
        "largest_free": 300,
    }
    shown = memory_table.text([process(0, devices=[found])])
    assert "rank 0, cuda:1: 1.2K allocated (at most 900B), 2.0K reserved in 2 segments" in shown
    assert node_answers.processes({"processes": [process(0, devices=[found])]})


def test_without_devices_nothing_is_initialised() -> None:
    import torch

    assert device_memory.devices() == []
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    "changes",
    [{"rss": "1"}, {"mappings": [{}]}, {"shared_memory": None}, {"devices": [1]}, {"why": None}],
)
def test_other_nodes_are_not_believed_anything(changes: dict[str, Any]) -> None:
    assert node_answers.processes({"processes": [process(0)]})
    assert node_answers.processes({"processes": [process(0, **changes)]}) == []

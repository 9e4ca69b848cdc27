"""A folder of checkpoints: names, records, which to load, which to remove."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from rallypoint._core.checkpoint_folder import entries
from rallypoint._core.checkpoint_records import (
    RECORD,
    Entry,
    File,
    Record,
    name_of,
    step_of,
    to_load,
    to_remove,
)
from rallypoint._core.storage import Directory
from rallypoint.errors import ConfigError
from rallypoint.launch.command_line import checkpoint_table


def record(step: int) -> Record:
    files = {"a": File(size=3, digest="d"), "b": File(size=4, digest="e")}
    return Record(step=step, epoch=1, batch=2, ranks=4, time=5.5, objects=("model",), files=files)


def entry(step: int, *, complete: bool) -> Entry:
    return Entry(name=name_of(step), step=step, record=record(step) if complete else None)


FOLDERS = st.dictionaries(st.integers(0, 40), st.booleans(), max_size=10).map(
    lambda each: [entry(step, complete=complete) for step, complete in each.items()]
)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_names_sort_like_steps(one: int, other: int) -> None:
    assert step_of(name_of(one)) == one
    if max(one, other) < 10**8:
        assert (name_of(one) < name_of(other)) == (one < other)


@pytest.mark.parametrize("name", ["step-1", "step-000000010.tmp", "x", "", "step-0000000a"])
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert step_of(name) is None


def test_a_record_survives() -> None:
    assert Record.parse(record(7).to_bytes()) == record(7)
    assert record(7).size == 7


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"step": "x"}, {"files": []}, {"files": {"a": {}}}, {"ranks": None}]
)
def test_a_changed_record_is_a_value_error(change: dict[str, object]) -> None:
    fields = json.loads(record(7).to_bytes()) | change
    with pytest.raises(ValueError, match=r"format|record of a checkpoint|invalid literal"):
        Record.parse(json.dumps(fields).encode())


@given(st.binary(max_size=60))
def test_garbage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        Record.parse(data)


@given(FOLDERS)
def test_the_newest_complete_one_is_tried_first(found: list[Entry]) -> None:
    tried = to_load(found)
    assert [each.step for each in tried] == sorted(
        (each.step for each in found if each.record), reverse=True
    )


@given(FOLDERS, st.integers(1, 4), st.data())
def test_what_is_removed(found: list[Entry], keep: int, data: st.DataObject) -> None:
    written = entry(data.draw(st.integers(0, 40)), complete=True)
    found = [each for each in found if each.name != written.name] + [written]
    aside = data.draw(st.sets(st.sampled_from([each.name for each in found]))) - {written.name}
    removed = to_remove(found, written=written.name, keep=keep, passed_over=aside)
    left = [each for each in found if each.name not in removed]
    assert written in left
    assert aside.isdisjoint(removed)
    # Other ranks may still be writing their parts of those.
    later = {each.name for each in found if each.record is None and each.step > written.step}
    assert later.isdisjoint(removed)
    counted = [each for each in left if each.name not in aside | later]
    assert all(each.record for each in counted)
    complete = [each for each in found if each.record and each.name not in aside]
    assert len(counted) == min(keep, len(complete))
    others = sorted(each.step for each in complete if each != written)
    assert [each.step for each in sorted(counted, key=lambda e: e.step) if each != written] == (
        others[len(others) - (len(counted) - 1) :]
    )


def test_a_folder_is_read(tmp_path) -> None:
    storage = Directory(tmp_path / "none yet")
    assert entries(storage) == []
    for step in (10, 20, 30):
        storage.make(name_of(step))
    storage.put(f"{name_of(10)}/{RECORD}", record(10).to_bytes())
    storage.put(f"{name_of(20)}/{RECORD}", b"{")
    storage.make("plots")
    first, second, third = entries(storage)
    assert first.record == record(10)
    assert second.record is None
    assert "not a record" in second.problem
    assert (third.record, third.problem) == (None, "")


def listed(*words: str) -> str:
    return checkpoint_table.command(words)


def test_checkpoints_are_listed(tmp_path) -> None:
    assert listed(str(tmp_path)) == f"no checkpoints in {tmp_path}"
    storage = Directory(tmp_path)
    for step in (10, 20, 30, 40):
        storage.make(name_of(step))
        for name, size in (("a", 3), ("b", 4)):
            (tmp_path / name_of(step) / name).write_bytes(bytes(size))
    for step in (10, 20):
        storage.put(f"{name_of(step)}/{RECORD}", record(step).to_bytes())
    storage.put(f"{name_of(30)}/{RECORD}", b"{")
    (tmp_path / name_of(20) / "b").write_bytes(b"x")
    head, *lines = listed(str(tmp_path)).splitlines()
    assert head.split() == ["STEP", "EPOCH", "TIME", "SIZE", "RANKS", "STATE"]
    assert lines[0].split()[0] == "10"
    assert lines[0].endswith("7 B      4  complete")
    assert lines[1].endswith("damaged: b has 1 bytes, expected 4")
    assert "damaged: checkpoint.json: not a record" in lines[2]
    assert lines[3].split() == ["40", "-", "-", "-", "-", "incomplete"]
    rows = [json.loads(line) for line in listed("--json", f"file://{tmp_path}").splitlines()]
    assert [row["state"] for row in rows] == ["complete", "damaged", "damaged", "incomplete"]
    assert (rows[0]["bytes"], rows[0]["ranks"], rows[0]["time"]) == (7, 4, 5.5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "expected one place, got 0"),
        (["a", "b"], "got 2"),
        (["--jsn", "a"], "no such flag"),
        (["/does/not/exist"], "no such place"),
        (["nosuchscheme://x"], "nosuchscheme"),
    ],
)
def test_wrong_words_are_told(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        listed(*words)


def test_listing_does_not_import_torch(tmp_path) -> None:
    code = (
        "import sys; from rallypoint.launch.cli import main; main(sys.argv[1:]);"
        "sys.exit('torch' in sys.modules)"
    )
    for words in (
        ["checkpoints", str(tmp_path)],
        ["checkpoints", "memory://x"],
        ["checkpoints", "-h"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr

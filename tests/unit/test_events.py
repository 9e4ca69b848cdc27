"""Events go from the part that reports one to every subscriber, in order, and never at the cost of the job."""

import errno
import json
import logging
import os
import subprocess
import sys
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint import events
from rallypoint._core import event_sinks, logs
from rallypoint.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SomethingHappened(events.Event):
    what: str
    count: int = 0


ALL = [
    each
    for each in vars(events).values()
    if isinstance(each, type) and issubclass(each, events.Event)
]


def test_subscribers_hear_everything_until_they_close() -> None:
    heard: list[events.Event] = []
    with events.subscribe(heard.append):
        assert events.is_wanted()
        events.emit(SomethingHappened(what="a"))
        with events.subscribe(heard.append):
            events.emit(SomethingHappened(what="b"))
        events.emit(SomethingHappened(what="c"))
    events.emit(SomethingHappened(what="d"))
    assert [each.what for each in heard if isinstance(each, SomethingHappened)] == list("abbc")
    assert not events.is_wanted()


def test_a_subscriber_that_fails_is_logged_once_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[events.Event] = []

    def fails(event: events.Event) -> None:
        raise RuntimeError("full")

    with events.subscribe(fails), events.subscribe(heard.append):
        for _ in range(3):
            events.emit(SomethingHappened(what="a"))
    assert len(heard) == 3
    assert (
        len([each for each in caplog.records if "subscriber to events failed" in each.message]) == 1
    )


def test_kinds_are_the_names_in_words_and_no_two_are_alike() -> None:
    kinds = [each.kind for each in ALL]
    assert SomethingHappened.kind == "something_happened"
    assert events.NodeLost.kind == "node_lost"
    assert len(set(kinds)) == len(kinds)


def test_fields_do_not_hide_those_of_every_line() -> None:
    own = {"version", "kind", "time", "monotonic", "host", "pid"}
    for each in ALL:
        assert not own & {field.name for field in fields(each)}, each
        if each is not events.Event:
            assert each.__name__ in events.__all__


@given(st.text(max_size=3000), st.integers())
@settings(max_examples=30)
def test_whatever_is_in_an_event_a_line_is_json(
    tmp_path_factory: pytest.TempPathFactory, what: str, count: int
) -> None:
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    events.JsonLines(str(path))(SomethingHappened(what=what, count=count))
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert record["count"] == count
    assert record["what"] == (what if len(what) <= 2000 else what[:2000] + "…")
    assert (record["kind"], record["pid"], record["version"]) == (
        "something_happened",
        os.getpid(),
        1,
    )


def test_the_file_is_private_and_may_be_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "events-{pid}.jsonl"
    sink = events.JsonLines(str(path))
    sink(SomethingHappened(what="before"))
    written = tmp_path / f"events-{os.getpid()}.jsonl"
    assert written.stat().st_mode & 0o777 == 0o600
    written.rename(tmp_path / "old")
    sink(SomethingHappened(what="after"))
    assert "before" in (tmp_path / "old").read_text()
    assert "after" in written.read_text()


def test_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    script = (
        "import sys; from rallypoint import events\n"
        "for i in range(300):\n"
        "    events.emit(events.MemberGone(worker=sys.argv[1] * 200, id=i, reason='r' * 500))\n"
    )
    env = {**os.environ, "RALLY_EVENTS": str(path)}
    writers = [subprocess.Popen([sys.executable, "-c", script, name], env=env) for name in "abc"]
    assert [each.wait() for each in writers] == [0, 0, 0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for name in "abc":
        assert [each["id"] for each in records if each["worker"][0] == name] == list(range(300))


def test_events_are_records_not_importing_torch() -> None:
    code = "import sys, rallypoint.events as e; e.emit(e.StoreLost(run_id='j', reason='')); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("path", ["/nowhere/at/all", "/dev/full", "/"])
def test_a_file_that_cannot_be_appended_to_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=f"RALLY_EVENTS '{path}': cannot append to this file: "):
        event_sinks.check({"RALLY_EVENTS": path})


def test_a_file_on_a_full_disk_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "events"
    sink = event_sinks.JsonLines(str(path))
    monkeypatch.setattr(event_sinks.os, "write", write)
    with events.subscribe(sink):
        for _ in range(2):
            events.emit(SomethingHappened(what="a"))
    monkeypatch.undo()
    told = f"RALLY_EVENTS: cannot append to {path}: No space left on device; it lacks events"
    assert [each.getMessage() for each in caplog.records] == [told]


def test_a_fifo_without_a_reader_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="cannot append"):
        events.JsonLines(str(tmp_path / "fifo"))


def test_log_lines_say_all_fields(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "rallypoint.events"),
        events.subscribe(event_sinks.log_event),
    ):
        events.emit(SomethingHappened(what="x y", count=3))
    assert [each.getMessage() for each in caplog.records] == [
        "something_happened what='x y' count=3"
    ]


def test_a_level_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="LOGLEVEL 'loud': no such level"):
        logs.set_up({"LOGLEVEL": "loud"})


def test_a_level_may_have_any_of_its_names() -> None:
    """Images set this variable for other programs."""
    ours = logging.getLogger("rallypoint")
    before = ours.level, ours.handlers[:]
    try:
        for name in ("WARN", "fatal", "NOTSET"):
            logs.set_up({"LOGLEVEL": name})
    finally:
        ours.setLevel(before[0])
        ours.handlers[:] = before[1]


def test_field_types_are_plain() -> None:
    plain = {str, int, float, bool, int | None, tuple[int, ...]}
    for each in ALL:
        kinds = typing.get_type_hints(each)
        kinds.pop("kind", None)
        assert set(kinds.values()) <= plain, each

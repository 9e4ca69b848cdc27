"""The step that a worker reports: memory that another process reads, and text."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

import rallypoint
from rallypoint._core import shared_page, step_reports
from rallypoint._core.shared_page import SIZE
from rallypoint._core.step_reports import BY_LOOP, BY_SCRIPT, BY_SESSION, NAME, Reporter
from rallypoint.control.tables import step_words
from rallypoint.launch.output.progress_display import Lines


@pytest.fixture(name="fd")
def _fd() -> Iterator[int]:
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def test_what_is_written_is_read(fd: int) -> None:
    reporter = Reporter(mmap.mmap(fd, SIZE))
    assert step_reports.read(fd) is None
    reporter.note(BY_SCRIPT, 1, 10, {}, 100.0)
    first = step_reports.read(fd)
    assert first is not None and (first.step, first.total, first.rate) == (1, 10, None)
    reporter.note(BY_SCRIPT, 3, None, {"loss": 0.5, "a\nb": math.nan}, 101.0)
    found = step_reports.read(fd)
    assert found is not None and (found.step, found.total, found.at) == (3, None, 101.0)
    assert found.rate == pytest.approx(2.0)
    assert list(found.metrics) == ["loss", "a b"]
    facts = found.facts(102.0)
    assert facts["metrics"] == {"loss": 0.5, "a b": "nan"} and facts["seconds_ago"] == 1.0
    assert shared_page.is_page(fd, NAME) and not shared_page.is_page(0, NAME)


@given(st.binary(max_size=200), st.integers(0, 100))
def test_what_somebody_else_wrote_is_nothing(data: bytes, place: int) -> None:
    """A script can write to its own memory, and the supervisor must tolerate that."""
    fd = os.memfd_create(NAME)
    try:
        memory = mmap.mmap(fd, 0) if os.ftruncate(fd, SIZE) else mmap.mmap(fd, SIZE)
        Reporter(memory).note(BY_SCRIPT, 1, 2, {"x": 1.0}, 5.0)
        memory[place : place + len(data)] = data
        found = step_reports.read(fd)
        assert found is None or found.step == 1
    finally:
        os.close(fd)


def test_most_steps_are_told_alone_and_all_is_told_ten_times_a_second(fd: int) -> None:
    reporter = Reporter(mmap.mmap(fd, SIZE))
    assert not reporter.note_step(BY_SCRIPT, 1, 100, 10.0), "nothing has been told yet"
    reporter.note(BY_SCRIPT, 0, 100, {"loss": 3.0}, 9.98)
    assert not reporter.note_step(BY_SCRIPT, 1, 100, 9.99, 1), "there is no rate yet"
    reporter.note(BY_SCRIPT, 1, 100, {"loss": 3.0}, 10.0)
    reporter.given = 1
    assert not reporter.note_step(BY_SCRIPT, 2, 100, 10.02, 2), "there is another metric"
    for step in range(2, 6):
        assert reporter.note_step(BY_SCRIPT, step, 100, 10.0 + step / 100, 1)
    found = step_reports.read(fd)
    assert found is not None
    assert (found.step, found.at, found.total, found.metrics) == (5, 10.05, 100, {"loss": 3.0})
    assert not reporter.note_step(BY_SCRIPT, 6, 100, 10.0 + step_reports.WHOLE_EVERY, 1)
    reporter.note(BY_SCRIPT, 6, 100, {"loss": 2.0}, 10.1)
    found = step_reports.read(fd)
    assert found is not None and (found.step, found.metrics) == (6, {"loss": 2.0})
    assert found.rate == pytest.approx(50.0, rel=0.01), "6 steps in 0.12 s"


@pytest.mark.parametrize(
    ("by", "step", "total"),
    [
        (BY_SCRIPT, 100, 100),  # the last step: its metrics are the ones that remain
        (BY_SCRIPT, 7, 100),  # another loop
        (BY_SCRIPT, 8, 100),  # the same step, perhaps with other metrics
        (BY_SESSION, 9, 100),
        (BY_SCRIPT, 9.0, 100),
        (BY_SCRIPT, True, 100),
        (BY_SCRIPT, 1 << 63, 100),
    ],
)
def test_what_is_more_than_a_step_is_told_at_once(
    fd: int, by: int, step: object, total: int
) -> None:
    reporter = Reporter(mmap.mmap(fd, SIZE))
    reporter.note(BY_SCRIPT, 7, 100, {}, 9.99)
    reporter.note(BY_SCRIPT, 8, 100, {}, 10.0)
    assert not reporter.note_step(by, step, total, 10.01)
    assert reporter.note_step(BY_SCRIPT, 9, 100, 10.01)


def test_the_step_of_a_loop_that_has_ended_is_not_that_of_the_next(fd: int) -> None:
    reporter = Reporter(mmap.mmap(fd, SIZE))
    reporter.note(BY_SCRIPT, 1, None, {}, 10.0)
    reporter.note(BY_SCRIPT, 2, None, {}, 10.01)
    assert reporter.note_step(BY_SCRIPT, 900, None, 10.05)
    reporter.note(BY_SCRIPT, 1, None, {}, 10.06)
    found = step_reports.read(fd)
    assert found is not None and (found.step, found.at, found.rate) == (1, 10.06, None)
    reporter.note(BY_SCRIPT, 2, None, {}, 10.07)
    assert reporter.note_step(BY_SCRIPT, 3, None, 10.08)
    reporter.note(BY_SCRIPT, 3, None, {"loss": 1.0}, 11.0)  # reported again; it started earlier
    found = step_reports.read(fd)
    assert found is not None and (found.step, found.at) == (3, 10.08)
    assert found.rate == pytest.approx(100.0)


def test_a_step_that_is_half_written_is_not_taken(fd: int) -> None:
    memory = mmap.mmap(fd, SIZE)
    reporter = Reporter(memory)
    reporter.note(BY_SCRIPT, 5, None, {}, 10.0)
    for latest in ((9, 10.5, 8), (9, math.nan, 9), (4, 10.5, 4)):
        struct.pack_into("qdq", memory, SIZE - 24, *latest)
        found = step_reports.read(fd)
        assert found is not None and (found.step, found.at) == (5, 10.0)


def test_a_pause_counts_and_is_forgotten(fd: int) -> None:
    reporter = Reporter(mmap.mmap(fd, SIZE))
    for step in range(101):
        reporter.note(BY_SCRIPT, step, None, {}, step / 10)
    reporter.note(BY_SCRIPT, 101, None, {}, 40.0)  # an evaluation of 30 s
    slow = step_reports.read(fd)
    assert slow is not None and slow.rate is not None and slow.rate < 2
    for step in range(102, 1103):
        reporter.note(BY_SCRIPT, step, None, {}, 40 + (step - 101) / 10)
    again = step_reports.read(fd)
    assert again is not None and again.rate == pytest.approx(10, rel=0.05)


def test_another_loop_and_another_reporter_begin_anew(fd: int) -> None:
    reporter = Reporter(mmap.mmap(fd, SIZE))
    reporter.note(BY_LOOP, 5, None, {}, 1.0)
    reporter.note(BY_LOOP, 6, None, {}, 2.0)
    reporter.note(BY_LOOP, 1, None, {}, 3.0)
    assert step_reports.read(fd).rate is None  # type: ignore[union-attr]
    reporter.note(BY_SESSION, 700, None, {}, 4.0)
    found = step_reports.read(fd)
    assert found is not None and (found.step, found.rate) == (700, None)
    reporter.note(BY_LOOP, 2, None, {}, 5.0)
    assert step_reports.read(fd) == found


def test_without_rally_it_does_nothing() -> None:
    rallypoint.progress(3, 5, loss=1.0)
    assert step_reports._reporter is None


def told(**more: Any) -> dict[str, Any]:
    usual = {"step": 1204, "total": 5000, "rate": 3.1, "seconds_ago": 0.1, "late": False}
    return {**usual, "seconds_left": 1224.0, "metrics": {"loss": 0.31}, **more}


def test_words() -> None:
    assert step_words.short(told()) == "step 1204 of 5000, 3.10 it/s"
    assert step_words.short(told(late=True, seconds_ago=192.0)) == "step 1204 of 5000 for 3m12s"
    assert step_words.short(told(total=None, rate=0.1)) == "step 1204, 10.0 s/it"
    long = "step 1204 of 5000, 3.10 it/s, 20m24s left, loss 0.31"
    assert step_words.long(told()) == long
    assert step_words.bar(told(), 100) == f" 24 % {'━' * 7}{'─' * 23}  {long}"


@given(
    st.integers(0, 300),
    st.integers(0, 1 << 60),
    st.none() | st.integers(0, 1 << 60),
    st.none() | st.floats(0, 1e9),
)
def test_no_bar_is_wider_than_the_terminal(
    width: int, step: int, total: int | None, rate: float | None
) -> None:
    assert len(step_words.bar(told(step=step, total=total, rate=rate), width)) <= max(1, width)


def test_lines_come_less_and_less_often_and_only_with_news() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    lines.show(told(step=1))
    assert not said and lines.interval == 30
    lines.show(told(step=2))
    assert len(said) == 1 and lines.interval == 60
    lines.show(told(step=2))
    assert len(said) == 1
    for step in range(3, 10):
        lines.show(told(step=step))
    assert len(said) == 8 and lines.interval == 600

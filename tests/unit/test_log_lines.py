"""Log files: records, rotation, reading, order."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rallypoint._core import log_folder, log_records, private
from rallypoint._core.log_folder import OLDER, LogFile
from rallypoint._core.log_records import Line, Origin
from rallypoint.control.logs import log_answers, log_lines, log_readers, log_reading
from rallypoint.control.logs.log_readers import LogReaders
from rallypoint.errors import ConfigError
from rallypoint.launch.command_line import given as command_lines
from rallypoint.launch.command_line.values import Values
from rallypoint.launch.output import rotation


def origin(rank: int = 0, stream: str = "stdout") -> Origin:
    return Origin(host="h", rank=rank, local_rank=rank, generation=0, stream=stream)


def line(text: str, at: float | None = None, rank: int = 0) -> Line:
    return Line(origin=origin(rank), time=at, monotonic=at, text=text)


@given(st.text().filter(lambda text: not text.endswith("\r")), st.floats(0, 1e10))
def test_a_record_is_read_as_it_was_written(text: str, time: float) -> None:
    text = text.encode("utf-8", "replace").decode()
    packed = log_records.pack(origin(3), time, 5.0, text.encode())
    assert b"\n" not in packed
    found = log_records.parse(packed, origin(3))
    assert (found.text, found.origin, found.monotonic) == (text, origin(3), 5.0)


@pytest.mark.parametrize(
    "text", ['{"version": 1}', '{"version": 1, "time": "x"}', '{"version": ', "plain"]
)
def test_what_is_no_record_is_text(text: str) -> None:
    assert log_records.parse(text.encode(), origin()).text == text


def test_of_a_progress_bar_the_last_state_is_shown() -> None:
    assert log_records.parse(b" 1 %\r 2 %\r 3 %\r", origin()).text == " 3 %"


# -- files ------------------------------------------------------------------------------------------


def log_file(folder: Path) -> LogFile:
    return LogFile(path=folder / "stdout.log", origin=origin(), replaced=0)


@pytest.fixture(name="write")
def _write(tmp_path: Path) -> Iterator[object]:
    fd = private.open_to_append(tmp_path / "stdout.log")
    yield rotation.writer(fd, tmp_path / "stdout.log", 30)
    os.close(fd)


def test_full_files_move_on_and_the_oldest_goes(tmp_path: Path, write) -> None:
    for number in range(100):
        write(b"line %3d\n" % number)  # three of them fill a file
    file = log_file(tmp_path)
    assert [each.name for each in file.parts()] == [
        *(f"stdout.log.{number}" for number in range(OLDER, 0, -1)),
        "stdout.log",
    ]
    assert all(each.stat().st_size <= 30 for each in file.parts())
    shown = [each.text for each in log_reading.every_line(file)]
    assert shown == [f"line {number:3}" for number in range(100 - len(shown), 100)]
    assert len(shown) == 4 * 3 + 1


def test_who_follows_a_rotated_file_misses_nothing(tmp_path: Path, write) -> None:
    file, place, found = log_file(tmp_path), None, []
    for number in range(40):
        write(b"line %3d\n" % number)
        if number % 5 == 0:
            while True:
                lines, following = log_reading.read(file, place, 16)
                found += [each.text for each in lines]
                if following == place:
                    break
                place = following
    assert found == [f"line {number:3}" for number in range(36)]


def test_a_line_that_is_not_complete_waits(tmp_path: Path) -> None:
    file = log_file(tmp_path)
    file.path.write_text("one\ntw")
    lines, place = log_reading.read(file, None)
    assert [each.text for each in lines] == ["one"]
    assert log_reading.read(file, place) == ([], place)
    assert [each.text for each in log_reading.rest(file, place)] == ["tw"]
    file.path.write_text("one\ntwo\n")
    assert [each.text for each in log_reading.read(file, place)[0]] == ["two"]


def test_a_folder_of_a_run(tmp_path: Path) -> None:
    for attempt in ("attempt_0", "attempt_2", "attempt_10", "attempt_2.1", "other"):
        for rank in (1, 0):
            (tmp_path / attempt / str(rank)).mkdir(parents=True)
            (tmp_path / attempt / str(rank) / "stderr.log").write_text("")
    log_folder.note_ranks(tmp_path / "attempt_2", "gpu-1", {0: 8, 1: 9})
    assert log_folder.generations(tmp_path) == [0, 2, 10]
    found = log_folder.log_files(tmp_path, 2)
    assert [(each.origin.rank, each.replaced) for each in found] == [(8, 0), (8, 1), (9, 0), (9, 1)]
    assert {each.origin.host for each in found} == {"gpu-1"}
    assert {each.origin.rank for each in log_folder.log_files(tmp_path, 0)} == {-1}


# -- lines ------------------------------------------------------------------------------------------


def test_lines_with_times_are_in_order_and_others_stay_where_they_are() -> None:
    first = [line("a", 1.0), line("of a"), line("c", 3.0)]
    second = [line("b", 2.0, 1), line("d", 4.0, 1)]
    shown = [each.text for each in log_lines.in_order([iter(first), iter(second)])]
    assert shown == ["a", "of a", "b", "c", "d"]
    plain = [[line("x"), line("y")], [line("z", rank=1)]]
    assert [each.text for each in log_lines.in_order([*map(iter, plain)])] == ["x", "y", "z"]


def test_choices() -> None:
    lines = [line(f"{word} {at}", at) for at, word in enumerate(["x", "y", "x", "y", "x"])]
    choice = log_lines.Choice(pattern=re.compile("^x"), tail=2)
    assert [each.text for each in choice.of(lines)] == ["x 2", "x 4"]
    assert [each.text for each in log_lines.Choice(since=3.0).of(lines)] == ["y 3", "x 4"]
    assert not list(log_lines.Choice(ranks=frozenset({1})).of(lines))


def test_sizes() -> None:
    def size(text: str) -> int:
        given = command_lines.parse(["--log-max-size", text, "x.py"])
        return Values(*command_lines.resolve(given, {}), {}).size("log_max_size")

    assert [size(each) for each in ("0", "500", "2K", "100M", "1GiB", "3gb")] == [
        0,
        500,
        2048,
        100 << 20,
        1 << 30,
        3 << 30,
    ]
    with pytest.raises(ConfigError, match="--log-max-size"):
        size("much")


# -- other nodes --------------------------------------------------------------------------------------


def test_an_answer_of_another_node_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    folder = tmp_path / "attempt_0" / "0"
    folder.mkdir(parents=True)
    file = folder / "stdout.log"
    file.write_bytes(log_records.pack(origin(), 1.0, 100.0, b"one") + b"\n")
    answer = log_answers.told(tmp_path, {}, {}) | {"now": 130.0}
    ((one,),) = log_answers.read(answer, 7000.0)
    assert (one.text, one.monotonic) == ("one", 6970.0)  # 30 s old, by either clock
    with file.open("ab") as opened:
        opened.write(b"two\n")
    places = log_answers.places_after({}, answer)
    ((two,),) = log_answers.read(log_answers.told(tmp_path, places, {}), 0.0)
    assert (two.text, two.monotonic) == ("two", None)
    assert log_answers.told(None, {}, {})["files"] == []
    with pytest.raises(ValueError, match="no answer"):
        log_answers.read({"now": 1.0, "files": [{}]}, 0.0)


def test_of_much_output_an_answer_has_the_end(tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    file = tmp_path / "attempt_0" / "0" / "stdout.log"
    file.write_text("".join(f"{number:09}\n" for number in range(200_000)))
    (told,) = log_answers.told(tmp_path, {}, {})["files"]
    texts = [text for _, text in told["lines"]]
    assert texts[-1] == "000199999" and len(texts) == log_answers.BUDGET // 10
    (told,) = log_answers.told(tmp_path, {}, {"room": log_answers.room(1024)})["files"]
    assert len(told["lines"]) == 64 * 1024 // 10, "of a thousand nodes each has less room"


class Follower:
    """Asks one node for its output, as ``rally logs -f`` does."""

    def __init__(self, readers: LogReaders, folder: Path) -> None:
        self.readers, self.folder = readers, folder
        self.number = -1
        self.missed: list[int] | str = []
        self.lines: list[str] = []

    def ask(self, *, arrives: bool = True, fails: bool = False) -> None:
        """``arrives``: its answer arrives. ``fails``: nobody's does."""
        self.number += 1
        question = {"reader": "me", "number": self.number, "missed": self.missed}
        answer = self.readers.answer(self.folder, question, 3)
        self.missed = []
        if not arrives:
            self.missed = log_readers.ALL if fails else [1, 3]
        elif answer is not None:
            self.lines += [line.text for lines in log_answers.read(answer, 0.0) for line in lines]


@given(st.lists(st.sampled_from(["write", "ask", "missed", "failed", "restart"]), max_size=30))
def test_who_follows_another_node_hears_each_line_once_whatever_is_missed(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as base:
        follower = Follower(LogReaders(), Path(base))
        written: list[str] = []
        generation = 0
        for step in steps:
            folder = Path(base) / f"attempt_{generation}" / "0"
            folder.mkdir(parents=True, exist_ok=True)
            match step:
                case "write":
                    written.append(f"line {len(written)}")
                    with (folder / "stdout.log").open("a") as file:
                        file.write(f"{written[-1]}\n")
                case "restart":
                    follower.ask()  # only its followers hear the rest of an older generation
                    generation += 1
                case _:
                    follower.ask(arrives=step == "ask", fails=step == "failed")
        for _ in range(3):
            follower.ask()
        assert follower.lines == written


def test_a_question_that_comes_late_is_not_answered(tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stdout.log").write_text("one\n")
    readers = LogReaders()
    assert readers.answer(tmp_path, {"reader": "me", "number": 1, "missed": [0]}, 0) is not None
    assert readers.answer(tmp_path, {"reader": "me", "number": 0, "missed": []}, 0) is None
    once = readers.answer(tmp_path, {}, 0)
    assert once is not None and once["files"][0]["lines"], "who does not follow has no place"


def test_readers_that_have_gone_are_forgotten(tmp_path: Path) -> None:
    readers = LogReaders()
    for number in range(10 * log_readers.MAX_READERS):
        readers.answer(tmp_path, {"reader": f"{number}", "number": 0, "missed": []}, 0)
    assert len(readers._readers) == log_readers.MAX_READERS

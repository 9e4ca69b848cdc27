"""A command's output arrives in any encoding, and a stream that accepts nothing changes no exit code."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint._core import standard_streams


RALLY = (sys.executable, "-m", "rallypoint")
REPORT = "  │   File …, line 3 → 2 µs ━━─\n"


def printed(text: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    standard_streams.set_up()
    standard_streams.write(text)
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]  # BytesIO


def test_what_an_encoding_lacks_is_printed_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(REPORT, "ascii", monkeypatch) == "  |   File ..., line 3 -> 2 us ==-\n"


def test_what_an_encoding_has_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(REPORT, "utf-8", monkeypatch) == REPORT
    assert "2 µs" in printed(REPORT, "latin-1", monkeypatch)


def test_all_other_characters_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed("日 🏖 ü", "latin-1", monkeypatch) == r"\u65e5 \U0001f3d6 ü"
    # A file name that is not valid UTF-8.
    assert printed("\udcff.py", "utf-8", monkeypatch) == r"\udcff.py"


def test_a_stream_may_lead_elsewhere_than_when_it_was_opened(tmp_path: Path) -> None:
    code = f"""
import os, sys
from rallypoint._core import standard_streams
sys.stdout = open({os.fspath(tmp_path / "file")!r}, "w", encoding="ascii")
os.dup2(1, sys.stdout.fileno())
standard_streams.set_up()
standard_streams.write("│")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=True
    )
    assert (result.stdout, result.stderr) == (b"|", b"")


def test_only_encoding_is_mended() -> None:
    standard_streams.set_up()
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("utf-8", standard_streams.PLAIN)


@pytest.mark.parametrize("words", [("--help",), ("run", "--help"), ("logs", "--help"), ("env",)])
def test_a_command_prints_in_any_encoding(words: tuple[str, ...]) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run((*RALLY, *words), capture_output=True, env=env, timeout=60, check=True)
    assert result.stdout.isascii()
    assert not result.stderr


@pytest.mark.parametrize("words", [("--help",), ("top", "--help"), ("logs", "--help"), ("ps",)])
def test_a_full_disk_is_told_in_a_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            (*RALLY, *words), stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert result.stderr == b"rally: cannot write to stdout: No space left on device\n"
    assert result.returncode == 1


@pytest.mark.parametrize("where", ["pipe", "full"])
def test_a_stderr_that_takes_nothing_does_not_change_the_exit_code(where: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    if where == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        result = subprocess.run(
            (*RALLY, "run", "no_such_script.py"), stderr=writer, env=env, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert result.returncode == 2


@pytest.mark.parametrize("words", [("--help",), ("top", "--help"), ("logs", "--help"), ("ps",)])
def test_whoever_reads_may_go(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            (*RALLY, *words), stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, True),
    ],
)
def test_colours_are_for_terminals_that_show_them(env: dict[str, str], expected: bool) -> None:
    ours, theirs = os.openpty()
    try:
        assert standard_streams.has_colour(theirs, env) is expected
    finally:
        os.close(ours)
        os.close(theirs)
    reader, writer = os.pipe()
    try:
        assert not standard_streams.has_colour(writer, {"TERM": "xterm"})
    finally:
        os.close(reader)
        os.close(writer)


def test_every_character_that_we_print_has_one_in_ascii() -> None:
    assert all(re.fullmatch("[ -~]+", each) for each in standard_streams._PLAIN.values())


@pytest.mark.parametrize("to", ["1>&-", "2>&-", "2> /dev/full > /dev/null"])
@pytest.mark.parametrize("command", ["--help", "ps", "env", "logs --help", "top --help"])
def test_who_wants_no_output_gets_no_error(command: str, to: str) -> None:
    line = f"{sys.executable} -m rallypoint {command} {to}"
    result = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, b"")

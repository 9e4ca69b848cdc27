"""An exception as data: what a worker tells of the way it failed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback

import pytest

from rallypoint.launch.worker import exceptions


def work() -> None:
    raise ValueError("expected 3 channels")


def described(function, code: int = 1) -> dict:
    try:
        function()
    except BaseException as error:
        return exceptions.describe(error, code)
    raise AssertionError("nothing was raised")


def handled() -> None:
    try:
        work()
    except ValueError:
        traceback.format_exc()
        sys.exit(3)


def handled_and_hidden() -> None:
    try:
        work()
    except ValueError:
        raise SystemExit(3) from None


class Leave(SystemExit):
    """As `fire` has its own."""


def left() -> None:
    try:
        work()
    finally:
        raise Leave(3)


@pytest.mark.parametrize("function", [handled, handled_and_hidden, left])
def test_an_exit_tells_what_was_being_handled(function):
    found = described(function, 3)
    assert (found["type"], found["message"], found["exited"]) == (
        "ValueError",
        "expected 3 channels",
        True,
    )
    assert "in work" in found["traceback"]
    assert f"in {function.__name__}" in found["traceback"]
    assert found["chains"] == [[["ValueError", "expected 3 channels"]]]


def test_an_exit_of_its_own_is_one():
    found = described(lambda: sys.exit("no licence"))
    assert (found["type"], found["message"], found["exited"]) == ("SystemExit", "no licence", False)
    assert described(lambda: sys.exit(3))["message"] == "3"


def test_argparse_stands_aside_for_the_users_line(capsys):
    def parse() -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.parse_args(["--lr", "abc"])

    found = described(parse, 2)
    assert found["type"] == "argparse.ArgumentError"
    assert found["message"] == "argument --lr: invalid float value: 'abc'"
    assert "in parse\n" in found["traceback"]
    assert "argparse.py" not in found["traceback"]
    assert "invalid float value" in capsys.readouterr().err


def test_a_groups_first_leaf_is_named_and_all_are_told():
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            cause = error
        leaf = RuntimeError("second")
        leaf.__cause__ = cause
        raise ExceptionGroup("errors in a TaskGroup", [ValueError("bad"), leaf])

    found = described(fail)
    assert found["message"] == "errors in a TaskGroup (2 sub-exceptions): ValueError: bad"
    assert found["chains"] == [
        [["ValueError", "bad"]],
        [["RuntimeError", "second"], ["KeyError", "'first'"]],
    ]


def test_a_message_of_10_megabytes_leaves_room_for_the_frames():
    def fail() -> None:
        raise ValueError("x" * 10_000_000)

    found = described(fail)
    assert len(found["message"]) == exceptions.MAX_MESSAGE
    assert "in fail" in found["traceback"]
    assert len(found["traceback"]) <= exceptions.MAX_TRACEBACK


def test_broken_exceptions_are_told():
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise TypeError

    def fail() -> None:
        raise Unspeakable

    found = described(fail)
    assert found["message"] == "(str() of it failed)"
    assert found["type"].endswith("Unspeakable")


def test_a_chain_that_goes_round_ends():
    first, second = ValueError("a"), KeyError("b")
    first.__context__, second.__context__ = second, first
    found = exceptions.describe(first, 1)
    assert len(found["chains"][0]) <= exceptions.MAX_CHAIN


def test_runpy_is_left_out(tmp_path):
    (tmp_path / "mod.py").write_text("raise ValueError('x')\n")
    code = (
        "import runpy\nfrom rallypoint.launch.worker import exceptions\n"
        "try: runpy._run_module_as_main('mod')\n"
        "except ValueError as error: print(exceptions.describe(error, 1)['traceback'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert "mod.py" in done.stdout and "_run_code" not in done.stdout, done.stderr

"""An exception as data: how a worker reports its failure."""

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
    """As `fire` defines its own."""


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


class ApiError(Exception):
    """As in clients of web services: its attributes are the response's."""

    def __init__(self, body: dict) -> None:
        super().__init__("quota exceeded")
        self.body = body

    def __getattr__(self, name: str) -> object:
        return self.__dict__["body"][name]


def answered_with_an_error() -> None:
    raise ApiError({"code": 429})


class Meddles(Exception):
    """Nothing in it can be inspected."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt

    def __str__(self) -> str:
        raise SystemExit(9)


def meddled() -> None:
    raise Meddles


def test_an_exception_with_attributes_of_its_own_is_told():
    found = described(answered_with_an_error)
    assert found["message"] == "quota exceeded"
    assert "raise ApiError" in found["traceback"]


def test_an_exception_that_cannot_be_looked_at_is_told_by_its_type_and_line():
    found = described(meddled)
    assert found["type"].endswith("Meddles")
    assert "in meddled" in found["traceback"]
    assert found["exit_code"] == 1


def unwrapped() -> None:
    """As anyio and trio re-raise the only error of a group."""
    try:
        raise BaseExceptionGroup("several", [SystemExit(3)])
    except BaseExceptionGroup as group:
        raise group.exceptions[0]  # noqa: B904  its context is the group


def from_itself() -> None:
    try:
        sys.exit(3)
    except SystemExit as error:
        raise error from error


def in_a_ring() -> None:
    first, second = SystemExit(3), SystemExit(4)
    first.__cause__, second.__cause__ = second, first
    raise first


@pytest.mark.parametrize("function", [unwrapped, from_itself, in_a_ring])
def test_an_exit_behind_itself_ends_here(function):
    assert described(function, 3)["exit_code"] == 3


def test_a_deep_group_is_told():
    group: Exception = ValueError("the leaf")
    for _ in range(3000):
        group = ExceptionGroup("a group", [group])

    def raise_it() -> None:
        raise group

    assert described(raise_it)["message"].startswith("a group (1 sub-exception): ")


def test_notes_do_not_displace_the_frames():
    def noted() -> None:
        error = ValueError("expected 3 channels")
        error.add_note("N" * 100_000)
        raise error

    found = described(noted)
    assert "in noted" in found["traceback"]
    assert "expected 3 channels" in found["traceback"]

"""Exceptions as data: the same exception on the other side, or a RemoteError; never an error of the transfer itself."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from rallypoint.errors import ConfigError, PeerLost, RemoteError
from rallypoint.wire.remote_error import LIMIT, Description, RemoteTraceback, describe, rebuild


MADE: list[object] = []


class TwoArguments(ValueError):
    def __init__(self, where, why):
        super().__init__(f"{where}: {why}")
        self.where = where
        self.why = why


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class Prefixed(Exception):
    def __init__(self, text):
        super().__init__("prefix " + text)


class Counts(Exception):
    def __init__(self, text):
        super().__init__(text)
        MADE.append(self)


class OwnReduce(Exception):
    def __init__(self, a, b):
        super().__init__()
        self.pair = (a, b)

    def __str__(self):
        return f"pair {self.pair}"

    def __reduce__(self):
        return OwnReduce, self.pair


class Raises(Exception):
    armed = False

    def __init__(self, text):
        if Raises.armed:
            sys.exit(3)
        super().__init__(text)

    def __reduce__(self):
        return Raises, self.args


class OddFile(OSError):
    def __init__(self, path):
        super().__init__(2, "cannot be found", path)


class OddExit(SystemExit):
    def __init__(self, code, why):
        super().__init__(code)
        self.why = why


class OddText(UnicodeDecodeError):
    def __init__(self, data):
        super().__init__("utf-8", data, 0, 1, "odd")


class OddGroup(ExceptionGroup):
    def __new__(cls, errors):
        return super().__new__(cls, "odd", errors)


class Slots(Exception):
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown, hidden):
        super().__init__("slots")
        self.shown = shown
        self.__hidden = hidden

    def hidden(self):
        return self.__hidden


class Frozen(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
        object.__setattr__(self, "a", a)

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class ReduceRaises(Exception):
    def __reduce__(self):
        raise RuntimeError("no")


class ReduceLies(Exception):
    def __reduce__(self):
        return ValueError, self.args


class ReduceForgets(Exception):
    """It holds a lock, which cannot be sent and is left out."""

    def __init__(self, text):
        super().__init__(text)

    def __reduce__(self):
        return ReduceForgets, self.args


class GroupReduceRaises(ExceptionGroup):
    def __reduce__(self):
        raise RuntimeError("no")


class LongText(Exception):
    def __str__(self):
        return "long " * LIMIT


class Plain:
    """Equal only to itself."""


class OneThing(Exception):
    def __str__(self):
        return "one thing"


class ReduceIsNoError(Exception):
    def __reduce__(self):
        return str, ("text",)


class WithLock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class NoText(Exception):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self):
        raise KeyboardInterrupt


class TextOfHere(Exception):
    here = os.getpid

    def __str__(self):
        return f"raised by {TextOfHere.here()}"


class NoDict(Exception):
    @property
    def __dict__(self):
        raise SystemExit


class NoName(Exception):
    __module__ = ("not", "a", "name")  # type: ignore[assignment]


class Local(Exception):
    pass


Local.__qualname__ = "somewhere.<locals>.Local"


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def sent(error: BaseException, worker: str = "b") -> BaseException:
    """``error`` as the other side gets it."""
    description = pickle.loads(pickle.dumps(describe(raised(error))))
    assert {type(value) for value in description.values()} <= {str, list, bytes}
    return rebuild(description, worker)


def attribute_error() -> BaseException:
    try:
        return threading.nowhere  # type: ignore[attr-defined]
    except AttributeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        ValueError("text"),
        ValueError("a", 1, None, [b"x"], float("nan")),
        ValueError("backslash \\n and\nnewline, ünïcode, \ud800 half a pair"),
        KeyError("key"),
        StopIteration(7),
        SystemExit(4),
        KeyboardInterrupt(),
        GeneratorExit(),
        FileNotFoundError(2, "No such file or directory", "/a/file"),
        OSError(5, "five", "one", None, "two"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        UnicodeEncodeError("ascii", "é", 0, 1, "invalid"),
        SyntaxError("odd", ("file", 1, 2, "text", 1, 3)),
        ImportError("none", name="n", path="p"),
        attribute_error(),
        NameError("x", name="x"),
        ExceptionGroup("many", [ValueError(1), ExceptionGroup("inner", [KeyError("k")])]),
        BaseExceptionGroup("many", [KeyboardInterrupt()]),
        ConfigError("field", 3, "is wrong", "do this"),
        PeerLost("b", "gone"),
        TwoArguments("here", "because"),
        ExceptionGroup("odd ones", [ValueError(), OwnReduce(1, 2)]),
        KeywordOnly(code=4),
        Prefixed("text"),
        Counts("text"),
        OwnReduce(1, 2),
        OddFile("/path"),
        OddText(b"\xff"),
        OddExit(3, "why"),
        OddGroup([ValueError(5)]),
        GroupReduceRaises("odd", [ValueError(5)]),
        Slots(1, None),
        Frozen(1, 2),
        ReduceRaises("x"),
        ReduceLies("x"),
        ReduceIsNoError("x"),
        subprocess.CalledProcessError(3, ["a"], b"out"),
        subprocess.TimeoutExpired("a", 3.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_same_exception_is_raised_here(error: BaseException) -> None:
    again = sent(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert repr(again) == repr(error)
    assert vars(again) == vars(error)
    for name in ("errno", "filename", "filename2", "code", "value", "reason", "start", "path"):
        assert getattr(again, name, None) == getattr(error, name, None)
    cause = again.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert str(cause).startswith("on b\n\nTraceback (most recent call last):\n") or isinstance(
        error, BaseExceptionGroup
    )
    assert "test_remote_error.py" in str(cause)
    assert again.__traceback__ is None


def test_what_is_equal_to_nothing_but_itself_can_be_an_argument() -> None:
    again = sent(OneThing(Plain()))
    assert type(again) is OneThing
    assert type(again.args[0]) is Plain


def test_slots_arrive_too() -> None:
    again = sent(Slots([1], {2}))
    assert isinstance(again, Slots)
    assert (again.shown, again.hidden()) == ([1], {2})


def test_a_constructor_of_python_is_not_called_to_send_an_exception() -> None:
    error = Counts("text")
    MADE.clear()
    assert isinstance(sent(error), Counts)
    assert not MADE


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (WithLock("locked"), "WithLock", "locked"),
        (Local("x"), "somewhere.<locals>.Local", "x"),
        (NoText(), "NoText", "<its text cannot be told: str() raised KeyboardInterrupt>"),
        (NoDict("x"), "NoDict", "x"),
        (NoName("x"), "", "x"),
        (ValueError(threading.Lock()), "ValueError", "unlocked"),
        (ValueError(lambda: 1), "ValueError", "lambda"),
        (ExceptionGroup("many", [WithLock("x")]), "ExceptionGroup", "many (1 sub-exception)"),
        (ExceptionGroup("many", [ReduceLies("x")]), "ExceptionGroup", "many (1 sub-exception)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_made_again_is_told(error: BaseException, name: str, message: str) -> None:
    again = sent(error)
    assert type(again) is RemoteError
    assert again.type_name.endswith(name)
    assert message in again.message
    assert again.worker == "b"
    assert "test_remote_error.py" in again.traceback
    assert "on b" in str(again)


def test_a_class_that_is_missing_here_becomes_a_remote_error(tmp_path: Path) -> None:
    """The class may be from a module, or from another program's __main__."""
    (tmp_path / "faraway.py").write_text("class Gone(ValueError): pass")
    program = (
        "import faraway, sys, pickle\n"
        "from rallypoint.wire.remote_error import describe\n"
        "class Mine(Exception): pass\n"
        "made = [describe(kind('text')) for kind in (faraway.Gone, Mine, ValueError)]\n"
        "assert 'torch' not in sys.modules\n"
        "sys.stdout.buffer.write(pickle.dumps(made))\n"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        timeout=240,
        check=True,
    )
    gone, mine, value = pickle.loads(run.stdout)
    assert gone["error"]
    assert mine["error"]
    for description, name in ((gone, "faraway.Gone"), (mine, "Mine")):
        again = rebuild(description, "b")
        assert type(again) is RemoteError
        assert (again.type_name, again.message) == (name, "text")
    assert type(rebuild(value, "b")) is ValueError


def test_another_class_than_was_announced_is_not_raised() -> None:
    description = describe(KeyError("x"))
    assert type(rebuild(description, "b")) is KeyError
    description["type"] = "LookupError"
    assert type(rebuild(description, "b")) is RemoteError


def test_state_that_is_lost_on_the_way_makes_it_another_exception() -> None:
    error = ReduceForgets("x")
    assert type(sent(error)) is ReduceForgets
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    assert type(sent(error)) is RemoteError


def test_what_a_class_does_here_that_it_did_not_do_there(monkeypatch: pytest.MonkeyPatch) -> None:
    exits, tells = describe(Raises("x")), describe(TextOfHere())
    assert exits["error"]
    assert tells["error"]
    assert type(rebuild(tells, "b")) is TextOfHere
    monkeypatch.setattr(Raises, "armed", True)
    monkeypatch.setattr(TextOfHere, "here", lambda: "somebody else")
    assert type(rebuild(exits, "b")) is RemoteError
    assert type(rebuild(tells, "b")) is RemoteError


def test_notes_are_kept_once() -> None:
    for error in (ValueError("x"), OwnReduce(1, 2), WithLock("x"), Frozen(1, 2)):
        vars(error)["__notes__"] = ["first", "second \ud800"]
        again = sent(error)
        assert again.__notes__ == ["first", "second ?"]
        assert type(again) is (RemoteError if type(error) is WithLock else type(error))
    odd = ValueError("x")
    odd.__notes__ = 5  # type: ignore[assignment]
    assert not hasattr(sent(odd), "__notes__")


def test_huge_exceptions_are_cut_and_say_so() -> None:
    error = ValueError("a" * 10 * LIMIT + "end")
    for _ in range(1000):
        error.add_note("n" * LIMIT)
    description = describe(raised(error))
    assert len(pickle.dumps(description)) < 5 * LIMIT
    assert description["error"] == b""
    assert f"a\n[{9 * LIMIT + 3} characters are left out]\na" in description["message"]
    assert description["message"].endswith("aend")
    assert "characters are left out" in description["traceback"]
    assert description["notes"][-1] == "[968 more notes are left out]"
    assert type(rebuild(description, "b")) is RemoteError
    assert describe(LongText())["error"] == b""
    assert type(sent(LongText())) is RemoteError

    big = ValueError("small text")
    big.data = bytearray(10 * LIMIT)  # type: ignore[attr-defined]
    assert describe(big)["error"] == b""


def test_causes_are_told_even_when_they_go_round() -> None:
    a, b = ValueError("first"), KeyError("second")
    a.__cause__, b.__cause__ = b, a
    a.args = (a,)
    again = sent(a)
    assert "second" in str(again.__cause__ or again)
    c = ValueError("outer")
    c.__context__ = KeyError("inner")
    assert "During handling of the above exception" in str(sent(c).__cause__)


def test_a_remote_error_goes_on_to_a_third_process() -> None:
    once = sent(WithLock("x"), "b")
    twice = sent(once, "c")
    assert type(twice) is RemoteError
    assert twice.worker == "b"
    assert str(twice) == str(once)
    assert "on c" in str(twice.__cause__)
    again = pickle.loads(pickle.dumps(RemoteTraceback("tb", "w")))
    assert str(again) == "on w\n\ntb"
    assert "on b" in str(sent(sent(ValueError("x"), "b"), "c").__cause__)


values = st.recursive(
    st.none() | st.text() | st.floats() | st.binary() | st.sets(st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@example([{"": math.nan}], ValueError)
@example([frozenset([math.nan])], KeyError)
@given(st.lists(values, max_size=4), st.sampled_from([ValueError, KeyError, OSError, TwoArguments]))
def test_arguments_arrive_as_they_were(args: list[object], kind: type[BaseException]) -> None:
    error = TwoArguments("a", args) if kind is TwoArguments else kind(*args)
    again = sent(error)
    assert type(again) is type(error)
    assert sorted(repr(again.args)) == sorted(repr(error.args))  # sets in any order


@given(
    st.dictionaries(
        st.sampled_from(["type", "message", "notes", "traceback", "error"]),
        values
        | st.sampled_from(
            [pickle.dumps(each) for each in (5, ValueError, (1, 2, 3), (str, (), {}))]
        ),
    )
)
def test_damaged_descriptions_make_a_remote_error(description: Description) -> None:
    assert type(rebuild(description, "b")) is RemoteError


def test_arrays_that_have_no_truth_value_can_be_arguments() -> None:
    torch = pytest.importorskip("torch")
    again = sent(ValueError("x", torch.arange(3)))
    assert type(again) is ValueError
    assert torch.equal(again.args[1], torch.arange(3))

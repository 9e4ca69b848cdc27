"""What is set on an exception even though its class forbids it."""

from __future__ import annotations

import dataclasses

import pytest

from rallypoint._core import raised


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Hiding(Exception):
    @property
    def __traceback__(self):
        raise RuntimeError("nobody may see it")


def caught(error):
    try:
        raise error
    except type(error):
        return error


@pytest.mark.parametrize("kind", [Frozen, Hiding])
def test_tracebacks_causes_and_arguments_are_set_whatever_the_class_says(kind):
    error, cause = caught(kind(3)), ValueError("why")
    assert raised.traceback_of(error) is not None
    raised.set_traceback(error, None)
    raised.set_cause(error, cause)
    raised.set_args(error, (4,))
    assert raised.traceback_of(error) is None
    assert (error.__cause__, error.__suppress_context__, error.args) == (cause, True, (4,))


def test_notes_are_added_and_those_of_the_program_stay():
    error = Frozen(3)
    raised.add_note(error, "one")
    raised.add_note(error, "two")
    assert error.__notes__ == ["one", "two"]
    plain = ValueError()
    plain.add_note("its own")
    raised.add_note(plain, "ours")
    assert plain.__notes__ == ["its own", "ours"]
    odd = ValueError()
    odd.__notes__ = "not a list"
    raised.add_note(odd, "ours")
    assert odd.__notes__ == "not a list"


def test_frames_of_causes_and_contexts_are_forgotten_in_a_circle_too():
    first, second, third = caught(Frozen(1)), caught(ValueError()), caught(KeyError())
    raised.set_cause(first, second)
    second.__context__ = third
    third.__cause__ = first
    raised.forget_frames(first)
    assert [raised.traceback_of(each) for each in (first, second, third)] == [None] * 3

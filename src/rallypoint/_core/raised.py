"""Changes to exceptions that programs raised: their tracebacks, causes and notes.

A class may forbid that attributes are set, as a frozen dataclass does. The interpreter sets these all the same when an
exception is raised, and so do these functions. An assignment would raise an error in place of the program's own.
"""

from __future__ import annotations

from types import TracebackType


_PARTS = vars(BaseException)
_TRACEBACK = _PARTS["__traceback__"]
_CAUSE = _PARTS["__cause__"]
_CONTEXT = _PARTS["__context__"]
_SUPPRESSED = _PARTS["__suppress_context__"]
_ARGS = _PARTS["args"]
_DICT = _PARTS["__dict__"]


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback, even if the class has an attribute of its own under this name."""
    frames: TracebackType | None = _TRACEBACK.__get__(error)
    return frames


def set_traceback(error: BaseException, frames: TracebackType | None) -> None:
    _TRACEBACK.__set__(error, frames)


def set_cause(error: BaseException, cause: BaseException | None, *, suppress: bool = True) -> None:
    """Set the cause, and whether it hides the context."""
    _CAUSE.__set__(error, cause)
    _SUPPRESSED.__set__(error, suppress)


def forget_context(error: BaseException) -> None:
    _CONTEXT.__set__(error, None)


def set_args(error: BaseException, args: tuple[object, ...]) -> None:
    _ARGS.__set__(error, args)


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)``. If the program has put something other than a list there, it stays."""
    notes = _DICT.__get__(error).setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.append(note)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an exception that is kept, and of its causes: frames keep all their variables alive."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            set_traceback(each, None)
            left += [_CAUSE.__get__(each), _CONTEXT.__get__(each)]

"""An exception as data: its type, text, notes and traceback, and itself where it can be rebuilt faithfully.

Theory of operation
-------------------
The side that raised tries two ways of making the exception again, and sends the first whose result is of the
same type and has the same text, arguments and attributes:

- *by its parts*: the instance is made without its constructor; arguments and attributes are set. This is right
  for classes whose constructor takes something other than ``args``, or does more than keep them.
- *as it pickles itself*. This is right for C classes (OSError, UnicodeDecodeError) and for those that define
  ``__reduce__``. It comes first with these, and where a class has no constructor of its own.

The other side checks type and text again, since its modules may differ. An exception that fails there, or that
neither way could make again, becomes a RemoteError with all of the text. Neither side ever raises: whatever a
user's class raises while it is described or rebuilt is caught.

A description holds pickled bytes: ``rebuild`` is for descriptions from authenticated peers (wire/auth.py).
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from types import FunctionType, MemberDescriptorType
from typing import Any, TypedDict

from rallypoint.errors import RemoteError


# The most characters or bytes of the text, the traceback and the pickled exception, each.
LIMIT = 64 * 1024
_MAX_NOTES = 32
_NOTES = "__notes__"
# What need not, or cannot, be set again: `obj` may be anything, and `name` without it leads tracebacks astray.
_LEFT_OUT: Mapping[type, Container[str]] = {
    BaseExceptionGroup: {"message", "exceptions"},
    AttributeError: {"name", "obj"},
    NameError: {"name"},
}


class Description(TypedDict):
    """An exception as builtins.

    Args:
        type: ``module.Class``; the module is left out for builtins, as in tracebacks.
        message: its text.
        notes: what ``add_note`` has added.
        traceback: as Python prints it, causes included.
        error: how to make it again, pickled; empty if that would not be the same.
    """

    type: str
    message: str
    notes: list[str]
    traceback: str
    error: bytes


class RemoteTraceback(Exception):
    """Where an exception was raised in the other process; the ``__cause__`` of the one that is raised here.

    Args:
        traceback: as Python prints it.
        worker: the worker that raised it.
    """

    def __init__(self, traceback: str, worker: str) -> None:
        super().__init__(traceback, worker)
        self.traceback = traceback
        self.worker = worker

    def __str__(self) -> str:
        return f"on {self.worker}\n\n{self.traceback}"


# -- on the side that raised -----------------------------------------------------------------------


def describe(error: BaseException, limit: int = LIMIT) -> Description:
    """``error`` as data that pickles. Never raises.

    Args:
        limit: characters of the message, of the notes, of the traceback, and bytes of the pickled exception;
            anything longer is cut, and says so; an exception whose message was cut is not rebuilt.
    """
    message = message_of(error)
    short = _cut(message, limit)
    whole = short == message
    return {
        "type": _type_name(type(error)),
        "message": short,
        "notes": _notes(error, limit),
        "traceback": _cut(traceback_text(error), limit),
        "error": _freeze(error, limit) if whole else b"",
    }


def _freeze(error: BaseException, limit: int) -> bytes:
    """How to make ``error`` again, tried out; empty if no way gives the same."""
    kind = type(error)
    # A Python class with a constructor that says nothing about pickling: the parts are the better guess.
    by_parts = isinstance(kind.__init__, FunctionType) and (
        kind.__reduce__ is BaseException.__reduce__
        and kind.__reduce_ex__ is BaseException.__reduce_ex__
    )
    ways = (_by_parts, _dump) if by_parts else (_dump, _by_parts)
    for way in ways:
        try:
            frozen = way(error, limit)
            if _is_same(error, _thaw(frozen)):
                return frozen
        except BaseException:  # noqa: BLE001, S112  a user's class may raise anything, SystemExit too: the next way
            continue
    return b""


def _by_parts(error: BaseException, limit: int) -> bytes:
    return _dump((type(error), error.args, _attributes(error)), limit)


def _is_same(error: BaseException, made: BaseException) -> bool:
    return (
        type(made) is type(error)
        and _same_text(message_of(made), message_of(error))
        and _alike(made.args, error.args)
        and _filled(made) == _filled(error)
    )


def _same_text(made: str, original: str) -> bool:
    # A set in the text may be printed in a different order in each process.
    return made == original or sorted(made) == sorted(original)


def _filled(error: BaseException) -> set[tuple[str, bool]]:
    """The names of an exception's attributes, and which of them hold something."""
    return {(name, value is not None) for name, value in _attributes(error).items()}


def _alike(made: object, original: object) -> bool:
    """Equal, as far as the two can be compared at all."""
    if type(made) is not type(original):
        return False
    if isinstance(original, BaseException):
        return isinstance(made, BaseException) and _is_same(original, made)
    if isinstance(original, (list, tuple)) and isinstance(made, (list, tuple)):
        return len(made) == len(original) and all(map(_alike, made, original))
    if type(original).__eq__ is object.__eq__:
        return True  # a copy is never equal to its original
    try:
        # A NaN is not equal to itself, nor is what holds a copy of it.
        return bool(made == original) or _same_text(repr(made), repr(original))
    except Exception:  # noqa: BLE001  arrays have no truth value; a user's __eq__ may raise anything
        return True


def _attributes(error: BaseException) -> dict[str, Any]:  # Any: whatever the user has put there
    """What is set on ``error``: in its ``__dict__`` and in slots, those of C classes too; no notes."""
    found = {}
    for kind in type(error).__mro__:
        left_out = _LEFT_OUT.get(kind, ())
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType) and name not in left_out:
                value = getattr(error, name, None)
                # None in C may mean that nothing is there, which is not the same for an OSError's text.
                if value is not None or ("__slots__" in vars(kind) and hasattr(error, name)):
                    found[name] = value
    return found | {name: value for name, value in vars(error).items() if name != _NOTES}


class _TooLong(Exception):
    pass


class _Limited:
    """A file that takes no more than ``limit`` bytes: what would be cut need not be pickled to the end."""

    def __init__(self, limit: int) -> None:
        self.data = bytearray()
        self._limit = limit

    def write(self, data: Any) -> int:  # Any: any buffer
        if len(self.data) + memoryview(data).nbytes > self._limit:
            raise _TooLong
        self.data += data
        return memoryview(data).nbytes


def _dump(what: object, limit: int) -> bytes:
    file = _Limited(limit)
    pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(what)
    return bytes(file.data)


# -- on the side that asked ------------------------------------------------------------------------


def rebuild(
    description: Mapping[str, object],
    worker: str,
    load: Callable[[bytes], Any] | None = None,  # Any: whatever was pickled
) -> BaseException:
    """The exception that ``description`` describes, to be raised here. Never raises itself.

    It may be a SystemExit or a KeyboardInterrupt: the caller decides whether that ends this process too.

    Args:
        description: what ``describe`` made, from an authenticated peer.
        worker: the worker that sent it.
        load: unpickles, in place of pickle's own; what it refuses becomes a RemoteError.
    Returns:
        an exception of the same type, with a RemoteTraceback as its cause; else a RemoteError.
    """
    kind, message = _text(description.get("type")), _text(description.get("message"))
    trace, frozen = _text(description.get("traceback")), description.get("error")
    notes = description.get("notes")
    made: BaseException | None = None
    if isinstance(frozen, bytes) and frozen:
        try:
            made = _thaw(frozen, load)
            if _type_name(type(made)) != kind or not _same_text(message_of(made), message):
                made = None
            else:
                object.__setattr__(made, "__cause__", RemoteTraceback(trace, worker))
                _set_notes(made, notes)
        except BaseException:  # noqa: BLE001  whatever a user's class raises: it cannot be made here
            made = None
    if made is None:
        made = RemoteError(kind, message, trace, worker)
        _set_notes(made, notes)
    return made


def _thaw(frozen: bytes, load: Callable[[bytes], Any] | None = None) -> BaseException:
    # Our own bytes, or an authenticated peer's: see the top.
    made = pickle.loads(frozen) if load is None else load(frozen)  # noqa: S301
    if isinstance(made, tuple):
        kind, args, attributes = made
        if not issubclass(kind, BaseException):
            raise TypeError("what was pickled is no exception")
        made = kind.__new__(kind, *args)
        for name, value in {"args": args, **attributes}.items():
            if name.startswith("__") and name != "__suppress_context__":
                raise TypeError(f"{name} is Python's own: it is set by raising")
            object.__setattr__(made, name, value)  # a class may forbid it
    if not isinstance(made, BaseException):
        raise TypeError("what was pickled is no exception")
    return made


def _set_notes(error: BaseException, notes: object) -> None:
    if isinstance(notes, list) and notes:
        vars(error)[_NOTES] = [_text(note) for note in notes]
    else:
        vars(error).pop(_NOTES, None)


# -- text ------------------------------------------------------------------------------------------


def message_of(error: BaseException) -> str:
    """``str(error)``. Never raises."""
    try:
        return _clean(str(error))
    except BaseException as failure:  # noqa: BLE001  a user's __str__ may raise anything
        return f"<its text cannot be told: str() raised {_type_name(type(failure))}>"


def _notes(error: BaseException, limit: int) -> list[str]:
    try:
        notes = vars(error).get(_NOTES)
        if not isinstance(notes, Sequence) or isinstance(notes, str):
            return []
        shown = [_cut(_clean(str(note)), limit // _MAX_NOTES) for note in notes[:_MAX_NOTES]]
        left = len(notes) - len(shown)
        return [*shown, *([f"[{left} more notes are left out]"] if left else [])]
    except BaseException:  # noqa: BLE001  the same
        return []


def traceback_text(error: BaseException) -> str:
    """The traceback as Python prints it, causes included. Never raises."""
    try:
        return _clean("".join(traceback.format_exception(error)))
    except BaseException as failure:  # noqa: BLE001  the same
        return f"<no traceback: formatting it raised {_type_name(type(failure))}>\n"


def _type_name(kind: type) -> str:
    try:
        module, name = _clean(str(kind.__module__)), _clean(str(kind.__qualname__))
    except BaseException:  # noqa: BLE001  a class may have anything there
        return "<a class without a name>"
    return name if module in {"builtins", "__main__"} else f"{module}.{name}"


def _clean(text: str) -> str:
    """The text as UTF-8 can express it: lone surrogates become question marks."""
    return str.encode(text, "utf-8", "replace").decode()  # a subclass of str may encode otherwise


def _cut(text: str, limit: int) -> str:
    """The text without its middle if it is too long: the end of a traceback matters most, the beginning of a message."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return (
        f"{text[:head]}\n[{len(text) - limit} characters are left out]\n{text[len(text) - tail :]}"
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""

"""A worker's exception as data, for the supervisor.

Must survive any exception: a ``__str__`` that raises, a message of megabytes, an endless chain.
Frames that hide the user's own line (of ``runpy``, argparse and the like) are left out; the whole
traceback is on the worker's stderr.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from rallypoint._core import clock, limits
from rallypoint._core.whole_writes import NOBODY_READS, write_whole
from rallypoint.launch import torch_private

from . import ending


# Limits on what is sent for the report, in characters and in exceptions.
MAX_TRACEBACK = 32_000
MAX_MESSAGE = 4_000
MAX_CHAIN = 16
MAX_LEAVES = 16
_UNKNOWN = "(str() of it failed)"
# Files and packages whose frames stand between the script and the user's function, or an error and its exit.
_WRAPPERS = frozenset({"argparse.py", "runpy.py", "<frozen runpy>", "optparse.py"})
_WRAPPER_PACKAGES = frozenset({"hydra", "click", "typer", "absl", "fire", "jsonargparse", "tyro"})
_OURS = (
    os.path.join("rallypoint", "launch", ""),
    os.path.join("rallypoint", "_core", "whole_writes.py"),
)
_RECORD = os.path.join("torch", "distributed", "elastic", "multiprocessing", "errors", "")


def describe(error: BaseException, code: int) -> dict[str, Any]:
    """Describe an exception and its causes.

    A ``SystemExit`` says nothing, so it is replaced by the exception that was being handled when it was raised.
    """
    try:
        return _described(error, code)
    except BaseException:  # noqa: BLE001  code of the user's runs here, and the report must come
        return _barely_described(error, code)


def _described(error: BaseException, code: int) -> dict[str, Any]:
    cause, seen = error, {id(error)}
    while isinstance(cause, SystemExit) and (behind := _behind(cause)) is not None:
        if id(behind) in seen:
            break  # `raise error from error`
        seen.add(id(behind))
        cause = behind
    return {
        "type": _name(cause),
        "message": message_of(cause),
        "traceback": _cut(_text(error, cause)),
        "exit_code": code,
        "exited": isinstance(error, SystemExit) and cause is not error,
        "chains": [[list(link) for link in chain] for chain in _chains(cause, (), frozenset())],
        "at": clock.MONOTONIC.now(),
        "timestamp": clock.timestamp(),
    }


def _barely_described(error: BaseException, code: int) -> dict[str, Any]:
    """The exception's type, its message, and where it was raised; the functions of ``traceback`` fail with some exceptions."""
    name, message = _name(error), message_of(error)
    stack = _without_wrappers(traceback.extract_tb(error.__traceback__))
    lines = "".join(stack.format())
    return {
        "type": name,
        "message": message,
        "traceback": _cut(f"Traceback (most recent call last):\n{lines}{name}: {message}\n"),
        "exit_code": code,
        "exited": False,
        "chains": [[[name, message[:500]]]],
        "at": clock.MONOTONIC.now(),
        "timestamp": clock.timestamp(),
    }


def message_of(error: BaseException) -> str:
    parts = []
    for _ in range(MAX_CHAIN):
        try:
            message = str(error)
        except BaseException:  # noqa: BLE001  a broken __str__ must not hide the failure
            message = _UNKNOWN
        if isinstance(error, BrokenPipeError) and _is_of_output(error):
            message += f": {NOBODY_READS}"
        if type(error) is OSError and error.errno == errno.EFBIG:
            message += f": {reached}" if (reached := limits.explain(error)) else ""
        parts.append(message[:MAX_MESSAGE])
        if not isinstance(error, BaseExceptionGroup):
            break
        # "unhandled errors in a TaskGroup" says nothing.
        error = error.exceptions[0]
        parts.append(_name(error))
    return ": ".join(parts)[:MAX_MESSAGE]


def _is_of_output(error: BaseException) -> bool:
    """Whether a `print` raised it: of the streams, only ours is written in Python."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_filename == write_whole.__code__.co_filename


def _name(error: BaseException) -> str:
    kind = type(error)
    if isinstance(error, SystemExit):
        return "SystemExit"  # also those of libraries
    if kind.__module__ in {"builtins", "__main__"}:
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _behind(error: BaseException) -> BaseException | None:
    """The exception that ``error`` is a consequence of, as a traceback shows it."""
    if error.__cause__ is not None:
        return error.__cause__
    # `raise SystemExit from None` hides it from the terminal; the report still needs the cause.
    if isinstance(error, SystemExit) or not error.__suppress_context__:
        return error.__context__
    return None


def _chains(
    error: BaseException | None, before: tuple[tuple[str, str], ...], seen: frozenset[int]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """The chains from the outermost exception back to each first one; a group has several. ``seen``: ids of those visited."""
    while error is not None and len(before) < MAX_CHAIN and id(error) not in seen:
        seen |= {id(error)}
        if isinstance(error, BaseExceptionGroup):
            for leaf in error.exceptions[:MAX_LEAVES] if len(seen) < 4 * MAX_CHAIN else ():
                yield from _chains(leaf, before, seen)
            return
        if not isinstance(error, SystemExit):
            before = (*before, (_name(error), message_of(error)[:500]))
        error = _behind(error)
    yield before


# -- the traceback ----------------------------------------------------------------------------------


def _text(error: BaseException, cause: BaseException) -> str:
    if cause is error and isinstance(error, SystemExit):
        stack = traceback.extract_tb(ending.without_us(error.__traceback__))
        lines = "".join(_without_wrappers(stack).format())
        return f"Traceback (most recent call last):\n{lines}SystemExit: {message_of(error)}\n"
    found = traceback.TracebackException.from_exception(cause)
    if cause is not error:
        found.stack = _joined(error, cause)
    _tidy(found, MAX_CHAIN)
    return "".join(found.format())


def _joined(error: BaseException, cause: BaseException) -> traceback.StackSummary:
    """The frames down to the handler that exited, then those of the exception that it handled.

    The handled exception's traceback starts where it was caught, perhaps deep inside a library.
    """
    own = list(traceback.walk_tb(ending.without_us(error.__traceback__)))
    handled = list(traceback.walk_tb(cause.__traceback__))
    caught_in = handled[0][0] if handled else None
    outer = list(takewhile(lambda pair: pair[0] is not caught_in, own))
    if len(outer) == len(own):
        outer = []  # caught elsewhere
    pairs = [(frame, frame_line) for frame, frame_line in [*outer, *handled]]
    return traceback.StackSummary.extract(iter(pairs))


def _tidy(found: traceback.TracebackException, depth: int) -> None:
    """Remove wrappers' frames and cut messages: a message of 10 MB must not displace the frames."""
    found.stack = _without_wrappers(found.stack)
    torch_private.cut_message(found, MAX_MESSAGE)
    if depth == 0:
        found.__cause__ = found.__context__ = None
        return
    for name in ("__cause__", "__context__"):
        behind = getattr(found, name)
        if behind is not None and all(_is_wrapper(frame.filename) for frame in behind.stack):
            setattr(found, name, None)  # internal to argparse and the like
    inner = [found.__cause__, found.__context__, *(getattr(found, "exceptions", None) or ())]
    for each in inner:
        if each is not None:
            _tidy(each, depth - 1)


def _without_wrappers(stack: traceback.StackSummary) -> traceback.StackSummary:
    kept = [frame for frame in stack if not _is_wrapper(frame.filename)]
    return traceback.StackSummary.from_list(kept) if kept else stack


def _is_wrapper(filename: str) -> bool:
    if (
        os.path.basename(filename) in _WRAPPERS
        or any(each in filename for each in _OURS)
        or _RECORD in filename
    ):
        return True
    _, found, below = filename.rpartition("site-packages" + os.sep)
    return bool(found) and below.split(os.sep)[0] in _WRAPPER_PACKAGES


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TRACEBACK else "…" + text[-MAX_TRACEBACK:]

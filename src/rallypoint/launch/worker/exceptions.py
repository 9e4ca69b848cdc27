"""A worker's exception as data, for the supervisor.

Must survive any exception: a ``__str__`` that raises, a message of megabytes, an endless chain.
Frames that hide the user's own line (of ``runpy``, argparse and the like) are left out; the whole
traceback is on the worker's stderr.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from rallypoint._core import clock
from rallypoint.launch import torch_private

from . import ending


# Limits of what is sent to the report, in characters and in exceptions.
MAX_TRACEBACK = 32_000
MAX_MESSAGE = 4_000
MAX_CHAIN = 16
MAX_LEAVES = 16
# Files and packages whose frames stand between the script and the user's function, or an error and its exit.
_WRAPPERS = frozenset({"argparse.py", "runpy.py", "<frozen runpy>", "optparse.py"})
_WRAPPER_PACKAGES = frozenset({"hydra", "click", "typer", "absl", "fire", "jsonargparse", "tyro"})
_OURS = os.path.join("rallypoint", "launch", "")
_RECORD = os.path.join("torch", "distributed", "elastic", "multiprocessing", "errors", "")


def describe(error: BaseException, code: int) -> dict[str, Any]:
    """Describe an exception and its causes.

    A ``SystemExit`` says nothing, so it is replaced by the exception being handled when it was raised.
    """
    cause = error
    while isinstance(cause, SystemExit) and (behind := _behind(cause)) is not None:
        cause = behind
    return {
        "type": _name(cause),
        "message": message_of(cause),
        "traceback": _cut(_text(error, cause)),
        "exit_code": code,
        "exited": isinstance(error, SystemExit) and cause is not error,
        "chains": [[list(link) for link in chain] for chain in _chains(cause, ())],
        "at": clock.MONOTONIC.now(),
        "timestamp": clock.timestamp(),
    }


def message_of(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the failure
        return "(str() of it failed)"
    leaves = getattr(error, "exceptions", None)
    if isinstance(error, BaseExceptionGroup) and leaves:
        # "unhandled errors in a TaskGroup" says nothing.
        first = leaves[0]
        message += f": {_name(first)}: {message_of(first)}"
    return message[:MAX_MESSAGE]


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
    error: BaseException | None, before: tuple[tuple[str, str], ...]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """The chains from the outermost exception back to each first one; a group has several."""
    while error is not None and len(before) < MAX_CHAIN:
        if isinstance(error, BaseExceptionGroup):
            for leaf in error.exceptions[:MAX_LEAVES]:
                yield from _chains(leaf, before)
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

    The handled exception's traceback begins where it was caught, perhaps deep inside a library.
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
            setattr(found, name, None)  # internal to argparse and its like
    inner = [found.__cause__, found.__context__, *(getattr(found, "exceptions", None) or ())]
    for each in inner:
        if each is not None:
            _tidy(each, depth - 1)


def _without_wrappers(stack: traceback.StackSummary) -> traceback.StackSummary:
    kept = [frame for frame in stack if not _is_wrapper(frame.filename)]
    return traceback.StackSummary.from_list(kept) if kept else stack


def _is_wrapper(filename: str) -> bool:
    if os.path.basename(filename) in _WRAPPERS or _OURS in filename or _RECORD in filename:
        return True
    _, found, below = filename.rpartition("site-packages" + os.sep)
    return bool(found) and below.split(os.sep)[0] in _WRAPPER_PACKAGES


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TRACEBACK else "…" + text[-MAX_TRACEBACK:]

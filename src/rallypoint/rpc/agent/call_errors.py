"""Errors of served functions on their way to the caller: without our frames, in torch's words, or kept as values."""

from __future__ import annotations

import os
import re
from types import TracebackType
from typing import Any

import torch

from rallypoint._core import raised
from rallypoint.errors import RemoteError
from rallypoint.wire.remote_error import RemoteTraceback, describe, message_of


_MISSING_NAME = re.compile(r"Can't get attribute '([^']*)'")
_OURS = os.path.join(os.path.dirname(__file__), "")


def forget_our_frames(error: BaseException) -> None:
    """Remove the first frames of an error's traceback, which are this package's."""
    raised.set_traceback(error, _without_ours(raised.traceback_of(error)))


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_code.co_filename.startswith(_OURS)
    ):
        frames = frames.tb_next
    return frames


def translated(error: BaseException) -> BaseException:
    """The error that torch would raise, where that is a different one."""
    if isinstance(error, torch.jit.Error):
        scripted: BaseException = RuntimeError(message_of(error))
        return scripted.with_traceback(error.__traceback__)
    if type(error) is AttributeError and "Can't get attribute" in message_of(error):
        made: BaseException = RuntimeError(
            f"{error}. The callee does not have this {_kind_of(error)}: functions and classes are sent by name, not as"
            " code. Define it on both sides, or set the option pickle_by_value."
            " RPC pickler does not serialize function code."
        )
        return made.with_traceback(error.__traceback__)
    return error


def _kind_of(error: AttributeError) -> str:
    """What kind of thing was not found, guessed from the spelling of its name."""
    found = _MISSING_NAME.search(str(error))
    *outer, name = found[1].split(".") if found else [""]
    if _is_class_name(name):
        return "class"
    return "method" if outer and _is_class_name(outer[-1]) else "function"


def _is_class_name(name: str) -> bool:
    bare = name.lstrip("_")
    return bare[:1].isupper() and (len(bare) == 1 or not bare.isupper() or "_" not in bare)


def as_value(error: BaseException, worker: str) -> Exception:
    """An error as a reference's value: never one that ends a program, and with its traceback as text.

    Frames would keep the arguments alive (``future.again``).
    """
    told = describe(error)
    if not isinstance(error, Exception):
        return RemoteError(told["type"], told["message"], told["traceback"], worker)
    raised.set_cause(error, RemoteTraceback(told["traceback"], worker))
    raised.forget_context(error)
    raised.set_traceback(error, None)
    return error


def wrong_return_type(result: Any) -> RuntimeError:
    return RuntimeError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object,"
        f" but got {type(result).__name__}"
    )

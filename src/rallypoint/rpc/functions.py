"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar


T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that returns a future of its result. The caller is answered when the future is done.

    The thread that runs ``fn`` is free as soon as ``fn`` returns. Put this decorator innermost, below ``staticmethod`` or
    ``classmethod``. An ``async def`` function does not need it.

    Args:
        fn: returns a ``torch.futures.Future`` (or :class:`Future`) of the result.

    Returns:
        ``fn``, marked.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]  # torch's name for the mark
    return wrapper


# By id. Kept alive, so that ids stay valid.
_exported: dict[int, object] = {}


def export(thing: T) -> T:
    """Decorator: let other workers call a function or class even if this worker has the option ``exported_only``.

    For a class, this covers the class itself, its public methods through references, and its public static and class
    methods by name. A subclass inherits only the methods of an exported base. Without the option, this has no effect.

    Args:
        thing: a function, a class, a static method or a class method.

    Returns:
        ``thing`` itself.

    Raises:
        TypeError: ``thing`` is none of these.
    """
    found: Any = thing
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    if not callable(found):
        raise TypeError(f"{thing!r} cannot be exported: it is not a function or a class")
    _exported[id(found)] = found
    return thing


def is_exported(found: Any) -> bool:
    """Whether this was exported, or is a decorator's wrapper of something exported."""
    if _exported.get(id(found)) is found and found is not None:
        return True
    inner = found
    while isinstance(inner, FunctionType) and (wrapped := getattr(inner, "__wrapped__", None)):
        inner = wrapped
        if _exported.get(id(inner)) is inner:
            # Rule out an unrelated function that copied an exported one's attributes: its name leads elsewhere.
            return _by_name(found) is found
    return False


def _by_name(function: FunctionType) -> object:
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found

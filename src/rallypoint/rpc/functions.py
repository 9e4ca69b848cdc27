"""Marks on functions that others call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar


P = ParamSpec("P")
R = TypeVar("R")


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose result comes later: the caller is answered when its future is done.

    The thread that runs ``fn`` is free as soon as it returns. The mark stands innermost, under ``staticmethod`` and
    ``classmethod``. An ``async def`` function needs none.

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

"""torch's modes, kept separately for each coroutine.

Gradient recording, inference mode and autocast belong to a thread. Without this module, a coroutine that waits inside
``with torch.no_grad()`` leaves its mode to all others on the thread, and finds theirs when it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Self

import torch

from rallypoint.rpc import torch_private


_is_inference = torch.is_inference_mode_enabled
_is_grad_enabled = torch.is_grad_enabled
_is_autocast = torch_private.is_any_autocast_enabled
# The defaults of a thread.
_USUAL_TYPES = {each: torch.get_autocast_dtype(each) for each in torch_private.autocast_kinds()}


class CoroutineWithModes(Coroutine[Any, Any, Any]):
    """Takes its modes along when it waits. It starts with those in effect where it is created, as with context variables.

    Args:
        coroutine: a coroutine, or a generator, in which asyncio wraps other awaitable objects before Python 3.12.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any] | Generator[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._first: tuple[bool, bool, list[tuple[str, torch.dtype]]] | None = None
        self._own: torch.inference_mode | None = None
        self._waits = False
        # While it waits: restores its modes.
        self._come_back: Callable[[], None] | None = None
        if _is_inference() or not _is_grad_enabled() or _is_autocast():
            self._first = _is_inference(), _is_grad_enabled(), _autocasts()

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._waits = False
        # The garbage collector may call this in any thread, and the coroutine's `with` blocks restore what they found in theirs.
        inference, grad, casts = _is_inference(), _is_grad_enabled(), _autocasts()
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            if self._come_back is not None:
                self._come_back()
                self._come_back = None
            self._coroutine.close()
            if self._own is not None:
                self._own.__exit__(None, None, None)
                self._own = None
        if casts != _autocasts():
            _cast(casts)

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        # For code that inspects tasks: cr_frame and the like.
        return getattr(self._coroutine, name)

    def __del__(self) -> None:
        if self._waits:
            self.close()

    def _step(self, run: Callable[..., Any], *args: Any) -> Any:
        if self._first is not None:
            self._begin()
        if self._come_back is not None:
            self._come_back()
            self._come_back = None
        try:
            result = run(*args)
        except BaseException:
            self._end()
            raise
        self._waits = True
        if _is_inference() or not _is_grad_enabled() or _is_autocast():
            self._come_back = _put_away()
        return result

    def _begin(self) -> None:
        assert self._first is not None
        (inference, grad, casts), self._first = self._first, None
        if inference:
            self._own = torch.inference_mode(True)
            self._own.__enter__()
        torch.set_grad_enabled(grad)
        _cast(casts)

    def _end(self) -> None:
        """Restore the thread's modes, even if the coroutine has set one for good."""
        self._waits = False
        if self._own is not None:
            self._own.__exit__(None, None, None)
            self._own = None
        if not _is_grad_enabled():
            torch.set_grad_enabled(True)
        if _is_autocast():
            _cast([])


def _put_away() -> Callable[[], None]:
    """Set the default modes. Returns a function that restores the present ones."""
    casts = _autocasts()
    usual = torch.inference_mode(False)  # which enables gradients as well
    usual.__enter__()
    if casts:
        _cast([])

    def come_back() -> None:
        usual.__exit__(None, None, None)
        if casts:
            _cast(casts)

    return come_back


def _autocasts() -> list[tuple[str, torch.dtype]]:
    """The types of devices for which autocast is enabled, each with its dtype."""
    if not _is_autocast():
        return []
    enabled = filter(torch.is_autocast_enabled, _USUAL_TYPES)
    return [(each, torch.get_autocast_dtype(each)) for each in enabled]


def _cast(wanted: list[tuple[str, torch.dtype]]) -> None:
    kinds = dict(wanted)
    for kind, usual in _USUAL_TYPES.items():
        if kind in kinds or torch.is_autocast_enabled(kind):
            torch.set_autocast_enabled(kind, kind in kinds)
            torch.set_autocast_dtype(kind, kinds.get(kind, usual))


def task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, Any, Any],
    context: Context | None = None,
    **options: Any,
) -> asyncio.Task[Any]:
    """Create a task with modes of its own. For :meth:`asyncio.loop.set_task_factory`."""
    return asyncio.Task(CoroutineWithModes(coroutine), loop=loop, context=context, **options)

"""The context of distributed autograd in which the running code makes calls."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any


# An autograd.context.Context, or None.
CURRENT: ContextVar[Any] = ContextVar("rallypoint_rpc_autograd", default=None)


class within(AbstractContextManager[None]):  # noqa: N801  # it reads as a function
    """Within the block, calls are made in this context; None: in no context.

    A class, since contextlib's generators assign to the exceptions that leave a block, which not every exception allows.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = CURRENT.set(self._context)

    def __exit__(self, *_: object) -> None:
        CURRENT.reset(self._token)

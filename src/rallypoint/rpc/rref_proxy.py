"""Calls of methods of a value that lives elsewhere: ``rref.rpc_sync().method(…)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from . import constants
from .agent.answers import AnswerLater
from .agent_in_use import current_agent


if TYPE_CHECKING:
    from .references.rref import RRef


class RRefProxy:
    """What ``rref.rpc_sync()``, ``rref.rpc_async()`` and ``rref.remote()`` return: its attributes are calls.

    Args:
        rref: whose value has the methods.
        mode: ``sync``, ``async`` or ``remote``.
        timeout: seconds for each call, as for ``rpc_sync``.
    """

    def __init__(
        self, rref: RRef[Any], mode: str, timeout: float = constants.UNSET_RPC_TIMEOUT
    ) -> None:
        self._rref = rref
        self._mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._invoke(name, args, kwargs)

    def _invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from . import api

        rref, timeout = self._rref, self._timeout
        owner = rref.owner()
        content = (rref, name, args, kwargs)
        if self._mode == "sync":
            return api.rpc_sync(owner, call_method, content, timeout=timeout)
        if self._mode == "async":
            return api.rpc_async(owner, call_method, content, timeout=timeout)
        # The reference would hide an error until somebody fetches the value: look first.
        if not hasattr(rref._get_type(timeout), name):  # noqa: SLF001  # of the same package
            raise AttributeError(
                f"the value of {rref} is a {rref._get_type().__name__}: it has no attribute {name!r}"  # noqa: SLF001
            )
        return api.remote(owner, call_method, content, timeout=timeout)


def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs on the owner."""
    # A proxy has no such names. One that were called all the same would lead from any value to anything.
    if name.startswith("__"):
        raise AttributeError(f"{name} is not called through a reference")
    agent = current_agent()
    value = rref.local_value()
    if agent is None or agent.allowed is None:
        method = getattr(value, name)
    else:
        method = agent.allowed.method(value, name)
    result = method(*args, **kwargs)
    if hasattr(method, "_wrapped_async_rpc_function"):
        return AnswerLater(result)
    return result


def rref_type(rref: RRef[Any]) -> type:
    """Runs on the owner."""
    return type(rref.local_value())


def type_of(rref: RRef[Any], timeout: float, blocking: bool) -> Any:
    """The type of a reference's value; asked for once."""
    known = rref._type_future  # noqa: SLF001  # of the same package
    if known is None:
        if rref.is_owner():
            known = Future()
            known.set_result(type(rref.local_value()))
        else:
            from . import api

            # The name under which torch's profiler shows this call.
            label = f"rpc_async#_rref_typeof_on_owner({api.get_worker_info().name} -> {rref.owner_name()})"
            with torch.autograd.profiler.record_function(label):
                known = api.rpc_async(rref.owner(), rref_type, (rref,), timeout=timeout)
        rref._type_future = known  # noqa: SLF001
    if not blocking:
        return known
    try:
        return known.wait()
    except BaseException:
        rref._type_future = None  # noqa: SLF001
        raise

"""Method calls on remote values: ``rref.rpc_sync().method(…)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import constants
from .current_agent import current_agent
from .worker_info import WorkerInfo


class Reference(Protocol):
    def owner(self) -> WorkerInfo: ...

    def local_value(self) -> Any: ...

    def _get_type(self, timeout: float = ...) -> type: ...


class AnswerLater:
    """Returned by a served function whose answer is the future's result."""

    __slots__ = ("future",)

    def __init__(self, future: Any) -> None:
        self.future = future


class RRefProxy:
    """What ``rref.rpc_sync()``, ``rref.rpc_async()`` and ``rref.remote()`` return: its attributes are calls.

    Args:
        rref: the reference.
        rpc_api: ``rpc_sync``, ``rpc_async`` or ``remote``.
        timeout: seconds for each call, as for ``rpc_sync``.
        checks: whether to check first that the value has the method: with ``remote``, the error would otherwise show
            only when the result is fetched.
    """

    def __init__(
        self,
        rref: Reference,
        rpc_api: Callable[..., Any],
        timeout: float = constants.UNSET_RPC_TIMEOUT,
        *,
        checks: bool = False,
    ) -> None:
        self._rref = rref
        self._rpc_api = rpc_api
        self._timeout = timeout
        self._checks = checks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(
                f"{name} cannot be called through a reference: pass the reference to a function on its owner instead, as in"
                " rpc.rpc_sync(rref.owner(), function, (rref,))"
            )
        return lambda *args, **kwargs: self._invoke(name, args, kwargs)

    def _invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rref, timeout = self._rref, self._timeout
        if self._checks:
            kind = rref._get_type(timeout)  # noqa: SLF001  # of the same package
            # The methods of a TorchScript module are not in its class.
            if not issubclass(kind, torch.jit.ScriptModule) and not hasattr(kind, name):
                raise AttributeError(
                    f"the value of {rref} is a {kind.__name__}: it has no attribute {name!r}"
                )
        return self._rpc_api(rref.owner(), call_method, (rref, name, args, kwargs), timeout=timeout)


def call_method(rref: Reference, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs on the owner."""
    # Proxies never send such names. With them, any value would give access to everything.
    if name.startswith("__"):
        raise AttributeError(
            f"{name} is private: only public methods can be called through a reference"
        )
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


def rref_type(rref: Reference) -> type:
    """Runs on the owner."""
    return type(rref.local_value())

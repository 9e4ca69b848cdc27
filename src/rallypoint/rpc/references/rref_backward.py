"""``RRef.backward``: autograd from a remote value."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rallypoint.errors import RpcError


class Reference(Protocol):
    def is_owner(self) -> bool: ...

    def owner_name(self) -> str: ...

    def local_value(self) -> Any: ...


def backward(rref: Reference, context: int, retain_graph: bool) -> None:
    """See :meth:`RRef.backward`."""
    if context != -1:
        raise no_distributed_autograd("RRef.backward() with a context")
    if not rref.is_owner():
        raise RpcError(
            f"RRef.backward() works only on the value's owner, {rref.owner_name()!r}: call it in a function on that worker"
        )
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def no_distributed_autograd(what: str) -> RpcError:
    """The error for uses of distributed autograd."""
    return RpcError(
        f"{what} does not work over Rallypoint: its calls do not record an autograd graph, so gradients would stop there;"
        " use torch's own RPC for this (rallypoint.compat.uninstall())"
    )

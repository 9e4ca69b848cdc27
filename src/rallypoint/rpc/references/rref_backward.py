"""``RRef.backward``: autograd from a value that is referred to."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rallypoint.errors import RpcError


class Reference(Protocol):
    """A reference, as far as this needs it."""

    def is_owner(self) -> bool: ...

    def owner_name(self) -> str: ...

    def local_value(self) -> Any: ...


def backward(rref: Reference, context: int, retain_graph: bool) -> None:
    """As :meth:`RRef.backward` says."""
    if context != -1:
        raise no_distributed_autograd("RRef.backward() with a context")
    if not rref.is_owner():
        raise RpcError(
            f"RRef.backward() runs where the value lives, on worker {rref.owner_name()!r}: call a function there that"
            " does it"
        )
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def no_distributed_autograd(what: str) -> RpcError:
    """Why something that needs distributed autograd is refused."""
    return RpcError(
        f"{what} does not work over Rallypoint: calls carry no graph, so gradients would stop at the first of them;"
        " use torch's own RPC for this (rallypoint.compat.uninstall())"
    )

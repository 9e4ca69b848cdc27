"""``RRef.backward``: autograd from a value that is referred to."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from rallypoint.errors import RpcError


if TYPE_CHECKING:
    from .rref import RRef


def backward(rref: RRef[Any], context: int, retain_graph: bool) -> None:
    """As :meth:`RRef.backward` says."""
    if not rref.is_owner():
        if context == -1:
            raise RpcError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: only the owner has the graph"
            )
        _backward_on_owner(rref, context, retain_graph)
        return
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context != -1:
        # Runs in the context that torch's own distributed autograd keeps in this process, if it has one.
        dist_autograd: Any = importlib.import_module("torch.distributed.autograd")
        dist_autograd.backward(context, [value], retain_graph)
        return
    value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def _backward_on_owner(rref: RRef[Any], context: int, retain_graph: bool) -> None:
    from rallypoint.rpc import api

    api.rpc_sync(rref.owner(), _run_backward, (rref, context, retain_graph))


def _run_backward(rref: RRef[Any], context: int, retain_graph: bool) -> None:
    backward(rref, context, retain_graph)

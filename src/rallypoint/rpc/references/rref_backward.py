"""``RRef.backward``: autograd from a remote value."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rallypoint.errors import RpcError
from rallypoint.rpc import autograd
from rallypoint.rpc.calling import rpc_sync
from rallypoint.rpc.current_agent import required_agent
from rallypoint.rpc.current_context import within
from rallypoint.rpc.worker_info import WorkerInfo


class Reference(Protocol):
    def is_owner(self) -> bool: ...

    def owner(self) -> WorkerInfo: ...

    def owner_name(self) -> str: ...

    def local_value(self) -> Any: ...


def backward(rref: Reference, context_id: int, retain_graph: bool) -> None:
    """See :meth:`RRef.backward`."""
    if rref.is_owner():
        if context_id != -1:
            backward_here(rref, context_id, retain_graph)
        else:
            _tensor(rref).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    if context_id == -1:
        raise RpcError(
            # The first words are torch's.
            "User RRefs require 'dist_autograd_ctx_id' to be specified: without the id of a context"
            " (rpc.autograd.context), RRef.backward() works only on the value's owner,"
            f" {rref.owner_name()!r}"
        )
    with within(required_agent().contexts.get(context_id)):
        rpc_sync(rref.owner(), backward_here, (rref, context_id, retain_graph))


def backward_here(rref: Reference, context_id: int, retain_graph: bool) -> None:
    """Runs on the owner. Only within a context: peers have no access to the leaves' own gradients."""
    autograd.backward(context_id, [_tensor(rref)], retain_graph)


def _tensor(rref: Reference) -> torch.Tensor:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    return value

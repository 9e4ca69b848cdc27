"""Detecting tensors without other references, whose memory can be returned to the caller in place."""

from __future__ import annotations

import sys
import weakref

import torch
from torch import Tensor

from rallypoint.rpc.torch_private import storage_uses, tensor_uses
from rallypoint.wire.shm import SMALLEST


_STRIDED = torch.strided
_CPU = torch.device("cpu")


def memory_of_one(tensor: Tensor) -> int:
    """The address of a large tensor's memory, if nothing else refers to the tensor or its memory; else 0.

    Call it as ``memory_of_one(variable)``: it expects exactly one variable of the caller to refer to the tensor.
    """
    if tensor.layout is not _STRIDED or tensor.nbytes < SMALLEST or tensor.device != _CPU:
        return 0
    if tensor.requires_grad or weakref.getweakrefcount(tensor) or _references(tensor) != _ALONE:
        return 0
    return int(tensor.untyped_storage().data_ptr())


def _references(tensor: Tensor) -> tuple[int, int, int, int]:
    """Reference counts of a tensor and its storage, in Python and C++. Any further reference increases one of them."""
    storage = tensor.untyped_storage()
    return (
        sys.getrefcount(tensor),
        tensor_uses(tensor),
        sys.getrefcount(storage),
        storage_uses(storage),
    )


def _references_of_one() -> tuple[int, int, int, int] | None:
    """The counts for a tensor without other references, in this Python and torch.

    None from Python 3.14 on, which does not count all references from running functions.
    """

    def found(tensor: Tensor) -> tuple[int, int, int, int]:
        return _references(tensor)

    if sys.version_info >= (3, 14):
        return None
    tensor = torch.empty(1, device="cpu")
    return found(tensor)


_ALONE = _references_of_one()

"""Whether nothing but one variable refers to a tensor: then its memory may go back to the caller as it came."""

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
    """Where a large tensor's memory begins, if nothing in this process refers to the tensor but one variable of the
    caller, and nothing but the tensor to its memory; else 0.

    To be called as ``memory_of_one(variable)``: that variable, and this function's own, are expected.
    """
    if tensor.layout is not _STRIDED or tensor.nbytes < SMALLEST or tensor.device != _CPU:
        return 0
    if tensor.requires_grad or weakref.getweakrefcount(tensor) or _references(tensor) != _ALONE:
        return 0
    return int(tensor.untyped_storage().data_ptr())


def _references(tensor: Tensor) -> tuple[int, int, int, int]:
    """To a tensor from Python and from C++, and to its memory: whoever else has either makes one of them larger."""
    storage = tensor.untyped_storage()
    return (
        sys.getrefcount(tensor),
        tensor_uses(tensor),
        sys.getrefcount(storage),
        storage_uses(storage),
    )


def _references_of_one() -> tuple[int, int, int, int] | None:
    """What :func:`memory_of_one` finds where there is no other, in this Python and this torch.

    None from Python 3.14 on, which does not count all references of running functions: nobody is taken to be alone.
    """

    def found(tensor: Tensor) -> tuple[int, int, int, int]:
        return _references(tensor)

    if sys.version_info >= (3, 14):
        return None
    tensor = torch.empty(1)
    return found(tensor)


_ALONE = _references_of_one()

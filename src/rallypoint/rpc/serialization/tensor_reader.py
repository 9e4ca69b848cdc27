"""Tensors from the buffers of a message, over the memory in which they have come.

The pickle of a message names these functions; :class:`.tensor_writer.TensorWriter` chooses which.
"""

from __future__ import annotations

import itertools
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rallypoint.errors import NotAllowed

from . import cuda_ipc


# Positions are part of the format between two versions of this package: append only.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
# torch.frombuffer does not take these; their bytes are read as the integer of equal size.
_AS_BYTES = {dtype for dtype in DTYPES if dtype.itemsize == 1 and dtype.is_floating_point} | {
    torch.complex32
}

# Its bytes, or the number of the buffer that they are; type, shape, and whether autograd looks at it.
Packed = tuple[bytearray | int, int, tuple[int, ...], bool]


def unpack(packed: Packed, buffers: Sequence[Any]) -> Tensor:
    """The reverse of :func:`.tensor_writer.pack`."""
    data, code, size, grad = packed
    if type(data) is not int:
        return rebuild_small(*packed)  # type: ignore[arg-type]  # it is a bytearray
    return _shaped(TensorReader(buffers).flat(data, code), size, grad)


class TensorReader:
    """The buffers of a message that has come, while it is unpickled."""

    __slots__ = ("_buffers",)

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._buffers = buffers

    def flat(self, index: int, code: int) -> Tensor:
        """All of a buffer as a tensor of one dim, without a copy."""
        dtype = DTYPES[code]
        if dtype in _AS_BYTES:
            return torch.frombuffer(self._buffers[index], dtype=torch.uint8).view(dtype)
        buffer = self._buffers[index]
        # Of memory that was made as bytes, some may be left over behind the last element.
        count = memoryview(buffer).nbytes // dtype.itemsize
        return torch.frombuffer(buffer, dtype=dtype, count=count)


# -- what a pickle names; ``_reading`` is the message that is being unpickled by this thread -------

_reading: Callable[[], TensorReader]


# Whether it may lie: then indices are checked, which would lead beyond a tensor's memory.
_doubts: Callable[[], bool]


def read_with(reading: Callable[[], TensorReader], doubts: Callable[[], bool]) -> None:
    """Say who knows the message that is being unpickled, and whether its sender is trusted."""
    global _reading, _doubts  # set once, by the module that unpickles
    _reading, _doubts = reading, doubts


def _shaped(flat: Tensor, size: tuple[int, ...], grad: bool) -> Tensor:
    made = flat if len(size) == 1 else flat.view(size)
    return made.requires_grad_() if grad else made


def rebuild_tensor(index: int, code: int, size: tuple[int, ...], grad: bool) -> Tensor:
    return _shaped(_reading().flat(index, code), size, grad)


def rebuild_small(data: bytearray, code: int, size: tuple[int, ...], grad: bool) -> Tensor:
    dtype = DTYPES[code]
    if dtype in _AS_BYTES:
        return _shaped(torch.frombuffer(data, dtype=torch.uint8).view(dtype), size, grad)
    return _shaped(torch.frombuffer(data, dtype=dtype), size, grad)


def rebuild_small_view(
    data: bytearray,
    code: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    grad: bool,
) -> Tensor:
    flat = TensorReader((data,)).flat(0, code)
    return rebuild_grad(flat.as_strided(size, stride, offset), grad)


def rebuild_strided(
    index: int,
    code: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    grad: bool,
) -> Tensor:
    flat = _reading().flat(index, code)
    return rebuild_grad(flat.as_strided(size, stride, offset), grad)


def rebuild_spread(
    index: int, code: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> Tensor:
    packed = _reading().flat(index, code)
    made = torch.empty_strided(size, stride, dtype=DTYPES[code])
    if 0 in stride or not _is_free_of_overlaps(size, stride):
        # Elements that lie in the same place: copy_ refuses them, an index does not, and they are equal.
        flat = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))
        places = torch.arange(flat.numel()).as_strided(size, stride).reshape(-1)
        flat.view(_BYTES[flat.element_size()])[places] = packed.view(_BYTES[flat.element_size()])
    else:
        made.copy_(packed.view(size))
    return made.requires_grad_() if grad else made


# Indexing takes these; what the bits mean does not matter to it.
_BYTES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def _is_free_of_overlaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether each step leaves room for all smaller ones; False where that does not tell."""
    reach = 1
    for step, count in sorted(zip(stride, size, strict=True)):
        if count > 1:
            if step < reach:
                return False
            reach = step * (count - 1) + reach
    return True


def rebuild_empty(code: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool) -> Tensor:
    return torch.empty_strided(size, stride, dtype=DTYPES[code], requires_grad=grad)


def rebuild_meta(
    size: tuple[int, ...], stride: tuple[int, ...], code: int, grad: bool = False
) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=DTYPES[code], device="meta")
    return rebuild_grad(made, grad)


def rebuild_mkldnn(dense: Tensor, grad: bool) -> Tensor:
    return rebuild_grad(dense.to_mkldnn(), grad)


def rebuild_nested(parts: list[Tensor], dtype: torch.dtype, grad: bool) -> Tensor:
    return torch.nested.nested_tensor(parts, dtype=dtype, requires_grad=grad)


def rebuild_grad(tensor: Tensor, grad: bool) -> Tensor:
    return tensor.requires_grad_() if grad else tensor


def rebuild_parameter(data: Tensor, grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=grad)


def rebuild_on_device(staged: Tensor, target: str, grad: bool) -> Tensor:
    return rebuild_grad(staged.to(target), grad)


def rebuild_there(
    flat: Tensor,
    code: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    grad: bool,
) -> Tensor:
    """The same for memory of an accelerator."""
    return rebuild_grad(cuda_ipc.view(flat, DTYPES[code], size, stride, offset), grad)


def rebuild_spread_there(
    flat: Tensor, code: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> Tensor:
    dtype = DTYPES[code]
    steps = tuple(itertools.accumulate(size[:0:-1], operator.mul, initial=1))[::-1]
    packed = cuda_ipc.view(flat, dtype, size, steps if size else (), 0)
    if _is_free_of_overlaps(size, stride):
        made = torch.empty_strided(size, stride, dtype=dtype, device=flat.device)
        packed = made.copy_(packed)
    return rebuild_grad(packed, grad)


def rebuild_empty_there(
    target: str, code: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=DTYPES[code], device=target)
    return rebuild_grad(made, grad)


def rebuild_saved(data: bytes) -> Any:
    import io

    return torch.load(io.BytesIO(data), weights_only=False)


def rebuild_weights(data: bytes) -> Any:
    """The same for messages that may not name everything."""
    import io

    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        raise NotAllowed("a tensor in torch.save's format contains more than weights") from error


def rebuild_coo(
    indices: Tensor, values: Tensor, size: tuple[int, ...], coalesced: bool, grad: bool
) -> Tensor:
    made = torch.sparse_coo_tensor(
        indices, values, size, is_coalesced=coalesced, check_invariants=_doubts()
    )
    return made.requires_grad_() if grad else made


def rebuild_compressed(
    layout: str,
    outer: Tensor,
    inner: Tensor,
    values: Tensor,
    size: tuple[int, ...],
    grad: bool,
) -> Tensor:
    made = torch.sparse_compressed_tensor(
        outer, inner, values, size, layout=getattr(torch, layout), check_invariants=_doubts()
    )
    return made.requires_grad_() if grad else made

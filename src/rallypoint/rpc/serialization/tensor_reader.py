"""Rebuilding tensors over the buffers of a message, without copies.

The pickle of a message names these functions, as chosen by :class:`.tensor_writer.TensorWriter`.
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


# Positions are part of the protocol: append only.
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
# torch.frombuffer does not support these; they are read as bytes.
_AS_BYTES = {dtype for dtype in DTYPES if dtype.itemsize == 1 and dtype.is_floating_point} | {
    torch.complex32
}

# Passed wherever tensors are made: otherwise a default device (``with torch.device("meta")``) would move those that arrive.
_CPU = torch.device("cpu")

# A tensor's bytes or the index of their buffer, dtype, shape, and requires_grad.
Packed = tuple[bytearray | int, int, tuple[int, ...], bool]


def unpack(packed: Packed, buffers: Sequence[Any]) -> Tensor:
    """The inverse of :func:`.tensor_writer.pack`."""
    data, code, size, grad = packed
    if type(data) is not int:
        return rebuild_small(*packed)  # type: ignore[arg-type]  # it is a bytearray
    return _shaped(TensorReader(buffers).flat(data, code), size, grad)


class TensorReader:
    """The buffers of a message while it is unpickled."""

    __slots__ = ("_buffers",)

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._buffers = buffers

    def flat(self, index: int, code: int) -> Tensor:
        """A whole buffer as a one-dimensional tensor, without a copy."""
        dtype = DTYPES[code]
        if dtype in _AS_BYTES:
            return torch.frombuffer(self._buffers[index], dtype=torch.uint8).view(dtype)
        buffer = self._buffers[index]
        # A buffer of bytes may have a remainder after the last element.
        count = memoryview(buffer).nbytes // dtype.itemsize
        return torch.frombuffer(buffer, dtype=dtype, count=count)


# -- functions named in pickles --------------------------------------------------------------------

# The buffers of the message that this thread is unpickling.
_reading: Callable[[], TensorReader]
# Whether to check sparse indices: wrong ones would reach beyond a tensor's memory.
_checks: Callable[[], bool]


def read_with(reading: Callable[[], TensorReader], checks: Callable[[], bool]) -> None:
    """Set the functions that return the current message's buffers, and whether to check its sparse indices."""
    global _reading, _checks  # set once, by the module that unpickles
    _reading, _checks = reading, checks


def _shaped(flat: Tensor, size: tuple[int, ...], grad: bool) -> Tensor:
    made = flat if len(size) == 1 and size[0] == flat.numel() else flat.view(size)
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
    made = torch.empty_strided(size, stride, dtype=DTYPES[code], device=packed.device)
    if 0 in stride or not _is_free_of_overlaps(size, stride):
        # Some elements share a place, which copy_ refuses. Indexing does not, and the values are equal.
        flat = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))
        places = torch.arange(flat.numel(), device=flat.device).as_strided(size, stride).reshape(-1)
        flat.view(_BYTES[flat.element_size()])[places] = packed.view(_BYTES[flat.element_size()])
    else:
        made.copy_(packed.view(size))
    return made.requires_grad_() if grad else made


# Types for indexing, by element size.
_BYTES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def _is_free_of_overlaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether each stride exceeds the reach of the smaller ones. False does not prove an overlap."""
    reach = 1
    for step, count in sorted(zip(stride, size, strict=True)):
        if count > 1:
            if step < reach:
                return False
            reach = step * (count - 1) + reach
    return True


def rebuild_empty(code: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool) -> Tensor:
    return torch.empty_strided(size, stride, dtype=DTYPES[code], device=_CPU, requires_grad=grad)


def rebuild_meta(
    size: tuple[int, ...], stride: tuple[int, ...], code: int, grad: bool = False
) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=DTYPES[code], device="meta")
    return rebuild_grad(made, grad)


def rebuild_mkldnn(dense: Tensor, grad: bool) -> Tensor:
    return rebuild_grad(dense.to_mkldnn(), grad)


def rebuild_nested(parts: list[Tensor], dtype: torch.dtype, grad: bool) -> Tensor:
    device = parts[0].device if parts else _CPU
    return torch.nested.nested_tensor(parts, dtype=dtype, device=device, requires_grad=grad)


def rebuild_grad(tensor: Tensor, grad: bool) -> Tensor:
    return tensor.requires_grad_() if grad else tensor


def rebuild_parameter(data: Tensor, grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=grad)


def restore_attributes(parameter: torch.nn.Parameter, attributes: dict[str, Any]) -> None:
    """Set the attributes that the sender's program has set on a parameter. Pickles refer to this function by name."""
    if type(parameter) is not torch.nn.Parameter:
        raise TypeError(f"attributes of a parameter came with a {type(parameter).__name__}")
    if _checks() and any(hasattr(torch.nn.Parameter, name) for name in attributes):
        raise NotAllowed("an attribute of a parameter would hide one of its class")
    vars(parameter).update(attributes)


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
    """:func:`rebuild_strided` in an accelerator's memory."""
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
    """:func:`rebuild_saved` under an allow-list."""
    import io

    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        raise NotAllowed("a tensor in torch.save's format contains more than weights") from error


def rebuild_coo(
    indices: Tensor, values: Tensor, size: tuple[int, ...], coalesced: bool, grad: bool
) -> Tensor:
    made = torch.sparse_coo_tensor(
        indices,
        values,
        size,
        device=values.device,
        is_coalesced=coalesced,
        check_invariants=_checks(),
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
        outer,
        inner,
        values,
        size,
        layout=getattr(torch, layout),
        device=values.device,
        check_invariants=_checks(),
    )
    return made.requires_grad_() if grad else made

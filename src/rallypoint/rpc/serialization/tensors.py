"""Tensors as buffers beside a pickle, and back: strides, views and sparse layouts are kept.

A tensor's bytes are never pickled. The pickle holds which buffer, the type and the strides; the buffer travels on its
own, and on the other side the tensor is made over the memory that it has arrived in. Two tensors of one
message that share memory share it there, too, where they show most of it.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rallypoint.wire.shm import SMALLEST

from . import cuda_ipc
from .out_of_band import LEAST_OUT_OF_BAND, MOST_BUFFERS


# Bytes of tensors that are pickled like anything else: a buffer of its own costs more than the copy.
SMALL = 16 * 1024
# A view is sent with the gaps between its elements if they are at most half of it; else it is packed.
_MOST_SPREAD = 2

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object
_READ = 0x100

# Positions are part of the format between two versions of this package: append only.
_DTYPES: tuple[torch.dtype, ...] = (
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
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# torch.frombuffer does not take these; their bytes are read as the integer of equal size.
_AS_BYTES = {dtype for dtype in _DTYPES if dtype.itemsize == 1 and dtype.is_floating_point} | {
    torch.complex32
}

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class Devices(NamedTuple):
    """What becomes of tensors on other devices than the CPU on their way to one peer.

    Args:
        target: the device over there, as text, for one here; raises if there is none.
        way: how so many bytes get from one to the other.
    """

    target: Callable[[torch.device], str]
    way: Callable[[torch.device, str, int], cuda_ipc.Way] = lambda *_: cuda_ipc.Way.STAGED


class TensorWriter:
    """Collects the buffers of one message.

    Attributes:
        buffers: in the order in which the pickle counts them.
        held: what must stay alive until the buffers are sent.
        forks: remote references in the same message.
        parcels: memory of accelerators that is free again only when the message is unpickled, or not sent.
        out_of_band: which of the buffers belong to objects that give their memory to the pickler.
    """

    __slots__ = (
        "_devices",
        "_seen",
        "_small",
        "buffers",
        "forks",
        "held",
        "out_of_band",
        "parcels",
    )

    def __init__(self, devices: Devices | None = None) -> None:
        self.buffers: list[memoryview] = []
        self.held: list[Any] = []
        self.forks: list[Any] = []
        self.parcels: list[cuda_ipc.Parcel] | None = None
        self.out_of_band: list[int] = []
        # What a storage has become: the number of its buffer, or its parcel.
        self._seen: dict[tuple[Any, ...], Any] | None = None
        self._small: dict[int, bytearray] | None = None
        self._devices = devices

    @classmethod
    def of(cls, storages: list[torch.UntypedStorage]) -> TensorWriter:
        """A message whose buffers are these."""
        made = cls()
        made.buffers = [_view_memory(each.data_ptr(), each.nbytes(), _READ) for each in storages]
        made.held = storages
        return made

    def take(self, buffer: PickleBuffer) -> bool:
        """For a pickler: whether an object's memory is to be in the pickle; else it is a buffer of the message."""
        view = buffer.raw()
        if view.nbytes < LEAST_OUT_OF_BAND or len(self.buffers) >= MOST_BUFFERS:
            return True
        self.out_of_band.append(len(self.buffers))
        self.buffers.append(view)
        return False

    def reduce(self, tensor: Tensor) -> Reduced:
        """What a pickler writes for a tensor; ``rebuild_tensor`` and friends turn it back.

        Raises:
            ValueError: it is on a device that no map speaks of, or stands for other tensors in a transformation.
        """
        if tensor.is_nested:
            return self._reduce_nested(tensor)
        try:
            return self._reduce(tensor)
        except RuntimeError:
            kind = _stand_in(tensor)
            if kind is None:
                raise
            raise ValueError(
                f"{kind} cannot be sent: it stands for other tensors, inside a transformation; make the call outside of it"
            ) from None

    def _reduce(self, tensor: Tensor) -> Reduced:
        if tensor.layout is not torch.strided:
            return self._reduce_sparse(tensor)
        if tensor.device.type != "cpu":
            return self._reduce_elsewhere(tensor)
        code = _CODES.get(tensor.dtype)
        if code is None or tensor.is_neg() or tensor.is_conj():
            return self._reduce_odd(tensor, code)
        size = tuple(tensor.shape)
        grad = tensor.requires_grad
        item = tensor.element_size()
        bytes_shown = tensor.numel() * item
        storage = tensor.untyped_storage()
        whole = storage.nbytes()
        if not bytes_shown:
            return rebuild_empty, (code, size, tensor.stride(), grad)
        if not tensor.data_ptr():
            if not tensor._is_zerotensor():
                raise RuntimeError("the tensor has no memory")
            return self._reduce(torch.zeros(size, dtype=tensor.dtype, requires_grad=grad))
        if whole == bytes_shown and tensor.is_contiguous():
            if whole <= SMALL:
                return rebuild_small, (self._copy(storage, whole), code, size, grad)
            return rebuild_tensor, (self._add(storage, whole), code, size, grad)
        if whole <= _MOST_SPREAD * bytes_shown:
            offset = tensor.storage_offset()
            if whole <= SMALL:
                # As the rest of its memory, if that is in the same message.
                copy = self._copy(storage, whole)
                return rebuild_small_view, (copy, code, size, tensor.stride(), offset, grad)
            index = self._add(storage, whole)
            return rebuild_strided, (index, code, size, tensor.stride(), offset, grad)
        return self._reduce_part(tensor, code, size, item, bytes_shown, grad)

    def reduce_parameter(self, parameter: torch.nn.Parameter) -> Reduced:
        return rebuild_parameter, (parameter.data, parameter.requires_grad)

    def _copy(self, storage: torch.UntypedStorage, whole: int) -> bytearray:
        """A small storage's bytes, to be pickled; the same object for the same storage, so that views share it."""
        at = storage.data_ptr()
        small = self._small
        if small is None:
            small = self._small = {}
        copy = small.get(at)
        if copy is None:
            copy = small[at] = bytearray(_view_memory(at, whole, _READ))
            # Its address must not be another storage's before the message is done.
            self.held.append(storage)
        return copy

    def _add(self, storage: torch.UntypedStorage, whole: int) -> int:
        """The number of the buffer that is this storage."""
        at = storage.data_ptr()
        key = (at, whole)
        seen = self._seen
        if seen is None:
            seen = self._seen = {}
        index: int | None = seen.get(key)
        if index is None:
            index = seen[key] = len(self.buffers)
            self.buffers.append(_view_memory(at, whole, _READ))
            self.held.append(storage)
        return index

    def _reduce_part(
        self,
        tensor: Tensor,
        code: int,
        size: tuple[int, ...],
        item: int,
        bytes_shown: int,
        grad: bool,
    ) -> Reduced:
        """A view of a small part of its storage: only what it spans is sent, or, with wide gaps, it alone."""
        stride = tensor.stride()
        span = item * (
            1 + sum(step * (count - 1) for step, count in zip(stride, size, strict=True))
        )
        if span <= _MOST_SPREAD * bytes_shown:
            index = len(self.buffers)
            self.buffers.append(_view_memory(tensor.data_ptr(), span, _READ))
            self.held.append(tensor)
            return rebuild_strided, (index, code, size, stride, 0, grad)
        packed = tensor.detach().contiguous()
        index = self._add(packed.untyped_storage(), bytes_shown)
        return rebuild_spread, (index, code, size, stride, grad)

    def _reduce_odd(self, tensor: Tensor, code: int | None) -> Reduced:
        if code is not None:
            plain = tensor.detach().resolve_conj().resolve_neg()
            return rebuild_grad, (plain, tensor.requires_grad)
        # Quantized and other rare kinds: torch's own form, inside the pickle.
        import io

        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return rebuild_saved, (buffer.getvalue(),)

    def _reduce_sparse(self, tensor: Tensor) -> Reduced:
        size, grad = tuple(tensor.shape), tensor.requires_grad
        plain = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            parts = (plain._indices(), plain._values())  # torch's only uncoalesced access
            return rebuild_coo, (*parts, size, plain.is_coalesced(), grad)
        layouts = {
            torch.sparse_csr: ("crow_indices", "col_indices"),
            torch.sparse_bsr: ("crow_indices", "col_indices"),
            torch.sparse_csc: ("ccol_indices", "row_indices"),
            torch.sparse_bsc: ("ccol_indices", "row_indices"),
        }
        if tensor.layout in layouts:
            outer, inner = (getattr(plain, name)() for name in layouts[tensor.layout])
            layout = str(tensor.layout).removeprefix("torch.")
            return rebuild_compressed, (layout, outer, inner, plain.values(), size, grad)
        if tensor.is_mkldnn:
            return rebuild_mkldnn, (plain.to_dense(), grad)
        return self._reduce_odd(tensor, None)

    def _reduce_nested(self, tensor: Tensor) -> Reduced:
        return rebuild_nested, (list(tensor.detach().unbind()), tensor.dtype, tensor.requires_grad)

    def _reduce_elsewhere(self, tensor: Tensor) -> Reduced:
        """From an accelerator, on the way that the two workers have for it (``cuda_ipc``)."""
        if tensor.device.type == "meta":
            # It has no memory, so no device map is needed.
            size, stride = tuple(tensor.shape), tensor.stride()
            return rebuild_meta, (size, stride, _CODES[tensor.dtype], tensor.requires_grad)
        if self._devices is None:
            raise ValueError(
                f"a tensor on {tensor.device} was to be sent to a worker that no device map says anything"
                " about: set one with options.set_device_map, or send tensor.cpu()"
            )
        target = self._devices.target(tensor.device)
        code = _CODES.get(tensor.dtype)
        grad = tensor.requires_grad
        plain = tensor.detach()
        if code is None or tensor.device.type not in cuda_ipc.memory.kinds:
            return rebuild_on_device, (plain.cpu(), target, grad)
        plain = plain.resolve_conj().resolve_neg()
        size, stride = tuple(plain.shape), plain.stride()
        if not plain.numel():
            return rebuild_empty_there, (target, code, size, stride, grad)
        parcel, offset, is_spread = self._parcel_of(plain, target)
        if is_spread:
            return rebuild_spread_there, (parcel, code, size, stride, grad)
        return rebuild_there, (parcel, code, size, stride, offset, grad)

    def _parcel_of(self, tensor: Tensor, target: str) -> tuple[cuda_ipc.Parcel, int, bool]:
        """What a tensor shows, as on the CPU: its storage, what it spans, or, with wide gaps, it alone.

        Returns:
            the memory, where in it the tensor begins (in elements), and whether the strides are left out.
        """
        storage = tensor.untyped_storage()
        whole, shown = storage.nbytes(), tensor.nbytes
        if whole <= _MOST_SPREAD * shown:
            seen = self._seen
            if seen is None:
                seen = self._seen = {}
            key = (tensor.device, storage.data_ptr(), whole, target)
            found = seen.get(key)
            if found is None:
                found = seen[key] = self._send_off(_bytes_of(storage, tensor), target, False)
                # Its address must not be another storage's before the message is done.
                self.held.append(storage)
            return found, int(tensor.storage_offset()), False
        steps = zip(tensor.stride(), tensor.shape, strict=True)
        span = 1 + sum(step * (count - 1) for step, count in steps)
        is_spread = span * tensor.element_size() > _MOST_SPREAD * shown
        if not is_spread:
            tensor = tensor.as_strided((span,), (1,))
        own = tensor.clone(memory_format=torch.contiguous_format)
        flat = _bytes_of(own.untyped_storage(), own)
        return self._send_off(flat, target, True), 0, is_spread

    def _send_off(self, flat: Tensor, target: str, is_own: bool) -> cuda_ipc.Parcel:
        assert self._devices is not None
        way = self._devices.way(flat.device, target, flat.nbytes)
        parcel, must_arrive = cuda_ipc.parcel(flat, target, way, is_own=is_own)
        if must_arrive:
            if self.parcels is None:
                self.parcels = []
            self.parcels.append(parcel)
        return parcel


def _bytes_of(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


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
        tensor._use_count(),  # type: ignore[attr-defined]  # it has no stub
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
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


# Its bytes, or the number of the buffer that they are; type, shape, and whether autograd looks at it.
Packed = tuple[bytearray | int, int, tuple[int, ...], bool]
_STRIDED = torch.strided
_CPU = torch.device("cpu")


def pack(tensor: Tensor, large: list[torch.UntypedStorage]) -> Packed | None:
    """An ordinary tensor as plain data, which pickles without our help; None for any other.

    Args:
        large: takes its memory, if that is to be a buffer of the message.
    """
    if tensor.layout is not _STRIDED or tensor.device != _CPU:
        return None
    shown = tensor.nbytes
    # One without an address only stands for others.
    if not shown or tensor.is_nested or not tensor.is_contiguous() or not _address(tensor):
        return None
    code = _CODES.get(tensor.dtype)
    storage = tensor.untyped_storage()
    if code is None or storage.nbytes() != shown:
        return None
    if tensor.is_neg() or tensor.is_conj():
        return None
    data: bytearray | int
    if shown <= SMALL:
        data = bytearray(_view_memory(tensor.data_ptr(), shown, _READ))
    else:
        data = len(large)
        large.append(storage)
    return data, code, tuple(tensor.shape), tensor.requires_grad


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _stand_in(tensor: Tensor) -> str | None:
    """The kind of a tensor that has no memory of its own; None for any other."""
    functorch = torch._C._functorch  # torch itself asks there
    if functorch.is_batchedtensor(tensor):
        return "a tensor inside torch.func.vmap"
    if functorch.is_gradtrackingtensor(tensor):
        return "a tensor inside torch.func.grad, vjp or jvp"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor (torch.func.functionalize, torch.compile)"
    return None


def unpack(packed: Packed, buffers: Sequence[Any]) -> Tensor:
    """The reverse of :func:`pack`."""
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
        dtype = _DTYPES[code]
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
    dtype = _DTYPES[code]
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
    made = torch.empty_strided(size, stride, dtype=_DTYPES[code])
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
    return torch.empty_strided(size, stride, dtype=_DTYPES[code], requires_grad=grad)


def rebuild_meta(
    size: tuple[int, ...], stride: tuple[int, ...], code: int, grad: bool = False
) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=_DTYPES[code], device="meta")
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
    return rebuild_grad(cuda_ipc.view(flat, _DTYPES[code], size, stride, offset), grad)


def rebuild_spread_there(
    flat: Tensor, code: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> Tensor:
    dtype = _DTYPES[code]
    steps = tuple(itertools.accumulate(size[:0:-1], operator.mul, initial=1))[::-1]
    packed = cuda_ipc.view(flat, dtype, size, steps if size else (), 0)
    if _is_free_of_overlaps(size, stride):
        made = torch.empty_strided(size, stride, dtype=dtype, device=flat.device)
        packed = made.copy_(packed)
    return rebuild_grad(packed, grad)


def rebuild_empty_there(
    target: str, code: int, size: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=_DTYPES[code], device=target)
    return rebuild_grad(made, grad)


def rebuild_saved(data: bytes) -> Any:
    import io

    return torch.load(io.BytesIO(data), weights_only=False)


def rebuild_weights(data: bytes) -> Any:
    """The same for messages that may not name everything."""
    import io

    return torch.load(io.BytesIO(data), weights_only=True)


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

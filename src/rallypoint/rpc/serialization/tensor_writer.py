"""Tensors as buffers beside a pickle, with strides, views and sparse layouts.

Only small tensors are pickled with their bytes. For others, the pickle holds the index of a buffer, the dtype and strides,
and the receiver makes the tensor over the memory in which the buffer arrives. Two tensors in one message that share memory
also share it at the receiver, if each uses at least half of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rallypoint.rpc import torch_private

from . import cuda_ipc
from .out_of_band import LEAST_OUT_OF_BAND, MOST_BUFFERS
from .tensor_reader import (
    CODES,
    Packed,
    rebuild_compressed,
    rebuild_coo,
    rebuild_empty,
    rebuild_empty_there,
    rebuild_grad,
    rebuild_meta,
    rebuild_mkldnn,
    rebuild_nested,
    rebuild_on_device,
    rebuild_parameter,
    rebuild_saved,
    rebuild_small,
    rebuild_small_view,
    rebuild_spread,
    rebuild_spread_there,
    rebuild_strided,
    rebuild_tensor,
    rebuild_there,
    restore_attributes,
)


# Tensors of up to this many bytes are pickled: a buffer of their own costs more than copying them.
SMALL = 16 * 1024
# A view is sent with the gaps between its elements if they are at most half of it; otherwise it is packed.
_MOST_SPREAD = 2

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object
_READ = 0x100
_CPU = torch.device("cpu")

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class Devices(NamedTuple):
    """How tensors on accelerators are sent to one peer.

    Args:
        target: maps a device here to the peer's, as a string; raises if there is none.
        way: chooses how a given number of bytes is sent.
    """

    target: Callable[[torch.device], str]
    way: Callable[[torch.device, str, int], cuda_ipc.Way] = lambda *_: cuda_ipc.Way.STAGED


class TensorWriter:
    """Collects the buffers of one message.

    Attributes:
        buffers: by the index in the pickle.
        held: objects to keep alive until the buffers are sent.
        forks: remote references in the same message.
        parcels: accelerator memory that must be released by unpickling, or explicitly if the message is not sent.
        out_of_band: the indices of buffers from ``pickle.PickleBuffer``.
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
        # By storage: the index of its buffer, or its parcel.
        self._seen: dict[tuple[Any, ...], Any] | None = None
        self._small: dict[tuple[int, int], bytearray] | None = None
        self._devices = devices

    @classmethod
    def of(cls, storages: list[torch.UntypedStorage]) -> TensorWriter:
        """A writer with these storages as buffers."""
        made = cls()
        made.buffers = [_view_memory(each.data_ptr(), each.nbytes(), _READ) for each in storages]
        made.held = storages
        return made

    def take(self, buffer: PickleBuffer) -> bool:
        """A pickler's buffer_callback: True keeps the memory in the pickle, False makes it a buffer of the message."""
        view = buffer.raw()
        if view.nbytes < LEAST_OUT_OF_BAND or len(self.buffers) >= MOST_BUFFERS:
            return True
        self.out_of_band.append(len(self.buffers))
        self.buffers.append(view)
        return False

    def reduce(self, tensor: Tensor) -> Reduced:
        """Reduce a tensor to one of the ``rebuild_…`` functions and its arguments.

        Raises:
            ValueError: no device map covers its device, or it has no data, as inside a transformation.
        """
        if tensor.is_nested:
            return self._reduce_nested(tensor)
        try:
            return self._reduce(tensor)
        except RuntimeError:
            refuse_stand_in(tensor)
            raise

    def _reduce(self, tensor: Tensor) -> Reduced:
        if tensor.layout is not torch.strided:
            return self._reduce_sparse(tensor)
        if tensor.device.type != "cpu":
            return self._reduce_elsewhere(tensor)
        code = CODES.get(tensor.dtype)
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
            if not torch_private.is_zero_tensor(tensor):
                raise RuntimeError("the tensor has no memory")
            zeros = torch.zeros(size, dtype=tensor.dtype, device=_CPU, requires_grad=grad)
            return self._reduce(zeros)
        if whole == bytes_shown and tensor.is_contiguous():
            if whole <= SMALL:
                return rebuild_small, (self._copy(storage, whole), code, size, grad)
            return rebuild_tensor, (self._add(storage, whole), code, size, grad)
        if whole <= _MOST_SPREAD * bytes_shown:
            offset = tensor.storage_offset()
            if whole <= SMALL:
                # Send its whole storage, which other views in the message may share.
                copy = self._copy(storage, whole)
                return rebuild_small_view, (copy, code, size, tensor.stride(), offset, grad)
            index = self._add(storage, whole)
            return rebuild_strided, (index, code, size, tensor.stride(), offset, grad)
        return self._reduce_part(tensor, code, size, item, bytes_shown, grad)

    def reduce_parameter(self, parameter: torch.nn.Parameter) -> tuple[Any, ...]:
        made = rebuild_parameter, (parameter.data, parameter.requires_grad)
        attributes = vars(parameter)
        # Separate from what makes the parameter, since the attributes may refer to it.
        return (*made, attributes, None, None, restore_attributes) if attributes else made

    def _copy(self, storage: torch.UntypedStorage, whole: int) -> bytearray:
        """A small storage's bytes, for the pickle: one object per storage, so that views share it."""
        at = storage.data_ptr()
        # Storages over foreign memory, such as arrays', may start at the same address but differ in size.
        key = (at, whole)
        small = self._small
        if small is None:
            small = self._small = {}
        copy = small.get(key)
        if copy is None:
            copy = small[key] = bytearray(_view_memory(at, whole, _READ))
            # Kept, so that its address is not reused while the message is pickled.
            self.held.append(storage)
        return copy

    def _add(self, storage: torch.UntypedStorage, whole: int) -> int:
        """The index of a storage's buffer."""
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
        """A view of a small part of its storage: send only the part that it spans, packed if it has wide gaps."""
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
        # Quantized and other rare kinds: as torch.save writes them, in the pickle.
        import io

        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return rebuild_saved, (buffer.getvalue(),)

    def _reduce_sparse(self, tensor: Tensor) -> Reduced:
        size, grad = tuple(tensor.shape), tensor.requires_grad
        plain = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            parts = torch_private.sparse_parts(plain)
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
        """A tensor on an accelerator (``cuda_ipc``)."""
        if tensor.device.type == "meta":
            # It has no memory, so no device map is needed.
            size, stride = tuple(tensor.shape), tensor.stride()
            return rebuild_meta, (size, stride, CODES[tensor.dtype], tensor.requires_grad)
        if self._devices is None:
            raise ValueError(
                f"cannot send a tensor on {tensor.device}: there is no device map for this worker; set one with"
                " options.set_device_map, or send tensor.cpu()"
            )
        target = self._devices.target(tensor.device)
        code = CODES.get(tensor.dtype)
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
        """The memory to send: as on the CPU, the storage, the part that the tensor spans, or packed elements.

        Returns:
            The memory, the tensor's offset in it (in elements), and whether it is packed.
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
                # Kept, so that its address is not reused while the message is pickled.
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


_STRIDED = torch.strided


def pack(tensor: Tensor, large: list[torch.UntypedStorage]) -> Packed | None:
    """An ordinary tensor as plain data, which needs no reducer; None for any other.

    Args:
        large: a large tensor's memory is appended, as a buffer of the message.
    """
    if tensor.layout is not _STRIDED or tensor.device != _CPU:
        return None
    shown = tensor.nbytes
    # A tensor without an address has no data.
    if not shown or tensor.is_nested or not tensor.is_contiguous() or not _address(tensor):
        return None
    code = CODES.get(tensor.dtype)
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


def refuse_stand_in(tensor: Tensor) -> None:
    """Check that a tensor has data of its own.

    Raises:
        ValueError: it has none.
    """
    kind = torch_private.stand_in(tensor)
    if kind is not None:
        raise ValueError(
            f"{kind} cannot be sent, since it has no data: make the call outside of the transformation"
        ) from None

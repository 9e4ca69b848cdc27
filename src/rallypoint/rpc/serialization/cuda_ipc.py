"""Sending GPU tensors: shared by CUDA IPC, copied within a process, or staged in host memory.

[Note: Lifetime of GPU memory in messages]

*Shared* (``Way.SHARED``), between two processes on one host:

1. The sender copies the tensor's elements into a block of its own on the same GPU, on the current stream of the sending
   thread. The user's memory is never shared. So the user may overwrite it as soon as the call returns, and torch's IPC,
   which wraps a storage again each time it is shared, leaves no trace on a weight that is sent a million times.
2. The block is shared as in ``torch.multiprocessing`` (``_share_cuda_``): a handle, an event after the copy, and a counter
   in shared memory, initially 1. The sender drops the block at once; torch keeps it until the counter is 0.
3. While it unpickles the message, the receiver maps the block after the event, copies it to the target device, waits for
   the copy, and releases the mapping, which decrements the counter. So the called function, on whatever stream, finds
   its tensor complete and in memory of its own.
4. The sender frees the block when it shares the next one, in ``torch.cuda.ipc_collect()``, or when its GPU's memory
   runs out.

Each counter must be decremented exactly once. Without a decrement, the block stays until the sender exits; a second one
corrupts the counter. So messages with such blocks are unpickled even if they are no longer wanted (FLAG_REFS). If
unpickling fails midway, the remaining blocks are released (:func:`salvage`). If a pickled message is not sent, the sender
releases its blocks (:meth:`Parcel.take_back`). If a connection or a process is lost, the GPU memory of messages in
transit stays allocated in the sender.

*Handed over* (``Way.HANDED``), within one process: the copy is made on the target device, and kept in a table until the
message is unpickled. Nothing is mapped or leaves the GPU.

*Staged* (``Way.STAGED``), in all other cases: through pinned host memory, as a buffer of the message like a CPU
tensor's.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import pickle
import re
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from rallypoint.errors import RpcError
from rallypoint.rpc import torch_private
from rallypoint.rpc.device_map import Device
from rallypoint.rpc.groups.member import Member
from rallypoint.wire import transports
from rallypoint.wire.shm import SMALLEST
from rallypoint.wire.transport import Way as Route, choose

from .out_of_band import has_table, load


logger = logging.getLogger(__name__)

# The smallest block that is worth mapping, in bytes: as for shared memory on the host.
LEAST = SMALLEST
# CUDA_IPC_REF_COUNTER_FILE_SIZE of torch (torch/csrc/CudaIPCTypes.h), which does not check the offset.
_COUNTERS = 10_000
_COUNTER_NAME = re.compile(rb"/torch_[0-9_]{1,100}")
# cudaIpcMemHandle_t has 64 bytes; torch's handles may contain several.
_MOST_HANDLE = 1 << 16
_EVENT_BYTES = 64

_ADVICE = "set the option cuda_ipc=False on either of the two workers: tensors then go through pinned memory"


class Way(StrEnum):
    """How a tensor is sent."""

    SHARED = "shared"
    HANDED = "handed"
    STAGED = "staged"


def decide(
    device: Device,
    target: Device,
    nbytes: int,
    *,
    own: bool,
    shares_memory: bool,
    enabled: bool,
    ours: Sequence[str],
    theirs: Sequence[str],
) -> Way:
    """Choose how a tensor is sent. Pure.

    Args:
        device: its device.
        target: its device at the receiver.
        nbytes: its size.
        own: whether sender and receiver are the same process.
        shares_memory: whether the transport between the two workers shares memory.
        enabled: whether the sender may share.
        ours: the names of the sender's GPUs on this host (:func:`visible_names`).
        theirs: those of the receiver's GPUs; empty if it maps none.
    """
    if device.kind != "cuda" or target.kind != "cuda":
        return Way.STAGED
    if own:
        return Way.HANDED
    if not enabled or not shares_memory or nbytes < LEAST:
        return Way.STAGED
    name = ours[device.index] if device.index < len(ours) else ""
    # A slice of a GPU (MIG) cannot be opened by another process.
    if not name or "MIG-" in name or name not in theirs:
        return Way.STAGED
    return Way.SHARED


def visible_names(count: int, setting: str | None, order: str | None) -> tuple[str, ...]:
    """Names of a process's GPUs that mean the same in every process on its host, in the order of their indices. Pure.

    Args:
        count: the number of its GPUs.
        setting: its ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        order: its ``CUDA_DEVICE_ORDER``, which defines the meaning of numbers in ``setting``.
    """
    entries = (
        list(map(str, range(count)))
        if setting is None
        else [each.strip() for each in setting.split(",")]
    )
    if len(entries) < count:
        return ()
    return tuple(f"{order or ''}/{each}" for each in entries[:count])


def way_to(
    me: Member, peer: Member, kinds: Sequence[str], *, enabled: bool
) -> Callable[[torch.device, str, int], Way]:
    """:func:`decide` for tensors that this worker sends to ``peer``."""
    routes = [Route(transports.find(each)) for each in kinds]

    def way(device: torch.device, target: str, nbytes: int) -> Way:
        # A process cannot map its own blocks, whatever transport it uses to call itself.
        is_own = me.incarnation == peer.incarnation
        ways = choose(routes, peer.addresses, same_host=me.shares_host(peer), same_process=is_own)
        return decide(
            Device.parse(device),
            Device.parse(target),
            nbytes,
            own=is_own,
            shares_memory=bool(ways) and ways[0].way.transport.shares_memory,
            enabled=enabled,
            ours=me.devices.visible,
            theirs=peer.devices.visible,
        )

    return way


# -- torch's part ---------------------------------------------------------------------------------


class Block(NamedTuple):
    """The data with which another process can map GPU memory. All but ``gpu`` is from torch.

    Args:
        gpu: its UUID.
        handle: the handle of the allocation that contains the block.
        size: bytes.
        offset: the block's offset in that allocation, in bytes.
        counter: the name of the shared memory with the counter.
        counter_offset: the counter's place there.
        event: recorded after the writes; empty without ``waits``.
        waits: whether the event must be waited for.
    """

    gpu: str
    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool


class Memory(Protocol):
    """Operations on an accelerator's memory; tests implement them without an accelerator."""

    kinds: frozenset[str]
    """The devices, by ``torch.device.type``."""

    def stage(self, flat: Tensor) -> Tensor:
        """A completed copy in host memory."""

    def share(self, flat: Tensor) -> Block:
        """Let other processes map a tensor's storage. Raises RuntimeError if that is impossible."""

    def find(self, gpu: str) -> tuple[int, int] | None:
        """The index of the GPU with this UUID in this process, and its size in bytes; None if it is not visible."""

    def open(self, index: int, block: Block) -> Tensor:
        """Map a block, as bytes. Raises RuntimeError if that is impossible."""

    def copy(self, flat: Tensor, target: torch.device) -> Tensor:
        """A completed copy on a device, perhaps the same one."""

    def give_up(self, block: Block) -> None:
        """Decrement the counter of a block that is not mapped."""


class CudaMemory:
    kinds = frozenset({"cuda"})

    def stage(self, flat: Tensor) -> Tensor:
        staged = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        staged.copy_(flat, non_blocking=True)
        torch.cuda.current_stream(flat.device).synchronize()
        return staged

    def share(self, flat: Tensor) -> Block:
        with torch.cuda.device(flat.device):
            gpu = self._name(flat.device.index)
            if not gpu:
                raise RuntimeError("this version of torch does not report the UUIDs of GPUs")
            return Block(gpu, *torch_private.share_cuda(flat.untyped_storage()))

    def find(self, gpu: str) -> tuple[int, int] | None:
        for index in range(torch.cuda.device_count()):
            if self._name(index) == gpu:
                return index, torch.cuda.get_device_properties(index).total_memory
        return None

    def _name(self, index: int) -> str:
        return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))

    def open(self, index: int, block: Block) -> Tensor:
        with torch.cuda.device(index):
            storage = torch_private.open_cuda(index, block[1:])
            return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)

    def copy(self, flat: Tensor, target: torch.device) -> Tensor:
        made = flat.to(target, copy=True)
        # Copies between two GPUs run on the stream of the source.
        torch.cuda.current_stream(flat.device).synchronize()
        if made.device != flat.device:
            torch.cuda.current_stream(made.device).synchronize()
        return made

    def give_up(self, block: Block) -> None:
        torch_private.release_cuda(block.counter, block.counter_offset)


memory: Memory = CudaMemory()


# -- the sender -------------------------------------------------------------------------------------


class Parcel:
    """Accelerator memory in a message; pickled once for all tensors that share it."""

    def __init__(self, arrive: Callable[..., Tensor], *args: Any) -> None:
        self._reduced = arrive, args

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return self._reduced

    def take_back(self) -> None:
        """Release the memory: the message is not sent."""
        arrive, args = self._reduced
        if arrive is arrive_shared:
            memory.give_up(Block(*args[1:]))
        elif arrive is arrive_handed:
            _handed.pop(args[0], None)


def parcel(flat: Tensor, target: str, way: Way, *, is_own: bool) -> tuple[Parcel, bool]:
    """Prepare memory for a message.

    Args:
        flat: its bytes, on an accelerator.
        target: the target device.
        is_own: nothing else uses this memory, so it need not be copied.

    Returns:
        The object to pickle, and whether it must be unpickled or taken back to release the memory.
    """
    if way is Way.SHARED:
        try:
            block = memory.share(flat if is_own else flat.clone())
        except (RuntimeError, AttributeError) as error:
            # The allocator or the driver provides no handles.
            logger.warning(
                "a tensor on %s cannot be shared with another process, and goes through pinned memory: %s",
                flat.device,
                error,
            )
        else:
            return Parcel(arrive_shared, target, *block), True
    elif way is Way.HANDED:
        number = next(_numbers)
        _handed[number] = memory.copy(flat, torch.device(target))
        return Parcel(arrive_handed, number), True
    return Parcel(arrive_staged, memory.stage(flat), target), False


# Copies whose messages have not been unpickled yet.
_handed: dict[int, Tensor] = {}
_numbers = itertools.count(1)


# -- the receiver -----------------------------------------------------------------------------------

# The counters that were decremented here last.
_counted: deque[tuple[bytes, int]] = deque(maxlen=1 << 14)


def arrive_staged(staged: Tensor, target: str) -> Tensor:
    return staged.to(target)


def arrive_handed(number: int) -> Tensor:
    found = _handed.pop(number, None)
    if found is None:
        raise RpcError("a tensor of this message was taken already: was the message read twice?")
    return found


def arrive_shared(target: str, *block: Any) -> Tensor:
    """A copy of a block's bytes on ``target``.

    Raises:
        RpcError: the block cannot be mapped here; the error says what to do.
    """
    wanted = Block(*block)
    _check_block(wanted)
    where = torch.device(target)
    if where.type not in memory.kinds:
        raise RpcError(
            f"received a shared tensor for device {target!r}: expected a device such as 'cuda:0'"
        )
    key = wanted.counter, wanted.counter_offset
    found = memory.find(wanted.gpu)
    if found is None:
        raise RpcError(
            f"received a tensor on GPU {wanted.gpu}, which this process cannot see; {_ADVICE}"
        )
    index, total = found
    if wanted.size + wanted.offset > total:
        raise RpcError(
            f"received a block of {wanted.size} bytes at {wanted.offset}, but the GPU has {total} bytes"
        )
    try:
        mapped = memory.open(index, wanted)
    except RuntimeError as error:
        raise RpcError(
            f"cannot map a tensor of another worker on cuda:{index}: {error}; {_ADVICE}"
        ) from error
    _counted.append(key)
    # The last reference to `mapped` ends with this function, and with it the mapping.
    return memory.copy(mapped, where)


def _check_block(block: Block) -> None:
    """Validate a block from a peer: torch does not."""
    kinds = (str, bytes, int, int, bytes, int, bytes, bool)
    if (
        not all(type(each) is kind for each, kind in zip(block, kinds, strict=True))
        or min(block.size, block.offset, block.counter_offset) < 0
        or not 0 < len(block.handle) <= _MOST_HANDLE
        or not block.size
        or not _COUNTER_NAME.fullmatch(block.counter)
        or block.counter_offset >= _COUNTERS
        or (block.waits and len(block.event) != _EVENT_BYTES)
    ):
        raise RpcError("received a shared tensor with an invalid description")


def view(
    flat: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """A tensor over received memory.

    Raises:
        RpcError: it would reach beyond the memory.
    """
    places = (*size, *stride, offset)
    if len(size) != len(stride) or not all(type(each) is int and each >= 0 for each in places):
        raise RpcError(f"received a tensor with shape {size}, strides {stride}, offset {offset}")
    last = offset + sum(step * (count - 1) for step, count in zip(stride, size, strict=True))
    if 0 not in size and (last + 1) * dtype.itemsize > flat.nbytes:
        raise RpcError(
            f"received a tensor with shape {size}, strides {stride}, offset {offset}, but its memory has"
            f" {flat.nbytes} bytes"
        )
    made = torch.empty(0, dtype=dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), offset, tuple(size), tuple(stride))


# -- messages that could not be read ----------------------------------------------------------------


def salvage(payload: bytes | bytearray | memoryview, buffers: Sequence[Any] = ()) -> None:
    """Release the remaining blocks of a message whose unpickling has failed. Never raises."""
    data = bytes(payload)
    if not any(name in data for name in (b"arrive_shared", b"arrive_handed")):
        return
    with contextlib.suppress(Exception):
        if has_table(data):
            load(data, buffers, _Salvage)
        else:
            _Salvage(io.BytesIO(data)).load()


class _Salvage(pickle.Unpickler):
    """Reads a message only to release its blocks. Calls nothing else that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == "arrive_shared":
            return _give_up_shared
        if module == __name__ and name == "arrive_handed":
            return _give_up_handed
        return _Nothing


def _give_up_shared(_: Any, *block: Any) -> None:
    wanted = Block(*block)
    _check_block(wanted)
    if (wanted.counter, wanted.counter_offset) not in _counted:
        memory.give_up(wanted)


def _give_up_handed(number: Any) -> None:
    _handed.pop(number, None)


class _Nothing:
    """Stands for every other object, and accepts everything that a pickle does with it."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __setstate__(self, _: Any) -> None:
        return

    def __setitem__(self, _: Any, __: Any) -> None:
        return

    def append(self, _: Any) -> None:
        return

    extend = add = update = append

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

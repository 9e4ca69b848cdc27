"""How tensors on GPUs get to another process: shared by CUDA IPC, handed over, or staged in the host's memory.

[Note: Who holds what, until when]

*Shared* (``Way.SHARED``), between two processes of one host:

1. The sender copies what the tensor shows into a block of its own on the same GPU, on the current stream of the thread
   that sends. The user's memory is never shared: it may be written to as soon as the call has returned, and
   torch's machinery, which wraps a storage once more each time it is shared, leaves no trace on a weight that
   is sent a million times.
2. The block is shared by torch's own means (``_share_cuda_``, as ``torch.multiprocessing`` does): a handle, an event
   behind the copy, and a counter in shared memory that says 1. The sender drops the block at once; torch keeps
   it in limbo until the counter is 0.
3. The receiver maps the block behind the event, copies it to the device where the tensor is to be, waits for the
   copy, and lets the mapping go, which counts down. All that while the message is unpickled: the function that is
   called, on whatever stream, finds its tensor complete and its own.
4. The sender frees the block with the next one that it shares, with ``torch.cuda.ipc_collect()``, or when
   its GPU's memory runs out.

Each counter must be counted down once: never, and the block stays until the sender ends; twice, and the counter is no
longer understood. So messages with such blocks are unpickled even if nobody wants them (FLAG_REFS). Of one
whose unpickling fails midway, the blocks that were not reached are given up (:func:`salvage`); of one that was pickled and did
not leave, the sender gives them up itself (:meth:`Parcel.take_back`). What is lost with a connection or a process stays
with its sender: its GPU memory of the messages that were on the way.

*Handed over* (``Way.HANDED``), within one process: the copy is made on the device where it is to be, and waits in a table
for the message to be unpickled. No memory is mapped, nothing leaves the GPU.

*Staged* (``Way.STAGED``), everywhere else: through the host's memory, pinned, as a buffer of the message like any CPU tensor's.
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

# Bytes from which a block is worth mapping: as for shared memory on the host.
LEAST = SMALLEST
# CUDA_IPC_REF_COUNTER_FILE_SIZE of torch (torch/csrc/CudaIPCTypes.h): it writes where we say, without looking.
_COUNTERS = 10_000
_COUNTER_NAME = re.compile(rb"/torch_[0-9_]{1,100}")
# cudaIpcMemHandle_t has 64 bytes; torch's, which may stand for more than one, are longer.
_MOST_HANDLE = 1 << 16
_EVENT_BYTES = 64

_ADVICE = "set the option cuda_ipc=False on either of the two workers: tensors then go through pinned memory"


class Way(StrEnum):
    """How a tensor travels."""

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
    """Which way a tensor goes. Pure.

    Args:
        device: where it is.
        target: where it is to be over there.
        nbytes: that it takes.
        own: whether it stays in this process.
        shares_memory: whether the transport between the two workers does.
        enabled: whether the sender may share.
        ours: what the sender's GPUs are called by all processes of the host (:func:`visible_names`).
        theirs: those that the receiver sees; empty where it opens none.
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
    """What a process's GPUs are called by every process of its host, in the order in which it counts them. Pure.

    Args:
        count: how many it has.
        setting: its ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        order: its ``CUDA_DEVICE_ORDER``, which says what a number means.
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
    """What :func:`decide` says for tensors of this worker that go to ``peer``."""
    routes = [Route(transports.find(each)) for each in kinds]

    def way(device: torch.device, target: str, nbytes: int) -> Way:
        # A process cannot open its own blocks, on whatever way it calls itself.
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


# -- what torch does ------------------------------------------------------------------------------


class Block(NamedTuple):
    """What another process needs to map memory of a GPU; all but the first as torch gives it.

    Args:
        gpu: its UUID.
        handle: of the allocation that the block is in.
        size: bytes.
        offset: of the block in that allocation, in bytes.
        counter: the name of the shared memory with the counter.
        counter_offset: which one in it.
        event: behind all that was written; empty without ``waits``.
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
    """What this module asks of an accelerator's memory; tests have one without an accelerator."""

    kinds: frozenset[str]
    """The devices, by ``torch.device.type``."""

    def stage(self, flat: Tensor) -> Tensor:
        """A copy in the host's memory, complete."""

    def share(self, flat: Tensor) -> Block:
        """Let other processes map a tensor's storage. RuntimeError: it cannot be."""

    def find(self, gpu: str) -> tuple[int, int] | None:
        """Which device of this process a GPU is, and how many bytes it has; None: it sees none of that UUID."""

    def open(self, index: int, block: Block) -> Tensor:
        """Map a block, as bytes. RuntimeError: it cannot be."""

    def copy(self, flat: Tensor, target: torch.device) -> Tensor:
        """A copy on another device, or the same one, complete."""

    def give_up(self, block: Block) -> None:
        """Count down for a block that nobody maps."""


class CudaMemory:
    """torch's."""

    kinds = frozenset({"cuda"})

    def stage(self, flat: Tensor) -> Tensor:
        staged = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
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
        # Copies between two GPUs are made on the stream of the one they come from.
        torch.cuda.current_stream(flat.device).synchronize()
        if made.device != flat.device:
            torch.cuda.current_stream(made.device).synchronize()
        return made

    def give_up(self, block: Block) -> None:
        torch_private.release_cuda(block.counter, block.counter_offset)


memory: Memory = CudaMemory()


# -- the sender -------------------------------------------------------------------------------------


class Parcel:
    """Memory of an accelerator in a message; pickled once for all tensors that show it."""

    def __init__(self, arrive: Callable[..., Tensor], *args: Any) -> None:
        self._reduced = arrive, args

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return self._reduced

    def take_back(self) -> None:
        """The message does not leave."""
        arrive, args = self._reduced
        if arrive is arrive_shared:
            memory.give_up(Block(*args[1:]))
        elif arrive is arrive_handed:
            _handed.pop(args[0], None)


def parcel(flat: Tensor, target: str, way: Way, *, is_own: bool) -> tuple[Parcel, bool]:
    """Memory on its way.

    Args:
        flat: its bytes, on an accelerator.
        target: where it is to be.
        is_own: nobody else has this memory: it need not be copied.

    Returns:
        what to pickle, and whether it must be unpickled, or taken back, for the memory to be free again.
    """
    if way is Way.SHARED:
        try:
            block = memory.share(flat if is_own else flat.clone())
        except (RuntimeError, AttributeError) as error:
            # An allocator whose memory has no handles, a driver that gives none.
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


# Copies that wait for the message that they are in.
_handed: dict[int, Tensor] = {}
_numbers = itertools.count(1)


# -- the receiver -----------------------------------------------------------------------------------

# Counters that were counted down here, of the last messages.
_counted: deque[tuple[bytes, int]] = deque(maxlen=1 << 14)


def arrive_staged(staged: Tensor, target: str) -> Tensor:
    return staged.to(target)


def arrive_handed(number: int) -> Tensor:
    found = _handed.pop(number, None)
    if found is None:
        raise RpcError("a tensor of this message was taken already: was the message read twice?")
    return found


def arrive_shared(target: str, *block: Any) -> Tensor:
    """The bytes of a block as memory of this process, on ``target``.

    Raises:
        RpcError: it cannot be mapped here; says what to do.
    """
    wanted = Block(*block)
    _check_block(wanted)
    where = torch.device(target)
    if where.type not in memory.kinds:
        raise RpcError(f"a shared tensor was sent to {target!r}: expected a device as 'cuda:0'")
    key = wanted.counter, wanted.counter_offset
    found = memory.find(wanted.gpu)
    if found is None:
        raise RpcError(
            f"received a tensor on GPU {wanted.gpu}, which this process cannot see; {_ADVICE}"
        )
    index, total = found
    if wanted.size + wanted.offset > total:
        raise RpcError(
            f"a block of {wanted.size} bytes at {wanted.offset} was sent: the GPU has {total} bytes"
        )
    try:
        mapped = memory.open(index, wanted)
    except RuntimeError as error:
        raise RpcError(
            f"cannot map a tensor of another worker on cuda:{index}: {error}; {_ADVICE}"
        ) from error
    _counted.append(key)
    # What was mapped goes with the last reference to it: with this function's.
    return memory.copy(mapped, where)


def _check_block(block: Block) -> None:
    """Before torch uses what has come: it does not look itself."""
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
        raise RpcError("a shared tensor was sent with a description that cannot be one")


def view(
    flat: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """A tensor over memory that has come.

    Raises:
        RpcError: it would reach beyond.
    """
    places = (*size, *stride, offset)
    if len(size) != len(stride) or not all(type(each) is int and each >= 0 for each in places):
        raise RpcError(f"a tensor was sent with shape {size}, strides {stride}, offset {offset}")
    last = offset + sum(step * (count - 1) for step, count in zip(stride, size, strict=True))
    if 0 not in size and (last + 1) * dtype.itemsize > flat.nbytes:
        raise RpcError(
            f"a tensor was sent with shape {size}, strides {stride}, offset {offset}: its memory has"
            f" {flat.nbytes} bytes"
        )
    made = torch.empty(0, dtype=dtype, device=flat.device)
    return made.set_(flat.untyped_storage(), offset, tuple(size), tuple(stride))


# -- of a message that could not be read ------------------------------------------------------------


def salvage(payload: bytes | bytearray | memoryview, buffers: Sequence[Any] = ()) -> None:
    """Give up the blocks in a message whose unpickling has failed, but for those that were reached. Never raises."""
    data = bytes(payload)
    if not any(name in data for name in (b"arrive_shared", b"arrive_handed")):
        return
    with contextlib.suppress(Exception):
        if has_table(data):
            load(data, buffers, _Salvage)
        else:
            _Salvage(io.BytesIO(data)).load()


class _Salvage(pickle.Unpickler):
    """Calls nothing that a message names, but for what gives blocks up."""

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
    """Takes what pickles do with objects."""

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

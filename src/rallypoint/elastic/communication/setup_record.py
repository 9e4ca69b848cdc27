"""The collectives of a script's set-up, recorded, and answered from the record in a process that takes over a lost rank.

A newcomer runs the script from its first line. Until it enters the session, nobody takes part in its collectives: the others are
busy training. Each collective gets the result that this rank got at the first start. Large tensors are not recorded
(parameters that DDP broadcasts, for example): there the newcomer keeps its own, and gets the others' state in the session.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rallypoint._core import rank_watch
from rallypoint.elastic import torch_private
from rallypoint.errors import ElasticError

from .kept_group import KeptGroup
from .stream_works import StreamWork
from .works import KeptMessage, done, flat


# Bytes of one result, and of a rank's whole record.
MAX_RESULT = 64 * 1024
MAX_RECORD = 512 * 1024
_HEAD = struct.Struct("!I")


class Recorder:
    """Observes the groups of this process until the session begins."""

    def __init__(self) -> None:
        self._results: dict[str, list[tuple[str, list[bytes] | None]]] = {}
        # Messages are each rank's own: one rank sends what another receives.
        self._messages: dict[str, list[tuple[str, list[bytes] | None]]] = {}
        self._ranks: dict[str, int] = {}  # of this process in each group
        self._without_data: dict[str, tuple[str, None]] = {}
        self._size = 0

    def observe(
        self, group: KeptGroup, operation: str, args: tuple[Any, ...], work: dist.Work | None
    ) -> None:
        """Record an operation's result. Blocks: until it is available if it is small enough to be recorded, except for messages,
        which may end only after what the script does next."""
        self._ranks[group.kept_name] = group.rank()
        if operation in torch_private.POINT_TO_POINT:
            self._observe_message(group.kept_name, operation, args, work)
            return
        results = self._results.setdefault(group.kept_name, [])
        tensors = self._fitting(args)
        if tensors is None:
            # One tuple for all: a script that has no session may call millions.
            results.append(self._without_data.setdefault(operation, (operation, None)))
            return
        if work is not None:
            work.wait()
        results.append((operation, list(map(bytes_of, tensors))))

    def _observe_message(
        self, name: str, operation: str, args: tuple[Any, ...], work: dist.Work | None
    ) -> None:
        messages = self._messages.setdefault(name, [])
        at = len(messages)
        messages.append((operation, None))
        if operation == "send" or not isinstance(work, KeptMessage | StreamWork):
            return

        def received() -> None:
            if (tensors := self._fitting(args)) is not None:
                data = map(bytes_of, tensors)
                # NCCL does not report the sender, but a receive over NCCL has named it.
                source = work.source_rank() if isinstance(work, KeptMessage) else args[1]
                messages[at] = operation, [*data, str(source).encode()]

        work.observer = received

    def _fitting(self, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The tensors of a result; None if they are too large to be recorded."""
        tensors = list(flat(args[0])) if args else []
        size = sum(each.numel() * each.element_size() for each in tensors)
        if size > MAX_RESULT or self._size + size > MAX_RECORD:
            return None
        self._size += size
        return tensors

    def parts(self) -> dict[str, bytes]:
        """The parts of the record, by the keys under which this process stores them.

        What all members of a group got is stored by its first member; what only this rank got is stored under its rank.
        """
        found: dict[str, bytes] = {}
        for name, results in self._results.items():
            rank = self._ranks[name]
            own = [(op, None if op in torch_private.SAME_FOR_ALL else data) for op, data in results]
            if any(data is not None for _, data in own):
                found[_own_key(name, rank)] = _packed(own)
            if rank == 0:
                shared = [
                    (op, data if op in torch_private.SAME_FOR_ALL else None) for op, data in results
                ]
                found[_shared_key(name)] = _packed(shared)
        for name, messages in self._messages.items():
            found[_messages_key(name, self._ranks[name])] = _packed(messages)
        return found


class Replay:
    """Answers the operations of groups without connections from a record.

    Args:
        read: the value of a key of the record, or None.
    """

    def __init__(self, read: Any) -> None:
        self._read = read
        self._left: dict[str, Iterator[tuple[str, list[bytes] | None]]] = {}
        self._messages_left: dict[str, Iterator[tuple[str, list[bytes] | None]]] = {}

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        if operation in torch_private.POINT_TO_POINT:
            rank_watch.bind(f"{operation} exchanges messages with specific ranks")
            return self._run_message(group, operation, args)
        left = self._left.get(group.kept_name)
        if left is None:
            left = self._left[group.kept_name] = iter(self._load(group))
        data = self._next(left, group, operation)
        if data and operation not in torch_private.SAME_FOR_ALL:
            rank_watch.bind(f"{operation} gives each rank its own result")
        if data is not None and args:
            for tensor, value in zip(flat(args[0]), data, strict=True):
                _fill(tensor, value)
        return done(args[0] if args else None)

    def _run_message(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        left = self._messages_left.get(group.kept_name)
        if left is None:
            record = self._read(_messages_key(group.kept_name, group.rank()))
            left = iter(_unpacked(record) if record else [])
            self._messages_left[group.kept_name] = left
        data = self._next(left, group, operation)
        if not data:
            return done(args[0])
        *values, source = data
        for tensor, value in zip(flat(args[0]), values, strict=True):
            _fill(tensor, value)
        return done(args[0], int(source))

    def _next(
        self, left: Iterator[tuple[str, list[bytes] | None]], group: KeptGroup, operation: str
    ) -> list[bytes] | None:
        recorded, data = next(left, ("", None))
        if recorded != operation:
            raise ElasticError(
                f"the process that replaces rank {group.members[group.rank()]} calls {operation} during its set-up,"
                f" but the first start called {recorded or 'nothing'}: everything before the session must run"
                " the same way each time"
            )
        return data

    def _load(self, group: KeptGroup) -> list[tuple[str, list[bytes] | None]]:
        shared = self._read(_shared_key(group.kept_name))
        own = self._read(_own_key(group.kept_name, group.rank()))
        results = _unpacked(shared) if shared else []
        if own:
            mine = _unpacked(own)
            results = [
                (op, data if data is not None else mine[number][1])
                for number, (op, data) in enumerate(results)
            ]
        return results


class Scripted:
    """Answers broadcasts with given tensors, one after another.

    Args:
        values: the int32 values of each tensor.
    """

    def __init__(self, values: Sequence[Sequence[int]]) -> None:
        self._values = list(values)

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        if operation != "broadcast" or not self._values:
            raise ElasticError(f"unexpected {operation} while DDP's layout is restored")
        tensor, values = args[0][0], self._values.pop(0)
        given = torch.tensor(values, dtype=tensor.dtype)
        # DDP's tensor may be longer, and DDP reads it from both ends: its last element is the last value given.
        tensor[: len(values) - 1].copy_(given[:-1])
        tensor[-1].copy_(given[-1])
        return done(args[0])


class Unchanged:
    """Answers broadcasts with what this rank has."""

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        return done(args[0])


def alone(operation: str, args: tuple[Any, ...]) -> dist.Work:
    """The work of a collective in which nobody else takes part: what is gathered or scattered is this rank's, or zero."""
    if operation in torch_private.IN_PLACE or len(args) < 2:
        return done(args[0] if args else None)
    inputs = list(flat(args[1])) if isinstance(args[1], (list, tuple, torch.Tensor)) else []
    with torch.no_grad():
        for number, output in enumerate(flat(args[0])):
            given = inputs[number % len(inputs)] if inputs else None
            if given is not None and given.shape == output.shape:
                output.copy_(given)
            else:
                output.zero_()
    return done(args[0])


def keys(name: str, rank: int) -> tuple[str, ...]:
    """The keys of what a rank got in a group, by the group's name and the rank in it. Any of them may be missing in the store."""
    return _shared_key(name), _own_key(name, rank), _messages_key(name, rank)


def whole_key(rank: int) -> str:
    """The key that is set once everything that this rank got is stored."""
    return f"whole/{rank}"


def _shared_key(name: str) -> str:
    return f"setup/{name}"


def _own_key(name: str, rank: int) -> str:
    return f"setup/{name}/{rank}"


def _messages_key(name: str, rank: int) -> str:
    return f"setup/{name}/{rank}/messages"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, on any device."""
    # Called for each buffer before each collective, where even a call without effect adds up.
    flat = (tensor if tensor.is_cpu else tensor.detach().cpu()).contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)


def _fill(tensor: torch.Tensor, value: bytes) -> None:
    if value:
        given = torch.frombuffer(bytearray(value), dtype=tensor.dtype)
        with torch.no_grad():
            tensor.copy_(given.view(tensor.shape))


def _packed(results: Sequence[tuple[str, list[bytes] | None]]) -> bytes:
    head = [[op, None if data is None else [len(each) for each in data]] for op, data in results]
    text = json.dumps(head, separators=(",", ":")).encode()
    parts = [each for _, data in results if data is not None for each in data]
    return b"".join([_HEAD.pack(len(text)), text, *parts])


def _unpacked(data: bytes) -> list[tuple[str, list[bytes] | None]]:
    (size,) = _HEAD.unpack_from(data)
    at = _HEAD.size + size
    results: list[tuple[str, list[bytes] | None]] = []
    for op, sizes in json.loads(data[_HEAD.size : at]):
        if sizes is None:
            results.append((op, None))
            continue
        parts = []
        for each in sizes:
            parts.append(data[at : at + each])
            at += each
        results.append((op, parts))
    return results

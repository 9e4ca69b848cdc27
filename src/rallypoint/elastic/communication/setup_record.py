"""The collectives of a script's set-up, recorded, and answered from the record in a process that takes a lost rank over.

A newcomer runs the script from its first line. Until it enters the session, nobody takes part in its collectives: the others are
in the middle of training. Each gets the result that this rank got at the first start. Large tensors are not recorded
(parameters that DDP broadcasts, say): there the newcomer keeps its own, and gets the others' state in the session.
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

from .groups import KeptGroup


# Bytes of one result, and of a rank's whole record.
MAX_RESULT = 64 * 1024
MAX_RECORD = 512 * 1024
_HEAD = struct.Struct("!I")


class Recorder:
    """Observes the groups of this process until the session begins."""

    def __init__(self) -> None:
        self._results: dict[str, list[tuple[str, list[bytes] | None]]] = {}
        self._groups: dict[str, KeptGroup] = {}
        self._size = 0

    def observe(
        self, group: KeptGroup, operation: str, args: tuple[Any, ...], work: dist.Work
    ) -> None:
        """Take down an operation's result. Blocks: until it is there."""
        self._groups[group.kept_name] = group
        results = self._results.setdefault(group.kept_name, [])
        if operation in torch_private.POINT_TO_POINT:
            results.append((operation, None))  # its end may depend on what the script does next
            return
        work.wait()
        results.append((operation, self._data(operation, args)))

    def _data(self, operation: str, args: tuple[Any, ...]) -> list[bytes] | None:
        if operation == "barrier" or not args:
            return []
        tensors = list(_flat(args[0]))
        size = sum(each.numel() * each.element_size() for each in tensors)
        if size > MAX_RESULT or self._size + size > MAX_RECORD:
            return None
        self._size += size
        return [bytes_of(each) for each in tensors]

    def parts(self) -> dict[str, bytes]:
        """The record, by the key under which this process stores it.

        What all members of a group got is stored by its first member, what only this rank got under its rank.
        """
        found: dict[str, bytes] = {}
        for name, results in self._results.items():
            group = self._groups[name]
            own = [(op, None if op in torch_private.SAME_FOR_ALL else data) for op, data in results]
            if any(data is not None for _, data in own):
                found[_own_key(name, group.rank())] = _packed(own)
            if group.rank() == 0:
                shared = [
                    (op, data if op in torch_private.SAME_FOR_ALL else None) for op, data in results
                ]
                found[_shared_key(name)] = _packed(shared)
        return found


class Replay:
    """Answers the operations of groups without connections from a record.

    Args:
        read: the value of a key of the record, or None.
    """

    def __init__(self, read: Any) -> None:
        self._read = read
        self._left: dict[str, Iterator[tuple[str, list[bytes] | None]]] = {}

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        left = self._left.get(group.kept_name)
        if left is None:
            left = self._left[group.kept_name] = iter(self._load(group))
        recorded, data = next(left, ("", None))
        if recorded != operation:
            raise ElasticError(
                f"rank {group.members[group.rank()]}, which replaces a lost one, calls {operation} during its set-up,"
                f" where the first start called {recorded or 'nothing'}: everything before the session must run"
                " the same way each time"
            )
        if data and operation not in torch_private.SAME_FOR_ALL:
            rank_watch.bind(f"{operation} gives each rank a result of its own")
        if data is not None and args:
            for tensor, value in zip(_flat(args[0]), data, strict=True):
                _fill(tensor, value)
        return done(args[0] if args else None)

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
    """Answers broadcasts with given tensors, one after the other.

    Args:
        values: int32 values of each.
    """

    def __init__(self, values: Sequence[Sequence[int]]) -> None:
        self._values = list(values)

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        if operation != "broadcast" or not self._values:
            raise ElasticError(f"unexpected {operation} while DDP's layout is restored")
        tensor, values = args[0][0], self._values.pop(0)
        given = torch.tensor(values, dtype=tensor.dtype)
        # DDP's tensor may be longer: it is read from both ends. Its last element is the last one given.
        tensor[: len(values) - 1].copy_(given[:-1])
        tensor[-1].copy_(given[-1])
        return done(args[0])


class Unchanged:
    """Answers broadcasts with what this rank has."""

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        return done(args[0])


def alone(operation: str, args: tuple[Any, ...]) -> dist.Work:
    """Work of a collective in which nobody else takes part: what is gathered or scattered is this rank's, or zero."""
    if operation in torch_private.IN_PLACE or len(args) < 2:
        return done(args[0] if args else None)
    inputs = list(_flat(args[1])) if isinstance(args[1], (list, tuple, torch.Tensor)) else []
    with torch.no_grad():
        for number, output in enumerate(_flat(args[0])):
            given = inputs[number % len(inputs)] if inputs else None
            if given is not None and given.shape == output.shape:
                output.copy_(given)
            else:
                output.zero_()
    return done(args[0])


def done(result: Any) -> dist.Work:
    """Work that has ended."""
    return _Done(result)


class _Done(dist.Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def result(self) -> Any:
        return list(_flat(self._result)) if self._result is not None else []

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future


def keys(name: str, rank: int) -> tuple[str, str]:
    """The keys of what a rank got in a group, by the group's name and its rank there. Either may be missing in the store."""
    return _shared_key(name), _own_key(name, rank)


def whole_key(rank: int) -> str:
    """The key that is set once everything that this rank got is stored."""
    return f"whole/{rank}"


def _shared_key(name: str) -> str:
    return f"setup/{name}"


def _own_key(name: str, rank: int) -> str:
    return f"setup/{name}/{rank}"


def _flat(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    else:
        for each in given:
            yield from _flat(each)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, on any device."""
    # Called for each buffer before each collective, where a call that does nothing counts.
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

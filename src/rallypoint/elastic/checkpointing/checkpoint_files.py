"""Writing, checking and reading one checkpoint in a storage, in the format of ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from rallypoint._core.checkpoint_records import RECORD, File, Record
from rallypoint._core.storage import Storage
from rallypoint.elastic import torch_private
from rallypoint.elastic.state.plain_data import unreadable
from rallypoint.errors import ElasticError

from . import shards
from .checkpoint_metadata import MetadataReader
from .checkpoint_state import filled, keys_in
from .shards import Shard


# What a session adds to the state of its objects.
SESSION = "session"
STRUCTURE = f"{SESSION}.structure"


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written of a checkpoint.

    Args:
        files: by name.
        pieces: for each piece of a tensor: the tensor's key, shape and type; where the piece begins, and its shape; then its
            file, and the offset and length there.
    """

    files: dict[str, File]
    pieces: tuple[tuple[str, list[int], str, list[int], list[int], str, int, int], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "files": {name: [file.size, file.digest] for name, file in self.files.items()},
            "pieces": self.pieces,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Part:
        files = {
            name: File(size=size, digest=digest) for name, (size, digest) in record["files"].items()
        }
        return cls(files, tuple(tuple(each) for each in record["pieces"]))


class Unreadable(ElasticError):
    """A checkpoint cannot be read. The message says what is wrong with it."""


def write(
    storage: Storage,
    name: str,
    state: Mapping[str, Any],
    parts: Callable[[], Sequence[Part]] | None = None,
) -> dict[str, File]:
    """Write a checkpoint, except for its record.

    Args:
        storage: the folder of checkpoints.
        name: of this one.
        state: nested dicts and lists of tensors in host memory and other leaves.
        parts: waits for the parts that the other ranks write; None if there are none.
    Returns:
        The files.
    Raises:
        OSError: a file could not be written. Drivers of URLs raise other exceptions, too.
    """
    if parts is None:
        storage.remove(name)
    files = _Files(storage)
    others: list[Part] = []
    with _writer(files, name) as writer:
        planner = _SavePlanner()
        local, written = _save(dict(state), planner, writer, 0)
        others += () if parts is None else parts()
        _, metadata = planner.create_global_plan([local, *map(_plan_of, others)])
        writer.finish(metadata, [written, *map(_results_of, others)])
    found = {path.removeprefix(f"{name}/"): file for path, file in files.written.items()}
    for each in others:
        found |= each.files
    return found


def write_part(storage: Storage, name: str, state: Mapping[str, Shard], rank: int) -> Part:
    """On a rank other than 0: write what only this rank has.

    Args:
        storage: the folder of checkpoints.
        name: of this one.
        state: the parts of sharded tensors, by key.
        rank: of this process, not 0.
    Raises:
        OSError: as for :func:`write`.
    """
    files = _Files(storage)
    with _writer(files, name) as writer:
        planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        plan, written = _save(dict(state), planner, writer, rank)
    pieces = []
    places = {(each.index.fqn, each.index.offset): each.storage_data for each in written}
    for item in plan.items:
        data, place = item.tensor_data, places[item.index.fqn, item.index.offset]
        assert data is not None  # all items are parts of tensors
        dtype = str(data.properties.dtype).removeprefix("torch.")
        chunk = data.chunk
        pieces.append(
            (
                *(item.index.fqn, list(data.size), dtype, list(chunk.offsets), list(chunk.sizes)),
                *(place.relative_path, place.offset, place.length),
            )
        )
    found = {path.removeprefix(f"{name}/"): file for path, file in files.written.items()}
    return Part(found, tuple(pieces))


@contextmanager
def _writer(files: _Files, name: str) -> Iterator[FileSystemWriter]:
    writer = FileSystemWriter(name, sync_files=False)
    writer.fs = cast("Any", files)
    writer.path = cast("Any", name)
    try:
        yield writer
    except ElasticError:
        raise
    except Exception as error:  # noqa: BLE001  DCP wraps all kinds
        # torch's archive writer hides the storage's error.
        raise files.problem or _cause(error) from None


def _save(
    state: dict[str, Any], planner: DefaultSavePlanner, writer: FileSystemWriter, rank: int
) -> tuple[SavePlan, list[WriteResult]]:
    """A rank's part of what ``dcp.save`` does, without collectives, and without its warning about running without them."""
    planner.set_up_planner(state, is_coordinator=rank == 0)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    local = writer.prepare_local_plan(planner.create_local_plan())
    # The plan's position in the list is this rank, which goes into the names of files.
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, local])[rank]
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    return local, written.value()


def _plan_of(part: Part) -> SavePlan:
    items = [
        WriteItem(
            index=MetadataIndex(key, torch.Size(offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                properties=TensorProperties(dtype=getattr(torch, dtype)),
                size=torch.Size(shape),
            ),
        )
        for key, shape, dtype, offsets, sizes, *_ in part.pieces
    ]
    return SavePlan(items, planner_data={})


def _results_of(part: Part) -> list[WriteResult]:
    return [
        WriteResult(
            MetadataIndex(key, torch.Size(offsets)),
            length,
            torch_private.storage_info(path, offset, length),
        )
        for key, _, _, offsets, _, path, offset, length in part.pieces
    ]


class _SavePlanner(DefaultSavePlanner):
    """A planner that also finds the parts of sharded tensors."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, Shard) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """A planner that also reads into the parts of sharded tensors. Keys are those of the checkpoint."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, Shard) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # DCP's own method would unpickle it, and run what the pickle says. A session writes only tensors.
        raise Unreadable(f"{read_item.dest_index.fqn} is not a tensor")


def _load(state: dict[str, Any], reader: FileSystemReader) -> None:
    """What ``dcp.load`` does, without its collectives."""
    metadata = reader.read_metadata()
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def complete(storage: Storage, name: str, record: Record) -> None:
    """Write the record, which makes a checkpoint complete."""
    storage.put(f"{name}/{RECORD}", record.to_bytes())


def check(storage: Storage, name: str, record: Record) -> None:
    """Read all files of a checkpoint, and compare them with its record.

    Raises:
        Unreadable: a file is missing, has another size, or has changed.
    """
    for path, expected in record.files.items():
        try:
            found = _digest(storage, f"{name}/{path}")
        except Exception as error:
            raise Unreadable(f"{path}: {error}") from error
        if found.size != expected.size:
            raise Unreadable(f"{path} has {found.size:,} bytes, expected {expected.size:,}")
        if found.digest != expected.digest:
            raise Unreadable(f"{path} has changed since it was written")


def read(
    storage: Storage, name: str, owners: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The state exactly as it was written.

    Args:
        storage, name: of the checkpoint.
        owners: tensors of which this rank gets only its part, from :meth:`.State.owners`.
    Raises:
        Unreadable: the checkpoint is damaged, or has not been written by a session.
    """
    try:
        return _read(storage, name, owners)
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(str(_cause(error))) from error


def _read(storage: Storage, name: str, owners: Mapping[str, Any]) -> dict[str, Any]:
    reader = MetadataReader(name)
    reader.fs = cast("Any", _Files(storage))
    reader.path = cast("Any", name)
    known: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    if STRUCTURE not in known:
        raise Unreadable("it was not written by a session")

    def tensors(keys: list[str]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor | Shard] = {}
        owner_of = {key: _owner(key, known[key].size, owners) for key in keys}
        for key, owner in owner_of.items():
            dtype = known[key].properties.dtype
            if owner is None:
                made[key] = torch.empty(known[key].size, dtype=dtype)
            else:
                part = torch_private.local_part(owner)
                made[key] = Shard.like(owner, torch.empty(part.shape, dtype=dtype))
        _load(made, reader)
        return {
            key: shards.whole(owner_of[key], each.tensor) if isinstance(each, Shard) else each
            for key, each in made.items()
        }

    packed = tensors([STRUCTURE])[STRUCTURE]
    structure = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return dict(filled(structure, tensors(keys_in(structure))))


def _owner(key: str, shape: torch.Size, owners: Mapping[str, Any]) -> Any:
    """The sharded tensor that determines which part of a tensor this rank needs; None if it needs the whole tensor."""
    found = owners.get(key)
    if found is None:
        found = owners.get(f"{key.rpartition('.')[0]}.")
    return found if found is not None and found.shape == shape else None


def packed(structure: Any) -> torch.Tensor:
    """A structure as a tensor of bytes.

    Raises:
        ElasticError: it holds something that could not be read back.
    """
    if found := unreadable(structure):
        raise ElasticError(f"a state_dict holds more than tensors and plain data: {found}")
    data = io.BytesIO()
    torch.save(structure, data)
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def _cause(error: BaseException) -> BaseException:
    """The error behind an exception of DCP."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        found = next(iter(failures.values()))
        first = found[0] if isinstance(found, tuple) else found
        if isinstance(first, BaseException):
            return first
    return error


def _digest(storage: Storage, path: str) -> File:
    size, digest = 0, hashlib.sha256()
    with storage.open(path, "rb") as file:
        while data := file.read(1 << 22):
            size += len(data)
            digest.update(data)
    return File(size=size, digest=digest.hexdigest())


class _Files(FileSystemBase):
    """A storage as a file system for DCP. It digests what is written."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.written: dict[str, File] = {}
        self.problem: Exception | None = None

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        name = os.fspath(path)
        if "w" not in mode:
            with self._storage.open(name, mode) as file:
                yield cast("io.IOBase", file)
            return
        try:
            file = self._storage.open(name, mode)
            stream = _Digesting(file)
            with file:
                yield stream
                if stream.problem is None:
                    self._storage.sync(file)
        except Exception as error:
            self.problem = self.problem or error
            raise
        if stream.problem is not None:
            self.problem = self.problem or stream.problem
            raise stream.problem
        self.written[name] = File(size=stream.tell(), digest=stream.digest())

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._storage.rename(os.fspath(path), os.fspath(new_path))
        self.written[os.fspath(new_path)] = self.written.pop(os.fspath(path))

    def init_path(self, path: str | os.PathLike[str], **_: Any) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._storage.make(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._storage.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._storage.remove(os.fspath(path))


class _Digesting(io.RawIOBase):
    """Writes to a file, and digests what it writes.

    The first error is kept, and later writes do nothing: after an error, torch's archive writer keeps writing while it is
    being closed, and ends the process if that fails, too.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self.problem: Exception | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.problem is None:
            try:
                self._file.write(view)
            except Exception as error:  # noqa: BLE001  raised once the archive is closed
                self.problem = error
        self._digest.update(view)
        self._size += len(view)
        return len(view)

    def writable(self) -> Literal[True]:
        return True

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is synced."""

    def tell(self) -> int:
        return self._size

    def digest(self) -> str:
        return self._digest.hexdigest()

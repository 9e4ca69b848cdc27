"""One checkpoint in a storage, in the format of ``torch.distributed.checkpoint`` (DCP): written, checked, read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)

from rallypoint._core.checkpoint_records import RECORD, File, Record
from rallypoint._core.storage import Storage
from rallypoint.errors import ElasticError

from .checkpoint_state import filled, keys_in


# What a session adds to the state of its objects.
SESSION = "session"
STRUCTURE = f"{SESSION}.structure"


class Unreadable(ElasticError):
    """A checkpoint that cannot be read: what is wrong with it."""


def write(storage: Storage, name: str, state: Mapping[str, Any]) -> dict[str, File]:
    """Write a checkpoint, but for its record.

    Args:
        storage: the folder of checkpoints.
        name: of this one.
        state: nested dicts and lists of tensors in host memory and other leaves.
    Returns:
        The files.
    Raises:
        OSError: a file could not be written. Drivers of URLs raise other exceptions, too.
    """
    storage.remove(name)
    files = _Files(storage)
    writer = FileSystemWriter(name, sync_files=False)
    writer.fs = cast("Any", files)
    writer.path = cast("Any", name)
    try:
        _save(dict(state), writer)
    except Exception as error:  # noqa: BLE001  DCP wraps all kinds
        # torch's writer of archives hides what the storage said.
        raise files.problem or _cause(error) from None
    return {path.removeprefix(f"{name}/"): file for path, file in files.written.items()}


def _save(state: dict[str, Any], writer: FileSystemWriter) -> None:
    """What ``dcp.save`` does, without its collectives and without its warning that there are none."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def _load(state: dict[str, Any], reader: FileSystemReader) -> None:
    """What ``dcp.load`` does, without its collectives."""
    metadata = reader.read_metadata()
    planner = DefaultLoadPlanner()
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
        Unreadable: one is absent, too short, or has changed.
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


def read(storage: Storage, name: str) -> dict[str, Any]:
    """The state that was written, exactly.

    Raises:
        Unreadable: the checkpoint is damaged, or has not been written by a session.
    """
    try:
        return _read(storage, name)
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(str(_cause(error))) from error


def _read(storage: Storage, name: str) -> dict[str, Any]:
    reader = FileSystemReader(name)
    reader.fs = cast("Any", _Files(storage))
    reader.path = cast("Any", name)
    known: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    if STRUCTURE not in known:
        raise Unreadable("it was not written by a session")

    def tensors(keys: list[str]) -> dict[str, torch.Tensor]:
        made = {
            key: torch.empty(known[key].size, dtype=known[key].properties.dtype) for key in keys
        }
        _load(made, reader)
        return made

    packed = tensors([STRUCTURE])[STRUCTURE]
    structure = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return dict(filled(structure, tensors(keys_in(structure))))


def packed(structure: Any) -> torch.Tensor:
    """A structure as a tensor of bytes.

    Raises:
        ElasticError: it holds something that would not be read again.
    """
    data = io.BytesIO()
    torch.save(structure, data)
    try:
        torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    except Exception as error:  # noqa: BLE001  the unpickler raises several kinds
        first = next((line for line in str(error).splitlines() if "Unsupported" in line), error)
        raise ElasticError(
            f"a state_dict holds more than tensors and plain data: {first}"
        ) from None
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def _cause(error: BaseException) -> BaseException:
    """What lies behind an exception of DCP."""
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
    """A storage as DCP sees one. It digests what is written."""

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

    The first error is kept, and later writes do nothing: torch's writer of archives goes on writing after an error while
    it is closed, and ends the process if that fails, too.
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
        """Nothing: the file is flushed when it is synced."""

    def tell(self) -> int:
        return self._size

    def digest(self) -> str:
        return self._digest.hexdigest()

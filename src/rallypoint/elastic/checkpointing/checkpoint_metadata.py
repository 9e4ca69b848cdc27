"""Reads the ``.metadata`` of a checkpoint.

It is a pickle, and ``torch.distributed.checkpoint`` reads it as one: whoever can write to the folder of checkpoints can run code
in the job that loads it. Here it can only create what such a file describes: tensors, their pieces, and files.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable
from pathlib import PosixPath, PurePosixPath
from typing import IO, Any, ClassVar, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from rallypoint.elastic import torch_private
from rallypoint.elastic.torch_private import PythonUnpickler


_PLAIN = (torch.Size, PosixPath, PurePosixPath)


class MetadataReader(FileSystemReader):
    """torch's reader, except for the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata.

        Raises:
            pickle.UnpicklingError: it holds something other than a description of tensors.
        """
        del args, kwargs  # for metadata files of single ranks, which sessions do not write
        path = self.fs.concat_path(self.path, ".metadata")
        with self.fs.create_stream(path, "rb") as file:
            return load(cast("IO[bytes]", file))


def load(file: IO[bytes]) -> Metadata:
    """What the file describes.

    Raises:
        pickle.UnpicklingError: it holds something other than a description of tensors.
    """
    found = _Unpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError("it does not hold the metadata of a checkpoint")
    return found


def _member(kind: Any, name: Any) -> Any:
    """Python 3.11.0 to 3.11.3 pickle the members of an enum as calls of ``getattr``. This takes its place."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError("it asks for an attribute, which is not part of a checkpoint")
    return kind[name]


class _Unpickler(PythonUnpickler):  # type: ignore[misc]  # it has no types
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(PythonUnpickler.dispatch)
    # An attribute of the untyped base class.
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = (*torch_private.metadata_classes(), *torch_private.metadata_values(), *_PLAIN)
        for each in known:
            if (module, name) == (each.__module__, each.__qualname__):
                return each
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a checkpoint")

    def build(self) -> None:
        # If the object were one of the classes itself, this would change the class for the whole process.
        if not isinstance(self.stack[-2], torch_private.metadata_classes()):
            raise pickle.UnpicklingError("it changes an object that it did not create")
        PythonUnpickler.load_build(self)


_Unpickler.dispatch[pickle.BUILD[0]] = _Unpickler.build

"""What is read as a checkpoint's metadata, and what is not."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from rallypoint.elastic import torch_private as of_elastic
from rallypoint.elastic.checkpointing import checkpoint_metadata


class Runs:
    """When unpickled, it makes a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def loaded(data: bytes) -> Metadata:
    return checkpoint_metadata.load(io.BytesIO(data))


def test_members_of_an_enum_are_read_as_each_python_writes_them() -> None:
    """Python 3.11.0 to 3.11.3, which Debian 12 has, name them by getattr."""
    formats = of_elastic.metadata_values()[0]
    member = next(iter(formats))
    for written in (Runs(getattr, formats, member.name), Runs(formats, member.value)):
        found = loaded(pickle.dumps(Metadata({}, planner_data=written)))
        assert found.planner_data is member


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_has_written_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.float8_e5m2)
    state = {str(kind): torch.zeros(2, 3, dtype=kind) for kind in kinds}
    nested = {"empty": torch.zeros(0), "channels": torch.zeros(1, 2, 3, 4), "text": "x"}
    dcp.save(state | {"nested": nested}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert loaded(data) == pickle.loads(data)


@pytest.mark.parametrize(
    "planted",
    [
        Runs(os.system, "true"),
        Metadata(state_dict_metadata={"x": Runs(os.system, "true")}),  # type: ignore[dict-item]
        Metadata(state_dict_metadata={}, planner_data=Runs(eval, "1")),
        Runs(getattr, Metadata, "__init__"),
        Runs(getattr, of_elastic.metadata_values()[0], "__class__"),
        Runs(torch.load, "file"),
        Runs(__import__, "os"),
        sys.exit,
        torch.nn.Linear,
    ],
)
def test_nothing_else_is_created_or_called(planted: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="which is not part of a checkpoint"):
        loaded(pickle.dumps(planted))


@pytest.mark.parametrize("planted", [None, [1], {"x": torch.float32}, Metadata, MetadataIndex("x")])
def test_what_is_no_metadata_is_refused(planted: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="does not hold the metadata"):
        loaded(pickle.dumps(planted))


def test_a_class_is_not_changed() -> None:
    """The instruction that sets an object's attributes is applied to the class."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    attributes = b"N}\x8c\x07planted\x8c\x05value\x73\x86"
    with pytest.raises(pickle.UnpicklingError, match="did not create"):
        loaded(b"\x80\x04" + name + attributes + b"b.")
    assert not hasattr(Metadata, "planted")

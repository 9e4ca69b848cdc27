"""docs/coming-from.md against torch and against this package: no public name is missing, and none is made up."""

import dataclasses
import importlib
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from rallypoint.launch.command_line import flags


pytest.importorskip("torch")  # the names are looked up in packages that import it

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
# Their __all__ lacks half of what programs call: the part that is written in C++.
NATIVE = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
INCOMPLETE = {"torch.distributed.rpc", "torch.distributed.autograd"}


class Row(NamedTuple):
    theirs: list[str]
    here: str
    note: str


def sections() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    rows: list[Row] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            rows = found.setdefault(line.lstrip("# "), [])
        elif line.startswith("| `"):
            theirs, here, note = (cell.strip() for cell in line.strip("|").split(" |"))
            rows.append(Row(re.findall(r"`([^`]+)`", theirs), here, note))
    return found


SECTIONS = sections()


def modules_of(heading: str) -> list[str]:
    return re.findall(r"`(torch\.[\w.]+)`", heading)


def public(path: str) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates some of them
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("torch"):
                pytest.skip(f"{path} needs {error.name}")
            parent, _, name = path.rpartition(".")
            return {
                field.name
                for field in dataclasses.fields(getattr(importlib.import_module(parent), name))
            }
    names = set(getattr(module, "__all__", ()))
    if not names or path in INCOMPLETE:
        for name, value in vars(module).items():
            owner = getattr(value, "__module__", None) or ""
            within = owner == path or owner.startswith((f"{path}.", *NATIVE))
            if within and not name.startswith("_"):
                names.add(name)
    return names


def resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("heading", [each for each in SECTIONS if modules_of(each)])
def test_every_public_name_of_torchs_module_is_in_its_table(heading: str) -> None:
    there = set().union(*(public(path) for path in modules_of(heading)))
    told = [name for row in SECTIONS[heading] for name in row.theirs]
    assert sorted(there - set(told)) == [], "a row is missing"
    assert sorted(set(told) - there) == [], "torch has no such name"
    assert len(told) == len(set(told)), "named twice"


@pytest.mark.parametrize("heading", SECTIONS)
def test_what_a_table_names_is_here(heading: str) -> None:
    for theirs, here, note in SECTIONS[heading]:
        if here == "—":
            assert note, f"{theirs} is not offered: why?"
            continue
        same = re.fullmatch(r"`([\w.]+)`: the same", here)
        named = [f"{same[1]}.{name}" for name in theirs] if same else re.findall(r"`([^`]+)`", here)
        assert named, f"{theirs}: nothing is named"
        for name in named:
            if name.startswith("--"):
                assert name in flags.BY_NAME, name
            elif name.isupper():
                assert name in PAGE.parents[1].joinpath("src/rallypoint/_core/env.py").read_text()
            elif name != "rally run":
                assert resolves(name), f"{theirs}: there is no {name}"

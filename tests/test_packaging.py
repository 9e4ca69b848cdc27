"""pyproject.toml and the files beside it say the same."""

import re
import tomllib
from pathlib import Path

import rallypoint


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0]


def test_developer_tools_are_pinned_and_the_same_as_in_the_groups() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned)
    groups = PROJECT["dependency-groups"]
    assert sorted(map(name_of, pinned)) == sorted(name_of(r) for g in groups.values() for r in g)


def test_the_extra_all_has_every_other_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras.pop("all")
    named = re.fullmatch(r"rallypoint\[([\w,]+)\]", everything)
    assert named is not None
    assert set(named[1].split(",")) == set(extras)


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    path = PROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{rallypoint.__version__}"' in (ROOT / path).read_text()

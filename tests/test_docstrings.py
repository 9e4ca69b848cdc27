"""Every public name says what it is, what it takes and what it raises: read from `__all__` of each package."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest


PACKAGES = [
    "rallypoint",
    *(
        f"rallypoint.{name}"
        for name in ("compat", "join", "launch", "parallel", "rendezvous", "rpc")
    ),
]
_RAISES = re.compile(r"^\s+raise \w+\(", re.MULTILINE)


def public() -> Iterator[tuple[str, Any]]:
    """Each public function, class and method of ours, by name."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            if not (getattr(found, "__module__", None) or "").startswith("rallypoint"):
                continue
            if inspect.isfunction(found) or inspect.isclass(found):
                yield f"{package}.{name}", found
            if inspect.isclass(found):
                for own, method in vars(found).items():
                    if not own.startswith("_") and inspect.isfunction(method):
                        yield f"{package}.{name}.{own}", method


NAMES = dict(public())


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_does(name: str) -> None:
    found = NAMES[name]
    said = inspect.getdoc(found) or ""
    assert said, "no docstring"
    if inspect.isclass(found):
        return
    parameters = [each for each in inspect.signature(found).parameters if each != "self"]
    unsaid = [each for each in parameters if each not in said]
    assert "Args:" in said or not unsaid, f"it says nothing of {', '.join(unsaid)}"
    if _RAISES.search(inspect.getsource(found)):
        assert "Raises:" in said, "it does not say what it raises"

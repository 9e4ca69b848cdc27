"""Every public name says what it takes, returns and raises. The names are those in `__all__` of each package.

A class describes its constructor's parameters, under `Args:` or `Attributes:`. Each parameter is named in that section.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest


PACKAGES = [
    "rallypoint",
    *(
        f"rallypoint.{name}"
        for name in (
            "compat",
            "elastic",
            "events",
            "integrations.tqdm",
            "join",
            "launch",
            "parallel",
            "rendezvous",
            "rpc",
            "rpc.autograd",
            "rpc.optim",
            "testing",
            "tracing",
        )
    ),
]
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_RAISES = re.compile(r"^\s+raise \w+\(", re.MULTILINE)
# What a context manager, an iterator or the like is by its own protocol.
_NOTHING = (None, "None", "NoReturn", "Never")


class Public(NamedTuple):
    found: Any
    parameters: list[str]
    returns: bool
    source: str


def public() -> Iterator[tuple[str, Public]]:
    """Each public function, class, method and property of ours, by name."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            if not (getattr(found, "__module__", None) or "").startswith("rallypoint"):
                continue
            if inspect.isfunction(found):
                yield f"{package}.{name}", of_function(found)
            elif inspect.isclass(found):
                yield f"{package}.{name}", of_class(found)
                for own, method in vars(found).items():
                    if own.startswith("_"):
                        continue
                    if isinstance(method, property):
                        source = inspect.getsource(method.fget)
                        yield f"{package}.{name}.{own}", Public(method, [], False, source)
                    elif inspect.isfunction(unwrapped := getattr(method, "__func__", method)):
                        yield f"{package}.{name}.{own}", of_function(unwrapped, in_class=True)


def of_function(found: Callable[..., Any], *, in_class: bool = False) -> Public:
    signature = inspect.signature(found)
    names = [each for each in signature.parameters if not each.startswith("_")]
    if in_class and names and names[0] in ("self", "cls"):
        names = names[1:]
    wanted = signature.return_annotation
    returns = wanted is not signature.empty and wanted not in _NOTHING
    return Public(found, names, returns, inspect.getsource(found))


def of_class(found: type) -> Public:
    constructor = vars(found).get("__init__")
    is_plain = constructor is None or not inspect.isfunction(constructor)
    if is_plain or getattr(found, "_is_protocol", False):
        return Public(found, [], False, "")
    names = [each for each in inspect.signature(constructor).parameters if each[0] != "_"][1:]
    raising = (constructor, vars(found).get("__post_init__"))
    source = "".join(_source(each) for each in raising if inspect.isfunction(each))
    return Public(found, names, False, source)


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # a dataclass generates its constructor
        return ""


def sections_of(text: str) -> dict[str, str]:
    """The sections of a docstring, by their headings."""
    parts = re.split(rf"^[ \t]*({'|'.join(SECTIONS)}):[ \t]*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def lacking(each: Public) -> set[str]:
    said = inspect.getdoc(each.found) or ""
    sections, lacks = sections_of(said), set()
    described = sections.get("Args", "") + sections.get("Attributes", "")
    named = set(
        re.findall(r"\w+", " ".join(re.findall(r"^ *([\w*`, ]+):", described, re.MULTILINE)))
    )
    if set(each.parameters) - named:
        lacks.add("Args")
    if each.returns and not {"Returns", "Yields"} & sections.keys():
        lacks.add("Returns")
    if _RAISES.search(each.source) and "Raises" not in sections:
        lacks.add("Raises")
    return lacks if said else {"docstring"}


NAMES = dict(public())


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_takes_returns_and_raises(name: str) -> None:
    missing = lacking(NAMES[name])
    assert not missing, f"no, or an incomplete, section: {', '.join(sorted(missing))}"


def test_a_section_that_is_missing_is_found() -> None:
    def whole(x: int, y: int) -> int:
        """Add.

        Args:
            x, y: numbers.
        Returns:
            Their sum.
        Raises:
            ValueError: they are too large.
        """
        if x > y:
            raise ValueError(x)
        return x + y

    def half(x: int, y: int) -> int:
        """Add.

        Args:
            x: a number; of y nothing is said.
        """
        if x > y:
            raise ValueError(x)
        return x + y

    assert lacking(of_function(whole)) == set()
    assert lacking(of_function(half)) == {"Args", "Returns", "Raises"}

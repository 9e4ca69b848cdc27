"""All public names with kind and signature, against tests/public_names.txt: no addition, removal or change goes unnoticed.

`make public-names` rewrites the file; its diff then shows what a change means for users.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from test_docstrings import PACKAGES


SNAPSHOT = Path(__file__).parent / "public_names.txt"


def public_names() -> Iterator[str]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            yield from described(f"{package}.{name}", getattr(module, name))


def described(path: str, found: Any) -> Iterator[str]:
    home = getattr(found, "__module__", None) or ""
    if inspect.isclass(found) and home.startswith("rallypoint"):
        bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
        constructor = signature(found) if "__init__" in vars(found) else ""
        yield f"class {path}{constructor}{f': {bases}' if bases else ''}"
        for name, member in sorted(vars(found).items()):
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                returns = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
                yield f"property {path}.{name}: {text(returns)}"
            elif inspect.isfunction(function := getattr(member, "__func__", member)):
                kind = "def" if function is member else type(member).__name__
                yield f"{kind} {path}.{name}{signature(function)}"
    elif inspect.isfunction(found) and home.startswith("rallypoint"):
        yield f"def {path}{signature(found)}"
    elif inspect.isclass(found) or callable(found):
        yield f"from {home}: {path}"  # re-exported from another package
    else:
        yield f"{type(found).__name__} {path}"


class Bare:
    """An annotation shown as it is written, without the quotes of a string."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        return text(self.annotation)


def signature(found: Any) -> str:
    shown = inspect.signature(found)
    parameters = [
        each if each.annotation is each.empty else each.replace(annotation=Bare(each.annotation))
        for each in shown.parameters.values()
    ]
    shown = shown.replace(parameters=parameters)
    if shown.return_annotation is not shown.empty:
        shown = shown.replace(return_annotation=Bare(shown.return_annotation))
    return re.sub(r"<(?:function )?([\w.]+) at 0x[0-9a-f]+>", r"\1", str(shown))


def text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def test_the_public_names_are_as_they_were() -> None:
    before, now = SNAPSHOT.read_text().splitlines(), list(public_names())
    gone = [line for line in before if line not in now]
    come = [line for line in now if line not in before]
    assert (gone, come) == ([], []), (
        "if this is meant: make public-names, and a line in CHANGELOG.md"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_names()) + "\n")
    sys.stdout.write(f"wrote {SNAPSHOT}\n")

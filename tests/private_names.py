"""Private names of torch and Python that a source file uses, found by reading the file, not by importing it."""

import ast
import re
from collections.abc import Container, Iterator
from functools import cached_property
from pathlib import Path


_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


# os._exit is documented, in spite of its underscore.
_PUBLIC = {"_exit"}


def is_private(name: str) -> bool:
    return bool(_PRIVATE.fullmatch(name)) and not name.endswith("__") and name not in _PUBLIC


def names_defined_in(paths: list[Path]) -> Container[str]:
    """Every function, class, variable and attribute that these files define."""
    return _Names(paths)


class _Names(Container[str]):
    """Reads the files when a name is first looked up: every process that collects tests makes one of these."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @cached_property
    def _names(self) -> set[str]:
        found: set[str] = set()
        for path in self._paths:
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                        found.add(node.name)
                    case ast.Attribute(ctx=ast.Store()):
                        found.add(node.attr)
                    case ast.Name(ctx=ast.Store()):
                        found.add(node.id)
        return found


def foreign_private_names(
    path: Path, package: str, defined: Container[str], *, friends: bool = False
) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a private name that is not this package's own.

    A name is foreign unless it is an attribute of ``self`` or ``cls`` that the package defines, or belongs to a module
    or class of the package. Text counts, too: ``getattr(torch._C, "_rpc")`` and ``vars(x)["_name"]`` use both names.

    Args:
        path: the file.
        package: our package's name, as it is imported.
        defined: :func:`names_defined_in` the package.
        friends: whether modules use private attributes of each other's objects; then any name that the package defines is
            taken for its own.
    """
    tree = ast.parse(path.read_text())
    ours = {"self", "cls"}
    owned: set[str] = set()
    slots: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, level=level) if level or _is_in(module, package):
                owned.update(alias.asname or alias.name for alias in node.names)
            case ast.ClassDef():
                owned.add(node.name)
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                slots.update(ast.walk(node))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id=base)) if is_private(name):
                if base not in owned and not ((friends or base in ours) and name in defined):
                    yield node.lineno, name
            case ast.Attribute(attr=name) if is_private(name) and not (friends and name in defined):
                yield node.lineno, name
            case ast.ImportFrom(module=module, level=0) if not _is_in(module, package):
                for alias in node.names:
                    yield from _parts(node.lineno, f"{module}.{alias.name}")
            case ast.Import():
                for alias in node.names:
                    yield from _parts(node.lineno, alias.name)
            case ast.Constant(value=str() as text) if node not in slots and _NAME.fullmatch(text):
                # In text, only names that cannot be ours.
                yield from (each for each in _parts(node.lineno, text) if each[1] not in defined)


def _is_in(module: str | None, package: str) -> bool:
    return module is not None and module.split(".")[0] == package


def _parts(line: int, dotted: str) -> Iterator[tuple[int, str]]:
    return ((line, part) for part in dotted.split(".") if is_private(part))

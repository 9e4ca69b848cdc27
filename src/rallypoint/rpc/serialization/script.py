"""torch's operators and TorchScript functions, which are sent by name; TorchScript modules, which are sent with their code."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rallypoint.rpc.torch_private import operator_names, operator_schemas


def builtin_name(func: Any) -> str | None:
    """The operator (``aten::add``) behind a function of torch; None for anything else."""
    name = operator_names().get(id(func))
    return name if name is not None and "::" in name else None


def is_builtin(func: Any) -> bool:
    """Whether torch calls this a script call: an operator, or a TorchScript function."""
    return isinstance(func, torch.jit.ScriptFunction) or (
        type(func) is _BUILTIN and builtin_name(func) is not None
    )


_BUILTIN = type(torch.add)


def check_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Check an operator's arguments on the caller, as torch does.

    Raises:
        RuntimeError: they match none of its schemas.
    """
    name = builtin_name(func)
    if name is None:
        return
    schemas = operator_schemas(name)
    for schema in schemas:
        if _may_fit(schema, args, kwargs or {}):
            return
    raise RuntimeError(
        "Overloaded torch operator invoked from Python failed to match any schema:"
        f" {name} does not take these arguments; it has\n"
        + "\n".join(str(each) for each in schemas)
    )


def _may_fit(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether names and number of the arguments fit. The callee checks their types."""
    taken = schema.arguments
    positional = [each for each in taken if not each.kwarg_only]
    if len(args) > len(positional):
        return False
    names = {each.name for each in taken}
    if any(name not in names for name in kwargs):
        return False
    given = {each.name for each in positional[: len(args)]}
    if given & set(kwargs):
        return False
    return all(
        each.name in given or each.name in kwargs or each.has_default_value() for each in taken
    )


class Allowed(Protocol):
    """The names that a message may contain."""

    def find(self, module: str, name: str) -> Any:
        """The function of this name. Raises if it is not allowed."""

    def check_operator(self, name: str) -> None:
        """Raises if this operator is not allowed."""


_allowed: Callable[[], Allowed | None] = lambda: None  # noqa: E731


def check_with(allowed: Callable[[], Allowed | None]) -> None:
    """Set the function that returns the allow-list of the current message; None: everything is allowed."""
    global _allowed  # noqa: PLW0603  # set once, by the module that unpickles
    _allowed = allowed


def load_torch_function(name: str) -> Any:
    """An operator that a message names."""
    allowed = _allowed()
    if allowed is not None:
        allowed.check_operator(name)
    found = getattr(torch, name)
    if type(found) is not _BUILTIN:
        raise TypeError(f"torch.{name} is not an operator")
    return found


def load_script_function(module: str, name: str) -> Any:
    """A TorchScript function that a message names."""
    allowed = _allowed()
    if allowed is not None:
        found = allowed.find(module, name)
    else:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    if not isinstance(found, torch.jit.ScriptFunction):
        raise TypeError(f"{module}.{name} is not a TorchScript function")
    return found


def saved_script_module(module: Any) -> bytes:
    """A TorchScript module as a file. Pickle cannot write one, since its code is in no Python module."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()


def rebuild_script_module(data: bytes) -> Any:
    """A TorchScript module that has arrived. Not among the names that every allow-list accepts: it contains code."""
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]

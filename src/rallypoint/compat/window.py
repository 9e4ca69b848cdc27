"""A module that shows the names of several others and passes assignments on to them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any


class Window(ModuleType):
    """One module in place of several.

    Programs, and torch's own tests, assign to functions and state of ``torch.distributed.rpc.api``. An assignment here
    changes the module that uses the name.

    Args:
        name: this module's name.
        homes: the modules. If several have a name, the one that defines it counts, otherwise the first.
    """

    def __init__(self, name: str, homes: Sequence[ModuleType]) -> None:
        super().__init__(name, homes[0].__doc__)
        found: dict[str, ModuleType] = {}
        for home in homes:
            for each, value in vars(home).items():
                defines = getattr(value, "__module__", None) == home.__name__
                if not each.startswith("__") and (defines or each not in found):
                    found[each] = home
        vars(self)["__homes__"] = found

    def __getattr__(self, name: str) -> Any:
        home = vars(self)["__homes__"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(home, name)

    def __setattr__(self, name: str, value: Any) -> None:
        home = vars(self)["__homes__"].get(name)
        if home is None:
            super().__setattr__(name, value)
        else:
            setattr(home, name, value)

    def __delattr__(self, name: str) -> None:
        home = vars(self)["__homes__"].get(name)
        if home is None:
            super().__delattr__(name)
        else:
            delattr(home, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *vars(self)["__homes__"]})

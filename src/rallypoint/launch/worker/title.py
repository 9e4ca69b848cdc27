"""A worker's command line as ``ps`` shows it: the script's, and then what the script sets with ``setproctitle``."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from rallypoint._core import process


_PACKAGE = "setproctitle"


def show(text: str) -> None:
    """Show ``text``, and let a script show another title later."""
    preloaded = sys.modules.get(_PACKAGE)  # by --preload, or in the program that calls functions
    if preloaded is not None:
        process.set_title_as_arguments(text)
        preloaded.setproctitle(text)
        return
    process.set_title(text)
    if importlib.machinery.PathFinder.find_spec(_PACKAGE) is not None:
        sys.meta_path.insert(0, _Watch(text))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing, but learns that the script imports the package, which then looks for this process's arguments."""

    def __init__(self, title: str) -> None:
        self._title = title

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
        /,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _PACKAGE:
            process.set_title_as_arguments(self._title)
        return None

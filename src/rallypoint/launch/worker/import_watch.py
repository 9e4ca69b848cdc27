"""Reports a worker's first import of packages that the fork server could import for the next workers.

Imports of submodules of torch and of this package go through the path entry finders of their folders, which Python keeps in
``sys.path_importer_cache``. These finders get a subclass of their own class, and nothing else changes: no entry in
``sys.meta_path``, no replaced function, no cost for other imports. See ``server/learning.py`` for what follows.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rallypoint._core import clock, env as environment


# While an import goes on, it is reported again after this many seconds, so that nobody takes it for finished.
STILL = 0.5


def start(
    package_of: Callable[[str], str | None],
    env: Mapping[str, str],
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Report from now on, in this process only. Call it while torch is in ``sys.modules``.

    Args:
        package_of: the package to report for a module, or None.
        env: variables of the fork server, to compare with.
        tell: sends a record to the supervisor.
    """
    known = {name for name in sys.modules if package_of(name) == name}
    reported: set[str] = set()
    own_pid = os.getpid()
    path = _absolute(sys.path)
    last = 0.0

    def note(module: str) -> None:
        nonlocal last
        package = package_of(module)
        if package is None or package in known or os.getpid() != own_pid:
            return
        at = clock.MONOTONIC.now()
        if package not in reported:
            reported.add(package)
            now = environment.snapshot()
            changed = sorted(name for name in {*env, *now} if env.get(name) != now.get(name))
            paths = ahead(_absolute(sys.path), path)
        elif at - last >= STILL:
            changed, paths = [], []
        else:
            return
        last = at
        tell({"kind": "import", "name": package, "changed": changed, "paths": paths})

    class Finder(importlib.machinery.FileFinder):
        def find_spec(
            self, fullname: str, target: types.ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            note(fullname)
            return super().find_spec(fullname, target)

    for name in ("torch", "torch.distributed", "rallypoint"):
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            finder: object = sys.path_importer_cache.get(folder)
            if type(finder) is importlib.machinery.FileFinder:
                finder.__class__ = Finder


def ahead(now: Sequence[str], before: Sequence[str]) -> list[str]:
    """The folders added to ``sys.path`` ahead of one that was there before: their modules may hide others."""
    ends = [at for at, folder in enumerate(now) if folder in before]
    return sorted({*now[: ends[-1] if ends else len(now)]} - {*before})


def _absolute(path: Sequence[object]) -> list[str]:
    return [os.path.abspath(each) for each in path if isinstance(each, str)]

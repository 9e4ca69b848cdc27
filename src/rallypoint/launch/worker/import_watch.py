"""Reports a worker's first import of packages that the fork server could import for the next workers.

Imports of torch's submodules go through the path entry finders of torch's folders, which Python keeps in
``sys.path_importer_cache``. These get a subclass of their own class, and nothing else changes: no entry in
``sys.meta_path``, no replaced function, no cost for other imports. See ``server/learning.py`` for what follows.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from rallypoint._core import env as environment


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
    reported = {name for name in sys.modules if package_of(name) == name}
    own_pid = os.getpid()

    def note(module: str) -> None:
        package = package_of(module)
        if package is None or package in reported or os.getpid() != own_pid:
            return
        reported.add(package)
        now = environment.snapshot()
        changed = sorted(name for name in {*env, *now} if env.get(name) != now.get(name))
        tell({"kind": "import", "name": package, "changed": changed})

    class Finder(importlib.machinery.FileFinder):
        def find_spec(
            self, fullname: str, target: types.ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            note(fullname)
            return super().find_spec(fullname, target)

    for name in ("torch", "torch.distributed"):
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            finder: object = sys.path_importer_cache.get(folder)
            if type(finder) is importlib.machinery.FileFinder:
                finder.__class__ = Finder

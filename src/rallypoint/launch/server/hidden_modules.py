"""Files beside a script that hide modules of the standard library.

Python looks for modules in the script's folder first. A ``random.py`` there is what torch gets when it imports ``random``.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import all_suffixes


def hidden(folder: str | None) -> list[str]:
    """Sorted names of the files and packages in ``folder`` that are named like a module of the standard library."""
    if folder is None:
        return []
    try:
        entries = list(os.scandir(folder))
    except OSError:  # a zip file, or gone
        return []
    return sorted(entry.name for entry in entries if _module(entry) in sys.stdlib_module_names)


def _module(entry: os.DirEntry[str]) -> str | None:
    try:
        is_folder = entry.is_dir()
    except OSError:  # a link that leads in a circle, or through a folder that may not be entered
        return None
    if is_folder:
        # Python takes a folder without this file only if it finds no module of that name anywhere else.
        return entry.name if os.path.isfile(os.path.join(entry.path, "__init__.py")) else None
    ending = next((each for each in all_suffixes() if entry.name.endswith(each)), None)
    return None if ending is None else entry.name.removesuffix(ending)

"""The versions that all nodes of a job must share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys


_VERSION = re.compile(r"""^__version__\s*(?::\s*\w+\s*)?=\s*['\"]([^'\"]+)""", re.MULTILINE)


def rallypoint() -> str:
    return str(getattr(sys.modules.get("rallypoint"), "__version__", ""))


def python() -> str:
    """The major and minor version."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def torch() -> str:
    """The major and minor version; empty if torch is not installed. Does not import torch."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None) or _found_torch()
    return ".".join(str(loaded).split(".")[:2])


def _found_torch() -> str:
    """The version of the torch that would be imported, from its ``version.py``: importlib.metadata takes 50 ms and 2.5 MiB."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        for folder in (spec and spec.submodule_search_locations) or ():
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
                if found := _VERSION.search(file.read()):
                    return found.group(1)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""

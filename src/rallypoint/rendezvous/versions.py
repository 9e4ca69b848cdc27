"""The versions that all nodes of a job must share."""

from __future__ import annotations

import sys


def rallypoint() -> str:
    return str(getattr(sys.modules.get("rallypoint"), "__version__", ""))


def python() -> str:
    """The major and minor version."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def torch() -> str:
    """The major and minor version; empty if torch is not installed. Does not import torch."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            loaded = version("torch")
        except PackageNotFoundError:
            return ""
    return ".".join(str(loaded).split(".")[:2])

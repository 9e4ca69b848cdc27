"""The versions of torch that the tests run with; any other gets one warning per process."""

from __future__ import annotations

import re
import warnings


# The oldest and the newest minor version tested; keep equal to pyproject.toml and constraints.txt.
OLDEST, NEWEST = (2, 13), (2, 13)

_warned: set[str] = set()


def warn_if_untested(version: str) -> None:
    """Warn once per process if this torch is outside the tested range.

    The packages that import torch call this at the end of their own import.

    Args:
        version: ``torch.__version__``. One that does not start with two numbers counts as tested.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or OLDEST <= (int(found[1]), int(found[2])) <= NEWEST or version in _warned:
        return
    _warned.add(version)
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    tested = oldest if OLDEST == NEWEST else f"{oldest} to {newest}"
    # The third frame is the user's import statement: Python skips the frames of importlib.
    warnings.warn(
        f"Rallypoint is tested with torch {tested}, this is torch {version}. join, parallel, rpc and compat use"
        f" torch internals that may differ; install torch {newest}, or a Rallypoint that is tested with yours",
        UserWarning,
        stacklevel=3,
    )

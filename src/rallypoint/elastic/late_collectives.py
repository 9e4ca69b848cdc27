"""Steps that communicate behind a change of parameters: found before a loss shows them.

Such a step can only be repeated from a copy: once all ranks have changed their parameters, nobody has those that it began with.
"""

from __future__ import annotations

import inspect
import os
import sys
from types import FrameType
from typing import NamedTuple


# A script does the same in later ones. Looking for changes of parameters costs a little before each collective; whether an
# optimizer has stepped is known, and is looked at in all steps.
STEPS = 3
# Frames of these packages are not the script's.
_OTHERS = {"torch", "rallypoint", *sys.stdlib_module_names} - {"__main__"}


class Late(NamedTuple):
    """One that was found.

    Args:
        what: in words: file, line, operation.
        is_first: no other one came before it in its step, so each rank has changed its parameters by itself.
    """

    what: str
    is_first: bool


class LateCollectives:
    """Watches the steps of a process until it finds one.

    Args:
        matters: a loss leads back to the beginning of a step, not to a snapshot.

    Attributes:
        is_watching: none was found so far.
    """

    def __init__(self, *, matters: bool) -> None:
        self._left = STEPS
        self._is_first = True
        self.is_watching = matters

    @property
    def compares(self) -> bool:
        """Whether changes by other means than an optimizer are looked for."""
        return self._left > 0

    def begin_step(self) -> None:
        """A step begins."""
        self._is_first = True

    def end_step(self) -> None:
        """A step is complete."""
        self._left = max(0, self._left - 1)

    def meet(self, operation: str, *, is_late: bool) -> Late | None:
        """A collective begins in a step.

        Args:
            operation: its name.
            is_late: parameters have changed in this step.
        """
        is_first, self._is_first = self._is_first, False
        if not is_late:
            return None
        self.is_watching = False
        place = place_in_script(inspect.currentframe()) or "a step"
        what = f"{place} communicates ({operation}) after a change of parameters in the same step"
        return Late(what, is_first)


def place_in_script(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is neither torch's, nor this package's, nor Python's; empty if there is none."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OTHERS:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

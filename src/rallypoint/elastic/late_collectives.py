"""Finds steps that communicate after a change of parameters, before a loss makes them a problem.

Such a step can only be repeated from a copy: once all ranks have changed their parameters, nobody has those that it began with.
"""

from __future__ import annotations

import inspect
import os
import sys
from types import FrameType
from typing import NamedTuple


# Only this many steps: a script does the same in later ones, and looking for changes of parameters costs a little before each
# collective. Whether an optimizer has stepped is known anyway, and is checked in all steps.
STEPS = 3
# A change through ``.data`` is not counted in the tensor's version. An update of parameters changes some of so many elements of each.
SAMPLES = 16
# Frames of these packages are not the script's.
_OTHERS = {"torch", "rallypoint", *sys.stdlib_module_names} - {"__main__"}


class Late(NamedTuple):
    """A collective after a change of parameters.

    Args:
        what: in words: file, line, operation.
        is_first: it is the first collective of its step, so each rank has changed its parameters on its own.
    """

    what: str
    is_first: bool


class LateCollectives:
    """Watches the steps of a process until it finds such a collective.

    Args:
        matters: a loss leads back to the beginning of a step, not to a snapshot.

    Attributes:
        is_watching: none has been found so far.
        begun: a fingerprint of a few elements of each parameter, from the beginning of the step; None: none was taken.
    """

    def __init__(self, *, matters: bool) -> None:
        self.begun: int | None = None
        self._left = STEPS
        self._is_first = True
        self.is_watching = matters

    @property
    def compares(self) -> bool:
        """Whether to look for changes made by other means than an optimizer."""
        return self.is_watching and self._left > 0

    def begin_step(self, begun: int | None = None) -> None:
        """A step begins."""
        self._is_first, self.begun = True, begun

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
    """File and line of the innermost frame that is not torch's, this package's, or the standard library's; empty if none is."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OTHERS:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

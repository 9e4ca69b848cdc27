"""Steps that communicate behind a change of parameters: found in a script's first steps, before a loss shows them.

Such a step can only be repeated from a snapshot: once all ranks have changed their parameters, nobody has those that it began with.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from types import FrameType

import torch.distributed as dist


# A script does the same in later ones. Looking costs a little before each collective.
STEPS = 3
# Frames of these packages are not the script's.
_OTHERS = {"torch", "rallypoint", *sys.stdlib_module_names} - {"__main__"}

_log = logging.getLogger(__name__)


class LateCollectives:
    """Watches the first steps of a process.

    Args:
        matters: a loss leads back to the beginning of a step, not to a snapshot.
    """

    def __init__(self, *, matters: bool) -> None:
        self._left = STEPS if matters else 0

    @property
    def is_watching(self) -> bool:
        return self._left > 0

    def end_step(self) -> None:
        """A step is complete."""
        self._left -= self.is_watching

    def tell(self, operation: str) -> None:
        """A collective begins behind a change in the same step: say so, once."""
        self._left = 0
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        _log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "elastic.session: %s communicates (%s) behind a change of parameters in the same step. If a process is lost there, no rank has the"
            " state that the step began with, and the session ends. Use elastic.session(…, snapshots=True), or make two steps of it",
            place_in_script(inspect.currentframe()) or "a step",
            operation,
        )


def place_in_script(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is neither torch's, nor this package's, nor Python's; empty if there is none."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OTHERS:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""

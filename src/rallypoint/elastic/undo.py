"""Undoing a step that communicates behind a change of parameters: by a copy of what it began with.

If a process is lost there, all others may have changed their parameters, and none could repeat the step otherwise.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from .late_collectives import Late
from .state.copied import num_bytes
from .state.objects import Objects, Saved


_INSTEAD = "Two steps need no copy; elastic.session(…, snapshots=True) copies less often"

_log = logging.getLogger(__name__)


class Undo:
    """Of the step under way. Off until it is turned on.

    Args:
        objects: the session's.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._saved: Saved | None = None
        self._is_current = False
        self._because = ""
        self._is_on = self._was_told = False

    def turn_on(self, late: Late) -> None:
        """From the next step on, if copies help.

        Args:
            late: the collective that needs them.
        """
        self._because = late.what
        self._is_on = not late.is_first
        if late.is_first:
            self._tell(
                ", the first of that step: each rank changes its parameters by itself. Nobody else has what a lost rank had then. Use"
                " elastic.session(…, snapshots=True)"
            )

    def begin_step(self) -> None:
        """Before it changes anything. Copies everything, if it is on."""
        self._is_current = False
        if not self._is_on:
            return
        try:
            self._saved = self._objects.save(self._saved)
        except torch.OutOfMemoryError:
            self._is_on, self._saved = False, None
            self._tell(
                ". There is no memory for a copy of what each step begins with, so the session ends if a process is lost there. "
                + _INSTEAD
            )
            return
        self._is_current = True
        if not self._was_told:
            size = num_bytes(self._saved) / 1e6
            self._tell(
                f". To undo it after a loss, each step begins with a copy of what the session holds ({size:.1f} MB). "
                + _INSTEAD
            )

    def undo(self) -> bool:
        """Put everything back as it was at the beginning of the step. Returns False if there is no copy."""
        saved, self._saved = self._saved, None  # optimizers take it as their state
        is_current, self._is_current = self._is_current, False
        if saved is None or not is_current:
            return False
        self._objects.put_back(saved)
        return True

    def _tell(self, what: str) -> None:
        self._was_told = True
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        level = logging.WARNING if is_first else logging.DEBUG
        _log.log(level, "elastic.session: %s%s", self._because, what)

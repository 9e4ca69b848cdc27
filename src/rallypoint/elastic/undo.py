"""Undoing a step that communicates after a change of parameters, using a copy of what it began with.

If a process is lost there, all others may have changed their parameters, and without a copy none could repeat the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .hints import say
from .late_collectives import Late
from .state.copied import num_bytes
from .state.objects import Objects, Saved


_INSTEAD = "Two separate steps need no copy; elastic.session(…, snapshots=True) copies less often"


def room_on(device: torch.device) -> float:
    """Bytes of a device that training does not need, once it has run a step."""
    if device.type == "cpu":
        return math.inf
    of = torch.accelerator
    free, _ = of.get_memory_info(device)
    return free + of.memory_reserved(device) - of.max_memory_allocated(device)


class Undo:
    """Undoes the step under way. Off until it is turned on.

    Args:
        objects: the session's.
        room: bytes free on a device. A copy takes half of it at most: later steps may need more memory than earlier ones.
    """

    def __init__(self, objects: Objects, room: Callable[[torch.device], float] = room_on) -> None:
        self._objects = objects
        self._room = room
        self._saved: Saved | None = None
        self._is_current = False
        self._because = ""
        self._is_on = self._was_told = False

    def turn_on(self, late: Late) -> None:
        """Copy from the next step on, if copies help.

        Args:
            late: the collective that needs them.
        """
        self._because = late.what
        self._is_on = not late.is_first
        if late.is_first:
            self._tell(
                ", the first collective of that step: each rank changes its parameters by itself, and no other rank has what a lost one had. Use"
                " elastic.session(…, snapshots=True)"
            )

    def begin_step(self) -> None:
        """A step begins, and has not changed anything yet. Copies everything, if turned on."""
        self._is_current = False
        if not self._is_on:
            return
        if self._saved is None and not self._has_room():
            self._is_on = False
            self._tell(
                ". There is not enough memory for a copy of what each step begins with, so the session ends if a process is lost there. "
                + _INSTEAD
            )
            return
        self._saved = self._objects.save(self._saved)
        self._is_current = True
        if not self._was_told:
            size = num_bytes(self._saved).total() / 1e6
            self._tell(
                f". To undo it after a loss, each step begins with a copy of what the session holds ({size:.1f} MB). "
                + _INSTEAD
            )

    @property
    def is_current(self) -> bool:
        """Whether there is a copy of what the step under way began with."""
        return self._is_current

    def undo(self) -> bool:
        """Put everything back as it was at the beginning of the step. Returns False if there is no copy."""
        saved, self._saved = self._saved, None  # optimizers take it as their state
        is_current, self._is_current = self._is_current, False
        if saved is None or not is_current:
            return False
        self._objects.put_back(saved)
        return True

    def _has_room(self) -> bool:
        sizes = num_bytes(self._objects.state())
        return all(2 * size <= self._room(device) for device, size in sizes.items())

    def _tell(self, what: str) -> None:
        self._was_told = True
        say("%s%s", self._because, what)

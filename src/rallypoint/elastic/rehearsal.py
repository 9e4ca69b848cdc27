"""Complete steps, run again without any effect.

A ``with`` block cannot be skipped, and a loop's body can only be entered at its top. So a rank that must continue partway through
a body runs the earlier steps once more: nobody takes part in their collectives, and what they change is put back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from .communication.kept_group import KeptGroup
from .communication.setup_record import alone
from .loops.rng import RandomState
from .state.objects import Objects


class Rehearsal:
    """Saves what a rank has while it rehearses.

    Args:
        objects: the session's. Their state is copied, so it takes twice the memory until the end.
        groups: the session's.
        random: the generators after the last of these steps; None: as the rehearsal leaves them.
    """

    def __init__(
        self, objects: Objects, groups: Iterable[KeptGroup], random: RandomState | None
    ) -> None:
        self._objects = objects
        self._groups = list(groups)
        self._random = random
        self._gradients = objects.gradients()
        self._layouts = objects.layouts()
        self._saved = objects.save()

    def enter(self) -> None:
        """A step is rehearsed: its collectives return at once."""
        for group in self._groups:
            group.answerer = self

    def leave(self) -> None:
        """The step has ended."""
        for group in self._groups:
            group.answerer = None

    def end(self) -> None:
        """Put everything back."""
        self._objects.put_back(self._saved)
        self._objects.drop_gradients(self._gradients)
        self._objects.static_graphs.note_rehearsed()
        # A first iteration does not count: DDP settles its layout, with all ranks, in the second one.
        self._objects.restore_layouts(self._layouts)
        if self._random is not None:
            self._random.restore()

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        """Answer a collective as if all members gave what this rank gives."""
        return alone(operation, args)

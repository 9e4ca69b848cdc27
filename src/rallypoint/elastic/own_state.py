"""What only one rank has, and the one that takes it over needs: generators, place in the data, buffers of modules.

It is kept in the rank's memory (:mod:`.memory`) at the beginning of each step, and again before each collective: a rank that is
killed behind its last collective has contributed to a step that the others complete, so its next step must begin as
it would have.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from typing import Any

from .rng import RandomState


_HEAD = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the data.

    Args:
        epoch: how many epochs are complete.
        batch: how many batches of this epoch are.
        tasks: how many functions were run in this epoch (``Session.run``).
        begun: the generators when the iteration of this epoch began; None without ``Session.batches``.
    """

    epoch: int = 0
    batch: int = 0
    tasks: int = 0
    begun: RandomState | None = None

    def after(self, *, task: bool) -> Place:
        """The place once the step under way is complete: a batch's, or a function's."""
        if task:
            return replace(self, tasks=self.tasks + 1)
        return replace(self, batch=self.batch + 1)


@dataclass(frozen=True, slots=True)
class OwnState:
    """One rank's own state.

    Args:
        steps: how many steps are complete.
        place: of the step under way.
        random: the generators before the step's batch is fetched.
        is_task: the step under way is a function's, not a batch's.
        later: the generators before the last collective of the step under way; None before the first.
        buffers: of the modules, as bytes; empty if they are too large.
        later_buffers: the same, before the last collective.
        loader: the state of a loader that keeps its place; only in checkpoints.
    """

    steps: int
    place: Place
    random: RandomState
    later: RandomState | None = None
    buffers: bytes = b""
    later_buffers: bytes = b""
    is_task: bool = False
    loader: bytes = b""

    def at(self, steps: int) -> OwnState | None:
        """The state after this many steps; None if it is not known."""
        if steps == self.steps:
            return replace(self, later=None, later_buffers=b"")
        if steps == self.steps + 1 and self.later is not None:
            return OwnState(
                steps, self.place.after(task=self.is_task), self.later, None, self.later_buffers
            )
        return None

    def pack(self) -> bytes:
        """As bytes."""
        states = [self.random, self.later, self.place.begun]
        heads: list[dict[str, Any] | None] = []
        parts = [self.buffers, self.later_buffers, self.loader]
        for state in states:
            if state is None:
                heads.append(None)
                continue
            head, more = state.pack()
            heads.append({**head, "parts": len(more)})
            parts += more
        head = {
            "steps": self.steps,
            "place": [self.place.epoch, self.place.batch, self.place.tasks],
            "is_task": self.is_task,
            "states": heads,
            "sizes": [len(part) for part in parts],
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        return b"".join([_HEAD.pack(len(text)), text, *parts])

    @classmethod
    def unpack(cls, data: bytes) -> OwnState:
        """From what :meth:`pack` returned."""
        (size,) = _HEAD.unpack_from(data)
        at = _HEAD.size + size
        head = json.loads(data[_HEAD.size : at])
        parts = []
        for each in head["sizes"]:
            parts.append(data[at : at + each])
            at += each
        buffers, later_buffers, loader, *left = parts
        states: list[RandomState | None] = []
        for each in head["states"]:
            if each is None:
                states.append(None)
                continue
            count = each["parts"]
            states.append(RandomState.unpack(each, left[:count]))
            left = left[count:]
        random, later, begun = states
        assert random is not None
        epoch, batch, tasks = head["place"]
        place = Place(epoch, batch, tasks, begun)
        is_task = head["is_task"]
        return cls(head["steps"], place, random, later, buffers, later_buffers, is_task, loader)

"""State that only one rank has, and that a process which takes over the rank needs: generators, place in the data, buffers.

It is kept in the rank's memory (:mod:`.memory`) at the beginning of each step, and again before each collective: a rank that is
killed after its last collective has contributed to a step that the others complete, so its replacement must begin the next step
just as it would have.

The previous step is kept, too: a rank that is killed early in a step may have seen the previous one end when others have not, as
its last message was lost with its connection. Then all repeat that one. No rank is further: a step ends with a collective.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from typing import Any

from .loader_generators import Seen
from .rng import RandomState


_HEAD = struct.Struct("!I")


def joined(newest: bytes, before: bytes) -> bytes:
    """Two packed states as one record: of the step under way, and of the previous one (empty: there is none)."""
    return b"".join([_HEAD.pack(len(newest)), newest, before])


def halves(record: bytes) -> tuple[bytes, bytes]:
    """The two packed states of a record, the newer one first; the other may be empty."""
    (size,) = _HEAD.unpack_from(record)
    return record[_HEAD.size : _HEAD.size + size], record[_HEAD.size + size :]


def parted(record: bytes) -> list[OwnState]:
    """The states in a record, the newer one first."""
    return [OwnState.unpack(each) for each in halves(record) if each]


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the data.

    Args:
        epoch: how many epochs are complete.
        loop: the number within this epoch of the loop over batches that was begun last; earlier ones are complete.
        batch: how many batches of that loop are complete.
        tasks: how many functions were run in this epoch (``Session.run``), except those in the body of a batch.
        done: how many steps and functions of the current batch's body are complete.
        in_body: whether the step under way is in a batch's body.
        counted: whether ``Session.epochs`` counts the epochs.
        begun: the generators when the iteration of that loop began; None before the first one.
        sizes: with a :class:`.Sampler`, how many ranks have shared that loop's samples, and from which batch on.
        own_begun: the loader's own generators when the iteration of that loop began.
        seen: all generators that belong to loaders.
        ended: whether that loop has come to the end of its batches, however many the loader would give now.
    """

    epoch: int = 0
    batch: int = 0
    tasks: int = 0
    done: int = 0
    in_body: bool = False
    counted: bool = False
    begun: RandomState | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    loop: int = 0
    own_begun: tuple[bytes, ...] = ()
    seen: tuple[Seen, ...] = ()
    ended: bool = False

    def after(self, *, task: bool) -> Place:
        """The place once the step under way is complete, or the function, if ``task``."""
        if self.in_body:
            return replace(self, done=self.done + 1)
        return replace(self, tasks=self.tasks + task)

    def after_batch(self) -> Place:
        """The place after the body of a batch."""
        return replace(self, batch=self.batch + 1, done=0, in_body=False)

    def with_other_generators(self, now: RandomState) -> Place:
        """The place on a rank whose own generators are not known: with the generators that it has now."""
        begun = None if self.begun is None else now
        return replace(self, begun=begun, own_begun=(), seen=())

    @property
    def tasks_to_skip(self) -> int:
        """How many functions that have already run a newcomer comes across. In a loop of the user's own, the position tells."""
        return self.tasks if self.counted or self.begun is not None else 0


@dataclass(frozen=True, slots=True)
class OwnState:
    """One rank's own state.

    Args:
        steps: how many steps are complete.
        place: of the step under way.
        random: the generators before the current batch is fetched; outside of a batch's body, at the beginning of the step.
        call: the generators at the beginning of the step, if it is not the first one in its body.
        behind: the generators after the previous step, if that was in the same body and the current one has not begun; outside of
            a batch's body, if they differ from those at the beginning of the step.
        is_task: the step under way is a function's.
        later: the generators before the last collective of the step under way; None before the first.
        buffers: the modules' buffers, as bytes; empty if they are too large.
        later_buffers: the same, before the last collective.
        loader: the state of a loader that keeps its place; only in checkpoints.
    """

    steps: int
    place: Place
    random: RandomState
    later: RandomState | None = None
    call: RandomState | None = None
    behind: RandomState | None = None
    buffers: bytes = b""
    later_buffers: bytes = b""
    is_task: bool = False
    loader: bytes = b""

    def at(self, steps: int) -> OwnState | None:
        """The state after this many steps; None if it is not known."""
        if steps == self.steps:
            return replace(self, later=None, later_buffers=b"")
        if steps == self.steps + 1 and self.later is not None:
            place = self.place.after(task=self.is_task)
            random, behind = (self.random, self.later) if place.in_body else (self.later, None)
            return OwnState(steps, place, random, None, None, behind, self.later_buffers)
        return None

    @property
    def newest(self) -> RandomState:
        """The latest known state of the generators before the step's first collective."""
        return self.call or self.behind or self.random

    def pack(self) -> bytes:
        """As bytes."""
        place = self.place
        states = [self.random, self.later, self.call, self.behind, place.begun]
        heads: list[dict[str, Any] | None] = []
        parts = [self.buffers, self.later_buffers, self.loader]
        for state in states:
            if state is None:
                heads.append(None)
                continue
            head, more = state.pack()
            heads.append({**head, "parts": len(more)})
            parts += more
        parts += [*place.own_begun, *(each.state for each in place.seen)]
        head = {
            "steps": self.steps,
            "place": [
                place.epoch,
                place.batch,
                place.tasks,
                place.done,
                place.in_body,
                place.counted,
            ],
            "ranks": place.sizes,
            "loop": place.loop,
            "ended": place.ended,
            "own": len(place.own_begun),
            "seen": [[each.first, each.uses, each.stays] for each in place.seen],
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
        random, later, call, behind, begun = states
        assert random is not None
        epoch, batch, tasks, done, in_body, counted = head["place"]
        # Checkpoints of earlier versions lack these.
        loop = head.get("loop", 0)
        sizes = tuple((first, size) for first, size in head.get("ranks", ()))
        count = head.get("own", 0)
        own_begun, kept = tuple(left[:count]), zip(head.get("seen", ()), left[count:], strict=True)
        seen = tuple(
            Seen(first, tuple((loop, number) for loop, number in uses), stays, state)
            for (first, uses, stays), state in kept
        )
        place = Place(
            *(epoch, batch, tasks, done, in_body, counted, begun, sizes, loop, own_begun, seen),
            ended=head.get("ended", False),
        )
        return cls(
            *(head["steps"], place, random, later, call, behind),
            *(buffers, later_buffers, head["is_task"], loader),
        )

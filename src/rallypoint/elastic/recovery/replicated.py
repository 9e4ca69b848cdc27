"""Keeping replicated state: other ranks have the model and the optimizer, so in every step a rank keeps only what is its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rallypoint.elastic.loops.course import Course
from rallypoint.elastic.loops.own_state import OwnState, joined, parted
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.replication.copies import Copies
from rallypoint.elastic.state.buffers import DIGEST
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.storage.memory import Memory
from rallypoint.elastic.storage.schedule import Held

from .agreement import Verdict
from .keeping import Begun


_log = logging.getLogger(__name__)


class Replicated:
    """A rank's own state, in memory that outlives the process.

    Args:
        objects: what the session was given.
        course: the script's.
        memory: None where nothing can be kept.
        catch_up: recovers from a loss, if there is one.
        copies: on other nodes, if there are any.
        resizes: the session may continue with another number of ranks, which divides the samples differently: with a batch in
            hand, this rank does not meet the others before its step begins.
    """

    def __init__(
        self,
        objects: Objects,
        course: Course,
        memory: Memory | None,
        catch_up: Callable[[], None],
        copies: Copies | None = None,
        *,
        resizes: bool = False,
    ) -> None:
        self._copies = copies
        self._resizes = resizes
        self._objects = objects
        self._course = course
        self._memory = memory
        self._catch_up = catch_up
        held = [] if memory is None or memory.held is None else parted(memory.held)
        self.own = held[0] if held else None
        self._before = held[1] if len(held) > 1 else None  # of the previous step
        self._packed = self._packed_before = b""
        self._received = (-1, b"")  # what settle() was told after so many steps (buffers_behind)
        self.random: RandomState | None = None
        self.ranks = 0
        self.communicates = False
        # How many collectives are in the step under way so far, and how many were in the previous one.
        self._collectives = self._usual = 0

    def held(self) -> tuple[Held, ...] | None:
        return None

    def fingerprint(self) -> int:
        return self._objects.fingerprint()

    def begin(self) -> None:
        self._keep(is_task=False)

    def begin_batches(self, *, anew: bool) -> None:
        pass

    def approach_batch(self) -> None:
        if self._resizes:
            self._catch_up()
        if not self._course.place.done:
            self._keep(is_task=False)

    def random_before_fetch(self) -> RandomState | None:
        return None

    def reach_end_of_batches(self, random: RandomState | None) -> bool:
        return True

    def end_batches(self) -> None:
        pass

    def continue_body(self) -> RandomState | None:
        if self.own is None:
            return None
        if not self.own.place.in_body:
            # The script had left the loop (break), and was in what follows it.
            self.random = self.own.random
            return self.random
        self.random = self.own.call
        return self.own.behind

    def reach_task(self) -> bool:
        return True

    def leave_task(self, before: int) -> bool:
        return True

    def begin_step(
        self, *, is_task: bool, may_swap: bool = False, behind: RandomState | None = None
    ) -> Begun:
        if not (self._resizes and self._course.in_body):
            self._catch_up()
        if self.random is not None:
            self.random.restore()
            self.random = None
        self._usual, self._collectives = self._collectives, 0
        objects, buffers = self._objects, None
        if not self._course.in_body or self._course.place.done:
            buffers = self._keep(is_task=is_task, behind=behind)
        objects.check_state()
        return Begun(
            RandomState.now(),
            objects.buffers.copied(objects.buffers.as_bytes() if buffers is None else buffers),
            objects.gradients(),
            objects.settings.copied(),
            objects.changes(),
            objects.fingerprint() if may_swap else None,
            objects.modes.now(),
        )

    def note_collective(self) -> None:
        """Keep the state once more: after a step's last collective this rank may die while the others complete the step."""
        self._collectives += 1
        if self.own is None or self._memory is None:
            return
        if self._collectives < self._usual and self._objects.buffers.are_on_gpu():
            # Keeping them waits for the GPU, and only the last collective needs it: the previous step tells which one that is.
            return
        state, buffers = RandomState.now(), self._objects.buffers.as_bytes()
        later = self.own.later
        if later is not None and later.equals(state) and self.own.later_buffers == buffers:
            return
        self.own = replace(self.own, later=state, later_buffers=buffers)
        self._write(self._memory)
        # A node may be lost after the last collective, too. What this record lacks, the one of the next step has.
        self._copy()

    def buffers_behind(self, steps: int) -> bytes:
        found = (each for each in (self.own, self._before) if each is not None)
        own = next((each for each in found if each.steps + 1 == steps and each.later), None)
        if own is not None:
            return self._objects.buffers.digests(own.later_buffers)
        # The rank that gave this one its state may have been lost before all had met.
        at, received = self._received
        return received if at == steps else b""

    def settle(
        self,
        verdict: Verdict,
        begun: Begun | None,
        *,
        receives: bool,
        is_new: bool,
        buffers: bytes,
    ) -> None:
        if begun is not None and self._course.steps == verdict.steps:
            # In a loop of the user's own, the script draws again what it drew before the step. Whatever it draws, the step
            # begins with the same generators as the first time.
            is_outside = self.own is not None and not self.own.place.in_body
            (self.own.newest if self.own and is_outside else begun.random).restore()
            self.random = begun.random
            self._objects.buffers.restore(begun.buffers)
            if begun.settings is not None:
                self._objects.settings.restore(begun.settings)
            if begun.modes is not None:
                self._objects.modes.restore(begun.modes)
        elif receives:
            self._objects.modes.go_behind_last(is_new=is_new)
            self._continue(verdict.steps, buffers, is_new=is_new)

    def reach_end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def own_at(self, steps: int) -> bytes:
        """This rank's own state after this many steps, packed; empty if it is not known."""
        own = None if self.own is None else self.own.at(steps)
        return b"" if own is None else own.pack()

    def take_own(self, record: bytes, steps: int) -> bool:
        held = parted(record) if record else []
        if not any(each.at(steps) for each in held):
            return False
        self.own, self._before = held[0], held[1] if len(held) > 1 else None
        return True

    def copy(self, copied: Sequence[Held]) -> None:
        if self.own is not None:
            self._packed = self.own.pack()
            self._copy()

    def await_copies(self) -> None:
        pass

    def before_batch(self) -> OwnState:
        """This rank's own state before the batch in hand was fetched. Nothing of that batch's body is complete."""
        assert self.own is not None
        return OwnState(self._course.steps, self._course.place, self.own.random)

    def take_copy(
        self,
        held: Held,
        size: int,
        checksum: int,
        receive: Callable[[torch.Tensor], None],
        *,
        is_own: bool,
    ) -> None:
        raise AssertionError("replicated state has no snapshots")

    def contents(self, held: Held) -> tuple[torch.Tensor, int]:
        raise AssertionError("replicated state has no snapshots")

    def _copy(self) -> None:
        if self._copies is not None and self.own is not None:
            self._copies.keep(self.own.steps, self._packed)

    def take_place(self, data: bytes) -> None:
        other, now = OwnState.unpack(data), RandomState.now()
        # With the generators of another rank, this one would repeat its dropout masks and its order of the data.
        place = other.place.with_other_generators(now)
        self.own = OwnState(other.steps, place, now, is_task=other.is_task)

    def _keep(self, *, is_task: bool, behind: RandomState | None = None) -> bytes | None:
        """Keep what the step or batch begins with. Returns the buffers as bytes, or None if nothing can be kept."""
        if self._memory is None:
            return None
        course, buffers = self._course, self._objects.buffers.as_bytes()
        random, call = RandomState.now(), None
        if course.in_body and self.own is not None:
            random, call = self.own.random, random
        if behind is not None and (course.in_body or behind.equals(random)):
            behind = None
        if self.own is not None and self.own.steps < course.steps:
            self._before, self._packed_before = self.own, self._packed
        self.own = OwnState(
            course.steps,
            course.place,
            random,
            call=call,
            behind=behind,
            buffers=buffers,
            is_task=is_task,
        )
        self._write(self._memory)
        return buffers

    def _write(self, memory: Memory) -> None:
        assert self.own is not None
        self._packed = self.own.pack()
        memory.keep(joined(self._packed, self._packed_before))

    def _continue(self, steps: int, theirs: bytes, *, is_new: bool) -> None:
        """In a rank that skips to a later step: bring its own state to that step, too.

        Args:
            steps: the number of that step.
            theirs: digests of the sending rank's buffers, before the last collective of the previous step.
            is_new: this process takes a lost one's place.
        """
        kept = [each for each in (self.own, self._before) if each is not None]
        known = ((each.at(steps), each.steps == steps) for each in kept)
        own, is_exact = next((each for each in known if each[0] is not None), (None, False))
        if own is None:
            _log.warning(
                "this rank's random state at step %d is not known; it continues with a different one",
                steps,
            )
            return
        own.newest.restore()
        self._received = (steps, theirs)
        alike = () if is_exact else _alike(self._objects.buffers.digests(own.buffers), theirs)
        # A buffer that was the same on both ranks at that point is not this rank's own. It may have changed since, after the
        # collective, as an average's count of updates does. The received state includes that change.
        self._objects.buffers.fill(own.buffers, alike)
        own = replace(own, buffers=self._objects.buffers.as_bytes())
        self.own, self._before, self._packed_before = own, None, b""
        if self._memory is not None:
            self._write(self._memory)
        if is_new:
            until_task = self._course.continue_at(own)
            if until_task or (own.behind is not None and not own.place.in_body):
                self.random = own.random


def _alike(mine: bytes, theirs: bytes) -> list[bool]:
    """For each buffer, whether two ranks' digests are the same. Empty if one rank's are not known."""
    if len(mine) != len(theirs):
        return []
    places = range(0, len(mine), DIGEST)
    return [mine[at : at + DIGEST] == theirs[at : at + DIGEST] for at in places]

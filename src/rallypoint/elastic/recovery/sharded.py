"""Keeping sharded state: nobody else has a rank's part, so all ranks take snapshots, and a loss takes them back to one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from rallypoint.elastic.loops.course import Course
from rallypoint.elastic.loops.own_state import OwnState
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.storage.schedule import Held
from rallypoint.errors import ElasticError

from .agreement import Verdict
from .keeping import Begun
from .snapshots import Snapshots


_log = logging.getLogger(__name__)
# What a lost peer raises in a collective between two steps.
_LOST: tuple[type[BaseException], ...] = (RuntimeError, OSError)


class Sharded:
    """Snapshots, taken at places that the script can go back to.

    A snapshot belongs to a scope: a loop over batches, or the stretch between two of them. A loss leads back only within
    the current scope.

    Args:
        objects: what the session was given.
        course: the script's.
        snapshots: this rank's.
        catch_up: recovers from a loss between two steps: from the one that the error is a sign of, or else from one that
            was reported, if any.
    """

    def __init__(
        self,
        objects: Objects,
        course: Course,
        snapshots: Snapshots,
        catch_up: Callable[[BaseException | None], None],
    ) -> None:
        self._objects = objects
        self._course = course
        self._snapshots = snapshots
        self._catch_up = catch_up
        self._scope = 0
        self.communicates = False
        self.random: RandomState | None = None
        self._is_twins = False  # the part of a snapshot that was received is another replica's
        self._before_batch: OwnState | None = None

    @property
    def ranks(self) -> int:
        return self._snapshots.ranks

    def held(self) -> tuple[Held, ...] | None:
        return self._snapshots.held()

    def fingerprint(self) -> int:
        return 0

    def begin(self) -> None:
        # Before anybody counts on this rank: there must be a snapshot to go back to.
        self._snapshots.take(self._own(), self._scope)

    def begin_batches(self, *, anew: bool) -> None:
        if anew:
            self._snapshots.enter_scope(self._scope)
        else:
            self._scope += 1

    def approach_batch(self) -> None:
        self._keep()

    def random_before_fetch(self) -> RandomState | None:
        return RandomState.now()

    def reach_end_of_batches(self, random: RandomState | None) -> bool:
        """No loss leads back into a loop that has ended."""
        self._keep(even_early=True, random=random)
        return not self._course.is_back

    def end_batches(self) -> None:
        self._scope += 1
        if not self._snapshots.is_due(self._course.steps, self._scope - 1, even_early=True):
            self._snapshots.enter_scope(self._scope)

    def continue_body(self) -> RandomState | None:
        return None

    def reach_task(self) -> bool:
        """A loss in the function leads back to here. In a loop over batches, it leads back to an earlier batch."""
        if self._course.in_batches:
            return True
        before = self._course.steps
        self._keep(even_early=True)
        return self._course.steps == before

    def leave_task(self, before: int) -> bool:
        if self._course.in_batches:
            return True
        self._keep(even_early=True)
        return self._course.steps > before

    def begin_step(
        self, *, is_task: bool, may_swap: bool = False, behind: RandomState | None = None
    ) -> Begun:
        # With a batch in hand it is too late to go back: the first collective will report a loss.
        if not self._course.in_body and not is_task:
            self._keep()
        self._objects.check_state()
        modes = self._objects.modes.now()
        return Begun(RandomState.now(), [], self._objects.gradients(), modes=modes)

    def note_collective(self) -> None:
        pass

    def buffers_behind(self, steps: int) -> bytes:
        return b""

    def settle(
        self,
        verdict: Verdict,
        begun: Begun | None,
        *,
        receives: bool,
        is_new: bool,
        buffers: bytes,
    ) -> None:
        """Go back to where the snapshot was taken: with its state, in a loop that yields its batch next."""
        assert verdict.snapshot is not None
        snapshots, course, modes = self._snapshots, self._course, self._objects.modes
        before = modes.now() if begun is None or begun.modes is None else begun.modes
        optimizers = self._objects.optimizers
        groups = [list(each.param_groups) for each in optimizers]
        scope = snapshots.scope_of(verdict.snapshot)
        own = self._before_batch = snapshots.restore(verdict.snapshot)
        if any(each.whose != each.rank for each in verdict.fetches):
            snapshots.renew()
        if is_new:
            snapshots.enter_scope(self._scope)
            if self._is_twins:
                # With the generators of another rank, this one would repeat its dropout masks.
                now = RandomState.now()
                own = replace(own, random=now, place=own.place.with_other_generators(now))
                _log.warning(
                    "rank %d got its part of the state from another replica: its random state is the one after the script's set-up",
                    dist.get_rank(),
                )
            own.random.restore()
            modes.go_behind_last(is_new=True)
            course.continue_at(own)
        elif course.steps == own.steps:
            # No step was completed since; what the script did between two steps is not undone.
            modes.restore(before)
            for optimizer, held in zip(optimizers, groups, strict=True):
                optimizer.param_groups.extend(held[len(optimizer.param_groups) :])
            if begun is not None:
                begun.random.restore()
        elif scope != self._scope:
            raise ElasticError(
                f"after a loss, training would have to go back from step {course.steps} to step {own.steps}, across the beginning"
                " or a break of a loop over session.batches"
            )
        else:
            own.random.restore()
            course.go_back(own)

    def reach_end(self) -> None:
        before = self._course.steps
        self._keep(even_early=True)
        if self._course.steps < before:
            raise ElasticError(
                f"after a loss at the end of the session, training would have to go back from step {before} to step"
                f" {self._course.steps}, but the loop that would redo these steps has ended. A loop over session.batches can go back"
            )

    def close(self) -> None:
        self._snapshots.close()

    def own_at(self, steps: int) -> bytes:
        return b""

    def take_place(self, data: bytes) -> None:
        pass

    def take_own(self, record: bytes, steps: int) -> bool:
        return False

    def copy(self, copied: Sequence[Held]) -> None:
        self._snapshots.copy(copied)

    def await_copies(self) -> None:
        self._snapshots.await_copies()

    def take_copy(
        self,
        held: Held,
        size: int,
        checksum: int,
        receive: Callable[[torch.Tensor], None],
        *,
        is_own: bool,
    ) -> None:
        self._is_twins = not is_own
        receive(self._snapshots.contents(size))
        self._snapshots.complete(held, size, checksum)

    def contents(self, held: Held) -> tuple[torch.Tensor, int]:
        return self._snapshots.part(held)

    def before_batch(self) -> OwnState:
        assert self._before_batch is not None
        return self._before_batch

    def _own(self, random: RandomState | None = None) -> OwnState:
        return OwnState(self._course.steps, self._course.place, random or RandomState.now())

    def _keep(self, *, even_early: bool = False, random: RandomState | None = None) -> None:
        """Take a snapshot if it is due, and wait until all have it. A loss meanwhile may lead back."""
        self._catch_up(None)
        while not self._course.is_back and self._snapshots.is_due(
            self._course.steps, self._scope, even_early=even_early
        ):
            try:
                self._snapshots.take(self._own(random), self._scope)
            except RuntimeError as error:
                self._catch_up(error)
                continue
            self.communicates = True
            try:
                self._snapshots.agree()
            except _LOST as error:
                self._catch_up(error)
            finally:
                self.communicates = False

"""Where a script is in its loops, and what its next step or function means there: decisions only.

A loss can strike anywhere in the body of a loop, but the script can only get back there from the top of the body. So a step or
function that begins is one of three things: the next to be done; already complete, on the way to that one; or in the rest of a
body that a loss has made void.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from . import sample_order
from .own_state import OwnState, Place
from .rng import RandomState


class Doing(enum.Enum):
    """What to do with a step or a function that begins."""

    RUN = enum.auto()
    # Only a function can be skipped; the block of a step runs, and its effects are undone.
    REHEARSE = enum.auto()
    # Only for a function, which is not even counted.
    SKIP = enum.auto()


class Course:
    """The loops of one rank's script.

    Attributes:
        steps: how many steps and functions are complete.
        place: in the data.
        in_epoch: an epoch is under way.
        in_batches: a loop over batches is under way.
        in_body: the script has one of its batches in hand.
        repeats: this batch comes again.
        is_back: a loss has led back to an earlier batch than the one in hand; the iteration restarts there.
        has_strayed: the script has left its loop over batches in the rest of a body that a loss has made void, so it does not
            repeat the lost step.
        is_rehearsing: what the script does now has no effect: its last step or function was ended by a loss, rehearsed or
            skipped; or its body begins again, and part of it is complete.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.place = Place()
        self.in_epoch = self.in_batches = self.in_body = False
        self.repeats = self.is_back = self.has_strayed = self.is_rehearsing = False
        self._resume: OwnState | None = None  # where the next iteration begins
        self._loops = 0  # how many loops over batches the script has begun in this epoch
        self._tasks_to_skip = 0
        self._is_void = False  # a step has failed: the rest of the body has no effect
        self._to_rehearse = 0  # how many steps until the one to continue with
        self._until_task = False  # rehearse until a function is run

    @property
    def is_void(self) -> bool:
        """Whether a loss has made the rest of this body void: the process that takes the lost one's place does not run it."""
        return self._is_void or (self.is_back and self.in_body)

    # -- loops --------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        self.place, self.in_epoch = replace(self.place, counted=True), True

    def end_epoch(self, epoch: int) -> None:
        self.place = Place(epoch + 1, counted=True, seen=self.place.seen)
        self._tasks_to_skip = 0
        self._resume, self._loops, self.in_epoch = None, 0, False

    @property
    def loop(self) -> int:
        """The number within the epoch of the loop over batches that the script reached last."""
        return self._loops - 1

    def begin_loop(self) -> bool:
        """The script reaches a loop over batches. Returns whether to skip it: it was complete where this process starts."""
        self._loops += 1
        return self._resume is not None and self.loop < self._resume.place.loop

    def begin_batches(self) -> OwnState | None:
        """A loop begins, or its iteration restarts.

        Returns:
            Where to begin; None at the first batch.
        """
        self.in_batches, self.is_back = True, False
        own, self._resume = self._resume, None
        return own

    def begin_at_first_batch(
        self,
        begun: RandomState,
        own_begun: tuple[bytes, ...],
        sizes: tuple[tuple[int, int], ...],
    ) -> None:
        """The iteration of a loop begins, and no process has run it before.

        Args:
            begun: the generators.
            own_begun: the loader's own generators.
            sizes: with a :class:`.Sampler`, how many ranks share the samples.
        """
        # If an earlier loop was left after a step, ``done`` still holds its count.
        self.place = replace(
            self.place,
            loop=self.loop,
            batch=0,
            done=0,
            begun=begun,
            own_begun=own_begun,
            sizes=sizes,
            ended=False,
        )

    def reach_end_of_batches(self) -> None:
        """The loader has no more batches."""
        self.place = replace(self.place, ended=True)

    def end_batches(self) -> None:
        self.has_strayed = self.has_strayed or (self.in_body and self.is_void)
        self.place = replace(self.place, in_body=False)
        self.in_batches = self.in_body = self.is_rehearsing = False

    def approach_batch(self) -> bool:
        """Before a batch is fetched. Returns whether nothing of its body is complete."""
        self.place = replace(self.place, in_body=True)
        return not self.place.done

    def begin_body(self) -> int:
        """A batch is in hand. Returns how many steps of its body are to be rehearsed."""
        self.in_body, self.repeats = True, False
        self.is_rehearsing = self.place.done > 0
        return self.place.done

    def begin_body_again(self) -> int:
        """The same batch comes again. Returns how many steps of its body are to be rehearsed."""
        self.repeats = self._is_void = False
        self.is_rehearsing = self.place.done > 0
        return self.place.done

    def end_body(self) -> bool:
        """The body has ended. Returns whether its batch is complete: False if a loss has led back meanwhile."""
        self.in_body = self.is_rehearsing = False
        if not self.is_back:
            self.place = self.place.after_batch()
        return not self.is_back

    # -- steps and functions ------------------------------------------------------------------------

    def of_task(self) -> Doing:
        """What to do with a function that is about to run."""
        doing = self._of_task()
        self.is_rehearsing = doing is not Doing.RUN
        return doing

    def _of_task(self) -> Doing:
        if self._tasks_to_skip and not self.in_body:
            self._tasks_to_skip -= 1
            return Doing.SKIP
        if self._is_void or self._to_rehearse:
            return Doing.REHEARSE
        if self.is_back:
            return Doing.SKIP
        self._until_task = False
        return Doing.RUN

    def of_step(self) -> Doing:
        """What to do with a step that begins."""
        if not self.in_body:
            self._is_void = False  # in a loop of the user's own, this is the step that failed
        self.is_rehearsing = self.is_void or self._to_rehearse > 0 or self._until_task
        return Doing.REHEARSE if self.is_rehearsing else Doing.RUN

    def rehearse(self, steps: int) -> None:
        """This many steps are to be rehearsed."""
        self._to_rehearse = steps
        self.steps -= steps

    def note_rehearsed(self) -> bool:
        """A step was rehearsed. Returns whether it was the last one, so the next step is to be done."""
        if not self._to_rehearse:
            return False
        self._to_rehearse -= 1
        self.steps += 1
        return not self._to_rehearse

    def note_complete(self, *, is_task: bool) -> None:
        """A step or function is complete."""
        self.steps += 1
        self.place = self.place.after(task=is_task)

    # -- losses -------------------------------------------------------------------------------------

    def note_loss(self, before: int, *, is_task: bool, goes_back: bool) -> None:
        """A loss has ended the step under way, and all ranks have met since.

        Args:
            before: how many steps were complete when it began.
            is_task: the step is a function's.
            goes_back: a loss leads all ranks back to a snapshot, which has set the place.
        """
        self.is_rehearsing = True
        if self.steps == before and self.is_back:
            return
        if self.steps == before:
            self.repeats = self._is_void = not is_task
        elif not goes_back:
            # Other ranks have completed it.
            self.place = self.place.after(task=is_task)

    def continue_at(self, own: OwnState) -> bool:
        """This process starts partway through the program: in a lost one's place, or where a checkpoint was taken.

        Returns:
            Whether the script is in a loop of the user's own, whose steps are rehearsed until a function is run.
        """
        self.place = own.place
        self._resume = own
        self._tasks_to_skip = own.place.tasks_to_skip
        self._until_task = own.is_task and not own.place.in_body and not self._tasks_to_skip
        return self._until_task

    def resize(self, ranks: int) -> None:
        """This many ranks share the samples, starting with the first batch that no step has trained on."""
        self.place = _resized(self.place, ranks)
        if self._resume is not None:
            self._resume = replace(self._resume, place=_resized(self._resume.place, ranks))

    def renew(self, own: OwnState) -> None:
        """The iteration of the loop under way restarts at this place, with the next batch."""
        self._resume, self.is_back = own, True

    def go_back(self, own: OwnState) -> None:
        """A loss leads back to a snapshot with fewer steps."""
        # The loaders' own generators have stayed in this process, except those of the loop under way.
        self.place = replace(own.place, seen=self.place.seen)
        if self.in_batches:
            self._resume, self.is_back = own, True
        else:
            # The snapshot was taken where a loop over batches ended.
            self.place = replace(self.place, in_body=False)


def _resized(place: Place, ranks: int) -> Place:
    if not place.sizes:
        return place
    first = place.batch + bool(place.done)
    return replace(place, sizes=sample_order.resized(place.sizes, first, ranks))

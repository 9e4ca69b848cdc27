"""Sessions: training that goes on in the same processes when one of them is lost."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch
import torch.distributed as dist

from rallypoint._core import clock
from rallypoint.errors import ElasticError, MembershipChanged, RendezvousError

from . import loader_state, process, torch_private
from .agreement import Standing, Verdict, judge
from .board import boards
from .checkpoints import Checkpoints
from .connections import Wiring
from .groups import KeptGroup
from .link import Notice
from .memory import Memory
from .objects import Objects
from .own_state import OwnState, Place
from .process import KeptProcess
from .rehearsal import Rehearsal
from .rng import RandomState
from .sampler import Sampler
from .schedule import Held, Schedule
from .snapshots import Snapshots


_log = logging.getLogger(__name__)
# Seconds that an error may be ahead of the notice that explains it.
PATIENCE = 10.0
# Seconds to wait for the others after a loss: a newcomer runs the script's set-up first.
MEETING = 3600.0
# What a lost peer looks like to the caller of a collective.
_SIGNS = (
    *("connection closed by peer", "connection reset", "broken pipe", "connection refused"),
    *("socket closed", "timed out waiting", "no longer", "gloo", "nccl", "connection was closed"),
)
# Outside of training, there is nothing to tell apart.
_LOST: tuple[type[BaseException], ...] = (RuntimeError, RendezvousError, OSError)

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """One recovery, as this rank saw it.

    Args:
        generation: the one that it led to.
        ranks: the lost ranks.
        why: how they were lost.
        steps: how many steps were complete.
        repeated: whether this rank repeats a step.
        redone: how many completed steps it redoes, with sharded state.
        formed: seconds from the notice until all were connected again; most of it is the newcomer's set-up.
        transferred: seconds that the state took.
        bytes_moved: that this rank sent or received.
    """

    generation: int
    ranks: tuple[int, ...]
    why: str
    steps: int
    repeated: bool
    formed: float
    transferred: float
    bytes_moved: int
    redone: int = 0


class Session:
    """Training that survives the loss of processes; :func:`session` makes one.

    Used as a context manager. All ranks enter it with the same objects, after the same set-up.

    Args:
        objects: what it was given.
        kept: this worker; None where nothing can be kept.
        checkpoints: None if there are none.
        snapshot_every: steps from one snapshot of sharded state to the next, or None.

    Raises:
        ValueError: ``snapshot_every`` is below 1.
        ElasticError: there are checkpoints, and sharded state.
    """

    def __init__(
        self,
        objects: Objects,
        kept: KeptProcess | None,
        checkpoints: Checkpoints | None = None,
        snapshot_every: int | None = None,
    ) -> None:
        Schedule(snapshot_every)
        if checkpoints is not None and objects.is_sharded:
            raise ElasticError(
                "elastic.session: checkpoint= keeps replicated state only, and these objects are sharded; save them with"
                " torch.distributed.checkpoint"
            )
        self._objects = objects
        self._kept = kept
        self._checkpoints = checkpoints
        self._random_behind: RandomState | None = (
            None  # behind the last step of a loop without batches
        )
        self._memory: Memory | None = None
        self._every = snapshot_every
        self._snapshots: Snapshots | None = None  # of sharded state
        self._scope = (
            0  # changes where a loop over batches begins or ends: no snapshot leads across
        )
        self._is_back = False  # at an earlier batch than the one in hand
        self._steps = 0
        self._place = Place()
        self._resume: OwnState | None = None  # where a newcomer continues
        self._tasks_to_skip = 0
        self._own: OwnState | None = None
        self._whole, self._is_new = True, False
        self._in_step = self._in_body = self._in_epochs = self._is_task = False
        self._rehearses = False
        self._applied = 0  # optimizers that have stepped in the step under way
        self._repeat = False
        self._skips_body = False  # a step has failed: the rest of the body has no effect
        self._to_rehearse = 0  # how many steps until the one under way
        self._until_task = False  # rehearse until a function is run
        self._rehearsal: Rehearsal | None = None
        self._random: RandomState | None = None  # to begin the step with that is repeated
        self._results: dict[str, Any] = {}  # of the functions that were run
        self._begun: _Begun | None = None
        self._iterations = 0
        self._loader: Any = None  # whose batches are under way
        self._hooks: list[Any] = []
        self._history: list[Recovery] = []
        self._ranks_before: int | None = None  # of a checkpoint with another number of them

    # -- for users ----------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many steps are complete: the number of the step under way. The same on all ranks."""
        return self._steps

    @property
    def history(self) -> tuple[Recovery, ...]:
        """All recoveries that this process took part in."""
        return tuple(self._history)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left, from the one under way on.

        Args:
            count: of all epochs.
        Returns:
            An iterator over their numbers. A process that takes a lost one over begins with the present epoch.
        """
        self._in_epochs = True
        first = self._place.epoch
        for epoch in range(first, count):
            self._place = replace(self._place, counted=True)
            yield epoch
            self._place, self._tasks_to_skip = Place(epoch + 1, counted=True), 0

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of an epoch; one whose step did not complete comes again.

        A process that takes a lost one over begins with the batch under way: it skips the earlier ones by
        fetching them.

        With sharded state, a loss may lead back to an earlier batch of the epoch.

        Args:
            loader: gives the same batches each time it is iterated with the same random state.
        Returns:
            An iterator over the batches.
        Raises:
            ElasticError: a second epoch without :meth:`epochs`, which a newcomer could not skip; with sharded state,
                a loader that can be iterated only once.
        """
        self._iterations += 1
        resumes = self._kept is not None or self._checkpoints is not None
        if self._iterations > 1 and not self._in_epochs and resumes:
            raise ElasticError(
                "session.batches was called again: write `for epoch in session.epochs(n)` around it, so that a process"
                " that takes a lost one over, or the next start, can begin in the present epoch"
            )
        if self._snapshots is not None and iter(loader) is loader:
            raise ElasticError(
                f"session.batches: a {type(loader).__name__} can be iterated only once, but a loss leads back to an earlier"
                " batch; give a list, a DataLoader, or another object whose iteration begins anew each time"
            )
        self._scope += 1
        iterator = self._iterator_of(loader)
        self._loader = loader
        try:
            while True:
                done = self._place.done  # in a newcomer: of the batch under way
                self._place = replace(self._place, in_body=True)
                if not done:
                    self._keep_own(task=False)
                if self._is_back:
                    iterator = self._iterator_of(loader)
                    continue
                before = RandomState.now() if self._snapshots is not None else None
                if not done:
                    self._pass_boundary()
                try:
                    batch = next(iterator)
                except StopIteration:
                    if before is not None and not self._end_of_batches(before):
                        iterator = self._iterator_of(loader)
                        continue
                    return
                self._in_body, self._repeat = True, False
                random = RandomState.now()
                if done and self._own is not None:
                    self._random = self._own.call
                    self._rehearse(done, self._own.behind)
                yield batch
                while self._repeat:
                    self._continue_in_body(random)
                    yield batch
                self._in_body = False
                if self._went_back():
                    self._end_rehearsal()
                else:
                    self._place = self._place.after_batch()
        finally:
            self._place, self._in_body = replace(self._place, in_body=False), False
            self._loader = None
            self._leave_scope()

    def step(self) -> AbstractContextManager[None]:
        """One step: what runs in the block runs again if a process is lost in it.

        A loss leaves the block early, without an exception. :meth:`batches` then gives the same batch again; in a loop of
        your own, :attr:`position` stays.

        Returns:
            A context manager.
        Raises:
            ElasticError: no rank has a whole state, or the processes do not match.
        """
        return _Step(self._begin, self._end)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run a function that communicates, such as a validation, as a step of its own.

        Args:
            function: runs again if a process is lost meanwhile. It must have no effects that must not happen twice.
            args, kwargs: for it.
        Returns:
            Its result. None in a process that took a lost one over after the function had run; with sharded state, also if
            a loss leads back to a step before it. In the rest of a body whose step was left early: its last result.
        """
        key = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        if self._tasks_to_skip and not self._in_body:
            self._tasks_to_skip -= 1
            return None
        if self._skips_body or self._to_rehearse:
            self._count_rehearsed()
            return cast("T | None", self._results.get(key))
        if self._is_back or not self._is_ahead_of_task():
            return None
        self._until_task = False
        self._end_rehearsal()
        while True:
            before = self._steps
            self._is_task = True
            try:
                with self.step():
                    result = function(*args, **kwargs)
            finally:
                self._is_task = False
            if self._went_back():
                return None
            if self._steps > before and self._is_behind_task(before):
                self._results[key] = result
                return result

    # -- entering and leaving ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        kept = self._kept
        if kept is None and not process.is_worker():
            _say_once(
                but="" if self._checkpoints is None else "; the session only writes checkpoints"
            )
            self._load()
            return self
        if kept is None or kept.groups.default is None:
            raise ElasticError(
                "elastic.session: this process has no Gloo group that can be kept; call"
                ' torch.distributed.init_process_group("gloo") after `import rallypoint.elastic`, before the session'
            )
        self._rank = dist.get_rank()
        for optimizer in self._objects.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._note_applied))
        self._whole = not kept.takes_over
        self._is_new = kept.takes_over
        if kept.takes_over:
            fd = kept.link.enter(kept.generation, self._rank, None)
            self._memory = Memory(fd)
            self._snapshots = self._make_snapshots(self._memory)
            held = self._memory.held
            self._own = None if held is None else OwnState.unpack(held)
            kept.generation = -1
            self._begin_checkpoints()
            self._recover(None)
            if self._checkpoints is not None:
                self._checkpoints.join_at(self._steps)
        else:
            self._memory = Memory()
            # A loss in here is one before the session.
            self._load()
            self._snapshots = self._make_snapshots(self._memory)
            if self._snapshots is not None:
                # Before anybody counts on this rank: from now on there is a snapshot to go back to.
                self._snapshots.take(self._own_of_snapshot(), self._scope)
            kept.publish()
            kept.link.enter(kept.generation, self._rank, self._memory.fd)
            if self._snapshots is None:
                self._keep_own(task=False)
            self._compare()
        self._count_anew()
        for each in kept.groups:
            each.before = self._before_collective
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        kept = self._kept
        if kept is None:
            self._end_checkpoints(failed=kind is not None)
            return
        if kind is None:
            self._keep_the_end()
            self._confirm()
            kept.link.tell({"kind": "kept left"})
        else:
            kept.link.tell({"kind": "kept failed", "step": self._steps})
        for each in kept.groups:
            each.before = None
        for hook in self._hooks:
            hook.remove()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._memory is not None:
            self._memory.close()
        self._end_checkpoints(failed=kind is not None)

    def _compare(self) -> None:
        """At the first start: whether all ranks have entered the same session."""
        assert self._kept is not None
        wiring = self._kept.groups.wiring
        assert wiring is not None
        try:
            judge(self._introduce(wiring, self._fingerprint()))
        except ElasticError:
            raise
        except _LOST as error:
            self._recover(error)

    def _confirm(self) -> None:
        """Wait for all ranks. A loss meanwhile is recovered from."""
        assert self._kept is not None
        while True:
            try:
                group = self._kept.groups.default
                assert group is not None
                group.inner.barrier().wait()
                return
            except _LOST as error:
                self._recover(error)

    # -- steps ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        kept = self._kept
        if self._in_step:
            raise ElasticError("session.step() within session.step(): a step contains no other")
        if kept is not None and self._is_to_rehearse():
            if self._rehearsal is None:
                self._rehearsal = Rehearsal(self._objects, kept.groups, None)
            self._rehearsal.enter()
            self._in_step = self._rehearses = True
            return
        if not self._in_body and not self._is_task:
            self._pass_boundary()
        if kept is None:
            self._in_step = True
            return
        if self._snapshots is not None:
            # With a batch in hand it is too late to go back: the first collective tells of a loss. A function's snapshots
            # are taken in run().
            if not self._in_body and not self._is_task:
                self._keep_snapshot()
        else:
            if self._is_lost():
                self._begun = None
                self._recover(None)
            if self._random is not None:
                self._random.restore()
                self._random = None
            if not self._in_body or self._place.done:
                self._keep_own(task=self._is_task)
        self._applied = 0
        buffers = [] if self._snapshots is not None else self._objects.copy_buffers()
        self._begun = _Begun(RandomState.now(), buffers, self._objects.gradients())
        self._in_step = True

    def _is_to_rehearse(self) -> bool:
        if not self._in_body:
            self._skips_body = False  # in a loop of the user's own, this is the step that failed
        if self._is_back and self._in_body:
            return True  # a function before it has led back: this batch is not the one to come
        return self._skips_body or self._to_rehearse > 0 or (self._until_task and not self._is_task)

    def _end(self, error: BaseException | None) -> bool:
        """Returns whether the error was a loss, which was recovered from."""
        self._in_step = False
        kept = self._kept
        if self._rehearses:
            self._rehearses = False
            assert self._rehearsal is not None
            self._rehearsal.leave()
            self._count_rehearsed()
            return isinstance(error, Exception)  # its results mean nothing
        if error is None:
            self._check_accumulation()
            self._steps += 1
            self._place = self._place.after(task=self._is_task)
            self._begun = None
            if not self._in_body and self._checkpoint_is_due():
                self._random_behind = RandomState.now()
            return False
        if kept is None:
            return False
        if not isinstance(error, (*_LOST, MembershipChanged)) or not self._is_loss(error):
            return False
        self._whole = self._whole and self._applied == 0
        before = self._steps
        # The traceback holds the frames of the step, and with them the old group.
        error.__traceback__ = None
        self._recover(error)
        if self._steps == before and not self._is_back:
            self._repeat = self._skips_body = not self._is_task
        elif self._snapshots is None:
            self._place = self._place.after(task=self._is_task)
        return True

    # -- the middle of a body -----------------------------------------------------------------------

    def _continue_in_body(self, random: RandomState) -> None:
        """The batch comes again: what is complete of its body is rehearsed.

        Args:
            random: the generators at the beginning of the body.
        """
        self._repeat = self._skips_body = False
        self._end_rehearsal()
        random.restore()
        if self._place.done:
            self._rehearse(self._place.done, None)

    def _rehearse(self, steps: int, random: RandomState | None) -> None:
        assert self._kept is not None
        self._rehearsal = Rehearsal(self._objects, self._kept.groups, random)
        self._to_rehearse = steps
        self._steps -= steps

    def _count_rehearsed(self) -> None:
        if self._to_rehearse:
            self._to_rehearse -= 1
            self._steps += 1
            if not self._to_rehearse:
                self._end_rehearsal()

    def _end_rehearsal(self) -> None:
        if self._rehearsal is not None:
            self._rehearsal.end()
            self._rehearsal = None

    def _check_accumulation(self) -> None:
        begun = self._begun
        if self._applied or begun is None or not self._objects.optimizers:
            return
        if self._objects.has_accumulated(begun.gradients):
            raise ElasticError(
                "a step ended with gradients, and no optimizer of the session has stepped: they would be lost with a"
                " process. Put all passes of an accumulation into one session.step()"
            )

    def _is_loss(self, error: BaseException) -> bool:
        assert self._kept is not None
        text = str(error).lower()
        patience = PATIENCE if any(sign in text for sign in _SIGNS) else 0.0
        return self._kept.link.wait(self._kept.generation, patience) is not None

    def _note_applied(self, *_: Any) -> None:
        if self._in_step and not self._rehearses:
            self._applied += 1

    # -- this rank's own state --------------------------------------------------------------------

    def _keep_own(self, *, task: bool) -> None:
        if self._snapshots is not None:
            self._keep_snapshot()
            return
        if self._memory is None:
            return
        buffers = self._objects.buffers_as_bytes()
        random, call = RandomState.now(), None
        if self._in_body and self._own is not None:
            random, call = self._own.random, random
        self._own = OwnState(
            *(self._steps, self._place, random, None, call, None, buffers, b"", task)
        )
        self._memory.keep(self._own.pack())

    def _before_collective(self, group: KeptGroup, operation: str) -> None:
        """Behind a step's last collective this rank may die in a step that the others complete."""
        if self._memory is not None and operation not in torch_private.POINT_TO_POINT:
            self._memory.progress.begin(group.kept_name)
        if not self._in_step or self._own is None or self._memory is None:
            return
        if self._snapshots is not None:
            return
        state = RandomState.now()
        buffers = self._objects.buffers_as_bytes()
        later = self._own.later
        if later is not None and later.equals(state) and self._own.later_buffers == buffers:
            return
        self._own = replace(self._own, later=state, later_buffers=buffers)
        self._memory.keep(self._own.pack())

    def _count_anew(self) -> None:
        """All ranks are at the same place: the supervisor compares the collectives that they begin from here on."""
        assert self._kept is not None
        if self._memory is not None:
            self._memory.progress.restart(group.kept_name for group in self._kept.groups)

    # -- checkpoints ------------------------------------------------------------------------------

    def _begin_checkpoints(self) -> None:
        if self._checkpoints is None:
            return
        new_board = boards(is_kept=self._kept is not None)
        rank, size = (0, 1) if new_board is None else (dist.get_rank(), dist.get_world_size())
        self._checkpoints.begin(self._objects.given, rank, size, new_board)

    def _load(self) -> None:
        """Continue where the newest checkpoint was taken."""
        self._begin_checkpoints()
        loaded = None if self._checkpoints is None else self._checkpoints.load()
        if loaded is None:
            return
        own = loaded.own
        self._steps = own.steps
        if loaded.is_own:
            own.random.restore()
            self._objects.fill_buffers(own.buffers)
        else:
            now = RandomState.now()
            own = replace(own, random=now, place=replace(own.place, begun=now))
            self._ranks_before = loaded.record.ranks
        self._place, self._resume = own.place, own
        self._tasks_to_skip = own.place.tasks_to_skip

    def _checkpoint_is_due(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.is_due(self._steps)

    def _pass_boundary(self) -> None:
        """Between two steps, with nothing under way."""
        if self._checkpoints is not None and self._checkpoints.is_due(self._steps):
            self._checkpoints.take(self._own_now())
        self._random_behind = None

    def _own_now(self) -> OwnState:
        random = self._random or self._random_behind or RandomState.now()
        buffers = self._objects.buffers_as_bytes()
        loader = loader_state.packed(self._loader)
        return OwnState(self._steps, self._place, random, buffers=buffers, loader=loader)

    def _end_checkpoints(self, *, failed: bool) -> None:
        if self._checkpoints is not None:
            self._checkpoints.end(None if failed else self._own_now())

    def _iterator_of(self, loader: Iterable[T]) -> Iterator[T]:
        self._is_back = False
        own, self._resume = self._resume, None
        sampler = getattr(loader, "batch_sampler", None)
        if own is None or own.place.begun is None:
            if isinstance(sampler, Sampler):
                sampler.begin_at(self._place.epoch if self._in_epochs else self._iterations - 1)
            self._place = replace(self._place, batch=0, begun=RandomState.now())
            return iter(loader)
        if self._snapshots is not None:
            self._snapshots.enter_scope(self._scope)
        own.place.begun.restore()
        ranks_before, self._ranks_before = self._ranks_before, None
        if ranks_before is not None and not isinstance(sampler, Sampler):
            own = self._rescaled(own, ranks_before)
            self._place = own.place
        keeps_place: Any = loader if own.loader else None
        skips = not isinstance(sampler, Sampler) and keeps_place is None
        if isinstance(sampler, Sampler):
            sampler.begin_at(own.place.epoch, 0 if keeps_place else own.place.batch)
        if keeps_place is not None:
            keeps_place.load_state_dict(loader_state.restored(own.loader))
        iterator = iter(loader)
        for _ in range(own.place.batch if skips else 0):
            next(iterator, None)
        own.random.restore()
        return iterator

    def _rescaled(self, own: OwnState, ranks: int) -> OwnState:
        """After a checkpoint of another number of ranks: as many samples are skipped as were trained on."""
        now = dist.get_world_size() if dist.is_initialized() else 1
        batch, rest = divmod(own.place.batch * ranks, now)
        if rest and (now == 1 or dist.get_rank() == 0):
            _log.warning(
                "%d batches of %d ranks are no whole number of batches of %d: the last %d come again",
                *(own.place.batch, ranks, now, rest),
            )
        return replace(own, place=replace(own.place, batch=batch))

    # -- snapshots of sharded state ---------------------------------------------------------------

    def _make_snapshots(self, memory: Memory) -> Snapshots | None:
        if not self._objects.is_sharded:
            return None
        return Snapshots(self._objects, memory.fd, self._every)

    def _own_of_snapshot(self, random: RandomState | None = None) -> OwnState:
        return OwnState(self._steps, self._place, random or RandomState.now())

    def _keep_snapshot(
        self, *, even_early: bool = False, random: RandomState | None = None
    ) -> None:
        """Take one if it is due, and wait until all have it. A loss meanwhile is recovered from, which may lead back."""
        snapshots = self._snapshots
        assert snapshots is not None
        if self._is_lost():
            self._begun = None
            self._recover(None)
        while not self._is_back and snapshots.is_due(
            self._steps, self._scope, even_early=even_early
        ):
            snapshots.take(self._own_of_snapshot(random), self._scope)
            try:
                snapshots.agree()
            except _LOST as error:
                self._begun = None
                error.__traceback__ = None
                self._recover(error)

    def _end_of_batches(self, random: RandomState) -> bool:
        """No loss leads back into a loop that has ended. Returns False if one leads back now.

        Args:
            random: the generators before the loader ended.
        """
        self._keep_snapshot(even_early=True, random=random)
        return not self._is_back

    def _leave_scope(self) -> None:
        if self._snapshots is None:
            return
        self._scope += 1
        if not self._snapshots.is_due(self._steps, self._scope - 1, even_early=True):
            self._snapshots.enter_scope(self._scope)

    def _is_ahead_of_task(self) -> bool:
        """Before a function runs: a loss in it leads back to this place. Returns False if one leads back further now.

        In a loop over batches a function belongs to the batch: a loss leads back to an earlier one.
        """
        if self._snapshots is None or self._in_batches:
            return True
        before = self._steps
        self._keep_snapshot(even_early=True)
        return self._steps == before

    def _is_behind_task(self, before: int) -> bool:
        """After a function has run: no loss leads back into it. Returns False if it must run again."""
        if self._snapshots is None or self._in_batches:
            return True
        self._keep_snapshot(even_early=True)
        return self._steps > before

    def _keep_the_end(self) -> None:
        if self._snapshots is None:
            return
        before = self._steps
        self._keep_snapshot(even_early=True)
        if self._steps < before:
            raise ElasticError(
                f"a loss at the end of the session leads back to step {self._steps} of {before}, and the loop that would redo"
                " these steps has ended; session.batches can go back"
            )

    def _go_back(self, snapshot: Held) -> None:
        """Be where the snapshot was taken: with its state, in a loop that gives its batch next."""
        snapshots = self._snapshots
        assert snapshots is not None
        scope = snapshots.scope_of(snapshot)
        own = snapshots.restore(snapshot)
        if self._is_new:
            snapshots.enter_scope(self._scope)
            self._tasks_to_skip = own.place.tasks_to_skip
        elif self._steps == own.steps:
            # Nothing was completed since; what the script did between two steps is not undone.
            if self._begun is not None:
                self._begun.random.restore()
            return
        elif scope != self._scope:
            raise ElasticError(
                f"a loss leads back to step {own.steps} of {self._steps}, before the beginning or behind a break of the loop"
                " over session.batches that is under way"
            )
        own.random.restore()
        self._own, self._place = own, own.place
        if not self._is_new and not self._in_batches:
            self._place = replace(own.place, in_body=False)  # taken where a loop over batches ended
        if self._is_new or self._in_batches:
            self._resume, self._is_back = own, self._in_batches

    @property
    def _in_batches(self) -> bool:
        """Whether a loop over batches is under way; a batch may be in hand or not."""
        return self._loader is not None

    # -- recovery ---------------------------------------------------------------------------------

    def _went_back(self) -> bool:
        return self._is_back

    def _is_lost(self) -> bool:
        """Whether a peer is, and this rank has not met the others since."""
        assert self._kept is not None
        newest = self._kept.link.newest
        return newest is not None and newest.generation > self._kept.generation

    def _fingerprint(self) -> int:
        return 0 if self._snapshots is not None else self._objects.fingerprint()

    def _recover(self, error: BaseException | None) -> None:
        """Meet the others again, and have all at one step.

        Args:
            error: by which this rank noticed; raised again if nobody explains it.
        """
        kept = self._kept
        assert kept is not None
        notice = kept.link.wait(kept.generation, PATIENCE)
        while True:
            if notice is None:
                if error is not None:
                    raise error
                raise ElasticError("a peer is gone, and the supervisor does not say why")
            try:
                self._meet(notice)
            except ElasticError:
                raise
            except _LOST as failure:
                _log.debug("meeting of generation %d failed: %s", notice.generation, failure)
                failure.__traceback__ = None
                error = failure
                notice = kept.link.wait(notice.generation, PATIENCE)
                continue
            return

    def _meet(self, notice: Notice) -> None:
        kept = self._kept
        assert kept is not None
        wiring = kept.form(notice)
        self._count_anew()
        standings = self._introduce(wiring)
        kept.groups.connect(wiring)
        formed = clock.MONOTONIC.now()
        verdict = judge(standings)
        before, is_new = self._steps, self._is_new
        moved = self._exchange(verdict)
        self._settle(verdict)
        group = kept.groups.default
        assert group is not None
        group.inner.barrier().wait()
        self._count_anew()
        kept.generation = notice.generation
        recovery = Recovery(
            generation=notice.generation,
            ranks=notice.ranks,
            why=notice.why,
            steps=verdict.steps,
            repeated=self._begun is not None,
            formed=formed - notice.at,
            transferred=clock.MONOTONIC.now() - formed,
            bytes_moved=moved,
            redone=0 if is_new else max(0, before - verdict.steps),
        )
        self._history.append(recovery)
        record = {
            "generation": recovery.generation,
            "steps": recovery.steps,
            "repeated": recovery.repeated,
            "formed": recovery.formed,
            "transferred": recovery.transferred,
            "redone": recovery.redone,
            "received": 0 if self._rank == verdict.source else moved,
        }
        kept.link.tell({"kind": "kept recovered", "rank": self._rank, **record})

    def _introduce(self, wiring: Wiring, fingerprint: int = 0) -> list[Standing]:
        """Tell all others where this rank stands, and wait for what they say."""
        assert self._kept is not None
        mine = Standing(
            rank=self._rank,
            steps=self._steps,
            whole=self._whole,
            objects=self._objects.describe(),
            fingerprint=fingerprint,
            groups=tuple((group.kept_name, group.members) for group in self._kept.groups),
            layouts=self._objects.layouts(),
            snapshots=None if self._snapshots is None else self._snapshots.held(),
        )
        wiring.set(f"here/{self._rank}", json.dumps(mine.to_json()).encode())
        ranks = range(dist.get_world_size())
        return [
            Standing.from_json(json.loads(wiring.wait(f"here/{rank}", MEETING))) for rank in ranks
        ]

    def _exchange(self, verdict: Verdict) -> int:
        assert self._kept is not None
        group = self._kept.groups.default
        assert group is not None
        if self._rank == verdict.source:
            return sum(self._objects.send(group, each) for each in verdict.receivers)
        if verdict.source is not None and self._rank in verdict.receivers:
            self._whole = False
            return self._objects.receive(group, verdict.source)
        return 0

    def _settle(self, verdict: Verdict) -> None:
        """Make everything as it was at the beginning of the step to come."""
        assert self._kept is not None
        begun = self._begun
        if begun is not None:
            self._objects.drop_gradients(begun.gradients)
        if verdict.snapshot is not None:
            self._go_back(verdict.snapshot)
        elif begun is not None and self._steps == verdict.steps:
            begun.random.restore()
            self._random = begun.random
            self._objects.restore_buffers(begun.buffers)
        elif self._rank in verdict.receivers:
            self._continue_own(verdict.steps)
        self._objects.restore_layouts(verdict.layouts, list(self._kept.groups))
        # From here on this rank can be right.
        self._whole, self._is_new = True, False
        if self._steps != verdict.steps:
            self._steps, self._begun = verdict.steps, None

    def _continue_own(self, steps: int) -> None:
        """In a rank that skips to a later step: what is its own is that of this step, too."""
        own = None if self._own is None else self._own.at(steps)
        if own is None:
            _log.warning(
                "rank %d: its random state at step %d is not known; it continues with another",
                self._rank,
                steps,
            )
            return
        own.newest.restore()
        self._objects.fill_buffers(own.buffers)
        self._own = own
        if self._memory is not None:
            self._memory.keep(own.pack())
        if self._is_new:
            self._place, self._resume = own.place, own
            self._tasks_to_skip = own.place.tasks_to_skip
            self._until_task = own.is_task and not own.place.in_body and not self._tasks_to_skip
            if self._until_task:
                self._random = own.random


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a step began with."""

    random: RandomState
    buffers: list[torch.Tensor]
    gradients: list[tuple[torch.Tensor, int] | None]


class _Step:
    def __init__(
        self, begin: Callable[[], None], end: Callable[[BaseException | None], bool]
    ) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._end(error)


def session(
    *objects: Any,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    checkpoint_keep: int = 3,
    snapshot_every: int | None = None,
) -> Session:
    """Train so that the loss of a process costs the others nothing.

    .. code-block:: python

        with elastic.session(model, optimizer) as session:
            for epoch in session.epochs(10):
                for batch in session.batches(loader):
                    with session.step():
                        loss_of(model, batch).backward()
                        optimizer.step()
                        optimizer.zero_grad()

    If a worker is lost, the others keep their process. Another process takes the lost rank over, gets model and
    optimizer from those who have them, and all repeat the step that was under way. Sharded state comes from snapshots:
    all ranks go back to the last one.

    Collective: every rank enters it, with the same objects.   Blocks: until all are there.
    Args:
        objects: modules, optimizers, schedulers, scalers: whatever changes in training and has ``state_dict`` and
            ``load_state_dict``.
        checkpoint: where checkpoints are kept: a directory, or a URL that fsspec understands. The newest one that is whole
            is loaded when the session begins. They are written in the background, in the format of
            ``torch.distributed.checkpoint``. All nodes need access to it. None: there are none.
        checkpoint_every: steps from one checkpoint to the next. A last one is written when the session ends well.
        checkpoint_keep: how many complete ones stay.
        snapshot_every: with sharded state (FSDP2, tensor-parallel modules, ``ZeroRedundancyOptimizer``), steps from one
            snapshot to the next: a loss leads all ranks back to the last one. None: as often as 2 % of the time
            allows. Replicated state needs none.
    Returns:
        A context manager. Outside of ``rally run`` it only counts steps and writes checkpoints, and says so once.
    Raises:
        TypeError: an object lacks the two methods.
        ValueError: a number is less than 1, or no driver knows the URL's scheme.
        ImportError: the URL's driver is not installed.
        ElasticError: the ranks' objects differ, or no group can be kept; on entering, also: the checkpoint cannot be read,
            or is that of other objects.
    """
    checkpoints = (
        None
        if checkpoint is None
        else Checkpoints(checkpoint, every=checkpoint_every, keep=checkpoint_keep)
    )
    return Session(Objects(objects), process.current(), checkpoints, snapshot_every)


_said: set[int] = set()


def _say_once(*, but: str) -> None:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first and os.getpid() not in _said:
        _said.add(os.getpid())
        _log.warning(
            "elastic.session: not started by `rally run`, so a lost process ends the job%s", but
        )

"""Sessions: training that continues in the same processes when one of them is lost."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch
import torch.distributed as dist

from rallypoint._core import join_blocks, step_reports
from rallypoint.errors import ElasticError, MembershipChanged

from . import torch_private
from .checkpointing.checkpoints import Checkpoints
from .communication.board import boards
from .communication.kept_group import KeptGroup
from .hints import Hints
from .late_collectives import SAMPLES, LateCollectives
from .leftover import Leftover
from .loops import loader_state
from .loops.course import Course, Doing
from .loops.loader_generators import LoaderGenerators
from .loops.loader_iterators import LoaderIterators
from .loops.loaders import begun_in, loaders_in, samplers_in, takes_batches_for_samples
from .loops.local_values import LocalValues
from .loops.own_state import OwnState
from .loops.rng import RandomState, keep_local
from .outside_changes import OutsideChanges
from .recovery import resizing
from .recovery.keeping import Keeping
from .recovery.meeting import Meeting, Recovery
from .recovery.replicated import Replicated
from .recovery.sharded import Sharded
from .recovery.snapshots import Snapshots
from .rehearsal import Rehearsal
from .replication.copies import Copies
from .state import wrapped_optimizers
from .state.objects import Objects
from .storage.memory import Memory
from .storage.schedule import Schedule
from .undo import Undo
from .worker import process, termination
from .worker.process import KeptProcess


_log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


class Session:
    """Training that survives the loss of processes. Created by :func:`session`.

    Used as a context manager. All ranks enter it with the same objects, after the same set-up.

    Args:
        objects: what the session was given.
        kept: this worker; None where nothing can be kept.
        checkpoints: None if there are none.
        snapshot_every: steps between two snapshots of sharded state, or None.
        copies: how many nodes keep what only one rank has.

    Raises:
        ValueError: ``snapshot_every`` or ``copies`` is below 1.
        ElasticError: there are both checkpoints and a ``ZeroRedundancyOptimizer``.
    """

    def __init__(
        self,
        objects: Objects,
        kept: KeptProcess | None,
        checkpoints: Checkpoints | None = None,
        snapshot_every: int | None = None,
        copies: int = 2,
    ) -> None:
        Schedule(snapshot_every)
        if copies < 1:
            raise ValueError(f"elastic.session: copies is {copies}, expected at least 1")
        self._num_copies = copies
        if checkpoints is not None and objects.has_zero:
            raise ElasticError(
                "elastic.session: checkpoint= cannot keep a ZeroRedundancyOptimizer, whose state is sharded by parameters."
                " Use fully_shard, which also shards the optimizer's state"
            )
        self._objects = objects
        self._leftover = Leftover(objects)
        self._late = LateCollectives(matters=not objects.keeps_snapshots)
        self._undo = Undo(objects)
        self._hints = Hints()
        resumes = kept is not None or checkpoints is not None
        self._outside = OutsideChanges(objects, matters=resumes)
        self._generators = LoaderGenerators()
        self._kept = kept
        self._checkpoints = checkpoints
        self._every = snapshot_every
        self._course = Course()
        # The signal to stop the job must not kill a loader's workers: the steps up to the last checkpoint still need them.
        takes_last = kept is not None and checkpoints is not None
        around_start = termination.Children().kept if takes_last else nullcontext
        self._iterators = LoaderIterators(self._course, around_start)
        self._memory: Memory | None = None
        self._keeping: Keeping = Replicated(objects, self._course, None, lambda: None)
        self._meeting: Meeting | None = None
        self._rehearsal: Rehearsal | None = None
        self._results: dict[str, Any] = {}  # of the functions that have run, by name
        self._swaps: dict[str, bool] = {}  # by name: whether a function changes parameters
        self._function = ""  # the one that is being run
        self._loops_outside = False  # there was a loop over batches outside any epoch
        self._in_epochs = self._in_step = self._is_task = self._rehearses = False
        self._fetches = False  # a batch is being fetched, or an iterator started
        self._has_stopped = False  # the job was told to stop, and the last checkpoint is taken
        self._iterations = 0
        self._counted_epochs = 0  # in the loops over epochs so far
        self._loader: Any = None  # the one being iterated
        self._given: Callable[[], object] = lambda: None  # what the script iterates over
        self._random_behind: RandomState | None = None  # after the last step outside a batch's body
        self._behind_break: RandomState | None = None  # after the break where this process starts
        self._hooks: list[Any] = []
        self._on_resize: list[Callable[[int, int], object]] = []
        self._resizes = False  # the number of ranks may change in the same processes
        self._replica = 0  # how many ranks together hold the whole state, if that matters
        self._renews = (
            False  # from the next batch on, another number of ranks shares the loop's samples
        )
        self._has_begun = False
        self._local = LocalValues()

    # -- for users ----------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many steps are complete, which is the number of the step under way. The same on all ranks."""
        if not self._in_step:
            self._hints.ask_position()
        return self._course.steps

    @property
    def is_rehearsing(self) -> bool:
        """Whether what the script does now has no effect, so that values computed in the last step mean nothing.

        True after a loss, in the rest of a body whose step was ended; and where a body begins again, until its complete part
        is over. Log, and write files, only if it is False: then a line comes twice only if a process is lost just after it wrote
        it, before any other rank has completed the step. It is missing if a process is lost between its step and the line, or did
        not see the end of a step that others have completed. (With sharded state, steps that are redone are logged once more.)
        """
        return self._course.is_rehearsing

    @property
    def batch_index(self) -> int:
        """The number of the current batch in its loop, from 0. The same on all ranks.

        .. code-block:: python

            for batch in session.batches(loader):
                with session.step():
                    train_on(batch)
                if session.batch_index % 100 == 0:
                    session.run(validate)

        ``enumerate`` around :meth:`batches` counts a batch that comes again twice, and begins with 0 in a new process.
        """
        return self._course.place.batch

    @property
    def history(self) -> tuple[Recovery, ...]:
        """All recoveries that this process took part in."""
        return () if self._meeting is None else tuple(self._meeting.history)

    @property
    def local(self) -> LocalValues:
        """Small values of this rank alone: a dict of numbers, strings, and lists and dicts of these, 16 KiB at most.

        They are kept in each step, as the random generators are: a process that takes over this rank gets them as they were,
        and a repeated step starts with the values it had the first time. Checkpoints include them, too; on another number of
        ranks, every rank starts with the values that the script sets. Set them before the last collective of a step, such as
        the one in ``backward``: what a rank sets after it may be lost with the rank.

        .. code-block:: python

            with session.step():
                session.local["tokens"] = session.local.get("tokens", 0) + batch.numel()
                loss_of(model, batch).backward()
                optimizer.step()
        """
        return self._local

    def on_resize(self, callback: Callable[[int, int], object], *, in_place: bool = False) -> None:
        """Register a function to be called when training continues on another number of ranks.

        .. code-block:: python

            session = elastic.session(model, optimizer, checkpoint="runs/a")
            session.on_resize(scale_learning_rate)
            with session:
                ...

        Args:
            callback: called on all ranks with the old and the new number of ranks, once the checkpoint is loaded or all have met.
                It may only change what the session holds, such as an optimizer: a process that replaces a lost one gets that
                state from the others and does not call the callback. The next checkpoint includes the change.
            in_place: the script asks for its rank and the number of ranks wherever it needs them, so both may change as it runs. Then a
                session over several nodes (``--nnodes MIN:MAX``) continues in the same processes when a node is lost without a
                replacement, or when one joins. Sharded state must have whole replicas on each node: HSDP, or tensor-parallel
                modules with replicated data parallelism, both with the replicas as the first dimension of the mesh. Loops must be
                over loaders with a :class:`.Sampler`. Otherwise all workers are restarted.
        Raises:
            ElasticError: the session has begun.
        """
        if self._has_begun:
            raise ElasticError("session.on_resize: the session has begun; call it before `with`")
        self._on_resize.append(callback)
        self._resizes = self._resizes or in_place

    def epochs(self, count: int) -> Iterator[int]:
        """The remaining epochs, starting with the one under way.

        Args:
            count: of all epochs. A second loop over epochs continues where the first one ended: ``epochs(3)``, then ``epochs(5)``
                for two more.
        Returns:
            An iterator over their numbers. A process that replaces a lost one starts with the current epoch.
        Raises:
            ElasticError: an earlier loop over batches was outside any epoch; or an earlier loop over epochs has left none.
        """
        if 0 < count <= self._counted_epochs:
            raise ElasticError(
                f"session.epochs({count}) has no epochs left: an earlier session.epochs({self._counted_epochs}) has already counted that many."
                f" The count includes these: write session.epochs({self._counted_epochs + count}) for {count} more"
            )
        self._counted_epochs = count
        if self._loops_outside and self._resumes:
            raise ElasticError(
                "session.epochs was called after a loop over session.batches that is in no epoch: a process that begins in the"
                " middle of an epoch would mistake that loop for one of the epoch's. Put the loop into an epoch"
            )
        self._in_epochs = True
        for epoch in range(self._course.place.epoch, count):
            self._course.begin_epoch()
            yield epoch
            self._course.end_epoch(epoch)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of an epoch. A batch whose step did not complete is yielded again.

        A process that replaces a lost one starts with the batch under way: it fetches the earlier ones and
        discards them.

        With sharded state, a loss may take the loop back to an earlier batch.

        An epoch may have several loops, one after another. A process that starts partway through it skips the bodies of the
        loops that are complete, and fetches none of their batches.

        Args:
            loader: gives the same batches each time it is iterated with the same random state.
        Returns:
            An iterator over the batches.
        Raises:
            ElasticError: this is a second loop without :meth:`epochs`, which a newcomer could not skip; another loop is under
                way; or, with sharded state, the loader can be iterated only once.
        """
        batches = self._batches(loader)
        self._given = weakref.ref(batches)
        return batches

    def _batches(self, loader: Iterable[T]) -> Generator[T]:
        course, keeping = self._course, self._keeping
        self._check_loader(loader)
        is_left_out = course.begin_loop()
        if self._resumes:
            self._hints.begin_loop(course.loop, self._given())
        seen = self._generators.meet(course.place.seen, course.loop, loader)
        course.place = replace(course.place, seen=seen)
        if is_left_out:
            return
        keeping.begin_batches(anew=False)
        self._loader = loader
        iterator = self._iterator_of(loader)
        try:
            while True:
                is_fresh = course.approach_batch()
                keeping.approach_batch()
                if self._renews:
                    self._renews = False
                    course.renew(OwnState(course.steps, course.place, RandomState.now()))
                if course.is_back:
                    iterator = self._iterator_of(loader)
                    continue
                before = keeping.random_before_fetch()
                if is_fresh:
                    self._pass_boundary()
                try:
                    batch = self._fetched(iterator)
                except StopIteration:
                    course.reach_end_of_batches()
                    if keeping.reach_end_of_batches(before):
                        return
                    iterator = self._iterator_of(loader)
                    continue
                done, random = course.begin_body(), RandomState.now()
                if done:
                    self._rehearse(done, keeping.continue_body() or self._behind_break)
                yield batch
                while course.repeats:
                    self._begin_body_again(random)
                    yield batch
                if not course.end_body():
                    self._end_rehearsal()
        finally:
            seen = self._generators.leave(course.place.seen, loader)
            course.place = replace(course.place, seen=seen)
            course.end_batches()
            self._loader = None
            keeping.end_batches()
            self._outside.end_part()

    def step(self) -> AbstractContextManager[None]:
        """One step: the block runs again if a process is lost while it runs.

        A loss exits the block early, without an exception. :meth:`batches` then yields the same batch again; in a loop of
        your own, :attr:`position` does not advance.

        Returns:
            A context manager.
        Raises:
            ElasticError: no rank has a whole state, or the processes do not match.
        """
        return _Step(self._begin, self._end)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run a function that communicates, such as a validation, as a step.   Collective: returns once all ranks have run it.

        Args:
            function: runs again if a process is lost meanwhile. It must have no effects that must not happen twice.
            args, kwargs: its arguments.
        Returns:
            Its result. None in a process that replaced a lost one after the function had run; with sharded state, also if
            a loss takes training back to a step before it. In the rest of a body whose step was left early: its previous result.
        Raises:
            TypeError: ``function`` is not a function.
        """
        if not callable(function):
            raise TypeError(
                f"session.run: expected a function, got a {type(function).__name__}; pass the function without calling it, as in"
                " session.run(scheduler.step)"
            )
        course = self._course
        key = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        self._check_way()
        doing = course.of_task()
        if doing is Doing.REHEARSE:
            self._note_rehearsed()
            return cast("T | None", self._results.get(key))
        if doing is Doing.SKIP or not self._keeping.reach_task():
            return None
        self._end_rehearsal()
        while True:
            before, result = course.steps, None
            self._is_task, self._function = True, key
            try:
                with self.step():
                    result = function(*args, **kwargs)
                    if self._meeting is not None:
                        # No rank continues before all have their result: one that was interrupted in the function could no
                        # longer get its own.
                        dist.barrier()
            finally:
                self._is_task = False
            if course.is_back:
                return None
            if course.steps > before and self._keeping.leave_task(before):
                self._results[key] = result
                return result

    # -- entering and leaving ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        kept, self._has_begun = self._kept, True
        keep_local(self._local)
        if kept is None and not process.is_worker():
            _say_once(
                but="" if self._checkpoints is None else "; the session only writes checkpoints"
            )
            self._load()
            return self
        if kept is None or kept.groups.default is None:
            raise ElasticError(
                "elastic.session: this process has no Gloo or NCCL group that a session can keep; call"
                " torch.distributed.init_process_group() after `import rallypoint.elastic`, before the session. (launch_subprocesses"
                " forms the group before it calls a function: import the package in the function's module, or in `setup`)"
            )
        kept.enter()
        kept.await_place(sharded=self._objects.is_sharded)
        if self._checkpoints is not None:
            kept.link.termination.begin()
        try:
            self._enter(kept)
        except BaseException:
            kept.link.termination.end()
            raise
        return self

    def _enter(self, kept: KeptProcess) -> None:
        # Whether a lost node takes state with it that nobody else has.
        rank, sharded = dist.get_rank(), self._objects.keeps_snapshots and self._num_copies < 2
        saves = self._checkpoints is not None
        for optimizer in self._objects.optimizers:
            self._hooks.append(wrapped_optimizers.note_steps(optimizer, self._note_applied))
        if self._resizes:
            self._replica = resizing.prepare(kept, self._objects, self._become_fixed) or 0
            self._resizes = self._replica > 0
        told = {"sharded": sharded, "saves": saves, "resizes": self._resizes}
        if kept.takes_over:
            held = kept.link.enter(kept.generation, rank, None, **told)
            kept.settle()
            memory = Memory(held)
            if held is None:
                kept.link.give(memory.fd)
            meeting = self._prepare(kept, memory)
            kept.generation = -1
            self._begin_checkpoints()
            meeting.recover(None)
            if self._checkpoints is not None:
                self._checkpoints.join_at(self._course.steps)
        else:
            memory = Memory()
            # A loss in this part counts as one before the session.
            kept.groups.connect_gpus()
            self._load()
            meeting = self._prepare(kept, memory)
            # Before anybody counts on this rank: with sharded state, there must be a snapshot to go back to.
            self._keeping.begin()
            kept.publish()
            kept.link.enter(kept.generation, rank, memory.fd, **told)
            try:
                meeting.compare()
            except ElasticError:
                kept.link.tell({"kind": "kept refused"})
                raise
        self._heed_resize()
        self._random_behind = RandomState.now()
        meeting.count_anew()
        for each in kept.groups:
            each.before, each.explain = self._before_collective, self._change
            each.awaits = not self._objects.keeps_snapshots

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failed = kind is not None
        try:
            self._leave(failed=failed or self._course.has_strayed)
        finally:
            keep_local(None)
        if not failed:
            self._check_way()

    def _leave(self, *, failed: bool) -> None:
        kept, meeting = self._kept, self._meeting
        if kept is None or meeting is None:
            self._end_checkpoints(failed=failed)
            return
        if not failed:
            self._keeping.reach_end()
            meeting.confirm()
            kept.link.tell({"kind": "kept left"})
        else:
            kept.link.tell({"kind": "kept failed", "step": self._course.steps})
        for each in kept.groups:
            # The group outlives the session, and would keep the model alive.
            each.before = each.explain = each.amend = None
            each.awaits = False
        for hook in self._hooks:
            hook.remove()
        if kept.copies is not None:
            kept.copies.close()
            kept.copies = None
        self._keeping.close()
        if self._memory is not None:
            self._memory.close()
        self._end_checkpoints(failed=failed)
        kept.link.termination.end()

    def _prepare(self, kept: KeptProcess, memory: Memory) -> Meeting:
        objects, course = self._objects, self._course
        copies = None
        if (kept.nodes > 1 or self._resizes) and self._num_copies > 1:
            rank, size = dist.get_rank(), dist.get_world_size()
            copies = kept.copies = Copies(memory.fd, rank, size, self._num_copies)
        if objects.keeps_snapshots:
            snapshots = Snapshots(objects, memory.fd, self._every, copies, kept.groups.check)
            self._keeping = Sharded(objects, course, snapshots, self._catch_up)
        else:
            self._keeping = Replicated(
                objects, course, memory, self._catch_up, copies, resizes=self._resizes
            )
        self._memory = memory
        self._meeting = Meeting(
            kept, objects, course, self._keeping, memory, copies, replica=self._replica
        )
        return self._meeting

    def _catch_up(self, error: BaseException | None = None) -> None:
        assert self._meeting is not None
        before = len(self._meeting.history)
        self._meeting.catch_up(error)
        if len(self._meeting.history) > before:
            self._outside.forget()
        self._heed_resize()

    def _heed_resize(self) -> None:
        """If the number of ranks changed in the last meeting, divide the samples among the new number and tell the script."""
        meeting, kept = self._meeting, self._kept
        if meeting is None or kept is None or not kept.was_resized:
            return
        size, course = dist.get_world_size(), self._course
        if not self._objects.is_sharded:
            course.resize(size)
        if meeting.has_moved:
            # A loss may have led back already.
            meeting.has_moved, self._renews = False, course.in_batches and not course.is_back
            if self._checkpoints is not None:
                self._checkpoints.resize(dist.get_rank(), size, boards(lambda: kept.address))
        before, meeting.ranks = meeting.ranks, size
        for callback in self._on_resize if before != size else ():
            callback(before, size)

    def _become_fixed(self) -> None:
        """From now on the session cannot continue with another number of ranks in the same processes."""
        self._resizes = False
        if self._kept is not None:
            self._kept.link.tell({"kind": "kept fixed"})

    def _check_way(self) -> None:
        if self._course.has_strayed:
            raise ElasticError(
                "a loop over session.batches was left (break, return) after a step that a loss had ended: this rank would not"
                " repeat that step, but others do. Leave the loop only on a condition that a complete step changes, such as"
                " `session.position >= n`"
            )

    # -- steps ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        course = self._course
        self._check_way()
        if self._in_step:
            raise ElasticError("session.step() within session.step(): steps cannot be nested")
        if self._meeting is not None and (join_blocks.is_open() or self._objects.is_joined):
            raise ElasticError(
                "session.step() within a Join block: the ranks may be in different steps, so a loss there could not be recovered from."
                " Open the block within the step, around its micro-batches; or let an elastic.Sampler divide the samples"
            )
        if course.of_step() is Doing.REHEARSE:
            self._prepare_rehearsal(None).enter()
            self._in_step = self._rehearses = True
            return
        if what := self._outside.begin_step():
            self._hints.change_outside(what)
        behind = None if course.in_body else self._random_behind
        if not course.in_body and not self._is_task:
            self._pass_boundary()
            if self._meeting is not None:
                self._hints.begin_step()
        if self._meeting is not None:
            may_swap = self._is_task and self._swaps.get(self._function, True)
            self._meeting.begun = self._keeping.begin_step(
                is_task=self._is_task, may_swap=may_swap, behind=behind
            )
            self._undo.begin_step()
        compares = self._late.compares and self._meeting is not None and not self._is_task
        self._late.begin_step(self._objects.fingerprint(SAMPLES) if compares else None)
        self._leftover.begin_step()
        self._in_step = True

    def _end(self, error: BaseException | None) -> bool:
        """Returns whether the error was a loss that has been recovered from."""
        course, meeting = self._course, self._meeting
        self._in_step = False
        if self._rehearses:
            self._rehearses = False
            assert self._rehearsal is not None
            self._rehearsal.leave()
            self._note_rehearsed()
            return isinstance(error, Exception)  # its results mean nothing
        self._leftover.end_step()
        if error is None:
            self._check_accumulation()
            course.note_complete(is_task=self._is_task)
            self._objects.note_complete()
            self._late.end_step()
            if self._is_task and not course.in_body:
                self._outside.end_part()
            else:
                self._outside.end_step()
            if self._is_task and meeting is not None and meeting.begun is not None:
                # Reading all parameters at the start of every function would cost too much where each step runs one.
                changes = meeting.begun.changes
                changed = changes is not None and changes != self._objects.changes()
                self._swaps[self._function] = changed
            step_reports.report(step_reports.BY_SESSION, course.steps)
            if meeting is not None:
                meeting.begun = None
            if not course.in_body and (meeting is not None or self._checkpoint_is_due()):
                self._random_behind = RandomState.now()
            return False
        if meeting is None or not meeting.explains(error):
            return False
        if self._undo.is_current or self._has_changed():
            meeting.whole = self._undo.undo() and meeting.whole
        before = course.steps
        meeting.recover(error)
        is_fresh = course.in_body and not self._is_task and not course.place.done
        if meeting.has_moved and is_fresh and course.steps == before:
            # Nobody has trained on this batch: it comes again, divided differently.
            self._heed_resize()
            self._renews = False
            course.go_back(self._keeping.before_batch())
        if not course.in_body:
            # The generators are those behind the last complete step, also if the step that comes now is lost, too.
            self._random_behind = RandomState.now()
        course.note_loss(before, is_task=self._is_task, goes_back=self._objects.keeps_snapshots)
        self._heed_resize()
        return True

    def _has_changed(self) -> bool:
        """Whether the step under way has changed parameters, which cannot be changed back."""
        begun = None if self._meeting is None else self._meeting.begun
        if begun is None or self._leftover.has_stepped:
            return self._leftover.has_stepped
        if self._is_task:  # a function may have put them back
            before = begun.fingerprint
            return before is not None and before != self._objects.fingerprint()
        if begun.changes is not None and begun.changes != self._objects.changes():
            return True
        sampled = self._late.begun
        return sampled is not None and sampled != self._objects.fingerprint(SAMPLES)

    def _is_late(self) -> bool:
        """Whether a collective that starts now comes after a change of parameters."""
        return self._leftover.has_stepped or (self._late.compares and self._has_changed())

    def _check_accumulation(self) -> None:
        begun = None if self._meeting is None else self._meeting.begun
        if begun is None or not self._objects.optimizers:
            return
        self._leftover.add(begun.gradients)
        if self._leftover.is_used:
            raise ElasticError(
                "a step left gradients without stepping their optimizer, and a later step uses them: if a process is lost, so are its"
                " gradients. Put all passes of an accumulation into one session.step()"
            )

    def _note_applied(self, optimizer: torch.optim.Optimizer) -> None:
        if self._in_step and not self._rehearses:
            self._leftover.note_applied(optimizer)
            self._objects.note_applied(optimizer)

    def _before_collective(self, group: KeptGroup, operation: str) -> None:
        if self._fetches:
            raise ElasticError(
                f"session.batches: the ranks communicate ({operation}) while this loader is iterated, but a process that replaces a lost"
                " one iterates alone. Pass a DataLoader with an elastic.Sampler. (accelerate: leave the loader out of `prepare`, or set"
                " DataLoaderConfiguration(use_seedable_sampler=True))"
            )
        if self._memory is not None and operation not in torch_private.POINT_TO_POINT:
            self._memory.progress.begin(group.label)
        if self._in_step:
            self._keeping.note_collective()
            if self._late.is_watching and not self._is_task:
                late = self._late.meet(operation, is_late=self._is_late())
                if late is not None:
                    self._undo.turn_on(late)
            if operation in torch_private.REDUCE_SCATTERS:
                self._leftover.note_reduction()
        elif not self._keeping.communicates:
            self._hints.communicate(operation)

    def _change(self, error: BaseException | None) -> MembershipChanged | None:
        """What a collective of the script raises: after a loss, or instead of waiting for a rank that will not come.

        All have met where the step was left, but the process that takes the lost rank's place is still on its way to that step
        and does not run what comes after it.
        """
        assert self._meeting is not None
        if error is None and not self._in_step and self._course.is_void:
            lost = self._meeting.history[-1]
            behind = (
                "the interrupted step is repeated, and the process that replaces the lost one does not reach this collective:"
                " communicate in session.step() or session.run()"
            )
            return MembershipChanged(lost.ranks, f"{lost.why}; {behind}")
        return self._meeting.change(error)

    # -- rehearsals ---------------------------------------------------------------------------------

    def _begin_body_again(self, random: RandomState) -> None:
        """The batch comes again: the complete steps of its body are rehearsed.

        Args:
            random: the generators at the beginning of the body.
        """
        done = self._course.begin_body_again()
        self._end_rehearsal()
        random.restore()
        if done:
            self._rehearse(done, None)

    def _rehearse(self, steps: int, random: RandomState | None) -> None:
        self._prepare_rehearsal(random)
        self._course.rehearse(steps)

    def _prepare_rehearsal(self, random: RandomState | None) -> Rehearsal:
        self._outside.forget()
        if self._rehearsal is None:
            # Outside of `rally run` all ranks rehearse after loading a checkpoint, and their collectives are real.
            groups = () if self._kept is None else self._kept.groups
            self._rehearsal = Rehearsal(self._objects, groups, random)
        return self._rehearsal

    def _note_rehearsed(self) -> None:
        if self._course.note_rehearsed():
            self._end_rehearsal()

    def _end_rehearsal(self) -> None:
        if self._rehearsal is not None:
            self._rehearsal.end()
            self._rehearsal = None

    # -- checkpoints ------------------------------------------------------------------------------

    def _begin_checkpoints(self) -> None:
        if self._checkpoints is None:
            return
        kept = self._kept
        new_board = boards(None if kept is None else lambda: kept.address)
        rank, size = (0, 1) if new_board is None else (dist.get_rank(), dist.get_world_size())
        check = (lambda: None) if self._kept is None else self._kept.groups.check
        self._checkpoints.begin(self._objects, rank, size, new_board, check)

    def _load(self) -> None:
        """Continue where the newest checkpoint was taken."""
        self._begin_checkpoints()
        loaded = None if self._checkpoints is None else self._checkpoints.load()
        if loaded is None:
            return
        own = loaded.own
        self._course.steps = own.steps
        if loaded.is_own:
            own.random.restore()
            self._objects.buffers.fill(own.buffers)
            self._objects.start_with_layouts(loaded.layouts)
        else:
            now = RandomState.now()
            # A loader's own place does not hold either: it counts batches for the former number of ranks.
            place = own.place.with_other_generators(now)
            own = replace(own, random=now, place=place, loader=b"")
            self._iterators.ranks_before = loaded.record.ranks
        self._course.continue_at(own)
        if not loaded.is_own:
            size = dist.get_world_size() if dist.is_initialized() else 1
            for callback in self._on_resize:
                callback(loaded.record.ranks, size)

    def _checkpoint_is_due(self) -> bool:
        return self._checkpoints is not None and self._checkpoints.is_due(self._course.steps)

    def _pass_boundary(self) -> None:
        """The script is between two steps, with nothing under way."""
        self._stop_if_told()
        if self._checkpoints is not None and self._checkpoint_is_due():
            self._checkpoints.take(self._own_now())
        self._random_behind = None

    def _stop_if_told(self) -> None:
        """If the job is told to stop, take the last checkpoint that its supervisor waits for, and stop."""
        kept, checkpoints = self._kept, self._checkpoints
        if kept is None or checkpoints is None or not kept.link.is_stopping or self._has_stopped:
            return
        if checkpoints.is_last(self._course.steps):
            self._has_stopped = True
            checkpoints.take_last(self._own_now())
            kept.link.termination.forget()
            # End as the supervisor would have ended this process: the script's own handler runs now.
            os.kill(os.getpid(), signal.SIGTERM)

    def _own_now(self) -> OwnState:
        # With a batch in hand, a loader has drawn random numbers since the last function.
        behind = None if self._course.place.in_body else self._random_behind
        random = self._keeping.random or behind or RandomState.now()
        buffers = self._objects.buffers.as_bytes()
        loader = loader_state.packed(self._loader)
        course = self._course
        return OwnState(course.steps, course.place, random, buffers=buffers, loader=loader)

    def _end_checkpoints(self, *, failed: bool) -> None:
        if self._checkpoints is not None:
            self._checkpoints.end(None if failed else self._own_now())
            self._checkpoints.close()

    # -- data -------------------------------------------------------------------------------------

    @property
    def _resumes(self) -> bool:
        """Whether a process may start partway through the training."""
        return self._kept is not None or self._checkpoints is not None

    def _check_loader(self, loader: Iterable[Any]) -> None:
        self._check_way()
        if self._course.in_batches:
            raise ElasticError(
                "session.batches: a loop began while another one is under way (zip, or nested loops; or a loop was left, but a"
                " variable still holds its iterator: close() it). Use a single loop: `session.batches` over an object that"
                " yields the batches of both loaders, or iterate over the inner loader without `session.batches`"
            )
        self._iterations += 1
        self._loops_outside = self._loops_outside or not self._course.in_epoch
        if self._iterations > 1 and not self._in_epochs and self._resumes:
            raise ElasticError(
                "session.batches was called again: write `for epoch in session.epochs(n)` around it, so that a process"
                " that replaces a lost one, or the next start, can begin in the present epoch"
            )
        if takes_batches_for_samples(loader):
            raise ElasticError(
                "session.batches: elastic.Sampler yields whole batches, but this loader takes each for one sample; pass it as batch_sampler="
                " instead of sampler="
            )
        if what := begun_in(loader):
            raise ElasticError(
                f"session.batches: a {type(loader).__name__} has begun to iterate over a loader whose {what} the session can set only"
                " before that: write `session.batches(loader)`, and session.batch_index for the number of a batch"
            )
        if self._meeting is not None and self._objects.keeps_snapshots and iter(loader) is loader:
            raise ElasticError(
                f"session.batches: a {type(loader).__name__} can be iterated only once, but a loss takes the loop back to an earlier"
                " batch; pass a list, a DataLoader, or another object that can be iterated again"
            )

    def _fetched(self, iterator: Iterator[T]) -> T:
        self._fetches = True
        try:
            return next(iterator)
        finally:
            self._fetches = False

    def _iterator_of(self, loader: Iterable[T]) -> Iterator[T]:
        self._fetches = True
        try:
            return self._begun_iterator(loader)
        finally:
            self._fetches = False

    def _begun_iterator(self, loader: Iterable[T]) -> Iterator[T]:
        course = self._course
        if self._resizes and self._kept is not None and not samplers_in(loaders_in(loader)):
            # Nobody knows what another number of ranks would read from it.
            self._become_fixed()
        own = course.begin_batches()
        if own is None or own.place.begun is None:
            epoch = course.place.epoch if self._in_epochs else self._iterations - 1
            return self._iterators.begin(loader, epoch)
        self._keeping.begin_batches(anew=True)
        self._behind_break = None if own.place.in_body else own.random
        return self._iterators.go_on(loader, own)


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
    copies: int = 2,
    snapshots: bool = False,
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

    If a worker is lost, the others keep running. Another process takes over the lost rank and gets the model and optimizer
    from ranks that have them, and all ranks repeat the step that was under way. Sharded state comes from snapshots: all ranks
    go back to the last one.

    Collective: every rank enters it, with the same objects.   Blocks: until all have entered.
    Args:
        objects: modules, optimizers, schedulers, scalers: whatever changes in training and has ``state_dict`` and
            ``load_state_dict``.
        checkpoint: where checkpoints are kept: a directory, or a URL that fsspec understands. All nodes need access to it. The
            newest complete checkpoint is loaded when the session begins. Checkpoints are written in the background, in the
            format of ``torch.distributed.checkpoint``. None: no checkpoints.
        checkpoint_every: steps between two checkpoints. A last one is written when the session ends without an error or
            ``rally run`` gets SIGTERM.
        checkpoint_keep: how many complete checkpoints are kept.
        snapshot_every: with sharded state (FSDP2, tensor-parallel modules, ``ZeroRedundancyOptimizer``) or ``snapshots``, how
            many steps a loss may cost: all ranks take snapshots, and a loss takes them back to the last one. None: as often as
            fits in 2 % of the time. Replicated state needs no snapshots.
        copies: how many nodes keep what only one rank has (snapshots, random generators, the place in the data, small
            buffers), including its own node: up to ``copies - 1`` nodes may be lost at once.
        snapshots: keep each rank's whole state in snapshots, as sharded state is. For ranks whose parameters or optimizers
            differ, and for steps that communicate after a change of parameters (sharpness-aware optimizers, two optimizers with a
            backward pass between them) where copying the state in every step costs too much. ``LBFGS``, communication hooks with
            state, and model averaging work without it.
    Returns:
        A context manager. Outside of ``rally run`` it only counts steps and writes checkpoints, and logs that once.
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
    kept = Objects(objects, snapshots=snapshots)
    return Session(kept, process.current(), checkpoints, snapshot_every, copies)


_said: set[int] = set()


def _say_once(*, but: str) -> None:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first and os.getpid() not in _said:
        _said.add(os.getpid())
        _log.warning(
            "elastic.session: not started by `rally run`, so a lost process ends the job%s", but
        )

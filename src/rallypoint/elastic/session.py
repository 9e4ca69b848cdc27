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


class Session:
    """Training that survives the loss of processes; :func:`session` makes one.

    Used as a context manager. All ranks enter it with the same objects, after the same set-up.

    Args:
        objects: what it was given.
        kept: this worker; None where nothing can be kept.
        checkpoints: None if there are none.
    """

    def __init__(
        self, objects: Objects, kept: KeptProcess | None, checkpoints: Checkpoints | None = None
    ) -> None:
        self._objects = objects
        self._kept = kept
        self._checkpoints = checkpoints
        self._random_behind: RandomState | None = (
            None  # behind the last step of a loop without batches
        )
        self._memory: Memory | None = None
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

        Args:
            loader: gives the same batches each time it is iterated with the same random state.
        Returns:
            An iterator over the batches.
        Raises:
            ElasticError: a second epoch without :meth:`epochs`, which a newcomer could not skip.
        """
        self._iterations += 1
        resumes = self._kept is not None or self._checkpoints is not None
        if self._iterations > 1 and not self._in_epochs and resumes:
            raise ElasticError(
                "session.batches was called again: write `for epoch in session.epochs(n)` around it, so that a process"
                " that takes a lost one over, or the next start, can begin in the present epoch"
            )
        iterator = self._iterator_of(loader)
        self._loader = loader
        try:
            while True:
                done = self._place.done  # in a newcomer: of the batch under way
                self._place = replace(self._place, in_body=True)
                if not done:
                    self._keep_own(task=False)
                    self._pass_boundary()
                try:
                    batch = next(iterator)
                except StopIteration:
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
                self._place, self._in_body = self._place.after_batch(), False
        finally:
            self._place, self._in_body = replace(self._place, in_body=False), False
            self._loader = None

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
            Its result. None in a process that took a lost one over after the function had run. In the rest of a body whose
            step was left early: its last result.
        """
        key = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
        if self._tasks_to_skip and not self._in_body:
            self._tasks_to_skip -= 1
            return None
        if self._skips_body or self._to_rehearse:
            self._count_rehearsed()
            return cast("T | None", self._results.get(key))
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
            if self._steps > before:
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
            kept.publish()
            kept.link.enter(kept.generation, self._rank, self._memory.fd)
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
            self._confirm()
            kept.link.tell({"kind": "kept left"})
        else:
            kept.link.tell({"kind": "kept failed", "step": self._steps})
        for each in kept.groups:
            each.before = None
        for hook in self._hooks:
            hook.remove()
        if self._memory is not None:
            self._memory.close()
        self._end_checkpoints(failed=kind is not None)

    def _compare(self) -> None:
        """At the first start: whether all ranks have entered the same session."""
        assert self._kept is not None
        wiring = self._kept.groups.wiring
        assert wiring is not None
        try:
            judge(self._introduce(wiring, self._objects.fingerprint()))
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
        newest = kept.link.newest
        if newest is not None and newest.generation > kept.generation:
            self._begun = None
            self._recover(None)
        if self._random is not None:
            self._random.restore()
            self._random = None
        if not self._in_body or self._place.done:
            self._keep_own(task=self._is_task)
        self._applied = 0
        self._begun = _Begun(
            RandomState.now(), self._objects.copy_buffers(), self._objects.gradients()
        )
        self._in_step = True

    def _is_to_rehearse(self) -> bool:
        if not self._in_body:
            self._skips_body = False  # in a loop of the user's own, this is the step that failed
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
        if self._steps == before:
            self._repeat = not self._is_task
            self._skips_body = not self._is_task
        else:
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
        own, self._resume = self._resume, None
        sampler = getattr(loader, "batch_sampler", None)
        if own is None or own.place.begun is None:
            if isinstance(sampler, Sampler):
                sampler.begin_at(self._place.epoch if self._in_epochs else self._iterations - 1)
            self._place = replace(self._place, batch=0, begun=RandomState.now())
            return iter(loader)
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

    # -- recovery ---------------------------------------------------------------------------------

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
        )
        self._history.append(recovery)
        record = {
            "generation": recovery.generation,
            "steps": recovery.steps,
            "repeated": recovery.repeated,
            "formed": recovery.formed,
            "transferred": recovery.transferred,
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
        if self._rank in verdict.receivers:
            self._whole = False
            return self._objects.receive(group, verdict.source)
        return 0

    def _settle(self, verdict: Verdict) -> None:
        """Make everything as it was at the beginning of the step to come."""
        assert self._kept is not None
        begun = self._begun
        if begun is not None:
            self._objects.drop_gradients(begun.gradients)
        if begun is not None and self._steps == verdict.steps:
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
    optimizer from those who have them, and all repeat the step that was under way.

    Collective: every rank enters it, with the same objects.   Blocks: until all are there.
    Args:
        objects: modules, optimizers, schedulers, scalers: whatever changes in training and has ``state_dict`` and
            ``load_state_dict``.
        checkpoint: where checkpoints are kept: a directory, or a URL that fsspec understands. The newest one that is whole
            is loaded when the session begins. They are written in the background, in the format of
            ``torch.distributed.checkpoint``. All nodes need access to it. None: there are none.
        checkpoint_every: steps from one checkpoint to the next. A last one is written when the session ends well.
        checkpoint_keep: how many complete ones stay.
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
    return Session(Objects(objects), process.current(), checkpoints)


_said: set[int] = set()


def _say_once(*, but: str) -> None:
    if os.getpid() not in _said:
        _said.add(os.getpid())
        _log.warning(
            "elastic.session: not started by `rally run`, so a lost process ends the job%s", but
        )

"""``Join``: a training loop in which ranks have different numbers of batches.

Theory of operation
-------------------
The collectives of a step need every rank. A rank that has run out of inputs matches them in one of two ways:

- it *shadows* the others: after its loop, hooks of the joined objects issue the same collectives with empty
  contributions, as torch's Join does (arXiv:2006.15704 §3);
- it *replays* its last batch with weight zero: its own loop keeps running, so it matches collectives of any kind.
  :meth:`Join.batches` does this.

The ranks must agree on which of them have inputs in a step. There are three ways, cheapest first:

- *planned*: every rank knows its number of steps; they are exchanged once, on entry;
- *lookahead*: a loader without a length is read some batches ahead; the counts are exchanged once per window;
- *classic*: an all-reduce in each step counts the ranks that have inputs (torch's protocol, message for message).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from itertools import chain
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from rallypoint import events
from rallypoint._core import join_blocks
from rallypoint.errors import ConfigError, InputsExhausted, JoinError

from . import exchange, torch_private
from .arguments import check_kwargs, check_types, common_group, weighting_of
from .batches import Alone, Batches
from .exchange import check_group
from .hooks.ddp import DdpMember
from .hooks.local_sgd import LocalSgdMember
from .hooks.replay import Standstill
from .kinds import check_constructed, in_order, member_of
from .leaving import Deserted, Stay, steps_of_all
from .members import HookMember
from .notes import Notes
from .overlooked import Overlooked
from .passes import Passes
from .run import Run
from .samples import CountSamples, counting, first_dim, inputs_of
from .schedule import Schedule, Weighting
from .settlement import Settlement
from .shadow import Shadow
from .weights import GradientScale


_log = logging.getLogger(__name__)

# Warn when a rank has more than this many steps fewer than another (torch's number).
MUCH_SKEW = 1000


class Join:
    """Train while ranks run out of inputs at different times, without a hang and with correct gradients.

    ::

        with Join([model, optimizer], weighting="samples") as join:
            for batch in join.batches(loader):
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if join.active:
                    losses.append(loss.item())

    Code written for torch's Join works as it is, with the same arguments and meaning::

        with Join([model, optimizer], steps=len(loader)):
            for batch in loader: ...

    Collective: every rank of the group enters and leaves the block, with the same arguments except ``steps``,
    ``example`` and the loader.   Blocks: on entry (with ``steps``), and at the end until all ranks have finished.

    Args:
        joinables: every object that communicates, or that steps with one that does: Joinables (DistributedDataParallel,
            ZeroRedundancyOptimizer, your own), optimizers, learning-rate schedulers, a ``GradScaler``, modules
            sharded by ``fully_shard``, other modules. Listing an optimizer, scheduler or scaler keeps its state up
            to date on ranks that have run out. Gradients of modules are assumed to be averaged over the group.
        enable: False turns the block off; :meth:`batches` then just iterates over the loader, and :attr:`step` and
            :attr:`syncs` count this rank's batches.
        throw_on_early_termination: end the block on all ranks when the first one runs out.
        steps: this rank's inputs: a number of steps, the list of samples in each step, or a loader with a length. None:
            ranks count each other in every step (classic), unless :meth:`batches` is used.
        lookahead: how many batches :meth:`batches` reads ahead, for loaders without a length or with unknown batch
            sizes. The largest value of all ranks applies. None: 8, only where a loader has no length.
        weighting: how ranks' gradients are combined: ``"initial"``, ``"ranks"`` or ``"samples"``
            (:mod:`rallypoint.join.schedule`). ``"samples"`` gives the gradient of one process that trains on all samples of
            a step at once, if the loss is a mean over samples. None: ``"initial"``, or ``"ranks"`` with
            ``divide_by_initial_world_size=False``.
        accumulation: exchange gradients only once in this many steps; use ``no_sync()`` in the others, see
            :attr:`syncs`.
        samples: a function that returns the number of samples in a batch. Default: the first dimension of the batch's
            first tensor. With a function of your own, a DataLoader's numbers of samples are not known in advance.
        example: a batch to run with weight zero on a rank that has no batch at all. None: another rank's first batch.
        replay: whether :meth:`batches` keeps running the loop's body with weight zero on a rank that has run out. False: it
            ends the loop there, and hooks match the other ranks. None: True, unless ``joinables`` contains a Joinable of
            your own, which brings its own hook.
        process_group: the ranks that train together. None: the joinables' group.
        kwargs: passed to every Joinable's ``join_hook``.

    Raises:
        ConfigError: ``joinables`` is empty, spans several groups, or has a Joinable whose constructor did not call its
            base's; or arguments contradict each other.
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        steps: int | Sequence[int] | Sized | None = None,
        lookahead: int | None = None,
        weighting: Weighting | None = None,
        accumulation: int = 1,
        samples: CountSamples = first_dim,
        example: Any = None,
        replay: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        # A bare Sequential would iterate over its layers.
        given: object = joinables
        if isinstance(given, nn.Module) or not isinstance(given, Iterable):
            what = type(given).__name__
            raise ConfigError(
                "joinables", what, "expected a list", "as in Join([model, optimizer])"
            )
        if not joinables:
            raise ConfigError("joinables", [], "expected at least one object, usually the model")
        check_types(lookahead, accumulation, enable, throw_on_early_termination, replay, samples)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._weighting = weighting_of(weighting, kwargs)
        self._joinables = in_order(joinables)
        twice = [
            each
            for i, each in enumerate(self._joinables)
            if any(each is other for other in self._joinables[:i])
        ]
        if twice:
            raise ConfigError("joinables", type(twice[0]).__name__, "the list has it twice")
        self._members = [member_of(each) for each in self._joinables]
        self._settlement = Settlement(self._members)
        self._shadow = Shadow(self._members)
        check_group("process_group", process_group)
        self._group = common_group(self._members, process_group)
        self._lookahead = lookahead
        self._accumulation = accumulation
        self._samples = samples if samples is first_dim else counting(samples)
        self._own = None if steps is None else inputs_of(steps, self._samples)
        self._example = example
        own_hooks = any(isinstance(member, HookMember) for member in self._members)
        check_kwargs(kwargs, own_hooks=own_hooks)
        self._replays = not own_hooks if replay is None else replay
        self._kwargs = kwargs
        self._run: Run | None = None
        self._alone = Alone(accumulation)
        self._scale: GradientScale | None = None
        self._standstill: Standstill | None = None
        self._overlooked: Overlooked | None = None
        self._stack = ExitStack()
        self._hooks: list[RemovableHandle] = []
        self._first: nn.Module | None = None
        self._iterated = False
        self._batches: Batches | None = None
        self._stayed: int | None = None  # number of steps, once the loop has ended
        self._check()

    def _check(self) -> None:
        local = next((m for m in self._members if isinstance(m, LocalSgdMember)), None)
        if local is not None and self._weighting != "initial":
            raise ConfigError(
                "weighting",
                self._weighting,
                "expected 'initial': PostLocalSGDOptimizer averages gradients within subgroups only",
                "its models are averaged over the ranks that have inputs in any case",
            )

    # -- the block ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._alone = Alone(self._accumulation)
        if not self._enable:
            return self
        if self._run is not None:
            raise JoinError("this Join is already in use; create a new one for each block")
        device = next((m.device for m in self._members if m.device is not None), None)
        run = Run(self._group, device or torch.device("cpu"), self._accumulation)
        self._iterated = False
        self._batches = self._stayed = None
        modules = self._modules
        run.counted = bool(modules)
        with ExitStack() as stack:
            stack.callback(self._scale_by, 1.0)
            for member in self._members:
                member.enter(run, stack, self._kwargs)
            self._overlooked = Overlooked(stack, self._joinables)
            if len(models := self._models) > 1:
                run.passes = Passes(len(models), self._settlement.known_order)
            # Only a module's hook, or our own loop, can stop at the right step without asking the others.
            if self._own is not None and (modules or not self._throw):
                every, number = exchange.all_inputs(self._own, run.device, run.group)
                assert every is not None
                run.notes = Notes(run.group, run.device, number)
                schedule = Schedule(every, self._weighting)
                self._plan(run, schedule, stack)
                self._shadow.level(schedule)
            for joinable in self._joinables:
                if isinstance(joinable, Joinable):
                    torch_private.keep_join_config(joinable, stack)
            self._configure(tells=run.schedule is None)
            if modules:
                # The module that runs first in a step starts it, wherever it is in the list.
                self._first = modules[0] if len(modules) == 1 else None
                self._hooks = [
                    each.register_forward_pre_hook(self._before_forward) for each in modules
                ]
                stack.callback(self._remove_hooks)
            stack.enter_context(join_blocks.opened())
            self._stack = stack.pop_all()
        self._run = run
        return self

    def _remove_hooks(self) -> None:
        for each in self._hooks:
            each.remove()
        self._hooks = []

    @property
    def _models(self) -> list[DdpMember]:
        """The DDP modules, whose collectives hooks can match."""
        return [member for member in self._members if isinstance(member, DdpMember)]

    @property
    def _modules(self) -> list[nn.Module]:
        return [member.module for member in self._members if member.module is not None]

    def _plan(self, run: Run, schedule: Schedule | None, stack: ExitStack) -> None:
        """From now on, all ranks know the schedule, or learn it window by window (None)."""
        # A loop of the user's own cannot know which step is the last on all ranks.
        run.schedule, run.ends = schedule, False
        for member in self._members:
            member.planned(run, stack)

    def _configure(self, *, tells: bool) -> None:
        """Tell joinables whether to count, in each step, the ranks that have inputs."""
        joinables = [each for each in self._joinables if isinstance(each, Joinable)]
        for joinable in joinables:
            torch_private.configure_join(
                joinable, throws=self._throw, is_first=tells and joinable is joinables[0]
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run, self._run = self._run, None
        if run is None:
            self._alone = Alone(self._accumulation)
            return
        try:
            if kind is None:
                self._finish(run)
        finally:
            with self._stack:
                self._end_standstill()
            self._scale = None

    def _scale_by(self, factor: float) -> None:
        """Multiply this rank's gradients by ``factor`` from now on."""
        if self._scale is None:
            if factor == 1.0:
                return
            joined = [m for m in self._members if m.module is not None]
            outputs = [m for m in joined if self._replays_now and m.exchanges_within]
            self._scale = GradientScale(
                at_outputs=[m.module for m in outputs if m.module is not None],
                at_parameters=[
                    m.module for m in joined if m.module is not None and m not in outputs
                ],
            )
        self._scale.set(factor, [m.module for m in self._members if m.module and m.ran_back])

    def _finish(self, run: Run) -> None:
        if self._iterated:
            self._end_loop(run)
            return
        self._refuse_bare_loop(run)
        if run.schedule is None:
            self._shadow_classic(run)
        else:
            self._shadow_planned(run, run.schedule)

    def _put_right(
        self, run: Run, stays: Sequence[Stay], digests: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Give ranks that ran out early the state that the others ended with.

        Args:
            stays: how each rank's loop ended.
            digests: each rank's digests of its members' parts. None: they are not exchanged yet.

        Raises:
            JoinError: ranks left their loops in different steps.
        """
        steps = steps_of_all(stays)
        events.emit(
            events.JoinEnded(
                rank=run.rank,
                own_steps=run.own if run.replays else stays[run.rank].steps,
                steps=steps,
            )
        )
        schedule = run.schedule
        if not steps:
            return
        if schedule is None or schedule.even:
            self._settlement.remember_order(run.passes.order)
            return
        self._end_standstill()
        run.step = run.first + steps - 1
        self._settlement.share_order(run, run.source)
        if digests is None:
            digests = self._settlement.gather_digests(run)
        index = run.step - run.base
        self._settle(run, [schedule.is_active(r, index) for r in range(run.world_size)], digests)

    def _settle(
        self, run: Run, to_the_end: Sequence[bool], digests: Sequence[Sequence[int]]
    ) -> None:
        self._settlement.settle(run, to_the_end, digests)
        if not all(to_the_end) and not run.replays and self._overlooked is not None:
            self._overlooked.warn(run.averaged)

    # -- classic: ranks count each other in each step -------------------------------------------

    def _shadow_classic(self, run: Run) -> None:
        shadowed, run.shadows = 0, True
        while self._shadow.others_have_inputs(run):
            if not shadowed:
                events.emit(events.RanOut(rank=run.rank, steps=run.step + 1))
            run.step += 1
            if self._throw:
                dist.all_reduce(torch.ones(1, device=run.device), group=run.group)
                raise _exhausted(run.rank, (run.rank,))
            self._shadow.match(run)
            shadowed += 1
            if shadowed == MUCH_SKEW + 1:
                _log.warning(
                    "rank %d ran out of inputs more than %d steps before other ranks",
                    run.rank,
                    MUCH_SKEW,
                )
        told = exchange.gather([int(shadowed == 0)], 1, run.device, run.group)
        to_the_end = [bool(had) for (had,) in told]
        done = run.step + 1
        events.emit(events.JoinEnded(rank=run.rank, own_steps=done - shadowed, steps=done))
        self._settle(
            run, to_the_end, [] if all(to_the_end) else self._settlement.gather_digests(run)
        )
        self._settlement.share_order(run, max(rank for rank, had in enumerate(to_the_end) if had))

    # -- planned: all ranks know the schedule ---------------------------------------------------

    def _shadow_planned(self, run: Run, schedule: Schedule) -> None:
        announced = schedule.steps[run.rank]
        if not run.counted:
            # Nothing counted the steps: trust the announced number.
            run.step = run.base + announced - 1
        next_step = self._shadow.next_exchange(run)
        done = next_step - run.base
        run.counted = True
        self._check_throw(run, schedule, done)
        if schedule.total - done > MUCH_SKEW:
            _warn_of_skew(run.rank, schedule.total - done)
        left = done < announced
        if not left and done < schedule.total:
            events.emit(events.RanOut(rank=run.rank, steps=done))
        self._scale_by(1.0)
        self._shadow.match_all(
            run, next_step, iter(range(next_step, run.base + schedule.total)), left
        )
        self._put_right(run, *self._tell_stays(run, Stay(done, left)))

    def _tell_stays(self, run: Run, stay: Stay) -> tuple[list[Stay], list[list[int]]]:
        """How every rank's loop ended, and every rank's digests.   Collective: one all-gather."""
        even = run.schedule is None or run.schedule.even
        own = [] if even else self._settlement.digests()
        told = exchange.gather(
            [stay.steps, int(stay.left), *own], 2 + len(own), run.device, run.group
        )
        return [Stay(row[0], bool(row[1])) for row in told], [row[2:] for row in told]

    def _check_throw(self, run: Run, schedule: Schedule, step: int) -> None:
        """Raise if ``throw_on_early_termination`` ends the block before this step."""
        if not self._throw or schedule.even or step < schedule.least:
            return
        out = tuple(r for r, steps in enumerate(schedule.steps) if steps == schedule.least)
        raise _exhausted(run.rank, out)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """The first module is about to run: in the user's own loop, a step starts."""
        run = self._run
        if run is None or not torch.is_grad_enabled():
            return
        if self._first is None:
            self._first = self._modules[0] if self._iterated else module
        if module is not self._first:
            return
        if not self._iterated:
            step = run.step + 1
            if step < run.calm and module.require_backward_grad_sync:
                # The fast path, which nearly all steps take.
                run.step = step
                run.own += 1
                return
            self._count_forward(run)
        # A replay runs the same code on every rank; hooks must know in advance.
        known = run.schedule is not None and not self._replays_now
        if known and isinstance(module, DistributedDataParallel):
            run.check_sync(type(module).__name__, module.require_backward_grad_sync)
            self._check_known_passes(run)

    def _check_known_passes(self, run: Run) -> None:
        """Raise if a rank that never had inputs cannot know how often the only model runs in a step."""
        assert run.schedule is not None
        # It had inputs in an earlier window, or has some in this one.
        has_learned = run.base > 0 or run.schedule.least > 0
        if not has_learned and len(self._models) == 1 and run.passes.has_begun(run.step):
            raise JoinError(
                f"{self._models[0].name} runs forward several times in a step, and a rank without any inputs cannot know how"
                " often; iterate over join.batches(loader), without replay=False"
            )

    def _count_forward(self, run: Run) -> None:
        if run.step < 0:
            self._refuse_bare_loop(run)
        run.step += 1
        schedule = run.schedule
        if schedule is None:
            return
        self._check_throw(run, schedule, run.step)
        if run.step >= schedule.steps[run.rank]:
            raise JoinError(
                f"rank {run.rank} began step {run.step}, but announced steps={schedule.steps[run.rank]}, counted from 0;"
                " if the model runs forward several times per step, iterate over join.batches(loader)"
            )
        run.own += 1
        self._scale_by(run.factor)
        if self._accumulation == 1:  # otherwise each step must check no_sync()
            run.calm = schedule.calm_until(run.rank, run.step, throws=self._throw)

    @property
    def _replays_now(self) -> bool:
        return self._iterated and self._replays

    def _refuse_bare_loop(self, run: Run) -> None:
        """Raise if this block needs join.batches but the user wrote their own loop."""
        self._refuse_replay(run.schedule)
        if run.schedule is not None:
            return
        blind = next((member.name for member in self._members if member.needs_plan), "")
        if blind or self._weighting == "samples":
            what = f"{blind} needs" if blind else "weighting='samples' needs"
            raise JoinError(
                f"{what} to know each rank's inputs in advance; pass steps=loader to Join, or iterate over"
                " join.batches(loader)"
            )

    def _refuse_replay(self, schedule: Schedule | None) -> None:
        """Raise if hooks cannot match what a joined module does."""
        for member in self._members:
            if why := member.unmatched(schedule):
                raise JoinError(
                    f"{member.name} needs join.batches: {why}; iterate over join.batches(loader), without"
                    " replay=False"
                )
        someone_has_none = schedule is not None and schedule.least == 0 < schedule.total
        models = self._models
        if someone_has_none and len(models) > 1 and self._settlement.known_order is None:
            raise JoinError(
                f"{len(models)} DistributedDataParallel modules need join.batches if a rank has no inputs: a rank learns"
                " the order of their backward passes in its own steps; iterate over join.batches(loader), without"
                " replay=False"
            )

    # -- our own loop ---------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over this rank's batches, then repeat the last one with weight zero until all ranks have finished.

        Each repetition is a new copy of the batch, so the body may change it. This holds the memory of one batch.

        Collective: every rank iterates to the end, or all ranks break in the same step.   Blocks: at the start, and once
        per window if a loader has no length.

        Args:
            loader: this rank's batches: a DataLoader, a list, or any iterable. A rank without data passes ``[]``.

        Returns:
            An iterator over batches, of the same length on every rank unless ``replay`` is False.

        Raises:
            ConfigError: ``loader`` is not iterable, or its batches cannot be counted.
            JoinError: used outside the block; the loader yields more or fewer batches or samples than its length
                promises; or ranks left the loop in different steps.
            InputsExhausted: with ``throw_on_early_termination``, when the first rank has run out.
        """
        given: object = loader
        listed = isinstance(given, Iterable) or hasattr(given, "__getitem__")
        if not listed or isinstance(given, str | bytes | type):
            raise ConfigError(
                "loader",
                type(given).__name__,
                "expected a DataLoader, a list of batches, or another iterable",
                "a rank without data passes an empty list",
            )
        return self._iterate(loader)

    def _iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        if not self._enable:
            yield from self._alone.over(loader)
            return
        run = self._run
        if run is None:
            raise JoinError("join.batches() works inside the block only: with Join(...) as join:")
        if self._iterated:
            self._end_loop(run)  # the previous loop
        batches = Batches(
            run,
            loader,
            self._weighting,
            steps=self._own,
            lookahead=self._lookahead,
            count=self._samples,
            example=self._example,
            shadow=None if self._replays else self._shadow_in_loop,
            begin=self._begin_schedule,
        )
        schedule = batches.agree()
        if not self._replays:
            self._refuse_replay(schedule)
        if not self._iterated and run.schedule is None:
            self._plan(run, schedule, self._stack)
            self._configure(tells=False)
        self._iterated = run.counted = True
        self._batches, run.replays = batches, self._replays
        if self._replays:
            self._remove_hooks()  # this loop counts the steps itself
        run.begin_loop()
        if schedule is not None and schedule.total - schedule.steps[run.rank] > MUCH_SKEW:
            _warn_of_skew(run.rank, schedule.total - schedule.steps[run.rank])
        steps = batches.by_windows() if schedule is None else batches.planned(schedule)
        run.calm = 0
        try:
            for batch in steps:
                if run.step < run.calm:
                    yield batch
                    continue
                assert run.schedule is not None
                index = run.step - run.base
                self._check_throw(run, run.schedule, index)
                until = run.schedule.calm_until(run.rank, index, throws=self._throw)
                run.calm = run.base + until
                if not run.active and self._standstill is None:
                    self._standstill = Standstill(self._modules)
                    events.emit(events.RanOut(rank=run.rank, steps=run.own))
                self._scale_by(run.factor)
                yield batch
        except Deserted:  # while this rank only shadowed
            pass
        self._stayed = run.step + 1 - run.first if self._replays else run.own

    def _begin_schedule(self, schedule: Schedule) -> None:
        if not self._replays:  # otherwise each rank contributes its own gradients
            self._shadow.level(schedule)

    def _shadow_in_loop(self) -> None:
        run = self._run
        assert run is not None
        assert run.schedule is not None
        self._check_throw(run, run.schedule, run.step - run.base)
        if run.own == run.step - run.first:
            events.emit(events.RanOut(rank=run.rank, steps=run.own))
        self._scale_by(1.0)
        self._shadow.match(run)

    def _end_loop(self, run: Run) -> None:
        """Finish the loop over :meth:`batches` on this rank.

        Raises:
            JoinError: some ranks left their loops early, and others did not.
        """
        batches, self._batches = self._batches, None
        stayed, self._stayed = self._stayed, None
        if batches is None:
            return
        schedule = run.schedule
        assert schedule is not None
        next_step = self._shadow.next_exchange(run)
        if stayed is None and run.ends and next_step >= run.base + schedule.total:
            stayed = schedule.total + run.base - run.first  # it broke out in the last step
        left = stayed is None
        if stayed is None:
            stayed = next_step - run.first
        digests = None
        if self._matched_by_hooks(run):
            self._end_standstill()
            if left:
                again = [run.step] if next_step == run.step else []
                rest = (run.step for _ in batches.rest())
                self._scale_by(1.0)
                self._shadow.match_all(run, next_step, chain(again, rest), left)
            stays, digests = self._tell_stays(run, Stay(stayed, left))
        elif left:
            self._end_standstill()
            assert run.notes is not None
            run.notes.write(next_step)
            notes = run.notes.wait()
            stays = [Stay(notes[rank] - run.first, left=True) for rank in range(run.world_size)]
        else:
            # No rank can have left early, because the others would have missed its collectives.
            stays = [Stay(stayed, left=False)] * run.world_size
        self._put_right(run, stays, digests)
        self._end_standstill()

    def _matched_by_hooks(self, run: Run) -> bool:
        """Whether a rank that left can match the others' steps and learn whether they left, too."""
        knows = any(isinstance(member, DdpMember) for member in self._members)
        return knows and not any(member.unmatched(run.schedule) for member in self._members)

    def _end_standstill(self) -> None:
        standstill, self._standstill = self._standstill, None
        if standstill is not None:
            standstill.end()

    # -- state for the loop's body --------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether this step's batch counts; False while the last batch is repeated with weight zero."""
        return self._run is None or self._run.active

    @property
    def syncs(self) -> bool:
        """Whether this step exchanges gradients: every ``accumulation``-th does, and the last step of all ranks.

        If False, run the step under ``no_sync()``, and do not step the optimizer.

        Raises:
            JoinError: outside a loop over :meth:`batches`, where the last step is unknown.
        """
        if self._run is None:
            return self._alone.syncs
        if not self._iterated:
            raise JoinError(
                "join.syncs needs a loop over join.batches(loader); in your own loop, steps accumulation,"
                " 2 * accumulation, ... exchange gradients, counted from 1"
            )
        return self._run.syncs

    @property
    def step(self) -> int:
        """The current step, counted from 0; -1 before the first."""
        return self._alone.step if self._run is None else self._run.step

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Announce that a Joinable is about to issue the collectives of a step, as in torch's Join.

        Called by the Joinable itself, once per step.

        Collective: in a classic block, and for the first joinable only: one asynchronous all-reduce.

        Args:
            joinable: the caller.

        Returns:
            The handle of the all-reduce that counts the ranks with inputs. None if this call started none.

        Raises:
            ConfigError: the Joinable's constructor did not call its base's.
        """
        check_constructed(joinable)
        work: dist.Work | None = TorchJoin.notify_join_context(joinable)
        return work


def _exhausted(rank: int, out: tuple[int, ...]) -> InputsExhausted:
    if rank in out:
        return InputsExhausted(f"Rank {rank} exhausted all inputs.", out)
    ranks = f"rank {out[0]}" if len(out) == 1 else f"ranks {', '.join(map(str, out))}"
    # The first sentence is the one torch's Join raises.
    return InputsExhausted(
        f"Detected at least one rank that exhausted inputs. Rank {rank} was stopped after {ranks}.",
        out,
    )


def _warn_of_skew(rank: int, steps: int) -> None:
    _log.warning(
        "rank %d runs out of inputs %d steps before other ranks, and does no work of its own in those steps",
        rank,
        steps,
    )

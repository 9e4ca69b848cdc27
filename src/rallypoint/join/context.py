"""``Join``: a training loop over inputs that some ranks have more of than others.

Theory of operation
-------------------
Every step's collectives need every rank. A rank that has run out of inputs has two ways to keep the others company:

- it *shadows* them: when its loop is over, hooks of what was joined call the same collectives with nothing in
  them (as torch's Join does, arXiv:2006.15704 §3);
- it *replays* its last batch with weight zero: its own loop goes on, so collectives of any kind are matched.
  :meth:`Join.batches` does that.

The others must know that somebody does so, and it must know for how long. Three ways, from the cheapest:

- *planned*: the numbers of steps are known, and told once, on entry;
- *lookahead*: a loader without length is read some batches ahead, and what is there is told once per window;
- *classic*: an all-reduce in each step counts who is there (torch's protocol, message for message).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from difflib import get_close_matches
from itertools import chain, count
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join as TorchJoin, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError, InputsExhausted, JoinError

from . import exchange, torch_private
from .batches import Batches
from .exchange import check_group
from .hooks.ddp import DdpMember
from .hooks.local_sgd import LocalSgdMember, is_local_sgd
from .hooks.optimizer import ScalerMember, StepMember
from .hooks.replay import ModuleMember, Standstill
from .leaving import Deserted, Stay, steps_of_all
from .members import HookMember, Member
from .notes import Notes
from .overlooked import Overlooked
from .passes import Pass, Passes
from .run import Run
from .samples import CountSamples, counting, first_dim, inputs_of
from .schedule import WEIGHTINGS, Schedule, Weighting
from .state import digest
from .weights import GradientScale


_log = logging.getLogger(__name__)

# A rank that has so many fewer steps than another keeps it company for long: worth a word (torch's number).
MUCH_SKEW = 1000

# The order in which several modules go forward and backward in a step, by the first of them.
_orders: WeakKeyDictionary[nn.Module, list[Pass]] = WeakKeyDictionary()


class Join:
    """Train on inputs that ranks run out of at different times, without a hang and with right gradients.

    ::

        with Join([model, optimizer], weighting="samples") as join:
            for batch in join.batches(loader):
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if join.active:
                    losses.append(loss.item())

    or, for code written for torch's Join, with its arguments and meaning::

        with Join([model, optimizer], steps=len(loader)):
            for batch in loader: ...

    Collective: every rank of the group enters and leaves the block, with the same arguments but ``steps``,
    ``example`` and the loader.   Blocks: on entry (with ``steps``) and at the end until all ranks are through.

    Args:
        joinables: what communicates: any Joinable (DistributedDataParallel, ZeroRedundancyOptimizer, your own), any
            optimizer, learning-rate scheduler and ``GradScaler`` (so that a rank that has run out keeps
            their state up to date), a module sharded by ``fully_shard``, or any other module. The
            gradients of those that are modules are taken to be averaged over the group.
        enable: False: the block does nothing, and ``batches`` gives the loader's.
        throw_on_early_termination: end the block in all ranks when the first one has run out.
        steps: how many this rank has: a number, the samples of each step, or a loader with a length. None: each step
            tells (classic), unless :meth:`batches` is used.
        lookahead: batches that :meth:`batches` reads ahead, where a loader has no length or its batches' sizes
            are not known; the largest of all ranks counts.
        weighting: of the ranks' gradients: ``"initial"``, ``"ranks"`` or ``"samples"``
            (:mod:`rallypoint.join.schedule`). None: what ``divide_by_initial_world_size`` says, so
            ``"initial"``. ``"samples"`` equals one process that trains on all samples of a step at once,
            if the loss is a mean over them.
        accumulation: gradients are exchanged in each so many-th step only (``no_sync``); see :attr:`syncs`.
        samples: the samples in a batch, as a function of it; None: the first dimension of its first tensor.
        example: a batch for a rank that has none at all to run with weight zero; None: zeros, shaped as another
            rank's first batch.
        replay: whether :meth:`batches` goes on with weight zero, or ends and leaves the rest to the hooks. None: it
            goes on, unless a Joinable of your own is there, whose hook says what it does instead.
        process_group: over which the inputs are uneven; None: that of the joinables.
        kwargs: handed to every Joinable's ``join_hook``.

    Raises:
        ConfigError: no joinables, joinables over different groups, or without their base's constructor; arguments
            that do not go together.
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
        # A Sequential can be gone through, layer by layer, which nobody wants here.
        given: object = joinables
        if isinstance(given, nn.Module) or not isinstance(given, Iterable):
            what = type(given).__name__
            raise ConfigError(
                "joinables", what, "expected a list", "as in Join([model, optimizer])"
            )
        if not joinables:
            raise ConfigError("joinables", [], "expected at least one: the model, say")
        _check_types(lookahead, accumulation, enable, throw_on_early_termination, replay, samples)
        self._enable = enable
        self._throw = throw_on_early_termination
        self._weighting = _weighting(weighting, kwargs)
        self._joinables = _in_order(joinables)
        twice = [
            each
            for i, each in enumerate(self._joinables)
            if any(each is other for other in self._joinables[:i])
        ]
        if twice:
            raise ConfigError("joinables", type(twice[0]).__name__, "it is in the list twice")
        self._members = [member_of(each) for each in self._joinables]
        check_group("process_group", process_group)
        self._group = _common_group(self._members, process_group)
        self._own = None if steps is None else inputs_of(steps)
        self._lookahead = lookahead
        self._accumulation = accumulation
        self._samples = samples if samples is first_dim else counting(samples)
        self._example = example
        own_hooks = any(isinstance(member, HookMember) for member in self._members)
        _check_kwargs(kwargs, own_hooks=own_hooks)
        self._replays = not own_hooks if replay is None else replay
        self._kwargs = kwargs
        self._run: Run | None = None
        self._scale: GradientScale | None = None
        self._standstill: Standstill | None = None
        self._overlooked: Overlooked | None = None
        self._stack = ExitStack()
        self._hook: RemovableHandle | None = None
        self._iterated = False
        self._batches: Batches | None = None
        self._stayed: int | None = None  # in how many steps, once the loop has come to its end
        self._check()

    def _check(self) -> None:
        local = next((m for m in self._members if isinstance(m, LocalSgdMember)), None)
        if local is not None and self._weighting != "initial":
            raise ConfigError(
                "weighting",
                self._weighting,
                "PostLocalSGDOptimizer averages gradients within subgroups; expected 'initial'",
                "its models are averaged over the ranks that have inputs, whatever is said here",
            )

    # -- the block ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self._enable:
            return self
        if self._run is not None:
            raise JoinError("this Join is entered already: make one for each block")
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
                run.passes = Passes(len(models), _orders.get(models[0].ddp))
            # Only a module, or our own loop, can be stopped in the right step without asking the others.
            if self._own is not None and (modules or not self._throw):
                every, number = exchange.all_inputs(self._own, run.device, run.group)
                assert every is not None
                run.notes = Notes(run.group, run.device, number)
                self._plan(run, Schedule(every, self._weighting), stack)
            for joinable in self._joinables:
                if isinstance(joinable, Joinable):
                    torch_private.keep_join_config(joinable, stack)
            self._configure(tells=run.schedule is None)
            if modules:
                self._hook = modules[0].register_forward_pre_hook(self._before_forward)
                stack.callback(self._hook.remove)
            self._stack = stack.pop_all()
        self._run = run
        return self

    @property
    def _models(self) -> list[DdpMember]:
        """Those that hooks can match."""
        return [member for member in self._members if isinstance(member, DdpMember)]

    @property
    def _modules(self) -> list[nn.Module]:
        return [member.module for member in self._members if member.module is not None]

    def _plan(self, run: Run, schedule: Schedule | None, stack: ExitStack) -> None:
        """From now on all ranks know the schedule, or will know it window by window (None)."""
        # A loop that is not ours cannot know which step is the last of all.
        run.schedule, run.ends = schedule, False
        for member in self._members:
            member.planned(run, stack)

    def _configure(self, *, tells: bool) -> None:
        """Joinables read there whether they are to tell the others, in each step, that they have inputs."""
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
            return
        try:
            if kind is None:
                self._finish(run)
        finally:
            with self._stack:
                self._end_standstill()
            self._scale = None

    def _scale_by(self, factor: float) -> None:
        """This rank's gradients, from now on."""
        if self._scale is None:
            if factor == 1.0:
                return
            self._scale = GradientScale(self._modules, at_outputs=self._replays_now)
        self._scale.set(factor)

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
        """What ranks that ran out before the others keep from the steps that they only matched.

        Args:
            stays: of all ranks.
            digests: of the members' parts, of all ranks; None: they have not told each other.

        Raises:
            JoinError: they have left in different steps.
        """
        steps = steps_of_all(stays)
        schedule = run.schedule
        if not steps:
            return
        if schedule is None or schedule.even:
            self._remember_order(run.passes.order)
            return
        self._end_standstill()
        run.step = run.first + steps - 1
        self._share_order(run, run.source)
        if digests is None:
            digests = self._tell_digests(run)
        index = run.step - run.base
        self._settle(run, [schedule.is_active(r, index) for r in range(run.world_size)], digests)

    def _tell_digests(self, run: Run) -> list[list[int]]:
        """Of all ranks.   Collective: one all-gather, if any member has parts."""
        own = self._digests()
        return exchange.gather(own, len(own), run.device, run.group) if own else []

    def _digests(self) -> list[int]:
        return [digest(part.values()) for member in self._members for part in member.parts()]

    def _settle(
        self, run: Run, to_the_end: Sequence[bool], digests: Sequence[Sequence[int]]
    ) -> None:
        """Ranks that only matched the last steps take what differs from one that had inputs to the end.

        Collective.   Args: of each rank, whether it had, and the digests of its parts.
        """
        source = max(rank for rank, had in enumerate(to_the_end) if had)
        out = [rank for rank, had in enumerate(to_the_end) if not had]
        keep = to_the_end[run.rank]
        for model in self._models:
            torch_private.set_buffer_source(model.ddp, source)
        numbers = count()
        for member in self._members:
            if not self._replays_now:
                member.post_hook(keep)
            for part in member.parts():
                i = next(numbers)
                if any(digests[rank][i] != digests[source][i] for rank in out):
                    part.take(source, keep)
        if out and not self._replays_now and self._overlooked is not None:
            self._overlooked.warn(run.averaged)

    def _share_order(self, run: Run, source: int) -> None:
        """What the rank ``source`` has seen.   Collective, if there are several models: two broadcasts."""
        if len(self._models) < 2:
            return
        own = " ".join(f"{each.module},{int(each.forward)}" for each in run.passes.order or ())
        told = exchange.broadcast_text(own, source, run.device, run.group)
        pairs = [each.split(",") for each in told.split()]
        self._remember_order([Pass(int(i), bool(int(forward))) for i, forward in pairs])

    def _remember_order(self, order: list[Pass] | None) -> None:
        """For a later block in which some rank has no inputs to learn it from. The same on all ranks."""
        models = self._models
        if len(models) > 1 and order:
            _orders[models[0].ddp] = order

    # -- classic: each step tells ---------------------------------------------------------------

    def _shadow_classic(self, run: Run) -> None:
        shadowed, run.shadows = 0, True
        while self._others_have_inputs(run):
            run.step += 1
            if self._throw:
                dist.all_reduce(torch.ones(1, device=run.device), group=run.group)
                raise _exhausted(run.rank, (run.rank,))
            self._main_hooks(run)
            shadowed += 1
            if shadowed == MUCH_SKEW + 1:
                _log.warning(
                    "rank %d ran out of inputs more than %d steps before others",
                    run.rank,
                    MUCH_SKEW,
                )
        told = exchange.gather([int(shadowed == 0)], 1, run.device, run.group)
        to_the_end = [bool(had) for (had,) in told]
        self._settle(run, to_the_end, [] if all(to_the_end) else self._tell_digests(run))
        self._share_order(run, max(rank for rank, had in enumerate(to_the_end) if had))

    def _others_have_inputs(self, run: Run) -> bool:
        count = torch.zeros(1, device=run.device)
        dist.all_reduce(count, group=run.group)
        return bool(count.item())

    def _main_hooks(self, run: Run) -> None:
        models, passes = self._models, run.passes.missing(run.step)
        if _in_turn(passes):
            for member in self._members:
                member.main_hook()
            return
        for each in passes:
            models[each.module].match(forward=each.forward)
        for member in self._members:
            if not isinstance(member, DdpMember):
                member.main_hook()

    # -- planned: the schedule tells ------------------------------------------------------------

    def _shadow_planned(self, run: Run, schedule: Schedule) -> None:
        announced = schedule.steps[run.rank]
        if not run.counted:
            # Only a Joinable of the user's knows how many there were.
            run.step = run.base + announced - 1
        next_step = self._next_exchange(run)
        done = next_step - run.base
        run.counted = True
        self._check_throw(run, schedule, done)
        if schedule.total - done > MUCH_SKEW:
            _warn_of_skew(run.rank, schedule.total - done)
        left = done < announced
        self._keep_company(run, next_step, iter(range(next_step, run.base + schedule.total)), left)
        self._put_right(run, *self._tell_stays(run, Stay(done, left)))

    def _next_exchange(self, run: Run) -> int:
        """The first step whose collectives this rank has not been in, or not in all of them."""
        begun = run.step < 0 or all(member.begun_in(run.step) for member in self._members)
        return run.step + 1 if begun else run.step

    def _keep_company(self, run: Run, next_step: int, steps: Iterator[int], left: bool) -> None:
        """Match the others' steps until the last, or until it shows that there are no others."""
        self._scale_by(1.0)
        run.shadows = True
        if left:
            assert run.notes is not None
            run.notes.write(next_step)
        told = not left
        try:
            for run.step in steps:
                self._main_hooks(run)
                if not told and run.exchanged:
                    told = True
                    _log.warning(
                        "rank %d left its loop before step %d, and others did not: it keeps them company to the"
                        " end, and all of them will raise",
                        run.rank,
                        next_step - run.first,
                    )
        except Deserted:
            return
        except RuntimeError as error:
            if not left:
                raise
            raise JoinError(
                f"rank {run.rank} left its loop after {next_step - run.first} steps, and others did not: leave"
                " the loop in the same step on all ranks, or on none"
            ) from error

    def _tell_stays(self, run: Run, stay: Stay) -> tuple[list[Stay], list[list[int]]]:
        """Of all ranks; and the digests of their members' parts.   Collective: one all-gather."""
        even = run.schedule is None or run.schedule.even
        own = [] if even else self._digests()
        told = exchange.gather(
            [stay.steps, int(stay.left), *own], 2 + len(own), run.device, run.group
        )
        return [Stay(row[0], bool(row[1])) for row in told], [row[2:] for row in told]

    def _check_throw(self, run: Run, schedule: Schedule, step: int) -> None:
        """Raises if the block is to end before this step."""
        if not self._throw or schedule.even or step < schedule.least:
            return
        out = tuple(r for r, steps in enumerate(schedule.steps) if steps == schedule.least)
        raise _exhausted(run.rank, out)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """The first module is about to run: where no loop of ours tells, that is a step."""
        run = self._run
        if run is None or not torch.is_grad_enabled():
            return
        if not self._iterated:
            step = run.step + 1
            if step < run.calm and module.require_backward_grad_sync:
                # Nearly all steps: what is done here is done in each of them.
                run.step = step
                run.own += 1
                return
            self._count_forward(run)
        # A replay runs the same code on every rank; hooks have to know beforehand.
        known = run.schedule is not None and not self._replays_now
        if known and isinstance(module, DistributedDataParallel):
            run.check_sync(type(module).__name__, module.require_backward_grad_sync)

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
                f"step {run.step} of rank {run.rank} is one more than it announced"
                f" (steps={schedule.steps[run.rank]}); a model that runs forward several times per step needs"
                " join.batches(loader)"
            )
        run.own += 1
        self._scale_by(run.factor)
        if self._accumulation == 1:  # else each step is asked whether it exchanges gradients
            run.calm = schedule.calm_until(run.rank, run.step, throws=self._throw)

    @property
    def _replays_now(self) -> bool:
        return self._iterated and self._replays

    def _refuse_bare_loop(self, run: Run) -> None:
        """Raises where a loop that is not ours cannot do."""
        self._refuse_replay(run.schedule)
        if run.schedule is not None:
            return
        blind = next((member.name for member in self._members if member.needs_plan), "")
        if blind or self._weighting == "samples":
            what = f"{blind} needs" if blind else "weighting='samples' needs"
            raise JoinError(
                f"{what} to know what each rank has in each step: give Join steps=loader, or iterate over"
                " join.batches(loader)"
            )

    def _refuse_replay(self, schedule: Schedule | None) -> None:
        """Raises where hooks cannot match what a joined module does."""
        for member in self._members:
            if why := member.unmatched(schedule):
                raise JoinError(
                    f"{member.name} cannot be joined by hooks: {why}; iterate over"
                    " join.batches(loader), without replay=False"
                )
        someone_has_none = schedule is not None and schedule.least == 0 < schedule.total
        models = self._models
        if someone_has_none and len(models) > 1 and models[0].ddp not in _orders:
            raise JoinError(
                f"{len(models)} DistributedDataParallel modules cannot be joined by hooks while a rank has no inputs:"
                " it learns in its own steps in which order they go backward; iterate over join.batches(loader),"
                " without replay=False"
            )

    # -- our own loop ---------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches, and then, with weight zero, its last one again until all ranks are through.

        Collective: every rank iterates to the end (or all leave in the same step).   Blocks: at the start, and
        once per window where a loader has no length.

        Raises:
            ConfigError: nobody can iterate over it.
            JoinError: the loader does not give what its length promises.
            InputsExhausted: with ``throw_on_early_termination``, when the first rank has run out.
        """
        given: object = loader
        listed = isinstance(given, Iterable) or hasattr(given, "__getitem__")
        if not listed or isinstance(given, str | bytes | type):
            raise ConfigError(
                "loader",
                type(given).__name__,
                "expected a DataLoader, a list of batches, or anything else to iterate over",
                "a rank without data gives an empty list",
            )
        return self._iterate(loader)

    def _iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        if not self._enable:
            yield from loader
            return
        run = self._run
        if run is None:
            raise JoinError("join.batches() belongs inside of the block: with Join(...) as join:")
        if self._iterated:
            self._end_loop(run)  # the one before
        batches = Batches(
            run,
            loader,
            self._weighting,
            steps=self._own,
            lookahead=self._lookahead,
            count=self._samples,
            example=self._example,
            shadow=None if self._replays else self._shadow_in_loop,
        )
        schedule = batches.agree()
        if not self._replays:
            self._refuse_replay(schedule)
        if not self._iterated and run.schedule is None:
            self._plan(run, schedule, self._stack)
            self._configure(tells=False)
        self._iterated = run.counted = True
        self._batches, run.replays = batches, self._replays
        if self._replays and self._hook is not None:
            self._hook.remove()  # this loop counts, and nothing has to be asked
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
                self._scale_by(run.factor)
                yield batch
        except Deserted:  # while this rank only shadowed
            pass
        self._stayed = run.step + 1 - run.first if self._replays else run.own

    def _shadow_in_loop(self) -> None:
        run = self._run
        assert run is not None
        assert run.schedule is not None
        self._check_throw(run, run.schedule, run.step - run.base)
        self._scale_by(1.0)
        self._main_hooks(run)

    def _end_loop(self, run: Run) -> None:
        """The loop over :meth:`batches` is over on this rank.

        Raises:
            JoinError: it left early, and others did not; or others did.
        """
        batches, self._batches = self._batches, None
        stayed, self._stayed = self._stayed, None
        if batches is None:
            return
        schedule = run.schedule
        assert schedule is not None
        next_step = self._next_exchange(run)
        if stayed is None and run.ends and next_step >= run.base + schedule.total:
            stayed = schedule.total + run.base - run.first  # it left behind the last step
        left = stayed is None
        if stayed is None:
            stayed = next_step - run.first
        digests = None
        if self._matched_by_hooks(run):
            self._end_standstill()
            if left:
                again = [run.step] if next_step == run.step else []
                rest = (run.step for _ in batches.rest())
                self._keep_company(run, next_step, chain(again, rest), left)
            stays, digests = self._tell_stays(run, Stay(stayed, left))
        elif left:
            self._end_standstill()
            assert run.notes is not None
            run.notes.write(next_step)
            notes = run.notes.wait()
            stays = [Stay(notes[rank] - run.first, left=True) for rank in range(run.world_size)]
        else:
            # No rank can have left: its collectives would have been missed.
            stays = [Stay(stayed, left=False)] * run.world_size
        self._put_right(run, stays, digests)
        self._end_standstill()

    def _matched_by_hooks(self, run: Run) -> bool:
        """Whether a rank that left can match what the others do, and learn whether they are there."""
        knows = any(isinstance(member, DdpMember) for member in self._members)
        return knows and not any(member.unmatched(run.schedule) for member in self._members)

    def _end_standstill(self) -> None:
        standstill, self._standstill = self._standstill, None
        if standstill is not None:
            standstill.end()

    # -- what a loop may ask --------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether this step's batch counts: False while the last one is run again."""
        return self._run is None or self._run.active

    @property
    def syncs(self) -> bool:
        """Whether gradients are exchanged in this step: each ``accumulation``-th, and the last of all ranks.

        Where it is False the step belongs under ``no_sync()``, and the optimizer does not step.

        Raises:
            JoinError: outside of a loop over :meth:`batches`: nobody can say there which step is the last.
        """
        if self._run is None:
            return True
        if not self._iterated:
            raise JoinError(
                "join.syncs needs a loop over join.batches(loader); in your own loop gradients are exchanged in"
                " each step whose number from 1 is a multiple of accumulation"
            )
        return self._run.syncs

    @property
    def step(self) -> int:
        """The number of this step, from 0; -1 before the first."""
        return -1 if self._run is None else self._run.step

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Called by a Joinable before the collectives of each of its steps, as in torch's Join.

        Returns:
            The handle of the all-reduce that counts who has inputs, where there is one.

        Raises:
            ConfigError: the Joinable's constructor does not call its base's.
        """
        _check_constructed(joinable)
        work: dist.Work | None = TorchJoin.notify_join_context(joinable)
        return work


def member_of(joined: Any) -> Member:
    """What Join does with something that was passed to it.

    Raises:
        ConfigError: nothing can be done with it.
    """
    if isinstance(joined, DistributedDataParallel):
        return DdpMember(joined)
    if is_local_sgd(joined):
        return LocalSgdMember(joined)
    if isinstance(joined, Optimizer | LRScheduler):
        return StepMember(joined)
    if isinstance(joined, GradScaler):
        return ScalerMember(joined)
    if isinstance(joined, Joinable):
        _check_constructed(joined)
        return HookMember(joined)
    if isinstance(joined, nn.Module):
        return ModuleMember(joined)
    raise ConfigError(
        "joinables",
        type(joined).__name__,
        "expected a Joinable, a module, an optimizer, a learning-rate scheduler, or a GradScaler",
    )


def _in_order(joinables: Iterable[Any]) -> list[Any]:
    """Modules, then optimizers, then schedulers, then scalers: so a loop goes on, and who matches it.

    A Joinable of the user's may come anywhere in a step; where there is one, the list's order is that of the loop.
    """

    def place(joined: Any) -> int:
        if isinstance(joined, Optimizer) or is_local_sgd(joined):
            return 1
        return 2 if isinstance(joined, LRScheduler) else 3 if isinstance(joined, GradScaler) else 0

    found = list(joinables)
    known = (nn.Module, Optimizer, LRScheduler, GradScaler)
    return sorted(found, key=place) if all(isinstance(each, known) for each in found) else found


def _check_types(
    lookahead: object,
    accumulation: object,
    enable: object,
    throw_on_early_termination: object,
    replay: object,
    samples: object,
) -> None:
    for name, value in (("lookahead", lookahead), ("accumulation", accumulation)):
        if value is None and name == "lookahead":
            continue
        if not is_whole(value) or value < 1:  # type: ignore[operator]  # it is a number
            raise ConfigError(name, value, "expected a number of steps, 1 or more")
    if not isinstance(enable, bool | int):
        # The list of joinables comes first.
        hint = "as in Join([model, optimizer])" if isinstance(enable, nn.Module | Optimizer) else ""
        raise ConfigError("enable", type(enable).__name__, "expected True or False", hint)
    for name, value in (
        ("throw_on_early_termination", throw_on_early_termination),
        ("replay", replay),
    ):
        if not isinstance(value, bool | int) and (value is not None or name != "replay"):
            raise ConfigError(name, value, "expected True or False")
    if not callable(samples):
        raise ConfigError(
            "samples", samples, "expected a function: the number of samples in a batch"
        )


# What torch's own hooks take, and what a slip of the finger in one of Join's arguments would come near.
TORCH_KWARG = "divide_by_initial_world_size"
ARGUMENTS = (
    *(TORCH_KWARG, "enable", "throw_on_early_termination", "steps", "lookahead", "weighting"),
    *("accumulation", "samples", "example", "replay", "process_group"),
)


def _check_kwargs(kwargs: dict[str, Any], *, own_hooks: bool) -> None:
    """Keyword arguments are for the hooks of the user's Joinables: without one, any other is a mistake."""
    for name, value in kwargs.items():
        near = get_close_matches(name, ARGUMENTS, 1, 0.8)
        if name != TORCH_KWARG and (near or not own_hooks):
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ARGUMENTS)}"
            raise ConfigError(
                name, value, "no argument of Join, and no Joinable of yours takes it", hint
            )


def _check_constructed(joinable: Any) -> None:
    if not torch_private.has_join_config(joinable):
        raise ConfigError(
            "joinables",
            type(joinable).__name__,
            "its constructor does not call Joinable's",
            "add super().__init__() to it",
        )


def _in_turn(passes: Sequence[Pass]) -> bool:
    """Whether one module is through before the next one, in the order of the list, begins."""
    modules = [each.module for each in passes]
    return modules == sorted(modules)


def _exhausted(rank: int, out: tuple[int, ...]) -> InputsExhausted:
    if rank in out:
        return InputsExhausted(f"Rank {rank} exhausted all inputs.", out)
    ranks = f"rank {out[0]}" if len(out) == 1 else f"ranks {', '.join(map(str, out))}"
    # Its first sentence is that of torch's Join.
    return InputsExhausted(
        f"Detected at least one rank that exhausted inputs. Rank {rank} was stopped after {ranks}.",
        out,
    )


def _warn_of_skew(rank: int, steps: int) -> None:
    _log.warning(
        "rank %d runs out of inputs %d steps before others: it only keeps them company for as long",
        rank,
        steps,
    )


def _weighting(weighting: Weighting | None, kwargs: dict[str, Any]) -> Weighting:
    if weighting is None:
        return "initial" if kwargs.get("divide_by_initial_world_size", True) else "ranks"
    if weighting not in WEIGHTINGS:
        raise ConfigError(
            "weighting", weighting, f"expected one of {', '.join(map(repr, WEIGHTINGS))}"
        )
    if "divide_by_initial_world_size" in kwargs:
        wanted = "initial" if kwargs["divide_by_initial_world_size"] else "ranks"
        if wanted != weighting:
            raise ConfigError(
                "weighting",
                weighting,
                f"divide_by_initial_world_size says {wanted!r}",
                "give one of them",
            )
    # torch's DDP is told the same, for the steps in which it counts by itself.
    kwargs["divide_by_initial_world_size"] = weighting != "ranks"
    return weighting


def _common_group(
    members: Sequence[Member], given: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    common = given
    for member in members:
        if member.group is None:
            continue
        if common is not None and member.group != common:
            raise ConfigError(
                "joinables",
                member.name,
                "it communicates over another process group than those before it",
                "use one Join for each group",
            )
        common = member.group
    return common

"""A rank's batches, followed by copies of its last batch until all ranks have finished."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from rallypoint._core import step_reports
from rallypoint.errors import JoinError

from . import exchange
from .notes import Notes
from .run import Run
from .samples import CountSamples, inputs_of_loader
from .schedule import Inputs, Schedule, Weighting
from .torch_private import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)


# How many batches to read ahead if a loader has no length.
LOOKAHEAD = 8
# The key that marks a tensor in a batch's description.
TENSOR = "tensor"


class Batches:
    """Agrees with the other ranks on everyone's inputs, and keeps ``run`` up to date in each step.

    Args:
        run: this rank's progress.
        loader: this rank's batches.
        weighting: how gradients are combined.
        steps: the inputs the user announced. None: those that the loader's length implies.
        lookahead: batches in a window. None: use windows only if some rank's loader has no length.
        count: returns the number of samples in a batch.
        example: a batch for a rank that has none. None: another rank's first batch.
        shadow: called in each step after this rank has run out. None: yield copies of the last batch.
        begin: called with the first schedule.
    """

    def __init__(
        self,
        run: Run,
        loader: Iterable[Any],
        weighting: Weighting,
        *,
        steps: Inputs | None,
        lookahead: int | None,
        count: CountSamples,
        example: Any,
        shadow: Callable[[], None] | None,
        begin: Callable[[Schedule], None],
    ) -> None:
        self._run = run
        self._loader = loader
        self._weighting: Weighting = weighting
        self._steps = steps
        self._lookahead = lookahead
        self._count = count
        self._last: Any = example
        self._has_example = example is not None
        self._shadow = shadow
        self._begin = begin
        self._begun = False
        self._width = 0

    def agree(self) -> Schedule | None:
        """The schedule, if every rank knows its number of steps (and of samples, if they are the weights); otherwise None.

        Collective: every rank calls it.
        """
        own = None
        if self._lookahead is None:
            own = self._steps or inputs_of_loader(self._loader, self._count)
        if own is not None and self._weighting == "samples" and not own.counted:
            own = None
        run = self._run
        every, number = exchange.all_inputs(own, run.device, run.group)
        run.notes = run.notes or Notes(run.group, run.device, number)
        return None if every is None else Schedule(every, self._weighting)

    def planned(self, schedule: Schedule) -> Iterator[Any]:
        """Yield the batches of a schedule that is known to its end."""
        self._run.ends = True
        batches = iter(self._loader)
        yield from self._window(schedule, batches)
        if next(batches, self) is not self:
            steps = schedule.steps[self._run.rank]
            raise JoinError(
                f"rank {self._run.rank}'s loader yields more than {steps} batches, which is its length; fix its length,"
                " or pass lookahead=8 to Join"
            )

    def by_windows(self) -> Iterator[Any]:
        """Yield the batches of a loader that may end at any time.   Collective: once per window."""
        run, batches = self._run, iter(self._loader)
        sizes = exchange.gather([self._lookahead or LOOKAHEAD], 1, run.device, run.group)
        self._width = width = max(size for (size,) in sizes)
        ahead: list[Any] = []
        while True:
            # One batch beyond the window tells whether another window follows.
            ahead += islice(batches, width + 1 - len(ahead))
            now, ahead = ahead[:width], ahead[width:]
            schedule = self._agree_on_window(now, more=bool(ahead))
            yield from self._window(schedule, iter(now))
            if run.ends:
                return

    def _agree_on_window(self, now: list[Any], *, more: bool) -> Schedule:
        run, counts = self._run, self._weighting == "samples"
        own = [self._count(batch) for batch in now] if counts else []
        every = exchange.gather([len(now), int(more), *own], self._width + 2, run.device, run.group)
        inputs = [
            Inputs.of_sizes(row[2 : 2 + row[0]]) if counts else Inputs.of_steps(row[0])
            for row in every
        ]
        run.ends = not any(row[1] for row in every)
        return Schedule(inputs, self._weighting)

    def rest(self) -> Iterator[None]:
        """The remaining steps, for a rank that has left its loop and has no more inputs.

        Collective: once per window, with the ranks that are still in their loops.
        """
        run = self._run
        while True:
            assert run.schedule is not None
            while run.step + 1 < run.base + run.schedule.total:
                run.step += 1
                yield
            if run.ends:
                return
            run.begin_schedule(self._agree_on_window([], more=False))

    def _window(self, schedule: Schedule, batches: Iterator[Any]) -> Iterator[Any]:
        run = self._run
        run.begin_schedule(schedule)
        if not self._begun:
            self._begun = True
            self._begin(schedule)
            if self._shadow is None and schedule.least == 0 < schedule.total:
                batches = self._describe(schedule, batches)
        own = schedule.steps[run.rank]
        for index in range(schedule.total):
            batch, active = None, schedule.is_active(run.rank, index)
            if active:
                batch = self._next(batches, schedule, index)
                run.own += 1
                may_run_out = own < schedule.total or not run.ends
                if self._shadow is None and index == own - 1 and may_run_out:
                    self._last = fresh(batch)
            elif self._shadow is None:
                batch = fresh(self._last)
            run.step += 1
            self._report(run.step)
            if active or self._shadow is None:
                yield batch
            else:
                self._shadow()
        self._report(run.step + 1)

    def _report(self, done: int) -> None:
        """Show how many steps of this loop are complete."""
        run = self._run
        total = None
        if run.ends and run.schedule is not None:
            total = run.base + run.schedule.total - run.first
        step_reports.report(step_reports.BY_LOOP, done - run.first, total)

    def _next(self, batches: Iterator[Any], schedule: Schedule, index: int) -> Any:
        rank, steps = self._run.rank, schedule.steps[self._run.rank]
        try:
            batch = next(batches)
        except StopIteration:
            raise JoinError(
                f"rank {rank}'s loader ended after {index} batches, but its length is {steps}; fix its length, or pass"
                " lookahead=8 to Join"
            ) from None
        promised = schedule.samples(rank, index) if schedule.weighting == "samples" else None
        if promised is not None and (there := self._count(batch)) != promised:
            raise JoinError(
                f"batch {index} of rank {rank} has {there} samples, expected {promised}; pass lookahead=8 to Join if the"
                " loader cannot predict batch sizes"
            )
        return batch

    # -- a rank that never had a batch -----------------------------------------------------------

    def _describe(self, schedule: Schedule, batches: Iterator[Any]) -> Iterator[Any]:
        """Send a first batch from a rank that has batches to the ranks that have none.

        Zeros would do for most models, but some divide by a norm of their inputs, and zero times NaN is NaN.
        """
        run = self._run
        source = next(rank for rank, steps in enumerate(schedule.steps) if steps)
        text, first = "", None
        if run.rank == source:
            first = next(batches)
            text = described(first)
            batches = _chained(first, batches)
        text = exchange.broadcast_text(text, source, run.device, run.group)
        lacks = not schedule.steps[run.rank] and not self._has_example
        if not text:
            # Rare: the batch cannot be described. All ranks must agree whether to go on.
            told = exchange.gather([int(lacks)], 1, run.device, run.group)
            lacking = [str(rank) for rank, (each,) in enumerate(told) if each]
            if lacking:
                raise JoinError(
                    f"rank {', '.join(lacking)} has no batches, and the other ranks' batches hold more than tensors,"
                    " numbers and text; pass example=<a batch> to Join, to run in their place"
                )
            return batches
        batch = first if run.rank == source else zeros_like_described(text)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                exchange.broadcast_into(leaf, source, run.device, run.group)
        if lacks:
            self._last = batch
        return batches


@dataclass(slots=True)
class Alone:
    """The steps of a block that is turned off: each rank counts its own.

    Args:
        accumulation: the optimizer steps once in this many batches.
        step: the current step, from 0; -1 before the first.
        syncs: whether the optimizer steps in this step.
    """

    accumulation: int
    step: int = -1
    syncs: bool = True

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches."""
        first, batches = self.step + 1, iter(loader)
        batch = next(batches, self)
        while batch is not self:
            self.step += 1
            # Only an accumulation needs to know the last step in advance.
            following = next(batches, self) if self.accumulation > 1 else None
            self.syncs = following is self or (self.step + 1 - first) % self.accumulation == 0
            yield batch
            batch = following if self.accumulation > 1 else next(batches, self)


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def fresh(batch: Any) -> Any:
    """A copy that the loop's body may change: it may take entries out of a batch, or transform it in place."""
    return tree_map(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    try:
        return copy.deepcopy(leaf)
    except Exception:  # noqa: BLE001  # the user's class may raise anything; the body then gets the object itself
        return leaf


def described(batch: Any) -> str:
    """A batch's structure, shapes and dtypes as JSON; empty if it holds anything but tensors, numbers and text."""
    leaves, structure = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(t.layout is not torch.strided or t.is_quantized or t.is_meta for t in tensors):
        return ""
    try:
        shown = [
            {
                TENSOR: [str(leaf.dtype).removeprefix("torch."), *leaf.shape],
                "device": leaf.device.type,
            }
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        told = treespec_dumps(structure)
        # A tuple used as a key comes back as a list.
        if treespec_loads(told) != structure:
            return ""
        return json.dumps([told, shown])
    except (TypeError, ValueError, NotImplementedError):
        return ""


def zeros_like_described(text: str) -> Any:
    """A batch of zeros that fits the description."""
    structure, shown = json.loads(text)
    leaves = [
        torch.zeros(leaf[TENSOR][1:], dtype=getattr(torch, leaf[TENSOR][0]), device=leaf["device"])
        if isinstance(leaf, dict)
        else leaf
        for leaf in shown
    ]
    return tree_unflatten(leaves, treespec_loads(structure))

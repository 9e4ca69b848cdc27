"""Iterators over a script's loader that start where training continues: at the first batch, or partway through an epoch."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader

from . import loader_state, sample_order, samples
from .course import Course
from .loader_generators import generators_of, restore, states_of
from .loaders import is_loader, loaders_in, sampler_of, samplers_in
from .own_state import OwnState
from .rng import RandomState
from .sampler import Sampler


_log = logging.getLogger(__name__)

T = TypeVar("T")


class LoaderIterators:
    """Creates them.

    Args:
        course: where training continues.
        around_start: makes the context in which loaders of any kind start their worker processes.

    Attributes:
        ranks_before: the number of ranks of a loaded checkpoint, if it differs; None once the first iterator is created.
    """

    def __init__(
        self, course: Course, around_start: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._course = course
        self._around_start = around_start
        self.ranks_before: int | None = None

    def begin(self, loader: Iterable[T], epoch: int) -> Iterator[T]:
        """An iterator that starts at the first batch of an epoch."""
        self.ranks_before = None
        loaders = loaders_in(loader)
        samplers = samplers_in(loaders)
        for each in samplers:
            each.begin_at(epoch)
        sizes = sample_order.resized((), 0, _ranks_of(samplers)) if samplers else ()
        self._course.begin_at_first_batch(
            RandomState.now(), states_of(generators_of(loader)), sizes
        )
        return self._iterate(loader, loaders)

    def go_on(self, loader: Iterable[T], own: OwnState) -> Iterator[T]:
        """An iterator that starts after the batches that are done, with the random generators as they were there.

        Args:
            loader: the one whose iteration restarts.
            own: the rank's state at that place.
        """
        assert own.place.begun is not None
        own.place.begun.restore()
        restore(generators_of(loader), own.place.own_begun)
        loaders = loaders_in(loader)
        samplers = samplers_in(loaders)
        ranks_before, self.ranks_before = self.ranks_before, None
        if ranks_before is not None and not samplers:
            own = self._rescaled(own, ranks_before)
        if samplers:
            own = self._resized(own, _ranks_of(samplers))
        keeps_place: Any = loader if own.loader else None
        # A wrapper around a loader may take more than one of its batches for each of its own, or fetch some ahead.
        is_exact = any(each is sampler_of(loader) for each in samplers)
        for each in samplers:
            first = own.place.batch if is_exact and keeps_place is None else 0
            is_whole = own.place.sizes[-1][1] == each.num_ranks  # not shared within a smaller group
            each.begin_at(own.place.epoch, first, own.place.sizes if is_whole else None)
        if keeps_place is not None:
            keeps_place.load_state_dict(loader_state.restored(own.loader))
        iterator = self._iterate(loader, loaders)
        if own.place.ended and keeps_place is None:
            # To its end, where samplers draw once more. What follows the loop may have given the data set more samples.
            collections.deque(iterator, maxlen=0)
            iterator = iter(())
        else:
            for _ in range(0 if is_exact or keeps_place is not None else own.place.batch):
                next(iterator, None)
        own.random.restore()
        return iterator

    def _iterate(self, loader: Iterable[T], loaders: list[Any]) -> Iterator[T]:
        with_workers = [
            each for each in loaders if isinstance(each, DataLoader) and each.num_workers
        ]
        if with_workers and not is_loader(loader):
            return self._iterate_within(loader, with_workers)
        with self._starting_workers(with_workers):
            return iter(loader)

    def _iterate_within(self, given: Iterable[T], loaders: list[Any]) -> Iterator[T]:
        """Iterate over an object that holds loaders: it may not ask for their iterators until its first batch."""
        with self._starting_workers(loaders):
            iterator = iter(given)
            first = list(itertools.islice(iterator, 1))
        yield from first
        yield from iterator

    @contextmanager
    def _starting_workers(self, loaders: list[Any]) -> Generator[None, None, None]:
        """A context in which loaders start their worker processes."""
        with ExitStack() as stack:
            for loader in loaders:
                stack.enter_context(samples.drawn_alike(loader))
                sampler = sampler_of(loader)
                if isinstance(sampler, Sampler):
                    sampler.seeds_samples = True
                    stack.enter_context(samples.seeded(loader))
            stack.enter_context(self._around_start())
            yield

    def _resized(self, own: OwnState, ranks: int) -> OwnState:
        """After a checkpoint, the epoch may continue with another number of ranks."""
        # Checkpoints of earlier versions lack the sizes; there, the batch of a step always stayed the same.
        sizes = own.place.sizes or ((0, ranks),)
        if sizes[-1][1] != ranks:
            sizes = sample_order.resized(sizes, own.place.batch, ranks)
        self._course.place = replace(self._course.place, sizes=sizes)
        return replace(own, place=replace(own.place, sizes=sizes))

    def _rescaled(self, own: OwnState, ranks_before: int) -> OwnState:
        """After a checkpoint of another number of ranks: skip as many samples as were trained on."""
        now = dist.get_world_size() if dist.is_initialized() else 1
        batch, rest = divmod(own.place.batch * ranks_before, now)
        if rest and (now == 1 or dist.get_rank() == 0):
            _log.warning(
                "%d batches on each of %d ranks do not divide evenly among %d ranks: the last %d batches are trained on again",
                *(own.place.batch, ranks_before, now, rest),
            )
        self._course.place = replace(own.place, batch=batch)
        return replace(own, place=self._course.place)


def _ranks_of(samplers: Iterable[Sampler]) -> int:
    """How many ranks share an epoch's samples. Some samplers may divide theirs within a smaller group."""
    return max(each.num_ranks for each in samplers)

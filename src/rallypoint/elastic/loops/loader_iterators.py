"""Iterators over a script's loader that begin where training goes on: with the first batch, or in the midst of an epoch."""

from __future__ import annotations

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
    """Makes them.

    Args:
        course: where training goes on.
        around_start: a block in which loaders start their worker processes, of any kind.

    Attributes:
        ranks_before: of the checkpoint that was loaded, if there were another number of them; until the first iterator.
    """

    def __init__(
        self, course: Course, around_start: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._course = course
        self._around_start = around_start
        self.ranks_before: int | None = None

    def begin(self, loader: Iterable[T], epoch: int) -> Iterator[T]:
        """One that begins with the first batch of an epoch."""
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
        """One that begins behind the batches that are done, with the random generators of then.

        Args:
            loader: whose iteration begins anew.
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
        # What stands between a loader and its batches may take more than one for each, or fetch some ahead.
        is_exact = any(each is sampler_of(loader) for each in samplers)
        for each in samplers:
            first = own.place.batch if is_exact and keeps_place is None else 0
            is_whole = own.place.sizes[-1][1] == each.num_ranks  # not of a group of its own
            each.begin_at(own.place.epoch, first, own.place.sizes if is_whole else None)
        if keeps_place is not None:
            keeps_place.load_state_dict(loader_state.restored(own.loader))
        iterator = self._iterate(loader, loaders)
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
        """Of an object that holds loaders: it may ask for their iterators as late as with its first batch."""
        with self._starting_workers(loaders):
            iterator = iter(given)
            first = list(itertools.islice(iterator, 1))
        yield from first
        yield from iterator

    @contextmanager
    def _starting_workers(self, loaders: list[Any]) -> Generator[None, None, None]:
        """A block in which loaders start their worker processes."""
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
        """After a checkpoint, the epoch may go on with another number of ranks."""
        # Checkpoints of earlier versions do not tell them; there, the batch of a step stayed.
        sizes = own.place.sizes or ((0, ranks),)
        if sizes[-1][1] != ranks:
            sizes = sample_order.resized(sizes, own.place.batch, ranks)
        self._course.place = replace(self._course.place, sizes=sizes)
        return replace(own, place=replace(own.place, sizes=sizes))

    def _rescaled(self, own: OwnState, ranks_before: int) -> OwnState:
        """After a checkpoint of another number of ranks: as many samples are skipped as were trained on."""
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
    """How many ranks share an epoch's samples; some may belong to a group of its own."""
    return max(each.num_ranks for each in samplers)

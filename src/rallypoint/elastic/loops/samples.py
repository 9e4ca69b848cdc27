"""Random transforms in a loader's worker processes: what a sample draws depends on the sample alone.

A loader's workers draw from generators that carry on from sample to sample. Which worker of which rank reads a sample, and
what it has read before, changes after a loss. So with a :class:`.Sampler`, generators are seeded for each sample from the
sampler's seed, the epoch and the sample's index. Without one, workers that outlive an epoch (``persistent_workers``) are seeded
at the beginning of each.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from rallypoint.elastic import torch_private


class Sample(int):
    """The index of a sample, with the seed for its random numbers."""

    seed: int

    @classmethod
    def of(cls, index: int, seed: int, epoch: int) -> Sample:
        """A sample in an epoch.

        Args:
            index: within the dataset.
            seed: of the sampler.
            epoch: its number.
        """
        sample = cls(index)
        sample.seed = _mixed(_mixed(_mixed(seed) ^ epoch) ^ index)
        return sample


def _mixed(number: int) -> int:
    """The finalizer of SplitMix64 (Steele et al., 2014): neighboring numbers get unrelated seeds."""
    z = (number + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (1 << 64) - 1
    return z ^ (z >> 31)


def seed_for(sample: int) -> None:
    """Seed torch's, Python's and NumPy's generators for a sample; an index that is not a :class:`Sample` changes nothing."""
    if not isinstance(sample, Sample):
        return
    _seed_generators(sample.seed)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    # Not torch.manual_seed: that notes each seed for devices that are not in use yet.
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed & 0xFFFFFFFF)


class SeededDataset:
    """A map-style dataset that seeds the generators before each sample. Looks like the dataset that it wraps.

    If whole batches are read (``__getitems__``, or a loader with ``batch_size=None``), it seeds once per batch, for the batch's
    first sample.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "stands_for", dataset)

    @property  # type: ignore[misc]  # isinstance() is to see the dataset's class
    def __class__(self) -> Any:
        return type(self.stands_for)

    def __getitem__(self, index: int | list[int]) -> Any:
        if isinstance(index, list):
            return self._read(self.stands_for.__getitem__, index)
        seed_for(index)
        return self.stands_for[int(index)]

    def __getattr__(self, name: str) -> Any:
        found = getattr(object.__getattribute__(self, "stands_for"), name)
        if name != "__getitems__" or not found:
            return found

        return lambda indices: self._read(found, indices)

    @staticmethod
    def _read(read: Callable[[list[int]], Any], indices: Sequence[int]) -> Any:
        if indices:
            seed_for(indices[0])
        return read([int(each) for each in indices])

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stands_for, name, value)

    def __len__(self) -> int:
        return len(self.stands_for)

    def __reduce__(self) -> Any:
        return SeededDataset, (self.stands_for,)


@contextmanager
def seeded(loader: Any) -> Generator[None, None, None]:
    """Iterations of a ``DataLoader`` that start in this block have worker processes that seed each sample."""
    dataset = loader.dataset
    # The loader does not allow setting it, as running workers would not see the change; here it is set before they start.
    object.__setattr__(loader, "dataset", SeededDataset(dataset))
    try:
        yield
    finally:
        object.__setattr__(loader, "dataset", dataset)


@contextmanager
def drawn_alike(loader: DataLoader[Any]) -> Generator[None, None, None]:
    """A block in which iterating over a loader draws the same numbers, whether or not its workers are already running.

    With ``persistent_workers``, torch draws a seed for them when it starts them, so in a process that starts partway through the
    training, the epoch's samples would come in another order. The workers' own generators would carry on from the epoch before
    in one process, and begin with that seed in another.
    """
    if not loader.persistent_workers:
        yield
        return
    held, init = loader.generator, loader.worker_init_fn
    # Derived from the generator's state, without drawing from it.
    state = torch.get_rng_state() if held is None else held.get_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    seed = int.from_bytes(digest) >> 1
    if torch_private.has_workers(loader):
        with torch_private.sent_to_workers(loader, _Seeds(seed)):
            yield
        return
    loader.generator = torch.Generator().manual_seed(seed)
    loader.worker_init_fn = _SeededStart(init, seed)
    try:
        yield
    finally:
        loader.generator, loader.worker_init_fn = held, init


class _Seeds:
    """Seeds the generators of the worker process that receives it. Arrives there as None."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __reduce__(self) -> Any:
        return _seed_worker, (self._seed,)


class _SeededStart:
    """A ``worker_init_fn`` that seeds the generators after the script's own one, which runs only once."""

    def __init__(self, init: Callable[[int], object] | None, seed: int) -> None:
        self._init, self._seed = init, seed

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        _seed_worker(self._seed)


def _seed_worker(seed: int) -> None:
    worker = get_worker_info()
    assert worker is not None
    _seed_generators(_mixed(seed ^ worker.id))

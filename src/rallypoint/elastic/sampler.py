"""Batches of a map-style dataset that stay the same when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.utils.data import Sampler as TorchSampler

from . import sample_order


class Sampler(TorchSampler[list[int]]):
    """Gives each rank its part of each step's samples: no sample twice, none left out in an epoch.

    .. code-block:: python

        loader = DataLoader(dataset, batch_sampler=elastic.Sampler(len(dataset), batch_size=64))
        for epoch in session.epochs(10):
            for batch in session.batches(loader):
                ...

    Which samples belong to a step is a function of ``seed``, epoch and step alone, whatever the number of ranks. So a session
    continues on another number of ranks with the samples that are left. It skips what was done without fetching it.

    ``session.epochs`` and ``session.batches`` tell the sampler where to begin. In a loop of your own, call :meth:`begin_at`.

    Args:
        length: number of samples of the dataset.
        batch_size: samples of a step, over all ranks; the most it takes. The steps of an epoch are of nearly the same size: they
            differ by one sample at most, and so do the parts of the ranks.
        seed: of the order; the same on all ranks.
        shuffle: whether each epoch has another order.
        group: the ranks that share the samples; None: all ranks, or this process alone if there is no process group.

    Raises:
        ValueError: a number is too small, or a step has fewer samples than there are ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("length", length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"elastic.Sampler: {name} is {value}, expected a number from 1 on")
        self._length, self._batch_size = length, batch_size
        self._seed, self._shuffle = seed, shuffle
        self._group = group
        self._epoch = self._first = 0
        self._place()

    def begin_at(self, epoch: int, step: int = 0) -> None:
        """Where the next iteration begins.

        Args:
            epoch: its number.
            step: how many of its steps are done.
        """
        self._epoch, self._first = epoch, step

    def size_of(self, step: int) -> int:
        """How many samples a step of an epoch has over all ranks.

        Args:
            step: its number within the epoch.
        Returns:
            The number: to weigh the losses of unequal parts.
        """
        first, end = sample_order.bounds(self._length, self._batch_size, step)
        return end - first

    def __len__(self) -> int:
        return sample_order.steps_of(self._length, self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        samples = sample_order.order(self._length, self._seed, self._epoch, shuffle=self._shuffle)
        first, self._first = self._first, 0
        for step in range(first, len(self)):
            start, end = sample_order.bounds(self._length, self._batch_size, step)
            # Asked anew: the number of ranks may have changed.
            yield sample_order.share(samples[start:end], *self._place())

    def _place(self) -> tuple[int, int]:
        rank, size = 0, 1
        if dist.is_initialized():
            rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        smallest = self._length // len(self)
        if smallest < size:
            raise ValueError(
                f"elastic.Sampler: a step has {smallest} of {self._length} samples, fewer than there are ranks ({size}); give"
                " a batch_size of at least twice the number of ranks"
            )
        return rank, size

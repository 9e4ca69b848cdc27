"""Batches of a map-style dataset that stay the same when the number of ranks changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch.distributed as dist
from torch.utils.data import Sampler as TorchSampler

from rallypoint._core.whole_numbers import is_whole

from . import sample_order
from .samples import Sample


_log = logging.getLogger(__name__)

Keep = Literal["global", "local"]


class Sampler(TorchSampler[list[int]]):
    """Gives each rank its part of each step's samples, so that an epoch repeats no sample and leaves none out.

    .. code-block:: python

        loader = DataLoader(dataset, batch_sampler=elastic.Sampler(len(dataset), batch_size=64))
        for epoch in session.epochs(10):
            for batch in session.batches(loader):
                ...

    Which samples belong to a step depends only on ``seed``, epoch and step, whatever the number of ranks; with
    ``keep="local"``, also on the numbers of ranks that the epoch has had, which a session's checkpoints record. So a session
    continues on another number of ranks with the remaining samples. It skips what was done without fetching it.

    ``session.epochs`` and ``session.batches`` tell the sampler where to begin. In a loop of your own, call :meth:`begin_at`.

    Args:
        length: number of samples in the dataset.
        batch_size: at most this many samples per step, over all ranks; with ``keep="local"``, per rank. The steps of an epoch
            are of nearly the same size: they differ by one sample at most, and so do the ranks' parts.
        seed: of the order; the same on all ranks.
        shuffle: whether each epoch has a different order.
        group: the ranks that share the samples; None: all ranks, or this process alone if there is no process group.
        keep: which batch size stays the same when the number of ranks changes: ``"global"``, a step's, so training continues as
            before, or ``"local"``, a rank's, so memory and time per step stay the same.

    Raises:
        TypeError: ``length`` or ``batch_size`` is not a whole number.
        ValueError: a number is too small, ``keep`` is neither word, or a step has fewer samples than there are ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group: dist.ProcessGroup | None = None,
        keep: Keep = "global",
    ) -> None:
        if keep not in get_args(Keep):
            raise ValueError(f'elastic.Sampler: keep is {keep!r}, expected "global" or "local"')
        for name, value in (("length", length), ("batch_size", batch_size)):
            if not is_whole(value):
                hint = "; pass len(dataset)" if hasattr(value, "__len__") else ""
                raise TypeError(
                    f"elastic.Sampler: {name} is a {type(value).__name__}, expected a number{hint}"
                )
            if value < 1:
                raise ValueError(f"elastic.Sampler: {name} is {value}, expected at least 1")
        self._length, self._batch_size = length, batch_size
        self._seed, self._shuffle = seed, shuffle
        self._group = group
        self._is_local = keep == "local"
        self._epoch = self._first = 0
        self.seeds_samples = False  # a session's loader has worker processes
        _, size = self._place()
        self._sizes: tuple[tuple[int, int], ...] = ((0, size),)

    def begin_at(
        self, epoch: int, step: int = 0, sizes: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Set where the next iteration begins.

        Args:
            epoch: its number.
            step: how many of its steps are done.
            sizes: how many ranks have shared the samples in this epoch, and from which step on: ``[(0, 3), (40, 2)]``, if it is
                two now. Only ``keep="local"`` needs it. None: the current number throughout.
        Raises:
            ValueError: the sizes do not begin at step 0, or do not end with the current number of ranks.
        """
        now = self.num_ranks
        sizes = ((0, now),) if sizes is None else tuple(sizes)
        if not sizes or sizes[0][0] != 0 or sizes[-1][1] != now:
            raise ValueError(
                f"elastic.Sampler: sizes is {list(sizes)}, expected the first entry at step 0, and the present number of"
                f" ranks ({now}) in the last one"
            )
        self._epoch, self._first, self._sizes = epoch, step, sizes

    @property
    def num_ranks(self) -> int:
        """How many ranks share the samples."""
        _, size = self._place()
        return size

    def size_of(self, step: int) -> int:
        """How many samples a step of an epoch has over all ranks.

        Args:
            step: its number within the epoch.
        Returns:
            The number, for weighting the losses of unequal parts.
        """
        first, end = self._bounds(step)
        return end - first

    def __len__(self) -> int:
        if self._is_local:
            return sample_order.local_length(self._length, self._batch_size, self._sizes)
        return sample_order.steps_of(self._length, self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        samples = sample_order.order(self._length, self._seed, self._epoch, shuffle=self._shuffle)
        first, self._first = self._first, 0
        for step in range(first, len(self)):
            start, end = self._bounds(step)
            # Asked in each step: a spare may have become another rank.
            share = sample_order.share(samples[start:end], *self._place())
            if self.seeds_samples:
                share = [Sample.of(each, self._seed, self._epoch) for each in share]
            yield share
        _, left = self._bounds(len(self) - 1) if len(self) else (0, 0)
        if left < self._length:
            _log.warning(
                "elastic.Sampler: the last %d samples of epoch %d are left out: there are fewer of them than ranks",
                self._length - left,
                self._epoch,
            )

    def _bounds(self, step: int) -> tuple[int, int]:
        if self._is_local:
            return sample_order.local_bounds(self._length, self._batch_size, self._sizes, step)
        return sample_order.bounds(self._length, self._batch_size, step)

    def _place(self) -> tuple[int, int]:
        rank, size = 0, 1
        if dist.is_initialized():
            rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self._is_local:
            if self._length < size:
                raise ValueError(
                    f"elastic.Sampler: the dataset has {self._length} samples, fewer than there are ranks ({size})"
                )
            return rank, size
        smallest = self._length // len(self)
        if smallest < size:
            raise ValueError(
                f"elastic.Sampler: a step has {smallest} of {self._length} samples, fewer than there are ranks ({size}); give"
                " a batch_size of at least twice the number of ranks"
            )
        return rank, size

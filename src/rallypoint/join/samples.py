"""The number of samples in a batch, and in a loader's batches before it yields them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils import data

from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError

from .schedule import Inputs
from .torch_private import tree_leaves


CountSamples = Callable[[Any], int]

_EXPECTED = "expected a number of steps, the samples of each step, or a loader with a length"


def first_dim(batch: Any) -> int:
    """The first dimension of a batch's first tensor; without tensors, the length of the batch, or of a mapping's first value.

    Raises:
        ConfigError: the batch has neither a tensor nor a length.
    """
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return first.shape[0]  # the fast path, for most batches
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    if isinstance(batch, Mapping):
        # A mapping's length is its number of keys. Some mappings (UserDict) are not trees to torch.
        for value in batch.values():
            if isinstance(value, Sized) and not isinstance(value, str | bytes):
                return first_dim(value)
    elif isinstance(batch, Sized):
        return len(batch)
    raise ConfigError(
        "samples",
        type(batch).__name__,
        "expected a batch with a tensor or a length, to count its samples",
        "pass samples=<function of the batch> to Join",
    )


def counting(samples: CountSamples) -> CountSamples:
    """``samples`` with its result checked."""

    def count(batch: Any) -> int:
        found: Any = samples(batch)  # Any: the user's function may return anything
        if not is_whole(found) or found < 0:
            shown = "None" if found is None else found
            raise ConfigError(
                "samples", shown, "expected a function that returns a whole number, 0 or more"
            )
        return int(found)

    return count


def inputs_of(steps: Any, count: CountSamples = first_dim) -> Inputs:
    """This rank's inputs, from the argument ``steps`` of :class:`~rallypoint.join.Join`.

    Args:
        steps: the argument.
        count: returns the number of samples in a batch.

    Raises:
        ConfigError: ``steps`` is not a number, a list of numbers, or a loader with a length.
    """
    if isinstance(steps, bool) or (_is_number(steps) and not _is_size(steps)):
        raise ConfigError("steps", steps, "expected a number of steps, 0 or more")
    if _is_size(steps):
        return Inputs.of_steps(int(steps))
    if isinstance(steps, str | bytes | Mapping):
        raise ConfigError("steps", steps, _EXPECTED, "for example len(loader)")
    if isinstance(steps, Sequence) and all(_is_size(each) for each in steps):
        return Inputs.of_sizes(map(int, steps))
    if isinstance(steps, Sequence) and all(map(_is_number, steps)):
        raise ConfigError(
            "steps", steps, "expected whole numbers, 0 or more: the samples of each step"
        )
    found = inputs_of_loader(steps, count)
    if found is None:
        raise ConfigError(
            "steps",
            type(steps).__name__,
            _EXPECTED,
            "for a loader without a length, use lookahead=8 and join.batches(loader)",
        )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, float) or is_whole(value)


def _is_size(value: Any) -> bool:
    return is_whole(value) and value >= 0


def inputs_of_loader(loader: Iterable[Any] | Sized, count: CountSamples) -> Inputs | None:
    """A loader's inputs as far as they are known in advance; None if it has no length."""
    if isinstance(loader, data.DataLoader):
        return _of_data_loader(loader, count)
    if isinstance(loader, Sequence):  # a list of batches
        return Inputs.of_sizes(count(batch) for batch in loader)
    if isinstance(loader, Sized):
        return Inputs.of_steps(len(loader))
    return None


def _of_data_loader(loader: data.DataLoader[Any], count: CountSamples) -> Inputs | None:
    if isinstance(loader.dataset, data.IterableDataset):
        return None  # its length is an estimate
    try:
        steps = len(loader)
    except TypeError:
        return None  # its sampler has no length
    batches, size = loader.batch_sampler, loader.batch_size
    # A custom collate function may drop samples, and the user's count may differ; torch's own function does neither.
    plain = type(batches) is data.BatchSampler and size is not None and count is first_dim
    if not plain or loader.collate_fn is not data.default_collate or not steps:
        return Inputs.of_steps(steps)
    assert size is not None
    last = size if loader.drop_last else len(loader.sampler) - size * (steps - 1)  # type: ignore[arg-type]  # len(loader) needed it
    return Inputs.of_sizes([size] * (steps - 1) + [last])

"""How many samples batches have: of one batch, and of a loader before it is asked for any."""

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
    """The length of the first dimension of a batch's first tensor; of one without tensors, its own length.

    Raises:
        ConfigError: it has neither.
    """
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return first.shape[0]  # most batches; it is asked for in each step
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    if isinstance(batch, Sized):
        return len(batch)
    raise ConfigError(
        "samples",
        type(batch).__name__,
        "a batch with neither a tensor nor a length: nobody can tell how many samples it has",
        "give Join samples=a function of the batch",
    )


def counting(samples: CountSamples) -> CountSamples:
    """The same function, of which the answer is looked at."""

    def count(batch: Any) -> int:
        found: Any = samples(batch)  # Any: whatever the user's function gives
        if not is_whole(found) or found < 0:
            shown = "None" if found is None else found
            raise ConfigError(
                "samples", shown, "expected a function that gives a whole number, 0 or more"
            )
        return int(found)

    return count


def inputs_of(steps: Any) -> Inputs:
    """What ``steps`` of :class:`~rallypoint.join.Join` says this rank has.

    Raises:
        ConfigError: it is no number, list of numbers, or loader with a length.
    """
    if isinstance(steps, bool) or (_is_number(steps) and not _is_size(steps)):
        raise ConfigError("steps", steps, "expected a number of steps, 0 or more")
    if _is_size(steps):
        return Inputs.of_steps(int(steps))
    if isinstance(steps, str | bytes | Mapping):
        raise ConfigError("steps", steps, _EXPECTED, "len(loader), for one")
    if isinstance(steps, Sequence) and all(_is_size(each) for each in steps):
        return Inputs.of_sizes(map(int, steps))
    if isinstance(steps, Sequence) and all(map(_is_number, steps)):
        raise ConfigError(
            "steps", steps, "expected whole numbers, 0 or more: the samples of each step"
        )
    found = inputs_of_loader(steps, first_dim)
    if found is None:
        raise ConfigError(
            "steps",
            type(steps).__name__,
            _EXPECTED,
            "for a loader without one use lookahead=8 and join.batches(loader)",
        )
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, float) or is_whole(value)


def _is_size(value: Any) -> bool:
    return is_whole(value) and value >= 0


def inputs_of_loader(loader: Iterable[Any] | Sized, count: CountSamples) -> Inputs | None:
    """What a loader will give, as far as it can be known beforehand; None if it has no length."""
    if isinstance(loader, data.DataLoader):
        return _of_data_loader(loader)
    if isinstance(loader, Sequence):  # batches that are all there
        return Inputs.of_sizes(count(batch) for batch in loader)
    if isinstance(loader, Sized):
        return Inputs.of_steps(len(loader))
    return None


def _of_data_loader(loader: data.DataLoader[Any]) -> Inputs | None:
    if isinstance(loader.dataset, data.IterableDataset):
        return None  # its length is a guess
    try:
        steps = len(loader)
    except TypeError:
        return None  # its sampler has none
    batches, size = loader.batch_sampler, loader.batch_size
    # A collate function may drop samples; torch's own does not.
    plain = type(batches) is data.BatchSampler and size is not None
    if not plain or loader.collate_fn is not data.default_collate or not steps:
        return Inputs.of_steps(steps)
    assert size is not None
    last = size if loader.drop_last else len(loader.sampler) - size * (steps - 1)  # type: ignore[arg-type]  # len(loader) has asked it
    return Inputs.of_sizes([size] * (steps - 1) + [last])

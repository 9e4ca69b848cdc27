"""The loaders within what a script gives to ``session.batches``: a progress bar around one, or an object with two of them.

Such an object decides when its loaders start, and in which order it takes their batches. But the session decides where they
start: a :class:`.Sampler` has an order for each epoch, and a loader's own generators continue where another process left them.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from rallypoint.elastic import torch_private

from .sampler import Sampler


# How deep an object is searched, and how many objects at most.
_DEPTH = 5
_MOST = 1000
# These contain no loader of the script's, and they may be large.
_CLOSED = (
    *(str, bytes, bytearray, int, float, complex, type, types.ModuleType, types.FunctionType),
    *(torch.Tensor, torch.nn.Module, torch.Generator, Dataset),
)


def loaders_in(given: Any) -> list[Any]:
    """The loaders that an object takes its batches from: itself, or those found in its attributes and in what these hold.

    Args:
        given: any iterable.
    Returns:
        ``DataLoader`` objects, and others that have a sampler; empty if there are none.
    """
    return [each for each in _within(given) if is_loader(each)]


def is_loader(each: Any) -> bool:
    """Whether an object reads samples in the order of a sampler."""
    return isinstance(each, DataLoader) or any(
        # Not getattr: that would run code of objects that may have nothing to do with loaders.
        inspect.getattr_static(each, name, None) is not None
        for name in ("batch_sampler", "sampler", "generator")
    )


def sampler_of(loader: Any) -> Any:
    """What gives a loader the indices of each batch: its ``batch_sampler``, or with ``batch_size=None`` its ``sampler``."""
    found = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None) if found is None else found


def samplers_in(loaders: Iterable[Any]) -> list[Sampler]:
    """The samplers of these loaders that have an order for each epoch."""
    found: list[Sampler] = []
    for each in loaders:
        for _ in range(_DEPTH):  # one may wrap another
            each = sampler_of(each)
            if isinstance(each, Sampler) and not any(each is other for other in found):
                found.append(each)
    return found


def takes_batches_for_samples(given: Any) -> bool:
    """Whether a loader makes batches out of an :class:`.Sampler`'s batches: it was passed as ``sampler=``."""
    batch_samplers = (getattr(each, "batch_sampler", None) for each in loaders_in(given))
    return any(
        type(each) is BatchSampler and isinstance(each.sampler, Sampler) for each in batch_samplers
    )


def begun_in(given: Any) -> str:
    """Why a loader has begun too early: an iterator such as ``enumerate(loader)`` has already asked for its batches.

    Returns:
        What a session can no longer set in it; empty if there is nothing to set.
    """
    for each in _within(given):
        sampler = torch_private.sampler_of_iterator(each)
        if sampler is None:
            continue
        if isinstance(sampler, Sampler):
            return "elastic.Sampler"
        own = [sampler, getattr(sampler, "sampler", None)]
        generators = (getattr(owner, "generator", None) for owner in own)
        if any(isinstance(it, torch.Generator) for it in generators):
            return "generator"
    return ""


def _within(given: Any) -> Iterator[Any]:
    """An object, and what it holds, but nothing that a loader holds."""
    seen = {id(given)}
    level = [given]
    for _ in range(_DEPTH):
        deeper: list[Any] = []
        for each in level:
            yield each
            if not is_loader(each):
                deeper += _parts(each)
        level = []
        for each in deeper:
            if id(each) not in seen and not isinstance(each, _CLOSED) and len(seen) < _MOST:
                seen.add(id(each))
                level.append(each)


def _parts(each: Any) -> Iterable[Any]:
    if torch_private.sampler_of_iterator(each) is not None:
        return ()
    if isinstance(each, types.GeneratorType):
        parts: Iterable[Any] = inspect.getgeneratorlocals(each).values()
    elif type(each) is dict:
        parts = each.values()
    elif type(each) in (list, tuple, set, frozenset):
        parts = each
    elif isinstance(each, types.MethodType):
        parts = (each.__self__,)
    elif isinstance(each, Iterator) and type(each).__module__ in ("builtins", "itertools"):
        parts = gc.get_referents(each)  # enumerate, zip, islice: what they take from
    else:
        parts = getattr(each, "__dict__", {}).values()
    return list(itertools.islice(parts, _MOST))

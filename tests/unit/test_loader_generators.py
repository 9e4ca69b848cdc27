"""Loaders' own generators: a process that joins in the middle of the training finds them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from rallypoint.elastic.loops.loader_generators import (
    LoaderGenerators,
    Seen,
    generators_of,
    restore,
    states_of,
)
from rallypoint.elastic.loops.own_state import OwnState, Place
from rallypoint.elastic.loops.rng import RandomState


Loader = DataLoader[int]
DATA = list(range(20))


def loader(generator: torch.Generator) -> Loader:
    return DataLoader(DATA, batch_size=5, shuffle=True, generator=generator)  # type: ignore[arg-type]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Each returns a script's loaders for an epoch, in a process of its own.
def kept_for_all_epochs() -> Callable[[int], Sequence[Loader]]:
    loaders = [loader(seeded(1)), loader(seeded(2))]
    return lambda _: loaders


def one_for_both() -> Callable[[int], Sequence[Loader]]:
    one = loader(seeded(1))
    return lambda _: [one, one]


def of_a_sampler() -> Callable[[int], Sequence[Loader]]:
    own = RandomSampler(DATA, replacement=True, generator=seeded(3))
    loaders = [DataLoader(DATA, sampler=own), loader(seeded(4))]  # type: ignore[arg-type]
    return lambda _: loaders


def new_in_each_epoch() -> Callable[[int], Sequence[Loader]]:
    return lambda epoch: [loader(seeded(epoch)), loader(seeded(100 + epoch))]


def one_kept_one_new() -> Callable[[int], Sequence[Loader]]:
    kept = loader(seeded(1))
    return lambda epoch: [kept, loader(seeded(epoch))]


class Counting:
    """As in frameworks: it counts its iterations, its order depends on the count, and its generator is made only then."""

    def __init__(self, seed: int) -> None:
        self.seed, self.sampler = seed, SequentialSampler(DATA)
        self.iteration = 0
        self.generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.generator = seeded(self.seed + self.iteration)
        yield from loader(self.generator)
        self.iteration += 1


def counted() -> Callable[[int], Sequence[Loader]]:
    loaders: Any = [Counting(10), Counting(20)]
    return lambda _: loaders


def counted_twice() -> Callable[[int], Sequence[Loader]]:
    one: Any = Counting(10)
    return lambda _: [one, one]


KINDS = [
    *(kept_for_all_epochs, one_for_both, of_a_sampler, new_in_each_epoch, one_kept_one_new),
    *(counted, counted_twice),
]


def drawn(each: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in each]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epoch", range(4))
@pytest.mark.parametrize("loop", range(2))
@pytest.mark.parametrize("begun", [False, True])
def test_a_newcomer_draws_what_the_lost_one_would_have(
    kind: Callable[[], Callable[[int], Sequence[Loader]]], epoch: int, loop: int, begun: bool
) -> None:
    """It starts before an epoch's loop, or within it."""
    first, told, script = LoaderGenerators(), (), kind()
    expected = []
    at, begins, states = (), False, ()
    for number in range(5):
        for index, each in enumerate(script(number)):
            if (number, index) == (epoch, loop) and not begun:
                at, begins = told, True
            told = first.meet(told, index, each)
            if (number, index) == (epoch, loop) and begun:
                at, begins, states = told, True, states_of(generators_of(each))
            batches = drawn(each)
            if begins:
                expected.append(batches)
            told = first.leave(told, each)
    place = Place(epoch, loop=loop, own_begun=states, seen=at)
    random = RandomState.now()
    place = OwnState.unpack(OwnState(0, place, random).pack()).place
    found = []
    newcomer, told, script = LoaderGenerators(), place.seen, kind()
    for number in range(epoch, 5):
        for index, each in enumerate(script(number)):
            told = newcomer.meet(told, index, each)
            if number == epoch and index < loop:
                continue
            if begun and (number, index) == (epoch, loop):
                restore(generators_of(each), place.own_begun)
            found.append(drawn(each))
            told = newcomer.leave(told, each)
    assert found == expected


def test_no_more_is_told_than_there_is() -> None:
    script, it = new_in_each_epoch(), LoaderGenerators()
    told: tuple[Seen, ...] = ()
    for epoch in range(10):
        for index, each in enumerate(script(epoch)):
            told = it.leave(it.meet(told, index, each), each)
    assert [each.stays for each in told] == [False, False]


def test_the_generator_that_all_share_is_not_a_loaders_own() -> None:
    assert generators_of(loader(torch.default_generator)) == []
    assert generators_of([1, 2]) == []

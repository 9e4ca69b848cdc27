"""Which loaders a script's batches come from, whatever wraps them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from rallypoint import elastic
from rallypoint.elastic.loops.loaders import (
    begun_in,
    loaders_in,
    samplers_in,
    takes_batches_for_samples,
)


DATA: Any = list(range(8))


class Holder:
    def __init__(self, *held: Any, **more: Any) -> None:
        self.held, self.more = held, more

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(*self.held)

    @property
    def of_the_users(self) -> Any:
        raise RuntimeError("a search for loaders runs no code of the script's")

    def moved(self, batch: Any) -> Any:
        return batch


def moved(loader: Any) -> Iterator[Any]:
    yield from loader


AROUND: list[Callable[[Any], Any]] = [
    lambda loader: loader,
    lambda loader: [loader],
    lambda loader: {"train": loader},
    Holder,
    lambda loader: Holder(Holder(loader), loader),
    lambda loader: Holder(x={"y": (loader,)}),
    moved,
    lambda loader: moved(Holder(loader)),
    lambda loader: map(Holder(loader).moved, Holder(1)),
    lambda loader: itertools.islice(moved(loader), 3),
]


@pytest.mark.parametrize("around", AROUND)
def test_a_loader_is_found(around: Callable[[Any], Any]) -> None:
    loader = DataLoader(DATA)
    assert loaders_in(around(loader)) == [loader]
    assert begun_in(around(loader)) == ""


def test_two_are_found_once_each() -> None:
    one, two = DataLoader(DATA), DataLoader(DATA)
    assert loaders_in(Holder([one, two], again=one)) == [one, two]


class Deep:
    def __init__(self, depth: int) -> None:
        self.next = Deep(depth - 1) if depth else DataLoader(DATA)


@pytest.mark.parametrize(
    "given",
    [
        [torch.ones(2), torch.zeros(2)],
        [["a text"], {"x": 1}],
        range(10**9),
        itertools.count(),
        Deep(20),
        torch.nn.Linear(1, 1),
        DataLoader,
    ],
)
def test_where_none_is_nothing_is_found(given: Any) -> None:
    assert loaders_in(given) == []
    assert samplers_in(loaders_in(given)) == []
    assert begun_in(given) == ""


def test_a_ring_of_objects_and_a_large_one_come_to_an_end() -> None:
    ring = Holder()
    ring.more["itself"] = ring
    assert loaders_in(ring) == []
    assert loaders_in([Holder(each) for each in range(10**5)]) == []


def test_a_sampler_is_found_within_others() -> None:
    sampler = elastic.Sampler(len(DATA), 4)
    assert samplers_in([DataLoader(DATA, batch_sampler=sampler)]) == [sampler]
    around = BatchSampler(sampler, 1, drop_last=False)
    assert samplers_in([DataLoader(DATA, batch_sampler=around)]) == [sampler]
    assert samplers_in([DataLoader(DATA, batch_size=2)]) == []


BEGUN: list[Callable[[Any], Any]] = [
    iter,
    enumerate,
    lambda loader: zip([1], loader, strict=False),
    lambda loader: map(str, loader),
    lambda loader: itertools.islice(loader, 2),
    lambda loader: (each for each in loader),
    lambda loader: Holder(iter(loader)),
]


@pytest.mark.parametrize("begin", BEGUN)
def test_one_that_has_begun_is_seen_if_its_order_is_the_sessions_to_say(
    begin: Callable[[Any], Any],
) -> None:
    own = torch.Generator()
    ours = DataLoader(DATA, batch_sampler=elastic.Sampler(len(DATA), 4))
    assert begun_in(begin(ours)) == "elastic.Sampler"
    assert begun_in(begin(DataLoader(DATA, shuffle=True, generator=own))) == "generator"
    assert begun_in(begin(DataLoader(DATA, shuffle=True))) == ""
    assert begun_in(begin(DataLoader(DATA, sampler=SequentialSampler(DATA)))) == ""


def test_a_sampler_of_batches_is_no_sampler_of_samples() -> None:
    ours = elastic.Sampler(len(DATA), 2)
    assert takes_batches_for_samples(DataLoader(DATA, batch_size=2, sampler=ours))
    assert not takes_batches_for_samples(DataLoader(DATA, batch_sampler=ours))
    assert not takes_batches_for_samples(DataLoader(DATA, batch_size=None, sampler=ours))

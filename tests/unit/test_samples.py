"""What a sample draws depends only on the sample."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from rallypoint import elastic
from rallypoint.elastic.loops import samples
from rallypoint.elastic.loops.samples import Sample, SeededDataset


class Noisy(Dataset[list[float]]):
    """Each sample is its index and draws from three generators."""

    opened = False

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        assert type(index) is int
        return [index, random.random(), torch.rand(1).item(), np.random.rand()]


def read(
    data: Dataset[list[float]], epoch: int, workers: int, batch: int, seed: int = 3
) -> list[list[float]]:
    """All samples as a session's loader reads them, in the order of their indices."""
    sampler = elastic.Sampler(24, batch, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    sampler.begin_at(epoch)
    sampler.seeds_samples = True
    with samples.seeded(loader):
        iterator = iter(loader)
    assert loader.dataset is data
    found = [
        [each[row].item() for each in columns]
        for columns in iterator
        for row in range(len(columns[0]))
    ]
    return sorted(found)


def test_whoever_reads_a_sample_gets_the_same() -> None:
    expected = read(Noisy(), 1, workers=1, batch=4)
    assert read(Noisy(), 1, workers=2, batch=6) == expected
    draws = [draw for _, *each in expected for draw in each]
    assert len(set(draws)) == len(draws), "samples differ, and generators do"


def test_epochs_and_seeds_differ() -> None:
    one, other, third = (
        read(Noisy(), *each[:1], workers=2, batch=4, seed=each[1])
        for each in ((0, 3), (1, 3), (0, 4))
    )
    for pair in ((one, other), (one, third), (other, third)):
        assert all(a[0] == b[0] and a[1:] != b[1:] for a, b in zip(*pair, strict=True))


def test_a_dataset_that_reads_whole_batches_is_seeded_for_each() -> None:
    data = Subset(Noisy(), range(24))
    assert read(data, 0, workers=1, batch=4) == read(data, 0, workers=2, batch=4)


class Rows(Noisy):
    """Reads a list of indices at once."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([super(Rows, self).__getitem__(each) for each in index])


def test_a_loader_without_batches_of_its_own_is_seeded_for_each() -> None:
    def rows(workers: int) -> list[list[float]]:
        sampler = elastic.Sampler(24, 4)
        loader = DataLoader(Rows(), sampler=sampler, batch_size=None, num_workers=workers)
        with elastic.session(torch.nn.Linear(1, 1)) as session:
            return [
                row
                for _ in session.epochs(2)
                for x in session.batches(loader)
                for row in x.tolist()
            ]

    found = rows(1)
    assert found == rows(2)
    assert sorted(row[0] for row in found[:24]) == sorted(range(24))
    assert [row[0] for row in found[:24]] != [row[0] for row in found[24:]]
    assert found[0][1:] != found[1][1:]


def test_it_looks_like_the_dataset_that_it_stands_for() -> None:
    data = Noisy()
    stand_in = SeededDataset(data)
    assert isinstance(stand_in, Noisy) and len(stand_in) == 24
    stand_in.opened = True
    assert data.opened
    with pytest.raises(AttributeError):
        _ = stand_in.nothing
    again = pickle.loads(pickle.dumps(stand_in))
    assert type(again) is SeededDataset and again.opened


def test_an_index_travels_with_its_seed() -> None:
    sample = Sample.of(7, 0, 0)
    again = pickle.loads(pickle.dumps(sample))
    assert (again, again.seed, type(again)) == (7, sample.seed, Sample)
    state = random.getstate()
    samples.seed_for(7)
    assert random.getstate() == state, "a plain index changes nothing"


def init_a_worker(worker: int) -> None:
    Noisy.opened = not Noisy.opened  # only once in a worker
    np.random.seed(worker)


class Drawn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[list[object]]:
        for _ in range(3):
            yield [Noisy.opened, random.random(), torch.rand(1).item(), np.random.rand()]


@pytest.mark.filterwarnings("ignore")  # fork with threads
@pytest.mark.parametrize("data", [Noisy(), Drawn()])
def test_workers_that_outlive_an_epoch_draw_as_those_that_start_with_it(data: Any) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(
            data, None, num_workers=2, persistent_workers=True, worker_init_fn=init_a_worker
        )

    def epoch(of: DataLoader[Any], number: int) -> list[Any]:
        torch.manual_seed(number)
        with samples.drawn_alike(of):
            iterator = iter(of)
        return list(iterator)

    kept = loader()
    first, second = (epoch(kept, number) for number in range(2))
    assert epoch(loader(), 1) == second
    draws = [draw for _, *each in first + second for draw in each]
    assert len(set(draws)) == len(draws), "epochs and workers differ, and generators do"
    assert kept.worker_init_fn is init_a_worker
    assert list(kept) != second, "seeded for one iteration"

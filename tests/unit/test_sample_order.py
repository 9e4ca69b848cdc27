"""Which samples belong to which step: none twice, none left out, whatever happens to the number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from rallypoint import elastic
from rallypoint.elastic import sample_order


@given(
    length=st.integers(1, 300),
    batch_size=st.integers(1, 80),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 50),
    shuffle=st.booleans(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=400),
)
def test_each_sample_comes_once_though_the_number_of_ranks_changes(
    length: int, batch_size: int, seed: int, epoch: int, shuffle: bool, sizes: list[int]
) -> None:
    order = sample_order.order(length, seed, epoch, shuffle=shuffle)
    assert order == sample_order.order(length, seed, epoch, shuffle=shuffle)
    seen: list[int] = []
    lengths = set()
    for step in range(sample_order.steps_of(length, batch_size)):
        first, end = sample_order.bounds(length, batch_size, step)
        size = sizes[step % len(sizes)]  # another number of ranks in each step
        parts = [sample_order.share(order[first:end], rank, size) for rank in range(size)]
        # The step's samples are the same for every number of ranks.
        assert sorted(each for part in parts for each in part) == sorted(order[first:end])
        counts = {len(part) for part in parts}
        assert max(counts) - min(counts) <= 1
        if end - first >= size:
            assert min(counts) >= 1
        seen += order[first:end]
        lengths.add(end - first)
    assert sorted(seen) == list(range(length))
    assert max(lengths) <= batch_size
    assert max(lengths) - min(lengths) <= 1


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        tuple(sample_order.order(50, seed, epoch, shuffle=True))
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)


@given(length=st.integers(1, 200), batch_size=st.integers(1, 50), data=st.data())
def test_an_iteration_can_begin_at_any_step(
    length: int, batch_size: int, data: st.DataObject
) -> None:
    sampler = elastic.Sampler(length, batch_size, seed=3)
    sampler.begin_at(2)
    whole = list(sampler)
    assert len(whole) == len(sampler)
    assert [len(each) for each in whole] == [sampler.size_of(step) for step in range(len(sampler))]
    step = data.draw(st.integers(0, len(sampler)))
    sampler.begin_at(2, step)
    assert list(sampler) == whole[step:]
    # Only the first iteration is a part.
    assert list(sampler) == whole


def test_it_is_a_batch_sampler() -> None:
    sampler = elastic.Sampler(10, 4, shuffle=False)
    loader = DataLoader(range(10), batch_sampler=sampler)  # type: ignore[arg-type]
    assert len(loader) == 3
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize(("length", "batch_size"), [(0, 4), (4, 0), (-1, 1)])
def test_wrong_numbers_are_told(length: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="expected a number from 1 on"):
        elastic.Sampler(length, batch_size)

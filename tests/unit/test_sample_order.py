"""Which samples belong to which step: none twice and none omitted, however the number of ranks changes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from rallypoint import elastic
from rallypoint.elastic.loops import sample_order


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
        size = sizes[step % len(sizes)]  # a different number of ranks in each step
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


@given(
    length=st.integers(1, 300),
    batch_size=st.integers(1, 20),
    changes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
)
def test_each_sample_comes_once_if_the_batch_of_a_rank_stays(
    length: int, batch_size: int, changes: list[tuple[int, int]]
) -> None:
    sizes: tuple[tuple[int, int], ...] = ()
    seen: list[int] = []
    step = 0
    for number, (steps, size) in enumerate(changes):
        sizes = sample_order.resized(sizes, step, size)
        count = sample_order.local_length(length, batch_size, sizes)
        assert count >= step
        is_last = number == len(changes) - 1
        for each in range(step, count if is_last else min(count, step + steps)):
            first, end = sample_order.local_bounds(length, batch_size, sizes, each)
            assert first == len(seen)
            # No rank is without a sample, and none has more than its batch, except where the batch is one sample.
            assert size <= end - first
            assert end - first <= batch_size * size or (batch_size == 1 and end - first < 2 * size)
            seen += range(first, end)
            step = each + 1
    left = range(len(seen), length)
    assert len(left) < changes[-1][1], "what is left out is less than one sample for each rank"
    assert sample_order.local_bounds(length, batch_size, sizes, step) == (len(seen), length)


@given(
    length=st.integers(20, 300),
    batch_size=st.integers(1, 20),
    steps=st.integers(0, 15),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_what_was_done_does_not_depend_on_what_comes(
    length: int, batch_size: int, steps: int, sizes: tuple[int, int]
) -> None:
    before = sample_order.resized((), 0, sizes[0])
    steps = min(steps, sample_order.local_length(length, batch_size, before))
    now = sample_order.resized(before, steps, sizes[1])
    for step in range(steps):
        assert sample_order.local_bounds(
            length, batch_size, now, step
        ) == sample_order.local_bounds(length, batch_size, before, step)


def test_a_rank_s_batch_stays_within_an_epoch_of_several_sizes() -> None:
    sampler = elastic.Sampler(60, 5, shuffle=False, keep="local")
    assert len(sampler) == 12
    # 2 ranks x 5 samples for 3 steps, then this rank alone.
    sampler.begin_at(0, 3, [(0, 2), (3, 1)])
    assert len(sampler) == 3 + 6
    assert [sampler.size_of(step) for step in range(9)] == [10] * 3 + [5] * 6
    assert [each for part in sampler for each in part] == list(range(30, 60))


def test_a_growth_may_leave_out_fewer_samples_than_ranks_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert sample_order.local_length(7, 2, [(0, 1), (3, 3)]) == 3
    assert sample_order.local_length(7, 2, [(0, 1), (2, 3)]) == 3
    sampler = elastic.Sampler(7, 2, keep="local")
    sampler._sizes = ((0, 1), (3, 3))
    assert len(list(sampler)) == 3
    assert "the last 2 samples of epoch 0 are left out" in caplog.text


@pytest.mark.parametrize("sizes", [[], [(1, 1)], [(0, 2)]])
def test_sizes_that_make_no_sense_are_told(sizes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="present number of ranks"):
        elastic.Sampler(8, 2, keep="local").begin_at(0, 0, sizes)


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
    # Only the first iteration is partial.
    assert list(sampler) == whole


def test_it_is_a_batch_sampler() -> None:
    sampler = elastic.Sampler(10, 4, shuffle=False)
    loader = DataLoader(range(10), batch_sampler=sampler)  # type: ignore[arg-type]
    assert len(loader) == 3
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_a_data_set_is_no_length() -> None:
    with pytest.raises(
        TypeError, match=r"length is a list, expected a number; pass len\(dataset\)"
    ):
        elastic.Sampler([1, 2, 3], 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch_size is a float, expected a number$"):
        elastic.Sampler(3, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "batch_size"), [(0, 4), (4, 0), (-1, 1)])
def test_wrong_numbers_are_told(length: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        elastic.Sampler(length, batch_size)
    with pytest.raises(ValueError, match='keep is .both., expected "global" or "local"'):
        elastic.Sampler(4, 4, keep="both")  # type: ignore[arg-type]

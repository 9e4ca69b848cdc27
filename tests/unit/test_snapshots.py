"""Snapshots of sharded state: when they are taken, which one counts, and memory that is torn or damaged."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rallypoint.elastic.checksum import checksum
from rallypoint.elastic.loops.own_state import OwnState, Place
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.recovery import local_state
from rallypoint.elastic.recovery.agreement import Standing, judge
from rallypoint.elastic.recovery.local_state import LocalState
from rallypoint.elastic.recovery.snapshots import Snapshots
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.storage import slots
from rallypoint.elastic.storage.schedule import SHARE, Held, Schedule, common
from rallypoint.elastic.storage.slots import Slots
from rallypoint.errors import ElasticError


@pytest.fixture
def fd() -> Iterator[int]:
    found = os.memfd_create("test")
    yield found
    os.close(found)


def write(into: Slots, number: int, data: bytes) -> None:
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    into.write(Held(number, 10 * number), len(data), [(0, content)])


def read(out_of: Slots, held: Held, size: int) -> bytes:
    return bytes(out_of.read(held)[:size].tolist())


# -- which one counts ---------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_there_is_always_one_that_all_ranks_have(
    ranks: int, taken: int, data: st.DataObject
) -> None:
    """Ranks wait for each other after each snapshot, so when a loss strikes, all are at the same next one."""
    held = []
    for _ in range(ranks):
        stage = data.draw(st.sampled_from(["before", "torn", "behind"]))
        kept = [Held(number, number) for number in range(max(1, taken), taken + 2)]
        # Slots hold the last two; a new one replaces the older.
        held.append({"before": kept[:-1], "torn": kept[:-1], "behind": kept}[stage])
        if stage == "before" and taken > 1:
            held[-1] = [Held(taken - 1, taken - 1), Held(taken, taken)]
    found = common(held)
    if taken:
        assert found is not None and found.number >= taken
        assert all(found in each for each in held)
    assert found == max(set(held[0]).intersection(*held), default=None)


def standing(rank: int, *held: Held, **others: object) -> Standing:
    return Standing(rank=rank, steps=9, whole=False, objects="Net", snapshots=held, **others)  # type: ignore[arg-type]


def test_all_go_back_to_the_newest_common_one() -> None:
    found = judge([standing(0, Held(2, 4), Held(3, 8)), standing(1, Held(1, 0), Held(2, 4))])
    assert (found.snapshot, found.steps, found.source, found.receivers) == (Held(2, 4), 4, None, ())
    with pytest.raises(ElasticError, match="no snapshot .* rank 0: 8; rank 1: none"):
        judge([standing(0, Held(3, 8)), standing(1)])


# -- when ---------------------------------------------------------------------------------------------


@given(st.floats(1e-5, 10.0), st.floats(1e-4, 10.0))
def test_the_default_costs_its_share(cost: float, step: float) -> None:
    schedule = Schedule(None)
    steps = 0
    for _ in range(30):
        steps += schedule.interval
        assert schedule.is_due(steps) and not schedule.is_due(steps - 1)
        before = schedule.interval
        schedule.note(steps, cost, step)
        assert schedule.interval <= 2 * before
    assert cost / (schedule.interval * step) <= SHARE * 1.001
    assert schedule.interval == 1 or cost / ((schedule.interval - 1) * step) > SHARE * 0.999
    schedule.restart(steps)
    assert schedule.interval == 1


def test_a_given_interval_stays() -> None:
    schedule = Schedule(7)
    schedule.note(7, 100.0, 1e-3)
    assert schedule.interval == 7
    assert not schedule.is_due(13)
    assert schedule.is_due(14)
    with pytest.raises(ValueError, match="snapshot_every is 0, expected at least 1"):
        Schedule(0)


# -- slots --------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.binary(min_size=1, max_size=100), st.binary(min_size=1, max_size=100))
def test_a_write_that_ends_at_any_byte_leaves_the_one_before(old: bytes, new: bytes) -> None:
    fd = os.memfd_create("test")
    try:
        whole = Slots(fd)
        for number, data in ((1, b"x" * 80), (2, old)):
            write(whole, number, data)
        size = slots.CONTENTS + 104
        places = [slots.FIRST, slots.FIRST + slots.STRIDE]
        before = [os.pread(fd, size, place) for place in places]
        write(whole, 3, new)
        after = [os.pread(fd, size, place) for place in places]
        whole.close()
        (slot,) = [number for number in (0, 1) if before[number] != after[number]]
        head = slots.CONTENTS
        for end in range(head + 104):
            # First the contents, under a cleared header; then the header.
            if end < 104:
                image = bytes(head) + after[slot][head : head + end] + before[slot][head + end :]
            else:
                image = after[slot][: end - 104] + bytes(head - (end - 104)) + after[slot][head:]
            os.pwrite(fd, image, places[slot])
            found = Slots(fd)
            if image != after[slot]:
                assert found.check() in ((Held(2, 20),), (Held(2, 20), Held(3, 30)))
                if found.check()[-1] == Held(3, 30):
                    assert image[:36] == after[slot][:36]
            assert read(found, Held(2, 20), len(old)) == old
            found.close()
    finally:
        os.close(fd)


def test_a_damaged_snapshot_is_not_whole(fd: int) -> None:
    found = Slots(fd)
    write(found, 1, bytes(20_000))
    write(found, 2, bytes(range(256)) * 100)
    assert found.check() == (Held(1, 10), Held(2, 20))
    for place in (5, 12_000, 25_599):
        at = slots.FIRST + slots.STRIDE + slots.CONTENTS + place
        (value,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([value ^ 1]), at)
        assert found.check() == (Held(1, 10),)
        os.pwrite(fd, bytes([value]), at)
    assert found.check() == (Held(1, 10), Held(2, 20))
    found.close()


def test_pages_in_another_order_have_another_checksum() -> None:
    words = torch.arange(3 * 512 + 5)
    swapped = torch.cat([words[512:1024], words[:512], words[1024:]])
    assert checksum(words) != checksum(swapped)
    assert checksum(words) == checksum(words.clone())


def test_slots_grow_are_dropped_and_found_by_the_next_process(fd: int) -> None:
    first = Slots(fd)
    for number in range(1, 5):
        write(first, number, bytes([number]) * (number * 700_000))
    assert first.check() == (Held(3, 30), Held(4, 40))
    second = Slots(fd)
    assert read(second, Held(4, 40), 2_800_000) == bytes([4]) * 2_800_000
    second.drop_after(3)
    assert second.check() == (Held(3, 30),)
    write(second, 4, b"anew")
    assert first.check() == (Held(3, 30), Held(4, 40))
    assert read(first, Held(4, 40), 4) == b"anew"
    assert os.stat(fd).st_blocks * 512 < 20_000_000, "the file is sparse"
    first.close()
    second.close()


# -- state --------------------------------------------------------------------------------------------


def own_state(steps: int) -> OwnState:
    return OwnState(steps, Place(1, 2, 3, begun=RandomState.now()), RandomState.now())


def test_state_comes_back_bit_by_bit_into_the_same_objects(fd: int) -> None:
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2, dtype=torch.float32)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def train() -> None:
        net(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    train()
    snapshots = Snapshots(Objects([net, optimizer, scheduler]), fd, 4)
    weight = net[0].weight
    snapshots.take(own_state(1), 0)
    expected = copy.deepcopy([each.state_dict() for each in (net, optimizer, scheduler)])
    random = torch.get_rng_state()
    for number in range(3):
        train()
        if number == 1:
            snapshots.take(own_state(3), 0)
    assert snapshots.held() == (Held(1, 1), Held(2, 3))
    own = snapshots.restore(Held(1, 1))
    assert snapshots.held() == (Held(1, 1),)
    assert (own.steps, own.place.epoch, own.place.batch, own.place.tasks) == (1, 1, 2, 3)
    assert bytes(random.tolist()) == own.random.torch_state
    assert net[0].weight is weight
    for each, state in zip((net, optimizer, scheduler), expected, strict=True):
        assert str(each.state_dict()) == str(state)
    torch.testing.assert_close(net.state_dict(), expected[0], rtol=0, atol=0)
    assert all(each.grad is None for each in net.parameters())
    snapshots.close()


class Assigns(torch.nn.Module):
    """Its forward pass reassigns buffers: part of its input, and a tensor of another shape each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("sums", torch.zeros(0))
        self.register_buffer("last", None)
        self.seen: torch.Tensor
        self.sums: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        self.sums = torch.cat([self.sums, x.sum().view(1)])
        self.last = self.sums[-1:].clone()
        if len(self.sums) > 2 and "late" not in dict(self.named_buffers()):
            self.register_buffer("late", torch.ones(1))
        return self.weight * x


def test_buffers_that_were_assigned_anew_come_back_as_they_were(fd: int) -> None:
    net, batches = Assigns(), [torch.full((2,), float(number)) for number in range(5)]
    snapshots = Snapshots(Objects([net]), fd, 1)
    net(batches[1])
    snapshots.take(own_state(1), 0)
    expected = copy.deepcopy(net.state_dict())
    net(batches[2])
    snapshots.take(own_state(2), 0)
    newer = copy.deepcopy(net.state_dict())
    net(batches[3])
    snapshots.restore(Held(2, 2))
    assert net.seen is batches[2] and str(net.state_dict()) == str(newer)
    net(batches[4])
    snapshots.restore(Held(1, 1))
    assert str(net.state_dict()) == str(expected)
    assert [each.tolist() for each in batches] == [[number, number] for number in range(5)]
    # In another process, which has the buffers of its set-up.
    fresh = Assigns()
    other = Snapshots(Objects([fresh]), fd, 1)
    other.restore(Held(1, 1))
    assert str(fresh.state_dict()) == str(expected)
    assert snapshots.held() == (Held(1, 1),)
    snapshots.close()
    other.close()


def test_kinds_of_tensors_survive(fd: int) -> None:
    class Holder:
        def __init__(self) -> None:
            self.state = {
                "empty": torch.zeros(0, 3),
                "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
                "flags": torch.tensor([True, False, True]),
                "strided": torch.arange(12.0).view(3, 4).t(),
                "nested": [torch.tensor([1 + 2j]), ("text", None, 1.5)],
            }

        def state_dict(self) -> dict[str, object]:
            return self.state

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.state = state  # type: ignore[assignment]

    holder = Holder()
    state = LocalState(Objects([holder]))
    structure, tensors = state.pack()
    sizes = [each.numel() * each.element_size() for each in tensors]
    size, pieces = local_state.laid_out(local_state.packed(structure), tensors)
    memory = Slots(fd)
    memory.write(Held(1, 0), size, pieces)
    before, holder.state = holder.state, {}
    head, contents = local_state.taken_apart(memory.read(Held(1, 0)))
    state.restore(local_state.unpacked(head), local_state.tensors_in(contents, sizes))
    assert str(holder.state) == str(before)
    del contents
    memory.close()

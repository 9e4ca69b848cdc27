"""Copies of what a step starts with, and going back to them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from rallypoint.elastic.late_collectives import STEPS, Late, LateCollectives
from rallypoint.elastic.state.copied import copied, num_bytes
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.undo import Undo, room_on


LATE = Late("train.py:3 communicates", is_first=False)
_TENSORS = st.builds(
    lambda size, dtype, at: torch.arange(at, at + size).to(dtype),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.integers(0, 3),
)
_STATES = st.recursive(
    _TENSORS | st.none() | st.integers(0, 3) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = state.values()
    elif type(state) not in (list, tuple):
        return []
    return [each for one in state for each in tensors_of(one)]


def in_words(state: Any) -> str:
    return repr(state)


@given(state=_STATES, earlier=_STATES)
def test_a_copy_is_equal_and_shares_no_memory(state: Any, earlier: Any) -> None:
    made = copied(state, copy.deepcopy(earlier))
    assert in_words(made) == in_words(state)
    own = {each.data_ptr() for each in tensors_of(state) if each.numel()}
    assert own.isdisjoint(each.data_ptr() for each in tensors_of(made))
    assert num_bytes(made).total() == sum(each.nbytes for each in tensors_of(state))


def test_a_copy_takes_the_memory_of_the_one_before() -> None:
    state = {"a": [torch.ones(3), (torch.zeros(2), 1)], "b": torch.ones(2, 2)}
    first = copied(state)
    before = [each.data_ptr() for each in tensors_of(first)]
    state["a"][0].fill_(5)
    state["b"] = torch.ones(3)
    second = copied(state, first)
    after = [each.data_ptr() for each in tensors_of(second)]
    assert after[:2] == before[:2] and after[2] != before[2]
    assert in_words(second) == in_words(state)


def test_another_layout_in_memory_stays() -> None:
    lies = torch.ones(2, 3).t()
    assert copied(lies, torch.empty(3, 2)).stride() == lies.stride()
    # All elements in one place, where nothing can be written.
    spread = torch.ones(1).expand(3)
    assert copied(spread, copied(spread)).tolist() == [1, 1, 1]


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.objects = Objects([self.net, self.optimizer, self.schedule])

    def step(self) -> None:
        self.net(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def state(self) -> str:
        return repr([each.state_dict() for each in (self.net, self.optimizer, self.schedule)])


@pytest.mark.parametrize("times", [1, 3])
def test_a_step_is_undone_however_often(times: int) -> None:
    job = Job()
    undo = Undo(job.objects)
    undo.turn_on(LATE)
    for _ in range(times):
        job.step()
        before = job.state()
        for _ in range(2):
            undo.begin_step()
            job.step()
            assert job.state() != before
            assert undo.undo()
            assert job.state() == before
            assert not undo.undo()  # only once
    # What it copied belongs to the optimizer now, and the next copy is another one.
    undo.begin_step()
    job.step()
    assert undo.undo() and job.state() == before


def test_there_is_nothing_to_undo_before_it_is_on(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    undo = Undo(job.objects)
    undo.begin_step()
    assert not undo.undo()
    undo.turn_on(LATE)
    assert not undo.undo()
    for _ in range(2):
        undo.begin_step()
    (record,) = caplog.records  # only once
    size = num_bytes(job.objects.save()).total() / 1e6
    assert record.getMessage() == (
        "elastic.session: train.py:3 communicates. To undo it after a loss, each step begins with a copy of what the session"
        f" holds ({size:.1f} MB). Two separate steps need no copy; elastic.session(…, snapshots=True) copies less often"
    )


@pytest.mark.parametrize("spare", [0, 1])
def test_a_copy_takes_half_of_the_room_at_most(
    caplog: pytest.LogCaptureFixture, spare: int
) -> None:
    job = Job()
    job.step()
    size = num_bytes(job.objects.state())[torch.device("cpu")]
    asked = []

    def room(device: torch.device) -> float:
        asked.append(device)
        return 2 * size - 1 + spare

    undo = Undo(job.objects, room)
    undo.turn_on(LATE)
    for _ in range(2):
        undo.begin_step()
    assert undo.undo() is bool(spare)
    assert asked == [torch.device("cpu")]  # only once
    (record,) = caplog.records
    is_refused = (
        "There is not enough memory for a copy of what each step begins with" in record.getMessage()
    )
    assert is_refused is not bool(spare)


def test_a_host_has_room() -> None:
    assert room_on(torch.device("cpu")) == math.inf


def test_ranks_that_change_by_themselves_are_told_to_take_snapshots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    undo = Undo(Job().objects)
    undo.turn_on(Late("train.py:3 communicates", is_first=True))
    undo.begin_step()
    assert not undo.undo()
    (record,) = caplog.records
    assert (
        "communicates, the first collective of that step: each rank changes its parameters by itself"
        in record.getMessage()
    )
    assert record.getMessage().endswith("Use elastic.session(…, snapshots=True)")


def test_a_collective_is_late_behind_a_change_and_first_by_its_step() -> None:
    late = LateCollectives(matters=True)
    for _ in range(STEPS):
        assert late.compares
        late.begin_step()
        assert late.meet("broadcast", is_late=False) is None
        late.end_step()
    assert late.is_watching and not late.compares
    late.begin_step()
    late.meet("broadcast", is_late=False)
    found = late.meet("allreduce", is_late=True)
    assert found is not None and not found.is_first
    assert found.what.endswith(
        "communicates (allreduce) after a change of parameters in the same step"
    )
    assert not late.is_watching
    other = LateCollectives(matters=True)
    other.begin_step()
    found = other.meet("allreduce", is_late=True)
    assert found is not None and found.is_first
    assert not LateCollectives(matters=False).is_watching

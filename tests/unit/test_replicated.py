"""What a rank with replicated state keeps, as found by the process that takes its place."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rallypoint.elastic.loops.course import Course
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.recovery.agreement import Verdict
from rallypoint.elastic.recovery.replicated import Replicated
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.storage.memory import Memory


@pytest.fixture
def memories() -> Iterator[list[Memory]]:
    """A worker's memory, and that of the process that takes its place."""
    first = Memory()
    made = [first]
    yield made
    for each in made:
        each.close()


def taken_over(memories: list[Memory]) -> Memory:
    memories.append(Memory(os.dup(memories[0].fd)))
    return memories[-1]


@pytest.fixture
def generators() -> Iterator[None]:
    state = RandomState.now()
    yield
    state.restore()


def run_steps(kept: Replicated, course: Course, steps: int) -> list[torch.Tensor]:
    """Run whole steps and start one more; returns what each has drawn."""
    drawn = []
    for step in range(steps + 1):
        kept.begin_step(is_task=False)
        drawn.append(torch.rand(1))
        if step < steps:
            kept.note_collective()
            course.note_complete(is_task=False)
    return drawn


@pytest.mark.usefixtures("generators")
@pytest.mark.parametrize("at", [4, 5, 6])
def test_a_newcomer_continues_at_the_step_that_the_others_agree_on(
    at: int, memories: list[Memory], caplog: pytest.LogCaptureFixture
) -> None:
    objects, course = Objects([torch.nn.Linear(2, 2)]), Course()
    kept = Replicated(objects, course, memories[0], lambda: None)
    drawn = run_steps(kept, course, 5)
    kept.note_collective()
    drawn.append(torch.rand(1))  # in step 6, had this rank lived
    newcomer = Replicated(objects, Course(), taken_over(memories), lambda: None)
    torch.manual_seed(99)
    newcomer.settle(Verdict(0, (1,), at, ()), None, receives=True, is_new=True, buffers=b"")
    assert not caplog.records
    # Step 4 is repeated if the other ranks have not seen its end.
    assert torch.equal(torch.rand(1), drawn[at])


@pytest.mark.usefixtures("generators")
def test_what_nobody_knows_is_said(
    memories: list[Memory], caplog: pytest.LogCaptureFixture
) -> None:
    objects, course = Objects([torch.nn.Linear(2, 2)]), Course()
    run_steps(Replicated(objects, course, memories[0], lambda: None), course, 5)
    newcomer = Replicated(objects, Course(), taken_over(memories), lambda: None)
    newcomer.settle(Verdict(0, (1,), 2, ()), None, receives=True, is_new=True, buffers=b"")
    assert "random state at step 2 is not known" in caplog.text


class Counts(torch.nn.Module):
    """A buffer that is alike on all ranks and changes after the last collective, and one of each rank's own."""

    def __init__(self, own: float) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("own", torch.full((1,), own))


@pytest.mark.usefixtures("generators")
@pytest.mark.parametrize("by", ["the source", "one that has it from a source that is lost", ""])
def test_a_buffer_that_all_ranks_have_alike_comes_from_the_others(
    memories: list[Memory], by: str
) -> None:
    lost, other = Counts(1.0), Counts(2.0)
    memories.append(Memory())
    course = Course()
    source = Replicated(Objects([other]), course, memories[-1], lambda: None)
    source.begin_step(is_task=False)
    source.note_collective()
    other.count += 1  # for example, an average is updated
    course.note_complete(is_task=False)
    told = source.buffers_behind(1)
    if by.startswith("one"):
        memories.append(Memory())
        third = Replicated(Objects([Counts(3.0)]), Course(), memories[-1], lambda: None)
        third.begin_step(is_task=False)
        third.note_collective()  # it does not see the end of the step
        third.settle(Verdict(0, (1, 2), 1, ()), None, receives=True, is_new=False, buffers=told)
        told = third.buffers_behind(1)
    kept = Replicated(Objects([lost]), Course(), memories[0], lambda: None)
    kept.begin_step(is_task=False)
    kept.note_collective()  # it dies after the collective
    place = Counts(0.0)
    newcomer = Replicated(Objects([place]), Course(), taken_over(memories), lambda: None)
    place.load_state_dict(other.state_dict())  # what it receives
    buffers = told if by else b"-"
    newcomer.settle(Verdict(0, (1,), 1, ()), None, receives=True, is_new=True, buffers=buffers)
    assert place.own.item() == 1.0
    assert place.count.item() == bool(by)

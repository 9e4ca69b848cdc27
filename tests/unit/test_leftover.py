"""Gradients that a step left: those that are thrown away are of no interest, those that are used later are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rallypoint.elastic.leftover import Leftover
from rallypoint.elastic.objects import Objects


class Training:
    """A net whose steps may leave the optimizer's out."""

    def __init__(self) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.objects = Objects([self.net, self.optimizer])
        self.leftover = Leftover(self.objects)
        self.optimizer.register_step_post_hook(lambda it, *_: self.leftover.note_applied(it))

    def step(self, *parts: Callable[[], object], applies: bool = False) -> bool:
        """Returns whether gradients of an earlier step were used."""
        before = self.objects.gradients()
        self.leftover.begin_step()
        for each in parts:
            each()
        self.leftover.end_step()
        if not applies:
            self.leftover.add(self.objects.accumulated(before))
        return self.leftover.is_used

    def backward(self, scale: float = 1.0) -> None:
        (self.net(torch.ones(1, 2)).sum() * scale).backward()

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def zero_in_place(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


@pytest.fixture
def it() -> Training:
    return Training()


@pytest.mark.parametrize("zero", ["zero", "zero_in_place"])
def test_what_is_thrown_away_before_the_next_pass_is_not_used(it: Training, zero: str) -> None:
    throw = getattr(it, zero)
    for _ in range(3):
        # In the midst of a step, as late as it can be; and several passes in one step.
        assert not it.step(lambda: it.net(torch.ones(1, 2)), throw, it.backward, it.backward)
    assert not it.step(throw, it.backward, it.optimizer.step, applies=True)


def test_what_the_next_pass_adds_to_is_used(it: Training) -> None:
    assert not it.step(it.backward)
    assert it.step(it.backward, it.optimizer.step, applies=True)


def test_what_a_later_pass_adds_to_is_used(it: Training) -> None:
    assert not it.step(it.backward)
    assert not it.step(lambda: None)
    assert it.step(it.backward)


def test_what_an_optimizer_applies_in_a_later_step_is_used(it: Training) -> None:
    assert not it.step(it.backward)
    assert it.step(it.optimizer.step, applies=True)


def test_an_optimizer_of_other_parameters_uses_nothing(it: Training) -> None:
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    other.register_step_post_hook(lambda it_, *_: it.leftover.note_applied(it_))
    assert not it.step(it.backward)
    assert not it.step(other.step, applies=True)


def test_gradients_that_are_not_finite_are_used_by_nobody(it: Training) -> None:
    assert not it.step(lambda: it.backward(torch.inf))
    assert not it.step(it.backward)


def test_no_hook_is_left_behind(it: Training) -> None:
    # As DDP holds them.
    nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in it.net.parameters()]
    it.step(it.backward)
    it.step(lambda: None)
    it.backward()
    assert nodes and not it.leftover.is_used

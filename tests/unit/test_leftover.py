"""Gradients that a step leaves: those thrown away later do not matter, those used later do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rallypoint.elastic.leftover import Leftover
from rallypoint.elastic.state.objects import Objects


class Training:
    """A net whose steps may omit the optimizer's step."""

    def __init__(self) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.other_net = torch.nn.Linear(2, 1)
        self.other = torch.optim.SGD(self.other_net.parameters(), lr=0.1)
        self.objects = Objects([self.net, self.optimizer])
        self.watch(self.objects)

    def watch(self, objects: Objects) -> None:
        self.objects, self.leftover = objects, Leftover(objects)
        for each in objects.optimizers:
            each.register_step_post_hook(lambda it, *_: self.leftover.note_applied(it))

    def step(self, *parts: Callable[[], object]) -> bool:
        """Returns whether gradients of an earlier step were used."""
        before = self.objects.gradients()
        self.leftover.begin_step()
        for each in parts:
            each()
        self.leftover.end_step()
        self.leftover.add(before)
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
        # In the middle of a step, as late as possible; and several passes in one step.
        assert not it.step(lambda: it.net(torch.ones(1, 2)), throw, it.backward, it.backward)
    assert not it.step(throw, it.backward, it.optimizer.step)


def test_what_the_next_pass_adds_to_is_used(it: Training) -> None:
    assert not it.step(it.backward)
    assert it.step(it.backward, it.optimizer.step)


def test_what_a_later_pass_adds_to_is_used(it: Training) -> None:
    assert not it.step(it.backward)
    assert not it.step(lambda: None)
    assert it.step(it.backward)


def test_what_an_optimizer_applies_in_a_later_step_is_used(it: Training) -> None:
    assert not it.step(it.backward)
    assert it.step(it.optimizer.step)


def test_an_optimizer_of_other_parameters_uses_nothing(it: Training) -> None:
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    other.register_step_post_hook(lambda it_, *_: it.leftover.note_applied(it_))
    assert not it.step(it.backward)
    assert not it.step(other.step)


# Two optimizers, as with a GAN.


@pytest.fixture
def two(it: Training) -> Training:
    it.watch(Objects([it.net, it.other_net, it.optimizer, it.other]))
    return it


def both(it: Training) -> None:
    """Gradients for both nets."""
    (it.net(torch.ones(1, 2)) + it.other_net(torch.ones(1, 2))).sum().backward()


def test_an_accumulation_beside_the_step_of_another_optimizer_is_used(two: Training) -> None:
    assert not two.step(lambda: both(two), two.other.step, two.other.zero_grad)
    assert two.step(lambda: both(two), two.optimizer.step)


def test_what_another_net_gets_by_the_way_and_throws_away_is_not_used(two: Training) -> None:
    for _ in range(3):
        assert not two.step(two.other.zero_grad, lambda: both(two), two.other.step)
        assert not two.step(two.zero, two.backward, two.optimizer.step)


def test_what_no_optimizer_has_is_not_looked_at_where_one_steps(it: Training) -> None:
    half = torch.optim.SGD(it.net[0].parameters(), lr=0.1)
    it.watch(Objects([it.net, it.other_net, half, it.other]))
    for _ in range(3):
        assert not it.step(half.zero_grad, it.backward, half.step)
    assert it.net[1].weight.grad is not None


def test_an_optimizer_that_shares_its_parameters_with_the_one_that_steps_waits_for_nothing(
    it: Training,
) -> None:
    same = torch.optim.SGD(it.net.parameters(), lr=0.1)
    it.watch(Objects([it.net, it.optimizer, same]))
    for one in (same, it.optimizer, same):
        assert not it.step(it.zero, it.backward, one.step)


def test_gradients_that_are_not_finite_are_used_by_nobody(it: Training) -> None:
    assert not it.step(lambda: it.backward(torch.inf))
    assert not it.step(it.backward)


def test_no_hook_is_left_behind(it: Training) -> None:
    # DDP holds them in the same way.
    nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in it.net.parameters()]
    it.step(it.backward)
    it.step(lambda: None)
    it.backward()
    assert nodes and not it.leftover.is_used

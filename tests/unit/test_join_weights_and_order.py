"""Join's parts: which gradients a factor reaches, what a batch's samples are, and in which order members are matched."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from rallypoint.errors import ConfigError
from rallypoint.join.kinds import in_order
from rallypoint.join.samples import first_dim
from rallypoint.join.weights import GradientScale


def test_a_module_that_is_frozen_when_the_factor_changes_is_weighted_later_in_the_step() -> None:
    """As a discriminator is at the end of each iteration."""
    critic = nn.Linear(2, 1)
    critic.requires_grad_(False)
    scale = GradientScale(at_outputs=[], at_parameters=[critic])
    scale.set(0.5)
    assert not any(p.requires_grad for p in critic.parameters())
    critic.requires_grad_(True)
    critic(torch.ones(1, 2)).sum().backward()
    assert critic.weight.grad is not None
    assert critic.weight.grad.tolist() == [[0.5, 0.5]]
    scale.set(1.0)
    critic.zero_grad()
    critic(torch.ones(1, 2)).sum().backward()
    assert critic.weight.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (UserDict(input_ids=torch.zeros(32, 7), labels=torch.zeros(32)), 32),
        ({"text": ["x"] * 32, "label": [1] * 32}, 32),
        ({"id": "a name", "x": torch.zeros(5, 2)}, 5),
        (UserDict(id="a name", x=UserDict(y=torch.zeros(5))), 5),
        (["x"] * 9, 9),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
    ],
    ids=str,
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert first_dim(batch) == samples


@pytest.mark.parametrize("batch", [UserDict(a=1, b="x"), {"x": 3}, 7], ids=str)
def test_a_batch_whose_samples_cannot_be_counted_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match="pass samples="):
        first_dim(batch)


class Own(Joinable):
    def __init__(self) -> None:
        super().__init__()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return None

    def join_hook(self, **kwargs: Any) -> Any: ...


def test_the_list_may_have_any_order_beside_an_object_of_ones_own() -> None:
    net, own = nn.Linear(1, 1), Own()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert in_order([schedule, own, net, optimizer]) == [net, own, optimizer, schedule]
    assert in_order([own, schedule, optimizer]) == [own, optimizer, schedule]
    assert in_order([net, optimizer, own]) == [net, optimizer, own]

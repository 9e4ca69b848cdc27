"""Whatever a step may change before it communicates is restored when the step is repeated."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

from rallypoint.elastic.state.settings import MAX_NUMBERS, Settings


SCHEDULERS = {
    "exponential": lambda optimizer: lr.ExponentialLR(optimizer, 0.5),
    "one cycle": lambda optimizer: lr.OneCycleLR(optimizer, 0.3, total_steps=9),
    "linear": lambda optimizer: lr.LinearLR(optimizer, 0.1, total_iters=5),
    "lambda": lambda optimizer: lr.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "restarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 3),
    "one after the other": lambda optimizer: lr.SequentialLR(
        optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.5)], [2]
    ),
    "chained": lambda optimizer: lr.ChainedScheduler(
        [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.5)]
    ),
}


def rates(make: Any, *, rate: Any, repeats: int) -> list[Any]:
    """The rates of six steps; step 3 is repeated."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate)
    scheduler = make(optimizer)
    settings = Settings([optimizer], [optimizer, scheduler])
    found = []
    for step in range(6):
        saved = settings.copied()
        for _ in range(repeats if step == 3 else 0):
            optimizer.step()
            scheduler.step()
            settings.restore(saved)
            settings.restore(saved)
        optimizer.step()
        scheduler.step()
        group = optimizer.param_groups[0]
        found.append((float(group["lr"]), group["betas"]))
    return found


@pytest.mark.filterwarnings("ignore")  # warnings of the schedulers themselves
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scheduler_that_is_stepped_again(name: str, *, as_tensor: bool) -> None:
    make = SCHEDULERS[name]

    def rate() -> Any:
        return torch.tensor(0.1) if as_tensor else 0.1

    assert rates(make, rate=rate(), repeats=3) == rates(make, rate=rate(), repeats=0)


def test_a_tensor_that_others_hold_stays_the_same_one() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate)
    settings = Settings([optimizer], [])
    saved = settings.copied()
    rate.mul_(2)
    settings.restore(saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)


class Counter:
    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_an_object_of_the_script() -> None:
    counter = Counter([1, {"a": torch.ones(2)}])
    settings = Settings([], [counter])
    saved = settings.copied()
    counter.seen[1]["a"] += 1
    counter.seen.append(3)
    settings.restore(saved)
    assert len(counter.seen) == 2
    assert counter.seen[1]["a"].tolist() == [1, 1]


@pytest.mark.parametrize("large", [list(range(2 * MAX_NUMBERS)), torch.ones(1 << 20)])
def test_what_is_large_is_left_out(large: Any) -> None:
    counter, small = Counter(large), Counter(1)
    settings = Settings([], [counter, small])
    saved = settings.copied()
    counter.seen = small.seen = 7
    settings.restore(saved)
    assert (counter.seen, small.seen) == (7, 1)


def test_a_model_of_many_named_parameters_is_no_obstacle() -> None:
    named = [(f"layer.{number}", torch.nn.Parameter(torch.ones(1))) for number in range(2000)]
    optimizer = torch.optim.SGD(named, lr=0.1)
    optimizer.param_groups[0]["table"] = list(range(2 * MAX_NUMBERS))
    settings = Settings([optimizer], [])
    saved = settings.copied()
    optimizer.param_groups[0]["lr"] = 0.2
    settings.restore(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.param_groups[0]["param_names"]) == 2000


def test_what_cannot_be_copied_is_left_out() -> None:
    locked, small = Counter(threading.Lock()), Counter(1)
    settings = Settings([], [locked, small])
    saved = settings.copied()
    small.seen = 2
    settings.restore(saved)
    assert small.seen == 1
    assert len(settings.copied()[1]) == 1

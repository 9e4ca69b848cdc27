"""An optimizer's state on its way from another rank, a snapshot or a checkpoint."""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rallypoint.elastic.checkpointing import checkpoint_state
from rallypoint.elastic.recovery import local_state
from rallypoint.elastic.state import objects, optimizer_state, wrapped_optimizers
from rallypoint.elastic.state.objects import Objects


def contiguous(state: Any) -> Any:
    """The state as it arrives from another rank: tensors keep only their values."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: contiguous(value) for key, value in state.items()}
    if isinstance(state, list):
        return [contiguous(each) for each in state]
    return state


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", MAKES)
def test_state_lies_in_memory_as_its_parameter_does(name: str) -> None:
    """A fused kernel pairs elements by their position in memory."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            net(inputs).square().sum().backward()
            optimizer.step()

    optimizer = MAKES[name](net.parameters())
    train(net, optimizer)
    other = copy.deepcopy(net)
    received = MAKES[name](other.parameters())
    optimizer_state.load(received, contiguous(optimizer.state_dict()))
    train(net, optimizer)
    train(other, received)
    for one, same in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=0)


def test_a_learning_rate_that_the_script_holds_stays_the_optimizers() -> None:
    rate = torch.tensor(0.1)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    state = contiguous(optimizer.state_dict())
    state["param_groups"][0]["lr"] = torch.tensor(0.05)
    optimizer_state.load(optimizer, state)
    assert rate.item() == pytest.approx(0.05)
    rate.mul_(2)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)


@pytest.mark.parametrize("way", ["another rank", "a snapshot", "a checkpoint"])
def test_a_counter_stays_one(way: str) -> None:
    """For example in MultiStepLR: torch asks the milestones for their elements."""
    state = {"milestones": Counter([3, 5]), "names": OrderedDict(a=1), "t": torch.ones(2)}
    tensors: list[torch.Tensor] = []
    if way == "another rank":
        told: Any = objects._emptied(state, tensors)
    elif way == "a snapshot":
        told = local_state._emptied(state, tensors, None)
    else:
        copied = checkpoint_state.HostCopy.__new__(checkpoint_state.HostCopy)
        copied._tensors, copied.shards = {}, {}
        _, told = copied._copied(state, "x", {}, set())
    data = io.BytesIO()
    torch.save(told, data)
    data.seek(0)
    read = torch.load(data, weights_only=True)
    assert type(read["milestones"]) is Counter
    assert sorted(read["milestones"].elements()) == [3, 5]
    assert type(read["names"]) is OrderedDict
    if way == "another rank":
        assert type(objects._filled(read, tensors)["milestones"]) is Counter
    if way == "a snapshot":
        raw = [each.contiguous().view(torch.uint8) for each in tensors]
        assert type(local_state._filled_value(read, raw, None)["milestones"]) is Counter


class Counting(torch.optim.SGD):
    """Has state of its own, in addition to the parameters' state."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = {"steps": self.state.get("count", {"steps": 0})["steps"] + 1}
        return super().step(closure)


def test_state_that_is_of_no_parameter_goes_into_a_checkpoint_and_back() -> None:
    net = nn.Linear(1, 1)
    optimizer = Counting(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    state = checkpoint_state.State([net, optimizer])
    told = state._named(optimizer)
    assert told["state"]["count"] == {"steps": 1}
    assert state._numbered(optimizer, told)["state"].keys() == {0, 1, "count"}
    LocalState = local_state.LocalState
    structure, tensors = LocalState(Objects([net, optimizer])).pack()
    optimizer.step()
    raw = [each.detach().clone().contiguous().view(torch.uint8).flatten() for each in tensors]
    LocalState(Objects([net, optimizer])).restore(structure, raw)
    assert optimizer.state["count"] == {"steps": 1}


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights around another optimizer. As in most repositories, torch's ``__init__`` is not called."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state = optimizer.state
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)
        for fast, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow += 0.5 * (fast.detach() - slow)

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])
        self.slow = state["slow"]


class Forwarding(torch.optim.Optimizer):
    """As accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state = optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def test_a_wrapper_with_a_state_of_its_own_keeps_it() -> None:
    """The optimizer in it does not have the slow weights."""
    net = nn.Linear(1, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = Lookahead(inner)
    given = Objects([net, optimizer])
    noted: list[torch.optim.Optimizer] = []
    wrapped_optimizers.note_steps(optimizer, noted.append)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert noted == [optimizer]
    slow = [each.clone() for each in optimizer.slow]
    saved = given.save()
    state = checkpoint_state.State(given.given)
    copied = copy.deepcopy(state.now())
    optimizer.step()
    given.put_back(saved)
    assert optimizer.slow == slow
    optimizer.step()
    state.restore(copied)
    assert optimizer.slow == slow
    assert Objects([net, Forwarding(inner)]).optimizers == [inner]
    optimizer.base, optimizer.optimizer = inner, None
    wrapped_optimizers.note_steps(optimizer, noted.append)
    inner.step()
    assert noted[-1] is optimizer


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_state_of_zero_is_asked_for_its_part_alone() -> None:
    """Its own ``state_dict`` raises unless all ranks have gathered their parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # caused by torch's own import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    net = nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    given = Objects([net, zero])
    assert given.unreadable() == ""
    given.check_state()
    net(torch.ones(1, 2)).sum().backward()
    zero.step()
    saved = given.save()
    before = net.weight.detach().clone()
    zero.param_groups[0]["lr"] = 0.5
    zero.step()
    after = net.weight.detach().clone()
    given.put_back(saved)
    torch.testing.assert_close(net.weight.detach(), before, rtol=0, atol=0)
    assert zero.param_groups[0]["lr"] == 0.1
    zero.param_groups[0]["lr"] = 0.5
    zero.step()
    torch.testing.assert_close(net.weight.detach(), after, rtol=0, atol=0)

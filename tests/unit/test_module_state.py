"""Module state beyond parameters, and what else a state may hold."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rallypoint.elastic.checkpointing import checkpoint_files
from rallypoint.elastic.checkpointing.checkpoint_state import HostCopy, State, filled, keys_in
from rallypoint.elastic.recovery import local_state
from rallypoint.elastic.recovery.local_state import LocalState
from rallypoint.elastic.state.buffers import MAX_BUFFERS
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.state.param_groups import add_missing, members
from rallypoint.elastic.state.plain_data import plain, unreadable
from rallypoint.elastic.state.settings import Settings
from rallypoint.errors import ElasticError


def gone_back(objects: Objects, change: Any) -> None:
    """Take a snapshot, change something, go back."""
    state = LocalState(objects)
    structure, tensors = state.pack()
    data = local_state.packed(structure)
    held = [each.detach().clone().view(-1).view(torch.uint8) for each in tensors]
    change()
    state.restore(local_state.unpacked(data), held)


def test_a_snapshot_tells_which_modules_train_and_which_parameters_are_trained() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    net[0].eval()
    gone_back(Objects([net]), lambda: net.train().requires_grad_(True))
    assert [each.training for each in net.modules()] == [True, False, True]
    assert [each.requires_grad for each in net.parameters()] == [True, True, False, False]


def test_a_newcomer_runs_itself_what_follows_the_last_complete_step() -> None:
    net = nn.Linear(2, 2)
    modes = Objects([net]).modes
    modes.note_complete()
    net.eval().requires_grad_(False)
    modes.go_behind_last(is_new=True)
    assert net.training and not net.weight.requires_grad
    modes.go_behind_last(is_new=False)
    assert net.weight.requires_grad


class Holder:
    """An object of the script's own."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


class Color(enum.IntEnum):
    RED = 1


def numbers_of_numpy() -> dict[Any, Any]:
    return {np.int64(3): [np.float64(0.5), (np.bool_(True), {"a": np.float32(2.0)})]}


def is_of_python(found: Any) -> bool:
    return repr(found) == "{3: [0.5, (True, {'a': 2.0})]}"


def test_numbers_of_numpy_are_sent_as_those_of_python() -> None:
    holder = Holder(numbers_of_numpy())
    objects = Objects([holder])
    assert objects.unreadable() == ""
    gone_back(objects, lambda: holder.load_state_dict({"held": None}))
    assert is_of_python(holder.held)
    copied = Settings([], [Holder(np.float64(0.5))]).copied()
    assert type(copied[1][0]["held"]) is float


def test_numbers_of_numpy_are_written_to_checkpoints_as_those_of_python() -> None:
    copy = HostCopy()
    copy.take(State([Holder(numbers_of_numpy()), Holder({"t": [torch.ones(1), np.int8(2)]})]).now())
    first, second = copy.structure.values()
    assert is_of_python(first["held"])
    assert type(second["held"]["t"][1]) is int
    checkpoint_files.packed(copy.structure)


def test_a_learning_rate_of_numpy_is_one_of_python_behind_a_loss() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step))
    optimizer.step()
    scheduler.step()
    assert isinstance(optimizer.param_groups[0]["lr"], np.generic)
    assert Objects([optimizer, scheduler]).unreadable() == ""


def test_what_is_no_number_of_numpy_stays() -> None:
    for each in (1, "a", None, np.ones(2), Color.RED, b"a"):
        assert plain(each) is each


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": [1, {"b": Color.RED}]}, f"['a'][1]['b'], a {__name__}.Color"),
        ([np.ones(2)], "[0], a numpy.ndarray"),
        ({Color.RED: 1}, ", a builtins.dict"),
        ({"a": [1, (2.5, b"x", torch.float32, torch.Size([2]))]}, ""),
    ],
)
def test_what_cannot_be_read_again_is_named(state: Any, told: str) -> None:
    assert unreadable(state) == told


def test_what_a_newcomer_could_not_read_is_said_when_training_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    holder = Holder(1)
    objects = Objects([holder])
    objects.check_state()
    assert not caplog.records
    holder.held = {"best": Color.RED}  # set by the first step
    for _ in range(3):
        objects.check_state()
    (said,) = caplog.messages
    assert f"the state of a Holder holds ['held']['best'], a {__name__}.Color" in said


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("same", self.mean)
        self.register_buffer("last", None)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_buffers_are_where_and_what_they_were_whatever_was_assigned(as_bytes: bool) -> None:
    net = Running()
    buffers, mean = Objects([net]).buffers, net.mean
    saved = buffers.copied(buffers.as_bytes() if as_bytes else b"")
    for _ in range(2):
        net.mean += 1
        net.mean = net.mean + 1
        net.same = net.last = torch.ones(3)
        buffers.restore(saved)
        assert net.mean is net.same is mean
        assert mean.tolist() == [0, 0]
        assert net.last is None


def test_buffers_of_all_types_and_shapes_go_back_to_what_they_were() -> None:
    net = nn.Module()
    given = [
        torch.tensor([True, False, True]),
        torch.tensor(7),
        torch.rand(3, dtype=torch.float64),
        torch.rand(5).to(torch.bfloat16),
        torch.rand(2, 3).t(),
        torch.rand(3, dtype=torch.complex64),
        torch.zeros(0),
        torch.rand(4).to(torch.float8_e5m2),
        torch.rand(1, dtype=torch.float64),
    ]
    for number, each in enumerate(given):
        net.register_buffer(f"b{number}", each)
    before = [each.clone() for each in given]
    buffers = Objects([net]).buffers
    saved = buffers.copied(buffers.as_bytes())
    assert isinstance(saved[2], bytes)
    for _ in range(2):
        for each in given:
            each.zero_()
        buffers.restore(saved)
        for each, was in zip(given, before, strict=True):
            assert (
                each.contiguous()
                .view(-1)
                .view(torch.uint8)
                .equal(was.contiguous().view(-1).view(torch.uint8))
            )


def test_a_modules_first_buffer_is_copied_although_its_bytes_are_not_known_yet() -> None:
    net = nn.Sequential(Running(), nn.Linear(1, 1))
    buffers = Objects([net]).buffers
    data = buffers.as_bytes()
    net[1].register_buffer("new", torch.ones(2))
    saved = buffers.copied(data)
    net[1].get_buffer("new").zero_()
    net[0].get_buffer("mean").add_(1)
    buffers.restore(saved)
    assert net[1].get_buffer("new").tolist() == [1, 1]
    assert net[0].get_buffer("mean").tolist() == [0, 0]


def test_another_ranks_buffers_find_a_place() -> None:
    theirs, ours = Running(), Running()
    theirs.mean = torch.ones(3, dtype=torch.float64)
    theirs.last = theirs.mean
    buffers = Objects([ours]).buffers
    told = Objects([theirs]).buffers.told()
    buffers.take(told)
    assert buffers.told() == told
    assert ours.last is ours.mean and ours.same is not ours.mean
    same = ours.same
    buffers.take(told)
    assert ours.same is same
    with pytest.raises(ElasticError, match="0 buffers, those of the other ranks 3"):
        Objects([nn.Linear(1, 1)]).buffers.take(told)


def test_buffers_that_have_grown_are_not_filled_with_what_they_were_and_not_kept_once_large() -> (
    None
):
    net = Running()
    buffers = Objects([net]).buffers
    data = buffers.as_bytes()
    assert len(data) == 8
    net.last = torch.ones(3)
    buffers.fill(data)
    assert net.last.tolist() == [1, 1, 1]
    net.last = torch.ones(MAX_BUFFERS)
    assert buffers.as_bytes() == b""


class Counting(nn.Module):
    """Keeps something in addition to tensors."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count, "tensors": [torch.ones(2)]}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]
        assert state["tensors"][0].tolist() == [1, 1]


def test_extra_state_of_modules_is_undone_with_a_step_a_rehearsal_and_a_snapshot() -> None:
    net = nn.Sequential(nn.Linear(1, 1), Counting(np.int64(3)))
    objects = Objects([net])
    settings = objects.settings.copied()
    net[1].count = 4
    objects.settings.restore(settings)
    assert net[1].count == 3
    saved = objects.save()
    net[1].count = 5
    objects.put_back(saved)
    assert net[1].count == 3

    def change() -> None:
        net[1].count = 6

    gone_back(objects, change)
    assert net[1].count == 3


def test_extra_state_that_a_newcomer_could_not_read_is_named() -> None:
    told = Objects([Counting(Color.RED)]).unreadable()
    assert "a Counting (get_extra_state) holds ['extra']['count'], a" in told


def test_extra_state_is_in_checkpoints() -> None:
    saved, net = Counting(7), Counting(0)
    copy = HostCopy()
    copy.take(State([saved]).now())
    tensors = {key: torch.ones(2) for key in keys_in(copy.structure)}
    State([net]).restore(filled(copy.structure, tensors))
    assert net.count == 7


def grown(*, named: bool) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    """Two layers, an optimizer for the second, and what to pass it to add the first."""
    net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    groups = [
        list(net[1].named_parameters()),
        [(f"0.{n}", p) for n, p in net[0].named_parameters()],
    ]
    if not named:
        groups = [[parameter for _, parameter in group] for group in groups]
    return net, torch.optim.Adam(groups[0]), groups[1]


@pytest.mark.parametrize("named", [True, False])
def test_groups_that_were_added_are_added_in_a_newcomer(*, named: bool) -> None:
    net, optimizer, added = grown(named=named)
    other_net, other, _ = grown(named=named)
    optimizer.add_param_group({"params": added, "lr": 0.5})
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    state = LocalState(Objects([net, optimizer]))
    structure, tensors = state.pack()
    held = [each.detach().clone().view(-1).view(torch.uint8) for each in tensors]
    LocalState(Objects([other_net, other])).restore(structure, held)
    assert [each["lr"] for each in other.param_groups] == [0.001, 0.5]
    assert other.param_groups[1]["params"][0] is other_net[0].weight
    assert str(other.state_dict()) == str(optimizer.state_dict())
    # Its script reaches the same place.
    again = other_net[0].named_parameters(prefix="0") if named else other_net[0].parameters()
    other.add_param_group({"params": again, "lr": 0.1})
    assert [each["lr"] for each in other.param_groups] == [0.001, 0.5]
    again = other_net[0].named_parameters(prefix="0") if named else other_net[0].parameters()
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        other.add_param_group({"params": again})


def test_a_group_that_came_after_a_snapshot_or_in_a_step_is_not_there_behind_a_loss() -> None:
    net, optimizer, added = grown(named=False)
    objects = Objects([net, optimizer])
    gone_back(objects, lambda: optimizer.add_param_group({"params": added}))
    assert len(optimizer.param_groups) == 1
    saved = objects.settings.copied()
    for _ in range(2):
        optimizer.add_param_group({"params": added})
        objects.settings.restore(saved)


def test_groups_that_a_newcomer_cannot_have_are_an_error() -> None:
    net, optimizer, added = grown(named=False)
    parameters = list(net.parameters())
    both = [[2, 3], [0, 1]]
    optimizer.add_param_group({"params": added})
    assert members(optimizer, parameters) == both
    with pytest.raises(ElasticError, match="different parameter groups"):
        add_missing(optimizer, parameters, both[:1], [{}])
    del optimizer.param_groups[1]
    with pytest.raises(ElasticError, match="give their module to elastic.session, too"):
        add_missing(optimizer, parameters, [*both[:1], [0, None]], [{}, {}])


def trained(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 2).to(dtype)
    optimizer = torch.optim.NAdam(net.parameters())
    net(torch.ones(1, 2, dtype=dtype)).sum().backward()
    optimizer.step()
    return net, optimizer


def by_snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gone_back(Objects([net, optimizer]), optimizer.step)


def by_rehearsal(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    objects = Objects([net, optimizer])
    saved = objects.save()
    optimizer.step()
    objects.put_back(saved)


def by_checkpoint(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = State([net, optimizer])
    copy = HostCopy()
    copy.take(state.now())
    optimizer.step()
    state.restore(filled(copy.structure, copy._tensors))


@pytest.mark.parametrize("go_back", [by_snapshot, by_rehearsal, by_checkpoint])
def test_an_optimizers_state_keeps_its_types_and_groups(go_back: Any) -> None:
    """torch's own loading rounds a float32 product kept for bfloat16 parameters, and makes new groups."""
    net, optimizer = trained(torch.bfloat16)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    before = {key: value.clone() for key, value in optimizer.state[net.weight].items()}
    assert before["mu_product"].dtype == torch.float32
    go_back(net, optimizer)
    after = optimizer.state[net.weight]
    assert {key: value.dtype for key, value in after.items()} == {
        key: value.dtype for key, value in before.items()
    }
    assert all(torch.equal(after[key], value) for key, value in before.items())
    # The script's own schedule may hold these.
    assert optimizer.param_groups is groups and groups[0] is group
    assert group["params"][0] is net.weight


def test_an_optimizers_state_takes_the_type_of_parameters_that_go_on_in_another() -> None:
    first, state = State(trained(torch.float32)), HostCopy()
    state.take(first.now())
    net, optimizer = trained(torch.bfloat16)
    State([net, optimizer]).restore(filled(state.structure, state._tensors))
    assert optimizer.state[net.weight]["exp_avg"].dtype == torch.bfloat16

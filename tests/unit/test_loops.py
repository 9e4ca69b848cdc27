"""Loops over batches that a session cannot tell apart are refused; consecutive loops are told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rallypoint import elastic
from rallypoint.elastic.loops.own_state import OwnState, Place
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.errors import ElasticError


def session(folder: Path | None = None) -> elastic.Session:
    return elastic.session(torch.nn.Linear(1, 1), checkpoint=folder)


def test_two_loops_at_once_are_refused() -> None:
    with session() as it:
        for _ in it.epochs(1):
            pairs = zip(it.batches([1, 2]), it.batches([3, 4]), strict=True)
            with pytest.raises(ElasticError, match="began while another one is under way"):
                next(pairs)


def test_a_loop_within_another_is_refused() -> None:
    with session() as it:
        for _ in it.batches([1, 2]):
            with pytest.raises(ElasticError, match="iterate over the inner loader without"):
                next(it.batches([3, 4]))
            break


def test_a_loop_that_was_left_does_not_prevent_the_next() -> None:
    found = []
    with session() as it:
        for _ in it.epochs(2):
            for loader in ([1, 2], [3, 4]):
                for batch in it.batches(loader):
                    found.append(batch)
                    break
    assert found == [1, 3, 1, 3]


def test_a_loop_in_no_epoch_before_the_epochs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ElasticError, match=r"session\.epochs was called after a loop"):
        with session(tmp_path) as it:
            list(it.batches([1, 2]))
            next(it.epochs(1))


def test_a_place_tells_the_loop_and_one_of_an_earlier_version_is_in_the_first() -> None:
    random = RandomState.now()
    own = OwnState(5, Place(1, 2, begun=random, loop=3), random)
    assert OwnState.unpack(own.pack()) == own
    earlier = own.pack().replace(b'"loop":3,', b"")
    size = int.from_bytes(earlier[:4]) - len(b'"loop":3,')
    found = OwnState.unpack(size.to_bytes(4) + earlier[4:])
    assert found == replace(own, place=replace(own.place, loop=0))


def test_a_loop_that_has_ended_stays_so_if_what_follows_it_adds_to_the_data(
    tmp_path: Path,
) -> None:
    net, found = torch.nn.Linear(1, 1), []
    for is_last in (False, True):  # the second session starts behind the first function
        data = [1, 2]
        with elastic.session(net, checkpoint=tmp_path) as it:
            data += [3] * it.position  # as a data set of the session would be loaded
            for epoch in it.epochs(2):
                for batch in it.batches(data):
                    with it.step():
                        found.append((epoch, batch))
                it.run(data.append, 3)
                if not is_last:
                    break
    assert found[:3] == [(0, 1), (0, 2), (1, 1)]


def test_the_index_of_a_batch_is_that_in_its_loop_also_after_a_new_start(tmp_path: Path) -> None:
    net, found = torch.nn.Linear(1, 1), []
    for is_last in (False, True):  # the second session starts behind the second step
        with elastic.session(net, checkpoint=tmp_path) as it:
            for batch in it.batches("abcd"):
                if it.batch_index == 2 and not is_last:
                    break
                with it.step():
                    found.append((it.batch_index, batch))
    assert found == list(enumerate("abcd"))


@pytest.mark.parametrize("counts", [True, False])
def test_a_count_of_batches_that_a_loss_makes_wrong_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, counts: bool
) -> None:
    with session(tmp_path) as it:
        for _ in it.epochs(2):
            for _ in enumerate(it.batches([1, 2])) if counts else it.batches([1, 2]):
                pass
    named = [each for each in caplog.messages if "test_loops.py" in each]
    assert len(named) == counts
    assert all("enumerate" in each and "session.batch_index" in each for each in named)


@pytest.mark.parametrize("where", ["step", "body", "epoch", "function", "learning rate", "average"])
def test_a_change_outside_of_a_step_that_a_loss_makes_twice_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    net = torch.nn.Linear(1, 1)
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with elastic.session(net, average, optimizer, scheduler, checkpoint=tmp_path) as it:
        for epoch in it.epochs(3):
            for x in it.batches(torch.ones(5, 1)):
                with it.step():
                    net(x).sum().backward()
                    optimizer.step()
                    if where == "step":
                        scheduler.step()
                if where == "body":
                    scheduler.step()
                if where == "average":
                    average.update_parameters(net)
            if where == "epoch":
                scheduler.step()
            if where == "function":
                it.run(scheduler.step)
            if where == "learning rate":
                optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
    told = [each.message for each in caplog.records if "outside of a step" in each.message]
    scheduled = "the state of a StepLR"
    what = {"body": scheduled, "epoch": scheduled, "average": "parameters"}
    assert len(told) == (where in what)
    assert all(f"has changed {what[where]} outside of a step. " in each for each in told)


def test_what_a_function_has_returned_is_not_run() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    with (
        elastic.session(optimizer) as it,
        pytest.raises(TypeError, match="got a NoneType; pass the function without"),
    ):
        it.run(optimizer.zero_grad())  # type: ignore[arg-type, func-returns-value]

"""The checkpoint at the end of a session, while another one is still being written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from rallypoint.elastic.checkpointing.checkpoints import Checkpoints
from rallypoint.elastic.loops.own_state import OwnState, Place
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.state.objects import Objects


class Slow(Checkpoints):
    """Starts to write only when it is allowed to."""

    def __init__(self, where: Path) -> None:
        super().__init__(where, every=2, keep=3)
        self.may_write = threading.Event()

    def _write_one(self, own: OwnState, key: str) -> None:
        assert self.may_write.wait(30)
        super()._write_one(own, key)


def own_at(steps: int) -> OwnState:
    return OwnState(steps, Place(), RandomState.now())


@pytest.mark.parametrize("ends_at", [4, 5])
def test_the_last_one_is_written_although_it_was_left_out(tmp_path: Path, ends_at: int) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoints = Slow(tmp_path)
    checkpoints.begin(Objects([model]), 0, 1, None)
    checkpoints.take(own_at(2))
    checkpoints.take(own_at(4))  # left out: the first one is still being written
    with torch.no_grad():
        model.weight.fill_(float(ends_at))
    threading.Timer(0.05, checkpoints.may_write.set).start()
    checkpoints.end(own_at(ends_at))
    again = Checkpoints(tmp_path, every=2, keep=3)
    again.begin(Objects([model]), 0, 1, None)
    with torch.no_grad():
        model.weight.fill_(0.0)
    loaded = again.load()
    assert loaded is not None
    assert loaded.record.step == ends_at
    assert model.weight.eq(ends_at).all()


def test_what_training_has_frozen_stays_so_and_the_rest_is_as_the_script_sets_it_up(
    tmp_path: Path,
) -> None:
    def begin(at: Path) -> tuple[torch.nn.Sequential, Objects, Slow]:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        net[0].requires_grad_(False)
        checkpoints = Slow(at)
        checkpoints.may_write.set()
        return net, Objects([net]), checkpoints

    net, objects, first = begin(tmp_path)
    first.begin(objects, 0, 1, None)
    net[0].weight.requires_grad_(True)
    net[1].eval()
    objects.modes.note_complete()
    first.end(own_at(4))
    net, objects, second = begin(tmp_path)
    net[0].bias.requires_grad_(True)  # the script was changed between the two starts
    second.begin(objects, 0, 1, None)
    assert second.load() is not None
    assert [each.training for each in net.modules()] == [True, True, False]
    assert [each.requires_grad for each in net[0].parameters()] == [True, True]
    assert objects.modes.now().training == [True, True, False]


def test_nothing_is_written_after_a_session_without_a_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    first = Slow(tmp_path)
    first.begin(Objects([model]), 0, 1, None)
    first.may_write.set()
    first.end(own_at(4))
    second = Slow(tmp_path)
    second.begin(Objects([model]), 0, 1, None)
    loaded = second.load()
    assert loaded is not None
    second.end(own_at(loaded.record.step))  # would wait forever if it wrote

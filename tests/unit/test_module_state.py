"""What modules have besides parameters, and what else a state may hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rallypoint.elastic import local_state
from rallypoint.elastic.local_state import LocalState
from rallypoint.elastic.objects import Objects


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

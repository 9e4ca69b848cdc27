"""Digests by which ranks tell whether they hold the same state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from rallypoint.join.hooks.replay import Standstill
from rallypoint.join.state import _sum_of_bits, digest


@pytest.mark.parametrize("change", ["bit", "order", "type", "shape", "number", "key"])
def test_a_digest_sees_every_change(change: str) -> None:
    def values(changed: str = "") -> Any:
        x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        if changed == "bit":
            x.view(torch.int32)[1, 2] ^= 1
        x = {
            "order": x[[1, 0, 2]],
            "type": x.view(torch.int32),
            "shape": x.reshape(4, 3),
        }.get(changed, x)
        return {"b" if changed == "key" else "a": [x, 0.1 + (changed == "number")]}

    assert digest(values()) == digest(values())
    assert digest(values()) != digest(values(change))
    # What an accelerator computes.
    if change in ("bit", "order"):
        assert _sum_of_bits(values()["a"][0]) != _sum_of_bits(values(change)["a"][0])


def test_an_average_counts_what_it_has_averaged_in_replayed_steps() -> None:
    """Its parameters keep these updates: with a smaller count, the next one would have another weight than on other ranks."""
    net = torch.nn.BatchNorm1d(2)
    average = AveragedModel(net)
    still = Standstill([net, average])
    net(torch.ones(2, 2))
    average.update_parameters(net)
    still.end()
    assert average.n_averaged == 1
    assert net.num_batches_tracked == 0

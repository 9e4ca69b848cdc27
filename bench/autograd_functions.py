"""Functions that bench/autograd.py calls in another process."""

from __future__ import annotations

import torch
from torch import Tensor


PARAMETERS = 8
WIDTH = 64


def double(x: Tensor) -> Tensor:
    return x * 2


def nothing() -> None:
    pass


class Layers:
    """Some parameters of one worker."""

    def __init__(self) -> None:
        self.parameters = [
            torch.nn.Parameter(torch.full((WIDTH, WIDTH), 0.01)) for _ in range(PARAMETERS)
        ]

    def parameter(self, at: int) -> torch.nn.Parameter:
        return self.parameters[at]

    def forward(self, x: Tensor) -> Tensor:
        for each in self.parameters:
            x = x @ each
        return x


_layers: list[Layers] = []


def layers() -> Layers:
    if not _layers:
        _layers.append(Layers())
    return _layers[0]


def forward(x: Tensor) -> Tensor:
    return layers().forward(x)

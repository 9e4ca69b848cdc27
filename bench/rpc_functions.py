"""What bench/rpc.py calls in another process: both rivals find a function by its module and name."""

from __future__ import annotations

from torch import Tensor


def nothing() -> None:
    pass


def discard(x: Tensor) -> None:
    pass


def echo(x: Tensor) -> Tensor:
    return x


def digest(x: Tensor) -> int:
    """Every element counts: was all of it there when the function ran?"""
    return int(x.sum().item())

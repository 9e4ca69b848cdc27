"""SyncBatchNorm on a rank that has run out: it takes part in the exchange with zero rows.

The layer's statistics cover the rows of all ranks, and must not include a replayed batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def exchanges_statistics(layer: nn.Module) -> bool:
    """Whether this is a SyncBatchNorm, or a layer that declares itself like one (``exchanges_statistics = True``)."""
    return isinstance(layer, nn.SyncBatchNorm) or bool(
        getattr(layer, "exchanges_statistics", False)
    )


def silence(layer: Any, stack: ExitStack) -> None:
    """Have the layer contribute no rows, until ``stack`` ends."""
    forward: Callable[[torch.Tensor], torch.Tensor] = layer.forward

    def no_rows(x: torch.Tensor) -> torch.Tensor:
        if not layer.training:
            return forward(x)
        nothing = forward(x[:0])
        # The empty sum ties this rank's backward to the exchange, and adds nothing.
        return _normalized(x, layer) + nothing.sum()

    layer.__dict__["forward"] = no_rows
    stack.callback(layer.__dict__.pop, "forward", None)


def _normalized(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """An output of the right shape and scale; its gradients have weight zero."""
    mean, var = layer.running_mean, layer.running_var
    if mean is None or var is None:
        return functional.batch_norm(x, None, None, layer.weight, layer.bias, training=True)
    # Copies: the layer's next forward modifies its statistics before this backward runs.
    return functional.batch_norm(
        x, mean.clone(), var.clone(), layer.weight, layer.bias, training=False, eps=layer.eps
    )

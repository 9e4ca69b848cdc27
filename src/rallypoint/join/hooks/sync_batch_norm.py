"""SyncBatchNorm on a rank that has run out: it takes part in the exchange with no rows at all.

Its statistics are those of all ranks' rows together; a batch that is only run again must not be among them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def exchanges_statistics(layer: nn.Module) -> bool:
    """Whether it is a SyncBatchNorm, or a layer that says it is like one (``exchanges_statistics = True``)."""
    return isinstance(layer, nn.SyncBatchNorm) or bool(
        getattr(layer, "exchanges_statistics", False)
    )


def silence(layer: Any, stack: ExitStack) -> None:
    """From now on the layer contributes no row; ``stack`` makes it speak again."""
    forward: Callable[[torch.Tensor], torch.Tensor] = layer.forward

    def no_rows(x: torch.Tensor) -> torch.Tensor:
        if not layer.training:
            return forward(x)
        nothing = forward(x[:0])
        # The sum of no numbers: it ties this rank's backward to the exchange, and adds nothing.
        return _normalized(x, layer) + nothing.sum()

    layer.__dict__["forward"] = no_rows
    stack.callback(layer.__dict__.pop, "forward", None)


def _normalized(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """Something of the right shape and size; what comes of it does not count."""
    mean, var = layer.running_mean, layer.running_var
    if mean is None or var is None:
        return functional.batch_norm(x, None, None, layer.weight, layer.bias, training=True)
    # Copies: the layer's next forward changes its own, and backward is still to come.
    return functional.batch_norm(
        x, mean.clone(), var.clone(), layer.weight, layer.bias, training=False, eps=layer.eps
    )

"""Training on uneven inputs: no rank hangs, and every gradient is correct."""

import torch

from rallypoint._core.tested_torch import warn_if_untested

from .context import Join
from .evaluation import ShardSampler, gather_samples, mean_over_samples
from .joinable import Joinable, JoinHook


__all__ = [
    "Join",
    "JoinHook",
    "Joinable",
    "ShardSampler",
    "gather_samples",
    "mean_over_samples",
]

warn_if_untested(torch.__version__)

"""Gradients through calls: torch.distributed.autograd's functions, over all workers of a group."""

from __future__ import annotations

from .api import context, get_gradients
from .averaging import average
from .backward import backward


__all__ = ["average", "backward", "context", "get_gradients"]

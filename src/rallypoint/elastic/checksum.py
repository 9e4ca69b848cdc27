"""A number that tells whether memory is the same: on two ranks, or at two times."""

from __future__ import annotations

import torch


# Words in a block: one page.
_BLOCK = 512


def checksum(words: torch.Tensor) -> int:
    """The checksum of memory, at the speed of reading it. Depends on the pages' order and on the contents of each.

    Args:
        words: ``[n]``, int64, on any device.
    """
    whole = words.numel() // _BLOCK * _BLOCK
    sums = torch.cat([words[:whole].view(-1, _BLOCK).sum(1), words[whole:].sum().reshape(1)])
    weights = torch.arange(1, 2 * sums.numel(), 2, device=words.device)
    return int((sums * weights).sum().item()) & (1 << 64) - 1

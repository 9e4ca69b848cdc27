"""Which samples belong to which step: a pure function of seed, epoch, step and number of ranks.

An epoch is one order of all samples. A step takes the next ones of that order, and its ranks share them. So the samples of a
step do not depend on the number of ranks, and a change of that number in the middle of an epoch repeats or leaves out none.
"""

from __future__ import annotations

import torch


def steps_of(length: int, batch_size: int) -> int:
    """How many steps an epoch has.

    Args:
        length: number of samples.
        batch_size: of a step, over all ranks; the most it takes.
    """
    return -(-length // batch_size)


def bounds(length: int, batch_size: int, step: int) -> tuple[int, int]:
    """The samples of a step, as a range of the epoch's order.

    All steps of an epoch are of nearly the same size: they differ by one at most. A small last step would weigh its samples
    more than others, and could leave ranks with none.
    """
    count = steps_of(length, batch_size)
    return step * length // count, (step + 1) * length // count


def order(length: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """The order of an epoch: every sample once."""
    if not shuffle:
        return list(range(length))
    generator = torch.Generator()
    # Neighbouring seeds and epochs must not meet: (seed 0, epoch 1) is not (seed 1, epoch 0).
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
    found: list[int] = torch.randperm(length, generator=generator).tolist()
    return found


def share(samples: list[int], rank: int, size: int) -> list[int]:
    """One rank's part of a step. The parts differ by one sample at most."""
    return samples[rank::size]

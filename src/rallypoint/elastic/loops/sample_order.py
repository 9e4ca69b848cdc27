"""Which samples belong to which step: a pure function of seed, epoch, step and number of ranks.

An epoch is one order of all samples. A step takes the next ones in that order, and its ranks share them. If a step's batch size
is fixed, its samples do not depend on the number of ranks. If a rank's is fixed, they depend on the epoch's *sizes*: how many
ranks there were, and from which step on. Either way, changing that number within an epoch repeats no sample and omits none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def steps_of(length: int, batch_size: int) -> int:
    """How many steps an epoch has.

    Args:
        length: number of samples.
        batch_size: at most this many samples per step, over all ranks.
    """
    return -(-length // batch_size)


def bounds(length: int, batch_size: int, step: int) -> tuple[int, int]:
    """The samples of a step, as a range of the epoch's order.

    All steps of an epoch are of nearly the same size: they differ by one sample at most. A small last step would give its samples
    more weight than others, and could leave ranks with none.
    """
    count = steps_of(length, batch_size)
    return step * length // count, (step + 1) * length // count


def local_steps_of(length: int, batch_size: int, size: int) -> int:
    """How many steps this many samples make if each rank has a batch of its own.

    Each rank has at least one sample in each step. (With a batch size of one, some ranks take a second sample for that.)

    Args:
        length: number of samples that are left.
        batch_size: at most this many samples per rank.
        size: number of ranks.
    Returns:
        The number; 0 if there are fewer samples than ranks.
    """
    return min(-(-length // (batch_size * size)), length // size)


def local_bounds(
    length: int, batch_size: int, sizes: Sequence[tuple[int, int]], step: int
) -> tuple[int, int]:
    """The samples of a step as a range of the epoch's order, if each rank has a batch of its own.

    Wherever the number of ranks changes, the remaining samples are divided again into steps of nearly the same size.

    Args:
        length: number of samples.
        batch_size: at most this many samples per rank.
        sizes: the epoch's: (first step, number of ranks), the first one from step 0 on.
        step: up to :func:`local_length`; there, the range is what no step takes: fewer samples than there are ranks.
    """
    done = 0
    for index, (first, size) in enumerate(sizes):
        left, count = length - done, local_steps_of(length - done, batch_size, size)
        is_last = index == len(sizes) - 1
        end = first + count if is_last else sizes[index + 1][0]
        if step < end:
            place = step - first
            return done + place * left // count, done + (place + 1) * left // count
        done += (end - first) * left // count if count else 0
    return done, length


def local_length(length: int, batch_size: int, sizes: Sequence[tuple[int, int]]) -> int:
    """How many steps the epoch has, if each rank has a batch of its own. Arguments as for :func:`local_bounds`."""
    first, size = sizes[-1]
    begin, _ = local_bounds(length, batch_size, sizes[:-1], first) if sizes[:-1] else (0, 0)
    return first + local_steps_of(length - begin, batch_size, size)


def resized(sizes: Sequence[tuple[int, int]], step: int, size: int) -> tuple[tuple[int, int], ...]:
    """An epoch's sizes, once it continues at a step with a number of ranks."""
    before = tuple(each for each in sizes if each[0] < step)
    if before and before[-1][1] == size:
        return before
    return (*before, (step, size))


def order(length: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """The order of an epoch: every sample once."""
    if not shuffle:
        return list(range(length))
    generator = torch.Generator()
    # Neighboring seeds and epochs must not coincide: (seed 0, epoch 1) is not (seed 1, epoch 0).
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
    found: list[int] = torch.randperm(length, generator=generator).tolist()
    return found


def share(samples: list[int], rank: int, size: int) -> list[int]:
    """One rank's part of a step. The parts differ by one sample at most."""
    return samples[rank::size]

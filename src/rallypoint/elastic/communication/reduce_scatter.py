"""A reduce-scatter over Gloo that can be waited for in slices.

torch, too, builds one from all-reduces of copies, but waits for them without a time-out, whatever it is given
(``ProcessGroupGloo.cpp``, ``LambdaWork``). The results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rallypoint._core.clock import Deadline


# Seconds: torch takes 0 as no limit.
_SHORTEST = 0.001

AllReduce = Callable[[list[Tensor], dist.AllreduceOptions], dist.Work]


def begun(all_reduce: AllReduce, rank: int, size: int, args: Sequence[Any]) -> dist.Work | None:
    """Start one of torch's five reduce-scatters.

    Args:
        all_reduce: the group's.
        rank: of this process in the group.
        size: of the group.
        args: the outputs, the inputs, and options. Outputs and inputs are a tensor and a tensor, two lists of tensors, a list
            and a list of lists, or a tensor and a list.

    Returns:
        Its work; None if torch refuses these tensors, and will say why.
    """
    outputs, inputs, *options = args
    pairs = list(_pairs(outputs, inputs))
    if not pairs or not all(_fit(output, given, size) for output, given in pairs):
        return None
    asked = _options(options)
    works, parts = [], []
    with torch.no_grad():
        for output, given in pairs:
            if isinstance(given, Tensor):
                copies = [given.clone()]
                part = copies[0].chunk(size)[rank]
            else:
                copies = [each.clone() for each in given]
                part = copies[rank]
            works += [all_reduce([copy], asked) for copy in copies]
            parts.append((output, part))
    return ReduceScatter(works, parts)


def _pairs(outputs: Any, inputs: Any) -> Iterator[tuple[Tensor, Any]]:
    """Each output, and the tensor or the list of tensors that it is a part of."""
    if isinstance(outputs, Tensor):
        yield outputs, inputs
    elif len(outputs) == len(inputs):
        yield from zip(outputs, inputs, strict=True)


def _fit(output: Tensor, given: Any, size: int) -> bool:
    if isinstance(given, Tensor):
        is_whole = output.dim() > 0 and given.dim() > 0 and output.shape[0] * size == given.shape[0]
        return is_whole and output.dtype == given.dtype
    return len(given) == size and all(
        each.shape == output.shape and each.dtype == output.dtype for each in given
    )


def _options(given: Sequence[Any]) -> dist.AllreduceOptions:
    """All-reduce options from those of a reduce-scatter, or from an operation and a time-out."""
    asked = dist.AllreduceOptions()
    for each in given:
        if isinstance(each, dist.ReduceScatterOptions):
            asked.reduceOp, asked.timeout = each.reduceOp, each.timeout
        elif isinstance(each, timedelta):
            asked.timeout = each
        elif each is not None:
            asked.reduceOp = each
    return asked


class ReduceScatter(dist.Work):
    """All-reduces, from whose results this rank takes its parts.

    Args:
        works: the all-reduces.
        parts: outputs, and what they become.
    """

    def __init__(self, works: list[dist.Work], parts: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._works = works
        self._parts = parts
        self._failed: dist.Work | None = None

    def is_completed(self) -> bool:
        return self._failed is not None or all(each.is_completed() for each in self._works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the outputs are complete.

        Raises:
            RuntimeError: it failed, or did not end in time.
        """
        if self._failed is not None:
            return self._failed.wait()
        deadline = Deadline(timeout.total_seconds() if timeout else None)
        # Completed ones first: one that has failed raises without waiting for the others.
        for each in sorted(self._works, key=lambda work: not work.is_completed()):
            self._wait(each, deadline.remaining())
        for output, part in self._parts:
            output.copy_(part)
        self._works, self._parts = [], []
        return True

    def _wait(self, work: dist.Work, left: float | None) -> None:
        if left is None:
            work.wait()
            return
        try:
            work.wait(timedelta(seconds=max(left, _SHORTEST)))
        except RuntimeError:
            if not work.is_completed():
                raise
            # The work may have ended just as the time did: this returns at once, or raises what went wrong.
            self._failed = work
            work.wait()
            self._failed = None

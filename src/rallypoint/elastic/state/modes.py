"""The modes of modules: whether they train or evaluate, which parameters are trained, and what DDP does next.

A step or function that a loss ends may have left them changed (``net.eval()`` … ``net.train()``). A process that takes over a
lost rank runs its script from the top, without the changes of earlier epochs (a backbone that was unfrozen). DDP broadcasts
buffers in a forward pass unless the previous one was without gradients: if one rank repeats a validation and another reaches it
from training, one would wait for a broadcast that the other skips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.elastic import torch_private


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags at one time.

    Args:
        training: for each module, its ``training``.
        trained: for each parameter, its ``requires_grad``.
        syncs: for each DDP module, whether its next forward pass broadcasts buffers.
    """

    training: list[bool]
    trained: list[bool]
    syncs: list[bool]


class Modes:
    """The flags of a session's modules.

    Args:
        parts: all modules, in the same order on all ranks.
        parameters: all parameters, too.
    """

    def __init__(self, parts: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> None:
        self._parts, self._parameters = list(parts), list(parameters)
        self._ddp = [each for each in parts if isinstance(each, DistributedDataParallel)]
        self._at_first = self._behind = self.now()  # after the last complete step

    def now(self) -> Flags:
        return Flags(
            [each.training for each in self._parts],
            [each.requires_grad for each in self._parameters],
            [torch_private.syncs_buffers_next(each) for each in self._ddp],
        )

    def changed(self) -> Iterator[tuple[nn.Module | torch.Tensor, bool]]:
        """What training has changed since the set-up: modules with their mode after the last complete step, and parameters.

        A script that starts from here again makes the changes that follow that step itself.
        """
        first, behind, now = self._at_first, self._behind, self.now()
        for part, before, training in zip(
            self._parts, first.training, behind.training, strict=True
        ):
            if training != before:
                yield part, training
        for parameter, before, trained in zip(
            self._parameters, first.trained, now.trained, strict=True
        ):
            if trained != before:
                yield parameter, trained

    def note_complete(self) -> None:
        """A step is complete."""
        self._behind = self.now()

    def restore(self, flags: Flags) -> None:
        # Setting them costs more than checking.
        for part, training in zip(self._parts, flags.training, strict=True):
            if part.training != training:
                part.training = training
        for parameter, trained in zip(self._parameters, flags.trained, strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
        for net, syncs in zip(self._ddp, flags.syncs, strict=True):
            torch_private.set_syncs_buffers_next(net, syncs)

    def told(self) -> list[list[Any]]:
        """For another process: the current flags, and those after the last complete step."""
        both = (self.now(), self._behind)
        return [[each.training, each.trained, each.syncs] for each in both]

    def take(self, told: Sequence[Sequence[Any]]) -> None:
        """Take over another process's flags, from :meth:`told`."""
        now, self._behind = (Flags(*each) for each in told)
        self.restore(now)

    def go_behind_last(self, *, is_new: bool) -> None:
        """This rank's script continues after the last complete step, and itself makes the changes that follow there, such as
        ``was = net.training; net.eval()``.

        Args:
            is_new: this process runs its script from the top. It may not reach the code that has unfrozen parameters since.
        """
        trained = self.now().trained if is_new else self._behind.trained
        self.restore(replace(self._behind, trained=trained))

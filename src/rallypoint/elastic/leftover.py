"""Gradients that a step leaves behind because their optimizer has not stepped: whether a later step uses them.

An optimizer's step may be skipped: by a ``GradScaler`` that finds non-finite gradients, or by a script that sees a non-finite
loss. Then the next step begins with ``zero_grad``, and nothing is lost with a process. If the next step adds to the gradients
instead, or an optimizer applies them, they are part of an accumulation over several steps.

The difference shows when the next gradient arrives: ``zero_grad`` is called before that, if at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from . import torch_private
from .state.objects import Objects


class Leftover:
    """The gradients that the last steps have left.

    Args:
        objects: the session's.

    Attributes:
        is_used: a step has used gradients that an earlier one left.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._left: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the parameter's id
        self._hooks: list[Any] = []
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped in this step
        self.is_used = False

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped in the step under way."""
        return bool(self._stepped)

    def begin_step(self) -> None:
        """A step begins that is not rehearsed: watch what it does with the leftover gradients."""
        self._stepped.clear()
        self._left = {key: pair for key, pair in self._left.items() if _is_there(*pair)}
        for parameter, _ in self._left.values():
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                # The parameter does not keep its node alive.
                hook = node.register_prehook(lambda *_, each=parameter: self._meet([each]))
                self._hooks.append((node, hook))

    def note_reduction(self) -> None:
        """Gradients are about to be summed over ranks; the gradients of FSDP2's shards arrive right after that."""
        if self._left:
            self._meet(self._objects.fsdp_parameters())

    def note_applied(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped. A gradient that did not arrive in this step is left over from an earlier one."""
        self._stepped.add(id(optimizer))
        if self._left:
            self._meet(_parameters_of([optimizer]))

    def end_step(self) -> None:
        """The step has ended, whether or not it is complete."""
        for _, hook in self._hooks:
            hook.remove()
        self._hooks = []

    def add(self, before: Sequence[tuple[torch.Tensor, int] | None]) -> None:
        """A step has ended, and is complete.

        Args:
            before: the gradients that it found (:meth:`.Objects.gradients`).
        """
        stepped = [each for each in self._objects.optimizers if id(each) in self._stepped]
        others = [each for each in self._objects.optimizers if id(each) not in self._stepped]
        if not others:
            return
        left = ((id(pair[0]), pair) for pair in self._objects.accumulated(before))
        if stepped:
            waiting = {id(each) for each in _parameters_of(others)}
            waiting -= {id(each) for each in _parameters_of(stepped)}
            left = (pair for pair in left if pair[0] in waiting)
        self._left.update(left)

    def _meet(self, parameters: Iterable[torch.Tensor]) -> None:
        """New gradients arrive for these parameters: note whether the old ones are still there."""
        for each in parameters:
            pair = self._left.pop(id(each), None)
            if pair is not None and _is_there(*pair):
                self.is_used = True


def _is_there(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    return parameter.grad is grad and torch_private.is_gradient(grad)


def _parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]

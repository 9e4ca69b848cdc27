"""The order of the modules' forward and backward passes in a step, learned from this rank's own steps. Pure.

Modules that share a loss run forward one after the other, and backward in another order. A rank that matches their
collectives must keep that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one module.

    Args:
        module: its position among the block's modules.
        forward: True for a forward pass, False for a backward pass.
    """

    module: int
    forward: bool


class Passes:
    """The passes of the current step, and the order seen in earlier steps.

    Args:
        modules: the number of modules.
        order: the order known from an earlier block. None: unknown.
    """

    def __init__(self, modules: int, order: Sequence[Pass] | None = None) -> None:
        self._default = [Pass(i, forward) for i in range(modules) for forward in (True, False)]
        self._before = None if order is None else list(order)
        self._step: int | None = None
        self._now: list[Pass] = []
        self._modules = modules

    def note(self, step: int, module: int, *, forward: bool) -> None:
        """Record that a pass starts in this step."""
        if step != self._step:
            self._before, self._step, self._now = self.order, step, []
        self._now.append(Pass(module, forward))

    def has_begun(self, step: int) -> bool:
        """Whether a pass of this step has started."""
        return step == self._step

    @property
    def order(self) -> list[Pass] | None:
        """The order in a whole step. With several modules, None until a step has shown it."""
        whole = self._default if self._before is None else self._before
        if len(self._now) >= len(whole):
            return list(self._now)
        return self._before if self._modules > 1 else self._default

    def missing(self, step: int) -> list[Pass]:
        """The passes this rank has not done in this step, in order; if the order is unknown, module by module."""
        whole = self.order or self._default
        return whole[len(self._now) :] if step == self._step else whole

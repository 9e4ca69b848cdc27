"""In which order the modules of a step go forward and backward, as this rank's own steps show it: pure.

Modules that share a loss go forward one after the other, and backward in another order. Whoever matches their
collectives has to keep to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one module.

    Args:
        module: which one: its position among those of the block.
        forward: or backward.
    """

    module: int
    forward: bool


class Passes:
    """Those of the step that runs, and of the ones before.

    Args:
        modules: how many there are.
        order: what is known from blocks before; None: nothing.
    """

    def __init__(self, modules: int, order: Sequence[Pass] | None = None) -> None:
        self._default = [Pass(i, forward) for i in range(modules) for forward in (True, False)]
        self._before = None if order is None else list(order)
        self._step: int | None = None
        self._now: list[Pass] = []
        self._modules = modules

    def note(self, step: int, module: int, *, forward: bool) -> None:
        """A pass begins in this step."""
        if step != self._step:
            self._before, self._step, self._now = self.order, step, []
        self._now.append(Pass(module, forward))

    @property
    def order(self) -> list[Pass] | None:
        """Of a whole step; None: no step has shown it, and there are several modules."""
        whole = self._default if self._before is None else self._before
        if len(self._now) >= len(whole):
            return list(self._now)
        return self._before if self._modules > 1 else self._default

    def missing(self, step: int) -> list[Pass]:
        """What this rank has not done in this step, in its order; one module after the other where it is unknown."""
        whole = self.order or self._default
        return whole[len(self._now) :] if step == self._step else whole

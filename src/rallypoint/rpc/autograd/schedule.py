"""Which part of a local graph can run once some of its gradients have arrived. Pure.

A worker's graph has *outputs*, whose gradients may arrive (roots, and tensors that it sent), and *inputs*, whose gradients
are wanted (leaves, and tensors that it received). An input's gradient is computed once, when the gradients of all
outputs that depend on it have arrived. So every node that runs sees its complete gradient. A node runs again only if
inputs below it wait for more outputs.

At first all outputs may get a gradient. If some inputs still wait when no more gradients are on their way, a search finds
the outputs that take part, and :meth:`Schedule.settle` leaves out the others.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple


class Step(NamedTuple):
    """One run of autograd.

    Args:
        outputs: those whose gradients it uses.
        inputs: those whose gradients it computes.
        frees: whether no later step needs what these outputs lead to.
    """

    outputs: tuple[Hashable, ...]
    inputs: tuple[Hashable, ...]
    frees: bool


class Schedule:
    """The steps of one worker in one backward pass.

    Args:
        outputs: all that may get a gradient.
        needs: for each input, the outputs that depend on it; at least one.
    """

    def __init__(
        self, outputs: Iterable[Hashable], needs: Mapping[Hashable, Collection[Hashable]]
    ) -> None:
        self._missing = dict.fromkeys(outputs)
        self._arrived: set[Hashable] = set()
        self._needs = needs
        # For each output, how many inputs still wait for their step.
        self._open = dict.fromkeys(self._missing, 0)
        self._lacks: dict[Hashable, int] = {}
        self._below: dict[Hashable, list[Hashable]] = {each: [] for each in self._missing}
        for each, needed in needs.items():
            self._lacks[each] = len(needed)
            for output in needed:
                self._open[output] += 1
                self._below[output].append(each)
        self._ready: list[Hashable] = []
        # Inputs that have some of their gradients, and wait for others.
        self._begun: set[Hashable] = set()

    def arrive(self, output: Hashable) -> None:
        """The gradient of an output is known.

        Raises:
            KeyError: it has arrived before, or is not expected.
        """
        del self._missing[output]
        self._arrived.add(output)
        for each in self._below[output]:
            self._lacks[each] -= 1
            if self._lacks[each]:
                self._begun.add(each)
            else:
                self._begun.discard(each)
                self._ready.append(each)

    def settle(self, outputs: Collection[Hashable]) -> None:
        """Only these outputs take part."""
        for output in [each for each in self._missing if each not in outputs]:
            del self._missing[output]
            for each in self._below[output]:
                self._lacks[each] -= 1
                if not self._lacks[each] and each in self._begun:
                    self._begun.discard(each)
                    self._ready.append(each)

    def next_step(self) -> Step | None:
        """What can run now; None: nothing. The caller runs it to completion before it asks again."""
        if not self._ready:
            return None
        inputs, self._ready = tuple(self._ready), []
        outputs: dict[Hashable, None] = {}
        for each in inputs:
            for output in self._needs[each]:
                if output in self._arrived:
                    outputs[output] = None
                    self._open[output] -= 1
        return Step(tuple(outputs), inputs, not any(self._open[each] for each in outputs))

    def expects(self, output: Hashable) -> bool:
        """Whether this output's gradient may still arrive."""
        return output in self._missing

    def is_needed(self, output: Hashable) -> bool:
        """Whether a later step may use this output's gradient."""
        return self._open[output] > 0

    @property
    def has_waiting(self) -> bool:
        """Whether some inputs have some of their gradients, and wait for others."""
        return bool(self._begun)

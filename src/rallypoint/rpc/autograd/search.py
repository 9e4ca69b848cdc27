"""Which sent tensors take part in a backward pass: all that the roots depend on, over all workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable


# A tensor that was sent: the id of the worker that sent it, and its number there.
Sent = tuple[int, int]


class Search:
    """Finds these tensors step by step: each worker says what the tensors that it sent depend on.

    Attributes:
        found: for each worker, the numbers of its tensors that take part.
    """

    def __init__(self) -> None:
        self.found: dict[int, list[int]] = {}
        self._known: set[Sent] = set()

    def reached(self, sent: Iterable[Sent]) -> dict[int, list[int]]:
        """Some roots, or tensors that take part, depend on these.

        Returns:
            The workers to ask, each with the numbers of its tensors that were not known before.
        """
        ask: dict[int, list[int]] = {}
        for each in sent:
            if each in self._known:
                continue
            self._known.add(each)
            worker, number = each
            self.found.setdefault(worker, []).append(number)
            ask.setdefault(worker, []).append(number)
        return ask

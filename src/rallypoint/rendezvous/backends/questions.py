"""Puts questions to several places at once, so that a place that does not answer delays no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from .places import Answer, Place


class Questions:
    """The questions now open, and their answers.

    Args:
        ask: puts the question to a place; it may take a while.
        most: how many places there are.
    """

    def __init__(self, ask: Callable[[Place], Answer], most: int) -> None:
        self._ask = ask
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="rally-ask")
        self._asked: dict[Place, Future[Answer]] = {}

    def close(self) -> None:
        """Stop asking, without waiting for open questions."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def put(self, places: Iterable[Place]) -> None:
        """Ask those of the places that have no open question."""
        for place in places:
            if place not in self._asked:
                self._asked[place] = self._pool.submit(self._ask, place)

    def answers(self, seconds: float) -> dict[Place, Answer]:
        """New answers, by place.   Blocks: until there is one, at most for ``seconds``; not at all if no question is open."""
        wait(self._asked.values(), seconds, FIRST_COMPLETED)
        done = [place for place, future in self._asked.items() if future.done()]
        return {place: self._asked.pop(place).result() for place in done}

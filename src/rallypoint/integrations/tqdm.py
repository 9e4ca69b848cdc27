"""tqdm whose steps `rally run` shows, too. Needs ``pip install tqdm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm as plain_tqdm

from .reporting import report


__all__ = ["tqdm", "trange"]


class tqdm(plain_tqdm):  # type: ignore[misc]  # noqa: N801  tqdm has no types, and this name
    """A bar of tqdm that also calls :func:`rallypoint.progress`: each step, the total, and the numbers of ``set_postfix``.

    For the loop over training steps. Use plain tqdm for loops around it and within it, such as those over epochs and
    over validation batches: the newest report is the one that is shown. ``disable=True`` draws nothing and reports all the same.

    Args:
        args, kwargs: as of :class:`tqdm.tqdm`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._numbers: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """The items; each is reported as a step when the next one is asked for."""
        # tqdm brings its own count up to date only when it draws.
        done = self.n
        for item in super().__iter__():
            yield item
            done += 1
            report(done, self.total, self._numbers)

    def update(self, n: float | None = 1) -> bool | None:
        """As tqdm's.

        Args:
            n: how many more steps are complete.

        Returns:
            Whether the bar was drawn.
        """
        drawn: bool | None = super().update(n)
        if self.disable:  # tqdm does not count then
            self.n += n or 0
        report(self.n, self.total, self._numbers)
        return drawn

    def set_postfix(
        self, ordered_dict: Mapping[str, Any] | None = None, refresh: bool = True, **kwargs: Any
    ) -> None:
        """As tqdm's. Numbers are reported with the next steps.

        Args:
            ordered_dict, kwargs: names and values.
            refresh: whether to draw at once.
        """
        self._numbers = {**(ordered_dict or {}), **kwargs}
        super().set_postfix(ordered_dict, refresh, **kwargs)


def trange(*args: int, **kwargs: Any) -> tqdm:
    """``tqdm(range(*args), **kwargs)``.

    Args:
        args: as of :class:`range`.
        kwargs: as of :class:`tqdm`.

    Returns:
        The bar.
    """
    return tqdm(range(*args), **kwargs)

"""A tqdm whose steps `rally run` shows as well. Needs ``pip install tqdm``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm as plain_tqdm

from .reporting import report


__all__ = ["tqdm", "trange"]


class tqdm(plain_tqdm):  # type: ignore[misc]  # noqa: N801  tqdm has no types, and this name
    """A tqdm bar that also calls :func:`rallypoint.progress` with each step, the total, and the numbers of ``set_postfix``.

    For the loop over training steps. Use plain tqdm for loops around it and within it, such as those over epochs and
    validation batches, because only the newest report is shown. With ``disable=True`` it draws nothing but still reports.

    Args:
        args, kwargs: as for :class:`tqdm.tqdm`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._numbers: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """The items; each is reported as a step when the next one is asked for."""
        # tqdm updates its own count only when it draws.
        done = self.n
        for item in super().__iter__():
            yield item
            done += 1
            report(done, self.total, self._numbers)

    def update(self, n: float | None = 1) -> bool | None:
        """As in tqdm, and report the steps.

        Args:
            n: how many more steps are complete.

        Returns:
            Whether the bar was drawn.
        """
        drawn: bool | None = super().update(n)
        if self.disable:  # then tqdm does not count
            self.n += n or 0
        report(self.n, self.total, self._numbers)
        return drawn

    def set_postfix(
        self, ordered_dict: Mapping[str, Any] | None = None, refresh: bool = True, **kwargs: Any
    ) -> None:
        """As in tqdm. The numbers are reported with the next steps.

        Args:
            ordered_dict, kwargs: names and values.
            refresh: whether to draw at once.
        """
        self._numbers = {**(ordered_dict or {}), **kwargs}
        super().set_postfix(ordered_dict, refresh, **kwargs)


def trange(*args: int, **kwargs: Any) -> tqdm:
    """``tqdm(range(*args), **kwargs)``.

    Args:
        args: as for :class:`range`.
        kwargs: as for :class:`tqdm`.

    Returns:
        The bar.
    """
    return tqdm(range(*args), **kwargs)

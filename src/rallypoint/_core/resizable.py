"""Objects that know how many ranks there are, and are told if a session goes on with another number of them."""

from __future__ import annotations

import weakref
from typing import Protocol


class Resizable(Protocol):
    """An object that is told."""

    def can_resize(self, replica: int) -> bool:
        """Whether it can be told of more or fewer replicas of so many ranks each."""

    def resize(self, rank: int, ranks: int) -> None:
        """There are so many ranks from now on, and this process is one of them. The groups that it holds are renewed already."""


_living: weakref.WeakSet[Resizable] = weakref.WeakSet()


def register(each: Resizable) -> None:
    """Tell this object, as long as it lives."""
    _living.add(each)


def living() -> list[Resizable]:
    """All of them."""
    return list(_living)

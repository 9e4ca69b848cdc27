"""Objects that know how many ranks there are, and are told if a session continues with a different number of them."""

from __future__ import annotations

import weakref
from typing import Protocol


class Resizable(Protocol):
    """An object that is told."""

    def can_resize(self, replica: int) -> bool:
        """Whether it can cope with more or fewer replicas of this many ranks each."""

    def resize(self, rank: int, ranks: int) -> None:
        """From now on there are this many ranks, and this process is one of them. The object's groups are renewed already."""


_living: weakref.WeakSet[Resizable] = weakref.WeakSet()


def register(each: Resizable) -> None:
    """Tell this object, as long as it lives."""
    _living.add(each)


def living() -> list[Resizable]:
    """All objects to tell."""
    return list(_living)

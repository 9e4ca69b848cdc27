"""How one worker of a group is called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and id (its rank)."""

    name: str
    id: int

    def __str__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

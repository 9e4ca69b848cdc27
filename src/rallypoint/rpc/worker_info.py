"""Name and id of a worker."""

from __future__ import annotations

from dataclasses import dataclass

from .groups.member import check_name


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Name and id of a worker.

    Args:
        name: unique in the group. Letters, digits, ``-``, ``_`` and ``:``; at most 127 characters.
        id: its rank in the group.

    Raises:
        RpcError: ``name`` cannot be a worker's name.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __str__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

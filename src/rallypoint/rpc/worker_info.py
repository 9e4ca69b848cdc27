"""How one worker of a group is called."""

from __future__ import annotations

from dataclasses import dataclass

from .groups.member import check_name


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's name and id (its rank).

    Raises:
        RpcError: the name is none.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __str__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

"""Who is right after a loss: decisions only.

With replicated state every rank is either at the beginning of a step, or behind it. Who is furthest is right: its gradient had
everybody's part. The others get its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rallypoint.errors import ElasticError


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One rank after a loss.

    Args:
        rank: global.
        steps: how many steps it has completed.
        whole: its state is that after these steps. False in a newcomer, in a rank that received only a part of
            another's state, and after an optimizer has stepped in a step that did not end.
        objects: what the session was given, in words; the same on all ranks.
        layouts: of each DDP module: which gradients are reduced together; None before DDP has settled it.
    """

    rank: int
    steps: int
    whole: bool
    objects: str
    layouts: tuple[tuple[tuple[int, ...], ...] | None, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Standing:
        layouts = tuple(
            None if each is None else tuple(tuple(bucket) for bucket in each)
            for each in record["layouts"]
        )
        return cls(**{**record, "layouts": layouts})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows.

    Args:
        source: the rank whose state is right.
        receivers: the ranks that get it, in order.
        steps: how many steps are complete.
        layouts: of DDP's gradients, for all ranks.
    """

    source: int
    receivers: tuple[int, ...]
    steps: int
    layouts: tuple[tuple[tuple[int, ...], ...] | None, ...]


def judge(standings: Sequence[Standing]) -> Verdict:
    """Decide, from what all ranks say; every rank comes to the same.

    Raises:
        ElasticError: no rank is whole, or the sessions differ.
    """
    by_objects = {each.objects: each.rank for each in standings}
    if len(by_objects) > 1:
        told = "; ".join(f"rank {rank}: {text}" for text, rank in sorted(by_objects.items()))
        raise ElasticError(f"the ranks' sessions hold different objects: {told}")
    whole = [each for each in standings if each.whole]
    if not whole:
        raise ElasticError(
            "no rank has a whole state: the step failed after the optimizer had stepped, on all ranks. Keep what"
            " communicates behind the optimizer's step outside of session.step()"
        )
    furthest = max(each.steps for each in whole)
    source = min((each for each in whole if each.steps == furthest), key=lambda each: each.rank)
    receivers = tuple(
        each.rank for each in standings if not each.whole or each.steps < furthest
    )
    layouts = tuple(
        next((one for one in each if one is not None), None)
        for each in zip(*(one.layouts for one in whole), strict=True)
    )
    return Verdict(source.rank, receivers, furthest, layouts)

"""Which warm spares a node needs, and which one takes a lost worker's place: decisions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Spare:
    """One spare.

    Args:
        number: unique on the node.
        index: the local index of the worker in whose role it runs the set-up.
        is_ready: it waits in the session.
        is_bound: it can take only that worker's place.
    """

    number: int
    index: int
    is_ready: bool = False
    is_bound: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The spares of one node.

    Args:
        wanted: how many there should be.
        max_ends: how many may end on their own within ``window`` seconds. After more, no further one is started.
        window: see ``max_ends``.
        spares: those that were started, have not been used and have not ended.
        ends: the times at which spares ended on their own.
        started: how many were started so far.
    """

    wanted: int
    max_ends: int = 10
    window: float = 600.0
    spares: tuple[Spare, ...] = ()
    ends: tuple[float, ...] = ()
    started: int = 0

    @property
    def is_over(self) -> bool:
        """Spares have ended too often."""
        return self.wanted > 0 and len(self.ends) > self.max_ends


def begin(plan: Plan, num_workers: int) -> tuple[Plan, Spare | None]:
    """The next spare to start, if one is missing.

    Args:
        plan: the plan so far.
        num_workers: the number of workers on this node.
    Returns:
        The plan with the spare; the spare. It runs the set-up in the role that the fewest spares have; of several, the last.
    """
    if len(plan.spares) >= plan.wanted or plan.is_over or num_workers < 1:
        return plan, None
    taken = [each.index for each in plan.spares]
    index = min(range(num_workers), key=lambda each: (taken.count(each), -each))
    spare = Spare(number=plan.started, index=index)
    spares = (*plan.spares, spare)
    return replace(plan, spares=spares, started=plan.started + 1), spare


def note_ready(plan: Plan, number: int, *, is_bound: bool) -> Plan:
    """A spare waits in the session."""
    spares = tuple(
        replace(each, is_ready=True, is_bound=is_bound) if each.number == number else each
        for each in plan.spares
    )
    return replace(plan, spares=spares)


def choose(plan: Plan, index: int) -> tuple[Plan, Spare | None]:
    """The spare that takes a worker's place, if one can: one that can take only this place before one that can take any.

    Args:
        plan: the plan so far.
        index: the lost worker's.
    Returns:
        The plan without it; the spare.
    """
    fitting = [e for e in plan.spares if e.is_ready and (not e.is_bound or e.index == index)]
    if not fitting:
        return plan, None
    spare = min(fitting, key=lambda each: (not each.is_bound, each.number))
    return _without(plan, spare.number), spare


def note_end(now: float, plan: Plan, number: int) -> Plan:
    """A spare has ended on its own."""
    recent = tuple(at for at in plan.ends if now - at < plan.window)
    return replace(_without(plan, number), ends=(*recent, now))


def drop_stranded(plan: Plan, stores: Mapping[int, str], store: str) -> tuple[Plan, list[int]]:
    """Drop spares on their way to the session that would wait for an old store: the workers' store may have changed.

    Args:
        plan: the plan so far.
        stores: by number, the store that each spare was started with.
        store: the workers' store now.
    Returns:
        The plan without them; their numbers.
    """
    found = [e.number for e in plan.spares if not e.is_ready and stores[e.number] != store]
    return replace(plan, spares=tuple(e for e in plan.spares if e.number not in found)), found


def drop_all(plan: Plan) -> Plan:
    """The spares were ended: the generation is over."""
    return replace(plan, spares=())


def _without(plan: Plan, number: int) -> Plan:
    return replace(plan, spares=tuple(each for each in plan.spares if each.number != number))

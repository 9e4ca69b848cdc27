"""Whose state is right after a loss: decisions only.

With replicated state every rank is either at the beginning of a step or past it. The furthest rank is right: all contributed to
its gradient. The others get its state. With sharded state nobody has the lost part: all go back to a snapshot (:mod:`.schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rallypoint.elastic.storage.schedule import Held, common
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
        fingerprint: of its parameters, at the first start; 0 afterwards.
        states: digests of the states of the other objects, by class, at the first start, if no snapshots are kept.
        groups: the groups that can be kept, in the order in which this rank made them: name and members.
        timeouts: of these groups' collectives, in seconds.
        layouts: for each DDP module, which gradients are reduced together; None before DDP has settled it.
        snapshots: number and steps of the complete snapshots that it has; None if the state is replicated.
        node: the number of its node.
        lacks_own: it takes a lost rank's place, and the memory of the lost rank was lost with its node.
        door: where it takes copies of other ranks' state: host, port and token; None if it takes none.
        guests: which complete snapshots it has, by the rank that took them.
        ranks: how many ranks its state is for: the script's changes for that number (``Session.on_resize``) are done.
        unused: for each DDP module whose static graph this rank knows, the parameters that no rank uses; None for the others.
        replica: how many ranks together hold the whole state, if the number of replicas may change; else 0.
        waits: it is not whole because it has received nothing yet of another rank's state, or only a part.
    """

    rank: int
    steps: int
    whole: bool
    objects: str
    fingerprint: int = 0
    states: tuple[tuple[str, str], ...] = ()
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    timeouts: tuple[float, ...] = ()
    layouts: tuple[tuple[tuple[int, ...], ...] | None, ...] = ()
    snapshots: tuple[Held, ...] | None = None
    node: int = 0
    lacks_own: bool = False
    door: tuple[str, int, str] | None = None
    guests: tuple[tuple[int, tuple[Held, ...]], ...] = ()
    ranks: int = 0
    unused: tuple[tuple[int, ...] | None, ...] = ()
    replica: int = 0
    waits: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Standing:
        layouts = tuple(
            None if each is None else tuple(tuple(bucket) for bucket in each)
            for each in record["layouts"]
        )
        groups = tuple((name, tuple(ranks)) for name, ranks in record["groups"])
        held = record["snapshots"]
        snapshots = None if held is None else tuple(Held(**each) for each in held)
        door = record["door"]
        guests = tuple(
            (rank, tuple(Held(**each) for each in copies)) for rank, copies in record["guests"]
        )
        unused = tuple(None if each is None else tuple(each) for each in record["unused"])
        return cls(
            **{
                **record,
                "unused": unused,
                "layouts": layouts,
                "groups": groups,
                "timeouts": tuple(record["timeouts"]),
                "states": tuple((name, state) for name, state in record["states"]),
                "snapshots": snapshots,
                "door": None if door is None else tuple(door),
                "guests": guests,
            }
        )


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part of a snapshot that comes from another rank.

    Args:
        rank: lacks it.
        holder: has it.
        whose: the rank that took it: ``rank`` if it is a copy; ``holder`` if that rank has the same place in another replica.
    """

    rank: int
    holder: int
    whose: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do next.

    Args:
        source: the rank whose state is right; None if all go back to a snapshot.
        receivers: the ranks that get it, in order.
        steps: how many steps are complete.
        layouts: of DDP's gradients, for all ranks.
        snapshot: the one that all go back to.
        fetches: for the ranks that lack their part of it. All ranks go through them in this order.
        known: what each rank knows of static graphs (``Standing.unused``).
    """

    source: int | None
    receivers: tuple[int, ...]
    steps: int
    layouts: tuple[tuple[tuple[int, ...], ...] | None, ...]
    snapshot: Held | None = None
    fetches: tuple[Fetch, ...] = ()
    known: tuple[tuple[int, tuple[tuple[int, ...] | None, ...]], ...] = ()


def longest_timeouts(
    standings: Sequence[Standing],
) -> dict[tuple[str, tuple[int, ...]], float]:
    """The longest timeout of each group, in seconds: a newcomer does not know what the script has changed since its set-up."""
    longest: dict[tuple[str, tuple[int, ...]], float] = {}
    for each in standings:
        for group, timeout in zip(each.groups, each.timeouts, strict=True):
            longest[group] = max(timeout, longest.get(group, 0.0))
    return longest


def differing(standings: Sequence[Standing]) -> list[tuple[str, int, int]]:
    """The objects whose state is not the same on all ranks: for each, its class and two ranks that differ."""
    first, *others = standings
    found: dict[int, tuple[str, int, int]] = {}
    for each in others:
        for number, (one, other) in enumerate(zip(first.states, each.states, strict=False)):
            if one != other:
                found.setdefault(number, (one[0], first.rank, each.rank))
    return [found[number] for number in sorted(found)]


def judge(standings: Sequence[Standing]) -> Verdict:
    """Decide from the standings of all ranks; every rank comes to the same verdict.

    Raises:
        ElasticError: no rank is whole, no snapshot is complete, or the sessions differ.
    """
    by_objects = {each.objects: each.rank for each in standings}
    if len(by_objects) > 1:
        told = "; ".join(f"rank {rank}: {text}" for text, rank in sorted(by_objects.items()))
        raise ElasticError(f"the ranks' sessions hold different objects: {told}")
    _compare_groups(standings)
    if any(each.snapshots is not None for each in standings):
        return _go_back(standings)
    first = standings[0]
    for each in standings:
        if each.whole and first.whole and each.fingerprint != first.fingerprint:
            raise ElasticError(
                f"ranks {first.rank} and {each.rank} begin with different parameters. A session keeps replicated state: wrap"
                " the model in DistributedDataParallel, or give all ranks the same seed or checkpoint. If they are meant to differ,"
                " use elastic.session(…, snapshots=True)"
            )
    whole = [each for each in standings if each.whole]
    if not whole and all(each.waits for each in standings):
        raise ElasticError(
            "no remaining rank has the state: those that had it were lost while the others waited for it"
        )
    if not whole:
        raise ElasticError(
            "no rank has a complete state: the step failed after it had changed parameters (optimizer.step, an average, a clamp)"
            " on all ranks, and there was no copy of them yet. Move collectives that come after such a change out of session.step(), or use"
            " elastic.session(…, snapshots=True). A function that session.run runs with other weights has to put them back in a `finally` block"
        )
    furthest = max(each.steps for each in whole)
    source = min((each for each in whole if each.steps == furthest), key=lambda each: each.rank)
    receivers = tuple(each.rank for each in standings if not each.whole or each.steps < furthest)
    known = _known(standings)
    return Verdict(source.rank, receivers, furthest, _layouts(whole), known=known)


def _go_back(standings: Sequence[Standing]) -> Verdict:
    sources = _sources(standings)
    held = {
        each.rank: {*(each.snapshots or ()), *(one for one, _ in sources[each.rank])}
        for each in standings
    }
    snapshot = common([sorted(held[each.rank]) for each in standings])
    if snapshot is None:
        told = "; ".join(
            f"rank {rank}: {', '.join(str(one.steps) for one in sorted(found)) or 'none'}"
            for rank, found in held.items()
        )
        raise ElasticError(
            f"no snapshot of the state is complete on all ranks (they have snapshots of these steps: {told})"
        )
    fetches = tuple(
        next(fetch for held, fetch in sources[each.rank] if held == snapshot)
        for each in standings
        if snapshot not in (each.snapshots or ())
    )
    layouts, known = _layouts(standings), _known(standings)
    return Verdict(None, (), snapshot.steps, layouts, snapshot, fetches, known)


def _sources(standings: Sequence[Standing]) -> dict[int, list[tuple[Held, Fetch]]]:
    """Where each rank can get a part of a snapshot: its own part first, then that of another replica."""
    found: dict[int, list[tuple[Held, Fetch]]] = {each.rank: [] for each in standings}
    for each in standings:
        for rank, copied in each.guests:
            found[rank] += [(held, Fetch(rank, each.rank, rank)) for held in copied]
    for rank, size in ((each.rank, each.replica) for each in standings if each.replica):
        for twin in (each for each in standings if (each.rank - rank) % size == 0):
            if twin.rank != rank:
                fetch = Fetch(rank, twin.rank, twin.rank)
                found[rank] += [(held, fetch) for held in twin.snapshots or ()]
    return found


def _known(
    standings: Sequence[Standing],
) -> tuple[tuple[int, tuple[tuple[int, ...] | None, ...]], ...]:
    return tuple((each.rank, each.unused) for each in standings)


def _layouts(
    standings: Sequence[Standing],
) -> tuple[tuple[tuple[int, ...], ...] | None, ...]:
    return tuple(
        next((one for one in each if one is not None), None)
        for each in zip(*(one.layouts for one in standings), strict=True)
    )


def _compare_groups(standings: Sequence[Standing]) -> None:
    """Check that every member of a group has it: otherwise, forming it again would block forever."""
    held = {each.rank: dict(each.groups) for each in standings}
    for each in standings:
        for name, members in each.groups:
            lacking = [rank for rank in members if held.get(rank, {}).get(name) != members]
            if lacking:
                raise ElasticError(
                    f"rank {each.rank} has made a group of ranks {list(members)} that rank {lacking[0]} has not: make all"
                    " groups before the session, in the same order on all ranks"
                )

"""A round's plan: made from the records of the nodes that have arrived, and read by every member."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import fields, kept_round
from .quorum import Arrival
from .records import MAX_DEPTH, is_deep


# How many nodes at the head of a plan say where they could serve the store. The first live one serves it.
NUM_STANDBYS = 16
# Characters per node id in a plan. Thousands of nodes read the plan, and an id only has to differ from old ones.
_DIGEST = 8
# The most characters of a node's record. A plan repeats parts of 1 + NUM_STANDBYS records and must stay below MAX_RECORD.
MAX_ARRIVAL = 48 * 1024
# Levels of nesting that a plan adds around the parts of a record.
_DEPTH_OF_PLAN = 2


def make(
    by: str,
    generation: int,
    order: Sequence[int],
    spares: Sequence[int],
    records: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """The plan, which tells every node what it needs. It is small, because every node reads it."""
    facts = [fields.facts_in(records[slot]) for slot in order]
    workers = [fields.number(each.get("workers", 1)) for each in facts]
    kept, why_not = kept_round.decide([records[slot] for slot in order], workers)
    # By rank, but nodes in whose place a newcomer looks for the store come first; otherwise it would not find the job.
    standbys = sorted(
        enumerate(order[:NUM_STANDBYS]),
        key=lambda each: _standby(records[each[1]]).get("listed") is not True,
    )
    return {
        **({} if kept is None else {"kept": kept.to_json()}),
        **({"not_kept": why_not} if why_not else {}),
        "by": by,
        "generation": generation,
        "order": list(order),
        "names": "".join(_digest(records[slot].get("id")) for slot in order),
        "spares": list(spares),
        "store": next(
            (
                fields.node_id(each.get("id"))
                for each in records.values()
                if fields.facts_in(each).get("serves") is True
            ),
            "",
        ),
        "first": {key: records[order[0]].get(key) for key in ("id", "host", "facts")},
        "workers": [[count, len(list(run))] for count, run in itertools.groupby(workers)],
        "standbys": [
            {"rank": rank, "id": records[slot].get("id"), **_standby(records[slot])}
            for rank, slot in standbys
        ],
    }


def _standby(record: Mapping[str, Any]) -> dict[str, Any]:
    standby = fields.facts_in(record).get("standby")
    return standby if isinstance(standby, dict) else {}


def first(plan: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What a plan says about its rank 0."""
    first = None if plan is None else plan.get("first")
    return first if isinstance(first, dict) else {}


def why_not_kept(plan: Mapping[str, Any]) -> str:
    """Why nodes that held workers restart them all, in words; empty if they do not."""
    told = plan.get("not_kept", "")
    return told[: fields.MAX_NAME] if isinstance(told, str) and told.isprintable() else ""


def order(plan: Mapping[str, Any]) -> list[int]:
    order = plan.get("order")
    return order if isinstance(order, list) else []


def names(plan: Mapping[str, Any], rank: int, node_id: str) -> bool:
    """Whether a plan has this node at a rank.

    A slot alone is not enough: a plan of an earlier job with the same name and secret has the slot too, and a
    stranger may have kept that plan. Ids are random, so only a plan of this job names this node.
    """
    digests = plan.get("names")
    at = rank * _DIGEST
    return isinstance(digests, str) and digests[at : at + _DIGEST] == _digest(node_id)


def _digest(node_id: object) -> str:
    return hashlib.sha256(str(node_id).encode()).hexdigest()[:_DIGEST]


def arrival(slot: int, record: Mapping[str, Any]) -> Arrival | None:
    """A record as an arrival; None if it makes no sense, or no plan could repeat it."""
    node_id, host = fields.node_id(record.get("id")), record.get("host")
    last_rank, given_rank = record.get("last_rank"), record.get("given_rank")
    if not node_id or is_deep(record, MAX_DEPTH - _DEPTH_OF_PLAN):
        return None
    if len(json.dumps(record)) > MAX_ARRIVAL:
        return None
    return Arrival(
        slot=slot,
        node_id=node_id,
        host=str(host)[: fields.MAX_NAME],
        label=str(record.get("label", ""))[: fields.MAX_NAME],
        last_rank=_rank(last_rank),
        given_rank=_rank(given_rank),
    )


def _rank(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None


def restarts(records: Sequence[Mapping[str, Any]], *, whole: bool) -> int:
    """How much of the job's restart budget is used, with this round.

    A failure is charged; nodes coming or going are not. A failure that may only be the echo of
    a lost node is charged if all of the last round's members are here (``whole``): then no node was lost. If a node
    says that members came or went, the failure is the echo of the workers it stopped. A node that was not a member
    of the last round knows nothing of how it ended: what happened to that node in an earlier round is settled.
    """
    used = max(
        (fields.number(fields.facts_in(each).get("restarts", 0)) for each in records), default=0
    )
    verdicts = {
        str(fields.facts_in(each).get("verdict"))
        for each in records
        if isinstance(each.get("last_rank"), int)
    }
    unexplained = whole and "suspect" in verdicts and "changed" not in verdicts
    return used + int("failed" in verdicts or unexplained)


def ages(records: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """How many seconds ago each restart that still counts was, as told by the node that counts the most of them.

    These are durations, so no two clocks are compared, and a node that arrived later counts like the others.
    """
    return max((ages_in(fields.facts_in(each)) for each in records), key=len, default=())


def ages_in(held: Mapping[str, Any]) -> tuple[float, ...]:
    """The ages in a node's facts, or in a plan."""
    told = held.get("ages")
    numbers = told if isinstance(told, list) else []
    return tuple(float(age) for age in numbers if isinstance(age, int | float) and 0 <= age < 2**62)


def ids_key(generation: int, plan: Mapping[str, Any]) -> str:
    """The key of the ids of a plan's members, by rank. Few nodes need them, so they are not part of the plan."""
    return f"{generation}/ids/{plan.get('by')}"


def ids_in(record: Mapping[str, Any] | None) -> tuple[str, ...]:
    ids = [] if record is None else record.get("ids")
    return tuple(fields.node_id(each) for each in ids) if isinstance(ids, list) else ()


def seeded(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """A plan for an empty store. Nodes that read it there look for their ids, not their slots."""
    return plan if "seeded" in plan else {**plan, "by": f"{plan.get('by')}+", "seeded": True}

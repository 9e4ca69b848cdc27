"""Which members of a round have succeeded, and what the others report of their failures: kept in the job's store."""

from __future__ import annotations

from rallypoint.launch.output.failure import (
    WorkerFailure,
    failures_from_json,
    failures_to_json,
    in_order_of_blame,
)
from rallypoint.rendezvous.record_store import RecordStore

from .journal_reader import Round


# An entry carries at most this many failures; the root cause comes first.
MAX_FAILURES_TOLD = 64


def told(failures: tuple[WorkerFailure, ...]) -> str:
    """Failures as a record carries them."""
    return failures_to_json(failures[:MAX_FAILURES_TOLD])


class Tally:
    """Counts the members of a round.

    Args:
        records: the connection to use.
        current: this node's round.
        elastic: members that are gone are not waited for.
    """

    def __init__(self, records: RecordStore, current: Round, *, elastic: bool) -> None:
        self._records = records
        self._round = current
        self._elastic = elastic

    def note_success(self) -> bool:
        """This node's workers have succeeded. Returns whether those of all members have."""
        key = f"{self._round.generation}/done"
        self._records.write(f"{key}/{self._round.rank}", {})
        self._records.increment(key)
        return self.num_through() >= self._round.num_nodes

    def note_report(self, failures: str) -> None:
        """Publish this node's failures (:func:`told`)."""
        current, records = self._round, self._records
        records.write(f"{current.generation}/report/{current.rank}", {"failures": failures})
        current.reported = True
        records.increment(f"{current.generation}/reports")

    def is_all_told(self) -> bool:
        """Whether members have reported failures, and no further one can."""
        reports = self._records.count(f"{self._round.generation}/reports")
        if not reports:
            return False
        silent = self.num_through() if self._elastic else len(self._round.gone)
        return reports + silent >= self._round.num_nodes

    def merge_reports(self, first: int | None) -> None:
        """Write all reports into one record, unless another node has.

        Args:
            first: the rank whose failure came first in the journal: between hosts, only its order is comparable.
        """
        current = self._round
        keys = [f"{current.generation}/report/{rank}" for rank in range(current.num_nodes)]
        failures: list[WorkerFailure] = []
        bodies = self._records.look(keys)
        for rank in sorted(range(len(bodies)), key=lambda rank: (rank != first, rank)):
            body = bodies[rank]
            failures += () if body is None else failures_from_json(body["failures"])
        merged = told(in_order_of_blame(failures))
        self._records.claim(merged_key(current.generation), {"failures": merged})

    def num_through(self) -> int:
        """How many members have finished the round: they succeeded, or in an elastic job are gone."""
        current = self._round
        counted = self._records.count(f"{current.generation}/done")
        gone = current.gone if self._elastic else set[int]()
        if counted < current.num_nodes and not gone:
            return counted
        # Anyone could increment the counter; only members can write marks. A lost member may have succeeded first.
        ranks = range(current.num_nodes)
        marks = self._records.look([f"{current.generation}/done/{rank}" for rank in ranks])
        return sum(
            mark is not None or rank in gone for rank, mark in zip(ranks, marks, strict=True)
        )


def merged_key(generation: int) -> str:
    """The key of the record with all reports."""
    return f"{generation}/report"

"""Which members of a round have succeeded, and what the others report about their failures. Kept in the job's store."""

from __future__ import annotations

import json
from dataclasses import replace

from rallypoint.launch.output.failure import (
    WorkerFailure,
    failures_from_json,
    failures_to_json,
    in_order_of_blame,
)
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import MAX_RECORD

from .journal_reader import Round


# At most this many nodes report that the same thing has happened to them.
MAX_TELLERS = 16
# An entry carries at most this many failures; the root cause comes first.
MAX_FAILURES_TOLD = 64
# The most bytes that failures may take in a record, and how many they may take however many nodes read it.
_MOST = MAX_RECORD // 2
_LEAST = 16 * 1024
# The most bytes that all readers of a record together should fetch from the host of the job's store.
_ALL_READERS = 64 * 1024 * 1024
# The failures' texts are cut to these numbers of characters, in turn, until they fit.
_CUTS = (8000, 2000, 500)
# How many chains of exceptions, links of a chain, and lines are kept then.
_LONGEST_CHAIN = 8


def told(failures: tuple[WorkerFailure, ...], num_nodes: int) -> str:
    """Failures as a record carries them: the first in full, if that fits, the others shortened or left out.

    Args:
        failures: those to blame come first.
        num_nodes: how many nodes may read the record.
    """
    room = min(_MOST, max(_LEAST, _ALL_READERS // max(1, num_nodes)))
    chosen = failures[:MAX_FAILURES_TOLD]
    text = failures_to_json(chosen)
    for most in _CUTS:
        if _fits(text, room):
            return text
        chosen = (*chosen[:1], *(_shortened(each, most) for each in chosen[1:]))
        text = failures_to_json(chosen)
    while len(chosen) > 1 and not _fits(text, room):
        chosen = chosen[: (len(chosen) + 1) // 2]
        text = failures_to_json(chosen)
    for most in _CUTS:
        if _fits(text, room):
            break
        chosen = tuple(_shortened(each, most) for each in chosen)
        text = failures_to_json(chosen)
    return text


def _fits(text: str, room: int) -> bool:
    return len(json.dumps(text)) <= room


def _shortened(failure: WorkerFailure, most: int) -> WorkerFailure:
    """The failure with texts of at most ``most`` characters. The traceback and stderr keep their ends, where the error is."""
    raised = failure.raised
    if raised is not None:
        raised = replace(
            raised,
            message=raised.message[:most],
            traceback=raised.traceback[-most:],
            chains=tuple(
                tuple((kind, message[:most]) for kind, message in chain[:_LONGEST_CHAIN])
                for chain in raised.chains[:_LONGEST_CHAIN]
            ),
        )
    return replace(
        failure,
        raised=raised,
        native_stack=failure.native_stack[:most],
        cause=failure.cause[:most],
        stderr=tuple(each[-most:] for each in failure.stderr[-_LONGEST_CHAIN:]),
        collectives=(),
    )


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
        self._mark("done")
        return self.num_through() >= self._round.num_nodes

    def note_told_to_stop(self) -> bool:
        """This node was told to stop. Returns whether all members have been."""
        self._mark("told")
        return self._marked("told", set()) >= self._round.num_nodes

    def take_turn_to_tell(self, what: str) -> bool:
        """Count this node among those with the same thing to tell. Returns whether it still has to tell the others.

        If all fail together, the first to say so are enough. If a thousand nodes told each other, that would be a
        million messages.
        """
        current = self._round
        if current.num_nodes <= MAX_TELLERS:
            return True
        return self._records.increment(f"{current.generation}/tellers/{what}") <= MAX_TELLERS

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
        merged = told(in_order_of_blame(failures), current.num_nodes)
        self._records.claim(merged_key(current.generation), {"failures": merged})

    def num_through(self) -> int:
        """How many members have finished the round: they succeeded, or in an elastic job are gone."""
        return self._marked("done", self._round.gone if self._elastic else set())

    def _mark(self, what: str) -> None:
        key = f"{self._round.generation}/{what}"
        self._records.write(f"{key}/{self._round.rank}", {})
        self._records.increment(key)

    def _marked(self, what: str, gone: set[int]) -> int:
        """How many members have made a mark, or are gone."""
        current = self._round
        counted = self._records.count(f"{current.generation}/{what}")
        if counted < current.num_nodes and not gone:
            return counted
        # Anyone could increment the counter; only members can write marks. A lost member may have made its own first.
        ranks = range(current.num_nodes)
        marks = self._records.look([f"{current.generation}/{what}/{rank}" for rank in ranks])
        return sum(
            mark is not None or rank in gone for rank, mark in zip(ranks, marks, strict=True)
        )


def merged_key(generation: int) -> str:
    """The key of the record with all reports."""
    return f"{generation}/report"

"""What the nodes of a round ask each other about their workers.

A question is an entry in the journal, and each node's answer is a record of its own. Both are removed: somebody may ask every
two seconds for weeks. But a question stays until the next one, because a node that reaches a hole waits there for a lease and
reads nothing meanwhile. Connections are also kept from one question to the next: each leaves a key of its own in etcd.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.rendezvous.record_store import RecordStore

from . import node_answers
from .journal import OUTSIDE, Journal
from .journal_reader import Round
from .place_ranges import PlaceRanges


# This many of this node's answers are kept, though they may no longer be wanted: the asker may have given up.
MAX_ANSWERS = 8
# At most this many answers are read at once.
MAX_AT_ONCE = 64
# At most this many idle connections are kept.
MAX_IDLE = 2
# How many seconds this node's own reader may take to reach a question that is to be removed.
OWN_PATIENCE = 2.0


class NodeQuestions:
    """The questions of one round. Methods may be called in any thread, and block.

    Args:
        current: the round. A process that is not a member asks as rank :data:`.OUTSIDE`.
        connect: makes a connection to the store.
    """

    def __init__(self, current: Round, connect: Callable[[], RecordStore]) -> None:
        self._round = current
        self._connect = connect
        self._lock = threading.Lock()
        self._withdrawing = threading.Lock()
        self._withdrawn = PlaceRanges()
        self._answers: collections.deque[str] = collections.deque()
        self._unread: dict[str, threading.Event] = {}  # this node's questions, by name
        self._last: tuple[str, int] | None = None  # the last one's name and place in the journal
        self._idle: list[RecordStore] = []
        self._closed = False

    def ask(
        self, question: Mapping[str, Any], patience: float, nodes: frozenset[int] | None = None
    ) -> dict[int, dict[str, Any] | None]:
        """Ask other nodes, as :meth:`.Coordination.ask_nodes` does."""
        current = self._round
        wanted = range(current.num_nodes) if nodes is None else sorted(nodes)
        asked = [rank for rank in wanted if rank != current.rank and rank not in current.gone]
        if not asked:
            return {}
        name = uuid.uuid4().hex
        entry = {"what": "asked", "node": current.rank, "name": name, "question": dict(question)}
        if nodes is not None:
            entry["nodes"] = asked
        deadline = Deadline(patience)
        with self._connection() as records:
            journal = Journal(records, current.generation)
            self._unread[name] = threading.Event()
            place = journal.append(entry)
            found = self._gather(records, name, asked, deadline)
            if current.rank == OUTSIDE:
                journal.withdraw_from_outside(place)
                return found
            with self._withdrawing:
                before, self._last = self._last, (name, place)
                if before is not None:
                    self._unread.pop(before[0]).wait(OWN_PATIENCE)
                    journal.withdraw(before[1], current.rank, self._withdrawn)
        return found

    def _gather(
        self, records: RecordStore, name: str, asked: list[int], deadline: Deadline
    ) -> dict[int, dict[str, Any] | None]:
        """Collect the answers. While one is waited for, others arrive; those are read together."""
        found: dict[int, dict[str, Any] | None] = {}
        keys = {rank: node_answers.key(self._round.generation, name, rank) for rank in asked}
        while waiting := [rank for rank in asked if rank not in found][:MAX_AT_ONCE]:
            first, *others = waiting
            bodies = [records.wait(keys[first], deadline.remaining() or 0.0)]
            bodies += records.look([keys[rank] for rank in others]) if others else []
            over = deadline.expired()
            for rank, body in zip(waiting, bodies, strict=True):
                if body is not None:
                    found[rank] = node_answers.unpack(body)
                    records.delete(keys[rank])
                elif over or rank == first:
                    found[rank] = None
        return found

    def note_read(self, name: str) -> None:
        """This node's own reader has reached the question with this name."""
        if (unread := self._unread.get(name)) is not None:
            unread.set()

    def answer(self, name: str, body: Mapping[str, Any]) -> None:
        """Answer a question.

        Args:
            name: the question's name.
            body: the answer.
        """
        key = node_answers.key(self._round.generation, name, self._round.rank)
        with self._connection() as records:
            records.write(key, node_answers.pack(body))
            with self._lock:
                self._answers.append(key)
                old = self._answers.popleft() if len(self._answers) > MAX_ANSWERS else None
            if old is not None:
                records.delete(old)

    def close(self) -> None:
        """Close the idle connections, and the others as soon as they are idle."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[RecordStore]:
        with self._lock:
            records = self._idle.pop() if self._idle else None
        records = records or self._connect()
        try:
            yield records
        except BaseException:
            records.close()
            raise
        with self._lock:
            keep = not self._closed and len(self._idle) < MAX_IDLE
            if keep:
                self._idle.append(records)
        if not keep:
            records.close()

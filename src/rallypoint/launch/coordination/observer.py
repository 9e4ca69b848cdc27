"""Asks the nodes of a job through its store, without taking part in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import ControlError, RendezvousConnectionError, RendezvousError
from rallypoint.launch.config import LaunchConfig
from rallypoint.rendezvous import fields, notes, plan as plans
from rallypoint.rendezvous.home import Home
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec

from . import node_answers
from .journal import OUTSIDE
from .journal_reader import Round
from .meeting import home_to_observe
from .node_questions import NodeQuestions


# How many seconds connecting to the store may take.
REACH_PATIENCE = 5.0
# A store that has moved points to its new place, which it may have left as well.
MOST_MOVES = 8


class Observer:
    """A job as its store knows it.

    Args:
        config: like that of one of its nodes.

    Raises:
        ConfigError: as :func:`.meeting.rendezvous_for`.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._home = home_to_observe(config, lambda _line: None)
        self._name = config.rendezvous.run_id
        self._codec = Codec(self._name, config.secret)

    def nodes(self, patience: float) -> dict[int, dict[str, Any] | None]:
        """What the supervisors of the job's nodes say about it. Blocks.

        Args:
            patience: seconds for their answers.
        Returns:
            By rank of the node: what :meth:`.RunningJob.status` returns; None for one that does not answer in time.
        Raises:
            ControlError: the store cannot be reached, there is no such job, or its nodes have not met yet.
        """
        with contextlib.closing(self._home), self._records() as records:
            generation, plan = self._last_round(records)
            current = Round(generation, OUTSIDE, len(plans.order(plan)))
            questions = NodeQuestions(current, records.clone)
            with contextlib.closing(questions):
                told = questions.ask({"ask": "nodes"}, patience)
        return {node: node_answers.status(answer) for node, answer in told.items()}

    @contextlib.contextmanager
    def _records(self) -> Iterator[RecordStore]:
        """The job's records, wherever its store is by now."""
        try:
            store = self._home.connect(Deadline(REACH_PATIENCE), threading.Event())
            records = RecordStore(store, self._codec)
            try:
                for _ in range(MOST_MOVES):
                    head, store_is, note = records.look(["head", "store", "moved"])
                    moved = notes.leads_on(note, notes.age(head, store_is))
                    there = None if moved is None else _visit(self._home, moved)
                    if there is None:
                        break
                    records.close()
                    records = RecordStore(there, self._codec)
                yield records
            finally:
                records.close()
        except RendezvousError as error:
            raise ControlError(str(error)) from None

    def _last_round(self, records: RecordStore) -> tuple[int, Mapping[str, Any]]:
        """The generation and plan of the round that the nodes are in."""
        (head,) = records.look(["head"])
        following = fields.generation(head)
        # The head advances once the plan is written; a node that reads it may be a moment late.
        keys = [f"{each}/plan" for each in (following, following - 1)]
        for key, plan in zip(keys, records.look(keys), strict=True):
            if plan is not None and plans.order(plan):
                return int(key.partition("/")[0]), plan
        if head is None and not records.count("came"):
            raise ControlError(
                f"no job {self._name!r} meets there (or it has another secret); check --rdzv-id and --secret-file"
            )
        raise ControlError(f"the nodes of job {self._name!r} have not met yet")


def _visit(home: Home, moved: notes.Moved) -> Any:
    """The store that a note leads to; None if it is not there any more."""
    try:
        return home.visit(moved.addr, moved.port)
    except RendezvousConnectionError:
        return None

"""The stacks of a job's workers, on all its nodes: each supervisor reads those of its own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rallypoint._core.rank_words import in_words
from rallypoint.control import stack_probe
from rallypoint.errors import ControlError, RallyError

from .coordination import Coordination, NodeAsked, RoundReady
from .generation import Worker


# What another node may take longer, for the way there and back.
WAY = 2.0

Look = Callable[[], Mapping[str, Any]]


class JobStacks:
    """Reads them. Methods are called in the supervisor's loop; what they return is called in another thread, and blocks.

    Args:
        coordination: to the other nodes.
    """

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._lock = threading.Lock()  # two who ask must not read each other's answers

    def everywhere(
        self, question: Mapping[str, Any], workers: Iterable[Worker], ready: RoundReady | None
    ) -> Look:
        """The stacks of this node's workers, and unless the question says ``here``, of those of all nodes.

        Args:
            question: ``ranks`` (empty: all), ``native``, ``by_signal``, ``patience`` in seconds, ``here``.
            workers: of this node.
            ready: the round.
        Returns:
            What reads them: ``processes``, and ``silent``: the nodes that did not answer.
        Raises:
            ControlError: there is no such rank.
        """
        workers = list(workers)
        here = [each.ranks.rank for each in workers]
        several = ready is not None and len(ready.workers_of_nodes) > 1
        is_for_all = several and question.get("here") is not True
        known = here
        if is_for_all and workers:
            known = list(range(workers[0].ranks.world_size))
        unknown = sorted(set(_ranks(question)) - set(known))
        if unknown:
            where = "in this job" if is_for_all else "on this node"
            has = f"it has {in_words(known)}" if known else "no worker runs now"
            raise ControlError(f"no {in_words(unknown)} {where} ({has})")
        own = self._own(question, workers)
        if not is_for_all:
            return lambda: {"processes": own(), "silent": []}

        def look() -> Mapping[str, Any]:
            patience = float(question["patience"])
            asked = {"ask": "stacks", **{key: question.get(key) for key in _PASSED_ON}}
            with ThreadPoolExecutor(1, thread_name_prefix="rally-nodes") as beside:
                others = beside.submit(self._coordination.ask_nodes, asked, patience + WAY)
                found = own()
                told = others.result()
            for answer in told.values():
                processes = (answer or {}).get("processes")
                found += processes if isinstance(processes, list) else []
            found.sort(key=lambda each: int(each["rank"]))
            return {"processes": found, "silent": [node for node in told if told[node] is None]}

        return look

    def answer(self, asked: NodeAsked, workers: Iterable[Worker]) -> None:
        """Another node asks for the stacks of this node's workers."""
        own = self._own(asked.question, list(workers))

        def look() -> None:
            try:
                self._coordination.answer(asked, {"processes": own()})
            except (RallyError, OSError, ValueError):
                pass  # the store is gone; who asked is told that this node is silent

        threading.Thread(target=look, name="rally-stacks", daemon=True).start()

    def _own(
        self, question: Mapping[str, Any], workers: Sequence[Worker]
    ) -> Callable[[], list[dict[str, Any]]]:
        ranks = _ranks(question)
        targets = [
            stack_probe.Target(rank=each.ranks.rank, pid=each.pid, fd=os.dup(each.stacks_fd))
            for each in workers
            if each.status is None and each.pid and (not ranks or each.ranks.rank in ranks)
        ]

        def look() -> list[dict[str, Any]]:
            with self._lock:
                found = stack_probe.look(
                    targets,
                    native=question.get("native") is True,
                    by_signal=question.get("by_signal") is True,
                    patience=float(question.get("patience") or 0.0),
                )
            host = socket.gethostname()
            return [{**each, "host": host} for each in found]

        return look


_PASSED_ON = ("ranks", "native", "by_signal", "patience")


def _ranks(question: Mapping[str, Any]) -> list[int]:
    ranks = question.get("ranks")
    return [each for each in ranks if isinstance(each, int)] if isinstance(ranks, list) else []

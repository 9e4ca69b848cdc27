"""Questions about a job's workers on all its nodes: each supervisor answers for its own."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint._core import clock, progress, side_thread
from rallypoint._core.rank_words import in_words
from rallypoint.control import usage
from rallypoint.errors import ControlError, RallyError
from rallypoint.launch.coordination import node_answers
from rallypoint.launch.coordination.interface import Coordination, NodeAsked, RoundReady
from rallypoint.launch.generation import Worker


if TYPE_CHECKING:
    from rallypoint.control.logs.log_readers import LogReaders

# How much longer another node's answer may take, for the way there and back.
WAY = 2.0
# How long workers may take to say how many collectives they have begun.
COUNT_PATIENCE = 0.3
# The most seconds of patience that a question may ask for.
MAX_PATIENCE = 120.0
# The most seconds for which it may have workers recorded.
MAX_SECONDS = 60.0

Look = Callable[[], Mapping[str, Any]]


class JobQuestions:
    """Answers ``nodes``, ``logs``, ``stacks``, ``usage``, ``memory`` and ``profile``. Methods are called in the supervisor's
    loop; what they return is called in another thread, and blocks.

    Args:
        coordination: the way to the other nodes.
        still: by rank of this node, for how many seconds a worker has done nothing.
        slowness: by rank of this node, how late a worker comes to collectives (:meth:`.SlowWatch.told`).
        status: the job's status on this node (:func:`.status.status`).
    """

    def __init__(
        self,
        coordination: Coordination,
        still: Callable[[], Mapping[int, float]],
        slowness: Callable[[], Mapping[int, Mapping[str, Any]]],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._coordination = coordination
        self._still = still
        self._slowness = slowness
        self._status = status
        self._log_readers: LogReaders | None = None

    def everywhere(
        self, question: Mapping[str, Any], workers: Iterable[Worker], ready: RoundReady | None
    ) -> Look:
        """Look at this node's workers and, unless the question says ``here``, at those of all other nodes.

        Args:
            question: ``ask`` (``stacks``, ``usage``, ``memory`` or ``profile``), ``ranks`` (empty: all), ``native``,
                ``by_signal``, ``patience`` in seconds, ``here``, ``if_still``: other nodes answer only if their workers have done
                nothing for that long.
            workers: this node's workers.
            ready: the round.
        Returns:
            A function that finds the answer: ``processes``; ``ended``: the ranks whose worker has ended, as far as is
            known; ``silent``: the nodes that did not answer, and ``unheard``: the ranks there; ``moving``: whether any
            worker on another node has done something.
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
        own, ended = self._own(question, workers), _ended(workers)
        if not is_for_all:
            return lambda: {
                "processes": own(),
                "ended": ended,
                "silent": [],
                "unheard": [],
                "moving": False,
            }

        def look() -> Mapping[str, Any]:
            from concurrent.futures import (
                ThreadPoolExecutor,  # a launch need not wait for its import
            )

            patience = _patience(question)
            asked = {key: question.get(key) for key in _PASSED_ON}
            with ThreadPoolExecutor(1, thread_name_prefix="rally-nodes") as beside:
                ask = self._coordination.ask_nodes
                others = beside.submit(ask, asked, patience + WAY, _nodes_of(question, ready))
                found = own()
                told = others.result()
            gone = set(ended)
            for answer in told.values():
                found += node_answers.processes(answer)
                gone |= node_answers.ended(answer)
            found.sort(key=lambda each: each["rank"])
            silent = [node for node in told if told[node] is None]
            return {
                "processes": found,
                "ended": sorted(gone),
                "silent": silent,
                "unheard": _ranks_of(silent, ready),
                "moving": any((answer or {}).get("moving") is True for answer in told.values()),
            }

        return look

    def nodes(self, question: Mapping[str, Any], ready: RoundReady | None) -> Look:
        """What the supervisors of the job's nodes say about it.

        Args:
            question: ``only``: the ranks of nodes (none: all); ``patience`` in seconds.
            ready: the round.
        Returns:
            A function that finds the answer: ``nodes``: by rank of the node, its status; None if it did not answer.
        """
        own = self._status()
        if ready is None or len(ready.workers_of_nodes) < 2:
            return lambda: {"nodes": {"0": own}}
        every = frozenset(range(len(ready.workers_of_nodes)))
        only = every & frozenset(_numbers(question.get("only"))) or every
        patience, rank = _patience(question), ready.node_rank

        def look() -> Mapping[str, Any]:
            told = self._coordination.ask_nodes({"ask": "nodes"}, patience, only)
            found = {str(node): node_answers.status(told.get(node)) for node in sorted(only)}
            return {"nodes": {**found, str(rank): own} if rank in only else found}

        return look

    def logs(self, question: Mapping[str, Any], ready: RoundReady | None) -> Look:
        """The output of the other nodes' workers. That of this node is in files that the asker can read.

        Args:
            question: see :mod:`rallypoint.control.logs.log_answers`.
            ready: the round.
        Returns:
            A function that finds the answer: ``nodes``: by node, its answer; None if there is none.
        """
        if ready is None or len(ready.workers_of_nodes) < 2:
            return lambda: {"nodes": {}}
        from rallypoint.control.logs import log_answers

        asked = {key: question.get(key) for key in _OF_LOGS}
        asked["room"] = log_answers.room(len(ready.workers_of_nodes))
        patience = _patience(question)
        nodes = _nodes_of(question, ready)
        return lambda: {"nodes": self._coordination.ask_nodes(asked, patience, nodes)}

    def answer(
        self,
        asked: NodeAsked,
        workers: Iterable[Worker],
        ready: RoundReady | None,
        folder: Path | None,
    ) -> None:
        """Answer another node's question about this node's workers.

        Args:
            asked: the question.
            workers: this node's workers.
            ready: the round.
            folder: the folder of this node's run.
        """
        if asked.question.get("ask") == "logs":
            self._answer_logs(asked, ready, folder)
            return
        if asked.question.get("ask") == "nodes":
            status = self._status()
            self._answer_with(asked, lambda: {"status": status}, "rally-nodes")
            return
        wanted = asked.question.get("if_still")
        workers = list(workers)
        ended = _ended(workers)
        still = self._still().values()
        # Workers that have ended no longer move; those that have just started are not known yet.
        none_left = bool(workers) and len(ended) == len(workers)
        moves = isinstance(wanted, float) and not none_left and min(still, default=0.0) < wanted
        own = self._own(asked.question, [] if moves else workers)
        self._answer_with(
            asked, lambda: {"processes": own(), "ended": ended, "moving": moves}, "rally-stacks"
        )

    def _answer_logs(self, asked: NodeAsked, ready: RoundReady | None, folder: Path | None) -> None:
        if self._log_readers is None:
            from rallypoint.control.logs.log_readers import LogReaders  # as above

            self._log_readers = LogReaders()
        readers, node_rank = self._log_readers, -1 if ready is None else ready.node_rank
        self._answer_with(
            asked, lambda: readers.answer(folder, asked.question, node_rank), "rally-logs"
        )

    def _answer_with(
        self, asked: NodeAsked, find: Callable[[], Mapping[str, Any] | None], thread: str
    ) -> None:
        """Find and give the answer in a thread of its own. None: the asker has given up."""

        def answer() -> None:
            try:
                found = find()
                if found is not None:
                    self._coordination.answer(asked, found)
            except (RallyError, OSError, ValueError):
                pass  # the store is gone; the asker is told that this node is silent

        side_thread.begin(answer, thread)  # without a thread, this node is silent

    def _own(
        self, question: Mapping[str, Any], workers: Sequence[Worker]
    ) -> Callable[[], list[dict[str, Any]]]:
        ranks = _ranks(question)
        wanted = [
            each
            for each in workers
            if each.status is None and each.pid and (not ranks or each.ranks.rank in ranks)
        ]
        match question.get("ask"):
            case "usage":
                find = _usage(wanted, self._slowness())
            case "memory":
                find = _memory(wanted)
            case "profile":
                find = _profile(question, wanted)
            case _:
                find = self._stacks(question, wanted)
        host = socket.gethostname()
        return lambda: [{**each, "host": host} for each in find()]

    def _stacks(
        self, question: Mapping[str, Any], workers: Sequence[Worker]
    ) -> Callable[[], list[dict[str, Any]]]:
        from rallypoint.control.stacks import stack_probe  # as above

        with contextlib.ExitStack() as closing:

            def duplicate(fd: int) -> int:
                new = os.dup(fd)
                closing.callback(os.close, new)
                return new

            targets = [
                stack_probe.Target(
                    rank=each.ranks.rank,
                    pid=each.pid,
                    fd=duplicate(each.stacks_fd),
                    questions=duplicate(each.questions_fd),
                )
                for each in workers
            ]
            closing.pop_all()
        counts = {each.pid: each.calls() for each in workers}

        def look() -> list[dict[str, Any]]:
            found = stack_probe.look(
                targets,
                native=question.get("native") is True,
                by_signal=question.get("by_signal") is True,
                patience=_patience(question),
            )
            for record in found:
                if not record["name"]:
                    count = counts[record["pid"]]
                    record["calls"] = None if count is None else count["made"] + count["served"]
            return found

        return look


def _nodes_of(question: Mapping[str, Any], ready: RoundReady | None) -> frozenset[int] | None:
    """The nodes of the ranks that the question is about; None: all."""
    ranks = _ranks(question)
    if not ranks or ready is None:
        return None
    ends = list(itertools.accumulate(ready.workers_of_nodes))
    return frozenset(bisect.bisect_right(ends, rank) for rank in ranks)


def _ranks_of(nodes: Collection[int], ready: RoundReady | None) -> list[int]:
    """The ranks of these nodes: ranks are numbered node by node."""
    counts = () if ready is None else ready.workers_of_nodes
    of_rank = [node for node, count in enumerate(counts) for _ in range(count)]
    return [rank for rank, node in enumerate(of_rank) if node in nodes]


def _ended(workers: Iterable[Worker]) -> list[int]:
    return [each.ranks.rank for each in workers if each.status is not None]


def _usage(
    workers: Sequence[Worker], slowness: Mapping[int, Mapping[str, Any]]
) -> Callable[[], list[dict[str, Any]]]:
    known = [(each.ranks.rank, each.pid, collectives(each), each.progress()) for each in workers]
    lines = {each.pid: os.dup(each.questions_fd) for each in workers if each.memory_fd is None}

    def look() -> list[dict[str, Any]]:
        from rallypoint.control.collectives import collective_probe  # as above

        try:
            begun = collective_probe.begun(lines, COUNT_PATIENCE)
        finally:
            for fd in lines.values():
                os.close(fd)
        used = usage.of_workers(pid for _, pid, _, _ in known)
        return [
            {
                "rank": rank,
                "pid": pid,
                "collectives": begun.get(pid) if counted is None else counted,
                "progress": steps,
                "slowness": slowness.get(rank),
                **used[pid],
                "at": clock.MONOTONIC.now(),
            }
            for rank, pid, counted, steps in known
        ]

    return look


def _memory(workers: Sequence[Worker]) -> Callable[[], list[dict[str, Any]]]:
    from rallypoint.control.memory import memory_probe  # as above

    known = {each.ranks.rank: (each.pid, os.dup(each.questions_fd)) for each in workers}
    return lambda: memory_probe.look(known)


def _profile(
    question: Mapping[str, Any], workers: Sequence[Worker]
) -> Callable[[], list[dict[str, Any]]]:
    from rallypoint.control.profiling import profile_probe  # as above

    folder = question.get("folder")
    wanted = profile_probe.Recording(
        seconds=min(_number(question.get("seconds")), MAX_SECONDS),
        sampling=question.get("sampling") is True,
        native=question.get("native") is True,
        folder=folder if isinstance(folder, str) else None,
    )
    known = {each.ranks.rank: (each.pid, os.dup(each.questions_fd)) for each in workers}
    return lambda: profile_probe.look(known, wanted)


def collectives(worker: Worker) -> int | None:
    """How many collectives a worker in a session has begun, in all groups together."""
    return None if worker.memory_fd is None else progress.collectives(worker.memory_fd)


_OF_LOGS = ("ask", "generation", "since", "reader", "number", "missed")
_PASSED_ON = (
    *("ask", "ranks", "native", "by_signal", "patience", "if_still", "seconds", "sampling"),
)


def _patience(question: Mapping[str, Any]) -> float:
    return min(_number(question.get("patience")), MAX_PATIENCE)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _ranks(question: Mapping[str, Any]) -> list[int]:
    return _numbers(question.get("ranks"))


def _numbers(value: object) -> list[int]:
    return [each for each in value if isinstance(each, int)] if isinstance(value, list) else []

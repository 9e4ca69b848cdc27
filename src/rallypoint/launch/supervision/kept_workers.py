"""Workers in a session of :mod:`rallypoint.elastic`: what the supervisor tells them, and what it tells people about losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rallypoint import events
from rallypoint._core.rank_words import in_words
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Generation, Worker
from rallypoint.launch.output.failure import WorkerFailure
from rallypoint.launch.output.report import explained, in_a_line
from rallypoint.launch.placement import worker_env


@dataclass(frozen=True, slots=True)
class _Loss:
    """What a meeting should bring back.

    Args:
        ready: the round.
        ranks: the lost ones.
        words: what to say instead of the ranks; or "".
    """

    ready: RoundReady
    ranks: tuple[int, ...] = ()
    words: str = ""


class KeptWorkers:
    """The supervisor's side of the session of its workers.

    Args:
        say: prints a line for the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._steps: dict[
            int, int
        ] = {}  # rank -> the step at which it took part in the last recovery
        self._errors: set[tuple[int, str, str]] = set()
        self._recovered: dict[int, list[dict[str, Any]]] = {}
        # meeting -> what it should bring back; also of meetings that a further loss has interrupted
        self._losses: dict[int, _Loss] = {}

    def admit(self, worker: Worker, ready: RoundReady) -> None:
        """Answer a worker that has entered its session: tell it the generation, and give it what its place has kept."""
        record = {"kind": "go", **_where(ready), **_place(ready, worker)}
        held = worker.memory_fd if worker.takes_over else None
        worker.tell(record, *(() if held is None else (held,)))

    def has_seen(self, failure: WorkerFailure, step: int) -> bool:
        """Whether a replaced worker has failed in the same way at the same step. Remembers this failure."""
        if failure.raised is None:
            return False  # killed: nothing says that this would happen again
        key = (step, failure.raised.type, failure.raised.message)
        seen = key in self._errors
        self._errors.add(key)
        return seen

    def tell_of_loss(self, workers: Generation, failure: WorkerFailure, ready: RoundReady) -> None:
        """Tell the workers in a session of a loss."""
        self._tell_loss(workers, ready, [failure.rank], in_a_line(failure))
        self._losses[_meeting(ready)] = _Loss(ready, (failure.rank,))

    def say_loss(
        self, failure: WorkerFailure, ready: RoundReady, by: str = "another process"
    ) -> None:
        """Tell people of a loss. ``by``: who takes the place."""
        why = in_a_line(failure)
        events.emit(
            events.WorkerReplaced(
                generation=ready.generation,
                replaced=ready.replaced,
                rank=failure.rank,
                node_rank=failure.node_rank,
                error=why,
            )
        )
        is_here = failure.node_rank == ready.node_rank
        there = "" if is_here else f" on node {failure.node_rank}"
        more = explained(failure) if is_here else ""
        self._say(
            f"rank {failure.rank}{there} {why}; {by} takes its place, the others keep theirs"
            + (f"\n{more}" if more else "")
        )

    def tell_to_stop(self, workers: Generation) -> bool:
        """The job is told to stop: have the workers save a last checkpoint and exit. Returns whether all of them can."""
        if not self.can_save(workers):
            return False
        for worker in workers:
            worker.tell({"kind": "stop"})
        return True

    def can_save(self, workers: Generation) -> bool:
        """Whether all running workers can save a last checkpoint."""
        running = [worker for worker in workers if worker.status is None]
        return bool(running) and all(worker.in_session and worker.saves for worker in running)

    def tell_of_stop(self, workers: Generation) -> None:
        """This node is told to stop. A worker that was told the same waits to be told what to do."""
        for worker in workers:
            if worker.in_session and worker.status is None:
                worker.tell({"kind": "told"})

    def tell_to_end(self, workers: Generation) -> None:
        """The time for a last checkpoint is over."""
        for worker in workers:
            if worker.in_session and worker.status is None:
                worker.tell({"kind": "end"})

    def hold(self, workers: Generation) -> None:
        """A node is lost: the workers in a session wait until they are told where to meet."""
        for worker in workers:
            if worker.in_session and worker.status is None:
                worker.tell({"kind": "hold"})

    def tell_of_newcomers(self, ready: RoundReady) -> None:
        """Nodes have joined: tell people."""
        kept = ready.kept
        assert kept is not None
        count = sum(1 for was in kept.were if was < 0)
        nodes = "a node has joined" if count == 1 else f"{count} nodes have joined"
        self._say(f"{nodes}; training goes on as before until the new workers are ready")

    def tell_of_lost_nodes(
        self, workers: Generation, ready: RoundReady, ranks: Sequence[int], why: str
    ) -> None:
        """The nodes have met again: tell the workers in a session, and people.

        Args:
            workers: this node's workers.
            ready: the round.
            ranks: the lost ones.
            why: what is lost, in words.
        """
        self._tell_loss(workers, ready, ranks, why)
        kept = ready.kept
        assert kept is not None
        if kept.before:
            before, now = sum(kept.before), sum(ready.workers_of_nodes)
            self._losses[_meeting(ready)] = _Loss(ready, words=f"{now} ranks go on")
            if not ready.is_keeper:
                self._say(f"this node joins a session: {now} ranks go on instead of {before}")
            else:
                self._say(f"{why}; {now} ranks go on instead of {before}, and keep what they have")
            return
        self._losses[_meeting(ready)] = _Loss(
            ready, tuple(ranks), "" if ranks else "all ranks are back"
        )
        if not ready.is_keeper:
            self._say(f"this node takes over {in_words(ranks)}; the other nodes keep their workers")
            return
        if not ranks:
            self._say(f"{why}; all workers keep what they have")
            return
        take = "another process takes its place" if len(ranks) == 1 else "others take their places"
        self._say(f"{why}; {take} ({in_words(ranks)}), the other workers keep theirs")

    def _tell_loss(
        self, workers: Generation, ready: RoundReady, ranks: Sequence[int], why: str
    ) -> None:
        record = {"kind": "lost", "ranks": list(ranks), "why": why, **_where(ready)}
        for worker in workers:
            if worker.in_session and worker.status is None:
                worker.tell({**record, **_place(ready, worker)})

    def note_recovery(self, record: dict[str, Any], size: int) -> None:
        """Take what one rank says about a recovery. Once all have, people are told."""
        generation = int(record["generation"])
        told = self._recovered.setdefault(generation, [])
        told.append(record)
        if len(told) < size:
            return
        formed = max(each["formed"] for each in told)
        transferred = max(each["transferred"] for each in told)
        moved = sum(each["received"] for each in told)
        repeated = any(each["repeated"] for each in told)
        redone = max(each["redone"] for each in told)
        until_now = sorted(each for each in self._losses if each <= generation)
        losses = [self._losses.pop(each) for each in until_now]
        ready = losses[-1].ready if losses else None
        if ready is not None:
            events.emit(
                events.SessionRecovered(
                    generation=ready.generation,
                    replaced=ready.replaced,
                    steps=int(record["steps"]),
                    repeated=repeated,
                    formed=formed,
                    transferred=transferred,
                    bytes_received=moved,
                )
            )
        self._say(
            f"{_back(losses)} at step {record['steps']}"
            f" ({_redone(redone, repeated=repeated)}): all met in {formed * 1000:.0f} ms,"
            f" {moved / 1e6:.1f} MB in {transferred * 1000:.0f} ms"
        )
        for each in [each for each in self._recovered if each <= generation]:
            del self._recovered[each]


def _back(losses: Sequence[_Loss]) -> str:
    """Who is back after these losses, the newest last."""
    if losses and losses[-1].words:
        return losses[-1].words
    ranks = {rank for each in losses for rank in each.ranks}
    if not ranks:
        return "a lost rank is back"
    return f"{in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} back"


def _redone(steps: int, *, repeated: bool) -> str:
    if steps:
        return f"{steps} complete step{'s' if steps > 1 else ''} redone"
    return "repeated" if repeated else "nothing repeated"


def _where(ready: RoundReady) -> dict[str, Any]:
    return {
        "generation": _meeting(ready),
        "host": ready.master_addr,
        "port": ready.master_port,
    }


def _place(ready: RoundReady, worker: Worker) -> dict[str, Any]:
    """The variables of a worker's rank, if that may differ from the rank with which it ran the script's set-up."""
    kept = ready.kept
    if kept is None or not kept.first:
        return {}
    return {"place": worker_env.place_env(worker.ranks)}


def _meeting(ready: RoundReady) -> int:
    """The number by which workers know a meeting. It grows with each loss."""
    return ready.generation + ready.replaced

"""Lost workers of a session, and the workers that take their places."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

from rallypoint import events
from rallypoint.launch import policy
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Worker
from rallypoint.launch.output.failure import WorkerFailure
from rallypoint.launch.output.reportfiles import write_error_files
from rallypoint.launch.server.channel import Channel, Message
from rallypoint.launch.supervision.kept_workers import KeptWorkers
from rallypoint.launch.supervision.spares import Spares
from rallypoint.launch.supervision.spawner import Spawner
from rallypoint.rendezvous.kept_round import Held

from .event_loop import EventLoop
from .situation import Situation


# Spares start this long after all workers are in their session: the workers get the CPUs first.
SPARE_DELAY = 1.0


class Replacements:
    """Starts workers, or takes spares, in place of lost ones, and tells the workers in a session.

    Args:
        config: what runs.
        loop: the supervisor's loop.
        now: this node's situation.
        kept: what is told to workers of a session.
        spawner: starts workers.
        channel: the channel to the fork server.
        ask: sends the fork server a request.
        say: prints a line for the user.
    """

    def __init__(
        self,
        config: LaunchConfig,
        loop: EventLoop,
        now: Situation,
        kept: KeptWorkers,
        spawner: Spawner,
        channel: Channel,
        ask: Callable[[Message], None],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._loop = loop
        self._now = now
        self._kept = kept
        self._spawner = spawner
        self._channel = channel
        self._ask = ask
        self._lost: WorkerFailure | None = None  # the loss that all nodes have read of
        self._spares_are_due = False
        self._joined = ""  # why the workers in a session will meet, once those of a node that has joined are in it, too
        self.spares = Spares(config, say)

    def begin(self) -> None:
        """Workers start: forget what was before."""
        self._joined = ""

    @property
    def awaits_newcomers(self) -> bool:
        """Whether the workers in a session will have to meet newcomers, and have not been told so yet."""
        return bool(self._joined)

    # -- one worker ---------------------------------------------------------------------------

    def locate(
        self, node_rank: int, failure: WorkerFailure, *, survivors: bool
    ) -> policy.LossTold | None:
        """A worker of a session is lost, here or on another node. Returns None if it is not one of this round's."""
        ready = self._now.round
        assert ready is not None
        index = None
        if node_rank == ready.node_rank:
            ranks = [each.ranks.rank for each in self._now.workers]
            if failure.rank not in ranks:
                return None
            index = ranks.index(failure.rank)
        self._lost = failure
        return policy.LossTold(node_rank, index, survivors)

    def replace(self, index: int | None) -> None:
        """Tell the workers in a session of a loss, and start another worker in its place if it was this node's."""
        assert self._now.round is not None
        self._joined = ""
        ready = self._now.round = replace(self._now.round, replaced=self._now.state.replaced)
        workers = self._now.workers
        if index is None:
            assert self._lost is not None
            self._kept.tell_of_loss(workers, self._lost, ready)
            self._kept.say_loss(self._lost, ready)
            return
        failure, folders = workers.failure_of(list(workers)[index]), workers.folders()
        spare = self.spares.take(index)
        self._kept.tell_of_loss(workers, failure, ready)
        self._fill(ready, index, spare)
        # Training waits for the processes, not for people and files.
        self._kept.say_loss(failure, ready, "another process" if spare is None else "a spare")
        write_error_files(folders, (failure,))

    def _fill(self, ready: RoundReady, index: int, spare: Worker | None = None) -> None:
        workers = self._now.workers
        self._loop.forget(list(workers)[index].line)
        if spare is not None:
            self._spawner.settle(ready, index, spare)
            workers.replace(index, spare)
            tell_start(workers.number, spare)
            return
        worker = self._spawner.take_over(ready, index, self._channel)
        workers.replace(index, worker)
        self._loop.watch(worker.line)

    # -- a node -------------------------------------------------------------------------------

    def held(self) -> Held | None:
        """The workers of a session that survive the loss of a node."""
        state, ready = self._now.state, self._now.round
        if state.phase is not policy.Phase.REJOINING or ready is None:
            return None
        kept = ready.kept
        first = () if kept is None else kept.first
        copies = [each.record_copies for each in self._now.workers]
        return Held(
            generation=ready.generation,
            workers=ready.workers_of_nodes,
            replaced=state.replaced,
            has_state=bool(state.kept & state.running),
            # A worker that the fork server has not started yet holds no records.
            has_records=state.running == {index for index, each in enumerate(copies) if each},
            copies=max(copies, default=0),
            # Until this node's workers are started, nobody serves their store.
            port=ready.master_port if self._now.workers.number == ready.generation else 0,
            resizes=state.resizes and self._config.world_size is None,
            first=first,
            origin=kept.origins[ready.node_rank] if kept is not None and first else 0,
        )

    def keep(self, lost: Sequence[int], why: str) -> None:
        """The nodes have met again after the loss of one: the workers of this node continue.

        Args:
            lost: the indices of workers that have ended meanwhile.
            why: what is lost, in words.
        """
        ready, workers = self._now.round, self._now.workers
        assert ready is not None
        ended = [list(workers)[index] for index in lost]
        failures = [workers.failure_of(each) for each in ended]  # of the generation before
        ranks = [*_lost_ranks(ready), *(each.ranks.rank for each in ended)]
        workers.continue_as(ready.generation, ready.node_rank, self._spawner.ranks(ready))
        self._spawner.continue_as(ready, workers)
        assert ready.kept is not None
        if ready.kept.before and not ranks and ready.kept.port:
            # Nobody is lost: training goes on until the newcomers are ready. (In a new store they would look in vain
            # for what the others have yet to store there again.)
            self._joined = why
            self._kept.tell_of_newcomers(ready)
        else:
            self._joined = ""
            self._kept.tell_of_lost_nodes(workers, ready, sorted(ranks), why)
        write_error_files(workers.folders(), failures)
        for index in [*lost, *self._end_stranded(ready.store)]:
            self._fill(ready, index, self.spares.take(index))
        self.start_spares_soon()

    def heed_news(self) -> None:
        """Another node has said that its workers are in a session."""
        ready = self._now.round
        if self._joined and ready is not None and not self._now.state.without_survivors:
            why, self._joined = self._joined, ""
            self._kept.tell_of_lost_nodes(self._now.workers, ready, (), why)

    def _end_stranded(self, store: str) -> list[int]:
        """End the newcomers and spares whose set-up would wait for a store that is lost. Returns the newcomers' indices."""
        newcomers = {
            index: each
            for index, each in enumerate(self._now.workers)
            if each.takes_over
            and not each.in_session
            and each.status is None
            and each.store != store
        }
        spares = self.spares.drop_stranded(store)
        self._end([*newcomers.values(), *spares])
        for each in spares:
            self._loop.forget(each.line)
            each.close()
        return list(newcomers)

    def tell_newcomers(self) -> None:
        """This node's workers take the places of a lost node's: tell people."""
        ready = self._now.round
        assert ready is not None
        self._kept.tell_of_lost_nodes(
            self._now.workers, ready, _lost_ranks(ready), "a node is lost"
        )

    # -- spares -------------------------------------------------------------------------------

    def start_spares_soon(self) -> None:
        """If all workers are in their session, start missing spares in a while, so that the workers get the CPUs first."""
        can_start = policy.is_at_full_strength(self._now.state)
        if self._config.spares and can_start and not self._spares_are_due:
            self._spares_are_due = True
            self._loop.after(SPARE_DELAY, self._start_spares)

    def _start_spares(self) -> None:
        self._spares_are_due = False
        ready = self._now.round
        if ready is None or not policy.is_at_full_strength(self._now.state):
            return
        count = len(list(self._now.workers))
        for each in self.spares.start_missing(self._spawner, ready, count, self._channel):
            self._loop.watch(each.line)

    def note_spare_ended(self, spare: Worker) -> None:
        """A spare has ended on its own: start another one."""
        self._loop.forget(spare.line)
        self.spares.note_end(spare)
        self.start_spares_soon()

    def end_spares(self) -> None:
        """End all spares."""
        self._end(self.forget_spares())

    def _end(self, workers: Sequence[Worker]) -> None:
        names = [each.name for each in workers]
        if names:
            self._ask(
                {
                    "do": "signal",
                    "names": names,
                    "signal": signal.SIGKILL,
                    "group": False,
                    "hold": 0.0,
                }
            )

    def forget_spares(self) -> list[Worker]:
        """Stop watching all spares, and forget them. Returns them."""
        for each in self.spares:
            self._loop.forget(each.line)
        return self.spares.close()


def tell_start(generation: int, worker: Worker) -> None:
    """Emit the event that a worker runs."""
    events.emit(
        events.WorkerStarted(
            generation=generation,
            rank=worker.ranks.rank,
            local_rank=worker.ranks.local_rank,
            worker_pid=worker.pid,
        )
    )


def _lost_ranks(ready: RoundReady) -> list[int]:
    """The ranks, in the last round, of the workers whose nodes are lost."""
    kept = ready.kept
    assert kept is not None
    counts, stay = kept.before or ready.workers_of_nodes, kept.were or kept.keepers
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    return [rank for rank, node in enumerate(nodes) if node not in stay]

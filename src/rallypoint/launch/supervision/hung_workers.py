"""``--step-timeout``: workers of a session that hang are found by comparison with the others, and ended.

A worker that is to take a lost one's place has begun nothing yet. It hangs if it does nothing at all before its session.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from rallypoint._core import clock, process, progress
from rallypoint.control import usage
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import Coordination, RoundReady
from rallypoint.launch.coordination.step_tables import Tables
from rallypoint.launch.generation import Worker
from rallypoint.launch.policy import Phase
from rallypoint.launch.server.channel import Message
from rallypoint.launch.watching.step_watch import Standstill, StepWatch
from rallypoint.launch.watching.stillness import Stillness

from .event_loop import EventLoop
from .situation import Situation


# How often the workers of a session are looked at in the time after which one hangs.
LOOKS = 4
# A node may look a while after another one, and the journal takes its time.
DELAY = 5.0
# How long a worker that hangs may take to report where.
HANG_GRACE = 1.0


class HungWorkers:
    """Finds the workers of this node that hang, and ends them.

    Args:
        config: what runs.
        coordination: the other nodes.
        loop: the supervisor's loop.
        now: this node's situation.
        ask: sends the fork server a request.
        awaits_newcomers: whether this node's workers have yet to be told to meet newcomers.
    """

    def __init__(
        self,
        config: LaunchConfig,
        coordination: Coordination,
        loop: EventLoop,
        now: Situation,
        ask: Callable[[Message], None],
        awaits_newcomers: Callable[[], bool],
    ) -> None:
        self._config = config
        self._coordination = coordination
        self._loop = loop
        self._now = now
        self._ask = ask
        self._awaits_newcomers = awaits_newcomers
        self._watch = StepWatch(config.step_timeout)
        self._stillness = Stillness()  # of workers on their way to a session
        self._standstill: Standstill | None = None  # none before the first round

    def begin(self, ready: RoundReady) -> None:
        """Workers start, or go on, in this round."""
        timeout = self._config.step_timeout
        if timeout:
            self._watch = StepWatch(timeout)
            self._stillness = Stillness()
            self._standstill = Standstill(len(ready.workers_of_nodes), timeout + DELAY)
            self._look(ready.generation)

    def _look(self, generation: int) -> None:
        """See whether a worker hangs, and look again in a while."""
        state = self._now.state
        if generation != state.generation or state.phase is not Phase.RUNNING:
            return
        self._loop.after(self._config.step_timeout / LOOKS, lambda: self._look(generation))
        arriving = {each.ranks.rank: each.pid for each in self._arriving()}
        found = {rank: {"pid": pid, **usage.usage(pid)} for rank, pid in arriving.items()}
        self._stillness.look(clock.MONOTONIC.now(), found)
        tables = self._progress()
        if tables is None:
            self._watch.forget()
        elif self._watch.look(clock.MONOTONIC.now(), tables):
            if self._config.num_nodes > 1:
                self._coordination.tell_standstill(generation, state.replaced, tables)
            else:
                self.hear_of_standstill(0, state.replaced, tables)

    def _progress(self) -> Tables | None:
        """How far this node's workers in a session have come; None unless all workers are in it, or on their way to it.

        Those on their way need not be slow themselves: a worker that hangs may hold up what they wait for. But workers
        that have not been told to meet them are not late.
        """
        state = self._now.state
        if state.lost or not state.running or not state.running <= state.kept | state.arriving:
            return None
        if self._awaits_newcomers():
            return None
        # The memory of a worker that is on its way still says how far the lost one had come.
        return {
            worker.ranks.rank: progress.read(worker.memory_fd)
            for index, worker in enumerate(self._now.workers)
            if index in state.kept and worker.memory_fd is not None
        }

    def _arriving(self) -> list[Worker]:
        """This node's workers on their way to a session."""
        arriving = self._now.state.arriving
        workers = (each for index, each in enumerate(self._now.workers) if index in arriving)
        return [each for each in workers if each.pid and each.status is None]

    def hear_of_standstill(self, node_rank: int, meeting: int, tables: Tables) -> None:
        """The workers of a node stand still. If all nodes' do, this node ends those of its own that the others wait for."""
        state = self._now.state
        if self._standstill is None or state.phase is not Phase.RUNNING:
            return
        found = self._standstill.tell(clock.MONOTONIC.now(), node_rank, meeting, tables)
        if found is None or meeting != state.replaced:
            return
        seconds = f"{self._config.step_timeout:g} s"
        hanging, together = found
        mine = self._progress()
        for worker in self._now.workers:
            rank = worker.ranks.rank
            # It may have gone on since this node said that it stood still.
            if rank in hanging and mine is not None and mine.get(rank) == together[rank]:
                self._end(worker, f"the others waited for it in a collective for {seconds}")
            # It has begun the collective that the others wait in, and was stopped during it.
            elif not hanging and process.state(worker.pid) == "T":
                self._end(worker, f"it was stopped (SIGSTOP), and nothing has moved for {seconds}")
        # A newcomer may itself wait for one that hangs.
        if not hanging and not any(worker.hung for worker in self._now.workers):
            self._end_idle_newcomers(seconds)

    def _end_idle_newcomers(self, seconds: str) -> None:
        still = self._stillness.still(clock.MONOTONIC.now())
        why = f"it used no CPU or storage for {seconds}, and the others wait for it to recover from a loss"
        for worker in self._arriving():
            if still.get(worker.ranks.rank, 0.0) >= self._config.step_timeout:
                self._end(worker, why)

    def _end(self, worker: Worker, why: str) -> None:
        """SIGABRT makes it report where it is; SIGKILL follows."""
        if worker.hung:
            return
        worker.hung = why

        def end(number: int) -> None:
            if worker.status is None:
                names = [worker.name]
                self._ask(
                    {"do": "signal", "names": names, "signal": number, "group": False, "hold": 0.0}
                )

        end(signal.SIGABRT)
        self._ask({"do": "wake", "names": [worker.name]})
        self._loop.after(HANG_GRACE, lambda: end(signal.SIGKILL))

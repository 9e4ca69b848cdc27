"""The warm spares of a node: workers that wait in their session to take a lost one's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rallypoint._core import clock
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Worker
from rallypoint.launch.server.channel import Channel

from . import spare_plan
from .spawner import Spawner


class Spares:
    """Starts spares, and hands them out.

    Args:
        config: says how many there should be.
        say: prints a line for the user.
    """

    def __init__(self, config: LaunchConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._plan = spare_plan.Plan(
            wanted=config.spares, max_ends=config.max_losses, window=config.loss_window
        )
        self._workers: dict[int, Worker] = {}  # by number
        self._was_told = False  # people know why spares do not fit every rank

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def named(self, name: str) -> Worker | None:
        return next((each for each in self if each.name == name), None)

    def start_missing(
        self, spawner: Spawner, ready: RoundReady, num_workers: int, channel: Channel
    ) -> list[Worker]:
        """Start the spares that are missing. Returns them."""
        started: list[Worker] = []
        while True:
            self._plan, spare = spare_plan.begin(self._plan, num_workers)
            if spare is None:
                return started
            worker = spawner.spare(ready, spare.index, spare.number, channel)
            self._workers[spare.number] = worker
            started.append(worker)

    def note_ready(self, worker: Worker, why_bound: str) -> None:
        """A spare waits in its session.

        Args:
            worker: the spare.
            why_bound: why it can take only the rank in whose role it ran the set-up; empty if it can take any.
        """
        why_bound = why_bound or self._why_all_bound()
        number = self._number_of(worker)
        self._plan = spare_plan.note_ready(self._plan, number, is_bound=bool(why_bound))
        if why_bound and not self._was_told and self._config.spares < worker.ranks.local_world_size:
            self._was_told = True
            self._say(
                f"a spare can take over only rank {worker.ranks.rank}: {why_bound} before the session"
                " (do that in the session, or use as many --spares as workers per node)"
            )

    def take(self, index: int) -> Worker | None:
        """The spare that takes the place of the worker with this local index, if there is one."""
        self._plan, spare = spare_plan.choose(self._plan, index)
        return None if spare is None else self._workers.pop(spare.number)

    def note_end(self, worker: Worker) -> None:
        """A spare has ended on its own."""
        number = self._number_of(worker)
        del self._workers[number]
        worker.close()
        self._plan = spare_plan.note_end(clock.MONOTONIC.now(), self._plan, number)
        if self._plan.is_over:
            self._say(
                f"{len(self._plan.ends)} spares have ended within {self._config.loss_window:g} s;"
                " no more are started"
            )

    def drop_stranded(self, store: str) -> list[Worker]:
        """Forget spares that still need a store other than this one. Returns them, to be ended and closed."""
        stores = {number: each.store for number, each in self._workers.items()}
        self._plan, found = spare_plan.drop_stranded(self._plan, stores, store)
        return [self._workers.pop(number) for number in found]

    def close(self) -> list[Worker]:
        """Forget all spares. Returns them: their processes may still run."""
        workers = list(self)
        self._workers.clear()
        self._plan = spare_plan.drop_all(self._plan)
        for worker in workers:
            worker.close()
        return workers

    def status(self) -> list[dict[str, Any]]:
        """The spares, for ``rally ps --json``."""
        ready = {each.number: each.is_ready for each in self._plan.spares}
        return [
            {"pid": worker.pid, "state": "waiting" if ready[number] else "starting"}
            for number, worker in self._workers.items()
        ]

    def _number_of(self, worker: Worker) -> int:
        return next(number for number, each in self._workers.items() if each is worker)

    def _why_all_bound(self) -> str:
        config = self._config
        if config.templates:
            return "--templates gives each rank its own arguments"
        if config.numa_binding is not None or config.virtual_local_rank:
            return "each rank has its own devices or CPUs"
        return ""

"""Starting the workers of a generation: ranks, variables, CPUs and streams of each, as a request to the fork server."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint._core import addresses, linux, rank_watch, stack_line
from rallypoint._core.log_records import Origin
from rallypoint.errors import LaunchError
from rallypoint.launch.config import LaunchConfig, LogConfig, TargetKind
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Generation, Worker
from rallypoint.launch.output.console import Console
from rallypoint.launch.output.relay import Relay
from rallypoint.launch.output.run_folder import RunFolder
from rallypoint.launch.output.worker_streams import StreamFactory, WorkerStreams
from rallypoint.launch.placement import worker_env
from rallypoint.launch.placement.ranks import WorkerRanks, assign
from rallypoint.launch.server.channel import Channel


class Spawner:
    """Has the fork server start workers.

    Args:
        config: what to run.
        env: the supervisor's environment.
        folder: the run's folder.
        relay: passes their output on.
        console: where their output is shown.
        payload_fd: function launches: a memory file with the pickled call.
        variables: returns what else belongs in the environment of a worker that starts now.
    """

    def __init__(
        self,
        config: LaunchConfig,
        env: Mapping[str, str],
        folder: RunFolder,
        relay: Relay,
        console: Console,
        payload_fd: int | None,
        variables: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._config = config
        self._env = env
        self._folder = folder
        self._relay = relay
        self._console = console
        self._payload_fd = payload_fd
        self._variables = variables
        self._generation = 0  # the one in which this node's workers were started together
        self._attempt: Path | None = None  # that generation's folder

    def spawn(
        self,
        ready: RoundReady,
        workers: Generation,
        channel: Channel,
        *,
        takes_over: bool = False,
    ) -> Iterator[Worker]:
        """Ask for the workers of a round, one after the other.

        Args:
            ready: the round.
            workers: the generation that they are added to; what is open for them is closed with it.
            channel: the channel to the fork server.
            takes_over: they take the places of a lost node's workers.

        Yields:
            Each worker, once it is asked for.

        Raises:
            ConfigError: a setting is impossible on this node.
            LaunchError: files for output cannot be made.
        """
        self._generation = ready.generation
        folder = self._attempt = self._folder.generation(ready.generation)
        factory = StreamFactory(self._config.logs, folder, self._relay, self._console)
        facts = self._facts(ready)
        ranks_of_workers = self.ranks(ready)
        by_local_rank = {each.local_rank: each.rank for each in ranks_of_workers}
        self._folder.note_ranks(folder, by_local_rank)
        # For all workers before the first one starts: if one of them cannot have its settings, the whole command is wrong.
        settings = [
            self._settings_of(ranks, facts, factory, ready.network)
            for ranks in self._ranks_of_set_up(ready)
        ]
        for ranks, each in zip(ranks_of_workers, settings, strict=True):
            if takes_over:
                each["env"][worker_env.TAKES_OVER] = "1"
            worker = self._spawn_one(ranks, facts, factory, each, channel)
            worker.takes_over, worker.store = takes_over, ready.store
            workers.add(worker)  # from here on what it has open is closed with the generation
            yield worker

    def take_over(self, ready: RoundReady, index: int, channel: Channel) -> Worker:
        """Ask for a worker that takes the place of a lost one.

        Args:
            ready: the round, with the number of losses.
            index: the lost worker's index on this node.
            channel: the channel to the fork server.
        Returns:
            The worker.
        Raises:
            ConfigError, LaunchError: as :meth:`spawn`.
        """
        folder = self._folder_of_successors(ready)
        factory = StreamFactory(self._config.logs, folder, self._relay, self._console)
        facts, ranks = self._facts(ready), self.ranks(ready)[index]
        settings = self._settings_of(
            self._ranks_of_set_up(ready)[index], facts, factory, ready.network
        )
        settings["env"][worker_env.TAKES_OVER] = "1"
        name = f"worker {ready.generation}.{ranks.local_rank}, replaced {ready.replaced}"
        worker = self._spawn_one(ranks, facts, factory, settings, channel, name)
        worker.takes_over, worker.store = True, ready.store
        return worker

    def spare(self, ready: RoundReady, index: int, number: int, channel: Channel) -> Worker:
        """Ask for a spare. What it writes before it takes a place is not shown: the other workers have already written it.

        Args:
            ready: the round.
            index: the index on this node of the worker in whose role it runs the set-up.
            number: unique on this node.
            channel: the channel to the fork server.
        Returns:
            The worker.
        Raises:
            ConfigError, LaunchError: as :meth:`spawn`.
        """
        factory = StreamFactory(LogConfig(folder=os.devnull), None, self._relay, self._console)
        facts, ranks = self._facts(ready), self._ranks_of_set_up(ready)[index]
        settings = self._settings_of(ranks, facts, factory, ready.network)
        settings["env"][worker_env.TAKES_OVER] = settings["env"][rank_watch.SPARE] = "1"
        # No other process of the job has this name.
        name = f"spare {ready.generation}.{ready.replaced}.{number}"
        streams = WorkerStreams(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), -1)
        streams.stderr = streams.stdout
        streams.to_close.append(streams.stdout)
        worker = self._spawn_with(ranks, streams, settings, channel, name)
        worker.takes_over, worker.store = True, ready.store
        return worker

    def settle(self, ready: RoundReady, index: int, spare: Worker) -> None:
        """Give a spare the place of a lost worker.

        Args:
            ready: the round, with the number of losses.
            index: the lost worker's index on this node.
            spare: the spare that takes its place.
        Raises:
            ConfigError, LaunchError: as :meth:`spawn`.
        """
        folder = self._folder_of_successors(ready)
        factory = StreamFactory(self._config.logs, folder, self._relay, self._console)
        facts, ranks = self._facts(ready), self.ranks(ready)[index]
        settings = self._settings_of(
            self._ranks_of_set_up(ready)[index], facts, factory, ready.network
        )
        streams = self._open(ranks, facts, factory)
        spare.ranks, spare.streams = ranks, streams
        spare.tell({"kind": "become", "env": settings["env"]}, streams.stdout, streams.stderr)
        streams.given()

    def continue_as(self, ready: RoundReady, workers: Iterable[Worker]) -> None:
        """The workers go on in another round: from now on, their output is that of the ranks that they have there."""
        facts, ranks = self._facts(ready), self.ranks(ready)
        for worker, its in zip(workers, ranks, strict=True):
            worker.streams.relabel(*self._label(its, facts))
        with contextlib.suppress(LaunchError):  # a full disk does not end training
            self._folder.note_ranks(self._attempt, {each.local_rank: each.rank for each in ranks})

    def _folder_of_successors(self, ready: RoundReady) -> Path | None:
        """A folder in the generation of the workers whose places they take, so that this node's output stays together."""
        losses = ready.generation - self._generation + ready.replaced
        return self._folder.generation(self._generation, losses)

    def _facts(self, ready: RoundReady) -> worker_env.RoundFacts:
        config = self._config
        return worker_env.RoundFacts(
            master_addr=ready.master_addr,
            master_port=ready.master_port,
            generation=ready.generation,
            restart_count=ready.restarts,
            max_restarts=config.max_restarts,
            run_id=config.rendezvous.run_id,
            role=config.role,
            signals=",".join(each.name for each in config.signals),
            virtual_local_rank=config.virtual_local_rank,
            is_open=config.secret is None,
            bind=config.bind,
        )

    def ranks(self, ready: RoundReady) -> list[WorkerRanks]:
        """The places of this node's workers in a round."""
        return self._assigned(ready.workers_of_nodes, ready.node_rank)

    def _ranks_of_set_up(self, ready: RoundReady) -> list[WorkerRanks]:
        """The ranks with which workers run the script's set-up: in a session that once had another number of ranks,
        those of its first round."""
        kept = ready.kept
        if kept is None or not kept.first:
            return self.ranks(ready)
        return self._assigned(kept.first, kept.origins[ready.node_rank])

    def _assigned(self, workers_of_nodes: Sequence[int], node_rank: int) -> list[WorkerRanks]:
        config = self._config
        return list(
            assign(
                workers_of_nodes,
                node_rank,
                local_rank_base=config.local_rank_base,
                local_world_size=config.local_world_size,
                group_rank=config.group_rank,
                group_world_size=config.group_world_size,
                rank_offset=config.rank_offset,
                world_size=config.world_size,
            )
        )

    def _settings_of(
        self,
        ranks: WorkerRanks,
        facts: worker_env.RoundFacts,
        factory: StreamFactory,
        network: Mapping[str, str],
    ) -> dict[str, Any]:
        """One worker's settings: what belongs in its environment, and where it may run."""
        folder = factory.worker_folder(ranks.local_rank)
        error_file = "" if folder is None else str(folder / "error.json")
        args = None
        if self._config.templates:
            args = worker_env.fill_in(self._config.job.args, ranks, facts.generation)
        return {
            "env": {
                **network,
                **self._variables(),
                **worker_env.worker_env(self._env, ranks, facts, error_file),
            },
            "cpus": self._cpus_of(ranks),
            "args": args,
        }

    def _spawn_one(
        self,
        ranks: WorkerRanks,
        facts: worker_env.RoundFacts,
        factory: StreamFactory,
        settings: dict[str, Any],
        channel: Channel,
        name: str = "",
    ) -> Worker:
        # The name contains the generation: a report about an earlier one's worker must not be taken for this one's.
        name = name or f"worker {facts.generation}.{ranks.local_rank}"
        streams = self._open(ranks, facts, factory)
        return self._spawn_with(ranks, streams, settings, channel, name)

    def _open(
        self, ranks: WorkerRanks, facts: worker_env.RoundFacts, factory: StreamFactory
    ) -> WorkerStreams:
        return factory.open(ranks.local_rank, *self._label(ranks, facts))

    def _label(self, ranks: WorkerRanks, facts: worker_env.RoundFacts) -> tuple[str, Origin]:
        """The prefix of teed lines, and the origin of lines that are written as records."""
        prefix = worker_env.log_prefix(self._config.logs.prefix_template, facts.role, ranks)
        origin = Origin(
            host=addresses.hostname(),
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            generation=facts.generation,
            stream="",
        )
        return prefix, origin

    def _spawn_with(
        self,
        ranks: WorkerRanks,
        streams: WorkerStreams,
        settings: dict[str, Any],
        channel: Channel,
        name: str,
    ) -> Worker:
        try:
            ours, theirs = _lines()
        except OSError:
            streams.given()
            raise
        worker = Worker(ranks, name, ours[0], streams, stacks_fd=ours[1], questions_fd=ours[2])
        try:
            with contextlib.ExitStack() as closing:
                for each in theirs:
                    closing.callback(os.close, each)
                fds = [streams.stdout, streams.stderr, *theirs]
                if self._config.job.kind is TargetKind.FUNCTION:
                    worker.result_fd = linux.memfd_create("rally-result", linux.MFD_CLOEXEC)
                    payload = self._payload_fd if self._payload_fd is not None else worker.result_fd
                    fds += [payload, worker.result_fd]
                message = {"do": "spawn", "name": worker.name, **settings}
                channel.send(message, fds)
        except BaseException:
            worker.close()
            raise
        streams.given()
        return worker

    def _cpus_of(self, ranks: WorkerRanks) -> list[int] | None:
        if self._config.numa_binding is None:
            return None
        from rallypoint.launch.placement import numa, topology

        found = topology.read_topology(env=self._env)
        chosen = numa.choose_cpus(
            self._config.numa_binding, found, ranks.local_rank, ranks.local_world_size
        )
        return sorted(chosen)


def _lines() -> tuple[tuple[socket.socket, int, int], tuple[int, int, int]]:
    """The supervisor's and the worker's ends of the line, of the pipe for stacks, and of the socket for questions."""
    with contextlib.ExitStack() as closing:
        ours, theirs = socket.socketpair()
        closing.callback(ours.close)
        closing.callback(theirs.close)
        stacks_from, stacks_to = stack_line.pipe()
        closing.callback(os.close, stacks_from)
        closing.callback(os.close, stacks_to)
        asks, answers = stack_line.line()
        closing.pop_all()
    ours.setblocking(False)
    return (ours, stacks_from, asks), (theirs.detach(), stacks_to, answers)

"""The shell around :mod:`rallypoint.launch.policy`: gathers events and executes commands.

One loop over descriptors: signals, the connection to the fork server, the fork server's pidfd, the workers' sockets, the
other nodes. It sleeps until one of them is readable, or until the policy's next deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

from rallypoint import events
from rallypoint._core import clock, env as environment, event_sinks, limits, process, secret
from rallypoint._core.host_name import host_name
from rallypoint.errors import ConfigError, LaunchError, RallyError
from rallypoint.rendezvous.home import ENDED_WELL

from . import policy, signals
from .config import LaunchConfig, OnHang, TargetKind
from .coordination.interface import (
    Advice,
    Coordination,
    CoordinationFailed,
    NodeAsked,
    NodeFacts,
    NotNeeded,
    PeerEvent,
    RoundReady,
    ServeStore,
)
from .generation import Generation, Worker
from .output.console import Console
from .output.cpu_limit import CpuTime
from .output.failure import in_order_of_blame
from .output.relay import Relay
from .output.report import in_a_line
from .output.reportfiles import write_error_files
from .output.run_folder import RunFolder
from .placement import worker_env
from .policy import Aim, Phase
from .server.channel import Message
from .server.server_process import ServerProcess
from .server.server_start import TORCH, start_server
from .signals import SignalEvents
from .supervision import store_socket
from .supervision.causes import Causes
from .supervision.early_losses import EarlyLosses
from .supervision.event_loop import EventLoop
from .supervision.host_troubles import HostTroubles
from .supervision.hung_workers import HungWorkers
from .supervision.import_news import ImportNews
from .supervision.job_end import JobEnd, Outcome
from .supervision.kept_workers import KeptWorkers
from .supervision.next_workers import NextWorkers
from .supervision.observation import Observation
from .supervision.peer_news import PeerNews
from .supervision.replacements import Replacements, tell_start
from .supervision.server_requests import ServerRequests
from .supervision.shared_stop import SharedStop
from .supervision.situation import Situation
from .supervision.spawner import Spawner
from .supervision.worker_ends import WorkerEnds
from .supervision.worker_signals import WorkerSignals
from .worker.job import WorkerFds


# How long output may still arrive after its writers have exited.
DRAIN_PATIENCE = 2.0

_log = logging.getLogger(__name__)

Say = Callable[[str], None]


class Supervisor:
    """Runs the workers of one node from start to end. Used once.

    Args:
        config: what to run.
        coordination: the other nodes.
        console: where workers' output is shown.
        say: prints a line for the user.
        payload_fd: function launches: a memory file with the pickled call.
        call: function launches by ``fork``: what a worker calls.
        token: identifies this job among the user's jobs; unguessable.
    """

    def __init__(
        self,
        config: LaunchConfig,
        *,
        coordination: Coordination,
        console: Console,
        say: Say,
        token: str,
        payload_fd: int | None = None,
        call: Callable[[WorkerFds], None] | None = None,
    ) -> None:
        self._config = config
        self._coordination = coordination
        self._console = console
        self._say = say
        self._token = token
        self._payload_fd = payload_fd
        self._call = call
        self._env = event_sinks.for_workers(environment.snapshot())
        self._relay: Relay
        self._spawned: dict[str, int] = {}  # pids that the fork server has not reaped
        state = policy.State(
            max_restarts=config.max_restarts,
            restart_window=config.restart_window,
            grace=config.shutdown_timeout,
            moment=config.cause_timeout,
            num_nodes=config.num_nodes,
            elastic=config.elastic,
            passed=frozenset(config.passed_signals),
            sigterm_repeats=config.sigterm_repeats,
            max_losses=config.max_losses,
            loss_window=config.loss_window,
        )
        self._loop = EventLoop()
        self._now = Situation(state, Generation(0, 0))
        self._num_workers = config.workers_per_node
        self._store_socket: socket.socket | None = None
        self._server_ready = False
        self._start_is_due = False
        self._probe_fd: int | None = None
        self._causes = Causes()
        self._early_losses = EarlyLosses(self._loop, self._now, self._decide)
        self._store_name = ""
        self._kept = KeptWorkers(say)
        self._server: ServerProcess
        self._folder: RunFolder
        self._requests: ServerRequests
        self._signals: WorkerSignals
        self._ends: WorkerEnds
        self._hung: HungWorkers
        self._spawner: Spawner
        self._replacements: Replacements
        self._imports: ImportNews
        self._next_workers: NextWorkers
        self._peer_news: PeerNews
        self._reserve: list[int] = []  # descriptors kept for cleaning up
        self._observation = Observation(
            config, self._env, coordination, console, self._loop, self._now, say, self._hangs
        )
        self._troubles = HostTroubles(config.avoid_hosts, say)
        self._end = JobEnd(
            config,
            coordination,
            self._causes,
            self._now,
            self._observation.slow_ranks,
            self._troubles,
            say,
        )

    # -- life ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run the job. Blocks until it has ended and none of its processes is left.

        Raises:
            ConfigError: a setting cannot work (a port in use, no accelerator).
            LaunchError: the job's processes could not be started or watched.
            RendezvousError: the nodes could not agree.
        """
        config = self._config
        try:
            with process.adopting_orphans(), self._listening() as received:
                try:
                    self._relay = Relay()
                    for _ in range(4):
                        self._reserve.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
                    self._server = self._start_server()
                    self._observation.trace()
                    events.emit(
                        events.JobStarted(
                            run_id=config.rendezvous.run_id,
                            target=config.job.name,
                            min_nodes=config.min_nodes or config.num_nodes,
                            max_nodes=config.num_nodes,
                            max_restarts=config.max_restarts,
                        )
                    )
                    self._folder = RunFolder(config.logs, config.rendezvous.run_id)
                    if self._folder.is_news:
                        self._say(f"output redirected to files is in {self._folder.path}")
                    self._observation.log_folder = self._folder.path
                    self._spawner = Spawner(
                        config,
                        self._env,
                        self._folder,
                        self._relay,
                        self._console,
                        self._payload_fd,
                        self._observation.variables,
                    )
                    self._connect_parts()
                    return self._serve(received)
                finally:
                    self._close(received)
        except (OSError, RuntimeError) as error:
            self._end.tell(Aim.FAIL, str(error))
            reached = limits.explain(error)
            if reached is None or isinstance(error, RallyError):
                raise
            raise LaunchError(reached) from None

    def _connect_parts(self) -> None:
        """Make the parts that need the fork server."""
        config, loop, now, say = self._config, self._loop, self._now, self._say
        self._requests = ServerRequests(
            self._server,
            loop,
            now,
            say,
            on_gone=self._fail_without_server,
            on_swept=self._swept,
        )
        self._imports = ImportNews(config, loop, now, self._coordination, self._server.channel)
        self._next_workers = NextWorkers(self._server.channel)
        ask = self._requests.ask
        self._signals = WorkerSignals(config, loop, now, self._requests, self._kept, say)
        self._ends = WorkerEnds(
            config,
            loop,
            now,
            self._signals,
            self._kept,
            self._early_losses,
            self._troubles,
            self._decide,
        )
        self._shared_stop = SharedStop(
            loop,
            now,
            self._kept,
            self._coordination,
            self._decide,
            matters=128 + signal.SIGTERM in config.requeue_on,
        )
        self._hung = HungWorkers(
            config,
            self._coordination,
            loop,
            now,
            ask,
            lambda: self._replacements.awaits_newcomers,
        )
        self._replacements = Replacements(
            config,
            loop,
            now,
            self._kept,
            self._spawner,
            self._server.channel,
            ask,
            say,
        )
        self._observation.spares = self._replacements.spares.status
        self._peer_news = PeerNews(
            config,
            now,
            self._causes,
            self._signals,
            self._shared_stop,
            self._replacements,
            self._hung,
            self._troubles,
            self._early_losses,
            say,
            self._decide,
            self._end.stop_gathering,
        )

    @contextlib.contextmanager
    def _listening(self) -> Iterator[SignalEvents]:
        try:
            received = self._signal_events().__enter__()
        except OSError:  # no descriptor is left
            self._coordination.close("")
            raise
        try:
            yield received
        finally:
            received.__exit__(None, None, None)
            if self._config.job.kind is TargetKind.FUNCTION:
                received.repeat()

    def _signal_events(self) -> SignalEvents:
        config = self._config
        numbers = {*config.ending_signals, *config.passed_signals}
        if os.isatty(self._console.stderr_fd):
            numbers.add(signal.SIGWINCH)
        if config.job.kind is TargetKind.FUNCTION:
            return SignalEvents(numbers)  # other signals belong to the caller
        # Workers may handle any signal, so none of them may end the supervisor.
        return SignalEvents(numbers | signals.ending(), signals.IGNORED_BY_SHELLS & numbers)

    def _start_server(self) -> ServerProcess:
        config = self._config
        threads = config.local_world_size or config.workers_per_node or self._devices() or 2
        env = {
            **secret.environment_of_workers(self._env, config.secret),
            **worker_env.common_defaults(self._env, threads),
        }
        return start_server(config, env, self._token, self._call, self._say)

    def _devices(self) -> int:
        """How many workers to expect: one for each device, which torch counts later. 0: there may be none."""
        if self._config.accelerator is None:
            return 0  # without one, there is a worker for each CPU
        from .placement import topology

        return topology.num_devices(self._env)

    def _serve(self, received: SignalEvents) -> Outcome:
        server, coordination, loop = self._server, self._coordination, self._loop
        loop.watch(received)
        loop.watch(server.pidfd)
        loop.watch(coordination)
        self._observation.open()
        self._do(policy.start(self._now.state))
        while (outcome := self._end.outcome) is None:
            if not server.channel.closed_by_peer:
                wanted = select.POLLIN | (select.POLLOUT if server.channel.wants_write() else 0)
                loop.watch(server.channel, wanted)
            ready = loop.wait(self._next_deadline())
            for number in received.take():
                self._take_signal(number)
            for worker in [*self._now.workers, *self._replacements.spares]:
                if worker.line.fileno() in ready:
                    self._listen_to(worker)
            if self._probe_fd in ready:
                self._finish_probe()
            server.channel.flush()
            for message, _fds in server.channel.receive():
                self._hear(message)
            if server.pidfd in ready:
                self._requests.note_end(is_ready=self._server_ready)
            if coordination.fileno() in ready:
                self._hear_peers()
            self._observation.serve(ready)
            kill_at = self._now.state.kill_at
            if kill_at is not None and clock.MONOTONIC.now() >= kill_at:
                self._decide(policy.GraceOver())
            loop.call_due()
            self._requests.execute_unconfirmed()
            if self._now.state.phase is Phase.ENDED and self._end.is_due:
                self._end.conclude(self._folder)
        return outcome

    def _listen_to(self, worker: Worker) -> None:
        open_still = worker.listen()
        for told in worker.take_imports():
            self._imports.note(told)
        for record in worker.take_records():
            self._hear_worker(worker, record)
        if worker.steps_fd is not None:
            self._observation.show_progress()
        if not open_still:
            self._loop.forget(worker.line)
            if worker.status is None:
                self._requests.check_line()

    def _next_deadline(self) -> float | None:
        times = (self._now.state.kill_at, self._end.gathers_until, self._server.patience_ends)
        return min((at for at in times if at is not None), default=None)

    def _close(self, received: SignalEvents) -> None:
        self._observation.close()
        self._troubles.close()
        for fd in self._reserve:
            os.close(fd)
        started = hasattr(self, "_server")
        if hasattr(self, "_requests"):
            self._requests.end(is_ready=self._server_ready)
        elif started:
            self._server.end(0.0)
        done = self._now.state.phase is Phase.ENDED and self._now.state.aim is Aim.SUCCEED
        self._coordination.close(self._end.why(), if_last=ENDED_WELL if done else "")
        if started:
            self._server.reap_kept()
        self._close_store_socket()
        if self._probe_fd is not None:
            os.close(self._probe_fd)
        self._let_go()
        # After a signal, do not wait for a console that accepts no output.
        outcome = self._end.outcome
        patient = outcome is not None and outcome.aim is not Aim.SIGNALLED
        if hasattr(self, "_relay"):
            self._relay.close(DRAIN_PATIENCE, received.fileno() if patient else None)
        folder: RunFolder | None = getattr(self, "_folder", None)
        if folder is not None:
            if outcome is None and self._causes.failures:
                folder.keep()  # an internal error: these failures were not reported
            folder.close()

    def _hangs(self, why: str) -> None:
        """No worker moves any longer, and some wait for others."""
        if self._config.on_hang is not OnHang.TELL:
            self._causes.not_of_workers = f"it hangs: {why}"
            self._decide(policy.JobHangs(is_own=True, restarts=self._restarts_on_hang))

    @property
    def _restarts_on_hang(self) -> bool:
        return self._config.on_hang is OnHang.RESTART

    # -- signals ------------------------------------------------------------------------------

    def _take_signal(self, number: int) -> None:
        config = self._config
        if number == signal.SIGQUIT and config.quit_shows_stacks:
            self._observation.show_stacks()
        elif number in {*config.ending_signals, *config.passed_signals}:
            self._signals.taken.add(number)
            events.emit(events.SignalReceived(name=policy.signal_name(number)))
            if number in config.ending_signals:
                self._end.stop_gathering()
            if not self._shared_stop.begin(number, clock.MONOTONIC.now()):
                self._decide(policy.SignalReceived(number))
            self._ends.decide_held()
        elif number == signal.SIGWINCH:
            self._relay.resize()
        else:
            self._signals.note_taken(number)

    # -- events -------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        """Handle a message from the fork server."""
        match message["is"]:
            case "ready":
                self._server_is_ready(message["threads"])
            case "unready":
                raise LaunchError(
                    f"--preload {message['module']}: {message['error']}"
                    " (it must be importable before workers start: check its name and PYTHONPATH)"
                    if message["module"] in self._config.preload
                    else f"cannot import {message['module']}: {message['error']}"
                    f" (in {sys.executable}){self._server.why_imports_fail()}"
                )
            case "spawned" if message["lasts"]:
                self._server.keep(message["pid"])
            case "spawned":
                self._spawned[message["name"]] = message["pid"]
                worker = self._now.workers.named(message["name"])
                spare = self._replacements.spares.named(message["name"])
                if worker is not None:
                    worker.pid = message["pid"]
                    tell_start(self._now.workers.number, worker)
                elif spare is not None:
                    spare.pid = message["pid"]
            case "exited":
                self._spawned.pop(message["name"], None)
                self._process_ended(
                    message["name"], message["status"], message["at"], message.get("cpu")
                )
            case "heard":
                self._requests.note_confirmed(message["ask"])
            case "told" if not message["came"]:
                name = policy.signal_name(message["signal"])
                self._say(
                    f"{name} received, but not passed on to the workers (use --signals-to-pass {name})"
                )
            case "told":
                pass
            case "failed":
                raise LaunchError(
                    f"cannot start {message['name'] or 'a process'}: {message['why']}"
                )
            case "learned":
                _log_learned(message["packages"], message["against"])
            case "swept":
                self._swept(message["left"])
            case other:
                raise LaunchError(f"unknown message from the fork server: {other!r}")

    def _server_is_ready(self, threads: dict[str, int]) -> None:
        self._server_ready = self._observation.is_ready = True
        for module in self._config.preload:
            # Threads started by importing torch (OpenBLAS, if OMP_NUM_THREADS is unset) are prepared for forks.
            if module not in TORCH and threads.get(module, 0) > 0:
                self._say(
                    f"--preload {module} has started {threads[module]} threads;"
                    " threads do not survive a fork, so workers lack them"
                )
        if self._num_workers is None:
            read, write = os.pipe2(os.O_CLOEXEC)
            self._probe_fd = read
            self._loop.watch(read)
            self._server.channel.send({"do": "probe"}, [write])
            os.close(write)
        if self._start_is_due and self._now.state.phase is Phase.RUNNING:
            # Not while the nodes meet again: the socket is for the next round's store.
            self._start_workers()

    def _finish_probe(self) -> None:
        import json

        fd, self._probe_fd = self._probe_fd, None
        assert fd is not None
        self._loop.forget(fd)
        with os.fdopen(fd) as file:
            text = file.read()
        found: dict[str, Any] = json.loads(text) if text else {"count": 0, "type": "cpu"}
        wanted = self._config.accelerator
        if found["count"] and wanted in {None, found["type"]}:
            self._num_workers = found["count"]
        elif wanted is None:
            self._num_workers = len(os.sched_getaffinity(0))
        else:
            raise ConfigError(
                "--nproc-per-node",
                "gpu" if wanted == "cuda" else wanted,
                f"torch finds no {wanted} device on this machine",
                "give a number, or cpu",
            )
        self._join()

    def _process_ended(
        self, name: str, status: int, at: float, cpu: Sequence[Any] | None = None
    ) -> None:
        worker, spare = self._now.workers.named(name), self._replacements.spares.named(name)
        if spare is not None:
            self._replacements.note_spare_ended(spare)
            return
        if worker is None:
            if name == self._store_name and self._now.state.phase in {
                Phase.RUNNING,
                Phase.LISTENING,
            }:
                how = os.waitstatus_to_exitcode(status)
                self._causes.not_of_workers = (
                    f"the process that serves the workers' store ended ({_status_words(how)})"
                )
                self._decide(policy.WorkerEnded(-1, failed=True))
            return
        worker.cpu = None if cpu is None else CpuTime(*cpu)
        worker.listen()
        for record in worker.take_records():
            self._hear_worker(worker, record)
        self._ends.note(worker, status, at)

    def _fail_without_server(self, reason: str, left: list[int]) -> None:
        # Its children have become children of this process.
        process.reap(self._spawned.values(), DRAIN_PATIENCE)
        self._end_generation(left, Aim.FAIL)
        self._causes.note_lost(reason)
        self._causes.broken = reason
        if self._now.round is not None:
            self._troubles.note_broken(host_name(), self._now.round.incident, reason)
        self._decide(policy.Broken(reason))

    def _swept(self, left: list[int]) -> None:
        self._end_generation(left)
        self._decide(policy.Swept())

    def _serve_job_store(self, event: ServeStore) -> None:
        """Ask the fork server for a process that serves the job's store. If that fails, the connection closes."""
        with event.listener as listener, event.line as line:
            message = {"do": "store", "name": "job's store", "port": listener.getsockname()[1]}
            self._server.channel.send(message, [listener.fileno(), line.fileno()])

    def _hear_peers(self) -> None:
        for event in self._coordination.take():
            match event:
                case RoundReady():
                    self._now.round = event
                    self._imports.note_round()
                    bare: frozenset[int] = frozenset() if event.kept is None else event.kept.bare
                    self._decide(
                        policy.RoundFormed(
                            event.workers_of_nodes[event.node_rank],
                            event.generation,
                            event.restarts,
                            event.serves,
                            len(event.workers_of_nodes),
                            None if event.kept is None else event.kept.keepers,
                            event.is_keeper,
                            event.replaced,
                            event.ages,
                            event.kept is not None and bool(event.kept.before),
                            bare,
                            event.node_rank in bare,
                            event.not_kept,
                            event.kept is not None
                            and event.kept.relies_on(event.node_rank, len(event.workers_of_nodes)),
                        )
                    )
                case ServeStore():
                    self._serve_job_store(event)
                case PeerEvent():
                    self._peer_news.hear(event)
                case Advice():
                    self._imports.heed(event)
                    self._next_workers.keep(self._config.workers_per_node or self._devices() or 1)
                case NodeAsked():
                    self._observation.answer_node(event)
                case NotNeeded():
                    self._say(f"{ENDED_WELL}: this node was not needed")
                    self._decide(policy.NotNeeded())
                case CoordinationFailed() if self._now.state.aim is Aim.SIGNALLED:
                    pass  # this node is stopping and no longer needs the others
                case CoordinationFailed(error):
                    raise error
                case _:
                    assert_never(event)

    # -- commands -----------------------------------------------------------------------------

    def _decide(self, event: policy.Event) -> None:
        self._do(policy.decide(clock.MONOTONIC.now(), self._now.state, event))

    def _do(self, decision: policy.Decision) -> None:
        before = self._now.state
        stops = decision.state.phase is Phase.STOPPING is not before.phase
        is_same = (before.phase, before.generation) == (Phase.RUNNING, decision.state.generation)
        begins = decision.state.phase is Phase.RUNNING and not is_same
        self._now.state = decision.state
        if stops:
            self._signals.say_soon_who_is_waited_for()
        if decision.state.phase not in {Phase.RUNNING, Phase.REJOINING} or decision.state.has_left:
            self._replacements.end_spares()
        for command in decision.commands:
            match command:
                case policy.Join():
                    self._join()
                case policy.StartWorkers():
                    self._start_is_due = True
                    if self._server_ready:
                        self._start_workers()
                case policy.HoldWorkers():
                    self._kept.hold(self._now.workers)
                case policy.KeepWorkers(lost):
                    self._keep(lost)
                case policy.Replace(index):
                    self._replacements.replace(index)
                case policy.TellLoss(index, survivors):
                    failure = self._now.workers.failure_of(list(self._now.workers)[index])
                    generation = self._now.state.generation
                    self._coordination.tell_loss(generation, failure, survivors=survivors)
                case policy.SignalWorkers(_) if self._start_is_due:
                    self._start_nothing()
                case policy.SignalWorkers(number):
                    self._signals.note_collectives(self._causes.of_peers)
                    self._now.workers.note_signal(number)
                    self._signals.send(number)
                case policy.PassOn(_) if self._start_is_due:
                    pass  # no worker has started
                case policy.PassOn(number):
                    self._signals.send(number)
                case policy.AskWorkers() if not self._start_is_due:
                    ask = {"do": "query", "names": self._now.workers.running()}
                    self._server.channel.send(ask)
                case policy.AskWorkers():
                    pass  # no worker has started
                case policy.Sweep(grace):
                    self._now.workers.note_signal(signal.SIGKILL)
                    if self._server_ready:
                        self._requests.ask({"do": "sweep", "grace": grace})
                    else:
                        self._swept([])
                case policy.TellPeers(what):
                    failures, reason = self._now.workers.failures(), self._causes.of_this_node
                    if self._now.state.fails_alone:
                        reason = self._causes.why_leaving(failures)
                    self._coordination.tell(what, self._now.state.generation, failures, reason)
                case policy.ReportRestart(not_replaced, alone):
                    state = self._now.state
                    self._say(self._causes.why_all_restart(state, not_replaced, alone=alone))
                case policy.Finish(aim):
                    self._end.begin(aim)
                case _:
                    assert_never(command)
        if begins:
            self._peer_news.begin()

    def _join(self) -> None:
        if self._num_workers is None:
            return  # the probe's result leads back here
        state = self._now.state
        self._close_store_socket()  # of a round that lost a member before it began
        addr, port = "", 0
        if self._coordination.serves_store is not False:
            addr, self._store_socket = store_socket.bind(self._config)
            port = self._store_socket.getsockname()[1]
        facts = NodeFacts(
            num_workers=self._num_workers,
            store_addr=addr,
            store_port=port,
            restarts=state.restarts,
            ages=tuple(clock.MONOTONIC.now() - at for at in state.charged),
            verdict=state.verdict,
            held=self._replacements.held(),
        )
        following = state.generation + (state.phase is Phase.REJOINING)
        self._coordination.join(following, facts)

    def _keep(self, lost: Sequence[int]) -> None:
        """The nodes have met again after the loss of one: the workers of this node continue."""
        why, self._causes.lost = self._causes.lost or "a node is lost", ""
        if self._start_is_due:
            # The fork server was still importing when the last round formed. The workers are started for this one.
            if self._server_ready:
                self._start_workers()
            return
        self._signals.peers_stop = False
        self._causes.of_peers = ()
        ready = self._now.round
        assert ready is not None
        assert ready.kept is not None
        if not ready.kept.port:
            self._serve_workers_store(ready)
        self._close_store_socket()
        self._replacements.keep(lost, why)
        self._hung.begin(ready)

    def _serve_workers_store(self, ready: RoundReady) -> None:
        if ready.node_rank == 0 and self._store_socket is not None:
            self._store_name = f"store {ready.generation}"
            message = {"do": "store", "name": self._store_name, "port": ready.master_port}
            self._server.channel.send(message, [self._store_socket.fileno()])

    def _start_workers(self) -> None:
        ready = self._now.round
        assert ready is not None
        self._start_is_due = False
        self._signals.begin()
        self._causes.begin()
        self._replacements.begin()
        self._serve_workers_store(ready)
        self._close_store_socket()
        takes_over = ready.kept is not None
        self._now.workers = Generation(ready.generation, ready.node_rank)
        if takes_over:
            self._replacements.tell_newcomers()
        world_size = self._config.world_size or sum(ready.workers_of_nodes)
        self._observation.note_begin(ready.generation, world_size)
        events.emit(
            events.GenerationStarted(
                run_id=self._config.rendezvous.run_id,
                generation=ready.generation,
                node_rank=ready.node_rank,
                num_nodes=len(ready.workers_of_nodes),
                world_size=world_size,
                restarts=ready.restarts,
            )
        )
        spawned = self._spawner.spawn(
            ready, self._now.workers, self._server.channel, takes_over=takes_over
        )
        for worker in spawned:
            self._loop.watch(worker.line)
        self._hung.begin(ready)
        if self._config.max_restarts:
            self._next_workers.keep(len([*self._now.workers]))

    def _hear_worker(self, worker: Worker, record: dict[str, Any]) -> None:
        """Handle what a worker in a session says."""
        spares = self._replacements.spares
        if worker in spares:
            if record["kind"] == "kept spare":
                spares.note_ready(worker, str(record["bound"]))
            return
        index = self._now.workers.index(worker)
        match record["kind"]:
            case "kept session":
                worker.in_session, worker.saves = True, record.get("saves") is True
                assert self._now.round is not None
                self._kept.admit(worker, self._now.round)
                if self._now.state.phase is Phase.REJOINING:
                    self._kept.hold(self._now.workers)
                sharded, resizes = (record.get(name) is True for name in ("sharded", "resizes"))
                self._decide(policy.SessionEntered(index, sharded=sharded, resizes=resizes))
                self._replacements.start_spares_soon()
                self._next_workers.keep(len([*self._now.workers]))
            case "kept expected":
                self._decide(policy.SessionExpected())
            case "kept recovered":
                self._kept.note_recovery(record, len(self._now.state.running))
                self._decide(policy.SessionMet())
            case "kept holds":
                worker.record_copies = int(record["copies"])
            case "kept fixed":
                self._decide(policy.SessionFixed())
            case "kept left":
                worker.in_session = False
                self._decide(policy.SessionLeft(index))
            case "kept failed":
                worker.failed_at = int(record["step"])
            case "kept refused":
                worker.is_refused, worker.record_lost = True, record.get("record_lost") is True
            case _:
                pass  # the script has written to the descriptor

    def _close_store_socket(self) -> None:
        held, self._store_socket = self._store_socket, None
        if held is not None:
            held.close()

    def _start_nothing(self) -> None:
        """The job is stopped while the fork server is still importing: count the workers as ended."""
        self._start_is_due = False
        if not self._now.state.is_joining:
            self._close_store_socket()  # otherwise it is the next round's
        for index in sorted(self._now.state.running):
            self._decide(policy.WorkerEnded(index, failed=False))

    # -- ends ---------------------------------------------------------------------------------

    def _end_generation(self, left: list[int], aim: Aim | None = None) -> None:
        """All processes are gone: collect the failures and results of this generation."""
        self._ends.forget()
        self._requests.tell_what_is_left(left)
        self._now.workers.drain(DRAIN_PATIENCE)
        failures = self._causes.failures = in_order_of_blame(self._now.workers.failures())
        self._causes.left_early = self._now.workers.left_early()
        self._end.results = self._now.workers.results()
        cause = in_a_line(failures[0]) if failures else ""
        self._observation.note_end(
            [each.rank for each in failures if not each.stopped_by_us], cause
        )
        events.emit(
            events.GenerationEnded(
                generation=self._now.state.generation,
                aim=(aim or self._now.state.aim).value,
                failed_ranks=tuple(each.rank for each in failures),
            )
        )
        folders = self._now.workers.folders()
        self._let_go()
        if failures:
            write_error_files(folders, failures)

    def _let_go(self) -> None:
        if hasattr(self, "_replacements"):
            self._replacements.forget_spares()
        for worker in self._now.workers:
            self._loop.forget(worker.line)
            worker.close()
        self._now.workers = Generation(self._now.state.generation, 0)


def _log_learned(packages: list[str], against: dict[str, str]) -> None:
    if packages:
        _log.info("preloaded for restarted workers: %s", ", ".join(packages))
    for package, why in against.items():
        _log.info("not preloaded for restarted workers: %s: %s", package, why)


def _status_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

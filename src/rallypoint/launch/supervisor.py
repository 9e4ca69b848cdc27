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
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from rallypoint import events
from rallypoint._core import (
    clock,
    env as environment,
    event_sinks,
    limits,
    process,
    progress,
    secret,
)
from rallypoint._core.rank_words import in_words
from rallypoint.control.collectives import collective_probe
from rallypoint.control.server import Answer, ControlServer
from rallypoint.errors import ConfigError, ControlError, LaunchError, RallyError
from rallypoint.rendezvous.home import ENDED_WELL
from rallypoint.rendezvous.kept_round import Held

from . import policy, signals, status, store_socket
from .config import LaunchConfig, OnHang, StartMethod, TargetKind
from .coordination import (
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
from .hang_watch import HangWatch
from .job_history import JobHistory
from .job_questions import JobQuestions
from .kept_workers import KeptWorkers
from .metrics import FILE_INTERVAL, Metrics
from .output import progress_display
from .output.console import Console
from .output.failure import WorkerFailure, in_order_of_blame
from .output.relay import Relay
from .output.report import FailureReport, in_a_line
from .output.reportfiles import write_error_files, write_report
from .output.run_folder import RunFolder
from .placement import worker_env
from .policy import Aim, Phase
from .server.channel import Message
from .server.server_process import ServerProcess
from .signals import SignalEvents
from .spares import Spares
from .spawner import Spawner
from .step_watch import Standstill, StepWatch, Tables
from .worker.job import WorkerFds


# Modules that every fork server imports.
TORCH = ("torch", "torch.distributed")
# How long the fork server may take to end all processes.
SERVER_PATIENCE = 8.0
# A batch system signals the processes of a job one by one. For this long the same signal may still be on its way to the
# fork server. If it arrives there, the workers have got it too, and the supervisor does not send it again.
SAME_SIGNAL = 0.25
# For this long a worker may die of a signal before the supervisor receives it: the sender may have to wait for a CPU.
DEATH_AHEAD = 1.0
# The same, if the signal is sent on several hosts.
SAME_SIGNAL_ELSEWHERE = 1.0
# Reports of nodes that are no events for others.
UNTOLD = frozenset(
    {"all_done", "reports", "in session", "out of session", "standstill", "left out"}
)
# After this long, the supervisor prints what it waits for.
SILENCE = 2.0
# Spares start so long after all workers are in their session: these have the CPUs first.
SPARE_DELAY = 1.0
# How often the workers of a session are looked at in the time after which one hangs.
LOOKS = 4
# The share of the grace period after SIGTERM in which workers of a session may take a last checkpoint before they are signalled.
SAVING = 0.8
# How long a worker that hangs may take to report where.
HANG_GRACE = 1.0
# How long the workers' stacks may take after SIGQUIT.
STACKS_PATIENCE = 10.0
# How long workers that are about to be stopped may take to tell their collectives. Only one that stands still, or has no CPU,
# takes more than milliseconds.
COLLECTIVES_PATIENCE = 1.0
# How long output may still arrive after its writers have ended.
DRAIN_PATIENCE = 2.0
# How long the nodes wait for each other's failures before they print the report, beyond the grace period.
GATHER_PATIENCE = 5.0

_log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the job ended on this node.

    Args:
        aim: success, failure or a signal.
        report: of the last generation, if it failed.
        signal: the signal that ended it, or None.
        results: function launches: the result bytes of each local worker, in rank order.
        generation: the last one.
    """

    aim: Aim
    report: FailureReport | None
    signal: int | None
    results: tuple[bytes, ...]
    generation: int


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
        self._workers = Generation(0, 0)
        self._spawned: dict[str, int] = {}  # pids that the fork server has not reaped
        self._state = policy.State(
            max_restarts=config.max_restarts,
            grace=config.shutdown_timeout,
            moment=config.cause_timeout,
            num_nodes=config.num_nodes,
            elastic=config.elastic,
            passed=frozenset(config.passed_signals),
            max_losses=config.max_losses,
            loss_window=config.loss_window,
        )
        self._num_workers = config.workers_per_node
        self._round: RoundReady | None = None
        self._store_socket: socket.socket | None = None
        self._server_ready = False
        self._start_is_due = False
        self._probe_fd: int | None = None
        self._why_failed = ""  # if no worker is to blame
        self._failures: tuple[WorkerFailure, ...] = ()
        self._lost = ""  # which node or fork server is gone, in words
        self._broken = ""  # why this node cannot continue
        self._peer_failures: tuple[WorkerFailure, ...] = ()
        self._collectives_noted = False  # in this generation
        self._results: tuple[bytes, ...] = ()
        self._gather_until: float | None = None
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._server_is_deaf = False  # it does not confirm requests
        self._left: set[int] = set()  # pids that survived SIGKILL and were reported
        self._signals_taken: set[int] = set()
        self._peers_stop = False  # other nodes were signalled, so this one may be, too
        self._held_ends: list[policy.WorkerEnded] = []
        self._store_name = ""
        self._kept = KeptWorkers(say)
        self._spares = Spares(config, say)
        self._spares_are_due = False
        self._lost_worker: WorkerFailure | None = None  # of the loss that all nodes read of
        self._finished: Outcome | None = None
        self._server: ServerProcess
        self._spawner: Spawner
        self._open_files: int | None = None  # the limit for a worker
        self._reserve: list[int] = []  # descriptors kept for cleaning up
        self._control: ControlServer | None = None
        self._history = JobHistory()
        self._metrics: Metrics | None = None
        self._began = clock.MONOTONIC.now()
        self._hang_watch = HangWatch(config.hang_after, say) if config.hang_after else None
        self._questions = JobQuestions(coordination, self._still)
        self._display: progress_display.Display | None = None
        self._poller = select.poll()

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
                    self._spawner = Spawner(
                        config,
                        self._env,
                        self._folder,
                        self._relay,
                        self._console,
                        self._payload_fd,
                    )
                    return self._loop(received)
                finally:
                    self._close(received)
        except (OSError, RuntimeError) as error:
            self._tell_end(Aim.FAIL, str(error))
            reached = limits.explain(error)
            if reached is None or isinstance(error, RallyError):
                raise
            raise LaunchError(reached) from None

    @contextlib.contextmanager
    def _listening(self) -> Iterator[SignalEvents]:
        with contextlib.ExitStack() as stack:
            try:
                received = stack.enter_context(self._signal_events())
            except OSError:  # no descriptor is left
                self._coordination.close("")
                raise
            yield received

    def _signal_events(self) -> SignalEvents:
        config = self._config
        numbers = {*config.signals, *config.passed_signals}
        if os.isatty(self._console.stderr_fd):
            numbers.add(signal.SIGWINCH)
        if config.job.kind is TargetKind.FUNCTION:
            return SignalEvents(numbers)  # other signals belong to the caller
        # Workers may handle any signal, so none of them may end the supervisor.
        return SignalEvents(numbers | signals.ending(), signals.IGNORED_BY_SHELLS & numbers)

    def _start_server(self) -> ServerProcess:
        config = self._config
        if config.start_method is StartMethod.FORK:
            assert self._call is not None
            with environment.overlay({"RALLY_JOB": self._token}):
                return ServerProcess.fork(config.job, self._call, self._token, config.secret)
        if config.job.kind is not TargetKind.FUNCTION:
            self._open_files = limits.allow_open_files()
        threads = config.local_world_size or config.workers_per_node or 2
        defaults = worker_env.common_defaults(self._env, threads)
        preload = (*TORCH, *config.preload)
        server = ServerProcess.start(
            config.job,
            config.start_method,
            preload,
            {**secret.environment_of_workers(self._env, config.secret), **defaults},
            self._token,
            config.secret,
            # A function launch runs in the user's program, which may have children of its own.
            alone=config.job.kind is not TargetKind.FUNCTION,
            open_files=self._open_files,
            learns=config.learned_preload,
            warm=config.warm,
        )
        if server.why_cold:
            self._say(f"--warm has no effect: {server.why_cold}")
        return server

    def _loop(self, received: SignalEvents) -> Outcome:
        server, coordination = self._server, self._coordination
        self._poller.register(received.fileno(), select.POLLIN)
        self._poller.register(server.pidfd, select.POLLIN)
        self._poller.register(coordination.fileno(), select.POLLIN)
        self._control = self._open_control()
        self._open_metrics()
        if self._hang_watch is not None:
            self._look_for_hang()
        self._do(policy.start(self._state))
        while self._finished is None:
            if not server.channel.closed_by_peer:
                wanted = select.POLLIN | (select.POLLOUT if server.channel.wants_write() else 0)
                self._poller.register(server.channel.fileno(), wanted)
            ready = {fd for fd, _ in self._poller.poll(self._milliseconds_to_wait())}
            for number in received.take():
                self._take_signal(number)
            for worker in [*self._workers, *self._spares]:
                if worker.line.fileno() not in ready:
                    continue
                open_still = worker.listen()
                for told in worker.take_imports():
                    server.channel.send({"do": "learn", **told})
                for record in worker.take_records():
                    self._hear_worker(worker, record)
                if worker.steps_fd is not None and self._display is None:
                    self._show_progress()
                if not open_still:
                    self._poller.unregister(worker.line)
                    if worker.status is None and not self._server_is_deaf:
                        # It seems to have ended. Check that the fork server can report that.
                        server.ask({"do": "ping"})
            if self._probe_fd in ready:
                self._finish_probe()
            server.channel.flush()
            for message, _fds in server.channel.receive():
                self._hear(message)
            if server.pidfd in ready:
                self._server_lost()
            if coordination.fileno() in ready:
                self._hear_peers()
            if self._control is not None and self._control.fileno() in ready:
                self._control.serve()
            metrics = None if self._metrics is None else self._metrics.server
            if metrics is not None and metrics.fileno() in ready:
                metrics.serve()
            kill_at = self._state.kill_at
            if kill_at is not None and clock.MONOTONIC.now() >= kill_at:
                self._decide(policy.GraceOver())
            self._do_what_is_due()
            if self._state.phase is Phase.ENDED and self._gathering_is_over():
                self._conclude()
        return self._finished

    def _do_what_is_due(self) -> None:
        now = clock.MONOTONIC.now()
        due = [what for at, what in self._later if at <= now]
        self._later = [each for each in self._later if each[0] > now]
        for what in due:
            what()
        for message in self._server.unheard():
            self._do_without_server(message)

    def _in(self, seconds: float, what: Callable[[], None]) -> None:
        """Call ``what`` in the loop after this time."""
        self._later.append((clock.MONOTONIC.now() + seconds, what))

    def _milliseconds_to_wait(self) -> int | None:
        times = [at for at in (self._state.kill_at, self._gather_until) if at is not None]
        times += [at for at, _ in self._later]
        if self._server.patience_ends is not None:
            times.append(self._server.patience_ends)
        if not times:
            return None
        return max(0, int((min(times) - clock.MONOTONIC.now()) * 1000) + 1)

    def _gathering_is_over(self) -> bool:
        return self._gather_until is None or clock.MONOTONIC.now() >= self._gather_until

    def _close(self, received: SignalEvents) -> None:
        if self._display is not None:
            self._display.close()
        for fd in self._reserve:
            os.close(fd)
        if self._control is not None:
            self._control.close()
        if self._metrics is not None:
            self._metrics.close()
        if hasattr(self, "_server"):
            # A fork server that still imports has nothing to end, and a deaf one does nothing. Neither is waited for.
            answers = self._server_ready and not self._server_is_deaf
            self._tell_what_is_left(self._server.end(SERVER_PATIENCE if answers else 0.0))
        done = self._state.phase is Phase.ENDED and self._state.aim is Aim.SUCCEED
        self._coordination.close(self._why_it_ends(), if_last=ENDED_WELL if done else "")
        if hasattr(self, "_server"):
            self._server.reap_kept()
        self._close_store_socket()
        if self._probe_fd is not None:
            os.close(self._probe_fd)
        self._let_go()
        # After a signal, do not wait for a console that accepts no output.
        patient = self._finished is not None and self._finished.aim is not Aim.SIGNALLED
        if hasattr(self, "_relay"):
            self._relay.close(DRAIN_PATIENCE, received.fileno() if patient else None)
        folder: RunFolder | None = getattr(self, "_folder", None)
        if folder is not None:
            if self._finished is None and self._failures:
                folder.keep()  # an internal error: these failures were not reported
            folder.close()

    def _why_it_ends(self) -> str:
        """What to tell nodes that wait for another round. Empty if there may be one without this node."""
        state = self._state
        if state.phase is not Phase.ENDED:
            return ""
        match state.aim:
            case Aim.SUCCEED:
                alone = state.elastic and not state.peers_done
                return "" if alone else ENDED_WELL
            case Aim.FAIL:
                return "" if self._fails_alone else "the job has failed"
            case Aim.SIGNALLED if not (state.elastic and state.signal == signal.SIGTERM):
                return "the job was told to stop"
            case _:
                return ""

    # -- those who ask ------------------------------------------------------------------------

    def _open_control(self) -> ControlServer | None:
        try:
            control = ControlServer(self._config.rendezvous.run_id, self._answer)
        except OSError as error:
            _log.info("no control socket, so rally ps does not show this job: %s", error)
            return None
        self._poller.register(control.fileno(), select.POLLIN)
        return control

    def _open_metrics(self) -> None:
        place = self._config.metrics
        if place is None:
            return
        self._metrics = Metrics(place, self._status, lambda: self._workers)
        server = self._metrics.server
        if server is None:
            self._in(FILE_INTERVAL, self._write_metrics)
            return
        self._poller.register(server.fileno(), select.POLLIN)
        if not place.port:
            self._say(f"metrics are on port {server.port}")

    def _write_metrics(self) -> None:
        """Now, and again in a while."""
        assert self._metrics is not None
        self._metrics.write()
        self._in(FILE_INTERVAL, self._write_metrics)

    def _status(self) -> dict[str, Any]:
        facts = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "seconds": round(clock.MONOTONIC.now() - self._began, 3),
            "log_folder": str(self._folder.path or ""),
            "is_ready": self._server_ready,
            "generations": self._history.told(),
            "spares": self._spares.status(),
        }
        return status.status(self._config, self._state, self._round, self._workers, facts=facts)

    def _answer(self, question: dict[str, Any]) -> Answer | Callable[[], Answer]:
        match question.get("ask"):
            case "status":
                return self._status()
            case "stacks" | "usage":
                return self._questions.everywhere(question, self._workers, self._round)
            case "logs":
                return self._questions.logs(question, self._round)
            case other:
                known = "status, stacks, usage, logs"
                raise ControlError(f"cannot be asked for {other!r} (known: {known})")

    def _seconds(self) -> float:
        """Since the job began."""
        return round(clock.MONOTONIC.now() - self._began, 3)

    def _still(self) -> dict[int, float]:
        return {} if self._hang_watch is None else self._hang_watch.still()

    def _look_for_hang(self) -> None:
        """See whether any worker moves; and again in a while."""
        watch = self._hang_watch
        assert watch is not None
        self._in(watch.interval, self._look_for_hang)
        if self._state.phase is Phase.RUNNING and self._round is not None:
            workers, ready = self._workers, self._round
            watch.look(
                workers, ready, lambda what: self._questions.everywhere(what, workers, ready)
            )
            why = watch.hanging(ready.generation)
            if why and self._config.on_hang is not OnHang.TELL:
                self._why_failed = f"it hangs: {why}"
                self._decide(policy.JobHangs(is_own=True, restarts=self._restarts_on_hang))

    @property
    def _restarts_on_hang(self) -> bool:
        return self._config.on_hang is OnHang.RESTART

    def _show_progress(self) -> None:
        """Show how far the workers are; and again in a while."""
        wanted = self._config.progress
        if wanted == "off":
            return
        if self._display is None:
            term = self._env.get("TERM", "")
            self._display = progress_display.choose(wanted, self._console, self._say, term)
        display = self._display
        self._in(display.interval, self._show_progress)
        if self._round is not None and self._round.node_rank == 0:
            found = next(filter(None, (each.progress() for each in self._workers)), None)
            if found is not None:
                display.show(found)

    def _show_stacks(self) -> None:
        """SIGQUIT, as Ctrl-\\ sends it: print where the workers are, and go on."""
        question = {"ask": "stacks", "patience": STACKS_PATIENCE}
        look = self._questions.everywhere(question, self._workers, self._round)

        def show() -> None:
            from rallypoint.control.stacks import stack_groups

            try:
                text = stack_groups.text(look()["processes"]) or "no worker runs now"
            except (RallyError, OSError, ValueError) as error:
                text = f"no stacks: {error}"
            self._say(f"SIGQUIT received: the stacks of the workers\n{text}")

        threading.Thread(target=show, name="rally-stacks", daemon=True).start()

    # -- signals ------------------------------------------------------------------------------

    def _take_signal(self, number: int) -> None:
        config = self._config
        if number == signal.SIGQUIT and config.quit_shows_stacks:
            self._show_stacks()
        elif number in {*config.signals, *config.passed_signals}:
            self._signals_taken.add(number)
            events.emit(events.SignalReceived(name=policy.signal_name(number)))
            if number in config.signals:
                self._gather_until = None  # do not wait for other nodes' reports
            self._decide(policy.SignalReceived(number))
            self._decide_held_ends()
        elif number == signal.SIGWINCH:
            self._relay.resize()
        elif number not in self._signals_taken:
            self._signals_taken.add(number)
            # If the signal went to all processes of the job, the workers have it, too. The fork server will know shortly.
            self._in(SAME_SIGNAL, lambda: self._ask({"do": "tell", "signal": number}))

    def _say_who_is_waited_for(self) -> None:
        state = self._state
        ranks = [each.ranks.rank for each in self._workers if each.status is None]
        if state.phase is not Phase.STOPPING or state.kill_at is None or not ranks:
            return
        number = state.signal if state.aim is Aim.SIGNALLED and state.signal else signal.SIGTERM
        seconds = max(0.0, state.kill_at - clock.MONOTONIC.now())
        again = "Ctrl-C twice"
        if state.signal is not None:
            again = "Ctrl-C again" if state.signal == signal.SIGINT else "a second signal"
        self._say(
            f"waiting for {in_words(ranks)} ({policy.signal_name(number)}), up to {seconds:.0f} s;"
            f" {again} kills {'them' if len(ranks) > 1 else 'it'}"
        )

    def _decide_held_ends(self) -> None:
        ends, self._held_ends = self._held_ends, []
        for event in ends:
            self._decide(event)

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
                    f" (in {sys.executable})"
                )
            case "spawned" if message["lasts"]:
                self._server.keep(message["pid"])
            case "spawned":
                self._spawned[message["name"]] = message["pid"]
                worker = self._workers.named(message["name"])
                spare = self._spares.named(message["name"])
                if worker is not None:
                    worker.pid = message["pid"]
                    self._tell_start(worker)
                elif spare is not None:
                    spare.pid = message["pid"]
            case "exited":
                self._spawned.pop(message["name"], None)
                self._process_ended(message["name"], message["status"], message["at"])
            case "heard":
                self._server.confirmed(message["ask"])
                self._server_is_deaf = False
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
                self._end_generation(message["left"])
                self._decide(policy.Swept())
            case other:
                raise LaunchError(f"unknown message from the fork server: {other!r}")

    def _tell_start(self, worker: Worker) -> None:
        events.emit(
            events.WorkerStarted(
                generation=self._workers.number,
                rank=worker.ranks.rank,
                local_rank=worker.ranks.local_rank,
                worker_pid=worker.pid,
            )
        )

    def _server_is_ready(self, threads: dict[str, int]) -> None:
        self._server_ready = True
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
            self._poller.register(read, select.POLLIN)
            self._server.channel.send({"do": "probe"}, [write])
            os.close(write)
        if self._start_is_due:
            self._start_workers()

    def _finish_probe(self) -> None:
        import json

        fd, self._probe_fd = self._probe_fd, None
        assert fd is not None
        self._poller.unregister(fd)
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

    def _process_ended(self, name: str, status: int, at: float) -> None:
        worker, spare = self._workers.named(name), self._spares.named(name)
        if spare is not None:
            self._unregister(spare)
            self._spares.note_end(spare)
            self._start_spares_soon()
            return
        if worker is None:
            if name == self._store_name and self._state.phase in {Phase.RUNNING, Phase.LISTENING}:
                how = os.waitstatus_to_exitcode(status)
                self._why_failed = (
                    f"the process that serves the workers' store ended ({_status_words(how)})"
                )
                self._decide(policy.WorkerEnded(-1, failed=True))
            return
        worker.listen()
        for record in worker.take_records():
            self._hear_worker(worker, record)
        worker.status, worker.ended_at = status, at
        symptom = status != 0 and self._workers.is_echo(worker)
        if events.is_wanted():
            events.emit(self._workers.end_of(worker))
        index = self._workers.index(worker)
        again = status != 0 and self._kept.has_seen(
            self._workers.failure_of(worker), worker.failed_at
        )
        end = policy.WorkerEnded(index, failed=status != 0, symptom=symptom, again=again)
        if self._may_be_ahead(status):
            self._held_ends.append(end)
            self._in(DEATH_AHEAD, self._decide_held_ends)
        else:
            self._decide(end)

    def _may_be_ahead(self, status: int) -> bool:
        """Whether a worker ended because of a signal that may still arrive here and end the whole job.

        A worker may also have handled it, saved a checkpoint, and exited with 128 + signal.
        """
        code = os.waitstatus_to_exitcode(status)
        number = -code if code < 0 else code - 128
        return (
            self._state.phase in {Phase.RUNNING, Phase.LISTENING}
            and number in self._config.signals
            and number not in self._signals_taken
        )

    def _server_lost(self) -> None:
        if not self._server.wait(0) or self._finished is not None:
            return
        reason = f"its fork server (pid {self._server.pid}) {self._server.how_it_ended()}"
        self._let_server_go()
        self._fail_without_server(reason, self._server.kill_orphans())

    def _let_server_go(self) -> None:
        for fd in (self._server.pidfd, self._server.channel.fileno()):
            try:
                self._poller.unregister(fd)
            except KeyError:
                pass  # it has been already
        self._server.channel.closed_by_peer = True

    def _fail_without_server(self, reason: str, left: list[int]) -> None:
        # Its children have become children of this process.
        process.reap(self._spawned.values(), DRAIN_PATIENCE)
        self._end_generation(left, Aim.FAIL)
        self._lost, self._broken = self._lost or reason, reason
        self._decide(policy.Broken(reason))

    # -- a fork server that does not answer ----------------------------------------------------

    def _ask(self, message: Message) -> None:
        """Send the fork server a request, or execute it here if the fork server is deaf."""
        if self._server_is_deaf:
            self._do_without_server(message)
        else:
            self._server.ask(message)

    def _do_without_server(self, message: Message) -> None:
        """Execute a request that the fork server does not confirm: it is stopped, or hangs in the kernel."""
        server, state = self._server, self._state
        what = f"fork server (pid {server.pid}) does not answer ({server.why_silent()})"
        match message["do"]:
            case "signal":
                self._server_is_deaf = True
                pids = [each.pid for each in self._workers if each.name in message["names"]]
                server.signal_children(pids, message["signal"], group=message["group"])
            case "sweep" if state.phase is Phase.SWEEPING:
                self._server_is_deaf = True
                self._say(f"the {what}; ending its processes directly")
                self._let_server_go()
                left = server.kill()
                if state.aim is Aim.RESTART:
                    self._fail_without_server(f"its {what}", left)
                else:
                    self._end_generation(left)
                    self._decide(policy.Swept())
            case "ping" if state.phase in {Phase.RUNNING, Phase.LISTENING}:
                ended = [each for each in self._workers if each.pid and each.status is None]
                if any(not process.is_running(each.pid) for each in ended):
                    self._server_is_deaf = True
                    self._let_server_go()
                    self._fail_without_server(f"its {what}", server.kill())
            case _:
                pass  # no longer needed

    def _tell_what_is_left(self, left: list[int]) -> None:
        news = sorted(set(left) - self._left)
        self._left.update(news)
        if news:
            self._say(
                f"processes {news} survived SIGKILL (stuck in the kernel, or frozen?) and are left running"
            )

    def _serve_job_store(self, event: ServeStore) -> None:
        """Ask the fork server for a process that serves the store. If that fails, the connection ends."""
        with event.listener as listener, event.line as line:
            message = {"do": "store", "name": "job's store", "port": listener.getsockname()[1]}
            self._server.channel.send(message, [listener.fileno(), line.fileno()])

    def _hear_peers(self) -> None:
        for event in self._coordination.take():
            if isinstance(event, PeerEvent) and event.what not in UNTOLD:
                events.emit(
                    events.NodeReported(
                        generation=event.generation,
                        node_rank=event.node_rank,
                        what=event.what,
                        reason=event.reason,
                    )
                )
            match event:
                case RoundReady():
                    self._round = event
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
                        )
                    )
                case ServeStore():
                    self._serve_job_store(event)
                case PeerEvent("all_done"):
                    self._decide(policy.PeersDone())
                case PeerEvent("stopped", node_rank):
                    self._peers_stop = True
                    who = f"node {node_rank}" if node_rank >= 0 else "another node"
                    self._say(f"{who} was told to stop; stopping this node too")
                    self._decide(policy.PeersStopped(node_rank))
                case PeerEvent("reports"):
                    self._gather_until = None
                case PeerEvent(_, _, generation) if generation < self._state.generation - 1:
                    pass  # about an earlier generation
                case PeerEvent("lost", node_rank):
                    self._lost = self._lost or f"{event.reason}{self._lost_state()}"
                    self._decide(policy.PeerLost(node_rank, event.is_own))
                case PeerEvent("hangs", _, generation) if generation == self._state.generation:
                    self._why_failed = event.reason
                    self._decide(policy.JobHangs(is_own=False, restarts=self._restarts_on_hang))
                case PeerEvent("left out"):
                    self._decide(policy.LeftOut())
                case PeerEvent("not kept", node_rank):
                    self._lost = self._lost or f"node {node_rank} could not keep its workers"
                    self._decide(policy.NotKept(node_rank))
                case PeerEvent("leaving", node_rank):
                    self._peers_stop = not event.reason
                    why = f"failed: {event.reason}" if event.reason else "was told to leave"
                    self._lost = self._lost or f"node {node_rank} {why}{self._lost_state()}"
                    self._decide(policy.PeerLeaves(node_rank))
                case PeerEvent("in session" | "out of session" as what, node_rank):
                    self._decide(policy.NodeInSession(node_rank, what == "in session"))
                    self._start_spares_soon()
                case PeerEvent("worker lost", node_rank, generation, (failure, *_)):
                    if generation == self._state.generation:
                        self._hear_of_loss(node_rank, failure, survivors=event.survivors)
                case PeerEvent("standstill", node_rank, generation):
                    if generation == self._state.generation:
                        self._hear_of_standstill(node_rank, event.meeting, event.progress)
                case PeerEvent("waiting"):
                    self._lost = self._lost or "a node wants to join"
                    self._decide(policy.NodeWaiting())
                case PeerEvent(_, node_rank, generation, failures):
                    echo = bool(failures) and all(
                        each.is_symptom() or each.stopped_by_us for each in failures
                    )
                    if not (echo and self._peer_failures):
                        self._peer_failures = failures
                    if event.reason:
                        self._lost = self._lost or f"node {node_rank} failed: {event.reason}"
                    self._decide(policy.PeerFailed(node_rank, generation, echo))
                case NodeAsked():
                    self._questions.answer(event, self._workers, self._round, self._folder.path)
                case NotNeeded():
                    self._say(f"{ENDED_WELL}: this node was not needed")
                    self._decide(policy.NotNeeded())
                case CoordinationFailed(error):
                    raise error
                case _:
                    assert_never(event)

    # -- commands -----------------------------------------------------------------------------

    def _decide(self, event: policy.Event) -> None:
        self._do(policy.decide(clock.MONOTONIC.now(), self._state, event))

    def _do(self, decision: policy.Decision) -> None:
        stops = decision.state.phase is Phase.STOPPING is not self._state.phase
        self._state = decision.state
        if stops:
            self._in(SILENCE, self._say_who_is_waited_for)
        if decision.state.phase not in {Phase.RUNNING, Phase.REJOINING} or decision.state.has_left:
            self._end_spares()
        for command in decision.commands:
            match command:
                case policy.Join():
                    self._join()
                case policy.StartWorkers():
                    self._start_is_due = True
                    if self._server_ready:
                        self._start_workers()
                case policy.HoldWorkers():
                    self._kept.hold(self._workers)
                case policy.KeepWorkers(lost):
                    self._keep_workers(lost)
                case policy.Replace(index):
                    self._replace(index)
                case policy.TellLoss(index, survivors):
                    failure = self._workers.failure_of(list(self._workers)[index])
                    generation = self._state.generation
                    self._coordination.tell_loss(generation, failure, survivors=survivors)
                case policy.SignalWorkers(_) if self._start_is_due:
                    self._start_nothing()
                case policy.SignalWorkers(number):
                    self._note_collectives()
                    self._workers.note_signal(number)
                    self._signal_workers(number)
                case policy.PassOn(_) if self._start_is_due:
                    pass  # no worker has started
                case policy.PassOn(number):
                    self._signal_workers(number)
                case policy.AskWorkers() if not self._start_is_due:
                    ask = {"do": "query", "names": self._workers.running()}
                    self._server.channel.send(ask)
                case policy.AskWorkers():
                    pass  # no worker has started
                case policy.Sweep(grace):
                    self._workers.note_signal(signal.SIGKILL)
                    if self._server_ready:
                        self._ask({"do": "sweep", "grace": grace})
                    else:
                        self._end_generation([])
                        self._decide(policy.Swept())
                case policy.TellPeers(what):
                    failures, reason = self._workers.failures(), self._why_failed or self._broken
                    self._coordination.tell(what, self._state.generation, failures, reason)
                case policy.ReportRestart():
                    self._report_restart()
                case policy.Finish(aim):
                    self._finish(aim)
                case _:
                    assert_never(command)

    def _join(self) -> None:
        if self._num_workers is None:
            return  # the probe's result leads back here
        state = self._state
        self._close_store_socket()  # of a round that has lost a member before it began
        addr, port = "", 0
        if self._coordination.serves_store is not False:
            addr, self._store_socket = store_socket.bind(self._config)
            port = self._store_socket.getsockname()[1]
        facts = NodeFacts(
            num_workers=self._num_workers,
            store_addr=addr,
            store_port=port,
            restarts=state.restarts,
            verdict=state.verdict,
            held=self._held_workers(),
        )
        following = state.generation + (state.phase is Phase.REJOINING)
        self._coordination.join(following, facts)

    def _lost_state(self) -> str:
        """What is lost with a node, for the line that says why all restart."""
        if self._state.elastic and self._state.is_sharded:
            return ", and with it the only snapshots of its sharded state"
        return ""

    def _held_workers(self) -> Held | None:
        """The workers of a session that survive the loss of a node."""
        state, ready = self._state, self._round
        if state.phase is not Phase.REJOINING or ready is None:
            return None
        return Held(
            generation=ready.generation,
            workers=ready.workers_of_nodes,
            replaced=state.replaced,
            has_state=bool(state.kept & state.running),
            port=ready.master_port,
        )

    def _keep_workers(self, lost: Sequence[int]) -> None:
        """The nodes have met again after the loss of one: the workers of this node continue."""
        ready = self._round
        assert ready is not None
        why, self._lost = self._lost or "a node is lost", ""
        self._peers_stop = False
        self._peer_failures = ()
        self._close_store_socket()
        self._workers.continue_as(ready.generation)
        ended = [list(self._workers)[index] for index in lost]
        failures = [self._workers.failure_of(each) for each in ended]
        ranks = [*_ranks_of_newcomers(ready), *(each.ranks.rank for each in ended)]
        self._kept.tell_of_lost_nodes(self._workers, ready, sorted(ranks), why)
        write_error_files(self._folder.path, tuple(failures))
        for index in lost:
            self._start_in_place_of(index)
        self._watch_steps(ready)

    def _start_workers(self) -> None:
        ready = self._round
        assert ready is not None
        self._start_is_due = self._peers_stop = False
        self._collectives_noted = False
        self._why_failed = self._lost = self._broken = ""
        self._peer_failures = ()
        if ready.node_rank == 0 and self._store_socket is not None:
            self._store_name = f"store {ready.generation}"
            message = {"do": "store", "name": self._store_name, "port": ready.master_port}
            self._server.channel.send(message, [self._store_socket.fileno()])
        self._close_store_socket()
        takes_over = ready.kept is not None
        self._workers = Generation(ready.generation, ready.node_rank)
        if takes_over:
            ranks = _ranks_of_newcomers(ready)
            self._kept.tell_of_lost_nodes(self._workers, ready, ranks, "a node is lost")
        self._history.begin(
            ready.generation,
            self._seconds(),
            self._config.world_size or sum(ready.workers_of_nodes),
        )
        events.emit(
            events.GenerationStarted(
                run_id=self._config.rendezvous.run_id,
                generation=ready.generation,
                node_rank=ready.node_rank,
                num_nodes=len(ready.workers_of_nodes),
                world_size=self._config.world_size or sum(ready.workers_of_nodes),
                restarts=ready.restarts,
            )
        )
        spawned = self._spawner.spawn(
            ready, self._workers, self._server.channel, takes_over=takes_over
        )
        for worker in spawned:
            self._poller.register(worker.line, select.POLLIN)
        self._watch_steps(ready)

    def _watch_steps(self, ready: RoundReady) -> None:
        if self._config.step_timeout:
            self._step_watch = StepWatch(self._config.step_timeout)
            # A node may look a while after another one, and the journal takes its time.
            patience = self._config.step_timeout + 5.0
            self._standstill = Standstill(len(ready.workers_of_nodes), patience)
            self._look_at_steps(ready.generation)

    def _hear_worker(self, worker: Worker, record: dict[str, Any]) -> None:
        """Handle what a worker in a session says."""
        if worker in self._spares:
            if record["kind"] == "kept spare":
                self._spares.note_ready(worker, str(record["bound"]))
            return
        index = self._workers.index(worker)
        match record["kind"]:
            case "kept session":
                worker.in_session, worker.saves = True, record.get("saves") is True
                assert self._round is not None
                self._kept.admit(worker, self._round)
                if self._state.phase is Phase.REJOINING:
                    self._kept.hold(self._workers)
                self._decide(policy.SessionEntered(index, sharded=record.get("sharded") is True))
                self._start_spares_soon()
            case "kept recovered":
                self._kept.note_recovery(record, len(self._state.running))
            case "kept left":
                worker.in_session = False
                self._decide(policy.SessionLeft(index))
            case "kept failed":
                worker.failed_at = int(record["step"])
            case _:
                pass  # the script has written to the descriptor

    def _look_at_steps(self, generation: int) -> None:
        """See whether a worker of a session hangs; and again in a while."""
        if generation != self._state.generation or self._state.phase is not Phase.RUNNING:
            return
        timeout = self._config.step_timeout
        self._in(timeout / LOOKS, lambda: self._look_at_steps(generation))
        tables = self._progress()
        if tables is None:
            self._step_watch.forget()
        elif self._step_watch.look(clock.MONOTONIC.now(), tables):
            replaced = self._state.replaced
            if self._config.num_nodes > 1:
                self._coordination.tell_standstill(generation, replaced, tables)
            else:
                self._hear_of_standstill(0, replaced, tables)

    def _progress(self) -> Tables | None:
        """How far the workers of this node are; None unless all are in a session."""
        state = self._state
        if state.arriving or state.lost or not state.running or not state.running <= state.kept:
            return None
        return {
            worker.ranks.rank: progress.read(worker.memory_fd)
            for worker in self._workers
            if worker.memory_fd is not None
        }

    def _hear_of_standstill(self, node_rank: int, meeting: int, tables: Tables) -> None:
        """The workers of a node stand still. If all do, this node ends its own that the others wait for."""
        if not self._config.step_timeout or self._state.phase is not Phase.RUNNING:
            return
        found = self._standstill.tell(clock.MONOTONIC.now(), node_rank, meeting, tables)
        if found is None or meeting != self._state.replaced:
            return
        hanging, together = found
        mine = self._progress()
        for worker in self._workers:
            rank = worker.ranks.rank
            # It may have gone on since this node said that it stands still.
            if rank in hanging and mine is not None and mine.get(rank) == together[rank]:
                self._end_hanging(worker)

    def _end_hanging(self, worker: Worker) -> None:
        """SIGABRT has it report where it is; SIGKILL follows."""
        if worker.hung:
            return
        worker.hung = (
            f"the others waited for it in a collective for {self._config.step_timeout:g} s"
        )

        def end(number: int) -> None:
            if worker.status is None:
                ask = {"names": [worker.name], "signal": number, "group": False, "hold": 0.0}
                self._ask({"do": "signal", **ask})

        end(signal.SIGABRT)
        self._in(HANG_GRACE, lambda: end(signal.SIGKILL))

    def _hear_of_loss(self, node_rank: int, failure: WorkerFailure, *, survivors: bool) -> None:
        """A worker of a session is lost, here or on another node."""
        assert self._round is not None
        index = None
        if node_rank == self._round.node_rank:
            ranks = [each.ranks.rank for each in self._workers]
            if failure.rank not in ranks:
                return
            index = ranks.index(failure.rank)
        self._lost_worker = failure
        self._decide(policy.LossTold(node_rank, index, survivors))

    def _replace(self, index: int | None) -> None:
        """A worker is lost: tell those in a session, and start another one in its place, if it was this node's."""
        assert self._round is not None
        ready = self._round = replace(self._round, replaced=self._state.replaced)
        if index is None:
            assert self._lost_worker is not None
            self._kept.tell_of_loss(self._workers, self._lost_worker, ready)
            return
        lost = list(self._workers)[index]
        failure = self._workers.failure_of(lost)
        spare = self._spares.take(index)
        by = "another process" if spare is None else "a spare"
        self._kept.tell_of_loss(self._workers, failure, ready, by)
        write_error_files(self._folder.path, (failure,))
        self._start_in_place_of(index, spare)

    def _start_in_place_of(self, index: int, spare: Worker | None = None) -> None:
        ready, lost = self._round, list(self._workers)[index]
        assert ready is not None
        self._unregister(lost)
        if spare is not None:
            self._spawner.settle(ready, index, spare)
            self._workers.replace(index, spare)
            self._tell_start(spare)
            return
        worker = self._spawner.take_over(ready, index, self._server.channel)
        self._workers.replace(index, worker)
        self._poller.register(worker.line, select.POLLIN)

    def _start_spares_soon(self) -> None:
        """Start missing spares, if all workers are in their session; in a while, so that these have the CPUs first."""
        can_start = policy.is_at_full_strength(self._state)
        if self._config.spares and can_start and not self._spares_are_due:
            self._spares_are_due = True
            self._in(SPARE_DELAY, self._start_spares)

    def _start_spares(self) -> None:
        self._spares_are_due = False
        if self._round is None or not policy.is_at_full_strength(self._state):
            return
        count = len(list(self._workers))
        channel = self._server.channel
        for each in self._spares.start_missing(self._spawner, self._round, count, channel):
            self._poller.register(each.line, select.POLLIN)

    def _end_spares(self) -> None:
        for each in self._spares:
            self._unregister(each)
        names = [each.name for each in self._spares.close()]
        if names:
            kill = {"names": names, "signal": signal.SIGKILL, "group": False, "hold": 0.0}
            self._ask({"do": "signal", **kill})

    def _unregister(self, worker: Worker) -> None:
        try:
            self._poller.unregister(worker.line)
        except KeyError:
            pass  # it had closed its socket

    def _close_store_socket(self) -> None:
        held, self._store_socket = self._store_socket, None
        if held is not None:
            held.close()

    def _start_nothing(self) -> None:
        """The job was stopped while the fork server still imports: count the workers as ended."""
        self._start_is_due = False
        self._close_store_socket()
        for index in sorted(self._state.running):
            self._decide(policy.WorkerEnded(index, failed=False))

    def _note_collectives(self) -> None:
        """Before workers are stopped because of a failure that a mismatched collective may have caused: ask what they have begun.

        Gloo aborts a process that receives more than it expects, which is seldom the one whose call is wrong.
        """
        failures = (*self._workers.failures(), *self._peer_failures)
        if self._collectives_noted or not any(
            each.signal == signal.SIGABRT or each.is_symptom() for each in failures
        ):
            return
        self._collectives_noted = True
        running = [each for each in self._workers if each.status is None and each.pid]
        told = collective_probe.collectives(
            {each.pid: each.stacks_fd for each in running}, COLLECTIVES_PATIENCE
        )
        for each in running:
            each.collectives = tuple(told.get(each.pid, ()))

    def _signal_workers(self, number: int) -> None:
        if self._may_save(number) and self._kept.tell_to_stop(self._workers):
            # They end by themselves. The rest of the grace period is for those that cannot.
            workers = self._workers

            def end() -> None:
                if self._workers is workers and workers.running():
                    self._send_signal(number)

            self._in(self._config.shutdown_timeout * SAVING, end)
            return
        self._send_signal(number)

    def _may_save(self, number: int) -> bool:
        """Whether the whole job is told to stop. In an elastic job, SIGTERM is for this node alone."""
        state = self._state
        leaves = state.elastic and state.num_nodes > 1
        return state.aim is Aim.SIGNALLED and number == signal.SIGTERM and not leaves

    def _send_signal(self, number: int) -> None:
        # A Python script ends its own children: a DataLoader's workers must not die while their trainer still saves. Other
        # programs get the signal as a process group.
        group = self._config.job.kind is TargetKind.PROGRAM
        hold = SAME_SIGNAL if number in self._signals_taken else 0.0
        if self._peers_stop:
            hold = SAME_SIGNAL_ELSEWHERE
        # Leave most of a short grace period to the workers.
        hold = min(hold, self._config.shutdown_timeout / 4)
        names = self._workers.running()
        self._ask({"do": "signal", "names": names, "signal": number, "group": group, "hold": hold})

    # -- ends ---------------------------------------------------------------------------------

    def _end_generation(self, left: list[int], aim: Aim | None = None) -> None:
        """All processes are gone: collect the failures and results of this generation."""
        self._tell_what_is_left(left)
        self._workers.drain(DRAIN_PATIENCE)
        self._failures = in_order_of_blame(self._workers.failures())
        self._results = self._workers.results()
        cause = in_a_line(self._failures[0]) if self._failures else ""
        failed = [each.rank for each in self._failures if not each.stopped_by_us]
        self._history.end(self._seconds(), failed, cause)
        events.emit(
            events.GenerationEnded(
                generation=self._state.generation,
                aim=(aim or self._state.aim).value,
                failed_ranks=tuple(each.rank for each in self._failures),
            )
        )
        self._let_go()
        if self._failures:
            write_error_files(self._folder.path, self._failures)

    def _let_go(self) -> None:
        for worker in self._spares:
            self._unregister(worker)
        self._spares.close()
        for worker in self._workers:
            if worker.line.fileno() >= 0:
                try:
                    self._poller.unregister(worker.line)
                except KeyError:
                    pass  # it had closed its socket
            worker.close()
        self._workers = Generation(self._state.generation, 0)

    def _report(self, failures: tuple[WorkerFailure, ...], reason: str = "") -> FailureReport:
        folder = self._folder.path
        generation = self._state.generation
        world = sum(self._round.workers_of_nodes) if self._round else 0
        report = FailureReport(
            failures=failures,
            world_size=self._config.world_size or world,
            max_restarts=self._config.max_restarts,
            log_folder=None if folder is None else str(folder / f"attempt_{generation}"),
            reason=reason,
        )
        return write_report(folder, report)

    def _report_restart(self) -> None:
        state = self._state  # the new generation's, with the old one's verdict
        # In a round that has formed already, it is counted as none.
        if state.verdict in {policy.Verdict.CHANGED, policy.Verdict.NONE}:
            self._say(f"{self._lost or 'a node joined or left'}; restarting all workers")
            return
        attempt, budget = state.restarts + 2, state.max_restarts + 1
        again = f"attempt {attempt} of {budget}"
        if state.verdict is policy.Verdict.SUSPECT:
            again = "not counted as an attempt if a node joined or left"
        why = "another node failed"
        # If another node reported first, its failure is the cause.
        failures = in_order_of_blame((*self._peer_failures, *self._failures))
        if failures:
            why = f"rank {failures[0].rank} {in_a_line(failures[0])}"
        if self._why_failed or self._lost:
            why = self._why_failed or self._lost
        self._say(f"{why}; restarting all workers ({again})")

    def _finish(self, aim: Aim) -> None:
        """The policy has ended. With several nodes, wait for their failures."""
        alone = self._config.num_nodes == 1 or self._coordination.broken or self._fails_alone
        if aim is Aim.FAIL and not alone:
            patience = self._config.shutdown_timeout + GATHER_PATIENCE
            self._gather_until = clock.MONOTONIC.now() + patience
            self._coordination.tell("report", self._state.generation, self._failures)

    @property
    def _fails_alone(self) -> bool:
        """Whether only this node fails, and the job continues without it."""
        return bool(self._broken) and self._state.elastic

    def _conclude(self) -> None:
        aim = self._state.aim
        report = None
        if aim is Aim.FAIL:
            failures = self._failures
            if self._config.num_nodes > 1:
                # If reports are missing: use what other nodes told, which may include the cause.
                known = (*self._peer_failures, *failures)
                failures = in_order_of_blame(self._coordination.reports() or known)
            # Workers that only lost their peers, or were stopped, are not to blame.
            blameless = all(each.stopped_by_us or each.is_symptom() for each in failures)
            reason = self._why_failed or (self._lost if blameless else "")
            self._folder.keep()
            report = self._report(failures, reason)
        self._tell_end(aim, report.cause() if report else "")
        self._finished = Outcome(
            aim=aim,
            report=report,
            signal=self._state.signal,
            results=self._results if aim is Aim.SUCCEED else (),
            generation=self._state.generation,
        )

    def _tell_end(self, aim: Aim, cause: str) -> None:
        events.emit(
            events.JobEnded(
                run_id=self._config.rendezvous.run_id,
                aim=aim.value,
                generation=self._state.generation,
                restarts=self._state.restarts,
                cause=cause,
            )
        )


def _ranks_of_newcomers(ready: RoundReady) -> list[int]:
    """The ranks of the workers whose nodes keep none."""
    assert ready.kept is not None
    nodes = [node for node, count in enumerate(ready.workers_of_nodes) for _ in range(count)]
    return [rank for rank, node in enumerate(nodes) if node not in ready.kept.keepers]


def _log_learned(packages: list[str], against: dict[str, str]) -> None:
    if packages:
        _log.info("preloaded for restarted workers: %s", ", ".join(packages))
    for package, why in against.items():
        _log.info("not preloaded for restarted workers: %s: %s", package, why)


def _status_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

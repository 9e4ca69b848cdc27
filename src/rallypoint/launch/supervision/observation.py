"""Serves those who look at a job from outside: ``rally``'s commands, readers of metrics, people at the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rallypoint._core import clock, side_thread
from rallypoint.control.server import Answer, ControlServer
from rallypoint.errors import ControlError, RallyError
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import Coordination, NodeAsked
from rallypoint.launch.output import progress_display
from rallypoint.launch.output.console import Console
from rallypoint.launch.policy import Phase
from rallypoint.launch.watching import status
from rallypoint.launch.watching.hang_watch import HangWatch
from rallypoint.launch.watching.job_history import JobHistory
from rallypoint.launch.watching.job_questions import JobQuestions
from rallypoint.launch.watching.metrics import FILE_INTERVAL, Metrics
from rallypoint.launch.watching.slow_watch import SlowWatch
from rallypoint.tracing import exporters, switch
from rallypoint.tracing.span_log import SpanLog

from .event_loop import EventLoop
from .situation import Situation


# How long the workers' stacks may take after SIGQUIT.
STACKS_PATIENCE = 10.0

_log = logging.getLogger(__name__)


class Observation:
    """Answers questions about the job, and shows what it does.

    Args:
        config: what runs.
        env: the supervisor's environment.
        coordination: the other nodes.
        console: where progress is shown.
        loop: the supervisor's loop.
        now: this node's situation.
        say: prints a line for the user.
        on_hang: called if the job hangs, with the reason in words.
    """

    def __init__(
        self,
        config: LaunchConfig,
        env: Mapping[str, str],
        coordination: Coordination,
        console: Console,
        loop: EventLoop,
        now: Situation,
        say: Callable[[str], None],
        on_hang: Callable[[str], None],
    ) -> None:
        self._config = config
        self._env = env
        self._console = console
        self._loop = loop
        self._now = now
        self._say = say
        self._on_hang = on_hang
        self._began = clock.MONOTONIC.now()
        self._history = JobHistory()
        self._coordination = coordination
        self._questions = JobQuestions(coordination, self._still, self._slowness, self._status)
        self._hang_watch: HangWatch | None = None
        if config.hang_after:
            self._hang_watch = HangWatch(
                config.hang_after, say, config.hang_after_steps, shows_stacks=config.stacks_on_hang
            )
        self._slow_watch = SlowWatch(config.slow_after, say) if config.slow_after else None
        self._display: progress_display.Display | None = None
        self._control: ControlServer | None = None
        self._metrics: Metrics | None = None
        self._spans: SpanLog | None = None
        self.log_folder: Path | None = None
        self.is_ready = False  # whether the fork server is
        self.spares: Callable[[], list[dict[str, Any]]] = list

    def trace(self) -> None:
        """Make spans of all events from now on, if the job is traced.

        Raises:
            ConfigError: the exporter does not start.
        """
        if name := self._config.traces:
            attributes = switch.resource_attributes(self._config.rendezvous.run_id)
            provider = exporters.provider_for(name, "--traces", attributes)
            self._spans = SpanLog(provider, self._env)

    def variables(self) -> dict[str, str]:
        """The variables that workers started now need so that their spans count as this job's."""
        if self._spans is None:
            return {}
        return {exporters.VARIABLE: self._config.traces, **self._spans.variables()}

    def open(self) -> None:
        """Start to answer and to watch.

        Raises:
            ConfigError: the port for metrics is in use, or the file cannot be written.
        """
        self._open_control()
        self._open_metrics()
        if self._hang_watch is not None:
            self._look_for_hang()
        if self._slow_watch is not None:
            self._loop.after(self._slow_watch.interval, self._look_for_slow)

    def close(self) -> None:
        """Stop answering. A second call does nothing."""
        if self._slow_watch is not None:
            self._slow_watch.close()
        if self._display is not None:
            self._display.close()
        if self._control is not None:
            self._control.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._spans is not None:
            self._spans.close()
            self._spans = None

    def serve(self, ready: Iterable[int]) -> None:
        """Serve the sockets that are among these descriptors."""
        if self._control is not None and self._control.fileno() in ready:
            self._control.serve()
        metrics = None if self._metrics is None else self._metrics.server
        if metrics is not None and metrics.fileno() in ready:
            metrics.serve()

    def _open_control(self) -> None:
        try:
            self._control = ControlServer(self._config.rendezvous.run_id, self._answer)
        except OSError as error:
            _log.info("no control socket, so rally ps does not show this job: %s", error)
        else:
            self._loop.watch(self._control)

    def _open_metrics(self) -> None:
        place = self._config.metrics
        if place is None:
            return
        self._metrics = Metrics(place, self._status, lambda: self._now.workers, self._slowness)
        server = self._metrics.server
        if server is None:
            self._loop.after(FILE_INTERVAL, self._write_metrics)
            return
        self._loop.watch(server)
        if not place.port:
            self._say(f"metrics are on port {server.port}")

    def _write_metrics(self) -> None:
        """Write the file now, and again in a while."""
        assert self._metrics is not None
        self._metrics.write()
        self._loop.after(FILE_INTERVAL, self._write_metrics)

    # -- answers ------------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> Answer | Callable[[], Answer]:
        match question.get("ask"):
            case "status":
                return self._status()
            case "nodes":
                return self._questions.nodes(question, self._now.round)
            case "stacks" | "usage" | "memory" | "profile":
                return self._questions.everywhere(question, self._now.workers, self._now.round)
            case "logs":
                return self._questions.logs(question, self._now.round)
            case other:
                known = "status, nodes, stacks, usage, memory, profile, logs"
                raise ControlError(f"cannot be asked for {other!r} (known: {known})")

    def _status(self) -> dict[str, Any]:
        now = self._now
        facts = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "seconds": self._seconds(),
            "log_folder": str(self.log_folder or ""),
            "is_ready": self.is_ready,
            "hang": self._hang(),
            "arrived": self._coordination.arrived,
            "generations": self._history.told(),
            "spares": self.spares(),
        }
        return status.status(self._config, now.state, now.round, now.workers, facts=facts)

    def answer_node(self, asked: NodeAsked) -> None:
        """Answer another node's question about this node's workers."""
        with contextlib.suppress(OSError):  # no descriptor is left: this node is silent
            self._questions.answer(asked, self._now.workers, self._now.round, self.log_folder)

    # -- what has been ------------------------------------------------------------------------

    def note_begin(self, generation: int, world_size: int) -> None:
        """A generation begins."""
        self._history.begin(generation, self._seconds(), world_size)

    def note_end(self, failed: list[int], cause: str) -> None:
        """The generation has ended: which ranks have failed, and why the first one did."""
        self._history.end(self._seconds(), failed, cause)

    def _seconds(self) -> float:
        """Seconds since the job began."""
        return round(clock.MONOTONIC.now() - self._began, 3)

    # -- hangs --------------------------------------------------------------------------------

    def _still(self) -> dict[int, float]:
        return {} if self._hang_watch is None else self._hang_watch.still()

    def _hang(self) -> dict[str, Any] | None:
        watch, ready = self._hang_watch, self._now.round
        found = None if watch is None or ready is None else watch.hang(ready.generation)
        if found is None:
            return None
        return {"missing": list(found.missing), "waiting": list(found.waiting)}

    def _look_for_hang(self) -> None:
        """See whether any worker moves, and look again in a while."""
        watch = self._hang_watch
        assert watch is not None
        self._loop.after(watch.interval, self._look_for_hang)
        workers, ready = self._now.workers, self._now.round
        if self._now.state.phase is Phase.RUNNING and ready is not None:
            watch.look(
                workers, ready, lambda what: self._questions.everywhere(what, workers, ready)
            )
            if why := watch.hanging(ready.generation):
                self._on_hang(why)

    # -- slow ranks ---------------------------------------------------------------------------

    def _slowness(self) -> dict[int, dict[str, Any]]:
        return {} if self._slow_watch is None else self._slow_watch.told()

    def _look_for_slow(self) -> None:
        """See whether the others wait for a rank of this node, and look again in a while."""
        watch = self._slow_watch
        assert watch is not None
        self._loop.after(watch.interval, self._look_for_slow)
        if self._now.state.phase is Phase.RUNNING and self._now.round is not None:
            watch.look(self._now.workers, self._now.round.generation)

    def slow_ranks(self) -> tuple[str, ...]:
        """Which ranks of this node were slow, in words."""
        return () if self._slow_watch is None else self._slow_watch.summary()

    # -- people at the terminal ---------------------------------------------------------------

    def show_progress(self) -> None:
        """A worker has said which step it is in: show it from now on."""
        if self._display is None and self._config.progress != "off":
            term = self._env.get("TERM", "")
            self._display = progress_display.choose(
                self._config.progress, self._console, self._say, term
            )
            self._show_progress()

    def _show_progress(self) -> None:
        """Show how far the workers are, and do so again in a while."""
        display = self._display
        assert display is not None
        self._loop.after(display.interval, self._show_progress)
        if self._now.round is not None and self._now.round.node_rank == 0:
            found = next(filter(None, (each.progress() for each in self._now.workers)), None)
            if found is not None:
                display.show(found)

    def show_stacks(self) -> None:
        """SIGQUIT, as Ctrl-\\ sends it: print where the workers are, and go on."""
        question = {"ask": "stacks", "patience": STACKS_PATIENCE}
        try:
            look = self._questions.everywhere(question, self._now.workers, self._now.round)
        except OSError as error:
            self._say(f"SIGQUIT received: no stacks: {error.strerror}")
            return

        def show() -> None:
            from rallypoint.control.stacks import stack_groups  # a launch need not wait for it

            try:
                text = stack_groups.text(look()["processes"]) or "no worker runs now"
            except (RallyError, OSError, ValueError) as error:
                text = f"no stacks: {error}"
            self._say(f"SIGQUIT received: the stacks of the workers\n{text}")

        if not side_thread.begin(show, "rally-stacks"):
            self._say("SIGQUIT received: no stacks: no thread is left (see `ulimit -u`)")

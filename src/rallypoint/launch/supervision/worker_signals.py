"""Signals to the workers: how they are sent, what is asked before, and what is said meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rallypoint._core import clock
from rallypoint._core.rank_words import in_words
from rallypoint.control.collectives import collective_probe
from rallypoint.launch import policy
from rallypoint.launch.config import LaunchConfig, TargetKind
from rallypoint.launch.output.failure import WorkerFailure
from rallypoint.launch.policy import Aim, Phase
from rallypoint.launch.supervision.kept_workers import KeptWorkers

from .event_loop import EventLoop
from .server_requests import ServerRequests
from .situation import Situation


# A batch system signals the processes of a job one by one. For this long the same signal may still be on its way to the
# fork server. If it arrives there, the workers have got it too, and the supervisor does not send it again.
SAME_SIGNAL = 0.25
# The same, if the signal is sent on several hosts.
SAME_SIGNAL_ELSEWHERE = 1.0
# After this long, the supervisor prints what it waits for.
SILENCE = 2.0
# The share of the grace period after SIGTERM in which workers of a session may save a last checkpoint before they are signalled.
SAVING = 0.8
# How long workers that are about to be stopped may take to report their collectives. Only a worker that stands still,
# or has no CPU, takes more than milliseconds.
COLLECTIVES_PATIENCE = 1.0


class WorkerSignals:
    """Signals the workers of a node.

    Args:
        config: what runs.
        loop: the supervisor's loop.
        now: this node's situation.
        requests: sends requests to the fork server.
        kept: what is told to workers of a session.
        say: prints a line for the user.
    """

    def __init__(
        self,
        config: LaunchConfig,
        loop: EventLoop,
        now: Situation,
        requests: ServerRequests,
        kept: KeptWorkers,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._loop = loop
        self._now = now
        self._requests = requests
        self._kept = kept
        self._say = say
        self._collectives_noted = False  # in this generation
        self.taken: set[int] = set()  # signals that the supervisor has received
        self.peers_stop = False  # other nodes were signalled, so this one may be, too

    def begin(self) -> None:
        """Workers start."""
        self.peers_stop = self._collectives_noted = False

    def note_taken(self, number: int) -> bool:
        """The supervisor has received a signal that nothing here acts on. Returns whether it is the first of its kind.

        If it went to all processes of the job, the workers have it, too: the fork server is asked about that.
        """
        if number in self.taken:
            return False
        self.taken.add(number)
        tell = {"do": "tell", "signal": number}
        self._loop.after(SAME_SIGNAL, lambda: self._requests.ask(tell))
        return True

    def send(self, number: int) -> None:
        """Signal all running workers; if the job is told to stop, those in a session may save a last checkpoint first."""
        workers = self._now.workers
        if self._now.state.phase is Phase.STOPPING:
            # One that somebody has stopped would use up the grace period.
            self._requests.ask({"do": "wake", "names": workers.running()})
        if self._may_save(number) and self._kept.tell_to_stop(workers):
            # They exit on their own. The rest of the grace period is for those that cannot.

            def end() -> None:
                if self._now.workers is workers and workers.running():
                    self._send(number)

            self._loop.after(self._config.shutdown_timeout * SAVING, end)
            return
        self._send(number)

    def _may_save(self, number: int) -> bool:
        """Whether the whole job is told to stop. In an elastic job, SIGTERM may be for this node alone."""
        state = self._now.state
        leaves = state.leaves and state.num_nodes > 1
        return state.aim is Aim.SIGNALLED and number == signal.SIGTERM and not leaves

    def _send(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._kept.tell_to_end(self._now.workers)
        # A Python script ends its own children: a DataLoader's workers must not die while their trainer still saves. Other
        # programs get the signal as a process group.
        group = self._config.job.kind is TargetKind.PROGRAM
        hold = SAME_SIGNAL if number in self.taken else 0.0
        if self.peers_stop:
            hold = SAME_SIGNAL_ELSEWHERE
        # Leave most of a short grace period to the workers.
        hold = min(hold, self._config.shutdown_timeout / 4)
        names = self._now.workers.running()
        self._requests.ask(
            {"do": "signal", "names": names, "signal": number, "group": group, "hold": hold}
        )

    def note_collectives(self, of_peers: tuple[WorkerFailure, ...]) -> None:
        """Ask what workers have begun, before they are stopped because of a failure that a mismatched collective may have caused.

        Gloo aborts a process that receives more than it expects, which is seldom the one whose call is wrong.

        Args:
            of_peers: the failures on other nodes.
        """
        workers = self._now.workers
        failures = (*workers.failures(), *of_peers)
        if self._collectives_noted or not any(
            each.signal == signal.SIGABRT or each.is_symptom() for each in failures
        ):
            return
        self._collectives_noted = True
        running = [each for each in workers if each.status is None and each.pid]
        told = collective_probe.collectives(
            {each.pid: each.questions_fd for each in running}, COLLECTIVES_PATIENCE
        )
        for each in running:
            each.collectives = tuple(told.get(each.pid, ()))

    def say_soon_who_is_waited_for(self) -> None:
        """The workers were told to stop: if they do not, tell people after a while."""
        self._loop.after(SILENCE, self._say_who_is_waited_for)

    def _say_who_is_waited_for(self) -> None:
        state = self._now.state
        ranks = [each.ranks.rank for each in self._now.workers if each.status is None]
        if state.phase is not Phase.STOPPING or state.kill_at is None or not ranks:
            return
        number = state.signal if state.aim is Aim.SIGNALLED and state.signal else signal.SIGTERM
        seconds = max(0.0, state.kill_at - clock.MONOTONIC.now())
        again = "Ctrl-C twice"
        if state.signal is not None:
            again = "Ctrl-C again" if state.signal == signal.SIGINT else "a second signal"
            if state.sigterm_repeats and state.signal == signal.SIGTERM:
                again = "SIGINT"
        self._say(
            f"waiting for {in_words(ranks)} ({policy.signal_name(number)}), up to {seconds:.0f} s;"
            f" {again} kills {'them' if len(ranks) > 1 else 'it'}"
        )

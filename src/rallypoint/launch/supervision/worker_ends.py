"""What the end of a worker means: an event for the policy, at once, or after a moment in which its cause may become known."""

from __future__ import annotations

import os
from collections.abc import Callable

from rallypoint import events
from rallypoint.launch import policy
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.generation import Worker
from rallypoint.launch.policy import Phase

from .early_losses import EarlyLosses
from .event_loop import EventLoop
from .host_troubles import HostTroubles
from .kept_workers import KeptWorkers
from .situation import Situation
from .worker_signals import WorkerSignals


# A worker may die of a signal up to this long before the supervisor receives it: the sender may have to wait for a CPU.
DEATH_AHEAD = 1.0


class WorkerEnds:
    """Judges the ends of one node's workers.

    Args:
        config: what runs.
        loop: the supervisor's loop.
        now: this node's situation.
        signals: those that the job has received.
        kept: the workers of a session.
        early_losses: decides on losses.
        troubles: what has happened to hosts.
        decide: decides on an event.
    """

    def __init__(
        self,
        config: LaunchConfig,
        loop: EventLoop,
        now: Situation,
        signals: WorkerSignals,
        kept: KeptWorkers,
        early_losses: EarlyLosses,
        troubles: HostTroubles,
        decide: Callable[[policy.Event], None],
    ) -> None:
        self._config = config
        self._loop = loop
        self._now = now
        self._signals = signals
        self._kept = kept
        self._early_losses = early_losses
        self._troubles = troubles
        self._decide = decide
        self._held: list[policy.WorkerEnded] = []

    def note(self, worker: Worker, status: int, at: float) -> None:
        """A worker has ended, and everything that it had to say has been read.

        Args:
            worker: a worker of this generation.
            status: as ``waitpid`` returns it.
            at: when, on this host's monotonic clock.
        """
        workers, ready = self._now.workers, self._now.round
        worker.status, worker.ended_at = status, at
        failed = status != 0
        if failed and ready is not None:
            self._troubles.note_failure(workers.failure_of(worker), ready.incident)
        symptom = failed and workers.is_echo(worker)
        if events.is_wanted():
            events.emit(workers.end_of(worker))
        again = failed and self._kept.has_seen(workers.failure_of(worker), worker.failed_at)
        end = policy.WorkerEnded(
            workers.index(worker),
            failed=failed,
            symptom=symptom,
            again=again,
            refused=worker.is_refused,
            record_lost=worker.record_lost,
        )
        if self._may_be_ahead(status):
            self._held.append(end)
            self._loop.after(DEATH_AHEAD, self.decide_held)
        elif failed:
            self._early_losses.decide(end)
        else:
            self._decide(end)

    def decide_held(self) -> None:
        """Decide on the ends that waited for a signal."""
        held, self._held = self._held, []
        for end in held:
            self._decide(end)

    def forget(self) -> None:
        """The generation is over."""
        self._held.clear()
        self._early_losses.forget()

    def _may_be_ahead(self, status: int) -> bool:
        """Whether a worker ended because of a signal that may still arrive here and end the whole job.

        A worker may also have handled it, saved a checkpoint, and exited with 128 + signal.
        """
        code = os.waitstatus_to_exitcode(status)
        number = -code if code < 0 else code - 128
        return (
            self._now.state.phase in {Phase.RUNNING, Phase.LISTENING}
            and number in self._config.ending_signals
            and number not in self._signals.taken
        )

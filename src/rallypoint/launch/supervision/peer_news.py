"""What other nodes report, as events for the policy."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint import events
from rallypoint._core import clock
from rallypoint.launch import policy
from rallypoint.launch.config import LaunchConfig, OnHang
from rallypoint.launch.coordination.interface import PeerEvent
from rallypoint.launch.policy import Aim

from .causes import Causes
from .early_losses import EarlyLosses
from .host_troubles import HostTroubles
from .hung_workers import HungWorkers
from .replacements import Replacements
from .shared_stop import SharedStop
from .situation import Situation
from .worker_signals import WorkerSignals


# Reports that are not events for listeners from outside.
_UNTOLD = frozenset(
    {
        "all_done",
        "reports",
        "in session",
        "out of session",
        "standstill",
        "left out",
        "told",
        "asks for admission",
    }
)
# Reports that take effect once the generation that they are about has begun here.
_HELD = frozenset({"worker lost", "in session", "out of session"})


class PeerNews:
    """Hears what other nodes report.

    Args:
        config: what runs.
        now: this node's situation.
        causes: what has gone wrong.
        signals: sends the workers signals.
        shared_stop: a signal to all nodes.
        replacements: replaces workers in a session.
        hung: finds workers that do not move.
        troubles: what has happened to hosts.
        early_losses: losses that strike as soon as a session trains.
        say: prints a line for the user.
        decide: passes an event to the policy.
        all_reported: called when no more failures of other nodes will arrive.
    """

    def __init__(
        self,
        config: LaunchConfig,
        now: Situation,
        causes: Causes,
        signals: WorkerSignals,
        shared_stop: SharedStop,
        replacements: Replacements,
        hung: HungWorkers,
        troubles: HostTroubles,
        early_losses: EarlyLosses,
        say: Callable[[str], None],
        decide: Callable[[policy.Event], None],
        all_reported: Callable[[], None],
    ) -> None:
        self._now = now
        self._causes = causes
        self._signals = signals
        self._shared_stop = shared_stop
        self._replacements = replacements
        self._hung = hung
        self._troubles = troubles
        self._early_losses = early_losses
        self._say = say
        self._decide = decide
        self._all_reported = all_reported
        self._restarts_on_hang = config.on_hang is OnHang.RESTART
        self._held: list[PeerEvent] = []
        self._said = -1  # the generation in which people were told why nobody is admitted

    def begin(self) -> None:
        """A generation has begun: handle what was reported about it while this node was still ending the one before."""
        held, self._held = self._held, []
        for event in held:
            if event.generation >= self._now.state.generation:
                self.hear(event)

    def hear(self, event: PeerEvent) -> None:
        """Handle a report."""
        if event.what in _HELD and event.generation > self._now.state.generation:
            self._held.append(event)
            return
        if event.what not in _UNTOLD:
            events.emit(
                events.NodeReported(
                    generation=event.generation,
                    node_rank=event.node_rank,
                    what=event.what,
                    reason=event.reason,
                )
            )
        state = self._now.state
        match event:
            case PeerEvent("all_done"):
                self._decide(policy.PeersDone())
            case PeerEvent("told", _, generation):
                self._shared_stop.hear(generation)
            case PeerEvent("stopped", node_rank):
                self._signals.peers_stop = True
                if state.aim is not Aim.SIGNALLED:
                    who = f"node {node_rank}" if node_rank >= 0 else "another node"
                    self._say(f"{who} was told to stop; stopping this node too")
                    self._decide(policy.PeersStopped(node_rank))
            case PeerEvent("reports"):
                self._all_reported()
            case PeerEvent(_, _, generation) if policy.is_past(state, generation):
                pass
            case PeerEvent("worker lost" | "standstill" | "hangs", _, state.generation):
                self._hear_of_workers(event)
            case PeerEvent("worker lost" | "standstill"):
                pass
            case PeerEvent("in session" | "out of session" as what, node_rank):
                self._decide(policy.NodeInSession(node_rank, what == "in session"))
                self._early_losses.heed_news()
                self._replacements.heed_news()
                self._replacements.start_spares_soon()
            case _:
                self._hear_of_members(event)

    def _hear_of_workers(self, event: PeerEvent) -> None:
        """Handle a report about workers of the current generation."""
        match event:
            case PeerEvent("worker lost", node_rank, _, (failure, *_)):
                told = self._replacements.locate(node_rank, failure, survivors=event.survivors)
                if told is not None:
                    self._decide(told)
            case PeerEvent("standstill", node_rank):
                self._hung.hear_of_standstill(node_rank, event.meeting, event.progress)
            case _:
                self._causes.not_of_workers = event.reason
                self._decide(policy.JobHangs(is_own=False, restarts=self._restarts_on_hang))

    def _hear_of_members(self, event: PeerEvent) -> None:
        """Handle a report about nodes that join, leave or fail."""
        node_rank = event.node_rank
        note_lost = self._causes.note_lost
        match event.what:
            case "lost":
                note_lost(f"{event.reason}{self._lost_state}")
                if not event.is_own and self._now.round is not None:
                    self._troubles.note_loss(event.host, self._now.round.incident, event.reason)
                self._early_losses.decide(policy.PeerLost(node_rank, event.is_own))
            case "left out":
                self._decide(policy.LeftOut())
            case "not kept":
                note_lost(f"node {node_rank} could not keep its workers")
                self._decide(policy.NotKept(node_rank))
            case "leaving":
                self._signals.peers_stop = not event.reason
                why = f"failed: {event.reason}" if event.reason else "was told to leave"
                note_lost(f"node {node_rank} {why}{self._lost_state}")
                self._decide(policy.PeerLeaves(node_rank))
            case "asks for admission":
                self._say_why_nobody_is_admitted()
                self._decide(policy.AdmissionAsked())
            case "waiting":
                note_lost("a node wants to join")
                self._decide(policy.NodeWaiting())
            case _:
                echo = self._causes.note_peers(event.failures)
                if event.reason:
                    note_lost(f"node {node_rank} failed: {event.reason}")
                self._decide(policy.PeerFailed(node_rank, event.generation, echo))

    def _say_why_nobody_is_admitted(self) -> None:
        """Say so once per round, if a node has to wait."""
        state = self._now.state
        why = policy.why_nobody_is_admitted(clock.MONOTONIC.now(), state)
        if why and self._said != state.generation:
            self._said = state.generation
            self._say(f"a node waits to join: {why}")

    @property
    def _lost_state(self) -> str:
        """What is lost with a node, for the line that says why all restart."""
        if self._now.state.elastic and self._now.state.is_sharded:
            return ", and with it the only snapshots of its sharded state"
        return ""

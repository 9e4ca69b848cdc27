"""How the job ends on a node: the other nodes' failures are gathered, the report is written, and the end is announced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rallypoint import events
from rallypoint._core import clock, env as environment
from rallypoint.launch.avoidance.trouble import Kind, Trouble
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import Coordination
from rallypoint.launch.output.report import FailureReport
from rallypoint.launch.output.reportfiles import write_report
from rallypoint.launch.output.run_folder import RunFolder
from rallypoint.launch.placement import engine_ids
from rallypoint.launch.policy import Aim, Phase
from rallypoint.rendezvous.home import ENDED_WELL, STOPPED

from .causes import Causes, WhyFailed
from .host_troubles import HostTroubles
from .situation import Situation


# How long the nodes wait for each other's failures before they print the report, beyond the grace period.
GATHER_PATIENCE: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the job ended on this node.

    Args:
        aim: success, failure or a signal.
        report: the report on the last generation, if it failed.
        signal: the signal that ended it, or None.
        results: function launches: the result bytes of each local worker, in rank order.
        first_rank: the rank of the first local worker.
        generation: the last one.
        ends_job: whether the job ends with this node, rather than going on without it.
        troubles: what happened to hosts on the way.
    """

    aim: Aim
    report: FailureReport | None
    signal: int | None
    results: tuple[bytes, ...]
    first_rank: int
    generation: int
    ends_job: bool
    troubles: tuple[Trouble, ...] = ()


class JobEnd:
    """The end of the job on one node.

    Args:
        config: the job's config.
        coordination: the other nodes.
        causes: what has gone wrong.
        now: this node's situation.
        slow_ranks: returns a line for each rank that was slow.
        troubles: what has happened to hosts.
        say: prints a line for the user.

    Attributes:
        results: function launches: the results of this node's workers.
        outcome: None until the job has ended.
        gathers_until: when to stop waiting for the other nodes' failures; None: there is nothing to wait for.
    """

    def __init__(
        self,
        config: LaunchConfig,
        coordination: Coordination,
        causes: Causes,
        now: Situation,
        slow_ranks: Callable[[], tuple[str, ...]],
        troubles: HostTroubles,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._coordination = coordination
        self._causes = causes
        self._now = now
        self._slow_ranks = slow_ranks
        self._troubles = troubles
        self._say = say
        self.results: tuple[bytes, ...] = ()
        self.outcome: Outcome | None = None
        self.gathers_until: float | None = None

    def begin(self, aim: Aim) -> None:
        """The policy has reached its end. With several nodes, wait for their failures."""
        state = self._now.state
        alone = self._config.num_nodes == 1 or self._coordination.broken or state.fails_alone
        if aim is Aim.FAIL and not alone:
            patience = self._config.shutdown_timeout + GATHER_PATIENCE
            self.gathers_until = clock.MONOTONIC.now() + patience
            self._coordination.tell("report", self._now.state.generation, self._causes.ends)

    def stop_gathering(self) -> None:
        """Do not wait for other nodes' reports any longer."""
        self.gathers_until = None

    @property
    def is_due(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.gathers_until is None or clock.MONOTONIC.now() >= self.gathers_until

    def conclude(self, folder: RunFolder) -> None:
        """Write the report of a failed job, and announce the end.

        Args:
            folder: the run's folder.
        """
        state = self._now.state
        report = None
        if state.aim is Aim.FAIL:
            several = self._config.num_nodes > 1
            why = self._causes.verdict(self._coordination.reports() if several else None)
            folder.keep()
            report = self._report(why, folder)
        else:
            for line in self._slow_ranks():
                self._say(line)
        self.tell(state.aim, report.cause() if report else "")
        self.outcome = Outcome(
            aim=state.aim,
            report=report,
            signal=state.signal,
            results=self.results if state.aim is Aim.SUCCEED else (),
            first_rank=self._first_rank,
            generation=state.generation,
            ends_job=bool(self.why()),
            troubles=tuple(self._troubles.noted),
        )

    def tell(self, aim: Aim, cause: str) -> None:
        """Tell the listeners for events that the job has ended."""
        state = self._now.state
        events.emit(
            events.JobEnded(
                run_id=self._config.rendezvous.run_id,
                aim=aim.value,
                generation=state.generation,
                restarts=state.restarts,
                cause=cause,
            )
        )

    def why(self) -> str:
        """What to tell nodes that wait for another round. Empty if there may be one without this node."""
        state = self._now.state
        if state.phase is not Phase.ENDED:
            return ""
        match state.aim:
            case Aim.SUCCEED:
                alone = state.elastic and not state.peers_done
                return "" if alone else ENDED_WELL
            case Aim.FAIL:
                return "" if state.fails_alone else "the job has failed"
            case Aim.SIGNALLED if not state.leaves:
                return STOPPED
            case _:
                return ""

    def _report(self, why: WhyFailed, run: RunFolder) -> FailureReport:
        folder = run.path
        attempt = run.existing(self._now.state.generation)
        world = sum(self._now.round.workers_of_nodes) if self._now.round else 0
        report = FailureReport(
            failures=why.failures,
            world_size=self._config.world_size or world,
            max_restarts=self._config.max_restarts,
            log_folder=None if attempt is None else str(attempt),
            reason=why.reason,
            left_early=why.left_early,
            not_replaced=self._now.state.not_replaced,
            ends_job=not self._now.state.fails_alone,
            slow=self._slow_ranks(),
            lost_hosts=tuple(
                dict.fromkeys(e.host for e in self._troubles.noted if e.kind is Kind.LOST)
            ),
            engines=engine_ids.found(environment.snapshot()),
        )
        return write_report(folder, report)

    @property
    def _first_rank(self) -> int:
        found = self._now.round
        before = 0 if found is None else sum(found.workers_of_nodes[: found.node_rank])
        return self._config.rank_offset + before

"""Why a generation ended, as far as this node knows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rallypoint.launch.output.failure import WorkerFailure, in_order_of_blame
from rallypoint.launch.output.report import in_a_line
from rallypoint.launch.output.symptoms import Says
from rallypoint.launch.policy import State, Verdict


class WhyFailed(NamedTuple):
    """Why the job has failed.

    Args:
        failures: those to blame come first.
        reason: what else is the reason, in words; may be empty.
        left_early: ranks whose scripts succeeded before the others failed; empty if that explains nothing.
    """

    failures: tuple[WorkerFailure, ...]
    reason: str
    left_early: tuple[int, ...]


@dataclass(slots=True)
class Causes:
    """What has gone wrong.

    Args:
        failures: those of this node's workers, those to blame first.
        left_early: the ends of this node's workers that did not fail and ended before any was stopped.
        of_peers: the failures that other nodes have reported.
        not_of_workers: the cause in words, if no worker is to blame.
        lost: which node or fork server is gone, in words.
        broken: why this node cannot continue.
    """

    failures: tuple[WorkerFailure, ...] = ()
    left_early: tuple[WorkerFailure, ...] = ()
    of_peers: tuple[WorkerFailure, ...] = ()
    not_of_workers: str = ""
    lost: str = ""
    broken: str = ""

    def begin(self) -> None:
        """Workers start: forget what was before."""
        self.not_of_workers = self.lost = self.broken = ""
        self.of_peers = ()

    def note_lost(self, words: str) -> None:
        """Something is gone. The first loss counts: others may follow from it."""
        self.lost = self.lost or words

    def note_peers(self, failures: tuple[WorkerFailure, ...]) -> bool:
        """Another node's workers have failed. Returns whether the failures only report that they were stopped, or lost a peer."""
        is_echo = bool(failures) and all(each.is_echo() for each in failures)
        if not (is_echo and self.of_peers):
            self.of_peers = failures
        return is_echo

    @property
    def of_this_node(self) -> str:
        """What this node tells the others besides its failures."""
        return self.not_of_workers or self.broken

    def why_leaving(self, failures: tuple[WorkerFailure, ...]) -> str:
        """Why this node leaves a job that goes on without it; empty if it was told to.

        Args:
            failures: those of its workers.
        """
        if self.of_this_node or not failures:
            return self.of_this_node
        first = in_order_of_blame(failures)[0]
        return f"rank {first.rank} {in_a_line(first)}"

    def why_all_restart(self, state: State, not_replaced: str = "", *, alone: bool = False) -> str:
        """A line that tells people why workers restart.

        Args:
            state: the new generation's, with the old one's verdict.
            not_replaced: why a lost worker of a session was not replaced in place.
            alone: only this node's workers are restarted.
        """
        end = f"; not replaced: {not_replaced}" if not_replaced and not alone else ""
        # A round that has already formed has reset the verdict to NONE.
        if state.verdict in {Verdict.CHANGED, Verdict.NONE}:
            which = "this node's" if alone else "all"
            why = self.lost or not_replaced or "a node joined or left"
            return f"{why}; restarting {which} workers{end if why != not_replaced else ''}"
        attempt, budget = state.restarts + 2, state.max_restarts + 1
        again = f"attempt {attempt} of {budget}"
        if state.restart_window:
            again = f"restart {attempt - 1} of {budget - 1} in {state.restart_window:g} s"
        if state.verdict is Verdict.SUSPECT:
            again = "not counted as an attempt if a node joined or left"
        why = "another node failed"
        # If another node reported first, its failure is the cause.
        failures = in_order_of_blame((*self.of_peers, *self.failures, *self.left_early))
        if failures:
            why = f"rank {failures[0].rank} {in_a_line(failures[0])}"
        return f"{self.not_of_workers or self.lost or why}; restarting all workers ({again}){end}"

    @property
    def ends(self) -> tuple[WorkerFailure, ...]:
        """How this node's workers ended, as far as that may explain why the job failed."""
        return (*self.failures, *self.left_early)

    def verdict(self, of_nodes: Sequence[WorkerFailure] | None) -> WhyFailed:
        """Why the job has failed.

        Args:
            of_nodes: what all nodes have reported (:attr:`ends`), if there are several; empty if reports are missing.
        """
        # If reports are missing, use what other nodes have told, which may include the cause.
        ordered = in_order_of_blame(of_nodes or (*self.of_peers, *self.ends))
        if all(each.left_early for each in ordered):
            ordered = ()  # nobody needed them
        if ordered and ordered[0].says() < Says.MISSING:
            left_early: tuple[int, ...] = ()
        else:
            left_early = tuple(sorted(each.rank for each in ordered if each.left_early))
        failures = tuple(each for each in ordered if not each.left_early or each is ordered[0])
        # Workers that only lost their peers, or were stopped, are not to blame.
        blameless = all(each.is_echo() for each in failures)
        reason = self.not_of_workers or (self.lost if blameless else "")
        return WhyFailed(failures, reason, left_early)

"""What one node's supervisor knows of its job, for decisions."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from enum import StrEnum

from .events import RoundFormed


class Verdict(StrEnum):
    """Why a generation ended, as far as the restart budget is concerned."""

    NONE = ""
    CHANGED = "changed"  # members joined or left: not charged
    SUSPECT = "suspect"  # a failure that may be the consequence of a lost node
    FAILED = "failed"


class Phase(StrEnum):
    JOINING = "joining"
    REJOINING = "rejoining"  # the workers of a session are held while the nodes meet again
    RUNNING = "running"
    LISTENING = "listening"
    STOPPING = "stopping"
    SWEEPING = "sweeping"
    WAITING = "waiting"
    ENDED = "ended"


class Aim(StrEnum):
    """What follows once all processes of this generation are gone."""

    SUCCEED = "succeed"
    RESTART = "restart"
    FAIL = "fail"
    SIGNALLED = "signalled"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One node's supervisor.

    Args:
        grace: seconds between SIGTERM and SIGKILL.
        moment: seconds after a symptom in which another worker may report the cause, before SIGTERM.
        num_nodes: with one node there are no peers to wait for.
        elastic: members may come and go; otherwise a lost node ends the job.
        serves: this node serves the job's store.
        restarts: how much of the budget is used.
        restart_window: seconds after which a restart no longer counts; 0: it always does.
        charged: with a window, the times of the restarts that count.
        verdict: what this generation's end means for the budget.
        running: local indices of workers that have not ended.
        kill_at: STOPPING: when SIGKILL is due. LISTENING: when the next step is due.
        asked_again: the workers were asked a second time; LISTENING is about to end.
        signal: the first signal received, if any.
        signalled_at: when.
        stops_job: all nodes have received it.
        passed: signals for the workers alone; the job continues.
        sigterm_repeats: SIGTERM may arrive several times for one reason, as from Slurm; a late repeat hurries nobody, either.
        max_losses: how many workers may be replaced in place within ``loss_window`` seconds.
        kept: local indices of workers in a session.
        arriving: local indices of workers that take a lost one's place and have not entered their session.
        losses: when workers were replaced, on any node.
        replaced: how many workers were replaced since the session began, on all nodes.
        lost: local indices of workers whose loss was told to all nodes but not read back yet.
        nodes: how many are in the round.
        in_session: ranks of the nodes whose workers have all entered a session.
        without_survivors: the nodes among them whose workers are all to be replaced.
        said_in_session: this node has told the others that its workers are in a session.
        has_left: a worker's session has ended.
        not_replaced: why a lost worker of a session is not replaced in place, in words.
        is_sharded: no other worker has the state of this node's: what is lost with a node cannot be restored.
        resizes: all workers of this node that are in the session can go on with another number of ranks.
        comes: this node's workers are joining a session in progress, and have not met the others yet.
        said_whole: when the nodes had to meet again, this node had lost no worker.
        relied_on: this node's workers may be the only ones that have what newcomers need, and may not have passed it on yet.
        began: when the round formed.
        expects_session: this node's workers will probably enter a session.
        is_ending: the session of another node has ended.
        is_extra: this node's workers take nobody's place, so the others can go on without them.
        fails_alone: this node fails, and the others go on without it.
        is_joining: this node is already on its way to the next round, while its workers are held or being stopped.
        formed: the next round, if it has formed meanwhile.
    """

    max_restarts: int
    grace: float
    moment: float = 0.0
    num_nodes: int = 1
    elastic: bool = False
    serves: bool = False
    restarts: int = 0
    restart_window: float = 0.0
    charged: tuple[float, ...] = ()
    verdict: Verdict = Verdict.NONE
    phase: Phase = Phase.JOINING
    generation: int = 0
    running: frozenset[int] = frozenset()
    aim: Aim = Aim.SUCCEED
    kill_at: float | None = None
    asked_again: bool = False
    signal: int | None = None
    signalled_at: float = 0.0
    stops_job: bool = False
    peers_done: bool = False
    passed: frozenset[int] = frozenset()
    sigterm_repeats: bool = False
    max_losses: int = 0
    loss_window: float = 600.0
    kept: frozenset[int] = frozenset()
    arriving: frozenset[int] = frozenset()
    losses: tuple[float, ...] = ()
    replaced: int = 0
    lost: frozenset[int] = frozenset()
    nodes: int = 1
    in_session: frozenset[int] = frozenset()
    without_survivors: frozenset[int] = frozenset()
    said_in_session: bool = False
    has_left: bool = False
    not_replaced: str = ""
    is_sharded: bool = False
    resizes: bool = False
    comes: bool = False
    said_whole: bool = False
    relied_on: bool = False
    began: float = 0.0
    expects_session: bool = False
    is_ending: bool = False
    is_extra: bool = False
    fails_alone: bool = False
    is_joining: bool = False
    formed: RoundFormed | None = None

    @property
    def leaves(self) -> bool:
        """SIGTERM to one node means preemption: an elastic job continues without it. Ctrl-C stops the job."""
        return self.elastic and self.signal == signals.SIGTERM and not self.stops_job


def is_past(state: State, generation: int) -> bool:
    """Whether news of a generation comes too late: workers of a later one run, and a node's loss concerned the earlier one.

    While the nodes are about to meet, news of the last generation still counts.
    """
    return generation < state.generation - (state.phase is Phase.JOINING)


def awaits_sessions(state: State) -> bool:
    """Whether all workers of this node are in a session, and some other node has not said yet that its own are."""
    return (
        state.phase is Phase.RUNNING
        and state.said_in_session
        and not state.has_left
        and len(state.in_session) < state.nodes
    )


def is_at_full_strength(state: State) -> bool:
    """Whether all workers of all nodes are in a session, so that there is something a spare could take over."""
    return (
        state.phase is Phase.RUNNING
        and bool(state.running)
        and state.running <= state.kept
        and not (state.arriving or state.lost or state.has_left)
        and (state.num_nodes == 1 or len(state.in_session) == state.nodes)
    )

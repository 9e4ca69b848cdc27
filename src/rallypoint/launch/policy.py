"""What the supervisor does next: decisions only.

Theory of operation
-------------------
``decide(now, state, event)`` returns a new state, commands, and the reason in words. The shell (``supervisor.py``)
gathers events and executes commands. It never decides.

::

    JOINING ──round formed──▶ RUNNING ──all ended well──▶ SWEEPING ──swept──▶ WAITING ──peers done──▶ ENDED
       ▲                         │ failure, here or on a peer; signal            (several nodes only)
       │                         │ (a symptom first: LISTENING, for a moment)
       │                         ▼
       └──── restart ──────── STOPPING ──all ended, or grace over──▶ SWEEPING ──swept──▶ ENDED

Rules:

1. One failure ends the generation for all nodes, because workers wait for each other in collectives.
2. The first event that ends a generation determines what follows it (``aim``). Later failures are consequences. A
   signal overrules a restart.
3. The restart budget belongs to the job. The round says how much of it is used, so all nodes agree. A failure is
   charged. In ``elastic`` jobs, a node that is lost, leaves or joins is not. A failure that reports only a lost peer
   (a *symptom*) is charged only if the next round misses no node and no node ended the generation for such a change.
   With ``restart_window``, restarts that were longer ago count no longer. The round says how long ago each was.
4. A generation is over when it is ``swept``: none of its processes is left when the next one starts.
5. An elastic node whose workers have succeeded leaves at once. The node that serves the job's store (``serves``) stays
   until all others have finished, through all their rounds.
6. A worker in a session (``rallypoint.elastic``) survives its peers. If one fails while all others are in a session, or start in
   order to enter one, only it is replaced, and the others are told (``Replace``). This is limited to ``max_losses`` in
   ``loss_window`` seconds, and not done for an error that came at the same step before. With several nodes, the loss is told to
   all of them first (``TellLoss``). They read of losses in one order, so they number them alike. A node that cannot keep its
   workers says so by failing: then all restart.
7. If all workers of an elastic node are in a session, the loss of another node does not stop them: they are held (REJOINING) while
   the nodes meet again. If the round's plan says that all survivors keep their ranks and other nodes fill the free ones, the
   workers continue, and the newcomers' take the lost ones' places. Otherwise all restart, in the round that has formed. A
   node that the others have given up as lost, or left out of the round, ends its workers.
8. A symptom does not stop the other workers at once, because the one with the cause may still be cleaning up. For
   ``moment`` seconds the supervisor listens to them and asks which exceptions they handle. Then it sends SIGTERM.
"""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never


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


# Processes that outlive all workers (daemons, forgotten children) get SIGTERM and this long.
LEFTOVER_GRACE = 1.0
# The workers are asked a second time this long before the moment ends.
ANSWER_TIME = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One node's supervisor.

    Args:
        grace: seconds between SIGTERM and SIGKILL.
        moment: seconds after a symptom in which another worker may report the cause, before SIGTERM.
        num_nodes: with one node there are no peers to wait for.
        elastic: members may come and go; else a lost node is the end.
        serves: this node serves the job's store.
        restarts: how much of the budget is used.
        restart_window: seconds after which a restart no longer counts; 0: it always does.
        charged: with a window, when the restarts were that count.
        verdict: what this generation's end means for the budget.
        running: local indices of workers that have not ended.
        kill_at: STOPPING: when SIGKILL is due. LISTENING: when its next step is due.
        asked_again: the workers were asked a second time; LISTENING is about to end.
        signal: the first signal received, if any.
        stops_job: all nodes have received it.
        passed: signals for the workers alone; the job continues.
        sigterm_repeats: SIGTERM may come several times for one reason, as from Slurm: then it hurries nobody.
        max_losses: how many workers may be replaced in place within ``loss_window`` seconds.
        kept: local indices of workers in a session.
        arriving: local indices of workers that take a lost one's place and have not entered their session.
        losses: when workers were replaced, on any node.
        replaced: how many since the round formed, on all nodes.
        lost: local indices of workers whose loss was told to all nodes, and not read yet.
        nodes: how many are in the round.
        in_session: ranks of the nodes whose workers have all entered a session.
        without_survivors: those of them whose workers are all to be replaced.
        said_in_session: this node has told the others that its workers are in a session.
        has_left: a worker's session has ended.
        is_sharded: no other worker has the state of this node's: what is lost with a node cannot be had.
        is_joining: this node is to be in the next round already, while it ends its workers.
        formed: that round, if it has formed meanwhile.
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
    is_sharded: bool = False
    is_joining: bool = False
    formed: RoundFormed | None = None

    @property
    def leaves(self) -> bool:
        """SIGTERM to one node means preemption: an elastic job continues without it. Ctrl-C stops the job."""
        return self.elastic and self.signal == signals.SIGTERM and not self.stops_job


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundFormed:
    """The nodes have agreed.

    Args:
        num_workers: how many to start on this node.
        generation: the job's.
        restarts: how much of the job's budget is used.
        ages: with a window, how many seconds ago these restarts were; one that leads to this round is not among them.
        serves: this node serves the job's store.
        nodes: how many are in the round.
        keepers: ranks of the nodes that keep their workers; the others' take over lost ones. None: all start anew.
        is_keeper: this node is one of them.
        replaced: how many workers were replaced since the session began, if any node keeps its own.
    """

    num_workers: int
    generation: int = 0
    restarts: int = 0
    serves: bool = False
    nodes: int = 1
    keepers: frozenset[int] | None = None
    is_keeper: bool = False
    replaced: int = 0
    ages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker has ended.

    Args:
        symptom: it only reports a lost peer, or the supervisor stopped it.
        again: another one in its place would fail alike: it raised what a replaced one had raised at the same step, or its session
            could not begin.
    """

    index: int
    failed: bool
    symptom: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class SessionEntered:
    """A worker is in a session: it survives the loss of others. ``sharded``: no other worker has its state."""

    index: int
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class SessionLeft:
    """A worker's session has ended well."""

    index: int


@dataclass(frozen=True, slots=True)
class NodeInSession:
    """All workers of a node are in a session; or, if not ``inside``, one of them has left it. Of this node, too."""

    node_rank: int
    inside: bool


@dataclass(frozen=True, slots=True)
class LossTold:
    """Several nodes: all are told that a worker of a session is lost, in the same order.

    Args:
        node_rank: where.
        index: its local index, if it is this node's.
        survivors: whether other workers of that node are in the session.
    """

    node_rank: int
    index: int | None = None
    survivors: bool = True


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """Another node reported a failure in a generation."""

    node_rank: int
    generation: int
    symptom: bool = False


@dataclass(frozen=True, slots=True)
class JobHangs:
    """Nothing moves, or another node has found that out, and the job is not to go on like that.

    Args:
        is_own: this node has found it out.
        restarts: all workers are restarted while restarts are left; otherwise the job fails in any case.
    """

    is_own: bool
    restarts: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Another node is lost, or (``is_own``) the others consider this one lost. With fixed membership, it is not replaced."""

    node_rank: int
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The next round has formed without this node, which waits for a later one."""


@dataclass(frozen=True, slots=True)
class NotKept:
    """The round counts on workers that a node has had to stop. From all nodes, this one included."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class PeerLeaves:
    """Another node leaves in an orderly way, for example because it is preempted."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class NodeWaiting:
    """A node waits to be admitted, and there is room."""


@dataclass(frozen=True, slots=True)
class PeersDone:
    """All nodes have succeeded."""


@dataclass(frozen=True, slots=True)
class PeersStopped:
    """A user stopped another node: the job ends without a restart."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """``everywhere``: all nodes of an elastic job have received it."""

    number: int
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The time ``kill_at`` has come."""


@dataclass(frozen=True, slots=True)
class Swept:
    """No process of the generation is left."""


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """The job succeeded while this node waited for a round."""


@dataclass(frozen=True, slots=True)
class Broken:
    """This node cannot continue: it has lost its fork server."""

    reason: str


Event = (
    RoundFormed
    | WorkerEnded
    | SessionEntered
    | SessionLeft
    | NodeInSession
    | LossTold
    | JobHangs
    | PeerFailed
    | PeerLost
    | LeftOut
    | NotKept
    | PeerLeaves
    | NodeWaiting
    | PeersDone
    | PeersStopped
    | SignalReceived
    | GraceOver
    | Swept
    | NotNeeded
    | Broken
)

# -- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other nodes for a generation. ``restarts`` and ``verdict``: what this node knows about the budget."""

    generation: int
    restarts: int = 0
    verdict: Verdict = Verdict.NONE


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """``takes_over``: in place of a lost node's workers, whose peers are in a session."""

    takes_over: bool = False


@dataclass(frozen=True, slots=True)
class HoldWorkers:
    """A node is lost: those in a session wait until the nodes have met again."""


@dataclass(frozen=True, slots=True)
class KeepWorkers:
    """The nodes have met again: tell those in a session where to meet, and start a worker in place of each of ``lost``."""

    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a worker in place of a lost one, and tell those in a session. None: another node does."""

    index: int | None


@dataclass(frozen=True, slots=True)
class TellLoss:
    """Tell all nodes, this one included, that a worker of a session is lost."""

    index: int
    survivors: bool


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    number: int


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send the workers a signal that does not end the job."""

    number: int


@dataclass(frozen=True, slots=True)
class AskWorkers:
    """Ask running workers which exception they are handling."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """End the remaining processes: SIGTERM, ``grace`` seconds, SIGKILL."""

    grace: float


@dataclass(frozen=True, slots=True)
class TellPeers:
    """``failed``, ``done``, ``stopped`` (the job), ``leaving`` (this node), ``in session``, ``out of session`` or ``not kept``."""

    what: str


@dataclass(frozen=True, slots=True)
class ReportRestart:
    """Print why the workers are restarted."""


@dataclass(frozen=True, slots=True)
class Finish:
    aim: Aim


Command = (
    Join
    | StartWorkers
    | HoldWorkers
    | KeepWorkers
    | Replace
    | TellLoss
    | SignalWorkers
    | PassOn
    | AskWorkers
    | Sweep
    | TellPeers
    | ReportRestart
    | Finish
)


@dataclass(frozen=True, slots=True)
class Decision:
    state: State
    commands: tuple[Command, ...]
    reason: str


def signal_name(number: int) -> str:
    """``SIGTERM``, or ``signal 40`` for a real-time signal without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start(state: State) -> Decision:
    return Decision(state, (Join(state.generation),), "starting")


def decide(now: float, state: State, event: Event) -> Decision:
    """The next state, the commands, and the reason. Total: it accepts every event in every phase."""
    if state.phase is Phase.ENDED:
        return Decision(state, (), "the job has ended")
    state = _refilled(now, state)
    match event:
        case RoundFormed():
            return _round_formed(now, state, event)
        case WorkerEnded(index, failed, symptom, again):
            if failed and not again and _can_replace(now, state, index):
                return _lose_worker(now, state, index)
            return _worker_ended(now, state, index, failed, symptom)
        case SessionEntered(index, sharded):
            return _session_entered(replace(state, is_sharded=state.is_sharded or sharded), index)
        case SessionLeft(index):
            return _session_left(now, state, index)
        case NodeInSession(node_rank, inside):
            return _node_in_session(state, node_rank, inside)
        case LossTold():
            return _loss_told(now, state, event)
        case PeerFailed(node_rank, generation, symptom):
            return _peer_failed(now, state, node_rank, generation, symptom)
        case JobHangs(is_own, restarts):
            return _hangs(now, state, is_own=is_own, restarts=restarts)
        case PeerLost(node_rank, is_own):
            why = f"node {node_rank} is lost"
            return _node_gone(now, state, why, is_own=is_own)
        case PeerLeaves(node_rank):
            return _node_gone(now, state, f"node {node_rank} leaves", is_own=False)
        case LeftOut():
            return _left_out(now, state)
        case NotKept(node_rank):
            why = f"node {node_rank} could not keep its workers"
            return _membership_changed(now, state, why, fatal=True)
        case NodeWaiting():
            return _membership_changed(now, state, "a node waits to join", fatal=False)
        case PeersDone():
            state = replace(state, peers_done=True)
            if state.phase is Phase.WAITING:
                return _end(state, "every node has ended well")
            return Decision(state, (), "every node has ended well")
        case NotNeeded():
            if state.phase is Phase.REJOINING:
                state = replace(state, peers_done=True, is_joining=False)
                return _stop(now, state, Aim.SUCCEED, "not needed any more", tell=None)
            if state.phase is not Phase.JOINING:
                return Decision(state, (), f"not needed while {state.phase}")
            return _end(replace(state, aim=Aim.SUCCEED, peers_done=True), "not needed any more")
        case PeersStopped(node_rank):
            if state.phase is Phase.WAITING:
                return _end(replace(state, aim=Aim.SIGNALLED), f"node {node_rank} was stopped")
            return _stop(now, state, Aim.SIGNALLED, f"node {node_rank} was told to stop", tell=None)
        case SignalReceived(number, everywhere):
            return _signalled(now, state, number, everywhere=everywhere)
        case GraceOver() if state.phase is Phase.LISTENING:
            return _moment_over(now, state)
        case GraceOver():
            if state.phase is not Phase.STOPPING or state.kill_at is None or now < state.kill_at:
                return Decision(state, (), "grace is not over")
            new = replace(state, phase=Phase.SWEEPING, kill_at=None)
            return Decision(new, (Sweep(0.0),), f"grace of {state.grace:g} s is over")
        case Swept():
            return _swept(now, state)
        case Broken(reason):
            new = replace(state, phase=Phase.ENDED, aim=Aim.FAIL, running=frozenset())
            # An elastic job loses only this node.
            what = "leaving" if state.elastic else "failed"
            tell: tuple[Command, ...] = (TellPeers(what),) if state.num_nodes > 1 else ()
            return Decision(new, (*tell, Finish(Aim.FAIL)), reason)
        case _:
            assert_never(event)


def _refilled(now: float, state: State) -> State:
    """Restarts that were long ago count no longer."""
    if not state.restart_window:
        return state
    charged = tuple(at for at in state.charged if now - at < state.restart_window)
    return replace(state, charged=charged, restarts=len(charged))


def _charged(now: float, state: State, event: RoundFormed) -> State:
    """All nodes count the restarts that the round counts."""
    if not state.restart_window:
        return replace(state, restarts=event.restarts)
    before = tuple(now - age for age in event.ages)
    news = (now,) * (event.restarts - len(before))
    return replace(state, restarts=event.restarts, charged=(*before, *news))


_ALIVE = frozenset({Phase.RUNNING, Phase.LISTENING, Phase.SWEEPING, Phase.WAITING})


def _round_formed(now: float, state: State, event: RoundFormed) -> Decision:
    if state.phase is Phase.REJOINING:
        return _met_again(now, state, event)
    if state.phase is not Phase.JOINING:
        return _formed_early(state, event)
    state = replace(
        _charged(now, state, event),
        generation=event.generation,
        serves=event.serves,
        verdict=Verdict.NONE,
    )
    if event.restarts > state.max_restarts:
        # A failure that could have been the consequence of a lost node was not one, so it is charged after all.
        new = replace(state, phase=Phase.ENDED, aim=Aim.FAIL)
        return Decision(new, (Finish(Aim.FAIL),), "the restart budget is spent")
    running = frozenset(range(event.num_workers))
    new = replace(state, phase=Phase.RUNNING, running=running, aim=Aim.SUCCEED)
    new = replace(
        new,
        nodes=event.nodes,
        has_left=False,
        is_sharded=False,
        replaced=0,
        kept=frozenset(),
        arriving=frozenset(),
        lost=frozenset(),
        in_session=frozenset(),
        without_survivors=frozenset(),
        said_in_session=False,
        is_joining=False,
        formed=None,
    )
    why = f"round {event.generation} formed"
    if event.keepers is None:
        return Decision(new, (StartWorkers(),), why)
    new = replace(_among_keepers(new, event), arriving=running)
    return Decision(new, (StartWorkers(takes_over=True),), f"{why}: taking over lost workers")


def _formed_early(state: State, event: RoundFormed) -> Decision:
    """A round formed that this node was to be in, but its workers are being stopped."""
    why = f"round {event.generation} formed while {state.phase}"
    if not state.is_joining:
        return Decision(state, (), why)
    if state.aim is Aim.RESTART and not event.is_keeper:
        return Decision(replace(state, formed=event), (), why)
    # The others count on this node.
    new = replace(state, is_joining=False, generation=event.generation, serves=event.serves)
    what = {Aim.RESTART: "not kept", Aim.FAIL: "failed"}.get(state.aim, "stopped")
    if state.aim is Aim.SIGNALLED and state.leaves:
        what = "leaving"
    return Decision(new, (TellPeers(what),), why)


def _among_keepers(state: State, event: RoundFormed) -> State:
    """In a round in which some nodes keep their workers. The others are about to enter the session, and have no state yet."""
    assert event.keepers is not None
    nodes = frozenset(range(event.nodes))
    bare = (state.without_survivors | (nodes - event.keepers)) & nodes
    return replace(
        state, replaced=event.replaced, in_session=nodes, without_survivors=bare, nodes=event.nodes
    )


def _met_again(now: float, state: State, event: RoundFormed) -> Decision:
    why = f"round {event.generation} formed"
    spent = event.restarts > state.max_restarts
    if event.keepers is None or not event.is_keeper or spent or state.has_left:
        why = f"{why}, and the workers cannot be kept"
        if not event.is_keeper:
            return _stop(now, replace(state, formed=event), Aim.RESTART, why, tell=None)
        new = replace(state, is_joining=False, generation=event.generation, serves=event.serves)
        return _stop(now, new, Aim.RESTART, why, tell="not kept", verdict=Verdict.CHANGED)
    lost = tuple(sorted(state.lost))
    new = replace(
        _among_keepers(_charged(now, state, event), event),
        phase=Phase.RUNNING,
        generation=event.generation,
        serves=event.serves,
        verdict=Verdict.NONE,
        running=state.running | state.lost,
        arriving=state.arriving | state.lost,
        lost=frozenset(),
        is_joining=False,
    )
    return Decision(new, (KeepWorkers(lost),), f"{why}: the workers keep what they have")


def _after_failure(state: State, symptom: bool) -> tuple[Aim, Verdict]:
    if state.elastic and symptom:
        return Aim.RESTART, Verdict.SUSPECT
    aim = Aim.RESTART if state.restarts < state.max_restarts else Aim.FAIL
    return aim, Verdict.FAILED


def _peer_failed(
    now: float, state: State, node_rank: int, generation: int, symptom: bool
) -> Decision:
    why = f"node {node_rank} failed in generation {generation}"
    aim, verdict = _after_failure(state, symptom)
    if state.phase is Phase.JOINING and generation == state.generation - 1 and aim is Aim.FAIL:
        return _end(replace(state, aim=aim), why)
    if generation != state.generation or state.phase is Phase.JOINING:
        return Decision(state, (), why)
    if state.phase is Phase.WAITING and state.elastic:
        return Decision(state, (), f"{why}: the others continue without this node")
    if state.phase in _ALIVE or (state.verdict is not Verdict.FAILED and not symptom):
        return _stop(now, state, aim, why, tell=None, verdict=verdict, symptom=symptom)
    return Decision(state, (), why)


def _hangs(now: float, state: State, *, is_own: bool, restarts: bool) -> Decision:
    if state.phase is not Phase.RUNNING:
        return Decision(state, (), "the job does not hang any more")
    aim, verdict = _after_failure(state, symptom=False)
    tell = "hangs" if is_own else None
    why = "the job hangs"
    return _stop(now, state, aim if restarts else Aim.FAIL, why, tell=tell, verdict=verdict)


def _membership_changed(now: float, state: State, why: str, *, fatal: bool) -> Decision:
    if not state.elastic:
        if fatal:
            return _stop(now, state, Aim.FAIL, why, tell=None, verdict=Verdict.FAILED)
        return Decision(state, (), f"{why}, but membership is fixed")
    if state.phase is Phase.RUNNING or (state.phase is Phase.LISTENING and fatal):
        return _stop(now, state, Aim.RESTART, why, tell=None, verdict=Verdict.CHANGED)
    if state.phase is Phase.SWEEPING and state.aim is Aim.SUCCEED:
        return Decision(state, (), f"{why}, and the workers of this node have succeeded")
    return Decision(state, (), f"{why} while {state.phase}")


def _node_gone(now: float, state: State, why: str, *, is_own: bool) -> Decision:
    can_keep = (
        state.elastic
        and not is_own
        and not state.has_left
        and not state.is_sharded
        and len(state.in_session) == state.nodes > 1
        and state.running <= state.kept | state.arriving
    )
    if state.phase is Phase.RUNNING and can_keep:
        new = replace(state, phase=Phase.REJOINING, is_joining=True, verdict=Verdict.CHANGED)
        join = Join(state.generation + 1, state.restarts, Verdict.CHANGED)
        return Decision(new, (HoldWorkers(), join), f"{why}; the workers are held")
    if state.phase in {Phase.STOPPING, Phase.SWEEPING} and state.formed is not None:
        # The round that was to follow has lost a member.
        state = replace(state, formed=None, is_joining=False)
    return _membership_changed(now, state, why, fatal=True)


def _left_out(now: float, state: State) -> Decision:
    why = "the next round has formed without this node"
    if state.phase is not Phase.REJOINING:
        return Decision(state, (), why)
    return _stop(now, state, Aim.RESTART, why, tell=None, verdict=Verdict.CHANGED)


def _worker_ended(now: float, state: State, index: int, failed: bool, symptom: bool) -> Decision:
    state = replace(state, running=state.running - {index})
    if state.phase in {Phase.RUNNING, Phase.LISTENING} and failed:
        aim, verdict = _after_failure(state, symptom)
        # Report the first failure, and the cause if it comes later.
        tell = "failed" if state.phase is Phase.RUNNING or not symptom else None
        why = f"worker {index} failed"
        return _stop(now, state, aim, why, tell=tell, verdict=verdict, symptom=symptom)
    if state.phase is Phase.LISTENING and not state.running:
        new = replace(state, phase=Phase.SWEEPING, kill_at=None)
        return Decision(new, (Sweep(min(LEFTOVER_GRACE, state.grace)),), "all workers have ended")
    if state.phase is Phase.RUNNING:
        if not state.running and not state.lost:
            new = replace(state, phase=Phase.SWEEPING)
            return Decision(new, (Sweep(LEFTOVER_GRACE),), "all workers ended well")
    elif state.phase is Phase.REJOINING:
        new = replace(state, kept=state.kept - {index}, arriving=state.arriving - {index})
        if failed:
            return Decision(
                replace(new, lost=state.lost | {index}, said_in_session=False),
                (),
                f"worker {index} failed while the nodes meet again",
            )
        return Decision(replace(new, has_left=True), (), f"worker {index} has ended well")
    elif state.phase is Phase.STOPPING:
        commands: tuple[Command, ...] = ()
        if failed and not symptom and state.verdict is Verdict.SUSPECT and state.signal is None:
            # The cause arrives after its consequence. (Told to stop, the worker most likely ends of the same signal.)
            aim, verdict = _after_failure(state, symptom)
            state = replace(state, aim=_overruled(state.aim, aim), verdict=verdict)
            commands = (TellPeers("failed"),) if state.num_nodes > 1 else ()
        if not state.running:
            new = replace(state, phase=Phase.SWEEPING, kill_at=None)
            grace = min(LEFTOVER_GRACE, state.grace)
            return Decision(new, (*commands, Sweep(grace)), "all workers have ended")
        return Decision(state, commands, f"worker {index} ended, {len(state.running)} still run")
    return Decision(state, (), f"worker {index} ended, {len(state.running)} still run")


# -- sessions -------------------------------------------------------------------------------------


def _can_replace(now: float, state: State, index: int) -> bool:
    others = state.running - {index}
    recent = [at for at in state.losses if now - at < state.loss_window]
    if state.num_nodes == 1:
        others_can = bool(others & state.kept)
    else:
        others_can = len(state.in_session) == state.nodes  # LossTold looks for survivors
    return (
        state.phase is Phase.RUNNING
        and index in state.running
        and others_can
        and not state.has_left
        and others <= state.kept | state.arriving
        and len(recent) + len(state.lost) < state.max_losses
    )


def is_past(state: State, generation: int) -> bool:
    """Whether news about a generation come too late: workers of a later one run, and the loss of a node was that of the earlier one.

    Where the nodes are about to meet, news of the last one still count.
    """
    return generation < state.generation - (state.phase is Phase.JOINING)


def is_at_full_strength(state: State) -> bool:
    """Whether all workers of all nodes are in a session, so that there is something a spare could take over."""
    return (
        state.phase is Phase.RUNNING
        and bool(state.running)
        and state.running <= state.kept
        and not (state.arriving or state.lost or state.has_left)
        and (state.num_nodes == 1 or len(state.in_session) == state.nodes)
    )


def _lose_worker(now: float, state: State, index: int) -> Decision:
    why = f"worker {index} failed; the others keep what they have"
    if state.num_nodes == 1:
        return _replace_worker(now, state, index, why)
    survivors = bool(state.kept - {index})
    new = replace(
        state,
        running=state.running - {index},
        kept=state.kept - {index},
        arriving=state.arriving - {index},
        lost=state.lost | {index},
        said_in_session=state.said_in_session and survivors,
    )
    return Decision(new, (TellLoss(index, survivors),), why)


def _replace_worker(now: float, state: State, index: int | None, why: str) -> Decision:
    new = replace(
        state,
        replaced=state.replaced + 1,
        losses=(*(at for at in state.losses if now - at < state.loss_window), now),
    )
    if index is not None:
        new = replace(
            new,
            running=state.running | {index},
            kept=state.kept - {index},
            arriving=state.arriving | {index},
            lost=state.lost - {index},
        )
    return Decision(new, (Replace(index),), why)


def _session_entered(state: State, index: int) -> Decision:
    new = replace(state, kept=state.kept | {index}, arriving=state.arriving - {index})
    if new.num_nodes == 1 or new.said_in_session or new.lost or not new.running <= new.kept:
        return Decision(new, (), f"worker {index} is in a session")
    new = replace(new, said_in_session=True)
    return Decision(new, (TellPeers("in session"),), "all workers of this node are in a session")


def _session_left(now: float, state: State, index: int) -> Decision:
    told = state.said_in_session
    new = replace(state, kept=state.kept - {index}, said_in_session=False, has_left=True)
    commands = (TellPeers("out of session"),) if told else ()
    why = f"worker {index} left its session"
    if state.phase is Phase.RUNNING and state.arriving:
        # It left just when another one was lost, whose successor would wait for it.
        aim, verdict = _after_failure(new, symptom=False)
        return _stop(now, new, aim, why, tell="failed", verdict=verdict)
    return Decision(new, commands, why)


def _node_in_session(state: State, node_rank: int, inside: bool) -> Decision:
    node = frozenset({node_rank})
    if inside:
        new = replace(
            state,
            in_session=state.in_session | node,
            without_survivors=state.without_survivors - node,
        )
        return Decision(new, (), f"node {node_rank} is in a session")
    new = replace(state, in_session=state.in_session - node)
    return Decision(new, (), f"node {node_rank} has left its session")


def _loss_told(now: float, state: State, event: LossTold) -> Decision:
    """Another worker takes the lost one's place if all nodes can keep theirs, and anyone has the state."""
    why = f"a worker of node {event.node_rank} is lost"
    if state.phase is Phase.REJOINING:
        return Decision(state, (), f"{why} while the nodes meet again")
    if not event.survivors:
        bare = state.without_survivors | {event.node_rank}
        state = replace(state, without_survivors=bare)
    can_keep = state.running <= state.kept | state.arriving and not state.has_left
    anyone = bool(state.in_session - state.without_survivors)
    if state.phase is Phase.RUNNING and can_keep and anyone:
        return _replace_worker(now, state, event.index, why)
    if event.index is not None:
        state = replace(state, lost=state.lost - {event.index})
    if state.phase in {Phase.STOPPING, Phase.LISTENING, Phase.JOINING}:
        return Decision(state, (), f"{why}, but all workers are being stopped")
    aim, verdict = _after_failure(state, symptom=False)
    why = f"{why}, and not all others can be kept"
    return _stop(now, state, aim, why, tell="failed", verdict=verdict)


def _stop(
    now: float,
    state: State,
    aim: Aim,
    why: str,
    tell: str | None,
    verdict: Verdict = Verdict.NONE,
    symptom: bool = False,
) -> Decision:
    """Go from RUNNING (or a later phase of success) to STOPPING; after a symptom, to LISTENING first."""
    commands: list[Command] = []
    order = list(Verdict)
    state = replace(state, verdict=max(state.verdict, verdict, key=order.index))
    # Others have heard that this node was told to stop or to leave. A failure now would be held against them.
    late = tell == "failed" and state.signal is not None
    if tell is not None and state.num_nodes > 1 and not late:
        commands.append(TellPeers(tell))
    if state.phase is Phase.JOINING:
        new = replace(state, phase=Phase.ENDED, aim=aim)
        return Decision(new, (*commands, Finish(aim)), why)
    if state.phase is Phase.WAITING:
        # The workers of this node have succeeded and are swept.
        return _swept(now, replace(state, phase=Phase.SWEEPING, aim=aim), tuple(commands), why)
    if state.phase is Phase.SWEEPING:
        return Decision(replace(state, aim=_overruled(state.aim, aim)), tuple(commands), why)
    if state.phase is Phase.STOPPING:
        return Decision(replace(state, aim=_overruled(state.aim, aim)), tuple(commands), why)
    aim = _overruled(state.aim, aim)
    # If no worker is left to report the cause, another node may be: as a failure of its own, or by being lost.
    may_be_told = state.running or (state.verdict is Verdict.SUSPECT and state.nodes > 1)
    listens = symptom and state.moment > 0 and may_be_told
    if listens and state.phase is Phase.LISTENING:
        return Decision(replace(state, aim=aim), tuple(commands), why)
    if not state.running and not listens:
        new = replace(state, phase=Phase.SWEEPING, aim=aim, kill_at=None)
        return Decision(new, (*commands, Sweep(min(LEFTOVER_GRACE, state.grace))), why)
    if listens:
        ask_again_at = now + max(0.0, state.moment - ANSWER_TIME)
        new = replace(
            state, phase=Phase.LISTENING, aim=aim, kill_at=ask_again_at, asked_again=False
        )
        return Decision(
            new, (*commands, AskWorkers()), f"{why}: a symptom, the cause is not known yet"
        )
    number = state.signal if aim is Aim.SIGNALLED and state.signal else signals.SIGTERM
    commands.append(SignalWorkers(number))
    new = replace(state, phase=Phase.STOPPING, aim=aim, kill_at=now + state.grace)
    return Decision(new, tuple(commands), why)


def _moment_over(now: float, state: State) -> Decision:
    if state.kill_at is None or now < state.kill_at:
        return Decision(state, (), "the moment is not over")
    if not state.asked_again:
        new = replace(state, asked_again=True, kill_at=now + ANSWER_TIME)
        return Decision(new, (AskWorkers(),), "no worker has reported the cause: asking again")
    return _stop(now, state, state.aim, "no worker has reported the cause", tell=None)


def _overruled(aim: Aim, by: Aim) -> Aim:
    """Which of two aims wins: a signal over all others, a failure over a restart, a restart over success."""
    order = [Aim.SUCCEED, Aim.RESTART, Aim.FAIL, Aim.SIGNALLED]
    return max(aim, by, key=order.index)


def _signalled(now: float, state: State, number: int, *, everywhere: bool) -> Decision:
    name = signal_name(number)
    if number in state.passed:
        # A worker that has not started has no handler; the signal would end it.
        commands = (PassOn(number),) if state.running else ()
        return Decision(state, commands, f"{name} received: for the workers")
    if state.signal is None:
        state = replace(state, signal=number, stops_job=everywhere)
        tell = "leaving" if state.leaves else "stopped"
        decision = _stop(now, state, Aim.SIGNALLED, f"{name} received", tell=tell)
        if state.phase is Phase.STOPPING:
            # It is stopping for another reason: pass the signal on without extending the grace period.
            return replace(decision, commands=(*decision.commands, SignalWorkers(number)))
        return decision
    if state.sigterm_repeats and number == state.signal == signals.SIGTERM:
        return Decision(state, (), f"{name} received again, for the same reason")
    if state.phase in {Phase.STOPPING, Phase.RUNNING, Phase.SWEEPING}:
        new = replace(state, phase=Phase.SWEEPING, kill_at=None)
        return Decision(new, (Sweep(0.0),), f"{name} received again: ending now")
    return Decision(state, (), f"{name} received again")


def _swept(now: float, state: State, commands: tuple[Command, ...] = (), why: str = "") -> Decision:
    if state.phase is not Phase.SWEEPING:
        return Decision(state, commands, why or f"swept while {state.phase}")
    if state.aim is Aim.RESTART:
        new = replace(
            state,
            phase=Phase.JOINING,
            generation=state.generation + 1,
            aim=Aim.SUCCEED,
            kill_at=None,
            peers_done=False,
            is_joining=False,
            formed=None,
        )
        if state.formed is not None:
            decision = _round_formed(now, new, state.formed)
            return replace(decision, commands=(*commands, ReportRestart(), *decision.commands))
        if state.is_joining:
            return Decision(new, (*commands, ReportRestart()), why or "waiting for the next round")
        join = Join(new.generation, state.restarts, state.verdict)
        commands = (*commands, ReportRestart(), join)
        return Decision(new, commands, why or "restarting")
    if state.aim is Aim.SUCCEED and state.num_nodes > 1 and not state.peers_done:
        if state.elastic and not state.serves:
            return _end(state, "all workers ended well", (*commands, TellPeers("done")))
        new = replace(state, phase=Phase.WAITING)
        return Decision(new, (*commands, TellPeers("done")), "waiting for the other nodes")
    return _end(state, why or "nothing is left", commands)


def _end(state: State, why: str, commands: tuple[Command, ...] = ()) -> Decision:
    return Decision(replace(state, phase=Phase.ENDED), (*commands, Finish(state.aim)), why)

"""What the supervisor does next: decisions only.

Theory of operation
-------------------
``decide(now, state, event)`` gives a new state, commands for the shell to carry out, and the reason in
words. The shell (``supervisor.py``) gathers events and interprets commands; it never decides.

::

    JOINING ──round formed──▶ RUNNING ──all ended well──▶ SWEEPING ──swept──▶ WAITING ──peers done──▶ ENDED
       ▲                         │ failure, here or on a peer; signal            (several nodes only)
       │                         ▼
       └──── restart ──────── STOPPING ──all ended, or grace over──▶ SWEEPING ──swept──▶ ENDED

Rules:

1. One failure ends the generation for all: workers wait for each other in collectives.
2. What ends a generation first decides what follows it (``aim``); later failures are victims. A signal
   overrules a restart: who says stop means it.
3. The restart budget is the job's: generation 0 and ``max_restarts`` more.
4. A generation is over only when ``swept``: nothing of it is left when the next one starts.
5. The channel to workers has room for a third answer beside stop and restart (tell the survivors the
   new generation): it would be another ``Aim`` here and another command there.
"""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never


class Phase(StrEnum):
    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    SWEEPING = "sweeping"
    WAITING = "waiting"
    ENDED = "ended"


class Aim(StrEnum):
    """What follows once everything of this generation is gone."""

    SUCCEED = "succeed"
    RESTART = "restart"
    FAIL = "fail"
    SIGNALLED = "signalled"


# What is left after all workers ended (daemons, forgotten children) gets SIGTERM and this long.
LEFTOVER_GRACE = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One node's supervisor.

    Args:
        grace: seconds between SIGTERM and SIGKILL.
        num_nodes: with one node there are no peers to wait for.
        running: local indices of workers that have not ended.
        kill_at: when STOPPING turns into SIGKILL.
        signal: the first signal received, if any.
    """

    max_restarts: int
    grace: float
    num_nodes: int = 1
    phase: Phase = Phase.JOINING
    generation: int = 0
    running: frozenset[int] = frozenset()
    aim: Aim = Aim.SUCCEED
    kill_at: float | None = None
    signal: int | None = None
    peers_done: bool = False


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundFormed:
    """All nodes agreed; ``num_workers`` are to be started here."""

    num_workers: int


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    index: int
    failed: bool


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """Another node told of a failure in this generation."""

    node_rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Another node is gone. Membership is fixed, so nobody takes its place: the job fails."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class PeersDone:
    """Every node has ended well."""


@dataclass(frozen=True, slots=True)
class PeersStopped:
    """Another node was told to stop by a person: the job ends, without restart."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class SignalReceived:
    number: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The time ``kill_at`` has come."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Nothing of the generation is left."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The job cannot go on here: fork server lost, rendezvous impossible."""

    reason: str


Event = (
    RoundFormed
    | WorkerEnded
    | PeerFailed
    | PeerLost
    | PeersDone
    | PeersStopped
    | SignalReceived
    | GraceOver
    | Swept
    | Broken
)

# -- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other nodes for this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class StartWorkers:
    pass


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    number: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """End whatever is left: SIGTERM, ``grace`` seconds, SIGKILL."""

    grace: float


@dataclass(frozen=True, slots=True)
class TellPeers:
    """``failed``, ``done`` or ``stopped``."""

    what: str


@dataclass(frozen=True, slots=True)
class ReportRestart:
    """Say in a line why there is a next generation."""


@dataclass(frozen=True, slots=True)
class Finish:
    aim: Aim


Command = Join | StartWorkers | SignalWorkers | Sweep | TellPeers | ReportRestart | Finish


@dataclass(frozen=True, slots=True)
class Decision:
    state: State
    commands: tuple[Command, ...]
    reason: str


def start(state: State) -> Decision:
    return Decision(state, (Join(state.generation),), "starting")


def decide(now: float, state: State, event: Event) -> Decision:
    """The next state, what to do, and why. Total: every event is answered in every phase."""
    if state.phase is Phase.ENDED:
        return Decision(state, (), "the job has ended")
    match event:
        case RoundFormed(num_workers):
            if state.phase is not Phase.JOINING:
                return Decision(state, (), f"a round formed while {state.phase}")
            running = frozenset(range(num_workers))
            new = replace(state, phase=Phase.RUNNING, running=running, aim=Aim.SUCCEED)
            return Decision(new, (StartWorkers(),), f"round {state.generation} formed")
        case WorkerEnded(index, failed):
            return _worker_ended(now, state, index, failed)
        case PeerFailed(node_rank, generation):
            if generation != state.generation or state.phase not in _ALIVE:
                return Decision(state, (), f"node {node_rank} failed in generation {generation}")
            return _stop(now, state, _after_failure(state), f"node {node_rank} failed", tell=None)
        case PeerLost(node_rank):
            return _stop(now, state, Aim.FAIL, f"node {node_rank} is lost", tell=None)
        case PeersDone():
            if state.phase is Phase.WAITING:
                return _end(state, "every node has ended well")
            return Decision(replace(state, peers_done=True), (), "every node has ended well")
        case PeersStopped(node_rank):
            if state.phase is Phase.WAITING:
                return _end(replace(state, aim=Aim.SIGNALLED), f"node {node_rank} was stopped")
            return _stop(now, state, Aim.SIGNALLED, f"node {node_rank} was told to stop", tell=None)
        case SignalReceived(number):
            return _signalled(now, state, number)
        case GraceOver():
            if state.phase is not Phase.STOPPING or state.kill_at is None or now < state.kill_at:
                return Decision(state, (), "grace is not over")
            new = replace(state, phase=Phase.SWEEPING, kill_at=None)
            return Decision(new, (Sweep(0.0),), f"grace of {state.grace:g} s is over")
        case Swept():
            return _swept(state)
        case Broken(reason):
            new = replace(state, phase=Phase.ENDED, aim=Aim.FAIL, running=frozenset())
            tell: tuple[Command, ...] = (TellPeers("failed"),) if state.num_nodes > 1 else ()
            return Decision(new, (*tell, Finish(Aim.FAIL)), reason)
        case _:
            assert_never(event)


_ALIVE = frozenset({Phase.RUNNING, Phase.SWEEPING, Phase.WAITING})


def _after_failure(state: State) -> Aim:
    return Aim.RESTART if state.generation < state.max_restarts else Aim.FAIL


def _worker_ended(now: float, state: State, index: int, failed: bool) -> Decision:
    state = replace(state, running=state.running - {index})
    if state.phase is Phase.RUNNING:
        if failed:
            return _stop(now, state, _after_failure(state), f"worker {index} failed", tell="failed")
        if not state.running:
            new = replace(state, phase=Phase.SWEEPING)
            return Decision(new, (Sweep(LEFTOVER_GRACE),), "all workers ended well")
    elif state.phase is Phase.STOPPING and not state.running:
        new = replace(state, phase=Phase.SWEEPING, kill_at=None)
        grace = min(LEFTOVER_GRACE, state.grace)
        return Decision(new, (Sweep(grace),), "all workers have ended")
    return Decision(state, (), f"worker {index} ended, {len(state.running)} still run")


def _stop(now: float, state: State, aim: Aim, why: str, tell: str | None) -> Decision:
    """Leave RUNNING (or a later phase of success) for STOPPING."""
    commands: list[Command] = []
    if tell is not None and state.num_nodes > 1:
        commands.append(TellPeers(tell))
    if state.phase is Phase.JOINING:
        new = replace(state, phase=Phase.ENDED, aim=aim)
        return Decision(new, (*commands, Finish(aim)), why)
    if state.phase is Phase.WAITING:
        # Everything of ours has ended well and been swept already.
        return _swept(replace(state, phase=Phase.SWEEPING, aim=aim), tuple(commands), why)
    if state.phase is Phase.SWEEPING:
        return Decision(replace(state, aim=_overruled(state.aim, aim)), tuple(commands), why)
    if state.phase is Phase.STOPPING:
        return Decision(replace(state, aim=_overruled(state.aim, aim)), tuple(commands), why)
    if not state.running:
        new = replace(state, phase=Phase.SWEEPING, aim=aim)
        return Decision(new, (*commands, Sweep(min(LEFTOVER_GRACE, state.grace))), why)
    number = state.signal if aim is Aim.SIGNALLED and state.signal else signals.SIGTERM
    commands.append(SignalWorkers(number))
    new = replace(state, phase=Phase.STOPPING, aim=aim, kill_at=now + state.grace)
    return Decision(new, tuple(commands), why)


def _overruled(aim: Aim, by: Aim) -> Aim:
    """Which aim wins when two ends meet: a signal over all, a failure over success."""
    order = [Aim.SUCCEED, Aim.RESTART, Aim.FAIL, Aim.SIGNALLED]
    return max(aim, by, key=order.index)


def _signalled(now: float, state: State, number: int) -> Decision:
    name = signals.Signals(number).name
    if state.signal is None:
        state = replace(state, signal=number)
        decision = _stop(now, state, Aim.SIGNALLED, f"{name} received", tell="stopped")
        if state.phase is Phase.STOPPING:
            # Already stopping for another reason: pass the signal on, the grace time stays as it is.
            return replace(decision, commands=(*decision.commands, SignalWorkers(number)))
        return decision
    if state.phase in {Phase.STOPPING, Phase.RUNNING, Phase.SWEEPING}:
        new = replace(state, phase=Phase.SWEEPING, kill_at=None)
        return Decision(new, (Sweep(0.0),), f"{name} received again: ending now")
    return Decision(state, (), f"{name} received again")


def _swept(state: State, commands: tuple[Command, ...] = (), why: str = "") -> Decision:
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
        )
        commands = (*commands, ReportRestart(), Join(new.generation))
        return Decision(new, commands, why or "restarting")
    if state.aim is Aim.SUCCEED and state.num_nodes > 1 and not state.peers_done:
        new = replace(state, phase=Phase.WAITING)
        return Decision(new, (*commands, TellPeers("done")), "waiting for the other nodes")
    return _end(state, why or "nothing is left", commands)


def _end(state: State, why: str, commands: tuple[Command, ...] = ()) -> Decision:
    return Decision(replace(state, phase=Phase.ENDED), (*commands, Finish(state.aim)), why)

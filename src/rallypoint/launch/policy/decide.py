"""The decision on each event."""

from __future__ import annotations

import signal as signals
from dataclasses import replace
from typing import assert_never

from rallypoint._core.signal_repeats import is_repeat

from . import sessions
from .commands import (
    Command,
    Decision,
    Finish,
    HoldWorkers,
    Join,
    PassOn,
    SignalWorkers,
    Sweep,
    TellPeers,
)
from .events import (
    AdmissionAsked,
    Broken,
    Event,
    GraceOver,
    JobHangs,
    LeftOut,
    LossTold,
    NodeInSession,
    NodeWaiting,
    NotKept,
    NotNeeded,
    PeerFailed,
    PeerLeaves,
    PeerLost,
    PeersDone,
    PeersStopped,
    RoundFormed,
    SessionEntered,
    SessionExpected,
    SessionFixed,
    SessionLeft,
    SessionMet,
    SignalReceived,
    Swept,
    WorkerEnded,
)
from .generations import (
    LEFTOVER_GRACE,
    RECORD_LOST,
    RECORDS_LOST,
    after_failure,
    end,
    moment_over,
    overruled,
    round_formed,
    stop,
    swept,
    with_reason,
)
from .state import Aim, Phase, State, Verdict


def signal_name(number: int) -> str:
    """``SIGTERM``, or ``signal 40`` for a real-time signal without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start(state: State) -> Decision:
    """The first decision."""
    return Decision(state, (Join(state.generation),), "starting")


def decide(now: float, state: State, event: Event) -> Decision:
    """The next state, the commands, and the reason. Total: it accepts every event in every phase."""
    if state.phase is Phase.ENDED:
        return Decision(state, (), "the job has ended")
    state = _refilled(now, state)
    match event:
        case RoundFormed():
            return round_formed(now, state, event)
        case WorkerEnded(index, failed, symptom):
            if failed and state.comes and state.is_extra and state.phase is Phase.RUNNING:
                new = replace(state, running=state.running - {index}, fails_alone=True)
                return stop(now, new, Aim.FAIL, "the session goes on without it", tell="leaving")
            if event.record_lost and state.elastic and state.phase in _STARTED:
                return _record_lost(now, state, index, RECORD_LOST.format(index))
            if failed:
                why = sessions.why_not_replaced(now, state, event)
                if not why:
                    return sessions.lose_worker(now, state, index)
                if why == RECORDS_LOST and state.elastic:
                    return _record_lost(now, state, index, why)
                if index in state.running:
                    state = with_reason(state, why)
            return _worker_ended(now, state, index, failed, symptom)
        case SessionEntered(index, sharded, resizes):
            new = replace(
                state,
                is_sharded=state.is_sharded or sharded,
                resizes=state.resizes and resizes,
            )
            return sessions.enter(new, index)
        case SessionFixed():
            return Decision(replace(state, resizes=False), (), "the number of ranks is fixed")
        case SessionMet():
            new = replace(state, comes=False, relied_on=False)
            return Decision(new, (), "the workers of all nodes have met")
        case SessionLeft(index):
            return sessions.leave(now, state, index)
        case NodeInSession(node_rank, False) if state.comes and state.phase is Phase.RUNNING:
            why = (
                f"node {node_rank} has left the session before this one's workers could come to it"
            )
            return stop(now, state, Aim.SUCCEED, why, tell=None)
        case NodeInSession(node_rank, inside):
            return sessions.note_node(state, node_rank, inside)
        case LossTold():
            return sessions.note_loss(now, state, event)
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
            state = with_reason(state, why)
            return _membership_changed(now, state, why, fatal=True)
        case SessionExpected():
            return Decision(replace(state, expects_session=True), (), "a session is expected")
        case AdmissionAsked():
            why = sessions.why_nobody_is_admitted(now, state)
            commands = () if why else (TellPeers("waiting"),)
            return Decision(state, commands, why or "a node asks to be admitted")
        case NodeWaiting():
            return _node_waits(now, state)
        case PeersDone():
            state = replace(state, peers_done=True)
            if state.phase is Phase.WAITING:
                return end(state, "every node has ended well")
            return Decision(state, (), "every node has ended well")
        case NotNeeded():
            if state.phase is Phase.REJOINING:
                state = replace(state, peers_done=True, is_joining=False)
                return stop(now, state, Aim.SUCCEED, "not needed any more", tell=None)
            if state.phase is not Phase.JOINING:
                return Decision(state, (), f"not needed while {state.phase}")
            return end(replace(state, aim=Aim.SUCCEED, peers_done=True), "not needed any more")
        case PeersStopped(node_rank):
            if state.phase is Phase.WAITING:
                return end(replace(state, aim=Aim.SIGNALLED), f"node {node_rank} was stopped")
            return stop(now, state, Aim.SIGNALLED, f"node {node_rank} was told to stop", tell=None)
        case SignalReceived(number, everywhere):
            return _signalled(now, state, number, everywhere=everywhere)
        case GraceOver() if state.phase is Phase.LISTENING:
            return moment_over(now, state)
        case GraceOver():
            if state.phase is not Phase.STOPPING or state.kill_at is None or now < state.kill_at:
                return Decision(state, (), "grace is not over")
            new = replace(state, phase=Phase.SWEEPING, kill_at=None)
            return Decision(new, (Sweep(0.0),), f"grace of {state.grace:g} s is over")
        case Swept():
            return swept(now, state)
        case Broken(reason):
            # An elastic job loses only this node.
            new = replace(
                state,
                phase=Phase.ENDED,
                aim=Aim.FAIL,
                running=frozenset(),
                fails_alone=state.elastic,
            )
            what = "leaving" if state.elastic else "failed"
            tell: tuple[Command, ...] = (TellPeers(what),) if state.num_nodes > 1 else ()
            return Decision(new, (*tell, Finish(Aim.FAIL)), reason)
        case _:
            assert_never(event)


def _refilled(now: float, state: State) -> State:
    """The state without the restarts that are too long ago to count."""
    if not state.restart_window:
        return state
    charged = tuple(at for at in state.charged if now - at < state.restart_window)
    return replace(state, charged=charged, restarts=len(charged))


_STARTED = frozenset({Phase.RUNNING, Phase.LISTENING})
_ALIVE = frozenset({Phase.RUNNING, Phase.LISTENING, Phase.SWEEPING, Phase.WAITING})


def _peer_failed(
    now: float, state: State, node_rank: int, generation: int, symptom: bool
) -> Decision:
    why = f"node {node_rank} failed in generation {generation}"
    aim, verdict = after_failure(state, symptom)
    if state.phase is Phase.JOINING and generation == state.generation - 1 and aim is Aim.FAIL:
        return end(replace(state, aim=aim), why)
    if generation != state.generation or state.phase is Phase.JOINING:
        return Decision(state, (), why)
    if state.phase is Phase.WAITING and state.elastic:
        return Decision(state, (), f"{why}: the others continue without this node")
    if state.phase in _ALIVE or (state.verdict is not Verdict.FAILED and not symptom):
        return stop(now, state, aim, why, tell=None, verdict=verdict, symptom=symptom)
    return Decision(state, (), why)


def _hangs(now: float, state: State, *, is_own: bool, restarts: bool) -> Decision:
    if state.phase is not Phase.RUNNING:
        return Decision(state, (), "the job does not hang any more")
    aim, verdict = after_failure(state, symptom=False)
    tell = "hangs" if is_own else None
    why = "the job hangs"
    return stop(now, state, aim if restarts else Aim.FAIL, why, tell=tell, verdict=verdict)


def _membership_changed(now: float, state: State, why: str, *, fatal: bool) -> Decision:
    if not state.elastic:
        if fatal:
            return stop(now, state, Aim.FAIL, why, tell=None, verdict=Verdict.FAILED)
        return Decision(state, (), f"{why}, but membership is fixed")
    if state.phase is Phase.RUNNING or (state.phase is Phase.LISTENING and fatal):
        return stop(now, state, Aim.RESTART, why, tell=None, verdict=Verdict.CHANGED)
    if state.phase is Phase.SWEEPING and state.aim is Aim.SUCCEED:
        return Decision(state, (), f"{why}, and the workers of this node have succeeded")
    return Decision(state, (), f"{why} while {state.phase}")


def _record_lost(now: float, state: State, index: int, why: str) -> Decision:
    """Another process cannot take this worker's place, because nodes were lost before. That is charged to nobody."""
    new = with_reason(replace(state, running=state.running - {index}), why)
    return stop(now, new, Aim.RESTART, why, tell="not kept", verdict=Verdict.CHANGED)


def _meet_again(state: State, why: str) -> Decision:
    new = replace(
        state,
        phase=Phase.REJOINING,
        is_joining=True,
        verdict=Verdict.CHANGED,
        said_whole=not (state.lost or state.arriving),
    )
    join = Join(state.generation + 1, state.restarts, Verdict.CHANGED)
    return Decision(new, (HoldWorkers(), join), f"{why}; the workers are held")


def _node_waits(now: float, state: State) -> Decision:
    why = "a node waits to join"
    if not sessions.why_not_kept(state) and state.resizes:
        return _meet_again(state, why)
    return _membership_changed(now, state, why, fatal=False)


def _node_gone(now: float, state: State, why: str, *, is_own: bool) -> Decision:
    # This node may be the lost one. If the others have not gone on without it, its workers are as good as theirs.
    not_kept = sessions.why_not_kept(state)
    if not not_kept and state.nodes > 1:
        return _meet_again(state, why)
    if not is_own:
        state = with_reason(state, not_kept)
    if state.phase in {Phase.STOPPING, Phase.SWEEPING} and state.formed is not None:
        # The next round lost a member before it began.
        state = replace(state, formed=None, is_joining=False)
    return _membership_changed(now, state, why, fatal=True)


def _left_out(now: float, state: State) -> Decision:
    why = "the next round has formed without this node"
    if state.phase is not Phase.REJOINING:
        return Decision(state, (), why)
    return stop(now, state, Aim.RESTART, why, tell=None, verdict=Verdict.CHANGED)


def _worker_ended(now: float, state: State, index: int, failed: bool, symptom: bool) -> Decision:
    state = replace(state, running=state.running - {index})
    if state.phase in _STARTED and failed:
        aim, verdict = after_failure(state, symptom)
        # Report the first failure, and the cause if it comes later.
        tell = "failed" if state.phase is Phase.RUNNING or not symptom else None
        why = f"worker {index} failed"
        return stop(now, state, aim, why, tell=tell, verdict=verdict, symptom=symptom)
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
            # The cause arrives after its consequence. (In a job told to stop, the worker most likely died of the same signal.)
            aim, verdict = after_failure(state, symptom)
            state = replace(state, aim=overruled(state.aim, aim), verdict=verdict)
            commands = (TellPeers("failed"),) if state.num_nodes > 1 else ()
        if not state.running:
            new = replace(state, phase=Phase.SWEEPING, kill_at=None)
            grace = min(LEFTOVER_GRACE, state.grace)
            return Decision(new, (*commands, Sweep(grace)), "all workers have ended")
        return Decision(state, commands, f"worker {index} ended, {len(state.running)} still run")
    return Decision(state, (), f"worker {index} ended, {len(state.running)} still run")


def _signalled(now: float, state: State, number: int, *, everywhere: bool) -> Decision:
    name = signal_name(number)
    if number in state.passed:
        # A worker that has not started has no handler; the signal would end it.
        commands = (PassOn(number),) if state.running else ()
        return Decision(state, commands, f"{name} received: for the workers")
    if state.signal is None:
        state = replace(state, signal=number, signalled_at=now, stops_job=everywhere)
        tell = "leaving" if state.leaves else "stopped"
        decision = stop(now, state, Aim.SIGNALLED, f"{name} received", tell=tell)
        if state.phase is Phase.STOPPING:
            # It is stopping for another reason: pass the signal on without extending the grace period.
            return replace(decision, commands=(*decision.commands, SignalWorkers(number)))
        return decision
    if is_repeat(
        state.signal, number, now - state.signalled_at, sigterm_repeats=state.sigterm_repeats
    ):
        return Decision(state, (), f"{name} received again, for the same reason")
    if state.phase in {Phase.STOPPING, Phase.RUNNING, Phase.SWEEPING}:
        new = replace(state, phase=Phase.SWEEPING, kill_at=None)
        return Decision(new, (Sweep(0.0),), f"{name} received again: ending now")
    return Decision(state, (), f"{name} received again")

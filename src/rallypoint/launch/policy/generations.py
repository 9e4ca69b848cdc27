"""The generations of a job: how one begins, ends and is followed by the next."""

from __future__ import annotations

import signal as signals
from dataclasses import replace

from .commands import (
    AskWorkers,
    Command,
    Decision,
    Finish,
    Join,
    KeepWorkers,
    ReportRestart,
    SignalWorkers,
    StartWorkers,
    Sweep,
    TellLoss,
    TellPeers,
)
from .events import RoundFormed
from .state import Aim, Phase, State, Verdict


# Processes that outlive all workers (daemons, forgotten children) get SIGTERM and this long.
LEFTOVER_GRACE = 1.0
# Why no worker is kept.
OVER = "another worker has left the session"
RECORD_LOST = (
    "the record that local rank {} needs for its set-up was lost with the nodes that held it"
)
RECORDS_LOST = "it may have had the last copy of the set-up record that new workers need, as the store that held it is lost"
# The workers are asked a second time this long before the moment ends.
ANSWER_TIME = 0.3


def round_formed(now: float, state: State, event: RoundFormed) -> Decision:
    """The nodes have met: start the workers, or go on with those that were held."""
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
        not_replaced="",
        is_sharded=False,
        resizes=True,
        replaced=0,
        kept=frozenset(),
        arriving=frozenset(),
        lost=frozenset(),
        in_session=frozenset(),
        without_survivors=frozenset(),
        said_in_session=False,
        comes=False,
        relied_on=False,
        began=now,
        expects_session=False,
        is_ending=False,
        is_joining=False,
        formed=None,
    )
    why = f"round {event.generation} formed"
    if event.keepers is None:
        return Decision(new, (StartWorkers(),), why)
    new = replace(_among_keepers(new, event), arriving=running, comes=True, is_extra=event.grows)
    return Decision(new, (StartWorkers(takes_over=True),), f"{why}: taking over lost workers")


def _charged(now: float, state: State, event: RoundFormed) -> State:
    """All nodes count the restarts that the round counts."""
    if not state.restart_window:
        return replace(state, restarts=event.restarts)
    before = tuple(now - age for age in event.ages)
    news = (now,) * (event.restarts - len(before))
    return replace(state, restarts=event.restarts, charged=(*before, *news))


def _formed_early(state: State, event: RoundFormed) -> Decision:
    """A round that this node was to be in has formed while its workers are being stopped."""
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


def with_reason(state: State, why: str) -> State:
    """Remember why a lost worker is not replaced. The first reason counts. In a job without sessions, none does."""
    seen = state.kept | state.arriving | state.lost | state.in_session
    if state.phase is not Phase.RUNNING or not (seen or state.has_left):
        return state
    return replace(state, not_replaced=state.not_replaced or why)


def _met_again(now: float, state: State, event: RoundFormed) -> Decision:
    why = f"round {event.generation} formed"
    spent = event.restarts > state.max_restarts
    relied_on = event.relied_on and state.said_whole
    gone = relied_on and bool(state.lost)
    if event.keepers is None or not event.is_keeper or spent or state.has_left or gone:
        why = f"{why}, and the workers cannot be kept"
        state = replace(state, not_replaced=_why_none_is_kept(state, event))
        if not event.is_keeper:
            return stop(now, replace(state, formed=event), Aim.RESTART, why, tell=None)
        new = replace(state, is_joining=False, generation=event.generation, serves=event.serves)
        return stop(now, new, Aim.RESTART, why, tell="not kept", verdict=Verdict.CHANGED)
    lost = tuple(sorted(state.lost))
    tells: tuple[Command, ...] = ()
    if lost and not state.kept and not event.is_bare:
        # The last worker with the state was lost after this node had said that it has one. The others must know.
        *lost_before, last = lost
        lost, tells = tuple(lost_before), (TellLoss(last, survivors=False),)
    new = replace(
        _among_keepers(_charged(now, state, event), event),
        phase=Phase.RUNNING,
        generation=event.generation,
        serves=event.serves,
        verdict=Verdict.NONE,
        running=state.running.union(lost),
        arriving=state.arriving.union(lost),
        lost=state.lost.difference(lost),
        is_joining=False,
        relied_on=relied_on,
    )
    return Decision(new, (KeepWorkers(lost), *tells), f"{why}: the workers keep what they have")


def _why_none_is_kept(state: State, event: RoundFormed) -> str:
    if state.has_left:
        return OVER
    if event.restarts > state.max_restarts:
        return f"--max-restarts is used up ({state.max_restarts})"
    if event.relied_on and state.said_whole and state.lost:
        return RECORDS_LOST
    return event.not_kept or "this node came to the round without its workers"


def _among_keepers(state: State, event: RoundFormed) -> State:
    """For a round in which some nodes keep their workers. The others' are about to enter the session and have no state yet."""
    assert event.keepers is not None
    nodes = frozenset(range(event.nodes))
    bare = nodes - event.keepers | event.bare
    return replace(
        state, replaced=event.replaced, in_session=nodes, without_survivors=bare, nodes=event.nodes
    )


def after_failure(state: State, symptom: bool) -> tuple[Aim, Verdict]:
    """What follows a failure, as far as the restart budget allows."""
    if state.elastic and symptom:
        return Aim.RESTART, Verdict.SUSPECT
    aim = Aim.RESTART if state.restarts < state.max_restarts else Aim.FAIL
    return aim, Verdict.FAILED


def stop(
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
    # The others have heard that this node was told to stop or to leave. A failure now would be charged to them.
    late = tell == "failed" and state.signal is not None
    if tell is not None and state.num_nodes > 1 and not late:
        commands.append(TellPeers(tell))
    if state.phase is Phase.JOINING:
        new = replace(state, phase=Phase.ENDED, aim=aim)
        return Decision(new, (*commands, Finish(aim)), why)
    if state.phase is Phase.WAITING:
        # The workers of this node have succeeded and are swept.
        return swept(now, replace(state, phase=Phase.SWEEPING, aim=aim), tuple(commands), why)
    if state.phase is Phase.SWEEPING:
        return Decision(replace(state, aim=overruled(state.aim, aim)), tuple(commands), why)
    if state.phase is Phase.STOPPING:
        return Decision(replace(state, aim=overruled(state.aim, aim)), tuple(commands), why)
    aim = overruled(state.aim, aim)
    # If no worker is left to report the cause, another node may still do so: by failing itself, or by being lost.
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


def moment_over(now: float, state: State) -> Decision:
    """LISTENING: ask a second time, then stop the workers."""
    if state.kill_at is None or now < state.kill_at:
        return Decision(state, (), "the moment is not over")
    if not state.asked_again:
        new = replace(state, asked_again=True, kill_at=now + ANSWER_TIME)
        return Decision(new, (AskWorkers(),), "no worker has reported the cause: asking again")
    return stop(now, state, state.aim, "no worker has reported the cause", tell=None)


def overruled(aim: Aim, by: Aim) -> Aim:
    """Which of two aims wins: a signal over all others, a failure over a restart, a restart over success."""
    order = [Aim.SUCCEED, Aim.RESTART, Aim.FAIL, Aim.SIGNALLED]
    return max(aim, by, key=order.index)


def swept(now: float, state: State, commands: tuple[Command, ...] = (), why: str = "") -> Decision:
    """No process of the generation is left: go on to the next one, or end."""
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
        # The next round has formed without this node, or has it as a newcomer.
        alone = state.is_joining if state.formed is None else state.formed.keepers is not None
        commands = (*commands, ReportRestart(state.not_replaced, alone))
        if state.formed is not None:
            decision = round_formed(now, new, state.formed)
            return replace(decision, commands=(*commands, *decision.commands))
        if state.is_joining:
            return Decision(new, commands, why or "waiting for the next round")
        join = Join(new.generation, state.restarts, state.verdict)
        return Decision(new, (*commands, join), why or "restarting")
    if state.aim is Aim.SUCCEED and state.num_nodes > 1 and not state.peers_done:
        if state.elastic and not state.serves:
            return end(state, "all workers ended well", (*commands, TellPeers("done")))
        new = replace(state, phase=Phase.WAITING)
        return Decision(new, (*commands, TellPeers("done")), "waiting for the other nodes")
    return end(state, why or "nothing is left", commands)


def end(state: State, why: str, commands: tuple[Command, ...] = ()) -> Decision:
    """This node's part in the job is over."""
    return Decision(replace(state, phase=Phase.ENDED), (*commands, Finish(state.aim)), why)

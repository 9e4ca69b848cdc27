"""The launch policy: what follows from what, by table; and what holds after any events, by property."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.launch import policy
from rallypoint.launch.policy import (
    AdmissionAsked,
    Aim,
    AskWorkers,
    Broken,
    Finish,
    GraceOver,
    HoldWorkers,
    JobHangs,
    Join,
    KeepWorkers,
    LeftOut,
    LossTold,
    NodeInSession,
    NodeWaiting,
    NotKept,
    NotNeeded,
    PassOn,
    PeerFailed,
    PeerLeaves,
    PeerLost,
    PeersDone,
    PeersStopped,
    Phase,
    Replace,
    ReportRestart,
    RoundFormed,
    SessionEntered,
    SessionExpected,
    SessionFixed,
    SessionLeft,
    SessionMet,
    SignalReceived,
    SignalWorkers,
    StartWorkers,
    State,
    Sweep,
    Swept,
    TellLoss,
    TellPeers,
    Verdict,
    WorkerEnded,
    generations,
)
from rallypoint.rendezvous import plan as plans
from rallypoint.rendezvous.kept_round import Held, decide as keep_in_round


GRACE = 30.0


def state(**changes) -> State:
    return State(**{"max_restarts": 1, "grace": GRACE, **changes})


def running(*indices: int, **changes) -> State:
    return state(**{"phase": Phase.RUNNING, "running": frozenset(indices), **changes})


def stopping(*indices: int, **changes) -> State:
    defaults = {"aim": Aim.RESTART, "kill_at": GRACE}
    return state(phase=Phase.STOPPING, running=frozenset(indices), **{**defaults, **changes})


def sweeping(aim: Aim, **changes) -> State:
    return state(phase=Phase.SWEEPING, aim=aim, **changes)


def after(start: State, *events: policy.Event, now: float = 0.0) -> policy.Decision:
    """The decision on the last of ``events``."""
    decision = policy.start(start)
    for event in events:
        decision = policy.decide(now, decision.state, event)
    return decision


def elastic(*indices: int, **changes) -> State:
    return running(*indices, **{"num_nodes": 4, "elastic": True, **changes})


def formed(before: State, num_workers: int, **changes) -> RoundFormed:
    """The round that ``before`` waits for, with the restarts as the other nodes count them."""
    charged = before.verdict is Verdict.FAILED
    # A node whose workers are held, or are still being stopped, waits for the round after theirs.
    generation = before.generation + (before.phase is not Phase.JOINING)
    return RoundFormed(num_workers, generation, before.restarts + charged, **changes)


# -- by table -------------------------------------------------------------------------------------

TABLE = [
    # what, state, event, phase after, aim after, commands
    ("round formed", state(), RoundFormed(2), Phase.RUNNING, Aim.SUCCEED, [StartWorkers()]),
    ("one of two ends well", running(0, 1), WorkerEnded(0, False), Phase.RUNNING, Aim.SUCCEED, []),
    (
        "the last ends well",
        running(1),
        WorkerEnded(1, False),
        Phase.SWEEPING,
        Aim.SUCCEED,
        [Sweep(generations.LEFTOVER_GRACE)],
    ),
    (
        "one of two fails",
        running(0, 1),
        WorkerEnded(0, True),
        Phase.STOPPING,
        Aim.RESTART,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "one fails, budget used",
        running(0, 1, restarts=1),
        WorkerEnded(0, True),
        Phase.STOPPING,
        Aim.FAIL,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "the only one fails",
        running(0),
        WorkerEnded(0, True),
        Phase.SWEEPING,
        Aim.RESTART,
        [Sweep(generations.LEFTOVER_GRACE)],
    ),
    (
        "the store fails",
        running(0, 1),
        WorkerEnded(-1, True),
        Phase.STOPPING,
        Aim.RESTART,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "one fails, several nodes",
        running(0, 1, num_nodes=2),
        WorkerEnded(0, True),
        Phase.STOPPING,
        Aim.RESTART,
        [TellPeers("failed"), SignalWorkers(signal.SIGTERM)],
    ),
    (
        "a victim follows",
        stopping(1, 2),
        WorkerEnded(1, True),
        Phase.STOPPING,
        Aim.RESTART,
        [],
    ),
    (
        "the last victim follows",
        stopping(1),
        WorkerEnded(1, True),
        Phase.SWEEPING,
        Aim.RESTART,
        [Sweep(generations.LEFTOVER_GRACE)],
    ),
    ("grace is over", stopping(1), GraceOver(), Phase.SWEEPING, Aim.RESTART, [Sweep(0.0)]),
    (
        "swept, then again",
        sweeping(Aim.RESTART),
        Swept(),
        Phase.JOINING,
        Aim.SUCCEED,
        [ReportRestart(), Join(1)],
    ),
    ("swept, failed", sweeping(Aim.FAIL), Swept(), Phase.ENDED, Aim.FAIL, [Finish(Aim.FAIL)]),
    (
        "swept, well",
        sweeping(Aim.SUCCEED),
        Swept(),
        Phase.ENDED,
        Aim.SUCCEED,
        [Finish(Aim.SUCCEED)],
    ),
    (
        "swept, well, others still run",
        sweeping(Aim.SUCCEED, num_nodes=2),
        Swept(),
        Phase.WAITING,
        Aim.SUCCEED,
        [TellPeers("done")],
    ),
    (
        "the others are done too",
        state(phase=Phase.WAITING, num_nodes=2),
        PeersDone(),
        Phase.ENDED,
        Aim.SUCCEED,
        [Finish(Aim.SUCCEED)],
    ),
    (
        "a peer fails while we wait for it",
        state(phase=Phase.WAITING, num_nodes=2),
        PeerFailed(1, 0),
        Phase.JOINING,
        Aim.SUCCEED,
        [ReportRestart(), Join(1, 0, Verdict.FAILED)],
    ),
    (
        "it hangs, and restarts are left",
        running(0, 1, num_nodes=2),
        JobHangs(is_own=True, restarts=True),
        Phase.STOPPING,
        Aim.RESTART,
        [TellPeers("hangs"), SignalWorkers(signal.SIGTERM)],
    ),
    (
        "it hangs, and no restart is left",
        running(0, 1, restarts=1),
        JobHangs(is_own=True, restarts=True),
        Phase.STOPPING,
        Aim.FAIL,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "another node says that it hangs, and it is to fail",
        running(0, 1, num_nodes=2),
        JobHangs(is_own=False, restarts=False),
        Phase.STOPPING,
        Aim.FAIL,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "it hung, but a worker has failed meanwhile",
        stopping(0),
        JobHangs(is_own=True, restarts=False),
        Phase.STOPPING,
        Aim.RESTART,
        [],
    ),
    (
        "elastic: a node is lost",
        elastic(0, 1, restarts=1),
        PeerLost(2),
        Phase.STOPPING,
        Aim.RESTART,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "elastic: a node is preempted",
        elastic(0),
        PeerLeaves(2),
        Phase.STOPPING,
        Aim.RESTART,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "elastic: a node waits",
        elastic(0),
        NodeWaiting(),
        Phase.STOPPING,
        Aim.RESTART,
        [SignalWorkers(signal.SIGTERM)],
    ),
    ("fixed: a node waits", running(0, num_nodes=2), NodeWaiting(), Phase.RUNNING, Aim.SUCCEED, []),
    (
        "elastic: this node is preempted",
        elastic(0),
        SignalReceived(signal.SIGTERM),
        Phase.STOPPING,
        Aim.SIGNALLED,
        [TellPeers("leaving"), SignalWorkers(signal.SIGTERM)],
    ),
    (
        "elastic: Ctrl-C means the job",
        elastic(0),
        SignalReceived(signal.SIGINT),
        Phase.STOPPING,
        Aim.SIGNALLED,
        [TellPeers("stopped"), SignalWorkers(signal.SIGINT)],
    ),
    (
        "elastic: the echo of a loss, budget used",
        elastic(0, 1, restarts=1),
        WorkerEnded(0, True, symptom=True),
        Phase.STOPPING,
        Aim.RESTART,
        [TellPeers("failed"), SignalWorkers(signal.SIGTERM)],
    ),
    (
        "elastic: a real failure, budget used",
        elastic(0, 1, restarts=1),
        WorkerEnded(0, True),
        Phase.STOPPING,
        Aim.FAIL,
        [TellPeers("failed"), SignalWorkers(signal.SIGTERM)],
    ),
    (
        "elastic: the cause after its echo, here",
        elastic(1, 2, restarts=1, phase=Phase.STOPPING, aim=Aim.RESTART, verdict=Verdict.SUSPECT),
        WorkerEnded(1, True),
        Phase.STOPPING,
        Aim.FAIL,
        [TellPeers("failed")],
    ),
    (
        "elastic: the cause after its echo, elsewhere",
        elastic(1, restarts=1, phase=Phase.STOPPING, aim=Aim.RESTART, verdict=Verdict.SUSPECT),
        PeerFailed(1, 0),
        Phase.STOPPING,
        Aim.FAIL,
        [],
    ),
    (
        "elastic: the cause is told when we join already",
        state(elastic=True, num_nodes=4, restarts=1, generation=1),
        PeerFailed(1, 0),
        Phase.ENDED,
        Aim.FAIL,
        [Finish(Aim.FAIL)],
    ),
    (
        "elastic: the round finds that the budget is spent",
        state(elastic=True, num_nodes=4, restarts=1, generation=1),
        RoundFormed(2, 1, 2),
        Phase.ENDED,
        Aim.FAIL,
        [Finish(Aim.FAIL)],
    ),
    (
        "elastic: done, and gone",
        sweeping(Aim.SUCCEED, num_nodes=4, elastic=True),
        Swept(),
        Phase.ENDED,
        Aim.SUCCEED,
        [TellPeers("done"), Finish(Aim.SUCCEED)],
    ),
    (
        "elastic: done, but others need our store",
        sweeping(Aim.SUCCEED, num_nodes=4, elastic=True, serves=True),
        Swept(),
        Phase.WAITING,
        Aim.SUCCEED,
        [TellPeers("done")],
    ),
    (
        "elastic: others restart while we keep the store",
        state(phase=Phase.WAITING, num_nodes=4, elastic=True, serves=True),
        PeerFailed(1, 0),
        Phase.WAITING,
        Aim.SUCCEED,
        [],
    ),
    (
        "a peer fails",
        running(0, num_nodes=2),
        PeerFailed(1, 0),
        Phase.STOPPING,
        Aim.RESTART,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "a peer failed in an earlier generation",
        running(0, num_nodes=2, generation=1, restarts=1),
        PeerFailed(1, 0),
        Phase.RUNNING,
        Aim.SUCCEED,
        [],
    ),
    (
        "a peer is told to stop",
        running(0, num_nodes=2),
        PeersStopped(1),
        Phase.STOPPING,
        Aim.SIGNALLED,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "a peer is lost: nobody takes its place",
        running(0, num_nodes=2),
        PeerLost(1),
        Phase.STOPPING,
        Aim.FAIL,
        [SignalWorkers(signal.SIGTERM)],
    ),
    (
        "a peer is lost while workers stop for a restart",
        stopping(0, num_nodes=2),
        PeerLost(1),
        Phase.STOPPING,
        Aim.FAIL,
        [],
    ),
    (
        "Ctrl-C",
        running(0, 1),
        SignalReceived(signal.SIGINT),
        Phase.STOPPING,
        Aim.SIGNALLED,
        [SignalWorkers(signal.SIGINT)],
    ),
    (
        "Ctrl-C twice",
        stopping(0, 1, aim=Aim.SIGNALLED, signal=signal.SIGINT),
        SignalReceived(signal.SIGINT),
        Phase.SWEEPING,
        Aim.SIGNALLED,
        [Sweep(0.0)],
    ),
    (
        "SIGTERM twice",
        stopping(0, 1, aim=Aim.SIGNALLED, signal=signal.SIGTERM),
        SignalReceived(signal.SIGTERM),
        Phase.SWEEPING,
        Aim.SIGNALLED,
        [Sweep(0.0)],
    ),
    (
        "SIGTERM twice from Slurm",
        stopping(0, 1, aim=Aim.SIGNALLED, signal=signal.SIGTERM, sigterm_repeats=True),
        SignalReceived(signal.SIGTERM),
        Phase.STOPPING,
        Aim.SIGNALLED,
        [],
    ),
    (
        "Ctrl-C after SIGTERM from Slurm",
        stopping(0, 1, aim=Aim.SIGNALLED, signal=signal.SIGTERM, sigterm_repeats=True),
        SignalReceived(signal.SIGINT),
        Phase.SWEEPING,
        Aim.SIGNALLED,
        [Sweep(0.0)],
    ),
    (
        "Ctrl-C during a restart's stop",
        stopping(0, 1),
        SignalReceived(signal.SIGINT),
        Phase.STOPPING,
        Aim.SIGNALLED,
        [SignalWorkers(signal.SIGINT)],
    ),
    (
        "Ctrl-C before the workers started",
        state(),
        SignalReceived(signal.SIGINT),
        Phase.ENDED,
        Aim.SIGNALLED,
        [Finish(Aim.SIGNALLED)],
    ),
    (
        "the fork server is lost",
        running(0, 1),
        Broken("lost"),
        Phase.ENDED,
        Aim.FAIL,
        [Finish(Aim.FAIL)],
    ),
]


@pytest.mark.parametrize(
    ("before", "event", "phase", "aim", "commands"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(before, event, phase, aim, commands):
    decision = policy.decide(GRACE, before, event)
    assert (decision.state.phase, decision.state.aim) == (phase, aim)
    assert list(decision.commands) == commands
    assert decision.reason


def test_a_signal_to_pass_ends_nothing():
    start = running(0, 1, passed=frozenset({signal.SIGUSR1}))
    for _ in range(2):
        decision = policy.decide(0.0, start, SignalReceived(signal.SIGUSR1))
        assert decision.commands == (PassOn(signal.SIGUSR1),)
        assert decision.state == start
    nobody = running(passed=start.passed)
    assert policy.decide(0.0, nobody, SignalReceived(signal.SIGUSR1)).commands == ()


def test_grace_is_not_over_early():
    decision = policy.decide(GRACE - 0.01, stopping(1), GraceOver())
    assert decision.commands == ()
    assert decision.state.kill_at == GRACE


def test_a_signal_overrules_a_restart_and_keeps_the_grace_time():
    decision = after(
        state(),
        RoundFormed(2),
        WorkerEnded(0, True),
        SignalReceived(signal.SIGTERM),
        WorkerEnded(1, True),
        Swept(),
    )
    assert decision.commands == (Finish(Aim.SIGNALLED),)
    assert decision.state.generation == 0


def test_a_whole_life_with_one_restart():
    decision = after(
        state(),
        RoundFormed(2),
        WorkerEnded(1, True),
        WorkerEnded(0, True),
        Swept(),
        RoundFormed(2, 1, 1),
        WorkerEnded(0, False),
        WorkerEnded(1, False),
        Swept(),
    )
    assert decision.commands == (Finish(Aim.SUCCEED),)
    assert decision.state.generation == 1


# -- the moment after a symptom ---------------------------------------------------------------------

MOMENT = 5.0


def listening(*indices: int, **changes) -> State:
    """One worker has failed with a symptom: returns the state in which its node listens."""
    before = running(*indices, **{"moment": MOMENT, "max_restarts": 0, **changes})
    decision = policy.decide(0.0, before, WorkerEnded(9, True, symptom=True))
    assert decision.state.phase is Phase.LISTENING
    assert AskWorkers() in decision.commands
    assert not any(isinstance(command, SignalWorkers) for command in decision.commands)
    return decision.state


def test_after_a_symptom_the_others_are_asked_twice_and_then_stopped():
    state = listening(0, 1)
    assert policy.decide(1.0, state, GraceOver()).commands == ()
    again = policy.decide(state.kill_at, state, GraceOver())
    assert again.commands == (AskWorkers(),)
    assert again.state.kill_at == MOMENT
    stopped = policy.decide(MOMENT, again.state, GraceOver())
    assert stopped.commands == (SignalWorkers(signal.SIGTERM),)
    assert (stopped.state.phase, stopped.state.kill_at) == (Phase.STOPPING, MOMENT + GRACE)
    assert stopped.state.aim is Aim.FAIL


@pytest.mark.parametrize(
    "event",
    [
        WorkerEnded(0, True),
        WorkerEnded(-1, True),
        PeerFailed(1, 0),
        PeerLost(1),
        PeersStopped(1),
        SignalReceived(signal.SIGINT),
    ],
)
@pytest.mark.parametrize("elastic", [False, True])
def test_a_cause_or_a_signal_ends_the_moment(event, elastic):
    decision = policy.decide(0.1, listening(0, 1, num_nodes=2, elastic=elastic), event)
    assert decision.state.phase is Phase.STOPPING
    assert any(isinstance(command, SignalWorkers) for command in decision.commands)


@pytest.mark.parametrize(
    "event",
    [WorkerEnded(0, True, symptom=True), WorkerEnded(0, False), PeerFailed(1, 0, symptom=True)],
)
def test_further_symptoms_do_not(event):
    decision = policy.decide(0.1, listening(0, 1, num_nodes=2), event)
    assert decision.state.phase is Phase.LISTENING
    assert decision.commands == ()


def test_the_moment_ends_when_nobody_is_left_to_listen_to():
    state = listening(0)
    for failed in (True, False):
        decision = policy.decide(0.1, state, WorkerEnded(0, failed, symptom=True))
        assert decision.state.phase is Phase.SWEEPING
        assert decision.state.kill_at is None


def test_peers_hear_of_the_symptom_at_once_and_of_the_cause_again():
    before = running(0, 1, num_nodes=2, moment=MOMENT)
    first = policy.decide(0.0, before, WorkerEnded(1, True, symptom=True))
    assert TellPeers("failed") in first.commands
    second = policy.decide(0.1, first.state, WorkerEnded(0, True))
    assert TellPeers("failed") in second.commands
    there = policy.decide(0.0, before, PeerFailed(0, 0, symptom=True))
    assert there.commands == (AskWorkers(),)


def test_a_worker_that_dies_of_a_nodes_signal_is_no_failure_to_the_others():
    """They saw the consequence first, then heard that the node leaves. A failure after that would end their job."""
    before = elastic(0, restarts=1, num_nodes=2, nodes=2, moment=MOMENT)
    heard = policy.decide(0.0, before, PeerFailed(1, 0, symptom=True))
    told = policy.decide(0.1, heard.state, SignalReceived(signal.SIGTERM))
    assert TellPeers("leaving") in told.commands
    ended = policy.decide(0.2, told.state, WorkerEnded(0, True))
    assert ended.commands == (Sweep(min(generations.LEFTOVER_GRACE, GRACE)),)
    assert ended.state.aim is Aim.SIGNALLED


# -- sessions: a lost worker is replaced, the others keep what they have --------------------------


def in_session(*indices: int, **changes) -> State:
    kept = frozenset(indices)
    return running(*indices, **{"max_losses": 2, "loss_window": 10.0, "kept": kept, **changes})


LOST = WorkerEnded(1, failed=True)


def test_a_lost_worker_of_a_session_is_replaced():
    decision = policy.decide(5.0, in_session(0, 1, 2), LOST)
    assert decision.commands == (Replace(1),)
    after = decision.state
    assert (after.phase, after.generation, after.running) == (Phase.RUNNING, 0, {0, 1, 2})
    assert after.replaced == 1
    assert (after.kept, after.arriving, after.losses) == ({0, 2}, {1}, (5.0,))
    entered = policy.decide(6.0, after, SessionEntered(1)).state
    assert (entered.kept, entered.arriving) == ({0, 1, 2}, frozenset())


def test_a_worker_that_is_lost_again_before_it_arrives_is_replaced_again():
    state = policy.decide(0.0, in_session(0, 1, 2), LOST).state
    again = policy.decide(1.0, state, LOST)
    assert again.commands == (Replace(1),)
    assert again.state.replaced == 2


OUTSIDE = "not all workers are in the session (missing: {})"
OVER = "another worker has left the session"
NOBODY = "no remaining worker has the session's state"


@pytest.mark.parametrize(
    ("why", "state", "event"),
    [
        (OUTSIDE.format("local rank 0"), in_session(0, 1, 2, kept=frozenset({1, 2})), LOST),
        (OUTSIDE.format("local ranks 0, 2"), in_session(0, 1, 2, kept=frozenset({1})), LOST),
        (OUTSIDE.format("nodes 0, 1"), in_session(0, 1, 2, num_nodes=2, nodes=2), LOST),
        (NOBODY, in_session(1), LOST),
        (NOBODY, in_session(0, 1, kept=frozenset({1}), arriving=frozenset({0})), LOST),
        (OVER, in_session(0, 1, 2, has_left=True), LOST),
        ("--max-losses is 0", in_session(0, 1, 2, max_losses=0), LOST),
        ("--max-losses is used up (2 in 10 s)", in_session(0, 1, 2, losses=(4.0, 5.0)), LOST),
        (
            "the same error came at the same step before",
            in_session(0, 1, 2),
            WorkerEnded(1, failed=True, again=True),
        ),
        (
            "its session cannot be kept",
            in_session(0, 1, 2),
            WorkerEnded(1, failed=True, refused=True),
        ),
    ],
)
def test_when_a_lost_worker_is_a_failure_as_ever(why, state, event):
    decision = policy.decide(6.0, state, event)
    assert not any(isinstance(each, Replace) for each in decision.commands)
    assert decision.state.phase in {Phase.STOPPING, Phase.SWEEPING}
    assert decision.state.not_replaced == why


@pytest.mark.parametrize(
    ("why", "state", "event"),
    [
        ("there is no session", running(0, 1, 2, max_losses=2), LOST),
        ("the store is gone, no worker", in_session(0, 1, 2), WorkerEnded(-1, failed=True)),
        ("another node has failed", in_session(0, 1, num_nodes=2), PeerFailed(1, 0)),
        ("a node joins", in_session(0, 1, num_nodes=2, elastic=True), NodeWaiting()),
    ],
)
def test_why_no_worker_is_replaced_is_not_said_where_none_could_be(why, state, event):
    decision = policy.decide(6.0, state, event)
    assert not any(isinstance(each, Replace) for each in decision.commands)
    assert (decision.state.phase, decision.state.not_replaced) == (Phase.STOPPING, ""), why


def test_the_first_reason_why_no_worker_is_replaced_counts_until_all_start_anew():
    first = policy.decide(6.0, in_session(0, 1, 2, max_losses=0), LOST).state
    then = policy.decide(6.1, first, WorkerEnded(0, failed=True, again=True)).state
    assert then.not_replaced == "--max-losses is 0"
    restarts = replace(then, phase=Phase.JOINING, generation=1)
    assert policy.decide(7.0, restarts, formed(restarts, 3)).state.not_replaced == ""


def test_old_losses_do_not_count():
    decision = policy.decide(20.0, in_session(0, 1, 2, losses=(4.0, 10.5)), LOST)
    assert decision.commands == (Replace(1),)
    assert decision.state.losses == (10.5, 20.0)


def test_a_worker_that_has_left_its_session_is_not_kept():
    state = policy.decide(0.0, in_session(0, 1, 2), SessionLeft(0)).state
    assert SignalWorkers(signal.SIGTERM) in policy.decide(1.0, state, LOST).commands


def test_a_worker_that_leaves_its_session_while_another_takes_over_ends_the_generation():
    state = policy.decide(0.0, in_session(0, 1, 2), LOST).state
    ended = policy.decide(0.0, state, SessionLeft(0)).state
    assert (ended.phase, ended.not_replaced) == (Phase.STOPPING, f"{OVER} meanwhile")


def test_a_restart_begins_without_sessions():
    state = policy.decide(0.0, in_session(0, 1, losses=(0.0,)), WorkerEnded(-1, True)).state
    state = replace(state, phase=Phase.JOINING, generation=1)
    assert policy.decide(1.0, state, formed(state, 2)).state.kept == frozenset()


def test_no_worker_is_replaced_once_the_job_is_stopped():
    state = policy.decide(0.0, in_session(0, 1, 2), SignalReceived(signal.SIGTERM)).state
    decision = policy.decide(1.0, state, LOST)
    assert decision.state.phase is Phase.STOPPING
    assert not decision.commands


# -- sessions on several nodes --------------------------------------------------------------------


def on_two_nodes(*indices: int, **changes) -> State:
    both = frozenset({0, 1})
    told = {"in_session": both, "said_in_session": True}
    return in_session(*indices, **{"num_nodes": 2, "nodes": 2, **told, **changes})


def test_the_nodes_are_told_once_all_workers_of_this_one_are_in_a_session():
    state = running(0, 1, num_nodes=2, nodes=2, max_losses=2)
    first = policy.decide(0.0, state, SessionEntered(0))
    second = policy.decide(0.0, first.state, SessionEntered(1))
    assert (first.commands, second.commands) == ((), (TellPeers("in session"),))


@pytest.mark.parametrize(
    ("why", "state", "expected"),
    [
        ("the other node is in a session", on_two_nodes(0, 1), False),
        ("it has not been heard", on_two_nodes(0, 1, in_session=frozenset({0})), True),
        ("nor has this one's news", on_two_nodes(0, 1, in_session=frozenset()), True),
        (
            "a worker of this node is not in it",
            on_two_nodes(0, 1, in_session=frozenset(), said_in_session=False),
            False,
        ),
        (
            "a worker has left it",
            on_two_nodes(0, 1, in_session=frozenset(), has_left=True),
            False,
        ),
    ],
)
def test_whether_other_nodes_may_be_in_a_session_too(why, state, expected):
    assert policy.awaits_sessions(state) == expected, why


def test_a_loss_is_told_to_all_nodes_before_anyone_is_replaced():
    told = policy.decide(0.0, on_two_nodes(0, 1), LOST)
    assert told.commands == (TellLoss(1, survivors=True),)
    heard = policy.decide(0.1, told.state, LossTold(0, 1))
    assert heard.commands == (Replace(1),)
    assert (heard.state.running, heard.state.arriving, heard.state.lost) == ({0, 1}, {1}, set())
    there = policy.decide(0.1, on_two_nodes(0, 1), LossTold(0))
    assert there.commands == (Replace(None),)
    assert there.state.replaced == heard.state.replaced == 1


def test_the_only_worker_of_a_node_is_replaced_too():
    told = policy.decide(0.0, on_two_nodes(0), WorkerEnded(0, failed=True))
    assert told.commands == (TellLoss(0, survivors=False),)
    heard = policy.decide(0.1, told.state, LossTold(0, 0, survivors=False))
    assert heard.commands == (Replace(0),)
    entered = policy.decide(0.2, heard.state, SessionEntered(0))
    assert entered.commands == (TellPeers("in session"),)
    told_so = policy.decide(0.3, entered.state, NodeInSession(0, True))
    assert told_so.state.without_survivors == frozenset()


def test_all_restart_if_nobody_is_left_who_has_the_state():
    lost = policy.decide(0.0, on_two_nodes(0), WorkerEnded(0, failed=True)).state
    first = policy.decide(0.1, lost, LossTold(1, survivors=False))
    assert first.commands == (Replace(None),)
    second = policy.decide(0.1, first.state, LossTold(0, 0, survivors=False))
    assert second.commands[0] == TellPeers("failed")
    assert second.state.phase is Phase.SWEEPING
    assert second.state.aim is Aim.RESTART
    assert second.state.not_replaced == NOBODY


def test_a_node_whose_session_has_ended_fails_when_another_loses_a_worker():
    left = policy.decide(0.0, on_two_nodes(0, 1), SessionLeft(0))
    assert left.commands == (TellPeers("out of session"),)
    decision = policy.decide(0.1, left.state, LossTold(1))
    assert decision.commands[0] == TellPeers("failed")
    assert (decision.state.phase, decision.state.not_replaced) == (Phase.STOPPING, OVER)


def test_the_others_of_a_node_may_end_before_all_have_heard_of_a_loss():
    lost = policy.decide(0.0, on_two_nodes(0, 1), LOST).state
    lost = policy.decide(0.0, lost, SessionLeft(0)).state
    ended = policy.decide(0.1, lost, WorkerEnded(0, failed=False))
    assert ended.state.phase is Phase.RUNNING
    heard = policy.decide(0.2, ended.state, LossTold(0, 1))
    assert (heard.state.phase, heard.state.aim) == (Phase.SWEEPING, Aim.RESTART)


# -- the loss of a node ---------------------------------------------------------------------------


def on_three_nodes(**changes) -> State:
    """The state of a node of three; all workers of all nodes are in a session."""
    return elastic(
        0,
        1,
        **{
            "num_nodes": 3,
            "nodes": 3,
            "in_session": frozenset({0, 1, 2}),
            "kept": frozenset({0, 1}),
            "said_in_session": True,
            "max_losses": 4,
            **changes,
        },
    )


def kept_round(**changes) -> RoundFormed:
    """A round in which node 2 is new."""
    given = {"nodes": 3, "keepers": frozenset({0, 1}), "is_keeper": True, "replaced": 3, **changes}
    return RoundFormed(2, 1, **given)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_session_that_can_have_more_ranks_meets_a_node_that_waits(nodes):
    inside = frozenset(range(nodes))
    state = on_three_nodes(
        nodes=nodes, in_session=inside, resizes=True, kept=frozenset({0}), arriving=frozenset({1})
    )
    waits = policy.decide(0.0, state, NodeWaiting())
    assert waits.state.phase is Phase.REJOINING
    assert waits.commands == (HoldWorkers(), Join(1, 0, Verdict.CHANGED))
    met = policy.decide(0.1, waits.state, kept_round(nodes=nodes + 1, keepers=inside, grows=True))
    assert met.commands == (KeepWorkers(()),)
    assert met.state.without_survivors == {nodes}


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("a worker cannot", {"resizes": False}),
        ("a worker is not in the session", {"kept": frozenset({0})}),
        ("another node is not in it", {"in_session": frozenset({0, 1})}),
    ],
)
def test_otherwise_all_start_again_when_a_node_waits(why, changes):
    state = on_three_nodes(**{"resizes": True, **changes})
    decision = policy.decide(0.0, state, NodeWaiting())
    assert (decision.state.phase, decision.state.aim) == (Phase.STOPPING, Aim.RESTART), why


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("nobody expects a session", {"in_session": frozenset()}),
        ("all are in the session", {"expects_session": True}),
        (
            "the set-up takes too long",
            {"expects_session": True, "in_session": frozenset({0}), "began": -1000.0},
        ),
    ],
)
def test_a_node_that_asks_is_admitted(why, changes):
    decision = policy.decide(0.0, on_three_nodes(**changes), AdmissionAsked())
    assert decision.commands == (TellPeers("waiting"),), why


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("the session begins", {"expects_session": True, "in_session": frozenset({0, 1})}),
        ("the session of this node has ended", {"has_left": True}),
        ("that of another node has", {"is_ending": True}),
    ],
)
def test_a_node_that_asks_is_not_admitted_while_all_would_start_again(why, changes):
    decision = policy.decide(0.0, on_three_nodes(**changes), AdmissionAsked())
    assert decision.commands == (), why


def test_what_is_known_of_a_session_holds_for_its_round_alone():
    two = state(elastic=True, num_nodes=2)
    told = policy.decide(5.0, two, RoundFormed(2, nodes=2)).state
    assert (told.began, told.expects_session) == (5.0, False)
    told = policy.decide(6.0, told, SessionExpected()).state
    assert told.expects_session
    out = policy.decide(7.0, told, NodeInSession(1, False)).state
    assert out.is_ending
    again = policy.decide(9.0, replace(out, phase=Phase.JOINING), RoundFormed(2, nodes=2)).state
    assert (again.began, again.expects_session, again.is_ending) == (9.0, False, False)


def test_whether_a_session_can_have_more_ranks_is_known_once_all_workers_are_in_it():
    told = policy.decide(0.0, state(elastic=True, num_nodes=2), RoundFormed(2, nodes=2)).state
    first = policy.decide(0.0, told, SessionEntered(0, resizes=True)).state
    assert policy.decide(0.0, first, SessionEntered(1, resizes=True)).state.resizes
    assert not policy.decide(0.0, first, SessionEntered(1)).state.resizes
    assert not policy.decide(0.0, first, SessionFixed()).state.resizes


def test_a_node_without_state_is_known_to_all_when_the_nodes_have_met_again():
    rejoins = policy.decide(0.0, on_three_nodes(max_restarts=3), PeerLost(2)).state
    met = policy.decide(0.1, rejoins, kept_round(bare=frozenset({1}))).state
    assert met.without_survivors == {1, 2}
    # Node 0 was the last one with the state.
    after = policy.decide(0.2, met, LossTold(0, None, survivors=False)).state
    assert after.aim is Aim.RESTART


def test_a_node_tells_that_it_has_lost_its_last_state_since_it_said_what_it_has():
    rejoins = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    lost = policy.decide(0.05, rejoins, WorkerEnded(0, failed=True)).state
    lost = policy.decide(0.06, lost, WorkerEnded(1, failed=True)).state
    met = policy.decide(0.1, lost, kept_round())
    assert met.commands == (KeepWorkers((0,)), TellLoss(1, survivors=False))
    told = policy.decide(0.1, lost, kept_round(bare=frozenset({0}), is_bare=True))
    assert told.commands == (KeepWorkers((0, 1)),)


def extra() -> State:
    """A node whose two workers join in addition to those of nodes 0 and 1."""
    event = RoundFormed(2, 1, 0, nodes=3, keepers=frozenset({0, 1}), replaced=1, grows=True)
    formed = policy.decide(0.0, state(elastic=True, num_nodes=3, max_losses=4), event)
    assert formed.commands == (StartWorkers(takes_over=True),)
    return formed.state


def test_a_node_whose_workers_cannot_come_to_a_session_leaves_the_others_alone():
    failed = policy.decide(0.0, extra(), WorkerEnded(0, failed=True))
    assert failed.commands[0] == TellPeers("leaving")
    assert failed.state.aim is Aim.FAIL
    assert failed.state.fails_alone
    met = policy.decide(0.0, extra(), SessionMet()).state
    lost = policy.decide(0.0, replace(met, kept=met.running), WorkerEnded(0, failed=True))
    assert lost.commands == (TellLoss(0, survivors=True),)
    assert not lost.state.fails_alone


def test_a_node_that_comes_to_a_session_as_it_ends_ends_well():
    ended = policy.decide(0.0, extra(), NodeInSession(0, inside=False))
    assert (ended.state.phase, ended.state.aim) == (Phase.STOPPING, Aim.SUCCEED)
    met = policy.decide(0.0, extra(), SessionMet()).state
    assert policy.decide(0.0, met, NodeInSession(0, inside=False)).state.phase is Phase.RUNNING


def test_workers_of_a_session_are_held_until_the_nodes_have_met_again():
    lost = policy.decide(0.0, on_three_nodes(), PeerLost(2))
    assert (lost.state.phase, lost.state.generation) == (Phase.REJOINING, 0)
    assert lost.commands == (HoldWorkers(), Join(1, 0, Verdict.CHANGED))
    back = policy.decide(0.1, lost.state, kept_round())
    assert back.commands == (KeepWorkers(()),)
    assert (back.state.phase, back.state.generation, back.state.replaced) == (Phase.RUNNING, 1, 3)
    assert back.state.running == back.state.kept == {0, 1}
    again = policy.decide(0.2, back.state, PeerLeaves(0))
    assert again.commands == (HoldWorkers(), Join(2, 0, Verdict.CHANGED))


def test_a_newcomers_workers_take_over():
    joining = state(elastic=True, num_nodes=3, generation=1)
    decision = policy.decide(0.0, joining, kept_round(is_keeper=False))
    assert decision.commands == (StartWorkers(takes_over=True),)
    assert decision.state.arriving == decision.state.running == {0, 1}
    assert decision.state.in_session == {0, 1, 2}
    assert decision.state.without_survivors == {2}


def test_a_worker_that_fails_while_the_nodes_meet_is_replaced_with_the_lost_ones():
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    held = policy.decide(0.1, held, WorkerEnded(1, failed=True)).state
    assert (held.phase, held.running) == (Phase.REJOINING, {0})
    back = policy.decide(0.2, held, kept_round())
    assert back.commands == (KeepWorkers((1,)),)
    assert (back.state.running, back.state.arriving) == ({0, 1}, {1})


def test_a_node_that_could_not_keep_its_workers_is_named_as_the_reason():
    stopped = policy.decide(0.0, on_three_nodes(), NotKept(1)).state
    assert stopped.not_replaced == "node 1 could not keep its workers"


RECORD_LOST = WorkerEnded(1, failed=True, refused=True, record_lost=True)


def test_all_start_anew_without_a_charge_if_a_record_was_lost_with_its_nodes():
    stops = policy.decide(0.0, replace(on_three_nodes(), max_restarts=0), RECORD_LOST)
    assert stops.commands == (TellPeers("not kept"), SignalWorkers(signal.SIGTERM))
    assert "the record that local rank 1 needs for its set-up was lost" in stops.state.not_replaced
    told = policy.decide(0.1, stops.state, NotKept(0))
    assert (told.state, told.commands) == (stops.state, ())
    *_, join = after_all_end(told.state).commands
    assert join == Join(1, 0, Verdict.CHANGED)


def test_a_lost_record_is_no_failure_either_while_the_cause_of_a_symptom_is_looked_for():
    listens = replace(on_three_nodes(), phase=Phase.LISTENING, aim=Aim.RESTART)
    stops = policy.decide(0.0, listens, RECORD_LOST).state
    assert (stops.phase, stops.aim, stops.verdict) == (Phase.STOPPING, Aim.RESTART, Verdict.CHANGED)


def test_with_a_fixed_number_of_nodes_a_lost_record_is_a_failure():
    fixed = replace(on_three_nodes(), elastic=False, max_restarts=0)
    failed = policy.decide(0.0, fixed, RECORD_LOST).state
    assert (failed.aim, failed.not_replaced) == (Aim.FAIL, "its session cannot be kept")


def test_why_a_round_keeps_nobody_is_what_the_round_says():
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    # Another loss in the meantime is no reason.
    held = policy.decide(0.05, held, PeerLost(1)).state
    held = policy.decide(0.06, held, WorkerEnded(1, failed=True)).state
    assert not held.not_replaced
    why = "6 ranks would become 4, for which the session must start anew"
    none = policy.decide(0.1, held, kept_round(keepers=None, is_keeper=False, not_kept=why))
    assert (none.state.aim, none.state.not_replaced) == (Aim.RESTART, why)


def test_who_alone_has_what_newcomers_need_must_not_lose_it_on_the_way():
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    lost = policy.decide(0.1, held, WorkerEnded(1, failed=True)).state
    # Other nodes have it, too.
    assert policy.decide(0.2, lost, kept_round()).state.phase is Phase.RUNNING
    gone = policy.decide(0.2, lost, kept_round(relied_on=True))
    assert gone.commands[0] == TellPeers("not kept")
    assert gone.state.aim is Aim.RESTART
    assert "the set-up record" in gone.state.not_replaced


def test_until_all_have_met_the_loss_of_who_has_it_starts_all_anew():
    held = policy.decide(0.0, on_three_nodes(max_restarts=0), PeerLost(2)).state
    met = policy.decide(0.1, held, kept_round(relied_on=True)).state
    assert met.phase is Phase.RUNNING
    lost = policy.decide(0.2, met, WorkerEnded(1, failed=True)).state
    assert (lost.phase, lost.aim) == (Phase.STOPPING, Aim.RESTART)
    passed_on = policy.decide(0.2, met, SessionMet()).state
    assert policy.decide(0.3, passed_on, WorkerEnded(1, failed=True)).state.phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("why", "before", "event"),
    [
        ("not elastic", on_three_nodes(elastic=False), PeerLost(2)),
        (
            "another node is in no session",
            on_three_nodes(in_session=frozenset({0, 1})),
            PeerLost(2),
        ),
        ("the state of the lost cannot be had", on_three_nodes(is_sharded=True), PeerLost(2)),
        ("the session is over", on_three_nodes(has_left=True), PeerLost(2)),
        ("a worker is not in the session", on_three_nodes(kept=frozenset({0})), PeerLost(2)),
        ("a node is to be admitted", on_three_nodes(), NodeWaiting()),
    ],
)
def test_when_the_loss_of_a_node_stops_the_workers(why, before, event):
    decision = policy.decide(0.0, before, event)
    assert decision.state.phase is Phase.STOPPING, why


def test_a_node_that_is_given_up_as_lost_comes_with_its_workers_unless_the_others_have_gone_on():
    held = policy.decide(0.0, on_three_nodes(), PeerLost(1, is_own=True))
    assert held.state.phase is Phase.REJOINING
    assert held.commands == (HoldWorkers(), Join(1, 0, Verdict.CHANGED))
    assert policy.decide(0.1, held.state, kept_round()).state.phase is Phase.RUNNING
    late = policy.decide(0.1, held.state, LeftOut()).state
    assert (late.phase, late.aim) == (Phase.STOPPING, Aim.RESTART)


@pytest.mark.parametrize(
    "round_", [kept_round(keepers=None, is_keeper=False), kept_round(is_keeper=False)]
)
def test_if_the_round_keeps_no_workers_they_restart_in_it(round_):
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    stops = policy.decide(0.1, held, round_)
    assert stops.commands == (SignalWorkers(signal.SIGTERM),)
    ended = after_all_end(stops.state)
    why = "this node came to the round without its workers"
    others_go_on = bool(round_.keepers)
    report = ReportRestart(why, alone=others_go_on)
    assert ended.commands == (report, StartWorkers(takes_over=others_go_on))
    assert (ended.state.phase, ended.state.generation) == (Phase.RUNNING, 1)
    assert not ended.state.is_joining


def test_a_node_whose_workers_have_all_lost_a_peer_waits_for_the_cause_from_the_others():
    together = elastic(0, 1, moment=5.0, nodes=2)
    ends = [WorkerEnded(index, True, symptom=True) for index in range(2)]
    waits = after(together, *ends)
    assert (waits.state.phase, waits.state.kill_at) == (
        Phase.LISTENING,
        5.0 - generations.ANSWER_TIME,
    )
    lost = policy.decide(0.2, waits.state, PeerLost(1))
    assert (lost.state.phase, lost.state.aim) == (Phase.SWEEPING, Aim.RESTART)
    failed = policy.decide(0.2, waits.state, PeerFailed(1, 0))
    assert (failed.state.phase, failed.state.verdict) == (Phase.SWEEPING, Verdict.FAILED)
    asked = policy.decide(5.0 - generations.ANSWER_TIME, waits.state, GraceOver())
    over = policy.decide(5.0, asked.state, GraceOver())
    assert (over.state.phase, over.state.aim) == (Phase.SWEEPING, Aim.RESTART)


def test_a_node_that_is_alone_does_not_wait_for_others():
    alone = elastic(0, moment=5.0, nodes=1)
    assert after(alone, WorkerEnded(0, True, symptom=True)).state.phase is Phase.SWEEPING


def after_all_end(stopping: State) -> policy.Decision:
    for index in sorted(stopping.running):
        stopping = policy.decide(1.0, stopping, WorkerEnded(index, failed=True)).state
    return policy.decide(2.0, stopping, Swept())


def test_a_node_that_is_left_out_ends_its_workers_and_waits_for_the_next_round():
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    left_out = policy.decide(0.1, held, LeftOut())
    assert left_out.state.phase is Phase.STOPPING
    waits = after_all_end(left_out.state)
    assert waits.state.phase is Phase.JOINING
    assert waits.commands == (ReportRestart(alone=True),), "it has joined already"


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (PeerFailed(1, 0), "not kept"),
        (SignalReceived(signal.SIGTERM), "leaving"),
        (SignalReceived(signal.SIGTERM, everywhere=True), "stopped"),
        (SignalReceived(signal.SIGINT), "stopped"),
    ],
)
def test_a_round_that_counts_on_workers_that_are_being_stopped_is_told(event, told):
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    stops = policy.decide(0.1, held, event).state
    assert stops.phase is Phase.STOPPING
    formed = policy.decide(0.2, stops, kept_round())
    assert formed.commands == (TellPeers(told),)
    assert formed.state.generation == 1, "the others read of it in the new round's journal"
    ended = after_all_end(formed.state)
    if told == "not kept":
        assert ended.commands == (ReportRestart(), Join(2, 0, formed.state.verdict))
    others = policy.decide(0.3, on_three_nodes(generation=1), NotKept(0))
    assert (others.state.phase, others.state.verdict) == (Phase.STOPPING, Verdict.CHANGED)


def test_a_session_that_ends_while_the_nodes_meet_is_told():
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    held = policy.decide(0.1, held, SessionLeft(0)).state
    back = policy.decide(0.2, held, kept_round())
    assert back.commands == (TellPeers("not kept"), SignalWorkers(signal.SIGTERM))
    assert back.state.generation == 1


def test_a_node_that_is_not_needed_any_more_ends_its_held_workers():
    held = policy.decide(0.0, on_three_nodes(), PeerLost(2)).state
    decision = policy.decide(0.1, held, NotNeeded())
    assert (decision.state.phase, decision.state.aim) == (Phase.STOPPING, Aim.SUCCEED)


# -- by property ----------------------------------------------------------------------------------

WORKERS = 3
SIGNALS = st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
ROUNDS = st.one_of(
    st.builds(RoundFormed, st.integers(1, WORKERS)),
    st.builds(
        RoundFormed,
        st.integers(1, WORKERS),
        nodes=st.just(2),
        keepers=st.sampled_from([frozenset({0}), frozenset({0, 1})]),
        is_keeper=st.booleans(),
    ),
)
EVENTS = st.one_of(
    ROUNDS,
    st.builds(WorkerEnded, st.integers(-1, WORKERS), st.booleans(), st.booleans()),
    st.builds(
        WorkerEnded, st.integers(0, WORKERS), failed=st.just(True), record_lost=st.just(True)
    ),
    st.builds(PeerFailed, st.integers(0, 3), st.integers(0, 3), st.booleans()),
    st.builds(PeerLeaves, st.integers(0, 3)),
    st.just(NodeWaiting()),
    st.just(AdmissionAsked()),
    st.just(SessionExpected()),
    st.just(PeersDone()),
    st.just(NotNeeded()),
    st.builds(PeersStopped, st.integers(0, 3)),
    st.builds(PeerLost, st.integers(0, 3), st.booleans()),
    st.just(LeftOut()),
    st.builds(JobHangs, is_own=st.booleans(), restarts=st.booleans()),
    st.builds(NotKept, st.integers(0, 3)),
    st.builds(SignalReceived, SIGNALS),
    st.just(GraceOver()),
    st.just(Swept()),
    st.builds(Broken, st.just("broken")),
    st.builds(SessionEntered, st.integers(0, WORKERS)),
    st.builds(SessionLeft, st.integers(0, WORKERS)),
    st.builds(NodeInSession, st.integers(0, 2), st.booleans()),
    st.builds(LossTold, st.integers(0, 2), st.none() | st.integers(0, WORKERS), st.booleans()),
)
# Likely sequences, so that long lives are reached too: mostly rounds, failures and sweeps.
LIVELY = st.one_of(
    ROUNDS,
    st.builds(WorkerEnded, st.integers(0, WORKERS), st.booleans()),
    st.just(Swept()),
    EVENTS,
)
STATES = st.builds(
    State,
    max_restarts=st.integers(0, 3),
    grace=st.sampled_from([0.0, 5.0]),
    moment=st.sampled_from([0.0, 2.0]),
    num_nodes=st.integers(1, 3),
    elastic=st.booleans(),
    max_losses=st.integers(0, 2),
)
STEPS = st.lists(st.tuples(st.floats(0, 10), LIVELY), min_size=25, max_size=60)
SEVERITY = [Aim.SUCCEED, Aim.RESTART, Aim.FAIL, Aim.SIGNALLED]


@settings(max_examples=200, deadline=None)
@given(start=STATES, steps=STEPS)
def test_whatever_happens(start, steps):
    now = 0.0
    decision = policy.start(start)
    commands = list(decision.commands)
    started_in: set[int] = set()
    told_to_stop = False
    for seconds, event in steps:
        now += seconds
        before = decision.state
        if isinstance(event, RoundFormed):
            kept = {"keepers": event.keepers, "is_keeper": event.is_keeper, "nodes": event.nodes}
            event = formed(before, event.num_workers, **kept)
        decision = policy.decide(now, before, event)
        assert decision.reason

        assert decision.state.generation in {before.generation, before.generation + 1}
        if decision.state.generation == before.generation and before.phase is not Phase.JOINING:
            aims = [SEVERITY.index(each.aim) for each in (before, decision.state)]
            assert aims == sorted(aims) or isinstance(event, Broken), "an end was taken back"
        told_to_stop = told_to_stop or isinstance(event, SignalReceived | PeersStopped)
        for command in decision.commands:
            if isinstance(command, StartWorkers):
                generation = decision.state.generation
                assert generation not in started_in, "a generation was started twice"
                started_in.add(generation)
            if isinstance(command, Join | StartWorkers | ReportRestart):
                assert not told_to_stop, "a signal led to a restart"
            if command == TellPeers("failed") and not isinstance(event, Broken):
                assert before.signal is None, "a failure was told after the signal that ended it"
        if before.phase is Phase.ENDED:
            assert not decision.commands, "it went on after Finish"
        commands += decision.commands

    joins = [command.generation for command in commands if isinstance(command, Join)]
    # A node joins a round twice if the round loses a member before it starts.
    steps_ahead = [after - before for before, after in itertools.pairwise(joins)]
    assert all(each in {0, 1} for each in steps_ahead), "the generation grows by one"
    assert len(joins) <= start.max_restarts + 1 or start.elastic
    finishes = [command for command in commands if isinstance(command, Finish)]
    assert (decision.state.phase is Phase.ENDED) == (len(finishes) == 1)
    if decision.state.phase in {Phase.STOPPING, Phase.LISTENING}:
        assert decision.state.kill_at is not None, "nothing would ever end this phase"


@dataclass
class World:
    """A shell without processes: it does what the policy says, and answers every request eventually."""

    decision: policy.Decision
    now: float = 0.0
    alive: set[int] = field(default_factory=set)
    sweeps: int = 0
    joining: bool = False
    finished: Aim | None = None
    peers_wait: bool = False
    told_to_stop: bool = False

    def __post_init__(self) -> None:
        self.obey()

    def tell(self, event: policy.Event) -> None:
        self.told_to_stop = self.told_to_stop or isinstance(event, SignalReceived | PeersStopped)
        self.decision = policy.decide(self.now, self.decision.state, event)
        self.obey()

    def obey(self) -> None:
        for command in self.decision.commands:
            match command:
                case Join():
                    assert not self.alive, "a generation began beside the one before"
                    assert not self.told_to_stop, "a signal led to a restart"
                    self.joining = True
                case StartWorkers():
                    self.alive = set(self.decision.state.running)
                case Sweep():
                    self.sweeps += 1
                case TellPeers("done"):
                    self.peers_wait = True
                case Finish(aim):
                    # A lost fork server takes the workers with it, so Broken may finish at once.
                    self.finished = aim

    def possible(self) -> list[policy.Event]:
        """What must happen eventually if nothing interferes."""
        events: list[policy.Event] = []
        if self.joining:
            events.append(formed(self.decision.state, WORKERS))
        events += [WorkerEnded(index, failed=False) for index in sorted(self.alive)]
        if self.sweeps and not self.alive:
            events.append(Swept())
        if self.decision.state.kill_at is not None:
            events.append(GraceOver())
        if self.peers_wait:
            events.append(PeersDone())
        return events

    def let_happen(
        self, event: policy.Event, *, failed: bool = False, symptom: bool = False
    ) -> None:
        match event:
            case RoundFormed():
                self.joining = False
            case WorkerEnded(index):
                self.alive.discard(index)
                event = WorkerEnded(index, failed, symptom)
            case Swept():
                self.sweeps -= 1
            case GraceOver():
                self.now = max(self.now, self.decision.state.kill_at or 0.0)
        self.tell(event)


@settings(max_examples=200, deadline=None)
@given(start=STATES, data=st.data())
def test_the_job_always_comes_to_an_end(start, data):
    world = World(policy.start(start))
    for _ in range(data.draw(st.integers(0, 25), label="steps")):
        if world.finished is not None:
            break
        if data.draw(st.booleans(), label="something from outside"):
            outside = st.one_of(
                st.builds(SignalReceived, SIGNALS),
                st.builds(PeerFailed, st.just(1), st.integers(0, 3)),
                st.builds(PeersStopped, st.just(1)),
                st.builds(PeerLost, st.just(1)),
            )
            world.tell(data.draw(outside))
        elif possible := world.possible():
            event = data.draw(st.sampled_from(possible))
            failed, symptom = data.draw(st.tuples(st.booleans(), st.booleans()), label="failed")
            world.let_happen(event, failed=failed, symptom=symptom)
    for _ in range((WORKERS + 6) * (start.max_restarts + 2)):
        if world.finished is not None:
            break
        possible = world.possible()
        assert possible, f"stuck: nothing is expected in {world.decision.state}"
        world.let_happen(possible[0])
    assert world.finished is not None, f"no end in sight: {world.decision.state}"
    assert world.finished is world.decision.state.aim


@given(start=STATES, phase=st.sampled_from(Phase), aim=st.sampled_from(Aim), event=EVENTS)
def test_every_event_is_answered_in_every_phase(start, phase, aim, event):
    before = replace(start, phase=phase, aim=aim, running=frozenset({0, 1}), kill_at=1.0)
    decision = policy.decide(2.0, before, event)
    assert decision.reason
    assert isinstance(decision.state, State)


@dataclass
class Nodes:
    """Several nodes whose workers are in a session, and their shared journal. Each reads it at its own pace."""

    states: list[State]
    workers: list[set[int]]
    journal: list[policy.Event | tuple[str, int]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    replaced: list[list[tuple[int, int]]] = field(default_factory=list)

    def tell(self, node: int, event: policy.Event) -> None:
        decision = policy.decide(0.0, self.states[node], event)
        self.states[node] = decision.state
        for command in decision.commands:
            match command:
                case TellPeers("in session" | "out of session" as what):
                    self.journal.append(NodeInSession(node, what == "in session"))
                case TellPeers("failed"):
                    self.journal.append(("failed", node))
                case TellLoss(index, survivors):
                    self.journal.append(LossTold(node, index, survivors))
                case Replace(index):
                    entry = self.journal[self.read[node] - 1]
                    assert isinstance(entry, LossTold)
                    self.replaced[node].append((entry.node_rank, entry.index or 0))
                    if index is not None:
                        self.workers[node].add(index)
                case SignalWorkers():
                    for each in sorted(self.workers[node]):
                        self.end(node, each, failed=True)

    def end(self, node: int, index: int, *, failed: bool) -> None:
        self.workers[node].discard(index)
        self.tell(node, WorkerEnded(index, failed))

    def read_on(self, node: int) -> bool:
        if self.read[node] == len(self.journal):
            return False
        entry = self.journal[self.read[node]]
        self.read[node] += 1
        match entry:
            case ("failed", teller):
                if teller != node:
                    self.tell(node, PeerFailed(teller, 0))
            case LossTold(teller, index, survivors):
                self.tell(node, LossTold(teller, index if teller == node else None, survivors))
            case event:
                self.tell(node, event)
        return True


@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.integers(1, 2), min_size=2, max_size=3), data=st.data())
def test_all_nodes_replace_the_same_workers_or_restart_all(sizes, data):
    count = len(sizes)
    indices = [frozenset(range(size)) for size in sizes]
    common = {"num_nodes": count, "nodes": count, "max_losses": 4, "loss_window": 1.0}
    states = [running(*each, **common) for each in indices]
    world = Nodes(states, [set(each) for each in indices], [], [0] * count, [[] for _ in sizes])
    for _ in range(data.draw(st.integers(0, 40), label="steps")):
        node = data.draw(st.integers(0, count - 1), label="node")
        alive = sorted(world.workers[node])
        match data.draw(st.sampled_from(["enter", "enter", "read", "read", "die", "leave"])):
            case "read":
                world.read_on(node)
            case "enter" if alive:
                world.tell(node, SessionEntered(data.draw(st.sampled_from(alive))))
            case "die" if alive:
                world.end(node, data.draw(st.sampled_from(alive)), failed=True)
            case "leave" if kept := sorted(world.states[node].kept & set(alive)):
                index = data.draw(st.sampled_from(kept))
                world.tell(node, SessionLeft(index))
                world.end(node, index, failed=False)
    while any(world.read_on(node) for node in range(count)):
        pass  # what one node reads makes it tell the others something
    keeping = [each.phase is Phase.RUNNING for each in world.states]
    done = [each.aim is Aim.SUCCEED for each in world.states]
    assert all(keeping) or not any(keeping) or all(done), "some nodes restart, others wait"
    if all(keeping):
        assert all(each == world.replaced[0] for each in world.replaced)
        assert all(not each.lost for each in world.states)
    lengths = {len(each) for each in world.replaced}
    shortest = min(lengths)
    assert all(each[:shortest] == world.replaced[0][:shortest] for each in world.replaced)


@dataclass
class Job:
    """Three nodes whose workers are in a session, and a waiting one. Each hears of events at its own pace."""

    states: list[State]
    # For each node: its workers' indices, and whether they have the state or start with nothing.
    workers: list[dict[int, str]]
    ranks: list[int | None]
    inbox: list[list[policy.Event]] = field(default_factory=lambda: [[] for _ in range(4)])
    joined: dict[int, Held | None] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    sweeping: set[int] = field(default_factory=set)
    generation: int = 0

    def tell(self, node: int, event: policy.Event) -> None:
        before = self.states[node]
        decision = policy.decide(0.0, before, event)
        state = self.states[node] = decision.state
        for command in decision.commands:
            match command:
                case Join():
                    self.joined[node] = self.held(node)
                case StartWorkers(takes_over):
                    begin = "takes over" if takes_over else "anew"
                    self.workers[node] = dict.fromkeys(state.running, begin)
                case KeepWorkers(lost):
                    self.workers[node] |= dict.fromkeys(lost, "takes over")
                case Replace(index) if index is not None:
                    self.workers[node][index] = "takes over"
                case TellLoss(index, survivors):
                    for other in self.members():
                        mine = index if other == node else None
                        rank = self.ranks[node]
                        assert rank is not None
                        self.send(other, LossTold(rank, mine, survivors))
                case TellPeers("failed" | "not kept" as what) if (
                    state.generation == self.generation
                ):
                    rank = self.ranks[node]
                    assert rank is not None
                    for other in self.members():
                        if what == "not kept":
                            self.send(other, NotKept(rank))
                        elif other != node:
                            self.send(other, PeerFailed(rank, state.generation))
                case SignalWorkers():
                    for index in list(self.workers[node]):
                        self.end(node, index)
                case Sweep():
                    self.sweeping.add(node)

    def send(self, node: int, event: policy.Event) -> None:
        self.inbox[node].append(event)

    def members(self) -> list[int]:
        return [each for each in range(4) if self.ranks[each] is not None and each not in self.dead]

    def held(self, node: int) -> Held | None:
        state = self.states[node]
        if state.phase is not Phase.REJOINING:
            return None
        has_state = bool(state.kept & state.running)
        replaced = state.replaced
        return Held(
            generation=state.generation, workers=(2, 2, 2), replaced=replaced, has_state=has_state
        )

    def end(self, node: int, index: int) -> None:
        del self.workers[node][index]
        self.tell(node, WorkerEnded(index, failed=True))

    def has_state(self) -> bool:
        return any("in session" in self.workers[node].values() for node in self.members())

    def lose(self, node: int) -> None:
        self.dead.add(node)
        rank, self.ranks[node] = self.ranks[node], None
        self.joined.pop(node, None)
        assert rank is not None
        for other in self.members():
            self.send(other, PeerLost(rank))

    def meet(self) -> None:
        """A round forms once all live nodes have joined."""
        living = [each for each in range(4) if each not in self.dead]
        if not all(each in self.joined for each in living):
            return
        order: list[int | None] = [None, None, None]
        for node in living:
            if (rank := self.ranks[node]) is not None:
                order[rank] = node
        new = [each for each in living if self.ranks[each] is None]
        order = [new.pop(0) if each is None and new else each for each in order]
        chosen = [each for each in order if each is not None]
        records: list[dict[str, object]] = []
        for node in chosen:
            held = self.joined[node]
            facts = {} if held is None else {"held": held.to_json()}
            records.append({"last_rank": self.ranks[node], "facts": facts})
        kept, _ = keep_in_round(records, [2] * len(chosen))
        self.generation += 1
        for rank, node in enumerate(chosen):
            self.ranks[node] = rank
            del self.joined[node]
            keepers = None if kept is None else kept.keepers
            event = RoundFormed(
                *(2, self.generation, 0, False, len(chosen), keepers),
                is_keeper=keepers is not None and rank in keepers,
                replaced=0 if kept is None else kept.replaced,
                bare=frozenset() if kept is None else kept.bare,
                is_bare=kept is not None and rank in kept.bare,
            )
            self.send(node, event)

    def hear(self, node: int) -> bool:
        if node in self.sweeping:
            self.sweeping.discard(node)
            self.workers[node].clear()
            self.tell(node, Swept())
            return True
        if not self.inbox[node]:
            return False
        self.tell(node, self.inbox[node].pop(0))
        return True


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_after_the_loss_of_nodes_all_others_keep_their_workers_or_none_does(data):
    members = [on_three_nodes(max_restarts=9) for _ in range(3)]
    waiting = state(elastic=True, num_nodes=3, max_restarts=9, max_losses=4)
    everyone = dict.fromkeys((0, 1), "in session")
    job = Job([*members, waiting], [dict(everyone) for _ in range(3)] + [{}], [0, 1, 2, None])
    job.joined[3] = None
    for _ in range(data.draw(st.integers(0, 30), label="steps")):
        living = [each for each in range(4) if each not in job.dead]
        node = data.draw(st.sampled_from(living), label="node")
        match data.draw(st.sampled_from(["hear", "hear", "hear", "meet", "die", "lose", "enter"])):
            case "hear":
                job.hear(node)
            case "meet":
                job.meet()
            case "die" if job.workers[node]:
                job.end(node, data.draw(st.sampled_from(sorted(job.workers[node]))))
            case "lose" if len(job.members()) > 2:
                job.lose(data.draw(st.sampled_from(job.members())))
            case "enter":
                for index, how in list(job.workers[node].items()):
                    if how == "anew" or (how == "takes over" and job.has_state()):
                        job.workers[node][index] = "in session"
                        job.tell(node, SessionEntered(index))
    for _ in range(200):
        moved = [job.hear(each) for each in range(4) if each not in job.dead]
        if not any(moved):
            job.meet()
            if not any(job.inbox[each] for each in range(4) if each not in job.dead):
                break
    members_now = [job.states[each] for each in job.members()]
    assert {each.phase for each in members_now} == {Phase.RUNNING}, members_now
    assert {each.generation for each in members_now} == {job.generation}
    found = [how for each in job.members() for how in job.workers[each].values()]
    assert all(
        set(job.workers[each]) == job.states[each].running and len(job.workers[each]) == 2
        for each in job.members()
    )
    assert "anew" not in found or "takes over" not in found, "newcomers would wait for nobody"
    assert "takes over" not in found or job.has_state(), "newcomers would wait for a state"


@pytest.mark.parametrize(
    ("phase", "generation", "is_past"),
    [
        (Phase.RUNNING, 2, True),
        (Phase.RUNNING, 3, False),
        (Phase.REJOINING, 2, True),
        (Phase.REJOINING, 3, False),
        (Phase.STOPPING, 2, True),
        (Phase.JOINING, 2, False),  # the round that is to follow has not formed yet
        (Phase.JOINING, 1, True),
    ],
)
def test_a_late_loss_of_an_earlier_round_is_none_of_the_present_one(
    phase: Phase, generation: int, is_past: bool
) -> None:
    assert policy.is_past(state(generation=3, phase=phase), generation) is is_past


def restarts_of(start: State, failures: list[float]) -> tuple[list[float], float | None]:
    """One node whose only worker fails at these times: returns when all restart, and when the job has failed."""
    now = 0.0
    current = policy.decide(now, start, RoundFormed(1)).state
    restarts = []
    for gap in failures:
        now += gap
        failed = policy.decide(now, current, WorkerEnded(0, failed=True))
        swept = policy.decide(now, failed.state, Swept())
        join = next((each for each in swept.commands if isinstance(each, Join)), None)
        if join is None:
            return restarts, now
        restarts.append(now)
        ages = tuple(now - at for at in swept.state.charged)
        again = RoundFormed(1, join.generation, join.restarts + 1, ages=ages)
        current = policy.decide(now, swept.state, again).state
    return restarts, None


@given(
    st.integers(0, 3),
    st.integers(2, 50),
    st.lists(st.integers(1, 60).map(float), max_size=12),
)
def test_restarts_refill_and_there_are_never_more_of_them_in_a_window(
    most: int, window: int, failures: list[float]
) -> None:
    windowed = state(max_restarts=most, restart_window=float(window))
    restarts, ended = restarts_of(windowed, failures)
    for index, at in enumerate(restarts):
        assert sum(at - window < each <= at for each in restarts[: index + 1]) <= most
    if ended is not None:
        assert sum(ended - window < each for each in restarts) == most
    without, ended_without = restarts_of(state(max_restarts=most), failures)
    assert len(without) <= most and without == restarts[: len(without)]
    assert (ended_without is None) == (len(failures) <= most)


@given(st.lists(st.lists(st.integers(0, 9).map(float), max_size=3), min_size=1, max_size=4))
def test_all_nodes_count_the_restarts_that_the_round_counts(told: list[list[float]]) -> None:
    """Nodes that came later know of fewer restarts."""
    records = [{"facts": {"ages": ages, "restarts": len(ages)}} for ages in told]
    ages = plans.ages(records)
    used = plans.restarts(records, whole=True)
    assert len(ages) == used == max(map(len, told))
    one = state(restart_window=10.0, charged=(1.0,), restarts=1)
    other = state(restart_window=10.0)
    formed = RoundFormed(1, 1, used + 1, ages=ages)
    ends = [policy.decide(50.0, each, formed).state for each in (one, other)]
    assert ends[0].charged == ends[1].charged
    assert len(ends[0].charged) == used + 1


def test_ages_that_make_no_sense_do_not_count() -> None:
    assert plans.ages_in({"ages": [1, "x", None, -3, 2.5]}) == (1.0, 2.5)
    assert plans.ages_in({"ages": "x"}) == plans.ages_in({}) == ()

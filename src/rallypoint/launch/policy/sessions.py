"""Losses of workers in a session: one worker is replaced, and the others keep what they have."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from rallypoint._core.rank_words import in_words, numbers_in_words

from .commands import Decision, Replace, TellLoss, TellPeers
from .events import LossTold, WorkerEnded
from .generations import OVER, RECORDS_LOST, after_failure, stop, with_reason
from .state import Phase, State


# Whether a reason holds, and the reason in words.
_Reason: TypeAlias = "tuple[bool, str]"

# Seconds after the start of the workers. If they are in no session by then, arriving nodes no longer wait for it.
_SET_UP = 300.0
_NOBODY = "no remaining worker has the session's state"


def why_not_replaced(now: float, state: State, lost: WorkerEnded) -> str:
    """Why the others do not survive the loss of this worker, as far as this node knows. Empty: they do, and it is replaced."""
    others = state.running - {lost.index}
    count = sum(now - at < state.loss_window for at in state.losses) + len(state.lost)
    limit = f"--max-losses is used up ({count} in {state.loss_window:g} s)"
    # With several nodes, LossTold looks for survivors.
    nobody = state.num_nodes == 1 and not others & state.kept
    return _first(
        (state.phase is not Phase.RUNNING, "all workers are being stopped"),
        (lost.index not in state.running, "it is not a worker"),
        (lost.refused, "its session cannot be kept"),
        (lost.again, "the same error came at the same step before"),
        (state.max_losses == 0, "--max-losses is 0"),
        (count >= state.max_losses, limit),
        (state.has_left, OVER),
        (state.relied_on and lost.index in state.kept, RECORDS_LOST),
        *_outside(state, others),
        (nobody, _NOBODY),
    )


def why_not_kept(state: State) -> str:
    """Why the workers of this node do not survive the loss of another node. Empty: they do."""
    return _first(
        (not state.elastic, "the number of nodes is fixed"),
        (state.phase is not Phase.RUNNING, "all workers are being stopped"),
        (state.has_left, OVER),
        *_outside(state, state.running),
        (state.is_sharded, "the state is sharded, without copies on other nodes"),
    )


def why_nobody_is_admitted(now: float, state: State) -> str:
    """Why a node that asks is not admitted now. Empty: it is admitted.

    Before the workers are in their session, and after it has ended, admission would make all of them start afresh.
    """
    is_beginning = (
        state.expects_session
        and len(state.in_session) < state.nodes
        and now - state.began < _SET_UP
    )
    return _first(
        (state.has_left or state.is_ending, "the session has ended"),
        (
            is_beginning,
            f"it is admitted once all workers are in the session (or {_SET_UP:g} s after their start, if they are in none)",
        ),
    )


def _outside(state: State, workers: frozenset[int]) -> tuple[_Reason, _Reason]:
    """Reasons that hold if some of these workers, or of other nodes' workers, are not in the session."""
    here = workers - state.kept - state.arriving
    nodes = frozenset(range(state.nodes)) - state.in_session if state.num_nodes > 1 else frozenset()
    words = "not all workers are in the session (missing: {})"
    return (
        (bool(here), words.format(f"local {in_words(here)}")),
        (bool(nodes), words.format(f"node{'s' * (len(nodes) > 1)} {numbers_in_words(nodes)}")),
    )


def _first(*reasons: _Reason) -> str:
    return next((why for holds, why in reasons if holds), "")


def lose_worker(now: float, state: State, index: int) -> Decision:
    """Replace this worker; with several nodes, only once all have been told."""
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


def enter(state: State, index: int) -> Decision:
    """A worker has entered its session."""
    new = replace(state, kept=state.kept | {index}, arriving=state.arriving - {index})
    if new.num_nodes == 1 or new.said_in_session or new.lost or not new.running <= new.kept:
        return Decision(new, (), f"worker {index} is in a session")
    new = replace(new, said_in_session=True)
    return Decision(new, (TellPeers("in session"),), "all workers of this node are in a session")


def leave(now: float, state: State, index: int) -> Decision:
    """A worker's session has ended well."""
    told = state.said_in_session
    new = replace(state, kept=state.kept - {index}, said_in_session=False, has_left=True)
    commands = (TellPeers("out of session"),) if told else ()
    why = f"worker {index} left its session"
    if state.phase is Phase.RUNNING and state.arriving:
        # It left just as another worker was lost, whose replacement would wait for it.
        new = with_reason(new, f"{OVER} meanwhile")
        aim, verdict = after_failure(new, symptom=False)
        return stop(now, new, aim, why, tell="failed", verdict=verdict)
    return Decision(new, commands, why)


def note_node(state: State, node_rank: int, inside: bool) -> Decision:
    """All workers of a node are in a session, or no longer are."""
    node = frozenset({node_rank})
    if inside:
        new = replace(
            state,
            in_session=state.in_session | node,
            without_survivors=state.without_survivors - node,
        )
        return Decision(new, (), f"node {node_rank} is in a session")
    new = replace(state, in_session=state.in_session - node, is_ending=True)
    return Decision(new, (), f"node {node_rank} has left its session")


def note_loss(now: float, state: State, event: LossTold) -> Decision:
    """Another worker takes the lost one's place if all nodes can keep theirs, and some worker has the state."""
    why = f"a worker of node {event.node_rank} is lost"
    if state.phase is Phase.REJOINING:
        return Decision(state, (), f"{why} while the nodes meet again")
    if not event.survivors:
        bare = state.without_survivors | {event.node_rank}
        state = replace(state, without_survivors=bare)
    of_this_node, _ = _outside(state, state.running)
    not_replaced = _first(
        (state.has_left, OVER),
        of_this_node,
        (not state.in_session - state.without_survivors, _NOBODY),
    )
    if state.phase is Phase.RUNNING and not not_replaced:
        return _replace_worker(now, state, event.index, why)
    state = with_reason(state, not_replaced)
    if event.index is not None:
        state = replace(state, lost=state.lost - {event.index})
    if state.phase in {Phase.STOPPING, Phase.LISTENING, Phase.JOINING}:
        return Decision(state, (), f"{why}, but all workers are being stopped")
    aim, verdict = after_failure(state, symptom=False)
    why = f"{why}, and not all others can be kept"
    return stop(now, state, aim, why, tell="failed", verdict=verdict)

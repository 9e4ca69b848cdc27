"""Losses of workers in a session: one worker is replaced, and the others keep what they have."""

from __future__ import annotations

from dataclasses import replace

from .commands import Decision, Replace, TellLoss, TellPeers
from .events import LossTold
from .generations import after_failure, stop
from .state import Phase, State


def can_replace(now: float, state: State, index: int) -> bool:
    """Whether the others survive the loss of this worker, as far as this node knows."""
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


def lose_worker(now: float, state: State, index: int) -> Decision:
    """Replace this worker; with several nodes, once all are told."""
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
        # It left just when another one was lost, whose successor would wait for it.
        aim, verdict = after_failure(new, symptom=False)
        return stop(now, new, aim, why, tell="failed", verdict=verdict)
    return Decision(new, commands, why)


def note_node(state: State, node_rank: int, inside: bool) -> Decision:
    """All workers of a node are in a session, or no longer."""
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


def note_loss(now: float, state: State, event: LossTold) -> Decision:
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
    aim, verdict = after_failure(state, symptom=False)
    why = f"{why}, and not all others can be kept"
    return stop(now, state, aim, why, tell="failed", verdict=verdict)

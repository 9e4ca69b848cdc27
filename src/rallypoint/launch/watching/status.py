"""What a supervisor says about its job when asked (``rally ps``). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rallypoint._core.rank_words import in_words
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Worker
from rallypoint.launch.policy import Phase, State


def status(
    config: LaunchConfig,
    state: State,
    ready: RoundReady | None,
    workers: Iterable[Worker],
    *,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The answer to ``status``.

    Args:
        config: the job's config.
        state: the policy's state.
        ready: the round, if there was one.
        workers: this node's workers in the current generation.
        facts: ``pid``, ``host``, ``seconds`` since the job began, ``log_folder``, ``is_ready``, ``hang`` (None, or the ranks
            that are ``missing`` and those that are ``waiting``), ``arrived``: :attr:`.Coordination.arrived`.
    """
    nodes = len(ready.workers_of_nodes) if ready is not None else 0
    own = [_worker(each) for each in workers]
    reported = (each["progress"] for each in own if each["progress"] is not None)
    return {
        **facts,
        "id": config.rendezvous.run_id,
        "target": config.job.name,
        "args": list(config.job.args)[:100],
        "state": _state(config, state, ready, facts),
        "min_nodes": config.min_nodes or config.num_nodes,
        "max_nodes": config.num_nodes,
        "nodes": nodes,
        "node_rank": ready.node_rank if ready is not None else None,
        "world_size": sum(ready.workers_of_nodes) if ready is not None else 0,
        "generation": ready.generation if ready is not None else None,
        "restarts": state.restarts,
        "max_restarts": config.max_restarts,
        "replaced": state.replaced,
        "progress": next(reported, None),
        "workers": own,
    }


def _state(
    config: LaunchConfig, state: State, ready: RoundReady | None, facts: Mapping[str, Any]
) -> str:
    match state.phase:
        case Phase.JOINING if state.num_nodes > 1:
            return _waiting_for_nodes(config, facts["arrived"])
        case Phase.JOINING:
            return "starting" if ready is None else "restarting"
        case Phase.REJOINING:
            return "a node is lost: its workers wait while the nodes meet again"
        case Phase.RUNNING if not facts["is_ready"]:
            return "starting"
        case Phase.RUNNING if (hang := facts["hang"]) is not None:
            return f"HANGING: {in_words(hang['missing'])}" if hang["missing"] else "HANGING"
        case Phase.RUNNING if state.arriving:
            return "replacing a lost worker"
        case Phase.RUNNING:
            return "running"
        case Phase.LISTENING:
            return "a worker has failed: looking for the cause"
        case Phase.STOPPING | Phase.SWEEPING:
            return {"restart": "restarting", "fail": "failing"}.get(state.aim.value, "ending")
        case Phase.WAITING:
            return "its workers have ended well; waiting for other nodes"
        case _:
            return "ending"


def _waiting_for_nodes(config: LaunchConfig, arrived: int | None) -> str:
    if arrived is None:
        return "waiting for other nodes"
    if not arrived:
        return "waiting to be admitted"
    least, most = config.min_nodes or config.num_nodes, config.num_nodes
    # A node that has exited and come back counts twice.
    return f"waiting for nodes, {min(arrived, most)} of {least if arrived < least else most}"


def _worker(worker: Worker) -> dict[str, Any]:
    if worker.status is not None:
        how = "ended"
    elif not worker.pid:
        how = "starting"
    elif worker.hung:
        how = "hung"
    else:
        how = "running"
    return {
        "rank": worker.ranks.rank,
        "local_rank": worker.ranks.local_rank,
        "pid": worker.pid,
        "state": how,
        "in_session": worker.in_session,
        "progress": worker.progress(),
    }

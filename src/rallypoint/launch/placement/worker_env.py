"""The variables a worker is given: pure, from its ranks and the round.

Names and meanings are torchrun 2.13's (torch/distributed/elastic/agent/server/local_elastic_agent.py);
``RALLY_GENERATION`` is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from rallypoint.errors import ConfigError

from .ranks import WorkerRanks


# Set for a worker that takes the place of a lost one (rallypoint.elastic).
TAKES_OVER = "RALLY_TAKES_OVER"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFacts:
    """What all workers of one generation share."""

    master_addr: str
    master_port: int
    generation: int
    restart_count: int
    max_restarts: int
    run_id: str
    role: str
    signals: str
    virtual_local_rank: bool = False
    is_open: bool = False  # the job has no secret
    bind: str | None = None  # --bind


def common_defaults(env: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """What the fork server must have before it imports torch, because torch reads it at import.

    One OpenMP thread per worker, as torchrun does, when there are several workers and the user
    has not chosen: n workers with one thread per core each would slow one another down.
    """
    if "OMP_NUM_THREADS" not in env and local_world_size > 1:
        return {"OMP_NUM_THREADS": "1"}
    return {}


def worker_env(
    env: Mapping[str, str], ranks: WorkerRanks, facts: RoundFacts, error_file: str
) -> dict[str, str]:
    """The variables one worker gets on top of the supervisor's environment.

    Args:
        env: the supervisor's environment.
        error_file: where the worker's error record goes, in torchelastic's format; may be empty.

    Raises:
        ConfigError: ``--virtual-local-rank`` with fewer visible devices than workers.
    """
    new = {
        **place_env(ranks),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "ROLE_NAME": facts.role,
        "MASTER_ADDR": facts.master_addr,
        "MASTER_PORT": str(facts.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(facts.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(facts.max_restarts),
        "TORCHELASTIC_RUN_ID": facts.run_id,
        # The store is served beside the workers, by a process of its own: rank 0 is a client too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": facts.signals,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "RALLY_GENERATION": str(facts.generation),
    }
    if facts.is_open:
        new["RALLY_INSECURE"] = "1"
    if facts.bind is not None:
        new["RALLY_BIND"] = facts.bind
    if facts.virtual_local_rank:
        new["LOCAL_RANK"] = "0"
        new["CUDA_VISIBLE_DEVICES"] = _own_device(env, ranks.local_rank)
    return new


def place_env(ranks: WorkerRanks) -> dict[str, str]:
    """The variables that change when a session continues with a different number of ranks."""
    return {
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world_size),
        "GROUP_RANK": str(ranks.group_rank),
        "GROUP_WORLD_SIZE": str(ranks.group_world_size),
        "ROLE_RANK": str(ranks.rank),
        "ROLE_WORLD_SIZE": str(ranks.world_size),
    }


def _own_device(env: Mapping[str, str], local_rank: int) -> str:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    devices = [item.strip() for item in visible.split(",") if item.strip()]
    if not devices:
        return ""  # hidden on purpose: a job on CPUs
    if local_rank >= len(devices):
        raise ConfigError(
            "CUDA_VISIBLE_DEVICES",
            visible,
            f"--virtual-local-rank needs a device for local rank {local_rank},"
            f" but {len(devices)} are visible",
        )
    return devices[local_rank]


def fill_in(args: Sequence[str], ranks: WorkerRanks, generation: int) -> tuple[str, ...]:
    """A worker's own arguments (``--templates``): ``{rank}`` and the like replaced; other braces stay as they are."""
    values = {
        "{rank}": ranks.rank,
        "{local_rank}": ranks.local_rank,
        "{node_rank}": ranks.group_rank,
        "{generation}": generation,
    }
    names = re.compile("|".join(map(re.escape, values)))
    return tuple(names.sub(lambda match: str(values[match[0]]), arg) for arg in args)


def log_prefix(template: str | None, role: str, ranks: WorkerRanks) -> str:
    """The prefix of each teed line: ``[default0]:``, or the user's template filled in."""
    if template is None:
        return f"[{role}{ranks.local_rank}]:"
    return Template(template).safe_substitute(
        role_name=role, local_rank=ranks.local_rank, rank=ranks.rank
    )

"""The fields of the manifest for ``kubectl``: an indexed Job, and the Service that gives its pods names. Pure.

The values are JSON, which YAML contains. MASTER_ADDR and WORLD_SIZE, with the JOB_COMPLETION_INDEX that Kubernetes sets,
tell a node its place. rally restarts workers, so a Job of fixed size has a backoffLimit of 0: a new pod would find a
job that has failed. In an elastic one (``--nnodes MIN:MAX``) lost pods are replaced, and a pod that fails on its own
ends the Job. Pods look each other up before they are ready. If the namespace has a Secret ``rally`` with the key
``secret``, the nodes use it. Kubernetes' names are from the API reference of batch/v1 Job and v1 Service.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line import given as command_lines
from rallypoint.launch.config import DEFAULT_SHUTDOWN_TIMEOUT

from .request import Request, is_elastic, run_words


# The most lost pods of an elastic job; evictions and preemptions do not count.
_REPLACEMENTS = 100
_FAILURE_POLICY = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            # Neither SIGKILL nor SIGTERM ended it, so the job itself failed.
            "onExitCodes": {"operator": "NotIn", "values": [137, 143]},
            # Kubernetes 1.26 and 1.27 publish a schema that requires this in every rule.
            "onPodConditions": [],
        },
    ]
}
# What the supervisor needs beyond --shutdown-timeout, for its report.
_REPORT = 15


def fields(request: Request) -> Mapping[str, str]:
    """The values of the template's fields."""
    resources = {"limits": {"nvidia.com/gpu": str(request.gpus)}} if request.gpus else {}
    words = run_words(request)
    elastic = is_elastic(request)
    return {
        "name": request.name,
        "nodes": str(request.nodes),
        "gpus": str(request.gpus),
        "image": json.dumps(request.image),
        "resources": json.dumps(resources),
        "backoff": str(_REPLACEMENTS if elastic else 0),
        "failure_policy": f'"podFailurePolicy": {json.dumps(_FAILURE_POLICY)},' if elastic else "",
        "grace": str(_grace(request)),
        "words": _as_given(words),
        "command": _as_given(["python", "-m", "rallypoint", "run", *words]),
    }


def _as_given(words: Sequence[str]) -> str:
    """The words as JSON. Kubernetes replaces ``$(NAME)`` with variables, and takes ``$$`` for a dollar."""
    return json.dumps([each.replace("$", "$$") for each in words])


def _grace(request: Request) -> int:
    """How many seconds a pod has between SIGTERM and SIGKILL: as many as its workers have, and time for the report after that."""
    text = command_lines.parse(request.words).values.get("--shutdown-timeout", "")
    try:
        seconds = float(text or DEFAULT_SHUTDOWN_TIMEOUT)
        return math.ceil(seconds) + _REPORT
    except (ValueError, OverflowError):
        raise ConfigError("--shutdown-timeout", text, "expected seconds") from None

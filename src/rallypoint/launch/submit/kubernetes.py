"""The fields of the manifest for ``kubectl``: an indexed Job, and the Service that gives its pods names. Pure.

The values are JSON, which YAML contains. MASTER_ADDR and WORLD_SIZE, with the JOB_COMPLETION_INDEX that Kubernetes sets,
tell a node where it stands. rally restarts workers, so the Job has a backoffLimit of 0: a new pod would find a job that has
failed. Pods look each other up before they are ready. If the namespace has a Secret ``rally`` with the key ``secret``, the
nodes use it. Names of Kubernetes: the API reference of batch/v1 Job and v1 Service.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from .request import Request, run_words


def fields(request: Request) -> Mapping[str, str]:
    """The values of the template's fields."""
    resources = {"limits": {"nvidia.com/gpu": str(request.gpus)}} if request.gpus else {}
    words = run_words(request)
    return {
        "name": request.name,
        "nodes": str(request.nodes),
        "gpus": str(request.gpus),
        "image": json.dumps(request.image),
        "resources": json.dumps(resources),
        "words": json.dumps(words),
        "command": json.dumps(["python", "-m", "rallypoint", "run", *words]),
    }

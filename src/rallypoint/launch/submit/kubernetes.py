"""The manifest for ``kubectl``: an indexed Job, and the Service that gives its pods names. Pure.

Written as JSON, which Kubernetes takes as it does YAML. Fields: the API reference of batch/v1 Job and v1 Service.
"""

from __future__ import annotations

import json
from typing import Any

from .request import Request, run_words


def manifest(request: Request) -> str:
    """The objects of a job. If the namespace has a Secret ``rally`` with the key ``secret``, the nodes use it."""
    name = request.name
    secret = {"name": "rally", "key": "secret", "optional": True}
    container: dict[str, Any] = {
        "name": "rally",
        "image": request.image,
        "command": ["python", "-m", "rallypoint", "run", *run_words(request)],
        "env": [
            # With JOB_COMPLETION_INDEX, which Kubernetes sets, they tell a node where it stands.
            {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "WORLD_SIZE", "value": str(request.nodes)},
            {"name": "RALLY_SECRET", "valueFrom": {"secretKeyRef": secret}},
        ],
    }
    if request.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": request.gpus}}
    pod = {"subdomain": name, "restartPolicy": "Never", "containers": [container]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            "backoffLimit": 0,  # rally restarts workers; a new pod would find a job that has failed
            "template": {"metadata": {"labels": {"rallypoint": name}}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        # Pods look each other up while they start, before they are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"rallypoint": name},
        },
    }
    items = {"apiVersion": "v1", "kind": "List", "items": [service, job]}
    return json.dumps(items, indent=2) + "\n"

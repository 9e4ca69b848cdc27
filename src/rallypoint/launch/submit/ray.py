"""The fields of the script that calls ``ray job submit``. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from . import packed_words
from .request import Request


def fields(request: Request, client: str) -> Mapping[str, str]:
    """The values of the template's fields.

    Args:
        request: the job.
        client: the command ``ray``.
    """
    least = request.nodes if request.min_nodes is None else request.min_nodes
    nodes = f"{request.nodes}" if least == request.nodes else f"{least}:{request.nodes}"
    gpus = [f"--gpus={request.gpus}"] if request.gpus else []
    # Ray gives this to a shell of the cluster, and quotes only words that contain blanks: ours must need no quotes. The
    # interpreter is the cluster's.
    words = f"--words={packed_words.pack(request.words)}"
    command = ["python", "-m", "rallypoint.ray", f"--nodes={nodes}", *gpus, words]
    return {
        "name": request.name,
        "nodes": nodes,
        "gpus": str(request.gpus),
        "ray": shlex.quote(client),
        "options": shlex.join(request.options),
        "words": shlex.join(request.words),
        "command": shlex.join(command),
    }

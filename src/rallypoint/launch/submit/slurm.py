"""The fields of the script for ``sbatch``: a task on each node; the tasks find each other by Slurm's variables. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rallypoint.errors import ConfigError

from .request import Request, is_elastic, is_requeued, run_words


def fields(request: Request, python: str, avoided: Sequence[str] = ()) -> Mapping[str, str]:
    """The values of the template's fields.

    Args:
        request: the job.
        python: the interpreter, at the same path on all nodes.
        avoided: nodes that must not be allocated.

    Raises:
        ConfigError: the request excludes nodes, and so does the list of those to avoid.
    """
    if avoided and any(each.partition("=")[0] in {"--exclude", "-x"} for each in request.options):
        problem = "cannot be combined with --avoid-hosts, which writes one"
        raise ConfigError("--exclude", None, problem, "add these nodes to the list")
    # An elastic job outlives a node: in the allocation, and in the step.
    no_kill = ["--no-kill"] if is_elastic(request) else []
    # What the job has written so far stays.
    again = ["--requeue", "--open-mode=append"] if is_requeued(request) else []
    options = [
        *no_kill,
        *again,
        *([f"--gpus-per-node={request.gpus}"] if request.gpus else []),
        *([f"--exclude={','.join(avoided)}"] if avoided else []),
        *request.options,
    ]
    return {
        "name": request.name,
        "nodes": str(request.nodes),
        "gpus": str(request.gpus),
        "options": "\n".join(f"#SBATCH {each}" for each in options),
        "srun": shlex.join(["srun", "--kill-on-bad-exit=0", *no_kill]),
        "python": shlex.quote(python),
        "words": shlex.join(run_words(request)),
        "command": shlex.join((python, "-m", "rallypoint", "run", *run_words(request))),
    }

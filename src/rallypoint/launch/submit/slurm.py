"""The script for ``sbatch``: pure."""

from __future__ import annotations

import shlex

from .request import Request, run_words


def script(request: Request, python: str) -> str:
    """A task on each node; the tasks find each other by Slurm's variables.

    Args:
        request: the job.
        python: the interpreter, at the same path on all nodes.
    """
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={request.gpus}"] if request.gpus else []),
        *request.options,
    ]
    # rally ends the tasks of a failed job itself, and reports first; srun would kill them meanwhile.
    step = ("srun", "--kill-on-bad-exit=0", python, "-m", "rallypoint", "run", *run_words(request))
    lines = ["#!/bin/bash", *(f"#SBATCH {each}" for each in options), f"exec {shlex.join(step)}"]
    return "\n".join(lines) + "\n"

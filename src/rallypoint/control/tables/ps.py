"""``rally ps``: the jobs of this user on this host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rallypoint.control import client, sockets
from rallypoint.errors import ConfigError, ControlError

from . import job_table


HELP = """\
usage: rally ps [JOB] [--json]

List the jobs of this user on this host: one row per supervisor (`rally run`, or a program that launches functions).
With JOB (its id, the beginning of it, or the supervisor's pid), list that one.

  JOB       the job's id (--rdzv-id, or the name that was made)
  PID       of the supervisor
  NODE      this node's rank, and how many nodes the job has now
  RANKS     how many of the job's workers run here
  GEN       the generation: 0 at first, plus one after each restart

  --json    one JSON object per job, with its workers; keys in docs/operations.md"""


def command(words: Sequence[str]) -> str:
    """Run ``rally ps``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown, or there are two jobs.
        ControlError: there is no such job, or it does not answer.
    """
    if {"-h", "--help"} & set(words):
        return HELP
    jobs = [word for word in words if not word.startswith("-")]
    for word in words:
        if word != "--json" and word not in jobs:
            raise ConfigError("ps", word, "no such flag (known: --json)", "rally ps --help")
    if len(jobs) > 1:
        raise ConfigError("ps", " ".join(jobs), "expected one job", "rally ps --help")
    found: list[tuple[client.RunningJob, dict[str, Any] | ControlError]]
    if jobs:
        one = client.connect(jobs[0])
        found = [(one, one.status())]
    else:
        found = list(client.running())
    if "--json" in words:
        return "\n".join(json.dumps(told) for _, told in found if isinstance(told, dict))
    if not found:
        return "no job of this user runs on this host"
    return job_table.table(
        [
            (sockets.safe_id(job.path), job.pid, told if isinstance(told, dict) else _reason(told))
            for job, told in found
        ]
    )


def _reason(error: ControlError) -> str:
    return str(error).partition("): ")[2] or str(error).partition(") ")[2] or str(error)

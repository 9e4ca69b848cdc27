"""``rally ps``: the jobs of this user on this host."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.control import client, sockets
from rallypoint.errors import ConfigError, ControlError

from . import job_table


HELP = """\
usage: rally ps [JOB] [--json] [flags of rally run]

List the jobs of this user on this host: one row per supervisor (`rally run`, or a program that launches functions).
With JOB (its id, or the start of it, or the supervisor's pid), list that job on all its nodes.

To ask from another host, give the flags that say where the job's nodes meet, and JOB if the job has a name:
rally ps --rdzv-endpoint node0:29400 (or --master-addr node0, --secret-file …, as for rally run).

  JOB       the job's id (--rdzv-id, or a generated one)
  PID       of the supervisor
  HOST      of the supervisor, if the job has several nodes
  NODE      the node's rank, and how many nodes the job has now
  RANKS     how many of the job's workers run there
  GEN       the generation: 0 at first, plus one after each restart

  --json    one JSON object per row, with its workers; keys in docs/operations.md"""

# Seconds that node 0 may take to say whether its job hangs, and the limit for all such answers in one list.
STATE_PATIENCE, ALL_PATIENCE = 1.0, 4.0


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
    rows = _of_one(client.connect(jobs[0])) if jobs else _here()
    return _shown(rows, as_json="--json" in words)


def of_nodes(name: str, nodes: Mapping[int, dict[str, Any] | None], *, as_json: bool) -> str:
    """What ``rally ps`` prints about a job, from the answers of its nodes.

    Args:
        name: the job's name.
        nodes: each node's status by rank; None for a node that does not answer.
        as_json: print JSON, for programs.
    """
    return _shown(_of_nodes(name, nodes), as_json=as_json)


def _shown(rows: Sequence[job_table.Row], *, as_json: bool) -> str:
    if as_json:
        return "\n".join(json.dumps(row.told) for row in rows if isinstance(row.told, dict))
    return job_table.table(rows) if rows else sockets.none_found()


def _here() -> list[job_table.Row]:
    """The jobs on this host."""
    rows = []
    patience = Deadline(ALL_PATIENCE)
    for job, told in client.running():
        if isinstance(told, ControlError):
            rows.append(job_table.Row(sockets.safe_id(job.path), job.pid, _reason(told)))
            continue
        if told.get("node_rank") and told["state"] == "running" and not patience.expired():
            with contextlib.suppress(ControlError):
                told = _with_hang(told, job.nodes([0], patience=STATE_PATIENCE)[0])
        rows.append(job_table.Row(str(told["id"]), job.pid, told))
    return rows


def _of_one(job: client.RunningJob) -> list[job_table.Row]:
    """One job, on all its nodes."""
    own = job.status()
    name = str(own["id"])
    if own.get("nodes", 1) < 2:  # another version may say less
        return [job_table.Row(name, job.pid, own)]
    try:
        nodes = job.nodes()
    except ControlError as error:
        nodes = dict.fromkeys(range(own["nodes"]))
        nodes[own["node_rank"]] = own
        return _of_nodes(name, nodes, f"cannot be asked: {_reason(error)}")
    return _of_nodes(name, nodes)


def _of_nodes(
    name: str, nodes: Mapping[int, dict[str, Any] | None], why: str = "does not answer"
) -> list[job_table.Row]:
    """A job's nodes, ordered by rank."""
    return [
        job_table.Row(name, None, why, node=f"{rank} of {len(nodes)}")
        if told is None
        else job_table.Row(name, told["pid"], _with_hang(told, nodes[0]), host=told["host"])
        for rank, told in sorted(nodes.items())
    ]


def _with_hang(told: dict[str, Any], first: dict[str, Any] | None) -> dict[str, Any]:
    """A node's status, with a hang that node 0 reports: only node 0 looks for hangs."""
    hangs = first is not None and first.get("hang") and first["generation"] == told["generation"]
    if first is None or not hangs or told["state"] != "running":
        return told
    return {**told, "state": first["state"], "hang": first["hang"]}


def _reason(error: ControlError) -> str:
    return str(error).partition("): ")[2] or str(error).partition(") ")[2] or str(error)

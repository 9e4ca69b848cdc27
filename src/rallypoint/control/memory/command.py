"""``rally memory``: what the workers' memory consists of."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rallypoint.control import client, command_line
from rallypoint.errors import ConfigError

from . import memory_table


HELP = """\
usage: rally memory [JOB] [--rank R[,R…]] [--top N] [--here] [--json]

Show the memory of a job's workers and of their children (DataLoader workers) on all its nodes, as the kernel records it.
The workers take no part in this, except for the memory of CUDA devices.

  RSS       resident memory; a shared page counts in full for each process that has it
  PSS       the same, but a page shared by n processes counts 1/n: the sum over all processes is what they use together
  PRIVATE   the part of RSS that would be freed if the process ended
  SHARED    the other part: libraries, pages from before a fork, shared memory
  SWAP      swapped out

Below the table: the largest mappings of each rank, shared memory (/dev/shm, memory files) with the ranks that have it, and
what torch's allocator holds on each device.

  JOB       its id, or the start of it, or the supervisor's pid (see rally ps); not needed if only one job runs
  --rank R  only these ranks
  --top N   show this many mappings of each rank (default 5, at most 12)
  --here    only the workers on this host
  --json    one JSON object per process; keys in docs/operations.md

The kernel walks all pages of a process for this, which may stop a process with 100 GB for a few tenths of a second."""

# How long the kernel may take to walk the pages of large processes.
PATIENCE = 30.0
WAY = 8.0


def command(words: Sequence[str]) -> str:
    """Run ``rally memory``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown, or has a wrong value.
        ControlError: there is no such job, or it does not answer.
    """
    if {"-h", "--help"} & set(words):
        return HELP
    given = command_line.parse("memory", words, switches=("--here", "--json"), values=("--top",))
    most = _count(given.values.get("--top", "5"))
    question = {
        "ask": "memory",
        "ranks": given.ranks,
        "here": "--here" in given.switches,
        "patience": PATIENCE,
    }
    answer = client.connect(given.job).ask(question, PATIENCE + WAY)
    processes = answer["processes"]
    if "--json" in given.switches:
        return "\n".join(json.dumps(each) for each in processes)
    parts = [memory_table.text(processes, mappings=most)] if processes else ["no worker runs now"]
    parts += [f"node {node} did not answer" for node in answer["silent"]]
    return "\n\n".join(parts)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 12:
        raise ConfigError("--top", text, "expected a number from 1 to 12", "rally memory --help")
    return int(text)

"""``rally ps`` and ``rally stacks``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rallypoint.errors import ConfigError, ControlError

from . import client, job_table, stack_groups


PS_HELP = """\
usage: rally ps [--json]

List the jobs of this user on this host: one row per supervisor (`rally run`, or a program that launches functions).

  JOB       the job's id (--rdzv-id, or the name that was made)
  PID       of the supervisor
  NODE      this node's rank, and how many nodes the job has now
  RANKS     how many of the job's workers run here
  GEN       the generation: 0 at first, plus one after each restart

  --json    one JSON object per job, with its workers; keys in docs/operations.md"""

STACKS_HELP = """\
usage: rally stacks [JOB] [--rank R[,R…]] [--threads] [--native | --signal] [--here] [--json]

Show what the workers of a job are doing, on all its nodes: the Python stack of each, and of its DataLoader workers.
Workers do not help with it, so it works for one that hangs. Ranks with the same stack are one group; the odd ones
out come first: they are what the others wait for. Frames are as in a traceback: the most recent call last.

  JOB          its id, the beginning of it, or the supervisor's pid (rally ps); not needed if there is one job
  --rank R     only these ranks
  --threads    all threads; without it, main threads
  --native     C frames as well; needs py-spy (pip install py-spy)
  --signal     ask by a signal even if py-spy is installed
  --here       only the workers on this host
  --json       one JSON object per process

py-spy is used if it is installed and may look (pip install py-spy). Without it, workers are asked by a signal that
Python code does not see; a process that is stopped or stuck in the kernel is then shown with that instead of a stack."""


def ps(words: Sequence[str]) -> str:
    """Run ``rally ps``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown.
    """
    if {"-h", "--help"} & set(words):
        return PS_HELP
    for word in words:
        if word != "--json":
            raise ConfigError("ps", word, "no such flag (known: --json)", "rally ps --help")
    found = list(client.running())
    if "--json" in words:
        return "\n".join(json.dumps(told) for _, told in found if isinstance(told, dict))
    if not found:
        return "no job of this user runs on this host"
    return job_table.table(
        [(job.pid, told if isinstance(told, dict) else _reason(told)) for job, told in found]
    )


def _reason(error: ControlError) -> str:
    return str(error).partition("): ")[2] or str(error).partition(") ")[2] or str(error)


def stacks(words: Sequence[str]) -> str:
    """Run ``rally stacks``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown, or a rank is no number.
        ControlError: there is no such job, or it does not answer.
    """
    if {"-h", "--help"} & set(words):
        return STACKS_HELP
    names: list[str] = []
    ranks: list[int] = []
    flags: set[str] = set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--rank"):
            _, has_value, value = word.partition("=")
            ranks += _ranks(value if has_value else rest.pop(0) if rest else "")
        elif word in {"--threads", "--native", "--signal", "--here", "--json"}:
            flags.add(word)
        elif word.startswith("-"):
            known = "--rank, --threads, --native, --signal, --here, --json"
            raise ConfigError(
                "stacks", word, f"no such flag (known: {known})", "rally stacks --help"
            )
        else:
            names.append(word)
    if len(names) > 1:
        raise ConfigError("stacks", " ".join(names), "expected one job", "rally stacks --help")
    if {"--native", "--signal"} <= flags:
        raise ConfigError("stacks", "--native --signal", "only py-spy shows C frames", "omit one")
    job = client.connect(*names)
    question = client.stacks_question(
        ranks,
        native="--native" in flags,
        by_signal="--signal" in flags,
        here="--here" in flags,
    )
    patience = client.STACKS_PATIENCE
    answer = job.ask({**question, "patience": patience}, patience + client.STACKS_WAY)
    processes = answer["processes"]
    if "--json" in flags:
        return "\n".join(json.dumps(each) for each in processes)
    parts = [stack_groups.text(processes, all_threads="--threads" in flags)]
    parts += [f"node {node} did not answer" for node in answer["silent"]]
    return "\n\n".join(filter(None, parts)) or "no worker runs now"


def _ranks(value: str) -> list[int]:
    try:
        return [int(each) for each in value.split(",")]
    except ValueError:
        raise ConfigError(
            "--rank", value, "expected ranks, such as 3 or 0,3", "rally stacks --help"
        ) from None

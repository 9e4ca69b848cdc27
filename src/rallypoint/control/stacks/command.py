"""``rally stacks``: where the workers of a job are."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rallypoint._core.rank_words import in_words
from rallypoint.control import client, command_line
from rallypoint.errors import ConfigError

from . import stack_groups


HELP = """\
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


def command(words: Sequence[str]) -> str:
    """Run ``rally stacks``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown, or a rank is not a number.
        ControlError: there is no such job, or it does not answer.
    """
    if {"-h", "--help"} & set(words):
        return HELP
    switches = ("--threads", "--native", "--signal", "--here", "--json")
    given = command_line.parse("stacks", words, switches=switches)
    ranks, flags = given.ranks, given.switches
    if {"--native", "--signal"} <= flags:
        raise ConfigError("stacks", "--native --signal", "only py-spy shows C frames", "omit one")
    job = client.connect(given.job)
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
    if ended := [rank for rank in answer["ended"] if not ranks or rank in ranks]:
        parts.append(f"{in_words(ended)} {'has' if len(ended) == 1 else 'have'} ended")
    parts += [f"node {node} did not answer" for node in answer["silent"]]
    return "\n\n".join(filter(None, parts)) or "no worker runs now"

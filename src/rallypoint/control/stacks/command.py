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
The workers take no part in this, so it also works if they hang. Ranks with the same stack form a group; the odd ones
out come first, since the others are waiting for them. Frames are in the order of a traceback: most recent call last.

  JOB          its id, or the start of it, or the supervisor's pid (see rally ps); not needed if only one job runs
  --rank R     only these ranks
  --threads    all threads; by default, only main threads
  --native     C frames as well; needs py-spy (pip install py-spy)
  --signal     use a signal even if py-spy is installed
  --here       only the workers on this host
  --json       one JSON object per process

py-spy is used if it is installed and permitted (pip install py-spy). Without it, workers get a signal that Python code
does not see. A process that is stopped or stuck in the kernel is then listed as such, without a stack."""


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

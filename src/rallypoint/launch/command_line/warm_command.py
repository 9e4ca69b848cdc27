"""``rally warm``: the warm servers of this user."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.control.tables.quantities import duration
from rallypoint.errors import ConfigError, ControlError
from rallypoint.launch.server import warm_client


HELP = """\
usage: rally warm [--stop [PID …]] [--json]

List the processes that `rally run --warm` keeps on this host: each has imported torch, and the next such job starts from
it. One is kept for each installation and environment (variables that torch reads, limits, control group); it ends after
--warm-timeout seconds without a job.

  --stop    end all of them, or only those with these pids; running jobs continue
  --json    one JSON object for each"""


_NONE = "no warm server of this user runs on this host"


def command(words: Sequence[str]) -> str:
    """Run ``rally warm``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown.
        ControlError: a server that should end does not answer.
    """
    if {"-h", "--help"} & set(words):
        return HELP
    pids = [int(word) for word in words if word.isascii() and word.isdigit()]
    for word in words:
        if not word.isdigit() and word not in {"--stop", "--json"}:
            raise ConfigError(
                "warm", word, "no such flag (known: --stop, --json)", "rally warm --help"
            )
    if "--stop" in words:
        stopped, silent = warm_client.stop(pids)
        ended = f"ended: {', '.join(map(str, stopped))}" if stopped else ""
        if silent:
            which = ", ".join(map(str, silent))
            silence = f"no answer (is it stopped?) from the warm server at {which}"
            raise ControlError("; ".join(filter(None, [ended, silence])))
        return ended or _NONE
    if pids:
        raise ConfigError("warm", str(pids[0]), "a pid without --stop", "rally warm --help")
    if "--json" in words:
        return "\n".join(json.dumps(each) for each in warm_client.running())
    return lines() or _NONE


def lines() -> str:
    """A line for each warm server; empty if there is none."""
    return "\n".join(_line(each) for each in warm_client.running())


def _line(told: Mapping[str, Any]) -> str:
    jobs = len(told["jobs"])
    if told["idle"] is None:
        doing = f"serves {jobs} job{'s' * (jobs != 1)}"
    else:
        left = max(0.0, float(told["idle_limit"]) - float(told["idle"]))
        doing = f"idle, ends in {duration(left)}"
    torch = f"torch {told['torch'] or '(unknown)'}"
    return f"warm server {told['pid']}: {torch} in {told['executable']}; {doing}"

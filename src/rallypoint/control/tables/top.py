"""``rally top``: what the workers of a job use, live."""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Sequence

from rallypoint._core import env as environment, standard_streams
from rallypoint.control import client
from rallypoint.errors import ConfigError

from . import top_screen, worker_table
from .top_view import View


HELP = """\
usage: rally top [JOB] [--interval SECONDS] [--sort rank|cpu|memory|gpu] [--once]

Show what each worker of a job uses, with its children, on all nodes of the job, every few seconds.

  CPU%      of one core          THR, CHILD       threads, child processes
  MEM       resident memory      READ/s, WRITE/s  from and to storage
  GPU%      how busy its busiest GPU is, with all that run on it               GPUMEM  its memory on GPUs (extra gpu)
  STEP      as the script reports it (rallypoint.progress); it/s: steps per second
  COLL/s    collectives per second                       WAIT%   the share of its time that it waits for others

Empty columns are left out and, on a narrow terminal, the less important ones. The last column says what is odd about a
rank: stopped, stuck in the kernel, behind, busier or idler than the others, more memory.

  JOB             its id, or the start of it, or the supervisor's pid (see rally ps); not needed if only one job runs
  --interval S    seconds between updates (default 2)
  --sort KEY      rank, cpu, memory or gpu
  --once          print one table and exit

Keys: q quits; r c m g sort by rank, CPU, memory, GPU; the arrows choose a rank; s shows its stack, l the end of its output
(if no rank is chosen: of all ranks). If the output is not a terminal, tables are printed one after another until the job ends."""


def command(words: Sequence[str]) -> int:
    """Run ``rally top``; returns the exit code.

    Raises:
        ConfigError: a flag is unknown, or has a wrong value.
        ControlError: there is no such job, or it does not answer.
    """
    if {"-h", "--help"} & set(words):
        _write(HELP)
        return 0
    names, interval, sort, once = _parse(words)
    view = View(client.connect(*names), sort)
    if once:
        view.look()
        select.select([], [], [], min(interval, 1.0))
        view.look()
        _write("\n".join(view.lines(_width())))
    elif _has_screen():
        top_screen.run(view, interval)
    else:
        _one_after_the_other(view, interval)
    return 0


def _parse(words: Sequence[str]) -> tuple[list[str], float, str, bool]:
    names: list[str] = []
    interval, sort, once = 2.0, "rank", False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in {"--interval", "--sort"} and not has_value:
            value = rest.pop(0) if rest else ""
        match flag:
            case "--once":
                once = True
            case "--interval":
                interval = _seconds(value)
            case "--sort":
                if value not in worker_table.SORTS:
                    *most, last = worker_table.SORTS
                    expected = f"expected {', '.join(most)} or {last}"
                    raise ConfigError("--sort", value, expected)
                sort = value
            case _ if flag.startswith("-"):
                known = "--interval, --sort, --once"
                raise ConfigError("top", word, f"no such flag (known: {known})", "rally top --help")
            case _:
                names.append(word)
    if len(names) > 1:
        raise ConfigError("top", " ".join(names), "expected one job", "rally top --help")
    return names, interval, sort, once


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ConfigError("--interval", text, "expected seconds, from 0.1 to 3600")
    return seconds


def _write(text: str) -> None:
    standard_streams.write(text + "\n")


def _has_screen() -> bool:
    terminal = environment.get("TERM") or ""
    return os.isatty(1) and os.isatty(0) and terminal not in standard_streams.DUMB


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns if os.isatty(1) else 1000


def _one_after_the_other(view: View, interval: float) -> None:
    view.look()
    while True:
        select.select([], [], [], interval)
        if not view.look_again():
            _write("the job has ended")
            return
        _write("\n".join(view.lines(_width())) + "\n")

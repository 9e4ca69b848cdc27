"""``rally top``: what the workers of a job use, live."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rallypoint._core import env as environment, standard_streams
from rallypoint._core.clock import MONOTONIC
from rallypoint.control import client
from rallypoint.control.stacks import stack_groups
from rallypoint.errors import ConfigError, ControlError

from . import worker_table


HELP = """\
usage: rally top [JOB] [--interval SECONDS] [--sort rank|cpu|memory] [--once]

Show what each worker of a job uses, with its children, on all nodes of the job, every few seconds.

  CPU%      of one core          THR, CHILD       threads, child processes
  MEM       resident memory      READ/s, WRITE/s  from and to storage
  STEP      as the script reports it (rallypoint.progress); it/s: steps per second
  COLL/s    collectives per second                       WAIT%   of its time in which it waits for others

Columns that nobody has are left out, and on a narrow terminal the less important ones. The last one says what is odd about a
rank: stopped, stuck in the kernel, behind, busier or idler than the others, more memory.

  JOB             its id, the beginning of it, or the supervisor's pid (rally ps); not needed if there is one job
  --interval S    seconds between two looks (default 2)
  --sort KEY      rank, cpu or memory
  --once          one table, and end

Keys: q quits, r c m sort by rank, CPU, memory, s shows the stacks of all ranks. If the output is no terminal, tables follow
each other until the job ends."""

_SORT_KEYS = {"r": "rank", "c": "cpu", "m": "memory"}
_FOOT = "q quit   r c m sort by rank, CPU, memory   s stacks"


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
    view = _View(client.connect(*names), sort)
    if once:
        view.look()
        select.select([], [], [], min(interval, 1.0))
        view.look()
        _write("\n".join(view.lines(_width())))
    elif _has_screen():
        _on_terminal(view, interval)
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
                    raise ConfigError("--sort", value, "expected rank, cpu or memory")
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


class _View:
    """What is shown of a job."""

    def __init__(self, job: client.RunningJob, sort: str) -> None:
        self.job = job
        self.sort = sort
        self._rows: list[worker_table.Row] = []
        self._last: list[dict[str, Any]] = []
        self._status: dict[str, Any] = {}

    def look(self) -> None:
        """Ask the job.

        Raises:
            ControlError: it has ended, or does not answer.
        """
        self._status = self.job.status()
        now = self.job.usage()
        self._rows = worker_table.rows(now, self._last)
        self._last = now

    def lines(self, width: int) -> list[str]:
        table = worker_table.lines(worker_table.ordered(self._rows, self.sort), width)
        return [worker_table.title(self._status, width), *table]

    def odd_lines(self) -> set[int]:
        """Which of :meth:`lines` are about odd ranks."""
        rows = worker_table.ordered(self._rows, self.sort)
        return {place for place, row in enumerate(rows, 2) if row.remark}


def _write(text: str) -> None:
    standard_streams.write(text + "\n")


def _has_screen() -> bool:
    terminal = environment.get("TERM") or ""
    return os.isatty(1) and os.isatty(0) and terminal not in standard_streams.DUMB


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns if os.isatty(1) else 1000


def _one_after_the_other(view: _View, interval: float) -> None:
    view.look()
    while True:
        select.select([], [], [], interval)
        try:
            view.look()
        except ControlError:
            _write("the job has ended")
            return
        _write("\n".join(view.lines(_width())) + "\n")


# -- on a terminal --------------------------------------------------------------------------------


def _on_terminal(view: _View, interval: float) -> None:
    view.look()
    said = ""
    with _screen() as (wake, keys):
        text: list[str] | None = None  # shown instead of the table, until a key is pressed
        look_at = MONOTONIC.now() + min(interval, 0.5)
        while True:
            _draw(view, text)
            wait = max(0.0, look_at - MONOTONIC.now())
            ready, _, _ = select.select([wake, sys.stdin], [], [], None if text else wait)
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 64)  # another size: draw again
            if sys.stdin in ready:
                key = keys()
                if key in {"q", "\x03", "\x04", ""}:
                    break
                if text is not None:
                    rest = text[_room() - 1 :] if key == " " and len(text) > _room() else []
                    text = rest or None
                elif key == "s":
                    text = _stacks(view.job)
                view.sort = _SORT_KEYS.get(key, view.sort)
            if MONOTONIC.now() >= look_at and text is None:
                look_at = MONOTONIC.now() + interval
                try:
                    view.look()
                except ControlError:
                    said = "the job has ended"
                    break
    if said:
        _write(said)


@contextlib.contextmanager
def _screen() -> Iterator[tuple[int, Callable[[], str]]]:
    """The terminal, without echo, on its other page, and put back afterwards."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        tty.setcbreak(fd)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        sys.stdout.flush()
        yield read, lambda: os.read(fd, 1).decode(errors="replace")
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGWINCH, handler)
        os.close(read)
        os.close(write)


def _draw(view: _View, text: list[str] | None) -> None:
    columns, rows = shutil.get_terminal_size((80, 24))
    if text is not None:
        shown = [line[:columns] for line in text]
        odd: set[int] = set()
        foot = "any key: back   q quit"
    else:
        shown, odd, foot = view.lines(columns), view.odd_lines(), _FOOT
    room = _room()
    if len(shown) > room:
        hidden = len(shown) - room + 1
        how = "space shows the next" if text is not None else "make the window taller"
        shown = [*shown[: room - 1], f"({hidden} more lines; {how})"[:columns]]
    coloured = not environment.snapshot().get("NO_COLOR")
    out = ["\x1b[H"]
    for place, line in enumerate(shown):
        marked = place in odd and coloured
        out.append(f"\x1b[33m{line}\x1b[0m" if marked else line)
        out.append("\x1b[K\r\n")
    out.append("\x1b[J")
    out.append(f"\x1b[{rows};1H{foot[:columns]}")
    standard_streams.write("".join(out))


def _room() -> int:
    """Lines above the foot."""
    return max(2, shutil.get_terminal_size((80, 24)).lines - 1)


def _stacks(job: client.RunningJob) -> list[str]:
    try:
        return stack_groups.text(job.stacks()).splitlines() or ["no worker runs now"]
    except ControlError as error:
        return [str(error)]

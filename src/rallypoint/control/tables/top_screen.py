"""``rally top`` on a terminal: keys, and a table that is redrawn."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from rallypoint._core import env as environment, standard_streams
from rallypoint._core.clock import MONOTONIC
from rallypoint.control.logs.command import last_lines
from rallypoint.control.stacks import stack_groups
from rallypoint.errors import ControlError, RallyError

from .top_view import View


_SORT_KEYS = {"r": "rank", "c": "cpu", "m": "memory", "g": "gpu"}
# Terminals send one or the other.
_ARROWS = {"\x1b[A": -1, "\x1bOA": -1, "\x1b[B": 1, "\x1bOB": 1}
_KEY = re.compile(r"\x1b[\[O][0-9;]*.|.", re.DOTALL)
_END = {"q", "\x03", "\x04"}
# Signals that end this command, which restores the terminal first.
_STOPS = frozenset({signal.SIGTERM, signal.SIGHUP})
# Lines per rank when the output of all ranks is shown.
LINES_OF_EACH = 3
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


def run(view: View, interval: float) -> None:
    """Show the view until a key is pressed to quit, or the job ends."""
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
                    # SIGWINCH: the size has changed; draw again.
                    if stopped := _STOPS.intersection(os.read(wake, 64)):
                        raise SystemExit(128 + min(stopped))
            if sys.stdin in ready:
                pressed = _parted(keys())
                if not pressed or _END & set(pressed):
                    break
                for key in pressed:
                    text = _after(key, view, text)
            if MONOTONIC.now() >= look_at and text is None:
                look_at = MONOTONIC.now() + interval
                if not view.look_again():
                    said = "the job has ended"
                    break
    if said:
        standard_streams.write(said + "\n")


def _parted(typed: str) -> list[str]:
    """The keys that were typed. A key that sends several characters stays whole."""
    return _KEY.findall(typed)


def _after(key: str, view: View, text: list[str] | None) -> list[str] | None:
    """What to show instead of the table after a key; None: the table."""
    if text is not None:
        return (text[_room() - 1 :] if key == " " and len(text) > _room() else []) or None
    match key:
        case "s":
            return _stacks(view)
        case "l":
            return _log(view)
        case "\x1b":
            view.chosen = None
        case _ if key in _ARROWS:
            view.choose(_ARROWS[key])
        case _:
            view.sort = _SORT_KEYS.get(key, view.sort)
    return None


@contextlib.contextmanager
def _screen() -> Iterator[tuple[int, Callable[[], str]]]:
    """Switch the terminal to its alternate screen without echo, and restore it afterwards."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = (signal.SIGWINCH, *_STOPS)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        tty.setcbreak(fd)
        # Ctrl-Z would stop this command and leave the shell's prompt on the alternate screen.
        mode = termios.tcgetattr(fd)
        mode[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        sys.stdout.flush()
        yield read, lambda: os.read(fd, 256).decode(errors="replace")
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _draw(view: View, text: list[str] | None) -> None:
    columns, rows = shutil.get_terminal_size((80, 24))
    room = _room()
    odd: set[int] = set()
    chosen: int | None = None
    if text is not None:
        shown, foot = [line[:columns] for line in text], "any key: back   q quit"
        if len(shown) > room:
            hidden = len(shown) - room + 1
            shown = [*shown[: room - 1], f"({hidden} more lines; space shows the next)"[:columns]]
    else:
        shown, (odd, chosen) = view.lines(columns, room), view.marks(room)
        whose = "" if view.chosen is None else f" of rank {view.chosen}   Esc all ranks"
        foot = f"q quit   r c m sort   arrows choose a rank   s stacks   l log{whose}"
    coloured = not environment.snapshot().get("NO_COLOR")
    out = ["\x1b[H"]
    for place, line in enumerate(shown):
        mark = "\x1b[33m" if place in odd and coloured else ""
        mark += "\x1b[7m" if place == chosen else ""
        out.append(f"{mark}{line}\x1b[0m" if mark else line)
        out.append("\x1b[K\r\n")
    out.append("\x1b[J")
    out.append(f"\x1b[{rows};1H{foot[:columns]}")
    standard_streams.write("".join(out))


def _room() -> int:
    """The number of lines above the footer."""
    return max(2, shutil.get_terminal_size((80, 24)).lines - 1)


def _stacks(view: View) -> list[str]:
    ranks = () if view.chosen is None else (view.chosen,)
    try:
        return stack_groups.text(view.job.stacks(ranks)).splitlines() or ["no worker runs now"]
    except ControlError as error:
        return [str(error)]


def _log(view: View) -> list[str]:
    """The end of the chosen rank's output, or of all ranks' output."""
    ranks = () if view.chosen is None else (view.chosen,)
    tail = max(_room() - 1, 10) if ranks else LINES_OF_EACH
    try:
        found = last_lines(view.job, ranks, tail)
    except (RallyError, OSError) as error:
        return [str(error)]
    # A worker's output must not move the cursor.
    return [_CONTROL.sub("", line) for line in found] or ["no output yet"]

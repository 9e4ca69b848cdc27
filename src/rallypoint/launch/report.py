"""The failure report as a person reads it: one short summary for a terminal of 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from .failure import FailureReport, WorkerFailure


# A report must fit a screen: the root cause in full (the ends of long texts), the others in a line.
MAX_TRACEBACK_LINES = 16
MAX_STDERR_LINES = 8
MAX_VICTIM_LINES = 8
# Below the script on a worker's stack is only how we started it.
_OURS = "rallypoint/launch/bootstrap.py"

_RED, _BOLD, _DIM, _END = "\033[31m", "\033[1m", "\033[2m", "\033[0m"


def render(report: FailureReport, *, width: int = 100, colour: bool = False) -> str:
    """The report as text, without a newline at its end."""
    paint = _Paint(colour)
    lines = [paint(_headline(report), _BOLD + _RED)]
    root = report.root_cause
    if root is not None:
        lines += _root_lines(root, report, width, paint)
    lines += _victim_lines(report.victims, width)
    if report.log_folder:
        lines.append(f"  logs         {report.log_folder}")
    if report.report_file:
        lines.append(f"  report       {report.report_file}")
    return "\n".join(lines)


class _Paint:
    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, text: str, style: str) -> str:
        return f"{style}{text}{_END}" if self._on else text


def _headline(report: FailureReport) -> str:
    if report.reason:
        return f"rally: the job failed: {report.reason}"
    root = report.root_cause
    if root is None:
        return "rally: the job failed"
    others = len(report.victims)
    tail = f"; {others} other worker{'s' * (others > 1)} died of it" if others else ""
    end = f" (signal {root.signal})" if root.signal is not None else ""
    if root.signal is None and root.raised is not None and root.raised.type != "SystemExit":
        end = f" (exit code {root.exit_code})"
    return f"rally: the job failed: rank {root.rank} {root.headline()}{end}{tail}"


def _root_lines(root: WorkerFailure, report: FailureReport, width: int, paint: _Paint) -> list[str]:
    attempt = f"attempt {root.generation + 1} of {report.max_restarts + 1}"
    lines = [
        f"  root cause   rank {root.rank} (local rank {root.local_rank}) on {root.host},"
        f" pid {root.pid}, {attempt}"
    ]
    if root.cause:
        lines += _wrapped("  because      ", root.cause, width)
    raised = root.raised
    if raised is not None and raised.type == "SystemExit":
        lines += _wrapped(
            "  exit code    ", f"{root.exit_code} (SystemExit: {raised.message})", width
        )
    elif raised is not None:
        message = f"{raised.type}: {raised.message}" if raised.message else raised.type
        lines += _wrapped("  error        ", message, width, most=6)
    if raised is not None and raised.traceback:
        lines += _block(_frames(raised.traceback), width, MAX_TRACEBACK_LINES, paint)
    if root.native_stack:
        lines.append("  at the fault (most recent call first)")
        lines += _block(
            _native(root.native_stack), width, MAX_TRACEBACK_LINES, paint, keep_end=False
        )
    if raised is None and root.stderr:
        lines.append("  last lines of its stderr")
        lines += _block(root.stderr, width, MAX_STDERR_LINES, paint)
    return lines


def _frames(traceback: str) -> list[str]:
    """The stack without its first line and without the message, which stands above it."""
    lines = traceback.rstrip().splitlines()
    if lines and lines[0].startswith("Traceback"):
        lines = lines[1:]
    inside = [index for index, line in enumerate(lines) if line.startswith(" ")]
    return lines[: inside[-1] + 1] if inside else []


def _native(stack: str) -> list[str]:
    """faulthandler's text: the fault and the stack of the thread that had it, down to the script."""
    kept: list[str] = []
    for line in stack.splitlines():
        if line.startswith("Extension modules:") or _OURS in line:
            break
        if not line.startswith(("Thread 0x", "Current thread 0x")):
            kept.append(line)
    return kept


def _victim_lines(victims: Sequence[WorkerFailure], width: int) -> list[str]:
    if not victims:
        return []
    groups: dict[str, list[int]] = {}
    for victim in victims:
        groups.setdefault(_fate(victim), []).append(victim.rank)
    lines: list[str] = []
    for index, (fate, ranks) in enumerate(groups.items()):
        if index == MAX_VICTIM_LINES:
            lines.append(
                f"               and {len(groups) - index} other ways; the report file has all"
            )
            break
        label = "  victims      " if index == 0 else "               "
        word = "rank" if len(ranks) == 1 else "ranks"
        lines += _wrapped(label, f"{word} {compact(ranks)}: {fate}", width, most=3)
    return lines


def _fate(victim: WorkerFailure) -> str:
    if victim.stopped_by_us and victim.raised is None:
        how = victim.signal_name or f"exit code {victim.exit_code}"
        return f"stopped ({how})"
    if victim.raised is not None and victim.raised.type != "SystemExit":
        first = (victim.raised.message.splitlines() or [""])[0]
        return f"{victim.raised.type}: {_without_places(first)}"
    return victim.headline() + (f", {victim.cause}" if victim.cause else "")


def _without_places(text: str) -> str:
    """Without C++ source positions and peers' addresses: equal fates then read as one."""
    text = re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\]\s*", "", text)
    text = re.sub(r"\s*\[?\d+\.\d+\.\d+\.\d+\]?(:\d+)?", "", text)
    return " ".join(text.split()).split(". ")[0][:100]


def compact(ranks: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _wrapped(label: str, text: str, width: int, most: int = 4) -> list[str]:
    pad = " " * len(label)
    lines: list[str] = []
    for part in text.splitlines() or [""]:
        lines += textwrap.wrap(part, width - len(label), break_on_hyphens=False) or [""]
    if len(lines) > most:
        lines = [*lines[: most - 1], "…"]
    return [(label if index == 0 else pad) + line for index, line in enumerate(lines)]


def _block(
    lines: Sequence[str], width: int, most: int, paint: _Paint, *, keep_end: bool = True
) -> list[str]:
    """Quoted lines; of too many the end (or the beginning), of too long ones the beginning."""
    shown = list(lines)
    if len(shown) > most:
        left_out = f"… {len(shown) - most + 1} lines left out"
        shown = [left_out, *shown[-(most - 1) :]] if keep_end else [*shown[: most - 1], left_out]
    room = width - 4
    cut = [line if len(line) <= room else line[: room - 1] + "…" for line in shown]
    return [paint("  │ ", _DIM) + line for line in cut]

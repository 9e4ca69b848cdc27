"""The failure report: as JSON, and as a short summary for a terminal of 100 columns.

Everything that comes from a worker (messages, stacks, stderr, host names) is untrusted text. It goes
through :func:`clean`, so it can neither control the terminal nor break the columns.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rallypoint._core import script_frames
from rallypoint.control.collectives import collective_waits

from . import stack_lines
from .failure import WorkerFailure, failures_from_json
from .symptoms import Says, printed


# A report must fit a screen, at most 40 lines: the root cause in full (the ends of long texts), the
# others in one line.
MAX_TRACEBACK_LINES = 14
MAX_STDERR_LINES = 8
MAX_VICTIM_LINES = 8
MAX_SLOW_LINES = 3
# Nothing is readable in fewer columns: let the terminal wrap.
MIN_WIDTH = 60
_FILE = re.compile(r'  File "(.*)", line ')
# A thread that we start in a worker.
_OUR_THREAD = "rallypoint/elastic/worker/link.py"
# What a failure's record says besides its fields.
_COMPUTED = {"signal_name", "headline"}

_RED, _BOLD, _DIM, _END = "\033[31m", "\033[1m", "\033[2m", "\033[0m"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureReport:
    """Why a job (or one generation of it) failed.

    Args:
        failures: every worker that failed or was stopped, the root cause first.
        world_size: number of workers of the job.
        max_restarts: the job's budget; ``generation`` of the root cause is how much is used.
        log_folder: where this generation's files are, or None.
        report_file: this report as JSON, or None.
        reason: set if no worker is to blame (the fork server was killed, say).
        left_early: ranks whose scripts succeeded before the others failed, if that may explain the failures.
        not_replaced: why a lost worker of a session was not replaced in place, in words.
        slow: ranks of this node that were slow, in words.
        lost_hosts: hosts whose nodes the job has lost.
        engines: what the engines that run this node call the job and the node, by engine and by what is named.
        ends_job: false if only this node has failed, and the job goes on without it.
    """

    failures: tuple[WorkerFailure, ...]
    world_size: int
    max_restarts: int = 0
    log_folder: str | None = None
    report_file: str | None = None
    reason: str = ""
    left_early: tuple[int, ...] = ()
    not_replaced: str = ""
    slow: tuple[str, ...] = ()
    lost_hosts: tuple[str, ...] = ()
    engines: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ends_job: bool = True

    @property
    def root_cause(self) -> WorkerFailure | None:
        return self.failures[0] if self.failures and not self.reason else None

    @property
    def is_known(self) -> bool:
        """Whether a worker reported the cause; if not, the root cause is only the first worker to notice."""
        root = self.root_cause
        return root is None or root.says() <= Says.MISSING or root.left_early

    @property
    def victims(self) -> tuple[WorkerFailure, ...]:
        return self.failures[1:] if not self.reason else self.failures

    @property
    def exit_code(self) -> int:
        root = self.root_cause
        return 1 if root is None else root.command_exit_code

    def cause(self) -> str:
        """The root cause in one line, or why the job failed if no worker is to blame."""
        root = self.root_cause
        return self.reason if root is None else f"rank {root.rank} {in_a_line(root)}"

    def to_json(self) -> dict[str, Any]:
        root = self.root_cause
        return {
            "version": 1,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "world_size": self.world_size,
            "max_restarts": self.max_restarts,
            "cause_known": root is not None and self.is_known,
            "root_cause": None if root is None else _as_json(root),
            "victims": [_as_json(victim) for victim in self.victims],
            "left_early": list(self.left_early),
            "not_replaced": self.not_replaced,
            "log_folder": self.log_folder,
            "slow": list(self.slow),
            "lost_hosts": list(self.lost_hosts),
            "engines": {name: dict(ids) for name, ids in self.engines.items()},
            "ends_job": self.ends_job,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` made, perhaps on another host."""
        root = record["root_cause"]
        told = [*([] if root is None else [root]), *record["victims"]]
        plain = [{name: each[name] for name in each.keys() - _COMPUTED} for each in told]
        return cls(
            failures=failures_from_json(json.dumps(plain)),
            world_size=record["world_size"],
            max_restarts=record["max_restarts"],
            log_folder=record["log_folder"],
            reason=record["reason"],
            left_early=tuple(record.get("left_early", ())),
            not_replaced=record.get("not_replaced", ""),
            lost_hosts=tuple(record.get("lost_hosts", ())),
            engines=record.get("engines", {}),
            ends_job=record.get("ends_job", True),
        )

    def text(self, width: int = 100, *, colour: bool = False) -> str:
        return render(self, width=width, colour=colour)

    def __str__(self) -> str:
        return self.text()


def in_a_line(failure: WorkerFailure) -> str:
    """What happened to a worker: its headline, and the first line of its exception's message."""
    told = failure.raised.message.splitlines() if failure.raised is not None else []
    return f"{failure.headline()}: {clean(told[0])[:120]}" if told else failure.headline()


def explained(failure: WorkerFailure, width: int = 100) -> str:
    """The lines of a report about one failure, without a headline; empty if there is no more to say."""
    if not (failure.raised or failure.native_stack or failure.cause or failure.stderr):
        return ""
    report = FailureReport(failures=(failure,), world_size=0, max_restarts=0)
    lines = _root_lines(failure, report, max(width, MIN_WIDTH), _Paint(on=False))
    return "\n".join(lines[1:])


def _as_json(failure: WorkerFailure) -> dict[str, Any]:
    return {**asdict(failure), "signal_name": failure.signal_name, "headline": failure.headline()}


def render(report: FailureReport, *, width: int = 100, colour: bool = False) -> str:
    """The report as text, without a final newline.

    No line is wider than ``width``, except the two paths, which are never cut.
    """
    paint = _Paint(colour)
    width = max(width, MIN_WIDTH)
    headline = _wrapped("rally: ", _headline(report), width, most=2)
    lines = [paint(line, _BOLD + _RED) for line in headline]
    root = report.root_cause
    if root is not None:
        lines += _root_lines(root, report, width, paint)
    lines += _victim_lines(report.victims, width)
    if report.not_replaced:
        lines += _wrapped("  not replaced ", report.not_replaced, width, most=2)
    for each in report.slow[:MAX_SLOW_LINES]:
        lines += _wrapped("  slow         ", each, width, most=2)
    if report.log_folder:
        lines.append(f"  logs         {clean(report.log_folder)}")
    if report.report_file:
        lines.append(f"  report       {clean(report.report_file)}")
    return "\n".join(lines)


# -- untrusted text ---------------------------------------------------------------------------------

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?|\x1b[ -~]?")


def clean(text: str) -> str:
    """One line of untrusted text, without codes that move the cursor, change colours or direction."""
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPE.sub("", text.expandtabs(4))
    # Cc, Cs, Cn, Co: control characters, surrogates, unassigned, private.
    # Zl, Zp: line and paragraph ends. Cf: joiners and direction marks, which are invisible.
    kinds = ((char, unicodedata.category(char)) for char in text)
    return "".join(
        "\ufffd" if kind in {"Cc", "Cs", "Cn", "Co", "Zl", "Zp"} else char
        for char, kind in kinds
        if kind != "Cf"
    )


def columns(text: str) -> int:
    """How many terminal columns ``text`` takes."""
    if text.isascii():
        return len(text)
    return sum(_columns_of(char) for char in text)


def _columns_of(char: str) -> int:
    if unicodedata.category(char) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1


def _split(text: str, room: int) -> tuple[str, str]:
    """The longest prefix of ``text`` that fits into ``room`` columns, and the rest."""
    used = 0
    for index, char in enumerate(text):
        used += _columns_of(char)
        if used > room:
            return text[:index], text[index:]
    return text, ""


def _cut(text: str, room: int) -> str:
    return text if columns(text) <= room else _split(text, room - 1)[0] + "…"


class _Paint:
    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, text: str, style: str) -> str:
        return f"{style}{text}{_END}" if self._on else text


def _headline(report: FailureReport) -> str:
    failed = "the job failed"
    if not report.ends_job:
        failed = "this node left the job"
    if report.reason:
        return f"{failed}: {report.reason}"
    root = report.root_cause
    if root is None:
        return failed
    tail = _others(report.victims)
    if not report.is_known:
        return f"{failed}, cause unknown: rank {root.rank} failed first{tail}"
    by_itself = root.signal is not None and not root.stopped_by_us
    end = f" (signal {root.signal})" if by_itself else ""
    raised = root.raised
    ended_by_it = raised is not None and not (raised.is_exit or raised.exited or raised.handled)
    if root.signal is None and ended_by_it:
        end = f" (exit code {root.exit_code})"
    return f"{failed}: rank {root.rank} {root.headline()}{end}{tail}"


def _others(victims: Sequence[WorkerFailure]) -> str:
    """How many workers died of the root cause, and how many failed on their own (mostly of the same bug)."""
    alike = sum(victim.says() is Says.CAUSE for victim in victims)
    died = len(victims) - alike
    text = f"; {alike} other worker{'s' * (alike > 1)} failed too" if alike else ""
    if died and alike:
        return f"{text}, {died} as a result"
    return f"; {died} other{'s' * (died > 1)} failed as a result" if died else text


def _root_lines(root: WorkerFailure, report: FailureReport, width: int, paint: _Paint) -> list[str]:
    half = MAX_TRACEBACK_LINES // 2
    number, most = root.generation + 1, report.max_restarts + 1
    # Generations that began because nodes came or left do not count against the budget.
    attempt = f"attempt {number} of {most}" if number <= most else f"attempt {number}"
    place = (
        f"rank {root.rank} (local rank {root.local_rank}) on {root.host}, pid {root.pid}, {attempt}"
    )
    label = "  root cause   " if report.is_known else "  failed first "
    lines = _wrapped(label, place, width, most=2)
    because = root.cause or _mismatch(report) or _because(root, report)
    if because:
        lines += _wrapped("  because      ", because, width, most=3)
    if root.left_early:
        return lines + _needed_by(report.victims, width, paint)
    raised = root.raised
    if raised is not None and raised.is_exit:
        text = f"{root.exit_code} (SystemExit: {raised.message})"
        lines += _wrapped("  exit code    ", text, width)
    elif raised is not None:
        kind, message = raised.shown
        message, inner = _with_inner(message)
        text = f"{kind}: {message}" if message else kind
        lines += _wrapped("  error        ", text, width, most=6)
        if inner:
            lines += _block(stack_lines.of(inner, half), width, half, paint)
    both = raised is not None and bool(raised.traceback) and bool(root.native_stack)
    both = both or (raised is not None and bool(_with_inner(raised.message)[1]))
    most = half if both else MAX_TRACEBACK_LINES
    if raised is not None and raised.traceback:
        lines += _block(stack_lines.of(raised.traceback, most), width, most, paint)
    if root.native_stack:
        where = "where a child of it crashed" if root.child_crashed else "at the fault"
        lines.append(f"  {where} (most recent call first)")
        lines += _block(_native(root.native_stack), width, most, paint, keep_end=False)
    if (raised is None or (raised.is_exit and _is_number(raised.message))) and root.stderr:
        lines.append("  last lines of its stderr")
        most = (
            MAX_STDERR_LINES // 2 if root.native_stack or raised is not None else MAX_STDERR_LINES
        )
        most = MAX_TRACEBACK_LINES if printed(root.stderr) is not None else most
        lines += _block(root.stderr, width, most, paint)
    return lines


def _needed_by(victims: Sequence[WorkerFailure], width: int, paint: _Paint) -> list[str]:
    """Where the others were when a rank had left them: the stack of the first of them."""
    for each in victims:
        if each.raised is not None and each.raised.traceback:
            stack = stack_lines.of(each.raised.traceback, MAX_TRACEBACK_LINES)
            place = _wrapped("  needed by    ", f"rank {each.rank}, which was here", width)
            return place + _block(stack, width, MAX_TRACEBACK_LINES, paint)
    return []


def _mismatch(report: FailureReport) -> str:
    """Collectives that do not match between ranks, in words."""
    return collective_waits.mismatch(
        {each.rank: each.collectives for each in report.failures if each.collectives}
    )


def _because(root: WorkerFailure, report: FailureReport) -> str:
    """What the root cause's own message does not say."""
    raised = root.raised
    match root.says():
        case Says.MASKED if raised is not None:
            return (
                f"of its own error; it lost its peers afterwards, while cleaning up ({raised.type})"
            )
        case Says.HANDLED | Says.PRINTED:
            return "likely: the other ranks only report a lost peer"
        case Says.MISSING:
            ranks = compact(root.accused)
            left = _left_early(report.left_early)
            told = [f"rank{'s' * (len(root.accused) > 1)} {ranks} never arrived"] if ranks else []
            return "; ".join([*told, left] if left else told)
        case Says.LEFT_EARLY:
            left = _left_early([rank for rank in report.left_early if rank != root.rank])
            mine = "it ended without an error (exit code 0), and the others lost a peer"
            return f"{mine}; {left}" if left else mine
        case Says.CONNECTION | Says.TIMED_OUT | Says.PEER_LOST if (
            report.victims or report.left_early
        ):
            return _who_is_missing(report)
        case _:
            return ""


def _who_is_missing(report: FailureReport) -> str:
    """If all failures are symptoms: the ranks that were still running after the others had failed."""
    if report.left_early:
        return f"{_left_early(report.left_early)}, and it lost a peer, or one never arrived"
    left = [each.rank for each in report.victims if each.says() is Says.STOPPED]
    if not left:
        return "it lost a peer, as did all others; no rank reported an error of its own"
    ranks = f"rank{'s' * (len(left) > 1)} {compact(left)}"
    return f"it lost a peer, or one never arrived; {ranks} still ran when all others had failed"


def _left_early(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank{'s' * (len(ranks) > 1)} {compact(ranks)} had ended with exit code 0 before that"


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit()


def _with_inner(message: str) -> tuple[str, str]:
    """Separate a message from another process's traceback in it (that of a DataLoader's or a pool's worker).

    The traceback's last line, which says what happened, stays with the message.
    """
    start = message.find(stack_lines.BEGINNING)
    if start < 0:
        return message, ""
    before = message[:start].rpartition("\n")[0] if message[:start].strip() else ""
    inner = message[start:].rstrip().strip('"').rstrip()
    last = [line for line in inner.splitlines() if line and not line.startswith(" ")][-1]
    return (
        f"{before.strip()} {last}".strip() if last != stack_lines.BEGINNING else before.strip(),
        inner,
    )


def _native(stack: str) -> list[str]:
    """From faulthandler's text, the fault and the stack of its thread, down to the script."""
    fault: list[str] = []
    threads: list[list[str]] = []
    current: list[str] | None = None
    for line in stack.splitlines():
        if line.startswith("Extension modules:"):
            break
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append([])
            current = threads[-1] if line.startswith("Current") else current
        else:
            (threads[-1] if threads else fault).append(line)
    if current is None or _is_ours(current):
        # A signal from outside may reach any thread. The script's thread is the first, which is listed last.
        current = threads[-1] if threads and not _is_ours(threads[-1]) else []
    return [*fault, *_below_the_start(current)]


def _is_ours(thread: Sequence[str]) -> bool:
    return any(_OUR_THREAD in line for line in thread)


def _below_the_start(lines: Sequence[str]) -> Sequence[str]:
    """The lines without the frames that only started the script. Those come last: the lines begin with the most recent call."""
    frames = [(index, found[1]) for index, line in enumerate(lines) if (found := _FILE.match(line))]
    frames.reverse()
    first = script_frames.beginning([file for _, file in frames])
    return lines[: frames[first][0] + 1] if frames else lines


def _victim_lines(victims: Sequence[WorkerFailure], width: int) -> list[str]:
    if not victims:
        return []
    groups: dict[str, list[int]] = {}
    for victim in victims:
        groups.setdefault(_fate(victim), []).append(victim.rank)
    lines: list[str] = []
    for index, (fate, ranks) in enumerate(groups.items()):
        label = "  victims      " if index == 0 else "               "
        word = "rank" if len(ranks) == 1 else "ranks"
        new = _wrapped(label, f"{word} {compact(ranks)}: {fate}", width, most=2)
        last = index == len(groups) - 1
        if len(lines) + len(new) > MAX_VICTIM_LINES - (not last):
            left = len(groups) - index
            ways = "another way" if left == 1 else f"{left} other ways"
            lines.append(f"               and {ways}; report.json has all")
            break
        lines += new
    return lines


def _fate(victim: WorkerFailure) -> str:
    if victim.stopped_by_us and victim.raised is None:
        how = victim.signal_name or f"exit code {victim.exit_code}"
        return f"stopped ({how})"
    if victim.raised is not None and not victim.raised.is_exit:
        kind, message = victim.raised.shown
        first = (message.splitlines() or [""])[0]
        fate = f"{kind}: {_without_places(first)}"
        return f"stopped while handling {fate}" if victim.raised.handled else fate
    return victim.headline() + (f", {victim.cause}" if victim.cause else "")


def _without_places(text: str) -> str:
    """Remove C++ source positions and addresses, so that equal fates read the same."""
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
    """``text`` after ``label``, broken between words into at most ``most`` lines."""
    room = width - len(label)
    lines: list[str] = []
    for part in text.splitlines() or [""]:
        lines += _wrap(clean(part), room)
        if len(lines) > most:
            lines = [*lines[: most - 1], _cut(lines[most - 1], room - 1) + "…"]
            break
    pad = " " * len(label)
    return [(label if index == 0 else pad) + line for index, line in enumerate(lines)]


def _wrap(text: str, room: int) -> list[str]:
    if columns(text) <= room:
        return [text.rstrip()]  # unchanged: its indentation may be meaningful
    lines = [""]
    for word in text.split():
        line = lines[-1]
        if line and columns(line) + 1 + columns(word) <= room:
            lines[-1] = f"{line} {word}"
            continue
        if not line:
            lines.pop()
        piece, rest = _split(word, room)
        lines.append(piece)
        while rest:
            piece, rest = _split(rest, room)
            lines.append(piece)
    return lines


def _block(
    lines: Sequence[str], width: int, most: int, paint: _Paint, *, keep_end: bool = True
) -> list[str]:
    """Quoted lines: the last (or first) ``most`` of them, each cut to the width."""
    shown = [clean(line) for line in lines]
    if len(shown) > most:
        left_out = f"… {len(shown) - most + 1} lines left out"
        shown = [left_out, *shown[-(most - 1) :]] if keep_end else [*shown[: most - 1], left_out]
    return [paint("  │ ", _DIM) + _fitted(line, width - 4) for line in shown]


# A stack frame as Python and faulthandler print it.
_FRAME = re.compile(r'(\s*File ")(.+)(", line \d+.*)')


def _fitted(line: str, room: int) -> str:
    """The line, cut to ``room`` columns. In a frame, the beginning of the path is cut.

    Readers look for the file's name and the line number.
    """
    frame = _FRAME.fullmatch(line)
    too_long = columns(line) - room
    if frame is None or too_long <= 0:
        return _cut(line, room)
    before, path, after = frame.groups()
    kept = _split(path[::-1], max(0, columns(path) - too_long - 1))[0][::-1]
    return _cut(f"{before}…{kept}{after}", room)

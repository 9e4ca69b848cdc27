"""Records of how workers failed, and the choice of the root cause.

Processes do not die in the order in which they failed: a worker that raises still runs its exit
handlers, and a peer that loses its connection may die first. So:

* a worker failed when it raised its exception (it reports the time on this host's monotonic clock), or,
  without an exception, when it was reaped;
* a failure that only says "my peer is gone" is a symptom if another one says more (:mod:`.symptoms`);
* a worker that we stopped before it raised anything is a victim, unless it was handling an exception
  at that time and no other worker has an error of its own;
* a worker whose script succeeded is to blame if all others only lost a peer: it left them.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from rallypoint._core import flight_records

from . import symptoms
from .symptoms import Chain, Says


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An exception as data.

    Args:
        type, message, traceback: those of the exception; for a ``SystemExit``, those of the one being handled.
        at: when the worker reported it, on the monotonic clock of its host.
        timestamp: the same time in seconds since 1970.
        exited: the script called ``sys.exit`` while handling this exception.
        handled: the script had caught it and was still running when the supervisor asked.
        chains: from this exception back to each first cause (an exception group has several).
    """

    type: str
    message: str
    traceback: str
    at: float
    timestamp: int
    exited: bool = False
    handled: bool = False
    chains: tuple[Chain, ...] = ()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Build one from a decoded JSON record.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: ``record`` is not such a record.
        """
        return cls(
            type=str(record["type"]),
            message=str(record["message"]),
            traceback=str(record["traceback"]),
            at=float(record["at"]),
            timestamp=int(record["timestamp"]),
            exited=bool(record.get("exited", False)),
            handled=bool(record.get("handled", record.get("kind") == "handled")),
            chains=tuple(
                tuple((str(kind), str(message)) for kind, message in chain)
                for chain in record.get("chains", ())
            ),
        )

    @property
    def is_exit(self) -> bool:
        """Whether this is a ``sys.exit`` without another exception behind it."""
        return self.type == "SystemExit"

    @property
    def chain(self) -> Chain:
        """The most informative chain."""
        return symptoms.best_chain(self.chains) or ((self.type, self.message),)

    @property
    def shown(self) -> symptoms.Link:
        """Type and message to show: the worker's own error, if it only lost its peers afterwards."""
        if self.says() is not Says.MASKED:
            return (self.type, self.message)
        return symptoms.telling(self.chain) or (self.type, self.message)

    def says(self) -> Says:
        return Says.CAUSE if self.is_exit else symptoms.chain_says(self.chain)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """One failed or stopped worker, or one that left before the others failed (exit code 0).

    Args:
        exit_code: the exit code, or None if a signal ended the worker.
        signal: the number of the signal that ended it, or None.
        raised: the exception that ended it, or None.
        native_stack: the Python stack at a native fault, its own or that of a child, or at a time-out that the script has set
            (from faulthandler); or "".
        cause: further evidence, such as the OOM killer; or "".
        stderr: the last lines of its stderr, without a native stack that is in ``native_stack``.
        at: when it failed, on the monotonic clock of ``host``.
        stopped_by_us: we stopped it because another worker failed.
        hung: we ended it because the others waited for it.
        collectives: what it had begun in its process groups, if it was asked before it was stopped.
    """

    host: str
    node_rank: int
    rank: int
    local_rank: int
    pid: int
    generation: int
    exit_code: int | None
    signal: int | None
    raised: Raised | None
    native_stack: str
    cause: str
    stderr: tuple[str, ...]
    at: float
    stopped_by_us: bool
    hung: bool = False
    collectives: tuple[flight_records.Group, ...] = ()

    @property
    def signal_name(self) -> str | None:
        if self.signal is None:
            return None
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"

    @property
    def child_crashed(self) -> bool:
        """Whether the native stack is that of a child, such as a process of a pool."""
        return (
            bool(self.native_stack) and self.signal is None and not _is_timeout(self.native_stack)
        )

    @property
    def left_early(self) -> bool:
        """Whether it did not fail, but ended before the others had failed."""
        return self.exit_code == 0 and not self.stopped_by_us

    @property
    def command_exit_code(self) -> int:
        """The exit code as a shell reports it."""
        if self.says() in {Says.HANDLED, Says.PRINTED}:
            return 1  # as if it had not been stopped
        if self.signal is not None:
            return 128 + self.signal
        return self.exit_code or 1

    def says(self) -> Says:
        """How much this failure says about the root cause."""
        raised = self.raised
        if self.left_early:
            return Says.LEFT_EARLY
        if self.stopped_by_us:
            if raised is not None and raised.handled and not symptoms.is_ordinary(raised.type):
                found = raised.says()
                return Says.HANDLED if found in {Says.CAUSE, Says.MASKED} else Says.STOPPED
            printed = symptoms.printed(self.stderr) if raised is None else None
            if printed is None or symptoms.is_ordinary(printed[0]):
                return Says.STOPPED
            return Says.PRINTED if symptoms.says(printed) is Says.CAUSE else Says.STOPPED
        if raised is not None and not raised.is_exit:
            return raised.says()
        told = raised is not None and not raised.message.lstrip("-").isdigit()  # sys.exit("why")
        if self.signal in {None, signal.SIGABRT} and not told:
            printed = symptoms.printed(self.stderr)  # perhaps itself only a symptom
            return Says.CAUSE if printed is None else symptoms.says(printed)
        return Says.CAUSE

    def is_symptom(self) -> bool:
        """Whether it says only that a peer is gone; the cause may still arrive."""
        return not self.stopped_by_us and self.says() is not Says.CAUSE

    def is_echo(self) -> bool:
        """Whether it only reports a lost peer, or that the supervisor stopped it."""
        return self.stopped_by_us or self.is_symptom()

    @property
    def accused(self) -> frozenset[int]:
        """The ranks that the exception's message blames."""
        return frozenset() if self.raised is None else symptoms.accused(self.raised.message)

    def headline(self) -> str:
        """What happened, in a few words."""
        raised = self.raised
        if self.left_early:
            return "ended while other ranks still needed it"
        if self.hung and raised is None:
            return "hung"
        if self.stopped_by_us and raised is not None and raised.handled:
            return f"was handling {raised.shown[0]} when it was stopped"
        if raised is not None and not raised.is_exit and not raised.exited:
            return f"raised {raised.shown[0]}"
        if self.signal is not None:
            return f"was killed by {self.signal_name}"
        if raised is not None and raised.exited:
            return f"exited with code {self.exit_code} while handling {raised.shown[0]}"
        if self.says() is Says.PRINTED:
            return "had printed a traceback when it was stopped"
        return f"exited with code {self.exit_code}"


def failures_from_json(data: str) -> tuple[WorkerFailure, ...]:
    """Read failures that another node published with :func:`failures_to_json`."""
    found = []
    for item in json.loads(data):
        raised = None if item["raised"] is None else Raised.from_record(item["raised"])
        told = item.get("collectives", [])
        collectives = tuple(told) if flight_records.are_valid(told) else ()
        own = {"raised": raised, "stderr": tuple(item["stderr"]), "collectives": collectives}
        found.append(WorkerFailure(**{**item, **own}))
    return tuple(found)


def failures_to_json(failures: Sequence[WorkerFailure]) -> str:
    return json.dumps([asdict(failure) for failure in failures])


def in_order_of_blame(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
    """Sort failures: the root cause first, the others by rank.

    Failures of several hosts must be in the order in which the job's store received them. Clocks of
    different hosts are not comparable, so between hosts only kind and order count.
    """
    if not failures:
        return ()
    first_host = failures[0].host
    blamed = frozenset(rank for failure in failures for rank in failure.accused)

    def blame(item: tuple[int, WorkerFailure]) -> tuple[int, bool, bool, float, int]:
        index, failure = item
        local = failure.host == first_host
        at = failure.at if local else 0.0
        return (failure.says(), failure.rank not in blamed, not local, at, index)

    root = min(enumerate(failures), key=blame)[1]
    others = sorted((f for f in failures if f is not root), key=lambda f: f.rank)
    return (root, *others)


def torchelastic_record(failure: WorkerFailure) -> dict[str, Any]:
    """The failure in the format of torchelastic's error files."""
    raised = failure.raised
    if raised is not None:
        message, stack, timestamp = (
            f"{raised.type}: {raised.message}",
            raised.traceback,
            raised.timestamp,
        )
    else:
        message, stack, timestamp = failure.headline(), failure.native_stack, 0
    return {
        "message": {
            "message": message,
            "errorCode": failure.command_exit_code,
            "extraInfo": {"py_callstack": stack, "timestamp": str(timestamp)},
        }
    }


class Told(NamedTuple):
    """What a worker sent to its supervisor.

    Args:
        raised: the exception that ended it, else the one that it was handling when asked.
        status: the raw status record of a function, if any.
        native: the native stack, or nothing.
        collectives: what it had begun in its process groups when the exception ended it.
    """

    raised: Raised | None
    status: bytes | None
    native: str
    collectives: tuple[flight_records.Group, ...]


def parse_line_from_worker(data: bytes) -> Told:
    """Parse what a worker sent: JSON records, one per line, and faulthandler's text."""
    raised: Raised | None = None
    handled: Raised | None = None
    status: bytes | None = None
    native: list[str] = []
    collectives: tuple[flight_records.Group, ...] = ()
    for line in data.split(b"\n"):
        if line.startswith(b"{"):
            try:
                record = json.loads(line)
                if record.get("kind") == "exception":
                    raised = Raised.from_record(record)
                    told = record.get("collectives", [])
                    collectives = tuple(told) if flight_records.are_valid(told) else ()
                elif record.get("kind") == "handled":
                    handled = Raised.from_record(record)
                else:
                    status = line
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # truncated, or written to the descriptor by user code
        elif line:
            native.append(line.decode(errors="replace"))
    return Told(raised or handled, status, "\n".join(native), collectives)


_TIMEOUT = r"Timeout \(\d+:\d\d:"  # of dump_traceback_later
# Either may follow a progress bar that has not ended its line.
_DUMP = re.compile(rf"(Fatal Python error: )|{_TIMEOUT}")
_OF_A_DUMP = re.compile(
    r"Current thread|Thread 0x| {2}\S|Extension modules: |Python runtime state: "
)


def _is_timeout(stack: str) -> bool:
    return re.match(_TIMEOUT, stack) is not None


def parse_stderr(lines: Sequence[str]) -> tuple[str, list[str]]:
    """Parse the end of a worker's stderr: what faulthandler has written there, or "", and the other lines.

    It writes there if the script has enabled it, as pytest does, or PYTHONFAULTHANDLER. A dump at a time-out counts only if
    nothing follows: the process may have continued.
    """
    for start in range(len(lines) - 1, -1, -1):
        found = _DUMP.search(lines[start])
        if found is None:
            continue
        end = start + 1
        while end < len(lines) and _OF_A_DUMP.match(lines[end]):
            end += 1
        if found[1] or end == len(lines):
            before = lines[start][: found.start()]
            dump = [lines[start][found.start() :], *lines[start + 1 : end]]
            others = [*lines[:start], *([before] if before else []), *lines[end:]]
            return "\n".join(dump), others
    return "", list(lines)

"""How a job failed: records of workers, which of them is the root cause, and the report.

Which failure came first is not the order in which processes were seen to die. A worker that raises
spends a while in its exit handlers; a peer whose connection it closed may be dead before. So:

* a worker failed when its exception was raised (it told us when, on this host's monotonic clock), or,
  without an exception, when it was reaped;
* a failure that only says "my peer is gone" is a symptom while there is another kind of failure;
* a worker that we stopped, and that had not raised anything before, is a victim.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


# What libraries say when the process at the other end is gone. Seen in Gloo, NCCL, TCPStore and
# sockets of torch 2.13; a message that matches is a symptom, not a cause, unless it stands alone.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|socket (closed|timeout)"
    r"|remote (process|peer) (exited|closed|has terminated)|ncclRemoteError|ncclSystemError"
    r"|failed to (recv|send), got|connectFullMesh|recvValue failed|sendBytes failed|peer closed"
    r"|gloo.*(timed out|timeout)",
    re.IGNORECASE,
)
_PEER_LOST_TYPES = {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}
_PEER_LOST_TYPES |= {"ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError"}
_PEER_LOST_TYPES |= {"EOFError", "ConnectionAbortedError"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An exception as data."""

    type: str
    message: str
    traceback: str
    at: float
    timestamp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """One worker that did not end well.

    Args:
        exit_code: as the worker ended with it, or None if a signal ended it.
        signal: the number of the signal that ended it, or None.
        raised: the exception it ended with, if it was one.
        native_stack: where Python stood at a native fault (faulthandler), or "".
        cause: what is known beside, such as the OOM killer; or "".
        stderr: the last lines of its stderr.
        at: when it failed, on the monotonic clock of ``host``.
        stopped_by_us: it was ended because of another's failure.
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

    @property
    def signal_name(self) -> str | None:
        if self.signal is None:
            return None
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"

    @property
    def command_exit_code(self) -> int:
        """What a shell would see."""
        if self.signal is not None:
            return 128 + self.signal
        return self.exit_code or 1

    def is_symptom(self) -> bool:
        """True if it says no more than that a peer is gone."""
        if self.raised is None or self.raised.type == "SystemExit":
            return False
        if self.raised.type in _PEER_LOST_TYPES:
            return True
        return bool(_PEER_LOST.search(self.raised.message))

    def headline(self) -> str:
        """What happened to it, in a few words."""
        if self.raised is not None and self.raised.type != "SystemExit":
            return f"raised {self.raised.type}"
        if self.signal is not None:
            return f"was killed by {self.signal_name}"
        return f"exited with code {self.exit_code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureReport:
    """Why a job (or one generation of it) failed.

    Args:
        failures: every worker that failed or was stopped, the root cause first.
        world_size: number of workers of the job.
        max_restarts: the job's budget; ``generation`` of the root cause tells what is used.
        log_folder: where this generation's files are, or None.
        report_file: where this report stands as JSON, or None.
        reason: set if no worker is to blame (the fork server was killed, say).
    """

    failures: tuple[WorkerFailure, ...]
    world_size: int
    max_restarts: int = 0
    log_folder: str | None = None
    report_file: str | None = None
    reason: str = ""

    @property
    def root_cause(self) -> WorkerFailure | None:
        return self.failures[0] if self.failures and not self.reason else None

    @property
    def victims(self) -> tuple[WorkerFailure, ...]:
        return self.failures[1:] if not self.reason else self.failures

    @property
    def exit_code(self) -> int:
        root = self.root_cause
        return 1 if root is None else root.command_exit_code

    def to_json(self) -> dict[str, Any]:
        root = self.root_cause
        return {
            "version": 1,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "world_size": self.world_size,
            "max_restarts": self.max_restarts,
            "root_cause": None if root is None else _as_json(root),
            "victims": [_as_json(victim) for victim in self.victims],
            "log_folder": self.log_folder,
        }

    def text(self, width: int = 100, *, colour: bool = False) -> str:
        from .report import render  # the words are a file of their own

        return render(self, width=width, colour=colour)

    def __str__(self) -> str:
        return self.text()


def _as_json(failure: WorkerFailure) -> dict[str, Any]:
    return {**asdict(failure), "signal_name": failure.signal_name, "headline": failure.headline()}


def failures_from_json(data: str) -> tuple[WorkerFailure, ...]:
    """Failures that another node published (:func:`failures_to_json`)."""
    found = []
    for item in json.loads(data):
        raised = None if item["raised"] is None else Raised(**item["raised"])
        found.append(WorkerFailure(**{**item, "raised": raised, "stderr": tuple(item["stderr"])}))
    return tuple(found)


def failures_to_json(failures: Sequence[WorkerFailure]) -> str:
    return json.dumps([asdict(failure) for failure in failures])


def in_order_of_blame(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
    """The same failures, the root cause first, then by rank.

    Failures of several hosts come in the order in which the job's store received them: their clocks
    say nothing about each other, so between hosts only kind and order count.
    """
    if not failures:
        return ()
    first_host = failures[0].host

    def blame(item: tuple[int, WorkerFailure]) -> tuple[bool, bool, bool, float, int]:
        index, failure = item
        local = failure.host == first_host
        at = failure.at if local else 0.0
        return (failure.stopped_by_us, failure.is_symptom(), not local, at, index)

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


def parse_line_from_worker(data: bytes) -> tuple[Raised | None, bytes | None, str]:
    """Read what a worker sent on its line: records in JSON, a line each, and faulthandler's text.

    Returns:
        The exception it ended with, a function's status record (raw) if there was one, and the native stack.
    """
    raised: Raised | None = None
    status: bytes | None = None
    native: list[str] = []
    for line in data.split(b"\n"):
        if line.startswith(b"{"):
            try:
                record = json.loads(line)
                if record.get("kind") == "exception":
                    raised = Raised(
                        type=str(record["type"]),
                        message=str(record["message"]),
                        traceback=str(record["traceback"]),
                        at=float(record["at"]),
                        timestamp=int(record["timestamp"]),
                    )
                else:
                    status = line
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # cut off, or written by the user's code: the line is a descriptor like any
        elif line:
            native.append(line.decode(errors="replace"))
    return raised, status, "\n".join(native)

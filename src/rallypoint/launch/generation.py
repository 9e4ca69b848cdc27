"""The workers of one generation, as the supervisor sees them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rallypoint import events
from rallypoint._core import call_counts, clock, limits, shared_page, step_reports
from rallypoint._core.host_name import host_name

from .output import cpu_limit, oom, shm_space
from .output.cpu_limit import CpuTime
from .output.failure import Raised, WorkerFailure, parse_line_from_worker, parse_stderr
from .output.report import in_a_line
from .output.worker_streams import WorkerStreams
from .placement.ranks import WorkerRanks


# A worker reports little: an exception, a native stack. Anything beyond this is dropped.
MAX_LINE_DATA = 1024 * 1024
# The start of a record about a session.
SESSION_RECORD = b'{"kind": "kept'
# How long to wait for the last lines of a worker that reported nothing; its children may hold stderr open.
LAST_WORDS_PATIENCE = 0.2
# How many of the last lines of stderr a report keeps.
_STDERR_LINES = 20
# What Python and C++ say if a process or thread cannot be started.
_REFUSED = re.compile(r"can't start new thread|Resource temporarily unavailable")
# The start of a worker's report of an import.
IMPORT_RECORD = b'{"kind": "import"'


@dataclass(slots=True)
class Worker:
    """One worker.

    Args:
        ranks: its ranks.
        name: its name in the fork server, unique within the job.
        line: the supervisor's end of the socket on which it reports how it failed.
        streams: its output.
        stacks_fd: the pipe on which it shows its stacks; negative once closed.
        questions_fd: the socket on which it is asked about its collectives; negative once closed.
        result_fd: function launches: the memory file for its result.
        pid: 0 until the fork server has reported it.
        said: what it reported.
        takes_over: it took the place of a lost worker.
        store: the workers' store that it was started with, which it needs until it is in its session.
        in_session: it is in a session, so it can be kept if another worker is lost.
        record_copies: how many nodes are to hold each set-up record in case the store is lost; 0: it does not hold its share yet.
        saves: it saves a last checkpoint if the job is told to stop.
        hung: why it counts as hung, in words, if it was ended for that.
        failed_at: the step in which its session failed; -1 if it did not.
        is_refused: its session cannot be kept, nor could that of another process in its place.
        record_lost: it is refused because the record of a set-up was lost with nodes.
        collectives: what it had begun in its process groups when another worker failed.
        memory_fd: what it keeps for the worker that takes its place.
        steps_fd: the step that it is in, once it has reported one.
        cpu: its CPU time, if it was killed in a way in which the kernel enforces a limit of it.
        status: as ``waitpid`` returned it; None while it runs.
        ended_at: when it was reaped, on this host's monotonic clock.
    """

    ranks: WorkerRanks
    name: str
    line: socket.socket
    streams: WorkerStreams
    stacks_fd: int
    questions_fd: int
    result_fd: int | None = None
    pid: int = 0
    said: bytearray = field(default_factory=bytearray)
    takes_over: bool = False
    store: str = ""
    in_session: bool = False
    record_copies: int = 0
    saves: bool = False
    hung: str = ""
    failed_at: int = -1
    is_refused: bool = False
    record_lost: bool = False
    collectives: tuple[Any, ...] = ()
    memory_fd: int | None = None
    steps_fd: int | None = None
    cpu: CpuTime | None = None
    calls_fd: int | None = None
    status: int | None = None
    ended_at: float = 0.0

    def listen(self) -> bool:
        """Read what it has reported. Returns False once nothing more can arrive."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.line, 64 * 1024, 4)
            except BlockingIOError:
                return True
            except OSError:
                return False
            for fd in fds:
                self._hold_memory(fd)
            if not data:
                return False
            if len(self.said) < MAX_LINE_DATA:
                self.said += data

    def _hold_memory(self, fd: int) -> None:
        if shared_page.is_page(fd, step_reports.NAME):
            held, self.steps_fd = self.steps_fd, fd
        elif shared_page.is_page(fd, call_counts.NAME):
            held, self.calls_fd = self.calls_fd, fd
        else:
            held, self.memory_fd = self.memory_fd, fd
        if held is not None:
            os.close(held)

    def take_imports(self) -> list[dict[str, Any]]:
        """Remove and return its reports of imports: ``package``, ``changed`` and ``paths`` of each."""
        return self._take(IMPORT_RECORD, _import_in)

    def take_records(self) -> list[dict[str, Any]]:
        """Remove and return what it has said about its session."""
        return self._take(SESSION_RECORD, _session_record_in)

    def _take(
        self, prefix: bytes, read: Callable[[bytes], dict[str, Any] | None]
    ) -> list[dict[str, Any]]:
        if prefix not in self.said:
            return []
        found = []
        *lines, rest = self.said.split(b"\n")
        kept = bytearray()
        for line in lines:
            told = read(bytes(line))
            if told is None:
                kept += line + b"\n"
            else:
                found.append(told)
        self.said = kept + rest
        return found

    def tell(self, record: dict[str, Any], *fds: int) -> None:
        """Send a record and descriptors to the worker, if it is in a session."""
        data = json.dumps(record).encode() + b"\n"
        try:
            socket.send_fds(self.line, [data], fds)
        except OSError:
            pass  # it has exited, which is reported separately

    def progress(self) -> dict[str, Any] | None:
        """How far it has come, if it has reported that."""
        found = None if self.steps_fd is None else step_reports.read(self.steps_fd)
        return None if found is None else found.facts(clock.MONOTONIC.now())

    def calls(self) -> dict[str, Any] | None:
        """What it has counted of its rpc calls, if it is a member of a group."""
        return None if self.calls_fd is None else call_counts.read(self.calls_fd)

    def result(self) -> bytes:
        """The result of a function launch, from the worker's memory file."""
        if self.result_fd is None:
            return b""
        size = os.fstat(self.result_fd).st_size
        parts: list[bytes] = []
        position = 0
        while position < size:
            part = os.pread(self.result_fd, min(size - position, 1 << 26), position)
            if not part:
                break
            parts.append(part)
            position += len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close all descriptors. A second call does nothing."""
        self.line.close()
        self.streams.given()
        for fd in (self.stacks_fd, self.questions_fd):
            if fd >= 0:
                os.close(fd)
        self.stacks_fd = self.questions_fd = -1
        if self.memory_fd is not None:
            os.close(self.memory_fd)
            self.memory_fd = None
        if self.steps_fd is not None:
            os.close(self.steps_fd)
            self.steps_fd = None
        if self.calls_fd is not None:
            os.close(self.calls_fd)
            self.calls_fd = None
        if self.result_fd is not None:
            os.close(self.result_fd)
            self.result_fd = None


class Generation:
    """All workers of one generation on this node, and the signals that were sent to them.

    Args:
        number: the generation.
        node_rank: this node's rank in it.
    """

    def __init__(self, number: int, node_rank: int) -> None:
        self.number = number
        self._node_rank = node_rank
        self._workers: list[Worker] = []
        self._by_name: dict[str, Worker] = {}
        self._stopped_at: float | None = None
        self._signals_sent: set[int] = set()
        self._oom_before = oom.read_counters()
        self._refused_before = limits.refused_starts()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def add(self, worker: Worker) -> None:
        self._workers.append(worker)
        self._by_name[worker.name] = worker

    def replace(self, index: int, worker: Worker) -> None:
        """Put a worker in the place of one that has ended, and give it what that one kept for it."""
        old = self._workers[index]
        worker.memory_fd, old.memory_fd = old.memory_fd, None
        del self._by_name[old.name]
        old.close()
        self._workers[index] = worker
        self._by_name[worker.name] = worker

    def continue_as(self, number: int, node_rank: int, ranks: Iterable[WorkerRanks]) -> None:
        """Continue with the same workers in another generation.

        Args:
            number: the generation.
            node_rank: this node's rank in it.
            ranks: the workers' ranks.
        """
        self.number, self._node_rank = number, node_rank
        for worker, its in zip(self._workers, ranks, strict=True):
            worker.ranks = its

    def folders(self) -> dict[int, Path | None]:
        """Where the workers' files are, by local rank."""
        return {each.ranks.local_rank: each.streams.folder for each in self._workers}

    def failure_of(self, worker: Worker) -> WorkerFailure:
        """How a worker failed."""
        return self._failure_of(worker)

    def named(self, name: str) -> Worker | None:
        return self._by_name.get(name)

    def index(self, worker: Worker) -> int:
        return self._workers.index(worker)

    def running(self) -> list[str]:
        """The names of the workers that have not ended."""
        return [worker.name for worker in self._workers if worker.status is None]

    def note_signal(self, number: int) -> None:
        """Record that the supervisor sends this signal now. Workers that end because of it are not to blame."""
        if self._stopped_at is None:
            self._stopped_at = clock.MONOTONIC.now()
        self._signals_sent.add(number)

    def is_echo(self, worker: Worker) -> bool:
        """Whether a worker's failure only reports that a peer is lost or that the supervisor stopped the worker."""
        failure = self._failure_of(worker)
        if failure.raised is None or failure.raised.is_exit:
            worker.streams.drain(clock.Deadline(LAST_WORDS_PATIENCE))
            failure = self._failure_of(worker)  # now with its last lines
        return failure.is_echo()

    def drain(self, timeout: float) -> None:
        """Wait until all output has been passed on, for at most ``timeout`` seconds."""
        deadline = clock.Deadline(timeout)
        for worker in self._workers:
            worker.streams.drain(deadline)

    def results(self) -> tuple[bytes, ...]:
        return tuple(worker.result() for worker in self._workers)

    def end_of(self, worker: Worker) -> events.WorkerEnded:
        """A worker's end as an event."""
        failure = self._failure_of(worker)
        failed = bool(worker.status)
        return events.WorkerEnded(
            generation=self.number,
            rank=failure.rank,
            local_rank=failure.local_rank,
            worker_pid=failure.pid,
            exit_code=failure.exit_code,
            signal=failure.signal,
            error=in_a_line(failure) if failed else "",
            stopped=failed and failure.stopped_by_us,
        )

    def failures(self) -> tuple[WorkerFailure, ...]:
        """The failures of all workers that have failed, in rank order."""
        return tuple(self._failure_of(worker) for worker in self._workers if worker.status)

    def left_early(self) -> tuple[WorkerFailure, ...]:
        """The workers that succeeded before any worker was stopped, in rank order."""
        at = self._stopped_at
        return tuple(
            self._failure_of(worker)
            for worker in self._workers
            if worker.status == 0 and (at is None or worker.ended_at < at)
        )

    def _failure_of(self, worker: Worker) -> WorkerFailure:
        code = os.waitstatus_to_exitcode(worker.status or 0)
        number = -code if code < 0 else None
        raised, _status, native, collectives = parse_line_from_worker(bytes(worker.said))
        handled = raised if raised is not None and raised.handled else None
        raised = None if handled else raised
        if (
            raised is not None
            and raised.type != "KeyboardInterrupt"
            and number in self._signals_sent
        ):
            # It had raised and was exiting when the signal arrived: the exception is its failure.
            code, number = 1, None
        stopped = self._was_stopped(worker, number, raised)
        at = worker.ended_at if raised is None else raised.at
        if stopped and raised is None:
            raised = handled  # otherwise it had recovered, and failed for another reason
        stderr = worker.streams.stderr_tail()
        if not native:
            native, stderr = parse_stderr(stderr)
        return WorkerFailure(
            host=host_name(),
            node_rank=self._node_rank,
            rank=worker.ranks.rank,
            local_rank=worker.ranks.local_rank,
            pid=worker.pid,
            generation=self.number,
            exit_code=None if number is not None else code,
            signal=number,
            raised=raised,
            native_stack=native,
            cause=worker.hung or self._cause_of(worker, stopped, number, raised),
            stderr=tuple(stderr[-_STDERR_LINES:]),
            at=at,
            stopped_by_us=stopped,
            hung=bool(worker.hung),
            collectives=worker.collectives or collectives,
        )

    def _was_stopped(self, worker: Worker, number: int | None, raised: Raised | None) -> bool:
        if self._stopped_at is None:
            return False
        if raised is not None:
            return raised.at >= self._stopped_at
        if number is not None:
            return number in self._signals_sent and worker.ended_at >= self._stopped_at
        return worker.ended_at >= self._stopped_at

    def _cause_of(
        self, worker: Worker, stopped: bool, number: int | None, raised: Raised | None
    ) -> str:
        """What the kernel did to it, if that is known."""
        if stopped:
            return ""
        match number:
            case None if raised is not None and oom.tells_of_killed_child(raised.shown[1]):
                now = oom.read_counters()
                return oom.explain(self._oom_before, now, victim="a child of it") or ""
            case None if raised is not None and _REFUSED.search(raised.shown[1]):
                return limits.explain_refusal(self._refused_before, limits.refused_starts()) or ""
            case signal.SIGABRT:  # of a C++ exception, if a library could start no thread
                return limits.explain_refusal(self._refused_before, limits.refused_starts()) or ""
            case signal.SIGBUS:
                return shm_space.explain(number, shm_space.read()) or ""
            case signal.SIGKILL | signal.SIGXCPU:
                out_of_time = cpu_limit.explain(number, worker.cpu)
                if out_of_time is None and number == signal.SIGKILL:
                    return oom.explain(self._oom_before, oom.read_counters()) or ""
                return out_of_time or ""
            case _:
                return ""


def _import_in(line: bytes) -> dict[str, Any] | None:
    """A report of an import, or None for any other line."""
    if not line.startswith(IMPORT_RECORD):
        return None
    try:
        record = json.loads(line)
        package, changed, paths = record["name"], record["changed"], record["paths"]
    except (ValueError, KeyError, RecursionError):
        return None  # written by user code
    if not (isinstance(package, str) and isinstance(changed, list) and isinstance(paths, list)):
        return None
    return {"package": package, "changed": [*map(str, changed)], "paths": [*map(str, paths)]}


def _session_record_in(line: bytes) -> dict[str, Any] | None:
    """What a worker says about its session, or None for any other line."""
    if not line.startswith(SESSION_RECORD):
        return None
    try:
        record: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None  # written by user code
    return record

"""The fork server: one process that imports torch once and of which every worker is a fork.

Theory of operation
-------------------
The supervisor starts this process first of all and goes on with its own work. Here torch (and what
``--preload`` names) is imported; then a loop takes requests from the supervisor and reports what
became of the children. With ``--start-method exec`` nothing is imported and a worker is a fork that
executes a plain interpreter: everything else is the same, so supervision has one shape.

Rules:

1. One thread. A fork of a process with threads inherits locks that nobody will release.
2. Every process of the job is below this one. It is a *subreaper*: daemons and double forks come
   back to it as orphans. So "everything below me" is the whole job, whatever user code does. (The process that serves the
   job's store, where this node does, is below it too, but only the supervisor ends it: see ``job_store``.)
3. If the supervisor goes (end of the line), everything below is killed, then this process ends. If
   this process goes, the supervisor, a subreaper too, inherits everything and does the same; and
   each worker asked the kernel to die with its parent. One of the three is enough.
4. Pids are signalled only from here: a pid we have not reaped cannot have been given to a stranger. (If this
   process does not answer, because somebody stopped it, the supervisor ends everything by itself.)
5. A signal to this process is meant for the workers: batch systems signal every process of a job. It does
   nothing here, but shows that the workers have got it too. So they are not sent it again when the supervisor asks
   for that: a handler that raises, to write a last checkpoint, would be interrupted while it is written.

Requests (``do``): ``spawn`` · ``store`` · ``probe`` · ``signal`` · ``query`` · ``sweep`` · ``tell`` (whether a signal came
here) · ``ping``. Reports (``is``): ``ready`` · ``unready`` · ``spawned`` · ``exited`` · ``swept`` · ``told`` · ``failed`` (a limit
was reached) · ``heard`` (a request that has a number, ``ask``). Fields are documented at their handlers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from rallypoint._core import clock, env as environment, limits, process
from rallypoint._core.secret import adopt, from_descriptor
from rallypoint.launch import signals
from rallypoint.launch.config import Job, StartMethod
from rallypoint.launch.worker import bootstrap, ending
from rallypoint.launch.worker.job import ASK_SIGNAL, WorkerFds, WorkerStart

from . import store_host
from .channel import Channel, Message


# How long the end of everything may take before we give up on processes that cannot die
# (uninterruptible sleep in a driver or a dead network file system).
KILL_PATIENCE = 5.0
# Requests taken at a time: descriptors come with them.
FEW = 8
# A signal that we get is one that the workers have got, if it is to be passed on within this time.
SAME_SIGNAL = 1.0


@dataclass(slots=True)
class _Held:
    """A signal that is passed on once it is clear that the workers do not get it anyway."""

    until: float
    number: int
    pids: list[int]
    group: bool


class ForkServer:
    """The loop. ``run()`` returns only in the forks' stead: never, or by ``SystemExit``.

    Args:
        channel: the line to the supervisor.
        job: what to run, from the supervisor (``Job`` as JSON).
        start_method: fork workers of this process, or have forks execute interpreters.
        call: with ``fork`` (function launches), what a worker calls: this process was forked from
            the caller's program, so the function is here already.
        open_files: how many files a worker may have open, if that is less than this process may.
    """

    def __init__(
        self,
        channel: Channel,
        job: Job,
        start_method: StartMethod,
        call: Callable[[WorkerFds], None] | None = None,
        open_files: int | None = None,
    ) -> None:
        self._channel = channel
        self._job = job
        self._start_method = start_method
        self._call = call
        self._open_files = open_files
        self._names: dict[int, str] = {}  # pid -> name the supervisor gave; workers and stores
        self._pids: dict[str, int] = {}
        self._stores: set[int] = set()
        self._lasting: set[int] = set()  # the job's stores: they end when the supervisor says so
        self._sweep_kill_at: float | None = None  # set while a sweep waits for its grace to end
        self._sweep_give_up_at: float | None = None
        self._wakeup_read, self._wakeup_write = -1, -1
        self._supervisor = -1
        self._unserved: set[int] = set()  # descriptors of requests not yet served
        self._threads: dict[str, int] = {}  # module -> threads its import has started
        self._started: dict[int, float] = {}  # pid -> when
        self._came_at: dict[int, float] = {}  # when a signal last came to this process
        self._held: list[_Held] = []

    # -- life ---------------------------------------------------------------------------------

    def run(self, preload: tuple[str, ...]) -> None:
        """Import, report, serve. Ends the process."""
        signals.note(self._note_signal)
        process.set_subreaper(True)
        if self._start_method is StartMethod.FORKSERVER and not self._import(preload):
            self._drain_and_exit()
        # Nothing that exists now needs to be looked at by a collector again; and a collector that
        # looks writes to the objects it visits, which would un-share their pages in every worker.
        gc.collect()
        gc.freeze()
        if self._start_method is StartMethod.FORKSERVER:
            # What an import has printed and not yet written would be written by every fork.
            ending.flush_quietly()
            ctypes.CDLL(None).fflush(None)
        self._watch_children()
        # The end of the line may come late: forks of a supervisor's program (function launches)
        # inherit the other end. Its pidfd does not lie; it is our parent, or we would be dead.
        self._supervisor = os.pidfd_open(os.getppid())
        process.live_without_parent()  # from here on the loop itself notices, and cleans up
        self._report({"is": "ready", "threads": self._threads})
        self._serve()

    def _import(self, preload: tuple[str, ...]) -> bool:
        for name in preload:
            before = len(os.listdir("/proc/self/task"))
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001  whatever the import of user code raises is reported, SystemExit too
                text = "".join(traceback.format_exception(error))
                self._report(
                    {
                        "is": "unready",
                        "module": name,
                        "error": _one_line(error),
                        "traceback": text[-8000:],
                    }
                )
                return False
            self._threads.setdefault(name, len(os.listdir("/proc/self/task")) - before)
        return True

    def _watch_children(self) -> None:
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._wakeup_read, select.POLLIN)
        poller.register(self._supervisor, select.POLLIN)
        while True:
            events = select.POLLIN | (select.POLLOUT if self._channel.wants_write() else 0)
            poller.register(self._channel.fileno(), events)
            ready = {fd for fd, _ in poller.poll(self._milliseconds_to_wait())}
            self._drain_wakeups()
            self._channel.flush()
            requests = self._channel.receive(FEW)
            self._unserved = {fd for _, fds in requests for fd in fds}
            for message, fds in requests:
                try:
                    self._handle(message, fds)
                except OSError as error:
                    if (why := limits.explain(error)) is None:
                        raise
                    self._report({"is": "failed", "name": message.get("name", ""), "why": why})
                finally:
                    for fd in fds:
                        os.close(fd)
                    self._unserved.difference_update(fds)
            self._reap()
            self._pass_on_held()
            self._continue_sweep()
            if self._channel.closed_by_peer or self._supervisor in ready:
                self._end_everything()

    def _milliseconds_to_wait(self) -> int | None:
        times = [at for at in (self._sweep_kill_at, self._sweep_give_up_at) if at is not None]
        times += [held.until for held in self._held]
        if not times:
            return None
        return max(0, int((min(times) - clock.MONOTONIC.now()) * 1000) + 1)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._came_at[number] = clock.MONOTONIC.now()

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self._wakeup_read, 4096):
                pass
        except BlockingIOError:
            pass

    # -- requests -----------------------------------------------------------------------------

    def _handle(self, message: Message, fds: list[int]) -> None:
        match message["do"]:
            case "spawn":
                self._spawn(message, fds)
            case "store":
                self._start_store(message, fds)
            case "probe":
                self._probe(fds[0])
            case "signal":
                self._signal(message)
            case "query":
                self._query(message["names"])
            case "sweep":
                self._begin_sweep(message["grace"])
            case "tell":
                came = self._has_come(message["signal"])
                self._report({"is": "told", "signal": message["signal"], "came": came})
            case "ping":
                pass
            case other:
                raise ValueError(f"fork server: unknown request {other!r}")
        if "ask" in message:
            self._report({"is": "heard", "ask": message["ask"]})

    def _spawn(self, message: Message, fds: list[int]) -> None:
        """Start a worker.

        ``name``: the supervisor's name for it. ``env``: variables on top of ours. ``cpus``: the CPUs
        it is bound to, or null. ``args``: its arguments, or null: the job's. Descriptors: its stdout, its stderr, its line to the supervisor,
        then for functions the memory files of payload and result.
        """
        worker = WorkerStart(
            env=message["env"],
            cpus=message["cpus"],
            fds=WorkerFds.from_list(fds),
            args=message["args"],
        )
        self._fork(message["name"], lambda: self._become_worker(worker), fds)

    def _become_worker(self, worker: WorkerStart) -> None:
        job = self._job
        if worker.args is not None:
            job = replace(job, args=tuple(worker.args))
        if self._start_method is StartMethod.EXEC:
            bootstrap.exec_worker(job, worker)
        bootstrap.run_forked(job, worker, call=self._call)

    def _start_store(self, message: Message, fds: list[int]) -> None:
        """Serve a store: ``name``, ``port``; descriptors: the socket, and for the job's store the line that it ends with."""
        serves_job = len(fds) > 1
        call, title = ("serve_job", "the job's store") if serves_job else ("serve", "store")
        args = fds[0], message["port"], *fds[1:]

        def become_store() -> None:
            if self._start_method is StartMethod.EXEC:
                for fd in fds:
                    os.set_inheritable(fd, True)
                code = f"from rallypoint.launch.server.store_host import {call}; {call}{args}"
                with environment.overlay({"OMP_NUM_THREADS": "1"}):
                    os.execv(sys.executable, [sys.executable, "-c", code])
            process.set_title(f"rally: {title}")
            getattr(store_host, call)(*args)

        stores = self._lasting if serves_job else self._stores
        stores.add(self._fork(message["name"], become_store, fds, deaf=True, lasts=serves_job))

    def _probe(self, reply_fd: int) -> None:
        """Count accelerators in a fork: asking CUDA here would spoil every later fork."""

        def count() -> None:
            import torch

            found = {"count": 0, "type": "cpu"}
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None and torch.accelerator.is_available():
                found = {"count": torch.accelerator.device_count(), "type": accelerator.type}
            os.write(reply_fd, json.dumps(found).encode())
            os._exit(0)

        self._fork("probe", count, [reply_fd], deaf=True)

    def _signal(self, message: Message) -> None:
        """Send ``signal`` to the workers ``names``; with ``group`` to their whole process groups.

        ``hold``: seconds in which we may still get it ourselves, which would show that they have it already.
        """
        pids = [self._pids[name] for name in message["names"] if name in self._pids]
        until = clock.MONOTONIC.now() + message["hold"]
        self._held.append(_Held(until, message["signal"], pids, message["group"]))
        self._pass_on_held()

    def _has_come(self, number: int) -> bool:
        """Whether we got this signal ourselves a moment ago."""
        return clock.MONOTONIC.now() - self._came_at.get(number, float("-inf")) < SAME_SIGNAL

    def _pass_on_held(self, *, all_of_it: bool = False) -> None:
        now = clock.MONOTONIC.now()
        waiting = []
        for held in self._held:
            came = self._has_come(held.number)
            came_at = self._came_at.get(held.number, float("-inf"))
            if now < held.until and not came and not all_of_it:
                waiting.append(held)
                continue
            for pid in held.pids:
                has_it = came and came_at >= self._started.get(pid, float("inf"))
                if pid in self._names and not has_it:
                    _send(pid, held.number, group=held.group)
        self._held = waiting

    def _query(self, names: list[str]) -> None:
        """Have the workers ``names`` tell which exception they handle just now, where they can."""
        for name in names:
            pid = self._pids.get(name)
            # One that is still becoming a worker, or has executed something else, would die of it.
            if pid is not None and process.catches(pid, ASK_SIGNAL):
                try:
                    os.kill(pid, ASK_SIGNAL)
                except ProcessLookupError:
                    pass

    # -- children -----------------------------------------------------------------------------

    def _fork(
        self,
        name: str,
        become: Callable[[], None],
        fds: list[int],
        *,
        deaf: bool = False,
        lasts: bool = False,
    ) -> int:
        """Fork a process of the job.

        Args:
            deaf: it is one of ours: what is meant for workers does not end it.
            lasts: it is not ours to end.
        """
        server = os.getpid()
        # What is sent to the new process before it is what it is to be must find it so: it waits.
        mask = signals.block()
        try:
            pid = os.fork()
        except BaseException:
            signals.restore(mask)
            raise
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(self._wakeup_read)
                os.close(self._wakeup_write)
                os.close(self._supervisor)
                # Another worker's pipe held open here would not end when that worker does.
                for fd in self._unserved.difference(fds):
                    os.close(fd)
                self._channel.close()
                os.setsid()
                process.die_with_parent(server)
                if deaf:
                    signals.ignore()
                elif self._open_files is not None:
                    limits.limit_open_files(self._open_files)
                become()
            except BaseException:  # noqa: BLE001  a fork must never return into the server's loop
                traceback.print_exc()
            finally:
                os._exit(1)
        if not lasts:
            self._started[pid] = clock.MONOTONIC.now()
            self._names[pid] = name
            self._pids[name] = pid
        signals.restore(mask)
        self._report({"is": "spawned", "name": name, "pid": pid, "lasts": lasts})
        return pid

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._names.pop(pid, None)
            self._started.pop(pid, None)
            self._stores.discard(pid)
            self._lasting.discard(pid)
            if name is not None:  # else an orphan we had adopted
                del self._pids[name]
                self._report(
                    {"is": "exited", "name": name, "status": status, "at": clock.MONOTONIC.now()}
                )

    # -- ends ---------------------------------------------------------------------------------

    def _begin_sweep(self, grace: float) -> None:
        """End all that is left of a generation: SIGTERM, ``grace`` seconds, SIGKILL; then ``swept``.

        The stores go too, without a SIGTERM: they have nothing to save, but they go last.
        """
        now = clock.MONOTONIC.now()
        self._pass_on_held(all_of_it=True)
        if grace > 0:
            process.send(self._left(), signal.SIGTERM)
        self._sweep_kill_at = now + grace
        self._sweep_give_up_at = now + grace + KILL_PATIENCE

    def _left(self) -> list[int]:
        return process.descendants(os.getpid(), keep=self._stores | self._lasting)

    def _continue_sweep(self) -> None:
        if self._sweep_give_up_at is None:
            return
        now = clock.MONOTONIC.now()
        left = self._left()
        if left and self._sweep_kill_at is not None and now >= self._sweep_kill_at:
            process.send(left, signal.SIGKILL)
            # A process may have forked between our look and the signal: look again soon; each
            # death of a child wakes us anyway.
            self._sweep_kill_at = now + 0.05
        if not left:
            process.send(self._stores, signal.SIGKILL)
        # Not before all have been reaped: whoever hears "swept" has heard how each of them ended.
        if not (left or self._names) or now >= self._sweep_give_up_at:
            self._sweep_kill_at = self._sweep_give_up_at = None
            self._report({"is": "swept", "left": left})

    def _end_everything(self) -> None:
        deadline = clock.Deadline(KILL_PATIENCE)
        poller = select.poll()
        poller.register(self._wakeup_read, select.POLLIN)
        while not deadline.expired():
            process.send(process.descendants(os.getpid(), keep=self._lasting), signal.SIGKILL)
            self._reap()
            if self._lasting.issuperset(process.children(os.getpid())):
                break
            poller.poll(50)  # each death wakes us; the limit is for forks we have not seen
            self._drain_wakeups()
        os._exit(0)

    def _drain_and_exit(self) -> None:
        poller = select.poll()
        while self._channel.wants_write() and not self._channel.closed_by_peer:
            poller.register(self._channel.fileno(), select.POLLOUT)
            poller.poll(1000)
            self._channel.flush()
        os._exit(1)

    def _report(self, message: Message) -> None:
        self._channel.send(message)


def _send(pid: int, number: int, *, group: bool) -> None:
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        pass


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main(fd: int) -> None:
    """Entry of the process (see ``supervisor``): ``fd`` is its end of the line."""
    channel = Channel(socket.socket(fileno=fd))
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    first: list[tuple[Message, list[int]]] = []
    while not first:
        poller.poll()
        first = channel.receive(1)  # what else has come is for the loop
        if channel.closed_by_peer:
            os._exit(0)
    hello, fds = first[0]
    adopt(from_descriptor(fds[0]) if hello["has_secret"] else None)
    for each in fds:
        os.close(each)
    process.die_with_parent(hello["supervisor"])  # until the loop runs and can notice by itself
    job = Job.from_json(hello["job"])
    # As a worker's title begins, and without our name: `pkill -f` with either finds workers too, or not us.
    process.set_title(f"{Path(sys.executable).name}: fork server of {job.title}")
    start_method = StartMethod(hello["start_method"])
    server = ForkServer(channel, job, start_method, open_files=hello["open_files"])
    server.run(tuple(hello["preload"]))

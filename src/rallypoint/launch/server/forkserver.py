"""The fork server: one process that imports torch once; every worker is a fork of it.

Theory of operation
-------------------
The supervisor starts this process first and continues with its own work. This process imports torch (and what
``--preload`` names); then a loop handles requests from the supervisor and reports how its children exit. With
``--start-method exec`` nothing is imported, and a worker is a fork that executes a plain interpreter; supervision is the same.

Parts of torch that workers import later are already imported when their successors start: those are forks of a
*template*, which is a fork of this process (see ``learning`` and ``templates``).

Rules:

1. One thread. A fork of a process with threads inherits locks that are never released.
2. Every process of the job is a descendant of this one. It is a *subreaper*: orphaned daemons become its children. So
   its descendants are the whole job, whatever user code does. (The process of the job's store, if this node serves it,
   is one too, but only the supervisor ends it: see ``job_store``.)
3. If the supervisor dies, this process kills all its descendants and exits. If this process dies, the supervisor, also
   a subreaper, inherits them and kills them. Each worker also asks the kernel to die with its parent. Any one of the
   three is enough.
4. Only this process signals pids: the pid of a child it has not reaped cannot be reused. (If this process is stopped
   and does not answer, the supervisor kills everything itself.)
5. Batch systems signal every process of a job. So a signal that arrives here has reached the workers too. It does
   nothing else here, and is not sent to the workers again when the supervisor asks: a second one would interrupt a
   handler that is writing a last checkpoint.

Requests (``do``): ``spawn`` · ``store`` · ``probe`` · ``signal`` · ``wake`` (continue stopped workers, so that signals take
effect) · ``query`` · ``sweep`` · ``tell`` (whether a signal arrived here) · ``learn`` (a worker has imported a package) ·
``ahead`` (keep workers forked in advance) · ``ping``.
Reports (``is``): ``ready`` · ``unready`` · ``spawned`` · ``exited`` · ``swept`` · ``told`` · ``failed`` (a limit was
reached) · ``learned`` (what the next workers will have imported) · ``heard`` (confirms a request with a number,
``ask``). Handlers document the fields.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rallypoint._core import clock, collector, env as environment, limits, linux, process
from rallypoint._core.secret import adopt, from_descriptor, offer
from rallypoint._core.stack_line import STACK_SIGNAL
from rallypoint.launch import signals, torch_private
from rallypoint.launch.config import Job, StartMethod
from rallypoint.launch.worker import bootstrap, ending, preloaded
from rallypoint.launch.worker.job import ASK_SIGNAL, WorkerFds, WorkerStart

from . import learning, store_host
from .channel import Channel, Message
from .templates import Templates


# Seconds until we give up on processes that SIGKILL does not end (uninterruptible sleep in a driver
# or on a dead network file system).
KILL_PATIENCE = 5.0
# Requests received at a time; limited because each brings descriptors.
FEW = 8
_TORCH = ("torch", "torch.distributed")
_KILLS_FOR_CPU_TIME = frozenset({signal.SIGKILL, signal.SIGXCPU})
# A signal that arrived here this recently (seconds) has reached the workers too: see rule 5.
SAME_SIGNAL = 1.0


@dataclass(slots=True)
class _Held:
    """A signal to forward unless it turns out that the workers have received it too."""

    until: float
    number: int
    pids: list[int]
    group: bool


class ForkServer:
    """The server's loop; :meth:`run` never returns.

    Args:
        channel: the connection to the supervisor.
        job: what to run, from the supervisor (``Job`` as JSON).
        start_method: whether forks become workers or execute an interpreter.
        call: with ``fork`` (function launches), what a worker calls: this process is a fork of the
            caller's program, so it has the function already.
        open_files: a worker's limit of open files, if lower than this process's.
        learns: whether new workers start with what earlier ones imported.
        secret_fd: a memory file with the job's secret, for all processes of the job; None if it has none.
        supervisor: a pidfd of the supervisor, if that is not this process's parent (see ``warm_server``).
    """

    def __init__(
        self,
        channel: Channel,
        job: Job,
        start_method: StartMethod,
        call: Callable[[WorkerFds], None] | None = None,
        open_files: int | None = None,
        *,
        learns: bool = False,
        secret_fd: int | None = None,
        supervisor: int = -1,
    ) -> None:
        self._channel = channel
        self._job = job
        self._start_method = start_method
        self._call = call
        self._open_files = open_files
        self._learns = learns and start_method is StartMethod.FORKSERVER
        self._names: dict[int, str] = {}  # pid -> the supervisor's name for it; workers and stores
        self._pids: dict[str, int] = {}
        self._stores: set[int] = set()
        self._lasting: set[int] = set()  # the job's stores: only the supervisor ends them
        self._sweep_kill_at: float | None = None  # set during the grace period of a sweep
        self._sweep_give_up_at: float | None = None
        self._ending = process.Ending(KILL_PATIENCE - 1.0)
        self._wakeup_read, self._wakeup_write = -1, -1
        self._supervisor = supervisor
        self._unserved: set[int] = set()  # descriptors of requests not yet handled
        self._secret_fd = secret_fd
        if secret_fd is not None:
            offer(secret_fd)
        self._pid = os.getpid()
        self._threads: dict[str, int] = {}  # module -> threads that its import started
        self._started: dict[int, float] = {}  # pid -> time of its fork
        self._came_at: dict[int, float] = {}  # signal -> when it last arrived here
        self._held: list[_Held] = []
        self._templates = Templates(self._fork_process, self._become_worker, self._report)

    # -- life ---------------------------------------------------------------------------------

    def run(self, preload: tuple[str, ...]) -> None:
        """Import, report, serve, and exit."""
        signals.note(self._note_signal)
        # A fork that inherits a handler for one of these would seem to have set its own, and could be sent the signal.
        for number in (ASK_SIGNAL, STACK_SIGNAL):
            signal.signal(number, signal.SIG_IGN)
        process.set_subreaper(True)
        with collector.paused():
            if self._start_method is StartMethod.FORKSERVER and not self._import(preload):
                self._drain_and_exit()
            torch_private.keep_operators_at_exit()
            collector.settle()
        if self._start_method is StartMethod.FORKSERVER:
            # Every fork would print what the imports left in buffers.
            ending.flush_quietly()
            ctypes.CDLL(None).fflush(None)
        self._watch_children()
        # Watch the supervisor's pidfd, not only the channel: other forks of its program (function
        # launches) may hold the channel open. Our parent is still the supervisor, or we would be dead.
        if self._supervisor < 0:
            self._supervisor = linux.pidfd_open(os.getppid())
        process.live_without_parent()  # from here on the loop watches the supervisor and cleans up
        self._report({"is": "ready", "threads": self._threads})
        self._serve()

    def _import(self, preload: tuple[str, ...]) -> bool:
        for name in preload:
            before = len(os.listdir("/proc/self/task"))
            try:
                with environment.watched() as reads:
                    importlib.import_module(name)
                if name in _TORCH:
                    collector.keep()
                preloaded.note_reads(reads.names if name in _TORCH else ())
            except BaseException as error:  # noqa: BLE001  any error of user code is reported, SystemExit too
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
            of_templates = self._templates.filenos()
            for each in of_templates:
                poller.register(each, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(self._milliseconds_to_wait())}
            for each in of_templates:
                poller.unregister(each)
            self._drain_wakeups()
            self._channel.flush()
            requests = self._channel.receive(FEW)
            self._unserved = {fd for _, fds in requests for fd in fds}
            self._templates.go_on()
            started = self._start_from_template(requests)
            for message, fds in requests:
                try:
                    if message.get("name") not in started:
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
        times += [at for at in [self._templates.next_time()] if at is not None]
        return clock.milliseconds_until(min(times)) if times else None

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
            case "wake":
                process.wake(self._pids[name] for name in message["names"] if name in self._pids)
            case "query":
                self._query(message["names"])
            case "sweep":
                self._begin_sweep(message["grace"])
            case "tell":
                came = self._has_come(message["signal"])
                self._report({"is": "told", "signal": message["signal"], "came": came})
            case "learn":
                self._templates.hear(message["package"], message["changed"], message["paths"])
            case "ahead":
                self._templates.keep_ahead(message["count"])
            case "ping":
                pass
            case other:
                raise ValueError(f"fork server: unknown request {other!r}")
        if "ask" in message:
            self._report({"is": "heard", "ask": message["ask"]})

    def _spawn(self, message: Message, fds: list[int]) -> None:
        """Start a worker.

        ``name``: the supervisor's name for it. ``env``: variables on top of ours. ``cpus``: the CPUs
        it is bound to, or null. ``args``: its arguments, or null for the job's. Descriptors: those of
        :class:`.WorkerFds`.
        """
        self._fork(message["name"], partial(self._become_worker, message, fds, {}), fds)

    def _start_from_template(self, requests: list[tuple[Message, list[int]]]) -> set[str]:
        """Start the workers among these requests from the template, if there is one. Returns their names."""
        started = self._templates.start([each for each in requests if each[0]["do"] == "spawn"])
        for name, pid in started.items():
            self._add_child(name, pid)
        return set(started)

    def _become_worker(
        self, message: Message, fds: list[int], changes: Mapping[str, str | None]
    ) -> None:
        """Run in a fork of this process, or of the template."""
        self._begin_child(deaf=False)
        worker = WorkerStart(
            env=message["env"],
            cpus=message["cpus"],
            fds=WorkerFds.from_list(fds),
            args=message["args"],
            import_changes=changes,
        )
        job = self._job
        if worker.args is not None:
            job = replace(job, args=tuple(worker.args))
        if self._start_method is StartMethod.EXEC:
            bootstrap.exec_worker(job, worker)
        package_of = learning.package_of if self._learns else None
        bootstrap.run_forked(job, worker, call=self._call, package_of=package_of)

    def _start_store(self, message: Message, fds: list[int]) -> None:
        """Serve a store. ``name``, ``port``; descriptors: the socket, and for the job's store a connection to the supervisor."""
        serves_job = len(fds) > 1
        call, title = ("serve_job", "the job's store") if serves_job else ("serve", "store")
        args = fds[0], message["port"], *fds[1:]

        def become_store() -> None:
            self._begin_child(deaf=True)
            if self._start_method is StartMethod.EXEC:
                for fd in fds:
                    os.set_inheritable(fd, True)
                code = f"{store_host.OWN_INTERPRETER}{call}; {call}{args}"
                with environment.overlay({"OMP_NUM_THREADS": "1"}):
                    # -P: files in the current folder must not shadow modules.
                    flags = torch_private.interpreter_flags()
                    os.execv(sys.executable, [sys.executable, *flags, "-P", "-c", code])
            process.set_title(f"rally: {title}")
            getattr(store_host, call)(*args)

        stores = self._lasting if serves_job else self._stores
        stores.add(self._fork(message["name"], become_store, fds, lasts=serves_job))

    def _probe(self, reply_fd: int) -> None:
        """Count accelerators in a fork: once CUDA is initialised here, no fork could use it."""

        def count() -> None:
            self._begin_child(deaf=True)
            import torch

            found = {"count": 0, "type": "cpu"}
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None and torch.accelerator.is_available():
                found = {"count": torch.accelerator.device_count(), "type": accelerator.type}
            os.write(reply_fd, json.dumps(found).encode())
            os._exit(0)

        self._fork("probe", count, [reply_fd])

    def _signal(self, message: Message) -> None:
        """Send ``signal`` to the workers ``names``; with ``group``, to their process groups.

        ``hold``: seconds to wait for the signal to arrive here too, which would show that they have it already.
        """
        pids = [self._pids[name] for name in message["names"] if name in self._pids]
        until = clock.MONOTONIC.now() + message["hold"]
        self._held.append(_Held(until, message["signal"], pids, message["group"]))
        self._pass_on_held()

    def _has_come(self, number: int) -> bool:
        """Whether this signal arrived here a moment ago."""
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
        """Ask the workers ``names`` which exception they are handling."""
        for name in names:
            pid = self._pids.get(name)
            # The signal would kill a process that is still starting or has executed another program.
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
        lasts: bool = False,
    ) -> int:
        """Fork a process of the job; with ``lasts``, only the supervisor ends it.

        ``become`` begins with :meth:`_begin_child`. Each call between here and the script costs the script a frame of its
        recursion limit.
        """
        pid = self._fork_process(become, fds)
        if lasts:
            self._report({"is": "spawned", "name": name, "pid": pid, "lasts": True})
        else:
            self._add_child(name, pid)
        return pid

    def _add_child(self, name: str, pid: int) -> None:
        self._started[pid] = clock.MONOTONIC.now()
        self._names[pid] = name
        self._pids[name] = pid
        self._report({"is": "spawned", "name": name, "pid": pid, "lasts": False})

    def _fork_process(self, become: Callable[[], None], fds: Collection[int] = ()) -> int:
        """Fork, close what belongs to the server alone, and call ``become`` in the child; ``become`` must not return."""
        # Block signals until the new process is set up; those sent meanwhile wait.
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
                # A copy of another worker's pipe would keep it open after that worker ends.
                for fd in self._unserved.difference(fds):
                    os.close(fd)
                self._channel.close()
                if self._secret_fd is not None:
                    os.close(self._secret_fd)
                self._templates.close_in_child()
                become()
            except BaseException:  # noqa: BLE001  a fork must not return to the server's loop
                traceback.print_exc()
            finally:
                os._exit(1)
        signals.restore(mask)
        return pid

    def _begin_child(self, *, deaf: bool) -> None:
        """Set up a process of the job. A deaf one ignores signals: it is not a worker, and the job's signals must not end it."""
        os.setsid()
        process.die_with_parent(self._pid)
        if deaf:
            signals.ignore()
        elif self._open_files is not None:
            limits.limit_open_files(self._open_files)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid, cpu_limits = ended.si_pid, self._cpu_limits(ended)
            try:
                _, status, usage = os.wait4(pid, 0)
            except ChildProcessError:
                continue  # a child of a preloaded module, whose own thread was faster
            name = self._names.pop(pid, None)
            self._started.pop(pid, None)
            self._stores.discard(pid)
            self._lasting.discard(pid)
            self._templates.ended(pid)
            if name is not None:  # else an adopted orphan
                del self._pids[name]
                told: Message = {"is": "exited", "name": name, "status": status}
                if cpu_limits is not None:
                    told["cpu"] = [usage.ru_utime + usage.ru_stime, *cpu_limits]
                self._report({**told, "at": clock.MONOTONIC.now()})

    def _cpu_limits(self, ended: Any) -> tuple[int | None, int | None] | None:
        """The limits of a worker that the kernel may have killed for them. They can be read until it is reaped."""
        was_killed = ended.si_code != os.CLD_EXITED and ended.si_status in _KILLS_FOR_CPU_TIME
        known = was_killed and ended.si_pid in self._names
        return limits.cpu_seconds(ended.si_pid) if known else None

    # -- ends ---------------------------------------------------------------------------------

    def _begin_sweep(self, grace: float) -> None:
        """End what is left of a generation: SIGTERM, ``grace`` seconds, SIGKILL; then report ``swept``.

        Stores end last, without a SIGTERM: they have nothing to save.
        """
        now = clock.MONOTONIC.now()
        self._pass_on_held(all_of_it=True)
        if grace > 0:
            users = [pid for pid in self._left() if not process.cleans_up(pid)]
            process.send(users, signal.SIGTERM)
            process.wake(users)
        self._sweep_kill_at = now + grace
        self._sweep_give_up_at = now + grace + KILL_PATIENCE

    def _left(self) -> list[int]:
        return process.descendants(
            os.getpid(), keep=self._stores | self._lasting | self._templates.pids()
        )

    def _continue_sweep(self) -> None:
        if self._sweep_give_up_at is None:
            return
        now = clock.MONOTONIC.now()
        left = self._left()
        if left and self._sweep_kill_at is not None and now >= self._sweep_kill_at:
            process.send(self._ending.due(left), signal.SIGKILL)
            # A process may have forked before the signal reached it: look again soon. The death of a
            # child wakes us sooner.
            self._sweep_kill_at = now + 0.05
        if not left:
            process.send(self._stores, signal.SIGKILL)
        # Report "swept" only after every child is reaped and its "exited" is sent.
        if not (left or self._names) or now >= self._sweep_give_up_at:
            self._sweep_kill_at = self._sweep_give_up_at = None
            self._report({"is": "swept", "left": left})

    def _end_everything(self) -> None:
        deadline = clock.Deadline(KILL_PATIENCE)
        poller = select.poll()
        poller.register(self._wakeup_read, select.POLLIN)
        while not deadline.expired():
            left = process.descendants(os.getpid(), keep=self._lasting)
            process.send(self._ending.due(left), signal.SIGKILL)
            self._reap()
            if self._lasting.issuperset(process.children(os.getpid())):
                break
            poller.poll(50)  # each death wakes us; the timeout catches forks we have not seen
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
    """Entry point of the process; ``fd`` is its end of the channel to the supervisor."""
    channel = Channel(socket.socket(fileno=fd))
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    first: list[tuple[Message, list[int]]] = []
    while not first:
        poller.poll()
        first = channel.receive(1)  # later messages are for the loop
        if channel.closed_by_peer:
            os._exit(0)
    hello, fds = first[0]
    secret_fd = fds[0] if hello["has_secret"] else None
    adopt(None if secret_fd is None else from_descriptor(secret_fd))
    process.die_with_parent(hello["supervisor"])  # until the loop watches the supervisor
    job = Job.from_json(hello["job"])
    # Starts like a worker's title and lacks our name: `pkill -f` with that start matches workers too, with our name not us.
    process.set_title(f"{Path(sys.executable).name}: fork server of {job.title}")
    start_method = StartMethod(hello["start_method"])
    server = ForkServer(
        channel,
        job,
        start_method,
        open_files=hello["open_files"],
        learns=hello["learns"],
        secret_fd=secret_fd,
    )
    server.run(tuple(hello["preload"]))

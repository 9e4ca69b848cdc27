"""A warm server: a process that has imported torch, and becomes the fork server of one job after another.

Theory of operation
-------------------
``rally run --warm`` starts it, and leaves it running. It listens on a socket in a folder that only its user can enter,
and forks once for each connection. The fork reads the request; the server itself reads nothing, so it never holds a
job's variables, arguments or secret. A fork that is asked for a job takes over the environment, the working directory
and the standard streams of that job's supervisor and then is a fork server like any other, except that it is not the
supervisor's child: it watches the supervisor by a pidfd that it was sent, and is killed by its mark or its pid.

It answers that it does not fit, and the supervisor starts an interpreter of its own, if

- a file of a loaded module has changed since it was loaded (the server then ends, too);
- the script's folder or PYTHONPATH would give the imports another module;
- the imports have read a variable that is different now.

Everything else that decides whether it fits is in the name of its socket (``warm_key``).

The server ends when it has had no job for a while, on SIGTERM (``rally warm --stop``), and when its modules have
changed. Running jobs continue: their fork servers no longer need it. It adopts and kills the processes that a killed fork
server leaves behind.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rallypoint._core import clock, collector, env as environment, linux, process
from rallypoint._core.secret import adopt, from_descriptor
from rallypoint.launch import signals, torch_private
from rallypoint.launch.config import Job, StartMethod
from rallypoint.launch.worker import bootstrap, preloaded

from . import warm_key
from .channel import Channel, Message
from .forkserver import ForkServer
from .warm_lock import READY, WarmLock, uid_of_peer


# A client sends its request at once.
REQUEST_PATIENCE = 5.0
# Exit code of a fork that answered a question instead of serving a job.
_ANSWERED = 3


@dataclass(slots=True)
class _Loaded:
    """What the server has imported.

    Args:
        reads: the variables that the imports read.
        env: the environment they were made in.
        files: the files of all modules, and when each was changed.
    """

    reads: frozenset[str]
    env: dict[str, str]
    files: dict[str, int] = field(default_factory=dict)


class WarmServer:
    """The server's loop; :meth:`run` never returns.

    Args:
        listener: bound and listening.
        path: the socket's path.
        idle: seconds without a job after which the server ends.
    """

    def __init__(self, listener: socket.socket, path: Path, idle: float) -> None:
        self._listener = listener
        self._path = path
        self._idle = idle
        self._began = self._used = clock.MONOTONIC.now()
        self._inode = os.stat(path).st_ino
        self._pid = os.getpid()
        self._jobs: set[int] = set()  # forks that are, or may become, a job's fork server
        self._stopping = False
        self._loaded: _Loaded

    def run(self, modules: tuple[str, ...]) -> NoReturn:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signals.note(self._note_signal)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        process.set_subreaper(True)
        with environment.watched() as reads, collector.paused():
            for name in modules:
                importlib.import_module(name)
            collector.keep()
        preloaded.note_reads(reads.names)
        os.chdir("/")  # PYTHONPATH may have been relative to the first job's folder
        self._path.chmod(READY)
        self._loaded = _Loaded(frozenset(reads.names), reads.before, _files())
        collector.settle()
        self._used = clock.MONOTONIC.now()
        self._listener.setblocking(False)
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(read, select.POLLIN)
        while not self._is_over():
            ready = {fd for fd, _ in poller.poll(self._milliseconds_to_wait())}
            if read in ready:
                os.read(read, 4096)
            self._reap()
            if self._listener.fileno() in ready and not self._stopping:
                self._accept([read, write])
        self._end()

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        # Other signals may be meant for all processes of a batch job, or of a terminal.
        self._stopping |= number == signal.SIGTERM

    def _is_over(self) -> bool:
        left = self._used + self._idle - clock.MONOTONIC.now()
        return self._stopping or (not self._jobs and left <= 0)

    def _milliseconds_to_wait(self) -> int | None:
        if self._jobs:
            return None
        return clock.milliseconds_until(self._used + self._idle)

    def _end(self) -> NoReturn:
        """Remove the socket, unless another server has taken its name; then exit. Jobs continue."""
        with WarmLock(self._path.parent):
            try:
                if os.stat(self._path).st_ino == self._inode:
                    self._path.unlink()
            except FileNotFoundError:
                pass
        os._exit(0)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._jobs and status != _ANSWERED << 8:
                self._used = clock.MONOTONIC.now()
            self._jobs.discard(pid)
        orphans = set(process.children(os.getpid())).difference(self._jobs)
        process.send(orphans, signal.SIGKILL)

    def _accept(self, wakeups: list[int]) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone, or no descriptor is left
            return
        with connection:
            if uid_of_peer(connection) != os.geteuid():
                return
            mask = signals.block()
            try:
                pid = os.fork()
            except OSError:
                signals.restore(mask)
                return
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for fd in wakeups:
                        os.close(fd)
                    self._listener.close()
                    self._serve(Channel(connection))
                finally:
                    os._exit(1)
            signals.restore(mask)
            self._jobs.add(pid)

    # -- in a fork ----------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> NoReturn:
        request = _first(channel)
        if request is not None and request[0]["do"] == "call":
            channel.send({"is": "here"})  # the client sends its descriptors only now
            request = _first(channel)
        if request is None:
            os._exit(_ANSWERED)
        message, fds = request
        match message["do"]:
            case "job":
                self._become_fork_server(channel, message, fds)
            case "status":
                _answer(channel, {"is": "status", **self._status()})
            case "stop":
                self._end_server()
                _answer(channel, {"is": "stopping"})
            case other:
                _answer(channel, {"is": "unknown", "do": other})

    def _end_server(self) -> None:
        """End the server and wait until it has exited: its name is then free."""
        if os.getppid() != self._pid:  # it has ended, and another process may have its pid
            return
        pidfd = linux.pidfd_open(self._pid)
        linux.pidfd_send_signal(pidfd, signal.SIGTERM, self._pid)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(REQUEST_PATIENCE * 1000)

    def _status(self) -> Message:
        now = clock.MONOTONIC.now()
        jobs = sorted(filter(_leads_session, self._jobs))  # the others only answer a question
        return {
            "pid": self._pid,
            "jobs": jobs,
            "seconds": round(now - self._began, 3),
            "idle": None if jobs else round(now - self._used, 3),
            "idle_limit": self._idle,
            "python": sys.version.split()[0],
            "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
            "executable": sys.executable,
        }

    def _become_fork_server(self, channel: Channel, hello: Message, fds: list[int]) -> NoReturn:
        stdin, stdout, stderr, folder, supervisor, *secrets = fds
        job = Job.from_json(hello["job"])
        os.fchdir(folder)
        os.umask(hello["umask"])
        why = self._why_unfit(job, hello["env"])
        if why:
            _answer(channel, {"is": "cold", "why": why})
        environment.replace(hello["env"])
        for fd, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, place)
            os.close(fd)
        os.close(folder)
        os.setsid()
        _ignore_only(hello["ignored"])
        process.leave_mark(hello["mark"])
        first = bootstrap.import_path(job)
        if first is not None:
            sys.path.insert(0, first)
        importlib.invalidate_caches()
        _forget_folder_for_temporary_files()
        torch_private.set_original_folder()
        secret_fd = secrets[0] if secrets else None
        adopt(None if secret_fd is None else from_descriptor(secret_fd))
        process.set_title(f"{Path(sys.executable).name}: fork server of {job.title}")
        own = linux.pidfd_open(os.getpid())
        channel.send({"is": "warm", "pid": os.getpid()}, [own])
        os.close(own)
        server = ForkServer(
            channel,
            job,
            StartMethod(hello["start_method"]),
            open_files=hello["open_files"],
            learns=hello["learns"],
            secret_fd=secret_fd,
            supervisor=supervisor,
        )
        server.run(tuple(hello["preload"]))
        os._exit(1)

    def _why_unfit(self, job: Job, env: dict[str, str]) -> str:
        for file, changed in self._loaded.files.items():
            try:
                if os.stat(file).st_mtime_ns == changed:
                    continue
            except OSError:
                pass
            self._end_server()
            return f"{file} has changed"
        if why := warm_key.why_other(self._loaded.reads, self._loaded.env, env):
            return why
        folders = {bootstrap.import_path(job), *_of_users()} - {None}
        for folder in sorted(filter(None, folders)):
            try:
                entries = os.listdir(folder)
            except OSError:
                continue
            loaded = _loaded_from_elsewhere(folder)
            if found := warm_key.shadowed(entries, loaded):
                return f"{folder}/{found} takes the place of a module that torch imports"
        return ""


def _first(channel: Channel) -> tuple[Message, list[int]] | None:
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    deadline = clock.Deadline(REQUEST_PATIENCE)
    while not deadline.expired():
        poller.poll((deadline.remaining() or 0.0) * 1000)
        if received := channel.receive(1):
            return received[0]
        if channel.closed_by_peer:
            return None
    return None


def _answer(channel: Channel, message: Message) -> NoReturn:
    channel.send(message)
    os._exit(_ANSWERED)


def _leads_session(pid: int) -> bool:
    try:
        return process.is_running(pid) and os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _files() -> dict[str, int]:
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            try:
                found[file] = os.stat(file).st_mtime_ns
            except OSError:
                continue  # in an archive, or made up
    return found


def _of_users() -> list[str]:
    """The folders of PYTHONPATH."""
    path = environment.get("PYTHONPATH", "") or ""
    return [os.path.abspath(part) for part in path.split(":") if part]


def _loaded_from_elsewhere(folder: str) -> set[str]:
    """The top-level modules that were loaded from files outside this folder."""
    within = folder.rstrip("/") + "/"
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and isinstance(file, str) and not file.startswith(within):
            found.add(name)
    return found


def _ignore_only(ignored: list[int]) -> None:
    """Reset all signals to what a program started by the supervisor would find."""
    of_python = {signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - of_python - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def _forget_folder_for_temporary_files() -> None:
    import tempfile

    tempfile.tempdir = None


def main(fd: int, path: str, idle: float, modules: tuple[str, ...]) -> NoReturn:
    """Entry point of the process; ``fd`` is the listening socket."""
    process.set_title("rally: warm server")
    WarmServer(socket.socket(fileno=fd), Path(path), idle).run(modules)

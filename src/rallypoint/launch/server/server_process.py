"""The supervisor's handle on the fork server: start it, talk to it, watch it, end it."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rallypoint._core import clock, linux, proc_stat, process
from rallypoint._core.secret import adopt, descriptor
from rallypoint.errors import LaunchError
from rallypoint.launch import signals
from rallypoint.launch.config import Job, StartMethod
from rallypoint.launch.worker import bootstrap
from rallypoint.launch.worker.job import WorkerFds

from . import hidden_modules, warm_client
from .channel import Channel, Message, socket_pair
from .warm_client import Warm


# Each worker overwrites the fork server's command line with its own (process.set_title), which
# cannot be longer than the original.
TITLE_ROOM = 2048
# Seconds that a process may take to die of SIGKILL.
KILL_PATIENCE = 3.0
# Seconds that the server may take to confirm a request, and to answer a ping. The latter is long,
# because a busy machine is no reason to end a job.
HEARD_PATIENCE = 3.0
LIFE_PATIENCE = 30.0
# In the environment of every process of a job: distinguishes them from the caller's other processes.
JOB_MARKER = "RALLY_JOB"


class ServerProcess:
    """One running fork server.

    Args:
        pid: the server's pid; it is a child of this process.
        channel: the connection to it.
        marker: ``RALLY_JOB=…`` as in the environment of everything it starts.
        strangers: with None, only marked processes are killed. Otherwise this process does nothing but run
            the job, so all its descendants except these are the job's, marked or not.
        forked: the server is a fork of this program, so its own forks carry the mark in memory only.
        warm: the server is a fork of a warm server, so it is not a child of this process.
        path: the folder that it imports from before any other, if there is one.
    """

    def __init__(
        self,
        pid: int,
        channel: Channel,
        marker: str,
        strangers: frozenset[int] | None = None,
        *,
        forked: bool = False,
        warm: Warm | None = None,
        path: str | None = None,
    ) -> None:
        self.pid = pid
        self.channel = channel
        self.pidfd = linux.pidfd_open(pid) if warm is None else warm.pidfd
        self.why_cold = ""  # why no warm server serves the job, though one was asked for
        self._marker = marker.encode()
        self._strangers = strangers
        self._forked = forked
        self._warm = warm is not None
        self._path = path
        self._since = proc_stat.started(pid)
        self._lasting: set[int] = set()
        self._reaped: int | None = None
        self._numbers = itertools.count()
        self._unconfirmed: dict[int, tuple[float, Message]] = {}
        self._woken = False

    @classmethod
    def start(
        cls,
        job: Job,
        start_method: StartMethod,
        preload: tuple[str, ...],
        env: Mapping[str, str],
        token: str,
        secret: bytes | None,
        *,
        alone: bool,
        open_files: int | None = None,
        learns: bool = False,
        warm: float | None = None,
    ) -> ServerProcess:
        """Start a server in a new interpreter. Returns while the server is still importing.

        Args:
            secret: the job's secret; the server and its forks hold it in memory.
            alone: this process only runs the job, so all orphans it adopts are the job's.
            open_files: a worker's limit of open files, if lower than ours.
            learns: whether new workers start with what earlier ones imported.
            warm: take a fork of a warm server instead; a new one is kept for this many seconds after the job.

        Raises:
            LaunchError: the interpreter cannot be executed.
        """
        hello: dict[str, Any] = {"supervisor": os.getpid(), "job": job.to_json()}
        hello |= {"start_method": start_method.value, "preload": list(preload)}
        hello["open_files"] = open_files
        hello["learns"] = learns
        hello["has_secret"] = secret is not None
        hello["mark"] = f"{JOB_MARKER}={token}"
        why_cold = ""
        if warm is not None:
            marked = {**env, JOB_MARKER: token}
            with _in_file(secret) as fds:
                found = warm_client.take(hello, job, marked, fds, warm)
            if isinstance(found, warm_client.Warm):
                strangers = frozenset(process.children(os.getpid())) if alone else None
                return cls(found.pid, found.channel, hello["mark"], strangers=strangers, warm=found)
            why_cold = found.why
        # With `helper & exec rally run …` in a shell, this process has a child already.
        strangers = frozenset(process.children(os.getpid())) if alone else None
        ours, theirs = socket_pair()
        fd = theirs.fileno()
        code = f"from rallypoint.launch.server.forkserver import main; main({fd})"
        # Block signals until the server has its handlers.
        mask = signals.block()
        try:
            child = subprocess.Popen(
                [*bootstrap.python_command(code, job), " " * TITLE_ROOM],
                env={**env, JOB_MARKER: token},
                pass_fds=[fd],
                start_new_session=True,  # Ctrl-C reaches the supervisor only, which forwards it
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, PermissionError | FileNotFoundError):
                raise LaunchError(f"cannot execute {sys.executable}: {error.strerror}") from None
            raise
        finally:
            signals.restore(mask)
            theirs.close()
        child.returncode = 0  # we reap it ourselves: Popen must not wait for it or warn
        channel = Channel(ours)
        with _in_file(secret) as fds:
            channel.send(hello, fds)
        path = bootstrap.import_path(job)
        started = cls._of(child.pid, channel, token, strangers=strangers, path=path)
        started.why_cold = why_cold
        return started

    @classmethod
    def _of(cls, pid: int, channel: Channel, token: str, **more: Any) -> ServerProcess:
        try:
            return cls(pid, channel, f"{JOB_MARKER}={token}", **more)
        except OSError:  # too many open files for its pidfd
            channel.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    @classmethod
    def fork(
        cls, job: Job, call: Callable[[WorkerFds], None], token: str, secret: bytes | None
    ) -> ServerProcess:
        """Start a server as a fork of this process, so that functions need no pickling."""
        from .forkserver import ForkServer

        ours, theirs = socket_pair()
        parent = os.getpid()
        mask = signals.block()
        try:
            pid = os.fork()
        except BaseException:
            signals.restore(mask)
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                ours.close()
                os.setsid()
                process.die_with_parent(parent)
                process.leave_mark(f"{JOB_MARKER}={token}")
                adopt(secret)
                secret_fd = None if secret is None else descriptor(secret)
                ForkServer(Channel(theirs), job, StartMethod.FORK, call, secret_fd=secret_fd).run(
                    ()
                )
            finally:
                os._exit(1)
        signals.restore(mask)
        theirs.close()
        return cls._of(pid, Channel(ours), token, forked=True)

    def end(self, patience: float = 8.0) -> list[int]:
        """Close the channel, so that the server kills everything and exits. If it does not, kill both here.

        Returns:
            Pids of processes that are still running.
        """
        self.channel.close()
        self.go_on()
        left = self.kill() if not self.wait(patience) else self.kill_orphans()
        os.close(self.pidfd)
        return left

    def keep(self, pid: int) -> None:
        """Do not end this process with the rest: it serves the job's store."""
        self._lasting.add(pid)

    def reap_kept(self, patience: float = KILL_PATIENCE) -> None:
        """Reap the kept processes once their connections are closed. The server is gone, so they are our children."""
        process.reap(self._lasting, patience)

    # -- confirmed requests ---------------------------------------------------------------

    def ask(self, message: Message) -> None:
        """Send a request that the server must confirm, and continue the server if it is stopped."""
        number = next(self._numbers)
        patience = LIFE_PATIENCE if message["do"] == "ping" else HEARD_PATIENCE
        self._unconfirmed[number] = clock.MONOTONIC.now() + patience, message
        self.channel.send({**message, "ask": number})
        if message["do"] != "ping":
            self.go_on()

    def confirmed(self, number: int) -> None:
        self._unconfirmed.pop(number, None)
        self._woken = False

    @property
    def patience_ends(self) -> float | None:
        """When the first request becomes overdue, or None."""
        return min((until for until, _ in self._unconfirmed.values()), default=None)

    def unheard(self) -> list[Message]:
        """Once a request is overdue, drop and return all unconfirmed ones. A stopped server first gets more time."""
        ends = self.patience_ends
        if ends is None or clock.MONOTONIC.now() < ends:
            return []
        if not self._woken and self.go_on():
            self._woken = True
            until = clock.MONOTONIC.now() + HEARD_PATIENCE
            self._unconfirmed = {n: (until, each) for n, (_, each) in self._unconfirmed.items()}
            return []
        messages = [message for _, message in self._unconfirmed.values()]
        self._unconfirmed.clear()
        return messages

    def go_on(self) -> bool:
        """Continue the server if it is stopped. Returns whether it was."""
        stopped = process.state(self.pid) in {"T", "t"}
        if stopped:
            linux.pidfd_send_signal(self.pidfd, signal.SIGCONT, self.pid)
        return stopped

    def why_silent(self) -> str:
        """Why the server does not answer, in words."""
        match process.state(self.pid):
            case "T" | "t":
                return "it is stopped"
            case "D":
                return "it is stuck in the kernel"
            case _:
                return "it is busy, or frozen"

    def signal_children(self, pids: Iterable[int], number: int, *, group: bool) -> None:
        """Signal workers in the server's place. While it hangs it reaps nothing, so no pid is reused."""
        for pid in set(process.children(self.pid)).intersection(pids):
            process.send([-pid if group else pid], number)

    # -- ends -----------------------------------------------------------------------------------

    def kill(self) -> list[int]:
        """Kill the server and its descendants without its help.

        Returns:
            Pids of processes that are still running.
        """
        if self._reaped is None:
            with suppress(ProcessLookupError):  # a warm server has reaped it
                linux.pidfd_send_signal(self.pidfd, signal.SIGKILL, self.pid)
        return self.kill_orphans()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the server to end, and reap it. False on timeout."""
        if self._reaped is not None:
            return True
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            return False
        try:
            _, self._reaped = os.waitpid(self.pid, 0)
        except ChildProcessError:  # a waitpid(-1) in the caller's program reaped it
            self._reaped = 0
        return True

    def how_it_ended(self) -> str:
        """How the server ended, for the report; valid once :meth:`wait` has returned True."""
        if self._warm:
            return "has ended"  # its status went to the warm server
        status = self._reaped or 0
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"was killed by {signal.Signals(number).name}"
        return f"exited with code {os.waitstatus_to_exitcode(status)}"

    def was_killed(self) -> bool:
        """Whether it was killed, perhaps by the kernel; valid once :meth:`wait` has returned True."""
        status = self._reaped or 0
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    def why_imports_fail(self) -> str:
        """What in the script's folder may have made its imports fail, as the end of a sentence; "" if nothing has."""
        found = hidden_modules.hidden(self._path)
        if not found:
            return ""
        names = f"{', '.join(found[:3])}{', …' if len(found) > 3 else ''}"
        hides, them = ("hides a module", "it") if len(found) == 1 else ("hide modules", "them")
        # The folder last: a long one may be cut off.
        return f"; {names} beside the script {hides} of the standard library: rename {them} (in {self._path})"

    def kill_orphans(self, patience: float = KILL_PATIENCE) -> list[int]:
        """Kill the orphans of a dead server, or the descendants of one that does not die.

        This process is a subreaper, so orphans become its children.

        Returns:
            Pids of processes that are still running.
        """
        deadline, ending = clock.Deadline(patience), process.Ending(patience - 0.5)
        self.wait(0)
        while True:
            left = self._left()
            if not left or deadline.expired():
                return left
            due = ending.due(left)
            if not due:
                process.reap(left[:1], 0.05)
                continue
            pidfds = []
            for pid in due:
                try:
                    pidfds.append(linux.pidfd_open(pid))
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue  # the second: a set-uid program
            poller = select.poll()
            for fd in pidfds:
                poller.register(fd, select.POLLIN)
                poller.poll((deadline.remaining() or 0) * 1000)
                poller.unregister(fd)
                os.close(fd)
            self.wait(0)
            process.reap(left)  # an orphan's child is not ours yet

    def _left(self) -> list[int]:
        found = set(process.marked_processes(self._marker, exclude=(os.getpid(),)))
        if self._forked:
            ours = process.descendants(os.getpid())
            found |= {pid for pid in ours if process.bears_mark(pid, self._marker)}
        if self._warm:  # its leftovers are children of the warm server, or of none
            found |= set(process.marked_in_memory(self._marker, self._since))
        if self._strangers is not None:
            found |= set(process.descendants(os.getpid(), keep=self._strangers))
        if self._reaped is None and process.is_running(self.pid):
            found |= {self.pid, *process.descendants(self.pid)}
        return sorted(found - self._lasting)


@contextmanager
def _in_file(secret: bytes | None) -> Iterator[list[int]]:
    """The secret in a memory file, not in a message, whose content may appear in an error."""
    fds = [] if secret is None else [descriptor(secret)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)

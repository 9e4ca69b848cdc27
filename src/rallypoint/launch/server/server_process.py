"""The fork server as its supervisor holds it: started, spoken to, watched, ended."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rallypoint._core import clock, process
from rallypoint._core.secret import adopt, descriptor
from rallypoint.errors import LaunchError
from rallypoint.launch import signals
from rallypoint.launch.config import Job, StartMethod
from rallypoint.launch.worker import bootstrap
from rallypoint.launch.worker.job import WorkerFds

from .channel import Channel, Message, socket_pair


# The command line of the fork server becomes, in each worker, the script's own (process.set_title);
# the kernel gives as much room as the original took.
TITLE_ROOM = 2048
# How long a process may take to die of SIGKILL.
KILL_PATIENCE = 3.0
# How long the server may take to confirm a request, and how long where it is asked only whether it lives: a
# busy machine is no reason to end a job.
HEARD_PATIENCE = 3.0
LIFE_PATIENCE = 30.0
# In the environment of every process of a job: tells its processes from others of the caller.
JOB_MARKER = "RALLY_JOB"


class ServerProcess:
    """One running fork server.

    Args:
        pid: of the server, a child of this process.
        channel: the line to it.
        marker: ``RALLY_JOB=…`` as it stands in the environment of everything it starts.
        strangers: with None, only marked processes are ours to kill. Else this process is there for
            the job alone, and everything below it is the job's, marked or not, but for these.
        forked: the server is a fork of this program: its forks bear the mark in their memory only.
    """

    def __init__(
        self,
        pid: int,
        channel: Channel,
        marker: str,
        strangers: frozenset[int] | None = None,
        *,
        forked: bool = False,
    ) -> None:
        self.pid = pid
        self.channel = channel
        self.pidfd = os.pidfd_open(pid)
        self._marker = marker.encode()
        self._strangers = strangers
        self._forked = forked
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
    ) -> ServerProcess:
        """Start a server in an interpreter of its own; it goes on importing when this returns.

        Args:
            secret: of the job; the server and its forks hold it in memory.
            alone: this process does nothing but run the job, so orphans it gets are the job's.
            open_files: how many files a worker may have open, if that is less than we have now.
        """
        # `helper & exec rally run …` in a shell: a child that was there before us.
        strangers = frozenset(process.children(os.getpid())) if alone else None
        ours, theirs = socket_pair()
        fd = theirs.fileno()
        code = f"from rallypoint.launch.server.forkserver import main; main({fd})"
        # Until it has handlers of its own: what comes before waits.
        mask = signals.block()
        try:
            child = subprocess.Popen(
                [*bootstrap.python_command(code, job), " " * TITLE_ROOM],
                env={**env, JOB_MARKER: token},
                pass_fds=[fd],
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor, which passes it on
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, PermissionError | FileNotFoundError):
                raise LaunchError(f"cannot execute {sys.executable}: {error.strerror}") from None
            raise
        finally:
            signals.restore(mask)
            theirs.close()
        child.returncode = 0  # we reap it ourselves, by pidfd: Popen must not wait for it or warn
        channel = Channel(ours)
        hello: dict[str, Any] = {"supervisor": os.getpid(), "job": job.to_json()}
        hello |= {"start_method": start_method.value, "preload": list(preload)}
        hello["open_files"] = open_files
        hello["has_secret"] = secret is not None
        _send_with_secret(channel, hello, secret)
        return cls._of(child.pid, channel, token, strangers=strangers)

    @classmethod
    def _of(cls, pid: int, channel: Channel, token: str, **more: Any) -> ServerProcess:
        try:
            return cls(pid, channel, f"{JOB_MARKER}={token}", **more)
        except OSError:  # no descriptor is left for its pidfd
            channel.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    @classmethod
    def fork(
        cls, job: Job, call: Callable[[WorkerFds], None], token: str, secret: bytes | None
    ) -> ServerProcess:
        """Start a server as a fork of this very process: functions need no pickling then."""
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
                ForkServer(Channel(theirs), job, StartMethod.FORK, call).run(())
            finally:
                os._exit(1)
        signals.restore(mask)
        theirs.close()
        return cls._of(pid, Channel(ours), token, forked=True)

    def end(self, patience: float = 8.0) -> list[int]:
        """Hang up: the server kills all that is left and ends; if it does not, we do both.

        Returns:
            Pids that would not die.
        """
        self.channel.close()
        self.go_on()
        left = self.kill() if not self.wait(patience) else self.kill_orphans()
        os.close(self.pidfd)
        return left

    def keep(self, pid: int) -> None:
        """This process of the job is not to be ended with the rest: it serves the job's store."""
        self._lasting.add(pid)

    def reap_kept(self, patience: float = KILL_PATIENCE) -> None:
        """Their lines are closed: wait for their ends. They have become our children, now that the server is gone."""
        process.reap(self._lasting, patience)

    # -- requests it must confirm ---------------------------------------------------------------

    def ask(self, message: Message) -> None:
        """Send a request, and wake the server if somebody has stopped it."""
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
        """When :meth:`unheard` may have something; None: not."""
        return min((until for until, _ in self._unconfirmed.values()), default=None)

    def unheard(self) -> list[Message]:
        """The requests that it has not confirmed in time, and will not be asked to any more. It is woken first."""
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
        """If somebody has stopped it: wake it up."""
        stopped = process.state(self.pid) in {"T", "t"}
        if stopped:
            os.kill(self.pid, signal.SIGCONT)
        return stopped

    def why_silent(self) -> str:
        """In words."""
        match process.state(self.pid):
            case "T" | "t":
                return "it is stopped"
            case "D":
                return "it is stuck in the kernel"
            case _:
                return "it is busy, or frozen"

    def signal_children(self, pids: Iterable[int], number: int, *, group: bool) -> None:
        """Signal workers in its place: while it does nothing, it reaps none, and no pid is given to others."""
        for pid in set(process.children(self.pid)).intersection(pids):
            process.send([-pid if group else pid], number)

    # -- ends -----------------------------------------------------------------------------------

    def kill(self) -> list[int]:
        """Kill the server and all that is below it, without its help.

        Returns:
            Pids that would not die in time.
        """
        if self._reaped is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.kill_orphans()

    def wait(self, timeout: float | None) -> bool:
        """Wait until the server has ended, and reap it. False if the time ran out."""
        if self._reaped is not None:
            return True
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            return False
        try:
            _, self._reaped = os.waitpid(self.pid, 0)
        except ChildProcessError:  # somebody's waitpid(-1) in a caller's program took it
            self._reaped = 0
        return True

    def how_it_ended(self) -> str:
        """For the report, once :meth:`wait` was true."""
        status = self._reaped or 0
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return f"was killed by {signal.Signals(number).name}"
        return f"exited with code {os.waitstatus_to_exitcode(status)}"

    def kill_orphans(self, patience: float = KILL_PATIENCE) -> list[int]:
        """Kill what a dead server has left, and what is still below one that does not die.

        We are a subreaper: what a dead one leaves becomes our children.

        Returns:
            Pids that would not die in time.
        """
        deadline = clock.Deadline(patience)
        self.wait(0)
        while True:
            left = self._left()
            if not left or deadline.expired():
                return left
            pidfds = []
            for pid in left:
                try:
                    pidfds.append(os.pidfd_open(pid))
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            poller = select.poll()
            for fd in pidfds:
                poller.register(fd, select.POLLIN)
                poller.poll((deadline.remaining() or 0) * 1000)
                poller.unregister(fd)
                os.close(fd)
            self.wait(0)
            process.reap(left)  # one whose parent is another orphan is not ours yet

    def _left(self) -> list[int]:
        found = set(process.marked_processes(self._marker, exclude=(os.getpid(),)))
        if self._forked:
            ours = process.descendants(os.getpid())
            found |= {pid for pid in ours if process.bears_mark(pid, self._marker)}
        if self._strangers is not None:
            found |= set(process.descendants(os.getpid(), keep=self._strangers))
        if self._reaped is None and process.is_running(self.pid):
            found |= {self.pid, *process.descendants(self.pid)}
        return sorted(found - self._lasting)


def _send_with_secret(channel: Channel, hello: Message, secret: bytes | None) -> None:
    """The secret travels beside the message, in a memory file: what a message holds may end up in an error's text."""
    fds = [] if secret is None else [descriptor(secret)]
    try:
        channel.send(hello, fds)
    finally:
        for fd in fds:
            os.close(fd)

"""The terminal's side: starts a supervisor on every host, shows their output, and ends them when it ends.

One thread for each stream reads a host's output, and one for each host sends its orders. Heartbeats have a thread of
their own, and so has the terminal (:mod:`.terminal_output`): a stopped one (Ctrl-S) must not end the job.
"""

from __future__ import annotations

import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from rallypoint._core import addresses, linux, secret
from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint._core.signal_repeats import is_repeat
from rallypoint.errors import ConfigError
from rallypoint.launch.avoidance import avoid_file
from rallypoint.launch.command_line.given import Given, resolve
from rallypoint.launch.command_line.values import Values, shutdown_timeout
from rallypoint.launch.signals import SignalEvents

from . import listing, merging, orders, terminal_output
from .host_ends import troubles_of
from .listing import Host
from .merging import Part, Verdict
from .orders import BEAT, PAUSE


# The nodes meet at one of these if no flag names a port: below the ports that the kernel gives to clients.
_PORTS = range(15000, 30000)
# How long hosts may take to end once one of them has failed, beyond --shutdown-timeout.
_ENDING = 30.0
# How long the hosts' remaining output may take to be shown after a signal.
_LAST_WORDS = 2.0
# How long hosts may take to end after SIGHUP: nobody sees what they still print.
_HANG_UP = 2.5
# How many connections start at a time: with more than ten that have not logged in yet, sshd drops some (MaxStartups), and
# hosts may be behind the same sshd.
_AT_A_TIME = 8
# How often a connection that keeps being dropped is tried in all, and the pause in between, in seconds.
_ATTEMPTS, _PAUSE = 4, (0.5, 2.0)
# How many bytes of what ssh says before a host's part starts are kept.
_REMEMBERED = 4096
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Say = Callable[..., None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A pickled function call, which the workers of all hosts make.

    Args:
        data: the pickle.
        path: the caller's ``sys.path``.
    """

    data: bytes
    path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a job on several hosts ended.

    Args:
        parts: each host's.
        verdict: on all of them.
        signal: the last signal that was passed on to the hosts, or None.
    """

    parts: tuple[Part, ...]
    verdict: Verdict
    signal: int | None


def run(given: Given, env: Mapping[str, str], say: Say) -> int:
    """Run the job of a command line on its hosts. Returns the exit code.

    Args:
        given: the command line.
        env: this process's environment.
        say: prints a line to the user; with ``bare``, as it is.

    Raises:
        ConfigError: a setting cannot work.
    """
    end = run_on_hosts(given, env, say).verdict
    for remark in end.remarks:
        say(remark)
    if end.report:
        say(end.report, bare=True)
    return end.exit_code


def run_on_hosts(given: Given, env: Mapping[str, str], say: Say, call: Call | None = None) -> Ended:
    """Like :func:`run`, but says nothing about the end.

    Args:
        given: the command line.
        env: this process's environment.
        say: prints a line to the user.
        call: what workers call; None: they run the script of the command line.

    Raises:
        ConfigError: a setting cannot work.
    """
    hosts = _hosts(given.values)
    avoided = given.values.get("--avoid-hosts")
    if avoided is not None:
        given, hosts = _without_avoided(given, hosts, avoided, say)
    least = orders.least_hosts(given, len(hosts))
    options = given.values.get("--ssh-options", "")
    try:
        shlex.split(options)
    except ValueError as error:
        raise ConfigError("--ssh-options", options, f"not a shell's words: {error}") from None
    # Workers on one host may need all of it to save, when another host has already ended.
    ending = _ENDING + shutdown_timeout(Values(*resolve(given, env), env))
    local = [_is_here(host) for host in hosts]
    if not all(local) and shutil.which("ssh") is None:
        raise ConfigError("--hosts", None, "needs ssh, which is not installed")
    token = uuid.uuid4().hex
    meeting = orders.Meeting(
        least=least,
        master=_master(hosts, local, options),
        port=random.choice(_PORTS),  # noqa: S311  not a secret
        run_id=f"hosts-{token[:8]}",
    )
    more = [each for each in given.values.get("--forward-env", "").split(",") if each]
    forwarded = orders.forwarded(env, more)
    common = orders.Orders(
        folder=os.getcwd(),
        env=forwarded,
        words=(),
        secret=_secret(given.values, env),
        token=uuid.uuid4().hex,
        call_size=0 if call is None else len(call.data),
        path=() if call is None else call.path,
        answers=call is not None,
    )
    parts = [Part(host.name) for host in hosts]
    merger = merging.Merger(parts, common.token)
    job = _Job(parts, merger, least, ending, say, b"" if call is None else call.data)
    with SignalEvents((*_ENDS, signal.SIGTSTP)) as signals:
        try:
            for index, host in enumerate(hosts):
                mine = orders.for_host(common, orders.words_for(given, hosts, index, meeting))
                command = (
                    (sys.executable, "-m", "rallypoint", "node")
                    if local[index]
                    else orders.ssh_command(host, options, sys.executable, forwarded)
                )
                job.add(command, mine.to_line())
            job.watch(signals)
        finally:
            job.close(signals)
    if avoided is not None:
        _note_troubles(parts, common.token, Path(avoided), say)
    return Ended(parts=tuple(parts), verdict=merging.verdict(parts, least), signal=job.signal)


def _hosts(values: Mapping[str, str]) -> tuple[Host, ...]:
    if "--hosts" in values and "--hostfile" in values:
        raise ConfigError("--hostfile", None, "cannot be combined with --hosts")
    if "--hosts" in values:
        return listing.read_list(values["--hosts"])
    path = values["--hostfile"]
    if not path:  # an empty path would be the current folder
        problem = "expected a file with a host on each line"
        raise ConfigError("--hostfile", path, problem, "is a variable of the shell not set?")
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        hint = f"check the path; it is relative to {os.getcwd()}"
        if os.path.isabs(path) or os.path.exists(path):
            hint = "check the path; expected a file with a host on each line"
        raise ConfigError("--hostfile", path, f"cannot be read: {error.strerror}", hint) from None
    except UnicodeDecodeError:
        problem = "not a text file"
        hint = "expected a host on each line: HOST, HOST:N, or HOST slots=N"
        raise ConfigError("--hostfile", path, problem, hint) from None
    return listing.read_file(lines, f"--hostfile {path}")


def _without_avoided(
    given: Given, hosts: tuple[Host, ...], avoided: str, say: Say
) -> tuple[Given, tuple[Host, ...]]:
    if not avoided.strip():
        hint = "is a variable of the shell not set?"
        raise ConfigError("--avoid-hosts", avoided, "expected a file", hint)
    listed = avoid_file.read(Path(avoided), "--avoid-hosts")
    selection = listing.select(hosts, listed.reason, given.values.get("--nnodes"), avoided)
    for name, why in selection.left_out:
        say(f"{name} is left out (--avoid-hosts {avoided}): {why}")
    values = dict(given.values)
    if selection.nnodes is not None:
        values["--nnodes"] = selection.nnodes
    return replace(given, values=values), selection.hosts


def _note_troubles(parts: Sequence[Part], token: str, path: Path, say: Say) -> None:
    """Write what happened to the hosts into the list of those to avoid."""
    found = troubles_of(parts, token[:8])
    try:
        avoid_file.add(path, found)
    except (OSError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        say(f"--avoid-hosts {path}: {', '.join(each.host for each in found)} not noted: {why}")


def _is_here(host: Host) -> bool:
    return host.bare == host.name and addresses.is_this_host(host.name)


def _master(hosts: tuple[Host, ...], local: list[bool], options: str) -> str:
    """The first host as the others reach it."""
    if not local[0]:
        return _name_for_ssh(hosts[0], options)
    if not addresses.is_loopback(hosts[0].name) or len(hosts) == 1:
        return hosts[0].name
    return addresses.address_towards(_name_for_ssh(hosts[1], options), 22, "--hosts")


def _name_for_ssh(host: Host, options: str) -> str:
    """The name behind an alias of ssh's configuration."""
    command = ["ssh", "-G", *shlex.split(options), host.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value
    return host.bare


def _secret(values: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    if "--insecure" in values:
        return None
    if "--secret-file" in values:
        found: bytes | None = secret.read_file(values["--secret-file"], "--secret-file")
    else:
        found = secret.shared(env)
    # It travels as text, and a job that has no secret gets one of its own.
    return secret.make().hex() if found is None else found.decode("utf-8", "surrogateescape")


class _Job:
    """The hosts' processes, as this process holds them."""

    def __init__(
        self,
        parts: list[Part],
        merger: merging.Merger,
        least: int,
        ending: float,
        say: Say,
        call: bytes,
    ) -> None:
        self._parts = parts
        self._merger = merger
        self._least = least
        self._ending = ending
        self._say = say
        self._call = call
        self.signal: int | None = None
        self._signalled_at = 0.0
        self._orders: list[tuple[tuple[str, ...], bytes]] = []  # command, first line
        self._waiting: list[_Start] = []
        self._beginning: set[int] = set()  # hosts that have not read their orders yet
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # guards the merger
        self._writing = threading.Lock()
        self._ordered: set[int] = set()  # pids of those that have their orders
        self._told: list[int] = []  # signals
        self._readers: dict[int, list[threading.Thread]] = {}
        self._outputs = terminal_output.outputs(sys.stdout, sys.stderr)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="rally-heartbeat", daemon=True)
        self._patience: Deadline | None = None

    def add(self, command: tuple[str, ...], first_line: bytes) -> None:
        """Add the next host, which :meth:`watch` starts."""
        self._waiting.append(_Start(len(self._orders)))
        self._orders.append((command, first_line))

    def watch(self, signals: SignalEvents) -> None:
        """Start the hosts' parts, and watch them until every one has ended."""
        self._heart.start()
        poller = select.poll()
        poller.register(signals.fileno(), select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        pidfds: dict[int, int] = {}
        try:
            while True:
                for index in self._due():
                    fd = linux.pidfd_open(self._start(index))
                    pidfds[fd] = index
                    poller.register(fd, select.POLLIN)
                if not pidfds and not self._waiting:
                    return
                left = self._time_left()
                ready = {fd for fd, _ in poller.poll(None if left is None else 1000 * left)}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                for number in signals.take():
                    self._signal(number)
                for fd in ready & pidfds.keys():
                    poller.unregister(fd)
                    os.close(fd)
                    self._ended(pidfds.pop(fd))
                if self._patience is not None and self._patience.expired():
                    self._hang_up()
                    self._patience = None
        finally:
            for fd in pidfds:
                os.close(fd)

    def close(self, signals: SignalEvents) -> None:
        """End what is left. A host ends its part once it hears nothing. Remaining output is shown, unless a signal arrives."""
        self._stop.set()
        self._waiting.clear()
        self._hang_up()
        for begun in self._started.values():
            if begun.poll() is None:
                try:
                    begun.wait(5.0)
                except subprocess.TimeoutExpired:
                    begun.kill()
                    begun.wait()
        for output in self._outputs:
            output.wake()
        for each in (thread for threads in self._readers.values() for thread in threads):
            each.join(1.0)
        self._show_the_rest(signals)
        with self._lock:  # a reader whose stream another process holds open may still be running
            os.close(self._wake)
            self._wake = -1

    def _show_the_rest(self, signals: SignalEvents) -> None:
        # A user who has ended the job does not wait long for its remaining output.
        patience = None if self.signal is None else Deadline(_LAST_WORDS)
        for output in self._outputs:
            number = _signal_before(output.finish(), signals, patience)
            if number is not None:
                self.signal, patience = number, Deadline(0.0)
        for output in self._outputs:
            output.close()

    def _due(self) -> list[int]:
        """The hosts whose connections start now."""
        room = _AT_A_TIME - len(self._beginning)
        due = [each for each in self._waiting if each.pause is None or each.pause.expired()]
        for each in due[: max(0, room)]:
            self._waiting.remove(each)
        return [each.index for each in due[: max(0, room)]]

    def _time_left(self) -> float | None:
        """Seconds until something must be done without an event."""
        pauses = [each.pause for each in self._waiting if each.pause is not None]
        deadlines = [*pauses, *([] if self._patience is None else [self._patience])]
        left = [each.remaining() or 0.0 for each in deadlines if not each.expired()]
        if self._patience is not None and self._patience.expired():
            return 0.0
        return min(left, default=None)

    def _start(self, index: int) -> int:
        """Start a host's connection. Returns the process's id."""
        command, first_line = self._orders[index]
        # A session of its own: Ctrl-C is for this process, which passes it on.
        begun = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._parts[index].attempts += 1
        self._started[index] = begun
        self._beginning.add(index)
        assert begun.stdin is not None
        assert begun.stdout is not None
        assert begun.stderr is not None
        readers = [
            threading.Thread(target=self._pass_on, args=(index, begun, number, stream), daemon=True)
            for number, stream in ((1, begun.stdout), (2, begun.stderr))
        ]
        self._readers[index] = readers
        for each in readers:
            each.start()
        sent = os.dup(begun.stdin.fileno())
        threading.Thread(target=self._order, args=(begun, sent, first_line), daemon=True).start()
        return begun.pid

    def _ended(self, index: int) -> None:
        begun, part = self._started[index], self._parts[index]
        code = begun.wait()
        for output in self._outputs:
            output.wake()
        for thread in self._readers[index]:
            thread.join(2.0)
        self._beginning.discard(index)
        if code == 255 and part.was_dropped and part.attempts < _ATTEMPTS and not self._told:
            part.said.clear()
            pause = Deadline(random.uniform(*_PAUSE))  # noqa: S311  not a secret
            self._waiting.append(_Start(index, pause))
            return
        part.ssh_code = code
        part.was_told = bool(self._told) or (begun.stdin is not None and begun.stdin.closed)
        if all(each.ended for each in self._parts) or self._patience is not None:
            return
        if reason := merging.must_end(self._parts, self._least):
            self._say(f"{reason}: the other hosts are told to end")
            self._tell_all(signal.SIGTERM)
        elif part.exit_code == 0 or len(self._parts) - self._num_lost() >= self._least:
            return
        self._waiting.clear()
        self._patience = Deadline(self._ending)

    def _num_lost(self) -> int:
        return sum(each.lost for each in self._parts)

    def _signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._pause()
            return
        now = MONOTONIC.now()
        if self.signal is not None and is_repeat(self.signal, number, now - self._signalled_at):
            return
        self.signal, self._signalled_at = number, now
        self._tell_all(number)
        if number == signal.SIGHUP:
            self._patience = Deadline(_HANG_UP)

    def _pause(self) -> None:
        """Stop on Ctrl-Z. Hosts that hear nothing would end their parts, so they are told first, with no heartbeat in between."""
        with self._writing:
            for begun in self._started.values():
                self._write_now(begun, PAUSE)
            _stop_this_process()
            for begun in self._started.values():
                self._write_now(begun, BEAT)

    def _tell_all(self, number: int) -> None:
        self._waiting.clear()
        with self._writing:
            self._told.append(number)
        for begun in self._started.values():
            self._write(begun, str(number).encode())

    def _hang_up(self) -> None:
        for begun in self._started.values():
            if begun.stdin is not None:
                with self._writing:
                    try:
                        begun.stdin.close()
                    except OSError:
                        pass  # it has ended

    def _beat(self) -> None:
        while not self._stop.wait(orders.HEARTBEAT):
            for begun in list(self._started.values()):
                self._write(begun, BEAT)

    def _order(self, begun: subprocess.Popen[bytes], stdin: int, first_line: bytes) -> None:
        """Send the orders, however long that takes; signals passed on meanwhile follow."""
        try:
            for data in (first_line, self._call):
                left = memoryview(data)
                while left:
                    left = left[os.write(stdin, left) :]
            with self._writing:
                os.write(stdin, b"".join(b"%d\n" % number for number in self._told) or BEAT + b"\n")
                os.set_blocking(stdin, False)
                self._ordered.add(begun.pid)
        except OSError:
            pass  # it has ended
        finally:
            os.close(stdin)

    def _write(self, begun: subprocess.Popen[bytes], word: bytes) -> None:
        with self._writing:
            self._write_now(begun, word)

    def _write_now(self, begun: subprocess.Popen[bytes], word: bytes) -> None:
        """Write a word. A host that takes nothing is as good as gone; ssh notices that."""
        if begun.pid not in self._ordered or begun.stdin is None or begun.stdin.closed:
            return
        try:
            begun.stdin.write(word + b"\n")
            begun.stdin.flush()
        except (BlockingIOError, OSError):
            pass

    def _pass_on(
        self, index: int, begun: subprocess.Popen[bytes], number: int, stream: IO[bytes]
    ) -> None:
        shown = sys.stdout if number == 1 else sys.stderr
        output = next(each for each in self._outputs if each.takes(shown))
        part = self._parts[index]
        while True:
            data = os.read(stream.fileno(), 65536)
            with self._lock:
                output.put(shown, self._merger.take(index, number, data))
                if number == 1 and part.started and index in self._beginning and self._wake >= 0:
                    self._beginning.discard(index)
                    os.eventfd_write(self._wake, 1)
            if number == 2 and not part.started:
                part.said += data[: _REMEMBERED - len(part.said)]
            if not data:
                return
            # Once the host's process has ended, at most a pipeful is left, and its messages must be read.
            output.wait_for_room(lambda: begun.poll() is not None)


@dataclass(frozen=True, slots=True)
class _Start:
    """A host whose connection is still to be started.

    Args:
        index: the host's index.
        pause: start only once it has expired; None: now.
    """

    index: int
    pause: Deadline | None = None


def _stop_this_process() -> None:
    """Stop, as Ctrl-Z does without a handler. Returns when the process continues; at once where no shell could continue it."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    # To this thread, which gets no further before all threads are stopped.
    signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)


def _signal_before(written: int, signals: SignalEvents, patience: Deadline | None) -> int | None:
    """Wait until all has been written.

    Args:
        written: a descriptor that is readable then.
        signals: those that end the wait.
        patience: how long to wait; None: forever.
    Returns:
        The signal that arrived first, or None.
    """
    poller = select.poll()
    poller.register(written, select.POLLIN)
    poller.register(signals.fileno(), select.POLLIN)
    while True:
        left = None if patience is None else patience.remaining()
        ready = {fd for fd, _ in poller.poll(None if left is None else 1000 * left)}
        if written in ready or not ready:
            return None
        for number in signals.take():
            if number != signal.SIGTSTP:
                return number
            _stop_this_process()

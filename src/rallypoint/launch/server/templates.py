"""The fork server's side of templates: when to make one, whether to use it, and starting workers from it."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint._core import clock, process

from . import learning, template
from .channel import Channel, Message, socket_pair


# Seconds without a report before a template is made: workers that still import need the CPU themselves.
# Doubles with each template.
QUIET = 2.0
# Reports that say nothing new can put a template off for at most this many times as long. Where workers are lost all
# the time, their replacements import all the time, and need the template most.
LONGEST_QUIET = 3
# The most templates per job: each costs the CPU time of its imports.
MOST = 6
# Seconds that the import of one package may take.
IMPORT_PATIENCE = 60.0
# Seconds that the forks of a batch may take.
FORK_PATIENCE = 5.0
# Seconds from the start of a waiting worker until its successor is forked: the start needs the CPU first.
SUCCESSION = 2.0


@dataclass(slots=True)
class _Waiting:
    """A worker that was forked ahead."""

    pid: int  # 0: it has ended
    channel: Channel


@dataclass(slots=True)
class _Template:
    pid: int
    channel: Channel
    packages: tuple[str, ...]
    paths: frozenset[str]
    until: float | None  # when it counts as hung
    importing: str = ""
    forking: dict[str, Channel] = field(
        default_factory=dict
    )  # workers forked ahead but not yet reported, by name
    waiting: list[_Waiting] = field(default_factory=list)

    def take_forked(self, message: Message) -> dict[str, int]:
        """Take the report of a fork. Returns its name and pid, unless it was forked ahead and waits."""
        name, pid = message["name"], message["pid"]
        line = self.forking.pop(name, None)
        if line is None:
            return {name: pid}
        self.waiting.append(_Waiting(pid, line))
        return {}

    def processes(self) -> Sequence[_Template | _Waiting]:
        """The template itself, and the workers that wait."""
        return self, *self.waiting

    def close(self) -> None:
        """Close the lines to it and to the workers forked ahead, which then exit."""
        for line in (
            self.channel,
            *self.forking.values(),
            *(each.channel for each in self.waiting),
        ):
            line.close()


class Templates:
    """One template in use, the next one while it imports, and what has been learned.

    Args:
        fork: forks the fork server and calls its argument in the child; returns the child's pid.
        become: turns a fork of the template into a worker.
        tell: sends a report to the supervisor.
    """

    def __init__(
        self,
        fork: Callable[[Callable[[], None]], int],
        become: template.Become,
        tell: Callable[[Message], None],
    ) -> None:
        self._fork = fork
        self._become = become
        self._tell = tell
        self._learned = learning.Learned()
        self._template: _Template | None = None
        self._next: _Template | None = None
        self._made = 0
        self._due: float | None = None
        self._due_at_the_latest = 0.0
        self._told: tuple[object, ...] = ()
        self._ahead = 0
        self._ahead_due: float | None = None
        self._names = itertools.count()

    # -- what the loop asks -------------------------------------------------------------------------

    def hear(self, package: str, changed: Sequence[str], paths: Sequence[str] = ()) -> None:
        """Take a worker's report that it imports a package."""
        before = self._learned
        self._learned = before.reported(package, changed, paths)
        is_new = (self._learned.wanted(), self._learned.paths) != (before.wanted(), before.paths)
        if is_new:
            self._plan()
        elif self._due is not None:
            self._due = min(clock.MONOTONIC.now() + self._quiet(), self._due_at_the_latest)

    def keep_ahead(self, count: int) -> None:
        """Keep this many workers forked before they are asked for: [Note: Workers in waiting]."""
        if count > self._ahead:
            self._ahead, self._ahead_due = count, clock.MONOTONIC.now()

    def _present(self) -> list[_Template]:
        return [each for each in (self._template, self._next) if each is not None]

    def filenos(self) -> list[int]:
        """Descriptors that become readable when a template reports."""
        return [each.channel.fileno() for each in self._present()]

    def pids(self) -> set[int]:
        return {each.pid for held in self._present() for each in held.processes()} - {0}

    def ended(self, pid: int) -> None:
        """The loop has reaped this child, whose pid may be reused from now on."""
        for held in self._present():
            for each in held.processes():
                if each.pid == pid:
                    each.pid = 0

    def next_time(self) -> float | None:
        """When :meth:`go_on` must be called, at the latest."""
        until = None if self._next is None else self._next.until
        times = (self._due, until, self._ahead_due)
        return min((at for at in times if at is not None), default=None)

    def go_on(self) -> None:
        """Read the templates' reports and do what is due."""
        now = clock.MONOTONIC.now()
        for held in self._present():
            for message, _ in held.channel.receive():
                self._hear_template(held, message)
            if held.channel.closed_by_peer:
                self._lose(held, "ended")
            elif held.until is not None and now >= held.until:
                self._lose(held, "took too long")
        if self._due is not None and now >= self._due:
            self._due = None
            try:
                self._make()
            except OSError:  # a limit is reached: workers start without one meanwhile
                self._plan()
        if self._ahead_due is not None and now >= self._ahead_due:
            self._ahead_due = None
            with contextlib.suppress(OSError):  # the same
                self._fork_ahead()

    def start(self, spawns: Sequence[tuple[Message, list[int]]]) -> dict[str, int]:
        """Start workers from the template, if it may be used. Returns the names and pids of those that have started."""
        held = self._template
        if not spawns or held is None or not self._may_use(held):
            return {}
        started = self._start_waiting(held, spawns)
        for message, fds in spawns:
            if message["name"] not in started:
                held.channel.send(message, fds)
        deadline = clock.Deadline(FORK_PATIENCE)
        poller = select.poll()
        while len(started) < len(spawns):
            waits = select.POLLIN | select.POLLOUT * held.channel.wants_write()
            poller.register(held.channel.fileno(), waits)
            poller.poll((deadline.remaining() or 0) * 1000)
            held.channel.flush()
            started |= _forked(held)
            if held.channel.closed_by_peer or deadline.expired():
                started |= self._lose_in_fork(held)
                break
        return started

    def _start_waiting(
        self, held: _Template, spawns: Sequence[tuple[Message, list[int]]]
    ) -> dict[str, int]:
        """Start workers that were forked ahead, as many as there are."""
        started: dict[str, int] = {}
        for message, fds in spawns:
            while held.waiting and message["name"] not in started:
                worker = held.waiting.pop()
                if worker.pid:
                    worker.channel.send(message, fds)
                    if not worker.channel.closed_by_peer:
                        started[message["name"]] = worker.pid
                worker.channel.close()
                self._ahead_due = clock.MONOTONIC.now() + SUCCESSION
        return started

    def _fork_ahead(self) -> None:
        held = self._template
        if held is None or not self._may_use(held):
            return
        held.waiting = [each for each in held.waiting if each.pid]
        for _ in range(self._ahead - len(held.waiting) - len(held.forking)):
            ours, theirs = socket_pair()
            name = f"ahead {next(self._names)}"
            with theirs:
                held.forking[name] = Channel(ours)
                held.channel.send({"do": "wait", "name": name}, [theirs.fileno()])

    def close_in_child(self) -> None:
        for each in self._present():
            each.close()

    # -- the template -------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Make another template once no worker has reported for a while."""
        wanted, newest = self._learned.wanted(), self._next or self._template
        if (
            wanted
            and self._made < MOST
            and (
                newest is None
                or wanted != newest.packages
                or not self._learned.paths <= newest.paths
            )
        ):
            now, quiet = clock.MONOTONIC.now(), self._quiet()
            self._due, self._due_at_the_latest = now + quiet, now + LONGEST_QUIET * quiet

    def _quiet(self) -> float:
        return QUIET * (1 << self._made)

    def _may_use(self, held: _Template) -> bool:
        learned = self._learned
        return {*held.packages} <= {*learned.wanted()} and learned.paths <= held.paths

    def _make(self) -> None:
        packages, paths = self._learned.wanted(), self._learned.paths
        self._end(self._next)  # workers start from the one in use until this one is ready
        ours, theirs = socket_pair()
        channel, its = Channel(ours), Channel(theirs)

        server = os.getpid()

        def become_template() -> None:
            channel.close()
            os.setsid()
            process.die_with_parent(server)
            template.run(its, packages, sorted(paths), self._become)

        self._made += 1
        try:
            pid = self._fork(become_template)
        except OSError:
            channel.close()
            raise
        finally:
            its.close()
        self._next = _Template(
            pid, channel, packages, paths, clock.MONOTONIC.now() + IMPORT_PATIENCE
        )

    def _hear_template(self, held: _Template, message: Message) -> None:
        match message["is"]:
            case "importing":
                held.importing = message["package"]
                held.until = clock.MONOTONIC.now() + IMPORT_PATIENCE
            case "imported":
                held.importing = ""
                seen = template.from_json(message["seen"])
                self._learned = self._learned.observed(message["package"], seen)
            case "ready":
                held.until = None
                self._end(self._template)
                self._template, self._next = held, None
                if not self._may_use(held):
                    self._end(held)
                    self._plan()
                elif self._ahead:
                    self._ahead_due = clock.MONOTONIC.now()
                self._report()
            case _:
                held.take_forked(message)  # ahead, or late word of a fork

    def _lose(self, held: _Template, how: str) -> None:
        if held.importing:
            self._learned = self._learned.broke(
                held.importing, f"the process that imported it {how}"
            )
        self._end(held)
        self._plan()
        self._report()

    def _lose_in_fork(self, held: _Template) -> dict[str, int]:
        """The template does not answer: end it. Returns the workers that it has reported by then."""
        _kill(held.pid)
        # A midwife keeps the channel open until it ends; it dies with the template.
        started: dict[str, int] = {}
        poller = select.poll()
        poller.register(held.channel.fileno(), select.POLLIN)
        deadline = clock.Deadline(FORK_PATIENCE)
        while not held.channel.closed_by_peer and not deadline.expired():
            poller.poll((deadline.remaining() or 0) * 1000)
            started |= _forked(held)
        self._end(held)
        return started

    def _end(self, held: _Template | None) -> None:
        """End a template, if there is one."""
        if held is None:
            return
        if held is self._next:
            self._next = None
        if held is self._template:
            self._template = None
        held.close()
        _kill(held.pid)

    def _report(self) -> None:
        packages = () if self._template is None else self._template.packages
        against = self._learned.objections()
        news = (packages, tuple(against.items()))
        if news != self._told:
            self._told = news
            self._tell({"is": "learned", "packages": packages, "against": against})


def _forked(held: _Template) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for message, _ in held.channel.receive():
        if message["is"] == "forked":
            found |= held.take_forked(message)
    return found


def _kill(pid: int) -> None:
    """Kill a template. The fork server's loop reaps it."""
    if pid:
        os.kill(pid, signal.SIGKILL)

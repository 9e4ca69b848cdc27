"""The relay: one thread that forwards workers' output in whole lines.

Lines of different workers therefore never mix.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rallypoint._core import clock

from .terminal import take_size


# How much of the end of each stderr is kept for a report.
TAIL_BYTES = 8 * 1024
READ_SIZE = 64 * 1024
# Longer lines are forwarded in pieces of this size.
MAX_LINE = 1024 * 1024
# Seconds to wait for the rest of a line before its beginning (a prompt, a progress bar) is shown.
REST_PATIENCE = 0.03
# The same after a burst too long for a prompt: the writer may be within a long line and waiting for a CPU.
BURST_PATIENCE = 1.0
BURST = select.PIPE_BUF

Sink = Callable[[bytes], None]


@dataclass(slots=True)
class Source:
    """One stream of one worker. Owned by the relay's thread."""

    fd: int
    file: Sink | None
    console: Sink | None
    prefix: bytes | None  # if set, the stream is forwarded line by line
    filters: tuple[bytes, ...] = ()
    filtered: Sink | None = None
    owned: tuple[int, ...] = ()  # descriptors to close at the end
    like: int | None = None  # the real terminal that the pseudo-terminal ``fd`` stands for
    lost: Callable[[str], None] | None = (
        None  # called with the reason if the file cannot be written
    )
    record: Callable[[bytes], bytes] | None = None  # turns a line into what is written instead
    tail: bytearray = field(default_factory=bytearray)
    line: bytearray = field(default_factory=bytearray)
    show_at: float | None = None  # without a prefix: when to show an incomplete line
    done: threading.Event = field(default_factory=threading.Event)

    def feed(self, data: bytes) -> None:
        self.tail += data
        del self.tail[:-TAIL_BYTES]
        if self.record is None:
            self.file = self._pass(self.file, data)
        self.line += data
        if self.prefix is None:
            self._pass_whole(BURST_PATIENCE if len(data) > BURST else REST_PATIENCE)
            return
        end = max(self.line.rfind(b"\n"), self.line.rfind(b"\r", 0, -1)) + 1
        if end:
            whole = bytes(self.line[:end])
            del self.line[:end]
            self._pass_lines(whole)
        if len(self.line) > MAX_LINE:
            self.end_line()

    def _pass_whole(self, patience: float) -> None:
        """Forward all complete lines; the pipe may have cut the last one in two."""
        bar = self.line.rfind(
            b"\r", 0, -1
        )  # a progress bar redraws after \r: what precedes it is complete
        end = max(self.line.rfind(b"\n") + 1, bar) if bar > 0 else self.line.rfind(b"\n") + 1
        if len(self.line) > MAX_LINE:
            end = len(self.line)
        if end:
            self.console = self._pass(self.console, bytes(self.line[:end]))
            del self.line[:end]
        self.show_at = clock.MONOTONIC.now() + patience if self.line else None

    def end_line(self) -> None:
        self.show_at = None
        if not self.line:
            return
        if self.prefix is None:
            self.console = self._pass(self.console, bytes(self.line))
        else:
            self._pass_lines(bytes(self.line))
        self.line.clear()

    def _pass_lines(self, text: bytes) -> None:
        *lines, rest = text.replace(b"\r\n", b"\n").split(b"\n")
        if b"\r" in text:
            lines = [part for line in lines for part in _states(line)]
        lines += filter(None, rest.split(b"\r"))
        wanted = [line for line in lines if any(word in line for word in self.filters)]
        if self.record is not None:
            self.file = self._pass(self.file, self._written(lines))
        self.console = self._pass(self.console, self._written(lines))
        if wanted:
            data = self._written(wanted)
            self.filtered = self._pass(self.filtered, data)

    def _written(self, lines: Iterable[bytes]) -> bytes:
        prefix = self.prefix or b""
        if self.record is not None:
            lines = map(self.record, lines)
        return b"".join(prefix + line + b"\n" for line in lines)

    def _pass(self, sink: Sink | None, data: bytes) -> Sink | None:
        """Write. A sink that fails (closed terminal, full disk) is dropped, so that it cannot stop the worker."""
        if sink is None:
            return None
        try:
            sink(data)
        except (OSError, ValueError) as error:
            if self.lost is not None and sink is not self.console:
                self.lost(getattr(error, "strerror", None) or str(error))
                self.lost = None
            return None
        return sink


def _states(line: bytes) -> list[bytes]:
    """Treat each state of a progress bar, which redraws with \\r and never ends its line, as a line."""
    *before, last = line.split(b"\r")
    return [*filter(None, before), last]


class Relay:
    """A thread that forwards workers' output. A blocked console stops only this thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Source] = []
        self._stop = False
        self._resized = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._over_read, self._over_write = -1, -1  # closed when the thread ends
        self._writing = False  # a write to the console or to a disk is in progress
        self._passed = 0  # bytes

    def add(self, source: Source) -> None:
        with self._lock:
            self._new.append(source)
        if self._thread is None:
            self._start()
        os.write(self._wake_write, b"x")

    def _start(self) -> None:
        self._over_read, self._over_write = os.pipe2(os.O_CLOEXEC)
        thread = threading.Thread(target=self._run, name="rally-relay", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached
            os.close(self._over_read)
            os.close(self._over_write)
            raise
        self._thread = thread

    def resize(self) -> None:
        """Give workers' pseudo-terminals the new size of the real terminal."""
        with self._lock:
            self._resized = True
        os.write(self._wake_write, b"x")

    def close(self, patience: float, give_up: int | None = None) -> None:
        """Forward the remaining output, then release everything.

        Waits for a console that accepts nothing (a pager, say), as any program that writes into a
        pipe does. Does not wait for streams to reach their end.

        Args:
            patience: seconds without progress after which the rest is abandoned. A blocked console
                counts as no progress only if ``give_up`` is None.
            give_up: a descriptor that becomes readable when the user does not want to wait any longer.
        """
        with self._lock:
            self._stop = True
        if self._thread is not None:
            os.write(self._wake_write, b"x")
            if not self._wait(patience, give_up):
                return  # a blocked console; the daemon thread ends with the process
            self._thread.join()
            os.close(self._over_read)
        for source in self._new:  # added, but never seen by the thread
            _finish(source)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wait(self, patience: float, give_up: int | None) -> bool:
        poller = select.poll()
        poller.register(self._over_read, select.POLLIN)
        if give_up is not None:
            poller.register(give_up, select.POLLIN)
        while True:
            before = self._passed
            ready = {fd for fd, _ in poller.poll(patience * 1000)}
            if self._over_read in ready:
                return True
            waits_for_console = self._writing and give_up is not None
            if ready or (self._passed == before and not waits_for_console):
                return False

    def _run(self) -> None:
        try:
            self._pass_on()
        finally:
            os.close(self._over_write)

    def _pass_on(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        sources: dict[int, Source] = {}
        while True:
            with self._lock:
                new, self._new = self._new, []
                stop = self._stop
                resized, self._resized = self._resized, False
            if resized:
                for source in sources.values():
                    if source.like is not None:
                        take_size(source.fd, source.like)
            for source in new:
                sources[source.fd] = source
                poller.register(source.fd, select.POLLIN)
            # After a stop, poll without waiting to read what is left.
            events = poller.poll(0 if stop else _milliseconds_to_wait(sources.values()))
            busy = False
            for fd, _event in events:
                if fd == self._wake_read:
                    os.read(fd, 4096)
                    continue
                busy = True
                if not self._pump(sources[fd]):
                    poller.unregister(fd)
                    _finish(sources.pop(fd))
            now = clock.MONOTONIC.now()
            for source in sources.values():
                # The console may have blocked us for so long that the rest has arrived.
                late = source.show_at is not None and now >= source.show_at
                if late and not _is_readable(source.fd):
                    source.end_line()
            if stop and not busy:
                for source in sources.values():
                    _finish(source)
                return

    def _pump(self, source: Source) -> bool:
        """Read once and forward. False at the end of the stream."""
        try:
            data = os.read(source.fd, READ_SIZE)
        except BlockingIOError:
            return True
        except OSError:  # EIO: the last writer has closed the pseudo-terminal
            data = b""
        if data:
            self._writing = True
            source.feed(data)
            self._writing = False
            self._passed += len(data)
        return bool(data)


def _milliseconds_to_wait(sources: Iterable[Source]) -> int | None:
    times = [source.show_at for source in sources if source.show_at is not None]
    if not times:
        return None
    return max(0, int((min(times) - clock.MONOTONIC.now()) * 1000) + 1)


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _finish(source: Source) -> None:
    source.end_line()
    os.close(source.fd)
    for fd in source.owned:
        os.close(fd)
    source.done.set()

"""Where workers' output goes: folders of a run, descriptors for workers, and the relay.

Folders: ``<log-dir>/<run-id>_<random>/attempt_<generation>/<local-rank>/{stdout,stderr}.log, error.json``,
as torchrun lays them out; a folder is never reused and never deleted once something is in it.

A stream that leads to the console and nowhere else is handed to the worker as it is, except stderr:
its last lines belong into a failure report, so it passes through the relay. If our stderr is
a terminal, the worker gets a pseudo-terminal, so that progress bars and colours stay.

One thread passes everything on, a chunk of whole lines at a time: teed lines of two workers cannot
cut into each other.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import select
import shutil
import tempfile
import termios
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rallypoint._core import clock, limits, private
from rallypoint._core.whole_writes import write_whole
from rallypoint.errors import ConfigError, LaunchError
from rallypoint.launch.config import LogConfig, Streams


# What is kept of each stderr for a report.
TAIL_BYTES = 8 * 1024
TAIL_LINES = 20
READ_SIZE = 64 * 1024
# A line that never ends is passed on in pieces of this size.
MAX_LINE = 1024 * 1024
# How long the rest of a line may take to come before what is there is shown (a prompt, a bar). Seconds.
REST_PATIENCE = 0.03
# The same where more has come at once than anybody writes as a prompt: the writer may be amid a long line, without a core.
BURST_PATIENCE = 1.0
BURST = select.PIPE_BUF

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")


class RunFolder:
    """The folder of one run. Made on construction; with ``/dev/null`` there is none.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, config: LogConfig, run_id: str) -> None:
        self._keep = config.folder is not None or config.redirects.any() or config.tee.any()
        self.path: Path | None = None
        # Only we know where it is, and the user wants what will be in it.
        self.is_news = config.folder is None and self._keep
        if config.folder == os.devnull:
            return
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", run_id)[:64] or "run"
        if config.folder is None:
            try:
                self.path = Path(tempfile.mkdtemp(prefix=f"rally_{safe[:8]}_"))
            except OSError as error:
                raise ConfigError(
                    "TMPDIR",
                    None,
                    f"no temporary folder can be made: {error.strerror}",
                    "set it, or --log-dir, to a folder you may write to",
                ) from None
            return
        base = Path(config.folder).absolute()
        path = base / f"{safe}_{secrets.token_hex(4)}"
        try:
            private.make_folder(path)
        except OSError as error:
            raise ConfigError(
                "--log-dir",
                config.folder,
                f"cannot make a folder there: {error.strerror}",
                "name a folder you may write to",
            ) from None
        self.path = path

    def generation(self, generation: int) -> Path | None:
        """The folder of one generation, made new.

        Raises:
            LaunchError: it cannot be made: the disk is full, the run's folder was removed.
        """
        if self.path is None:
            return None
        path = self.path / f"attempt_{generation}"
        with _needing(path):
            private.make_folder(path)
        return path

    def keep(self) -> None:
        """Something in it is worth reading: a failure, output."""
        self._keep = True

    def close(self) -> None:
        """Remove a private folder that nobody asked for and that holds nothing of interest."""
        if not self._keep and self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Console:
    """Where the console is: descriptors, or with text streams (notebooks) functions to write to.

    Args:
        write_out: gets bytes of workers' stdout, if descriptor 1 is not what the user sees.
        write_err: the same for stderr.
    """

    stdout_fd: int = 1
    stderr_fd: int = 2
    write_out: Callable[[bytes], None] | None = None
    write_err: Callable[[bytes], None] | None = None

    @classmethod
    def of_streams(cls, stdout: TextIO, stderr: TextIO) -> Console:
        """For a program whose ``sys.stdout`` may not be descriptor 1, as in a notebook."""
        return cls(
            write_out=None if _is_fd(stdout, 1) else _text_writer(stdout),
            write_err=None if _is_fd(stderr, 2) else _text_writer(stderr),
        )


def _is_fd(stream: TextIO, fd: int) -> bool:
    try:
        return stream.fileno() == fd
    except (OSError, ValueError, AttributeError):
        return False


def _text_writer(stream: TextIO) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream.write(data.decode(errors="replace"))
        stream.flush()

    return write


@contextmanager
def _needing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if limits.explain(error) is not None:
            raise
        raise LaunchError(
            f"cannot write logs at {path}: {error.strerror}"
            " (make room there, or name another folder with --log-dir)"
        ) from None


def _fd_writer(fd: int) -> Callable[[bytes], None]:
    return lambda data: write_whole(fd, data)


Sink = Callable[[bytes], None]


@dataclass(slots=True)
class Source:
    """One stream of one worker, on its way through the relay. Owned by the relay's thread."""

    fd: int
    file: Sink | None
    console: Sink | None
    prefix: bytes | None  # with a prefix the stream is passed on line by line
    filters: tuple[bytes, ...] = ()
    filtered: Sink | None = None
    owned: tuple[int, ...] = ()  # descriptors to close at the end
    like: int | None = None  # the real terminal, if ``fd`` is a pseudo-terminal in its stead
    lost: Callable[[str], None] | None = None  # is told why the file cannot be written
    tail: bytearray = field(default_factory=bytearray)
    line: bytearray = field(default_factory=bytearray)
    show_at: float | None = (
        None  # when the beginning of a line, without prefix, is no longer held back
    )
    done: threading.Event = field(default_factory=threading.Event)

    def feed(self, data: bytes) -> None:
        self.tail += data
        del self.tail[:-TAIL_BYTES]
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
        """Pass on up to the end of the last line; what follows it may be half of one, cut by the pipe."""
        bar = self.line.rfind(b"\r", 0, -1)  # what precedes a bar's new state
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
        prefix = self.prefix or b""
        self.console = self._pass(self.console, b"".join(prefix + line + b"\n" for line in lines))
        wanted = [line for line in lines if any(word in line for word in self.filters)]
        if wanted:
            data = b"".join(prefix + line + b"\n" for line in wanted)
            self.filtered = self._pass(self.filtered, data)

    def _pass(self, sink: Sink | None, data: bytes) -> Sink | None:
        """Write; a sink that fails (closed terminal, full disk) is dropped, the worker must not stop for it."""
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
    """A progress bar goes back with \\r and never ends its line: each of its states is one."""
    *before, last = line.split(b"\r")
    return [*filter(None, before), last]


class Relay:
    """A thread that passes workers' output on. A console that blocks stops only this thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Source] = []
        self._stop = False
        self._resized = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._over_read, self._over_write = -1, -1  # hangs up when the thread has ended
        self._writing = False  # the console (or a disk) has not taken yet what it was given
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
        except RuntimeError:  # there may be no further thread
            os.close(self._over_read)
            os.close(self._over_write)
            raise
        self._thread = thread

    def resize(self) -> None:
        """The real terminal has another size: workers' pseudo-terminals follow."""
        with self._lock:
            self._resized = True
        os.write(self._wake_write, b"x")

    def close(self, patience: float, give_up: int | None = None) -> None:
        """Pass on what is there, then let go of everything.

        A console that takes nothing (a pager that waits for its reader) is waited for, as by any
        program that writes into a pipe. Streams whose writers are still there are not.

        Args:
            patience: seconds without anything to pass on, or with ``give_up`` None also without
                the console taking anything, until the rest is left.
            give_up: a descriptor that becomes readable when the user wants no more waiting.
        """
        with self._lock:
            self._stop = True
        if self._thread is not None:
            os.write(self._wake_write, b"x")
            if not self._wait(patience, give_up):
                return  # a blocked console; the daemon thread goes with the process
            self._thread.join()
            os.close(self._over_read)
        for source in self._new:  # which no thread has come to take over
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
                        _take_size(source.fd, source.like)
            for source in new:
                sources[source.fd] = source
                poller.register(source.fd, select.POLLIN)
            # When told to stop, one more look at each source takes what is there.
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
                # The console may have held us up for long: the rest may be there by now.
                late = source.show_at is not None and now >= source.show_at
                if late and not _is_readable(source.fd):
                    source.end_line()
            if stop and not busy:
                for source in sources.values():
                    _finish(source)
                return

    def _pump(self, source: Source) -> bool:
        """Read once and pass on. False at the end of the stream."""
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


@dataclass(slots=True)
class WorkerStreams:
    """The descriptors one worker is started with, and how to read the end of its stderr."""

    stdout: int
    stderr: int
    sources: list[Source] = field(default_factory=list)
    stderr_source: Source | None = None
    stderr_file: Path | None = None
    to_close: list[int] = field(default_factory=list)

    def given(self) -> None:
        """The worker has them: close ours."""
        for fd in self.to_close:
            os.close(fd)
        self.to_close.clear()

    def drain(self, deadline: clock.Deadline) -> None:
        """Wait until all output has been passed on (its writers are gone), or the deadline."""
        for source in self.sources:
            source.done.wait(deadline.remaining())

    def stderr_tail(self) -> tuple[str, ...]:
        """The last lines of stderr, without escape sequences and what a progress bar overwrote."""
        data = b""
        if self.stderr_source is not None:
            data = bytes(self.stderr_source.tail)
        elif self.stderr_file is not None:
            try:
                with self.stderr_file.open("rb") as file:
                    file.seek(0, os.SEEK_END)
                    file.seek(max(0, file.tell() - TAIL_BYTES))
                    data = file.read()
            except OSError:
                pass
        lines = []
        for raw in _CONTROL.sub(b"", data).split(b"\n"):
            line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").rstrip()
            if line:
                lines.append(line)
        return tuple(lines[-TAIL_LINES:])


class StreamFactory:
    """Makes the streams of the workers of one generation.

    Args:
        config: what goes where.
        folder: the generation's folder, or None.
        relay: passes on what does not go straight.
        console: where the console is.
    """

    def __init__(
        self, config: LogConfig, folder: Path | None, relay: Relay, console: Console
    ) -> None:
        self._config = config
        self._folder = folder
        self._relay = relay
        self._console = console
        self._filtered: Mapping[str, Sink | None] = {
            "stdout": self._open_filtered("stdout", config.stdout_filters),
            "stderr": self._open_filtered("stderr", config.stderr_filters),
        }

    def worker_folder(self, local_rank: int) -> Path | None:
        return None if self._folder is None else self._folder / str(local_rank)

    def open(self, local_rank: int, prefix: str) -> WorkerStreams:
        """Descriptors for one worker; makes its folder.

        Raises:
            LaunchError: its folder or its files cannot be made.
        """
        folder = self.worker_folder(local_rank)
        streams = WorkerStreams(-1, -1)
        with _needing(folder) if folder is not None else nullcontext():
            if folder is not None:
                private.make_folder(folder)
            place = (local_rank, prefix, folder, streams)
            try:
                streams.stdout = self._open_one("stdout", Streams.OUT, *place)
                streams.stderr = self._open_one("stderr", Streams.ERR, *place)
            except BaseException:
                streams.given()
                raise
        return streams

    def _open_one(
        self,
        name: str,
        which: Streams,
        local_rank: int,
        prefix: str,
        folder: Path | None,
        streams: WorkerStreams,
    ) -> int:
        config = self._config
        shown = config.console_ranks is None or local_rank in config.console_ranks
        teed = bool(config.tee.of(local_rank) & which)
        # Without a folder (--log-dir /dev/null) there is nothing to redirect to.
        redirected = folder is not None and bool(config.redirects.of(local_rank) & which)
        path = folder / f"{name}.log" if folder is not None and (teed or redirected) else None
        if path is not None and which is Streams.ERR:
            streams.stderr_file = path
        if path is not None and not teed:
            fd = _create(path)
            streams.to_close.append(fd)
            return fd
        out = which is Streams.OUT
        direct = self._console.stdout_fd if out else self._console.stderr_fd
        writer = self._console.write_out if out else self._console.write_err
        if out and not teed and writer is None:
            if shown:
                return direct
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            streams.to_close.append(fd)
            return fd
        terminal = not out and not teed and writer is None and os.isatty(direct)
        read, write = _pseudo_terminal(direct) if terminal else os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        streams.to_close.append(write)
        try:
            file_fd = None if path is None else _create(path)
        except OSError:
            os.close(read)
            raise
        source = Source(
            fd=read,
            file=None if file_fd is None else _fd_writer(file_fd),
            console=(writer or _fd_writer(direct)) if shown else None,
            prefix=prefix.encode() if teed else None,
            filters=tuple(
                word.encode() for word in (config.stdout_filters if out else config.stderr_filters)
            ),
            filtered=self._filtered[name] if teed and shown else None,
            owned=() if file_fd is None else (file_fd,),
            like=direct if terminal else None,
            lost=lambda why: self._warn(f"cannot write {path}: {why}; not all of it is there"),
        )
        streams.sources.append(source)
        if not out:
            streams.stderr_source = source
        self._relay.add(source)
        return write

    def _warn(self, text: str) -> None:
        line = f"rally: {text}\n".encode()
        try:
            (self._console.write_err or _fd_writer(self._console.stderr_fd))(line)
        except (OSError, ValueError):
            pass  # nobody is there to be warned

    def _open_filtered(self, name: str, filters: tuple[str, ...]) -> Sink | None:
        if not filters or self._folder is None:
            return None
        path = self._folder / f"filtered_{name}.log"
        with _needing(path):
            os.close(private.open_to_append(path))

        def append(data: bytes) -> None:
            with open(private.open_to_append(path), "ab") as file:
                file.write(data)

        return append


def _create(path: Path) -> int:
    return private.open_to_append(path)


def _pseudo_terminal(like: int) -> tuple[int, int]:
    """A pseudo-terminal that passes bytes unchanged and has the size of the real one: (ours, the worker's)."""
    ours, theirs = os.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # the real terminal turns newlines into what it needs
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    _take_size(ours, like)
    return ours, theirs


def _take_size(terminal: int, like: int) -> None:
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, b"\0" * 8))
    except OSError:
        pass  # no size known: programs then assume 80 columns

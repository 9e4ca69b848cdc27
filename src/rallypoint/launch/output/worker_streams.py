"""Where each worker's stdout and stderr go, and the descriptors for them.

If stdout goes only to the console, the worker inherits the console. stderr always passes through
the relay or a file, because a failure report quotes its last lines. If our stderr is a terminal, the
worker gets a pseudo-terminal, which keeps progress bars and colours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from rallypoint._core import clock, log_records, private
from rallypoint._core.log_records import Origin
from rallypoint.launch.config import LogConfig, Streams

from . import rotation
from .console import Console
from .relay import TAIL_BYTES, Relay, Sink, Source
from .run_folder import needing
from .terminal import pseudo_terminal


_NAMES = {Streams.OUT: "stdout", Streams.ERR: "stderr"}
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")


@dataclass(slots=True)
class WorkerStreams:
    """The output descriptors of one worker, and the end of its stderr."""

    stdout: int
    stderr: int
    folder: Path | None = None  # where its files are
    sources: list[Source] = field(default_factory=list)
    stderr_source: Source | None = None
    stderr_file: Path | None = None
    to_close: list[int] = field(default_factory=list)

    def given(self) -> None:
        """Close our copies, once the worker has its own."""
        for fd in self.to_close:
            os.close(fd)
        self.to_close.clear()

    def relabel(self, prefix: str, origin: Origin) -> None:
        """The worker has another rank from now on. Arguments as for :meth:`StreamFactory.open`."""
        for source in self.sources:
            if source.prefix:
                source.prefix = os.fsencode(prefix)
            if source.record is not None:
                name = "stderr" if source is self.stderr_source else "stdout"
                source.record = _recorder(replace(origin, stream=name))

    def drain(self, deadline: clock.Deadline) -> None:
        """Wait until all streams have ended and been forwarded, or until the deadline."""
        for source in self.sources:
            source.done.wait(deadline.remaining())

    def stderr_tail(self) -> list[str]:
        """The end of stderr in lines, without escape sequences or overwritten states of progress bars."""
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
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where one stream of one worker goes.

    Args:
        to_file: to a file, possibly also elsewhere.
        teed: to the file and the console, line by line, with a prefix.
        shown: on the console, unless it goes to a file only.
        relayed: through the relay; otherwise the worker writes to the destination directly.
    """

    to_file: bool
    teed: bool
    shown: bool
    relayed: bool


def route_of(
    config: LogConfig, which: Streams, local_rank: int, *, has_folder: bool, to_descriptor: bool
) -> Route:
    """Decide where a stream goes.

    Args:
        config: the user's settings.
        which: stdout or stderr.
        local_rank: the worker's local rank.
        has_folder: False with ``--log-dir /dev/null``: nothing is redirected to files.
        to_descriptor: whether the console is a descriptor, not a notebook's text stream.
    """
    teed = bool(config.tee.of(local_rank) & which)
    to_file = has_folder and (teed or bool(config.redirects.of(local_rank) & which))
    return Route(
        to_file=to_file,
        teed=teed,
        shown=config.console_ranks is None or local_rank in config.console_ranks,
        # A failure report quotes the end of stderr.
        relayed=teed
        or config.as_json
        or (to_file and config.max_size > 0)
        or not (to_file or (which is Streams.OUT and to_descriptor)),
    )


class StreamFactory:
    """Makes the streams of the workers of one generation.

    Args:
        config: where each stream goes.
        folder: the generation's folder, or None.
        relay: forwards streams that workers do not write directly.
        console: where the user sees output.
    """

    def __init__(
        self, config: LogConfig, folder: Path | None, relay: Relay, console: Console
    ) -> None:
        self._config = config
        self._folder = folder
        self._relay = relay
        self._console = console
        self._filtered: Mapping[Streams, Sink | None] = {
            Streams.OUT: self._open_filtered("stdout", config.stdout_filters),
            Streams.ERR: self._open_filtered("stderr", config.stderr_filters),
        }

    def worker_folder(self, local_rank: int) -> Path | None:
        return None if self._folder is None else self._folder / str(local_rank)

    def open(self, local_rank: int, prefix: str, origin: Origin) -> WorkerStreams:
        """Open the descriptors of one worker, and create its folder.

        Args:
            local_rank: the worker's local rank.
            prefix: the prefix of teed lines.
            origin: the origin of its lines, if they are written as records.

        Raises:
            LaunchError: its folder or files cannot be created.
        """
        folder = self.worker_folder(local_rank)
        streams = WorkerStreams(-1, -1, folder)
        with needing(folder) if folder is not None else nullcontext():
            if folder is not None:
                private.make_folder(folder)
            try:
                whose = replace(origin, stream="stdout")
                streams.stdout = self._open_one(Streams.OUT, local_rank, prefix, streams, whose)
                whose = replace(origin, stream="stderr")
                streams.stderr = self._open_one(Streams.ERR, local_rank, prefix, streams, whose)
            except BaseException:
                streams.given()
                raise
        return streams

    def _open_one(
        self,
        which: Streams,
        local_rank: int,
        prefix: str,
        streams: WorkerStreams,
        origin: Origin,
    ) -> int:
        out = which is Streams.OUT
        folder = self.worker_folder(local_rank)
        route = route_of(
            self._config,
            which,
            local_rank,
            has_folder=folder is not None,
            to_descriptor=(self._console.write_out if out else self._console.write_err) is None,
        )
        path = folder / f"{_NAMES[which]}.log" if folder is not None and route.to_file else None
        if not out:
            streams.stderr_file = path
        if route.relayed:
            return self._open_relayed(which, route, path, prefix, streams, origin)
        if path is not None:
            fd = private.open_to_append(path)
        elif route.shown:
            return self._console.stdout_fd
        else:
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        streams.to_close.append(fd)
        return fd

    def _open_relayed(
        self,
        which: Streams,
        route: Route,
        path: Path | None,
        prefix: str,
        streams: WorkerStreams,
        origin: Origin,
    ) -> int:
        """Returns the worker's end of a pipe or pseudo-terminal; the relay reads the other end."""
        console, config, out = self._console, self._config, which is Streams.OUT
        terminal = None
        if (
            not out
            and not route.teed
            and not config.as_json
            and console.write_err is None
            and os.isatty(console.stderr_fd)
        ):
            terminal = console.stderr_fd
        read, write = os.pipe2(os.O_CLOEXEC) if terminal is None else pseudo_terminal(terminal)
        os.set_blocking(read, False)
        streams.to_close.append(write)
        try:
            file_fd = None if path is None else private.open_to_append(path)
        except OSError:
            os.close(read)
            raise
        file_only = path is not None and not route.teed
        record = _recorder(origin) if config.as_json else None
        in_lines = route.teed or config.as_json
        filters = config.stdout_filters if out else config.stderr_filters
        source = Source(
            fd=read,
            file=_file_sink(file_fd, path, config.max_size),
            console=console.writer(out=out) if route.shown and not file_only else None,
            prefix=(b"" if config.as_json else os.fsencode(prefix)) if in_lines else None,
            filters=tuple(os.fsencode(word) for word in filters),
            filtered=self._filtered[which] if route.teed and route.shown else None,
            record=record,
            owned=() if file_fd is None else (file_fd,),
            like=terminal,
            lost=lambda why: self._warn(f"cannot write {path}: {why}; the file is incomplete"),
        )
        streams.sources.append(source)
        if not out:
            streams.stderr_source = source
        self._relay.add(source)
        return write

    def _warn(self, text: str) -> None:
        line = f"rally: {text}\n".encode()
        try:
            self._console.writer(out=False)(line)
        except (OSError, ValueError):
            pass  # the console is gone

    def _open_filtered(self, name: str, filters: tuple[str, ...]) -> Sink | None:
        if not filters or self._folder is None:
            return None
        path = self._folder / f"filtered_{name}.log"
        with needing(path):
            os.close(private.open_to_append(path))

        def append(data: bytes) -> None:
            with open(private.open_to_append(path), "ab") as file:
                file.write(data)

        return append


def _recorder(origin: Origin) -> Callable[[bytes], bytes]:
    return lambda line: log_records.pack(origin, clock.wall(), clock.MONOTONIC.now(), line)


def _file_sink(fd: int | None, path: Path | None, limit: int) -> Sink | None:
    return None if fd is None or path is None else rotation.writer(fd, path, limit)

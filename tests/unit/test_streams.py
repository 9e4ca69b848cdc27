"""A stream that several workers share: what is written during a flush by the same thread."""

from __future__ import annotations

import io
import os

import pytest

from rallypoint.launch.worker import streams
from rallypoint.launch.worker.streams import WholeLines


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_handlers_that_interrupt_one_another_do_not_nest_without_end(pipe, monkeypatch) -> None:
    """As if a signal arrived at every wait for the pipe, a thousand times; each handler prints a line."""
    read, write = pipe
    lines = WholeLines(io.FileIO(write, "wb", closefd=False))
    left, deepest, depth = 1000, 0, 0

    def write_whole(fd: int, data: bytes) -> None:
        nonlocal left, deepest, depth
        depth += 1
        deepest = max(deepest, depth)
        while left and depth < 50:
            left -= 1
            lines.write(b"handler\n")
        depth -= 1
        os.write(fd, data)

    monkeypatch.setattr(streams, "write_whole", write_whole)
    lines.write(b"line\n")
    assert (left, deepest) == (0, 2)
    assert sorted(os.read(read, 1 << 20).splitlines()) == [b"handler"] * 1000 + [b"line"]
    lines.write(b"again\n")
    assert os.read(read, 1 << 20) == b"again\n"


def test_what_could_not_be_written_comes_first_next_time(pipe, monkeypatch) -> None:
    read, write = pipe
    lines = WholeLines(io.FileIO(write, "wb", closefd=False))

    def fails(fd: int, data: bytes) -> None:
        os.write(fd, data[:3])
        error = OSError("full")
        error.written = 3
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(streams, "write_whole", fails)
        with pytest.raises(OSError, match="full"):
            lines.write(b"one line\n")
    lines.write(b"two\n")
    assert os.read(read, 100) == b"one line\ntwo\n"

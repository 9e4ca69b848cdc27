"""One stream through the relay: whatever pieces it arrives in, the same bytes go out."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError, LaunchError
from rallypoint.launch.config import LogConfig, StreamChoice, Streams
from rallypoint.launch.output.relay import MAX_LINE, TAIL_BYTES, Source
from rallypoint.launch.output.run_folder import RunFolder
from rallypoint.launch.output.worker_streams import WorkerStreams, route_of


class Sinks:
    """Collects what a source passes on."""

    def __init__(self, prefix: bytes | None, filters: tuple[bytes, ...] = ()) -> None:
        self.file, self.console, self.filtered = bytearray(), bytearray(), bytearray()
        self.source = Source(
            fd=-1,
            file=self.file.extend,
            console=self.console.extend,
            prefix=prefix,
            filters=filters,
            filtered=self.filtered.extend,
        )

    def feed(self, *pieces: bytes) -> Sinks:
        for piece in pieces:
            self.source.feed(piece)
        self.source.end_line()
        return self


PIECES = st.lists(st.text("ab\r\n", min_size=1).map(str.encode), max_size=12)


@given(PIECES)
def test_without_a_prefix_everything_passes_as_it_is(pieces):
    sinks = Sinks(None).feed(*pieces)
    assert bytes(sinks.console) == bytes(sinks.file) == b"".join(pieces)


@given(PIECES)
def test_the_file_is_what_was_written_and_the_console_does_not_depend_on_the_pieces(pieces):
    whole = b"".join(pieces)
    in_pieces, at_once = Sinks(b"> ").feed(*pieces), Sinks(b"> ").feed(whole)
    assert bytes(in_pieces.file) == whole
    assert in_pieces.console == at_once.console


@given(PIECES)
def test_each_line_of_the_console_has_its_prefix_and_none_is_lost(pieces):
    whole = b"".join(pieces)
    console = bytes(Sinks(b"> ").feed(*pieces).console)
    shown = console.split(b"\n")
    assert shown.pop() == b""
    assert all(line.startswith(b"> ") for line in shown)
    texts = [line[2:] for line in shown]
    assert b"".join(texts) == whole.replace(b"\r", b"").replace(b"\n", b"")
    # Lines that end in a newline are kept even if they are empty.
    assert len(texts) >= whole.count(b"\n")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"a\nb\n", b"a|b|"),
        (b"\n\n", b"||"),
        (b"a\r\nb\r\n", b"a|b|"),
        (b"\r10%\r20%\r30%\n", b"10%|20%|30%|"),
        (b"\r10%\r20%", b"10%|20%|"),
        (b"a\r\r\n\r", b"a||"),
        (b"no end", b"no end|"),
    ],
)
def test_lines(written, shown):
    assert bytes(Sinks(b"").feed(written).console) == shown.replace(b"|", b"\n")


def test_a_line_without_end_is_passed_on_in_bounded_memory():
    sinks = Sinks(b"> ")
    for _ in range(40):
        sinks.source.feed(b"x" * (MAX_LINE // 16))
        assert len(sinks.source.line) <= MAX_LINE
    assert len(sinks.console) > 2 * MAX_LINE
    assert len(sinks.file) == 40 * (MAX_LINE // 16)


def test_lines_with_a_word_are_collected_with_their_prefix():
    sinks = Sinks(b"[r0]:", (b"loss", b"acc")).feed(b"loss 1\nother\nth", b"e acc 2\nlo", b"ss")
    assert bytes(sinks.filtered) == b"[r0]:loss 1\n[r0]:the acc 2\n[r0]:loss\n"


def test_a_sink_that_fails_is_dropped_and_the_file_s_reason_told_once():
    told: list[str] = []
    sinks = Sinks(b"> ")

    def full(_data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sinks.source.file, sinks.source.lost = full, told.append
    sinks.feed(b"a\n", b"b\n")
    assert bytes(sinks.console) == b"> a\n> b\n"
    assert told == ["No space left on device"]


def test_a_closed_console_is_not_reported_and_the_file_goes_on():
    told: list[str] = []
    sinks = Sinks(b"> ")

    def closed(_data: bytes) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    sinks.source.console, sinks.source.lost = closed, told.append
    sinks.feed(b"a\n", b"b\n")
    assert bytes(sinks.file) == b"a\nb\n"
    assert told == []


# -- the last lines of stderr ---------------------------------------------------------------------


def tail(written: bytes) -> list[str]:
    sinks = Sinks(None)
    for start in range(0, len(written), 1000):
        sinks.source.feed(written[start : start + 1000])
    return WorkerStreams(-1, -1, stderr_source=sinks.source).stderr_tail()


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"", []),
        (b"one\n\n  \ntwo\n", ["one", "two"]),
        (b"\x1b[1;31mred\x1b[0m\n", ["red"]),
        (b"\r10%\r20%\r30%\n", ["30%"]),
        (b"\r10%\r20%", ["20%"]),
        (b"windows\r\n", ["windows"]),
        (b"caf\xc3\xa9 \xff\n", ["café �"]),
    ],
)
def test_tail_is_what_a_person_saw(written, lines):
    assert tail(written) == lines


@given(st.binary(max_size=3 * TAIL_BYTES))
def test_tail_is_short_and_of_the_end(written):
    lines = tail(written)
    text = [line.decode(errors="replace").rstrip() for line in written[-TAIL_BYTES:].split(b"\n")]
    if not any(char in written for char in (b"\r", b"\x1b")):
        assert lines == [line for line in text if line]


def test_tail_of_a_redirected_stream_is_read_from_its_file(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_bytes(b"x" * TAIL_BYTES + b"\nthe end\n")
    assert WorkerStreams(-1, -1, stderr_file=path).stderr_tail()[-1] == "the end"
    path.unlink()
    assert WorkerStreams(-1, -1, stderr_file=path).stderr_tail() == []


# -- folders --------------------------------------------------------------------------------------


def test_a_run_folder_is_never_used_twice(tmp_path):
    config = LogConfig(folder=str(tmp_path))
    paths = {RunFolder(config, "a job/../x").path for _ in range(5)}
    assert len(paths) == 5
    assert all(path.parent == tmp_path for path in paths)


def test_generations_have_folders_of_their_own_and_the_first_is_not_replaced(tmp_path):
    folder = RunFolder(LogConfig(folder=str(tmp_path)), "job")
    first = folder.generation(0)
    (first / "precious").touch()
    assert folder.generation(1) != first
    with pytest.raises(LaunchError, match="File exists"):
        folder.generation(0)
    folder.close()
    assert (first / "precious").exists()


TEED = StreamChoice(everyone=Streams.OUT)


@pytest.mark.parametrize(
    ("config", "failed", "kept", "is_news"),
    [
        (LogConfig(), False, False, False),
        (LogConfig(), True, True, False),
        (LogConfig(tee=TEED), False, True, True),
        (LogConfig(redirects=TEED), False, True, True),
        (LogConfig(redirects=StreamChoice(by_local_rank={3: Streams.ERR})), False, True, True),
    ],
)
def test_a_private_folder_stays_if_it_holds_something(
    tmp_path, monkeypatch, config, failed, kept, is_news
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder(config, "job")
    assert folder.is_news == is_news
    folder.generation(0)
    if failed:
        folder.keep()
    folder.close()
    assert folder.path.exists() == kept


def test_no_temporary_folder_can_be_made(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nope")
    with pytest.raises(ConfigError, match="TMPDIR: cannot create a temporary folder: No such file"):
        RunFolder(LogConfig(), "job")


def test_without_a_folder_there_is_nothing_to_make():
    folder = RunFolder(LogConfig(folder=os.devnull, redirects=TEED), "job")
    assert folder.path is None
    assert folder.generation(0) is None
    assert not folder.is_news
    folder.close()
    assert Path(os.devnull).exists()


@pytest.mark.parametrize("which", [Streams.OUT, Streams.ERR])
@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("tee", ["0", "3", "1:3"])
@pytest.mark.parametrize("redirects", ["0", "3"])
@pytest.mark.parametrize("ranks", [None, frozenset({0})])
def test_no_stream_is_lost_unless_asked(which, has_folder, tee, redirects, ranks):
    config = LogConfig(
        tee=StreamChoice.parse(tee, "--tee"),
        redirects=StreamChoice.parse(redirects, "--redirects"),
        console_ranks=ranks,
    )
    for rank in (0, 1):
        route = route_of(config, which, rank, has_folder=has_folder, to_descriptor=True)
        teed = bool(config.tee.of(rank) & which)
        in_file_alone = route.to_file and not route.teed
        assert route.teed == teed
        assert not (route.to_file and not has_folder)
        if has_folder and (teed or redirects == "3"):
            assert route.to_file
        # Output that is not only in a file is on the console, unless its rank is to be silent.
        assert in_file_alone or route.shown == (ranks is None or rank in ranks)
        # The report wants the end of stderr: from the file, or as it passes through.
        if which is Streams.ERR:
            assert route.relayed or route.to_file

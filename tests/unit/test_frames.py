"""Frames: however the bytes are cut, the same frames come out; whatever a peer claims, nothing is taken on trust."""

from __future__ import annotations

import random
import resource
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from rallypoint.errors import ProtocolError
from rallypoint.wire import frames
from rallypoint.wire.frames import (
    DESCRIPTOR,
    HEADER,
    INLINE,
    READ_SIZE,
    Frame,
    FrameParser,
    Limits,
    Shared,
    encode,
    header,
)
from rallypoint.wire.recycler import Recycler


U32 = st.integers(0, 0xFFFFFFFF)
SHARED = st.builds(
    Shared, st.integers(0, INLINE - 1), U32, st.integers(0, 2**64 - 1), st.integers(0, 2**20)
)
# Some fit into the parser's own memory, and some do not.
SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(READ_SIZE - 100, READ_SIZE + 100),
    st.integers(READ_SIZE, 3 * READ_SIZE),
)


def filled(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@st.composite
def _frames(draw: st.DrawFn) -> Frame:
    inline = SIZES.map(filled)
    return Frame(
        kind=draw(st.integers(0, 255)),
        flags=draw(st.integers(0, 255)),
        call=draw(st.integers(0, 2**64 - 1)),
        time_left=draw(U32),
        payload=filled(draw(SIZES)),
        buffers=draw(st.lists(st.one_of(SHARED, inline), max_size=4)),
    )


def written(frame: Frame) -> bytes:
    buffers = [each if isinstance(each, Shared) else memoryview(each) for each in frame.buffers]
    return b"".join(
        encode(
            frame.kind,
            frame.call,
            bytes(frame.payload),
            buffers,
            flags=frame.flags,
            time_left=frame.time_left,
        )
    )


def plain(frame: Frame) -> tuple[Any, ...]:
    buffers = [each if isinstance(each, Shared) else bytes(each) for each in frame.buffers]
    return (*frame[:4], bytes(frame.payload), buffers)


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """``data`` in pieces of these sizes, over and over."""
    pieces, at, number = [], 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)] if sizes else len(data)
        pieces.append(data[at : at + size])
        at += size
        number += 1
    return pieces


def receive(parser: FrameParser, data: bytes, most: int) -> list[Frame]:
    """Feed as a socket would: at most ``most`` bytes at once, and no more than there is space for."""
    found: list[Frame] = []
    rest = memoryview(data)
    while rest:
        space = parser.space()
        assert len(space) > 0
        count = min(len(space), len(rest), most)
        space[:count] = rest[:count]
        rest = rest[count:]
        found += parser.received(count)
    return found


# -- however it is cut -----------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(_frames(), max_size=6),
    st.lists(st.integers(1, 100_000), max_size=6).filter(lambda s: not s or sum(s) > 500 * len(s)),
)
def test_pieces_of_any_size_give_the_same_frames(sent: list[Frame], sizes: list[int]) -> None:
    data = b"".join(map(written, sent))
    for pieces in (cut(data, sizes), [data]):
        parser = FrameParser()
        found = [frame for piece in pieces for frame in parser.feed(piece)]
        assert list(map(plain, found)) == list(map(plain, sent))
        assert parser.is_between_frames()


@settings(max_examples=40)
@given(st.lists(_frames(), min_size=1, max_size=4), st.integers(1000, 2 * READ_SIZE))
def test_received_in_place_gives_the_same_frames(sent: list[Frame], most: int) -> None:
    parser = FrameParser()
    found = receive(parser, b"".join(map(written, sent)), most)
    assert list(map(plain, found)) == list(map(plain, sent))


def test_byte_by_byte() -> None:
    sent = [
        Frame(1, 2, 3, 4, b"payload", []),
        Frame(5, 0, 6, 0, b"", [b"inline", Shared(1, 2, 3, 4), b""]),
        Frame(7, 0, 8, 0, b"", []),
    ]
    data = b"".join(map(written, sent))
    parser = FrameParser()
    found = []
    for at in range(len(data)):
        found += parser.feed(data[at : at + 1])
    assert list(map(plain, found)) == list(map(plain, sent))


@pytest.mark.parametrize("gap", [0, 1, 23, 24, 25, 47, 48, 49, 100])
def test_a_frame_across_the_end_of_the_parsers_memory(gap: int) -> None:
    # The first two frames take all but the last ``gap`` bytes, so the third one's header, descriptors or payload
    # lie across the end. The first is complete early: what follows must move to the front.
    first = Frame(1, 0, 1, 0, bytes(READ_SIZE // 2), [])
    second = Frame(2, 0, 2, 0, bytes(READ_SIZE // 2 - 2 * HEADER.size - gap), [])
    for third in (
        Frame(3, 0, 3, 0, filled(1000), []),
        Frame(3, 0, 3, 0, filled(10), [filled(100), Shared(1, 2, 3, 4)]),
        Frame(3, 0, 3, 0, filled(READ_SIZE), []),
    ):
        sent = [first, second, third, first]
        found = receive(FrameParser(), b"".join(map(written, sent)), READ_SIZE)
        assert list(map(plain, found)) == list(map(plain, sent))


def test_many_small_frames_are_read_at_once() -> None:
    parser = FrameParser()
    data = header(1, 2, 0) * 5000
    parser.space()[: len(data)] = data
    assert len(parser.received(len(data))) == 5000


def test_there_is_space_however_little_comes_at_a_time() -> None:
    # A frame as long as the memory, after one a byte shorter than half of it: the space must not run out.
    sent = [
        Frame(1, 0, 1, 0, bytes(READ_SIZE // 2 - HEADER.size - 1), []),
        Frame(2, 0, 2, 0, filled(READ_SIZE - HEADER.size), []),
    ] * 3
    found = receive(FrameParser(), b"".join(map(written, sent)), 4093)
    assert list(map(plain, found)) == list(map(plain, sent))


# -- between frames --------------------------------------------------------------------------------


@settings(max_examples=20)
@given(_frames())
@example(Frame(1, 0, 1, 0, b"", [bytes(10)]))
@example(Frame(1, 0, 1, 0, filled(2 * READ_SIZE), []))
@example(Frame(1, 0, 1, 0, b"", [b""]))
def test_the_stream_may_end_between_frames_only(frame: Frame) -> None:
    data = written(frame)
    places = {1, HEADER.size - 1, HEADER.size, len(data) // 2, len(data) - 1}
    for place in places - {0, len(data)}:
        parser = FrameParser()
        assert parser.is_between_frames()
        assert parser.feed(data[:place]) == []
        assert not parser.is_between_frames(), f"{place} of {len(data)} bytes"
        assert list(map(plain, parser.feed(data[place:]))) == [plain(frame)]
        assert parser.is_between_frames()


# -- memory ----------------------------------------------------------------------------------------


def test_large_buffers_are_received_straight_into_memory_that_was_allocated() -> None:
    lent: list[bytearray] = []

    def allocate(size: int) -> bytearray:
        lent.append(bytearray(size))
        return lent[-1]

    sizes = [3 * READ_SIZE, 0, 5, READ_SIZE + 1]
    frame = Frame(1, 0, 1, 0, b"x", [filled(size) for size in sizes])
    data = memoryview(written(frame))
    parser = FrameParser(allocate=allocate)
    head = HEADER.size + len(sizes) * DESCRIPTOR.size + 1
    assert parser.feed(data[: head + 10]) == []
    # Memory is taken for the first only, not for what a peer merely announces.
    assert [len(each) for each in lent] == sizes[:1]
    space = parser.space()
    assert space.obj is lent[0]
    assert len(space) == sizes[0] - 10
    (found,) = receive(parser, bytes(data[head + 10 :]), 1 << 30)
    assert all(got is ours for got, ours in zip(found.buffers, lent, strict=True))
    assert plain(found) == plain(frame)


def test_memory_may_be_larger_than_was_asked_for_and_of_other_items() -> None:
    lent = memoryview(bytearray(64)).cast("d")
    parser = FrameParser(allocate=lambda _: lent)
    (found,) = parser.feed(b"".join(encode(1, 1, b"", [memoryview(b"abc")])))
    assert found.buffers[0] is lent
    assert lent.cast("B")[:4] == b"abc\0"


def test_a_large_payload_is_received_straight_into_its_memory() -> None:
    parser = FrameParser()
    data = header(1, 1, 4 * READ_SIZE) + bytes(range(256)) * (4 * READ_SIZE // 256)
    assert parser.feed(data[:100]) == []
    space = parser.space()
    assert len(space) == 4 * READ_SIZE - (100 - HEADER.size)
    (found,) = parser.feed(data[100:])
    assert isinstance(found.payload, memoryview)
    assert found.payload.obj is space.obj
    assert found.payload == data[HEADER.size :]


def test_a_payload_is_a_copy_that_later_bytes_do_not_change() -> None:
    parser = FrameParser()
    (first,) = parser.feed(header(1, 1, 4) + b"abcd")
    parser.feed(header(1, 1, 4) + b"xxxx")
    assert first.payload == b"abcd"


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_a_buffer_that_there_is_no_memory_for_ends_the_connection_alone(error: Exception) -> None:
    def allocate(size: int) -> bytearray:
        raise error

    with pytest.raises(ProtocolError, match=r"cannot allocate 5 bytes .* \((no|.*Cannot a)"):
        FrameParser(allocate=allocate).feed(b"".join(encode(1, 1, b"", [memoryview(b"abcde")])))


# -- many descriptors ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10_921, 10_922, 10_923, 16_384])
@pytest.mark.parametrize("most", [READ_SIZE, 5000])
def test_more_descriptors_than_fit_into_the_parsers_memory(count: int, most: int) -> None:
    rng = random.Random(count)
    buffers: list[Any] = [
        Shared(number, rng.getrandbits(32), rng.getrandbits(64), rng.getrandbits(20))
        for number in range(count)
    ]
    buffers[7], buffers[-1] = b"seven", b"last"
    frame = Frame(9, 8, 7, 6, b"between the two", buffers)
    data = written(frame)
    parser = FrameParser()
    found = receive(parser, data + data, most)
    assert list(map(plain, found)) == [plain(frame)] * 2
    assert parser.is_between_frames()


# -- limits ----------------------------------------------------------------------------------------


def test_what_is_exactly_at_the_limits_is_taken() -> None:
    limits = Limits(payload=10, buffers=2, buffer=30)
    frame = Frame(1, 0, 1, 0, bytes(10), [bytes(20), Shared(1, 0, 0, 10)])
    assert list(map(plain, FrameParser(limits).feed(written(frame)))) == [plain(frame)]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(1, 0, 1, 0, bytes(11), []), r"a frame of 11 bytes with 0 buffers, .* 10 bytes"),
        (
            Frame(1, 0, 1, 0, b"", [b"", b"", b""]),
            r"a frame of 0 bytes with 3 buffers, .* 2 buffers",
        ),
        (Frame(1, 0, 1, 0, b"", [bytes(31)]), r"31 bytes in buffers, .* is 30"),
        (Frame(1, 0, 1, 0, b"", [bytes(16), bytes(15)]), r"31 bytes in buffers, .* is 30"),
        (Frame(1, 0, 1, 0, b"", [Shared(0, 0, 0, 31)]), r"31 bytes in buffers, .* is 30"),
        (Frame(1, 0, 1, 0, b"", [Shared(0, 0, 0, 2**64 - 1)]), r"bytes in buffers, .* is 30"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_before_any_memory_is_taken(
    frame: Frame, message: str
) -> None:
    limits = Limits(payload=10, buffers=2, buffer=30)
    head = HEADER.size + len(frame.buffers) * DESCRIPTOR.size

    def allocate(size: int) -> bytearray:
        pytest.fail(f"{size} bytes were allocated")

    parser = FrameParser(limits, allocate)
    with pytest.raises(ProtocolError, match=message):
        parser.feed(written(frame)[:head])


def test_frames_before_one_beyond_the_limits_are_not_delivered_twice() -> None:
    parser = FrameParser(Limits(payload=10))
    (first,) = parser.feed(header(1, 1, 3) + b"abc" + header(1, 2, 11)[:20])
    assert first.call == 1
    with pytest.raises(ProtocolError):
        parser.feed(header(1, 2, 11)[20:])


def test_what_is_only_announced_takes_no_memory() -> None:
    # A bytearray would be zeroed, byte by byte, because of a header of 24 bytes.
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1])
        parsers = []
        for _ in range(20):
            parsers.append(FrameParser(allocate=Recycler().allocate))
            assert parsers[-1].feed(header(1, 1, 1 << 30)) == []
            assert not parsers[-1].is_between_frames()
        statm.seek(0)
        assert int(statm.read().split()[1]) - before < (64 << 20) // resource.getpagesize()


# -- damage ----------------------------------------------------------------------------------------

HEADERS = st.builds(
    HEADER.pack,
    st.one_of(st.integers(0, 300), U32),
    st.integers(0, 255),
    st.integers(0, 255),
    st.one_of(st.integers(0, 3), st.integers(0, 0xFFFF)),
    st.integers(0, 2**64 - 1),
    U32,
    U32,
)


@settings(max_examples=200)
@given(st.lists(st.one_of(HEADERS, st.binary(max_size=200)), max_size=8), st.integers(1, 300))
def test_random_bytes_give_frames_or_a_protocol_error_and_nothing_else(
    pieces: list[bytes], size: int
) -> None:
    data = b"".join(pieces)
    limits = Limits(payload=1 << 20, buffers=100, buffer=1 << 20)
    parser = FrameParser(limits)
    found: list[Frame] = []
    try:
        for piece in cut(data, [size]):
            found += parser.feed(piece)
    except ProtocolError:
        return
    # Whatever comes out is what went in: written again, it is the start of the data, except for spare bytes.
    again = b"".join(map(written, found))
    assert len(again) <= len(data)
    assert [plain(each) for each in FrameParser(limits).feed(again)] == list(map(plain, found))


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**64 - 1), U32, U32)
def test_every_field_of_a_header_comes_through(
    kind: int, flags: int, call: int, time_left: int, spare: int
) -> None:
    data = HEADER.pack(2, kind, flags, 0, call, time_left, spare) + b"ab"
    assert FrameParser().feed(data) == [Frame(kind, flags, call, time_left, b"ab", ())]


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**64 - 1), U32, U32)
def test_a_header_is_what_encode_begins_with(
    kind: int, flags: int, call: int, time_left: int, size: int
) -> None:
    size %= 1000
    (data,) = encode(kind, call, bytes(size), flags=flags, time_left=time_left)
    assert bytes(data[: HEADER.size]) == header(kind, call, size, flags=flags, time_left=time_left)


def test_the_format_is_the_one_that_was_released() -> None:
    assert b"".join(
        encode(
            7,
            0x0102030405060708,
            b"pay",
            [memoryview(b"in"), Shared(9, 8, 7, 6)],
            flags=3,
            time_left=4000,
        )
    ) == bytes.fromhex(
        "03000000 07 03 0200 0807060504030201 a00f0000 00000000"
        "0200000000000000 0000000000000000 ffffffff 00000000"
        "0600000000000000 0700000000000000 09000000 08000000"
        "706179 696e"
    )


def test_buffers_are_not_copied_on_their_way_out() -> None:
    memory = memoryview(bytearray(10))
    pieces = encode(1, 1, b"payload", [memory, Shared(1, 1, 1, 1), memory])
    assert [each is memory for each in pieces] == [False, True, True]


def test_it_is_pure() -> None:
    names = set(vars(frames))
    assert not names & {"os", "time", "socket", "threading", "torch"}

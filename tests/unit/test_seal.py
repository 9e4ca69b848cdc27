"""Sealed streams: what one end has sent comes out, and nothing else."""

from __future__ import annotations

import ctypes
import itertools
import resource
import socket
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers import aead
from hypothesis import assume, given, settings, strategies as st

from rallypoint.errors import FrameChanged
from rallypoint.wire import bulk
from rallypoint.wire.buffers import address_of
from rallypoint.wire.frames import READ_SIZE, Frame, FrameParser, encode
from rallypoint.wire.seal import LENGTH, MOST, OVERHEAD, SHORT, Keys, SealedParser, Sealer
from rallypoint.wire.sealed_line import SealedLine, SealedSocket


SECRET = b"known to both ends alone"
NAMES = bulk.available()


def keys(name: str = NAMES[0], direction: str = "there", *transcript: bytes) -> Keys:
    return Keys.of(SECRET, name, direction, transcript)


def sealed(data: bytes, cuts: list[int], name: str = NAMES[0]) -> list[bytes]:
    """Records that hold ``data``, cut at these places."""
    sealer = Sealer(keys(name))
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    records = []
    for start, stop in itertools.pairwise(edges):
        for at in range(start, stop, MOST):
            part = data[at : min(stop, at + MOST)]
            if len(part) > SHORT:
                records.append(bytes(sealer.long([memoryview(part)])))
            else:
                records.append(sealer.short(part))
    return records


def taken(frame: Frame) -> tuple[object, ...]:
    return (*frame[:4], bytes(frame.payload), [bytes(each) for each in frame.buffers])


def pattern(size: int, start: int) -> bytes:
    return bytes((start + each) % 251 for each in range(min(size, 251))) * (size // 251 + 1)


@st.composite
def messages(draw: st.DrawFn) -> list[tuple[bytes, list[bytes]]]:
    sizes = st.one_of(
        st.integers(0, 60),
        st.sampled_from([SHORT, SHORT + 1, 20_000, READ_SIZE, READ_SIZE + 1, 700_000]),
    )
    return [
        (
            pattern(payload, number)[:payload],
            [pattern(each, number + 1)[:each] for each in buffers],
        )
        for number, (payload, buffers) in enumerate(
            draw(st.lists(st.tuples(sizes, st.lists(sizes, max_size=3)), min_size=1, max_size=4))
        )
    ]


def bytes_of(sent: list[tuple[bytes, list[bytes]]]) -> bytes:
    return b"".join(
        b"".join(encode(1, number, payload, [memoryview(each) for each in buffers]))
        for number, (payload, buffers) in enumerate(sent)
    )


def expected(sent: list[tuple[bytes, list[bytes]]]) -> list[tuple[object, ...]]:
    return [(1, 0, number, 0, payload, buffers) for number, (payload, buffers) in enumerate(sent)]


def read(parser: FrameParser, data: bytes, sizes: list[int]) -> list[Frame]:
    """Read as from a socket that delivers these numbers of bytes at a time."""
    frames, rest, turn = [], memoryview(data), 0
    while rest:
        space = parser.space()
        assert space
        count = min(len(space), len(rest), sizes[turn % len(sizes)])
        turn += 1
        space[:count] = rest[:count]
        rest = rest[count:]
        frames += parser.received(count)
    return frames


READS = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([4096, 65_536, 300_000, 1 << 20])),
    min_size=1,
    max_size=5,
)
CUTS = st.lists(st.integers(0, 1 << 22), max_size=6)


@pytest.mark.parametrize("name", sorted(NAMES))
@settings(deadline=None, max_examples=60)
@given(sent=messages(), cuts=CUTS, sizes=READS)
def test_frames_come_out_however_the_stream_is_cut(
    name: str, sent: list[tuple[bytes, list[bytes]]], cuts: list[int], sizes: list[int]
) -> None:
    data = bytes_of(sent)
    assume(min(sizes) > 40 or len(data) < 50_000)
    parser = SealedParser(keys(name))
    got = read(parser, b"".join(sealed(data, cuts, name)), sizes)
    assert [taken(each) for each in got] == expected(sent)
    assert parser.is_between_frames()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_whatever_is_changed_is_refused_and_nothing_else_comes_out(data: st.DataObject) -> None:
    small = st.lists(
        st.tuples(st.integers(0, 60), st.lists(st.integers(0, 30), max_size=2)),
        min_size=2,
        max_size=5,
    )
    sent = [
        (pattern(payload, 1)[:payload], [pattern(each, 2)[:each] for each in buffers])
        for payload, buffers in data.draw(small)
    ]
    if data.draw(st.booleans()):
        sent.insert(data.draw(st.integers(0, len(sent))), (b"x", [pattern(300_000, 3)]))
    records = sealed(bytes_of(sent), data.draw(CUTS))
    assume(len(records) > 1)
    which = data.draw(st.integers(0, len(records) - 1))
    other = data.draw(st.integers(0, len(records) - 1))
    match data.draw(st.sampled_from(["flip", "drop", "insert", "swap", "repeat", "leave out"])):
        case "flip":
            at = data.draw(st.integers(0, len(records[which]) - 1))
            changed = bytearray(records[which])
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
            records[which] = bytes(changed)
        case "drop":
            at = data.draw(st.integers(0, len(records[which]) - 1))
            records[which] = records[which][:at] + records[which][at + 1 :]
        case "insert":
            at = data.draw(st.integers(0, len(records[which])))
            records[which] = records[which][:at] + b"\0" + records[which][at:]
        case "swap":
            assume(which != other)
            records[which], records[other] = records[other], records[which]
            which = min(which, other)
        case "repeat":
            records.insert(which + 1, records[which])
            which += 1
        case "leave out":
            assume(which < len(records) - 1)
            del records[which]
    parser, came = SealedParser(keys()), []
    refused = False
    # More data follows: a record whose length was raised is refused after at most one record's bytes.
    stream = memoryview(b"".join(records) + bytes(MOST + OVERHEAD))
    while stream and not refused:
        space = parser.space()
        count = min(len(space), len(stream), 1000)
        space[:count] = stream[:count]
        stream = stream[count:]
        try:
            came += parser.received(count)
        except FrameChanged:
            refused = True
    assert refused
    assert [taken(each) for each in came] == expected(sent)[: len(came)]


@pytest.mark.parametrize("size", [10, SHORT + 1, MOST, 300_000])
def test_another_connection_s_or_the_other_direction_s_record_is_refused(size: int) -> None:
    data = b"".join(encode(1, 1, bytes(size)))
    there = b"".join(sealed(data, []))
    for other in (keys(NAMES[0], "back"), keys(NAMES[0], "there", b"another handshake")):
        with pytest.raises(FrameChanged, match="altered in transit"):
            SealedParser(other).feed(there)
    assert SealedParser(keys()).feed(there)


def test_nothing_is_allocated_for_what_is_not_signed() -> None:
    asked = []

    def allocate(size: int) -> bytearray:
        asked.append(size)
        return bytearray(size)

    head = b"".join(encode(1, 1, b"", [memoryview(bytes(1 << 20))]))[:48]
    record = bytearray(Sealer(keys()).short(head))
    record[-1] ^= 1
    with pytest.raises(FrameChanged):
        SealedParser(keys(), allocate=allocate).feed(record)
    with pytest.raises(FrameChanged):
        SealedParser(keys(), allocate=allocate).feed(LENGTH.pack(MOST + 1))
    assert not asked
    record[-1] ^= 1
    SealedParser(keys(), allocate=allocate).feed(record)
    assert asked == [1 << 20]


def test_a_large_buffer_is_received_where_it_stays() -> None:
    """Copies would cost as much as the MAC."""
    sent = pattern(4 * MOST, 0)[: 4 * MOST]
    pieces = encode(1, 1, b"", [memoryview(sent)])
    sealer = Sealer(keys())
    data = sealer.short(pieces[0]) + b"".join(
        bytes(sealer.long([memoryview(sent)[at : at + MOST]])) for at in range(0, len(sent), MOST)
    )
    parser, rest, direct, frames = SealedParser(keys()), memoryview(data), 0, []
    while rest:
        space = parser.space()
        count = min(len(space), len(rest))
        if space.obj is not parser._view.obj and count > OVERHEAD:
            direct += count
        space[:count] = rest[:count]
        rest = rest[count:]
        frames += parser.received(count)
    assert bytes(frames[0].buffers[0]) == sent
    assert direct >= 2 * MOST


def test_lines_over_sealed_sockets_carry_frames_while_the_kernel_takes_little() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender = SealedLine(SealedSocket(ours, keys()), SealedParser(keys(NAMES[0], "back")), "tcp")
    receiver = SealedLine(SealedSocket(theirs, keys(NAMES[0], "back")), SealedParser(keys()), "tcp")
    try:
        tensor = bytearray(pattern(3_000_000, 5)[:3_000_000])
        sent = [(b"a", []), (b"b" * 100_000, [bytes(tensor), b"", b"small"]), (b"c", [])]
        for number, (payload, buffers) in enumerate(sent):
            sender.send(encode(1, number, payload, [memoryview(each) for each in buffers]))
        sender.send_later(b"".join(encode(1, 3, b"kept")))
        sender.send_later(b"".join(encode(1, 4, b"kept, too")))
        came: list[Frame] = []
        while len(came) < 5:
            sender.flush()
            came += receiver.read_now()
        assert [taken(each) for each in came] == expected(
            [*sent, (b"kept", []), (b"kept, too", [])]
        )
        assert not sender.is_full
    finally:
        for each in (sender, receiver):
            each.shut()
            each.close()


def test_bytes_that_their_owner_changes_meanwhile_do_not_end_the_connection() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender = SealedLine(SealedSocket(ours, keys()), SealedParser(keys(NAMES[0], "back")), "tcp")
    receiver = SealedLine(SealedSocket(theirs, keys(NAMES[0], "back")), SealedParser(keys()), "tcp")
    try:
        tensor = memoryview(bytearray(1_000_000))
        # Like a tensor's memory: not a bytearray, which is copied.
        view = memoryview((ctypes.c_char * len(tensor)).from_buffer(tensor)).cast("B")
        assert not sender.send(encode(1, 1, b"", [view]))
        tensor[:] = b"\1" * len(tensor)
        came: list[Frame] = []
        while not came:
            sender.flush()
            came += receiver.read_now()
        assert set(bytes(came[0].buffers[0])) == {0, 1}
    finally:
        for each in (sender, receiver):
            each.shut()
            each.close()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_long_values_do_not_depend_on_how_the_bytes_are_given(name: str) -> None:
    data = pattern(100_000, 9)[:100_000]
    key = bytes(range(bulk.KEY_BYTES))
    values = set()
    for cut in (1, 15, 16, 17, 4096, 100_000):
        value = bulk.new(name, key)
        value.begin(7)
        for at in range(0, len(data), cut):
            value.update(memoryview(data)[at : at + cut])
        values.add(value.finish())
    assert len(values) == 1


def test_this_python_computes_both_fast_ones() -> None:
    """Every Python that has torch wheels can do it; without them sealed TCP is a third as fast."""
    assert sorted(NAMES[:-1]) == [bulk.Gmac.name, bulk.Poly1305.name]
    assert NAMES[-1] == bulk.Sha256.name


@pytest.mark.parametrize(
    ("kind", "cipher", "key_bytes"),
    [(bulk.Gmac, aead.AESGCM, 16), (bulk.Poly1305, aead.ChaCha20Poly1305, 32)],
)
def test_they_are_what_others_compute(kind: type[bulk.Bulk], cipher: Any, key_bytes: int) -> None:
    data, key = pattern(70_001, 4)[:70_001], bytes(range(bulk.KEY_BYTES))
    ours = kind(key)  # type: ignore[call-arg]  # the protocol says nothing about it
    for number in (1, 2**40):
        ours.begin(number)
        ours.update(memoryview(data))
        expected = cipher(key[:key_bytes]).encrypt(number.to_bytes(12, "big"), b"", data)
        assert ours.finish() == expected


def test_an_openssl_without_one_of_them_has_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    crypto = bulk._crypto()
    assert crypto is not None
    monkeypatch.delitem(crypto.ciphers, bulk.Poly1305.cipher)
    assert bulk.available.__wrapped__() == (bulk.Gmac.name, bulk.Sha256.name)
    monkeypatch.delitem(crypto.ciphers, bulk.Gmac.cipher)
    assert bulk.available.__wrapped__() == (bulk.Sha256.name,)


@pytest.mark.parametrize("at", [0, 1, 64, 4000, 4095])
def test_a_long_record_lies_in_its_page_as_its_content_does(at: int) -> None:
    """Otherwise the copy is several times slower, depending on where a tensor happens to lie."""
    memory = memoryview(bytearray(MOST + 4096))
    record = Sealer(keys()).long([memory[at : at + MOST]])
    distance = address_of(record[LENGTH.size :]) - address_of(memory[at:])
    assert distance % 4096 == 0
    assert len(record) == MOST + OVERHEAD


def test_only_large_records_take_memory_that_is_worth_keeping() -> None:
    """A tensor of a few KiB must not pay for pages that the largest record needs."""
    asked: list[int] = []

    def allocate(size: int) -> bytearray:
        asked.append(size)
        return bytearray(size)

    sealer, data = Sealer(keys(), allocate), memoryview(bytearray(2 * MOST))
    for size in (SHORT + 1, 20_000, 8192):
        sealer.long([data[:size]])
        sealer.release()
    assert asked == []
    sealer.long([data[:MOST]])
    sealer.long([data[:MOST]])
    assert [size >= MOST + OVERHEAD for size in asked] == [True]


def test_an_idle_connection_takes_few_pages() -> None:
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1])
        parsers = [SealedParser(keys()) for _ in range(50)]
        for each in parsers:
            record = Sealer(keys()).short(b"".join(encode(1, 1, b"abc", [])))
            space = each.space()
            space[: len(record)] = record
            assert len(each.received(len(record))) == 1
        statm.seek(0)
        pages = int(statm.read().split()[1]) - before
    assert pages * resource.getpagesize() < 50 * (64 << 10)

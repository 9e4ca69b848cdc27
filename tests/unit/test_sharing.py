"""Shared memory in both directions of a connection: descriptors travel beside the messages, in whatever order those are read."""

from __future__ import annotations

import gc
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch

from pace import pace
from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, ProtocolError
from rallypoint.wire.frames import INLINE, Shared
from rallypoint.wire.sharing import Sharing
from rallypoint.wire.shm import SMALLEST, Budget, Pool


KB64 = SMALLEST
MB = 1 << 20
ENTRY = struct.Struct("<QI")
NEW = Shared(0, 0, 1, KB64)


class Ends:
    def __init__(self, limit: int = 1 << 30) -> None:
        self.budget = Budget(limit)
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.a, self.b = Sharing(a, self.budget), Sharing(b, self.budget)

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture(autouse=True)
def _descriptors_and_mappings_are_returned() -> Iterator[None]:
    before = descriptors(), mappings()
    yield
    gc.collect()
    assert (descriptors(), mappings()) == before


@pytest.fixture
def ends(_descriptors_and_mappings_are_returned: None) -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()
    assert made.budget.used == 0
    vars(made).clear()  # pytest keeps a reference to it


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:rallypoint" in each for each in file)


def send(sharing: Sharing, *buffers: bytes) -> list[Any]:
    """What the message contains; buffers that are not shared are copied, as over a socket."""
    placed, _ = sharing.place([memoryview(each) for each in buffers])
    return [each if isinstance(each, Shared) else bytes(each) for each in placed]


def text(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


# -- what it is for --------------------------------------------------------------------------------


def test_copies_that_take_too_long_end_and_keep_nothing(ends: Ends) -> None:
    large = memoryview(bytearray(40 * MB))
    with pytest.raises(DeadlineExceeded, match=r"0 of 41943040 bytes could be copied"):
        ends.a.place([memoryview(bytearray(KB64)), large], deadline=Deadline(0.0))
    found = ends.a.statistics()
    assert found["shared_leased"] == 0
    placed, _ = ends.a.place([large], deadline=Deadline(60.0))
    assert ends.b.take(placed)[0] == large
    assert ends.a.statistics()["shared_segments"] == found["shared_segments"]


def test_both_directions_at_once(ends: Ends) -> None:
    there, back = text(3 * MB, 1), text(MB + 5, 2)
    to_b, to_a = send(ends.a, there), send(ends.b, back)
    assert [type(each) for each in to_b + to_a] == [Shared, Shared]
    (got_b,), (got_a,) = ends.b.take(to_b), ends.a.take(to_a)
    assert (bytes(got_b), bytes(got_a)) == (there, back)
    got_b[:3] = b"own"
    assert bytes(got_a[:3]) == back[:3]


def test_small_buffers_travel_in_the_message_and_the_order_stays(ends: Ends) -> None:
    buffers = [text(KB64 - 1, 1), text(KB64, 2), b"", text(5, 3), text(2 * KB64, 4)]
    message = send(ends.a, *buffers)
    assert [isinstance(each, Shared) for each in message] == [False, True, False, False, True]
    assert list(map(bytes, ends.b.take(message))) == buffers


def test_a_segment_is_announced_once_and_used_again(ends: Ends) -> None:
    for number in range(5):
        (shared,) = message = send(ends.a, text(KB64, number))
        assert shared == Shared(0, 0, int(number == 0), KB64)
        (got,) = ends.b.take(message)
        assert bytes(got) == text(KB64, number)
        del got
    figures = ends.a.statistics()
    assert (figures["shared_segments"], figures["shared_leased"]) == (1, 0)
    assert ends.b.statistics()["mapped_segments"] == 1


def test_no_descriptor_stays_open_once_it_was_taken(ends: Ends) -> None:
    warm_up = ends.b.take(send(ends.a, text(KB64)))  # so that the control page has arrived
    before = len(descriptors())
    got = ends.b.take(send(ends.a, *[text(KB64, seed) for seed in range(20)]))
    assert len(descriptors()) == before
    assert len(got) == 20
    del warm_up


def test_a_tensor_holds_its_memory_and_no_longer(ends: Ends) -> None:
    (got,) = ends.b.take(send(ends.a, text(KB64)))
    tensor = torch.frombuffer(got, dtype=torch.uint8)[10:20]
    del got
    assert ends.a.statistics()["shared_leased"] == 1
    assert bytes(tensor.numpy()) == text(KB64)[10:20]
    del tensor
    assert ends.a.statistics()["shared_leased"] == 0


def test_memory_beyond_the_budget_travels_in_the_message() -> None:
    ends = Ends(limit=2 * KB64)
    message = send(ends.a, *[text(KB64, seed) for seed in range(3)])
    assert [isinstance(each, Shared) for each in message] == [True, True, False]
    assert list(map(bytes, ends.b.take(message))) == [text(KB64, seed) for seed in range(3)]
    ends.close()


# -- the order of messages -------------------------------------------------------------------------


def test_messages_that_overtake_each_other_find_their_own_memory(ends: Ends) -> None:
    # Placed in one order, sent in another: descriptors arrive in the order in which they were placed.
    messages = [send(ends.a, text(KB64, 2 * n), text(3 * KB64, 2 * n + 1)) for n in range(6)]
    order = [3, 0, 5, 4, 1, 2]
    for number in order:
        got = ends.b.take(messages[number])
        assert bytes(got[0]) == text(KB64, 2 * number)
        assert bytes(got[1]) == text(3 * KB64, 2 * number + 1)


def test_messages_that_are_read_by_many_threads_at_once(ends: Ends) -> None:
    messages = [send(ends.a, text(KB64 + seed, seed)) for seed in range(40)]
    random.Random(1).shuffle(messages)
    failures: list[BaseException] = []
    ready = threading.Barrier(4)

    def take(mine: list[list[Any]]) -> None:
        try:
            ready.wait()
            for message in mine:
                (got,) = ends.b.take(message)
                assert bytes(got) == text(len(got), len(got) - KB64)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=take, args=(messages[n::4],)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []
    assert ends.a.statistics()["shared_leased"] == 0


def test_messages_that_are_placed_by_many_threads_at_once(ends: Ends) -> None:
    messages: list[tuple[int, list[Any]]] = []

    def place(seed: int) -> None:
        seeds = range(100 * seed, 100 * seed + 10)
        messages.extend((each, send(ends.a, text(KB64, each))) for each in seeds)

    threads = [threading.Thread(target=place, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for seed, message in messages:
        (got,) = ends.b.take(message)
        assert bytes(got) == text(KB64, seed)


def test_more_new_segments_than_the_side_socket_holds_do_not_wait_for_a_reader(ends: Ends) -> None:
    # So many large tensors in one call: the other end reads descriptors only when it has the message.
    count = 600
    texts = [text(KB64, seed) for seed in range(count)]
    began = time.monotonic()
    message = send(ends.a, *texts)
    assert (
        time.monotonic() - began < 30.0 * pace()
    )  # nobody reads, so a send that waited would wait forever
    shared = sum(isinstance(each, Shared) for each in message)
    assert 100 < shared < count
    got = ends.b.take(message)
    assert all(bytes(each) == text(KB64, seed) for seed, each in enumerate(got))
    # What could not be announced is not lost: the next message announces it.
    again = send(ends.a, *[text(KB64, seed) for seed in range(10)])
    assert all(isinstance(each, Shared) for each in again)
    assert [bytes(each) for each in ends.b.take(again)] == [text(KB64, seed) for seed in range(10)]


# -- blocks that go home ----------------------------------------------------------------------------


def arrive(ends: Ends, data: bytes) -> torch.Tensor:
    """What ``a`` sends, as a tensor in ``b``."""
    return torch.frombuffer(ends.b.take(send(ends.a, data))[0], dtype=torch.uint8)


def answer_with(ends: Ends, tensor: torch.Tensor, home: int | None = None) -> Shared:
    view = memoryview(tensor.numpy())
    at = tensor.data_ptr() if home is None else home
    (placed,), _ = ends.b.place([view], home=at)
    assert isinstance(placed, Shared)
    return placed


def test_a_block_goes_home_with_what_is_in_it_now(ends: Ends) -> None:
    tensor = arrive(ends, text(KB64))
    tensor[:3] = 7
    message = answer_with(ends, tensor)
    assert message == Shared(0, 1, 0, KB64)
    assert ends.b.statistics()["shared_segments"] == 0
    # Nobody may refill it while it travels or is in use here; the other end's remaining view ends silently.
    del tensor
    assert ends.a.statistics()["shared_leased"] == 1
    (back,) = ends.a.take([message])
    assert bytes(back) == b"\7\7\7" + text(KB64)[3:]
    (other,) = ends.b.take(send(ends.a, text(KB64, 2)))
    assert ends.a.statistics()["shared_leased"] == 2
    assert bytes(back[:3]) == b"\7\7\7"
    del back, other
    figures = ends.a.statistics()
    assert (figures["shared_segments"], figures["shared_leased"]) == (2, 0)


def test_a_block_goes_there_and_back_again_and_again(ends: Ends) -> None:
    for number in range(20):
        tensor = arrive(ends, text(KB64, number))
        tensor += 1
        (back,) = ends.a.take([answer_with(ends, tensor)])
        assert bytes(back) == bytes((each + 1) % 256 for each in text(KB64, number))
        del tensor, back
    assert ends.a.statistics()["shared_segments"] == 1
    assert ends.b.statistics()["shared_segments"] == 0


def test_what_others_use_as_well_is_copied(ends: Ends) -> None:
    (view,) = ends.b.take(send(ends.a, text(KB64)))
    tensors = [torch.frombuffer(view, dtype=torch.uint8) for _ in range(2)]
    assert answer_with(ends, tensors[0]).slot == 0
    del tensors[1]
    assert answer_with(ends, tensors[0]).slot == 0
    del view
    assert answer_with(ends, tensors[0]).slot == 1


def test_what_is_not_all_of_a_block_is_copied(ends: Ends) -> None:
    tensor = arrive(ends, text(2 * KB64))
    assert answer_with(ends, tensor[:KB64]).slot == 0
    assert answer_with(ends, tensor[KB64:]).slot == 0
    assert answer_with(ends, tensor[KB64:], home=tensor.data_ptr()).slot == 0
    assert answer_with(ends, torch.zeros(KB64, dtype=torch.uint8)).slot == 0
    assert answer_with(ends, tensor, home=0).slot == 0


def test_a_block_that_comes_home_unwanted_is_free(ends: Ends) -> None:
    message = answer_with(ends, arrive(ends, text(KB64)))
    ends.a.discard([message])
    assert ends.a.statistics()["shared_leased"] == 0
    ends.a.discard([message])
    with pytest.raises(ProtocolError, match=r"none was returned"):
        ends.a.take([message])


@pytest.mark.parametrize("segment", [0, 1, 5000])
def test_a_block_that_nobody_sends_home_does_not_come(ends: Ends, segment: int) -> None:
    kept = ends.b.take(send(ends.a, text(KB64)))
    with pytest.raises(ProtocolError, match=r"none was returned"):
        ends.a.take([Shared(segment, 1, 0, KB64)])
    assert bytes(kept[0]) == text(KB64)


@pytest.mark.parametrize("size", [0, KB64 + 1, 2**64 - 1])
def test_a_block_that_comes_home_larger_than_it_is(ends: Ends, size: int) -> None:
    message = answer_with(ends, arrive(ends, text(KB64)))
    with pytest.raises(ProtocolError, match=r"expected 1 to 65536"):
        ends.a.take([message._replace(size=size)])


def test_a_block_of_nobody(ends: Ends) -> None:
    (shared,) = send(ends.a, text(KB64))
    with pytest.raises(ProtocolError, match=r"slot 2"):
        ends.b.take([shared._replace(slot=2)])


def test_a_peer_cannot_free_what_has_come_home(ends: Ends) -> None:
    message = answer_with(ends, arrive(ends, text(KB64)))
    (back,) = ends.a.take([message])
    assert ends.b._mapped is not None
    for state in (0, 5):
        ends.b._mapped._page[0] = state
        with pytest.raises(ProtocolError, match=r"none was returned"):
            ends.a.take([message])
        (other,) = send(ends.a, text(KB64, 3))
        assert other.segment != 0
        assert bytes(back) == text(KB64)
    del back
    assert ends.a.statistics()["shared_leased"] == 2  # the two that have just been sent


def test_what_has_come_home_outlives_the_connection(ends: Ends) -> None:
    (back,) = ends.a.take([answer_with(ends, arrive(ends, text(KB64)))])
    ends.close()
    assert bytes(back) == text(KB64)


# -- messages that are not wanted ------------------------------------------------------------------


def test_a_message_that_is_discarded_gives_its_memory_back(ends: Ends) -> None:
    for _ in range(3):
        message = send(ends.a, text(KB64), b"small", text(2 * KB64))
        ends.b.discard(message)
        assert ends.a.statistics()["shared_leased"] == 0
    # The announcement was read nevertheless.
    (got,) = ends.b.take(send(ends.a, text(KB64, 9)))
    assert bytes(got) == text(KB64, 9)


def test_discarding_nonsense_does_nothing(ends: Ends) -> None:
    (kept,) = ends.b.take(send(ends.a, text(KB64)))
    ends.b.discard([Shared(0, 0, 0, KB64), Shared(77, 0, 0, 5), Shared(INLINE - 1, 0, 0, 5), b"x"])
    assert bytes(kept) == text(KB64)
    assert ends.a.statistics()["shared_leased"] == 1


def test_a_message_that_is_not_sent_after_all_confuses_none_that_is(ends: Ends) -> None:
    (warm,) = ends.b.take(send(ends.a, text(KB64)))
    del warm
    _, blocks = ends.a.place([memoryview(text(KB64, 1)), memoryview(text(2 * KB64, 2))])
    ends.a.take_back(blocks)
    # The other end knew the first; the second's announcement will never be asked for.
    assert ends.a.statistics()["shared_leased"] == 1
    message = send(ends.a, text(KB64, 3), text(2 * KB64, 4), text(2 * KB64, 5))
    got = ends.b.take(message)
    assert [bytes(each) for each in got] == [
        text(KB64, 3),
        text(2 * KB64, 4),
        text(2 * KB64, 5),
    ]


# -- the other end lies ----------------------------------------------------------------------------


class Stranger:
    """The other end of a side socket, driven by hand."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.side, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sharing = Sharing(theirs, budget or Budget(1 << 30))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.side.close()
        self.sharing.close()

    def send(self, data: bytes, fds: list[int]) -> None:
        socket.send_fds(self.side, [data], fds)

    def control(self) -> None:
        """Send a valid control page."""
        pool, file = Pool.open(Budget(1))
        self.send(ENTRY.pack(0, INLINE), [file.fileno()])
        pool.close()

    def fails(self, pattern: str, shared: Shared = NEW) -> None:
        with pytest.raises(ProtocolError, match=pattern):
            self.sharing.take([shared])


def memfd(size: int) -> int:
    fd = os.memfd_create("rallypoint")
    os.ftruncate(fd, size)
    return fd


def test_a_segment_before_the_control_page() -> None:
    with Stranger() as stranger:
        fd = memfd(KB64)
        stranger.send(ENTRY.pack(KB64, 0), [fd])
        os.close(fd)
        stranger.fails(r"before its control page")


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"", 0), (b"x", 0), (b"x", 1), (ENTRY.pack(0, INLINE), 0), (ENTRY.pack(0, INLINE), 2)],
)
def test_entries_of_other_sizes_and_other_numbers_of_descriptors(data: bytes, count: int) -> None:
    with Stranger() as stranger:
        fd = memfd(KB64)
        stranger.send(data, [fd] * count)
        os.close(fd)
        # Of two descriptors, the kernel gives us only the first, which is not sealed.
        stranger.fails(r"descriptors for shared memory|not sealed")


def test_an_entry_that_is_too_long_is_cut_and_its_file_is_looked_at_all_the_same() -> None:
    with Stranger() as stranger:
        fd = memfd(KB64)
        stranger.send(ENTRY.pack(0, INLINE) + b"and more", [fd])
        os.close(fd)
        stranger.fails(r"the control page as a file that is not sealed")


@pytest.mark.parametrize("what", ["pipe", "folder", "socket", "unsealed", "short"])
def test_descriptors_of_other_things(what: str) -> None:
    pipe, folder = os.pipe(), os.open("/", os.O_RDONLY)
    files = {"pipe": pipe[0], "folder": folder, "unsealed": memfd(MB), "short": memfd(10)}
    with Stranger() as stranger:
        stranger.control()
        stranger.send(ENTRY.pack(KB64, 0), [files.get(what, stranger.side.fileno())])
        stranger.fails(r"segment 0 .*as a file")
    for fd in (*pipe, folder, files["unsealed"], files["short"]):
        os.close(fd)


@pytest.mark.parametrize("number", [4096, 2**31, INLINE - 1, INLINE])
def test_segments_of_numbers_that_there_are_not(number: int) -> None:
    with Stranger() as stranger:
        stranger.control()
        fd = memfd(KB64)
        stranger.send(ENTRY.pack(KB64, number), [fd])
        os.close(fd)
        stranger.fails(r"expected a number from 0", Shared(number, 0, 1, KB64))


def test_a_segment_that_is_named_and_never_announced_is_not_waited_for() -> None:
    # Waiting would hold a pool thread: a peer that lies would stop everybody else's calls.
    with Stranger() as stranger:
        stranger.control()
        stranger.fails(r"in unknown segment", Shared(0, 0, 0, KB64))
        began = time.monotonic()
        stranger.fails(r"received no descriptor", Shared(0, 0, 1, KB64))
        assert time.monotonic() - began < 0.5 * pace()


def test_an_end_that_has_gone_is_noticed_at_once() -> None:
    with Stranger() as stranger:
        stranger.side.close()
        began = time.monotonic()
        stranger.fails(r"0 bytes with 0 descriptors|received no descriptor")
        assert time.monotonic() - began < 1.0 * pace()


@pytest.mark.parametrize("size", [0, KB64 + 1, 2**64 - 1])
def test_blocks_larger_than_their_segment(ends: Ends, size: int) -> None:
    (shared,) = send(ends.a, text(KB64))
    with pytest.raises(ProtocolError, match=r"a block of \d+ bytes in segment 0"):
        ends.b.take([shared._replace(size=size)])


def test_a_block_that_is_named_twice_is_given_once(ends: Ends) -> None:
    (shared,) = send(ends.a, text(KB64))
    (got,) = ends.b.take([shared])
    with pytest.raises(ProtocolError, match=r"none was sent there"):
        ends.b.take([shared._replace(offset=0)])
    assert bytes(got) == text(KB64)


def test_of_a_message_with_one_wrong_buffer_nothing_is_kept(ends: Ends) -> None:
    message = send(ends.a, text(KB64))
    with pytest.raises(ProtocolError):
        ends.b.take([*message, Shared(9, 0, 0, 5)])
    assert ends.a.statistics()["shared_leased"] == 0


def test_a_side_socket_that_nobody_listens_at_is_refused_and_closed() -> None:
    budget = Budget(1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with pytest.raises(OSError, match=r"."):
        Sharing(ours, budget)
    assert ours.fileno() == -1
    assert budget.pools == set()
    with pytest.raises(OSError, match=r"."):
        Sharing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), budget)


def test_descriptors_that_come_are_not_inherited(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    received = Sharing._receive

    def receive(self: Sharing) -> tuple[int, int, int]:
        entry = received(self)
        seen.append(os.get_inheritable(entry[2]))
        return entry

    monkeypatch.setattr(Sharing, "_receive", receive)
    ends.b.take(send(ends.a, text(KB64)))
    assert seen == [False, False]


# -- the end ---------------------------------------------------------------------------------------


def test_tensors_outlive_the_connection_at_both_ends(ends: Ends) -> None:
    (got,) = ends.b.take(send(ends.a, text(KB64)))
    tensor = torch.frombuffer(got, dtype=torch.uint8)
    del got
    ends.a.close()
    ends.b.close()
    assert mappings() > 0
    assert bytes(tensor.numpy()) == text(KB64)
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 * KB64


def test_what_is_sent_after_the_end_travels_in_the_message(ends: Ends) -> None:
    ends.a.close()
    assert send(ends.a, text(KB64)) == [text(KB64)]
    ends.a.close()


def test_what_is_sent_to_an_end_that_has_gone_travels_in_the_message(ends: Ends) -> None:
    # The line will report that the other end has gone, with its own error rather than a side socket's.
    ends.b.close()
    assert send(ends.a, text(KB64)) == [text(KB64)]
    assert ends.a.statistics()["shared_leased"] == 0


def test_messages_on_their_way_when_the_connection_ends_leave_nothing(ends: Ends) -> None:
    send(ends.a, text(KB64), text(MB))
    send(ends.b, text(KB64))
    ends.b.close()
    assert ends.a.statistics()["shared_leased"] == 2

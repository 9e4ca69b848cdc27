"""Shared memory between two processes that die, lie and hold on; and every byte of it accounted for."""

import array
import contextlib
import fcntl
import gc
import inspect
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError, ProtocolError
from rallypoint.wire import shm
from rallypoint.wire.buffers import copy_into
from rallypoint.wire.shm import Budget, Mapped, Pool, capacity_for


MB = 1 << 20
KB64 = shm.SMALLEST


# --- Two ends in one process: decisions do not need a second one. ---


class Line:
    """Both ends of a connection; does what the shell would do with descriptors and messages."""

    def __init__(self, budget: Budget | None = None, limit_bytes: int | None = None) -> None:
        self.pool, self.control = Pool.open(budget or Budget(1 << 30))
        self.mapped = Mapped.open(os.dup(self.control.fileno()), limit_bytes)

    def lease(self, size: int) -> shm.Block:
        block = self.pool.lease(size)
        assert block is not None
        return block

    def announce(self, block: shm.Block) -> None:
        if block.file is not None:
            self.mapped.add(block.segment, os.dup(block.file.fileno()), block.capacity)
            self.pool.told(block)

    def send(self, payload: bytes) -> memoryview:
        block = self.lease(len(payload))
        copy_into(block.view, payload)
        self.announce(block)
        return self.mapped.view(block.segment, block.size)

    def close(self) -> None:
        self.pool.close()
        self.mapped.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()
    vars(line).clear()  # pytest keeps a reference to it


@pytest.fixture(autouse=True)
def _descriptors_and_mappings_are_returned() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd")), mappings()
    yield
    gc.collect()
    after = set(os.listdir("/proc/self/fd")), mappings()
    assert after == before


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:rallypoint" in each for each in file)


def resident(block: shm.Block | None) -> int:
    """Bytes of memory that the block's file occupies."""
    assert block is not None and block.file is not None
    return os.fstat(block.file.fileno()).st_blocks * 512


def test_what_is_written_is_what_is_read(line: Line) -> None:
    payload = random.randbytes(3 * MB + 7)
    view = line.send(payload)
    assert bytes(view) == payload
    assert (view.format, view.ndim, view.readonly) == ("B", 1, False)


def test_memory_is_used_again_only_when_the_last_reference_is_gone(line: Line) -> None:
    view = line.send(b"a" * KB64)
    part = view[10:20].cast("h")
    del view
    other = line.send(b"b" * KB64)
    assert line.pool.statistics().segments == 2
    assert part.tobytes() == b"a" * 10
    del part
    third = line.send(b"c" * KB64)
    assert line.pool.statistics().segments == 2
    assert (bytes(other[:1]), bytes(third[:1])) == (b"b", b"c")


def test_the_block_freed_last_is_used_first(line: Line) -> None:
    blocks = [line.lease(KB64) for _ in range(4)]
    for number in (1, 3, 0, 2):
        line.pool.take_back(blocks[number])
    assert [line.lease(KB64).segment for _ in range(4)] == [2, 0, 3, 1]


def test_blocks_that_came_back_at_once_all_come_back(line: Line) -> None:
    views = [line.send(bytes(1)) for _ in range(70)]
    del views[3:65]
    assert line.pool.statistics() == shm.Statistics(70, 8, 70 * KB64, 62 * KB64)
    assert sorted(line.lease(1).segment for _ in range(62)) == list(range(3, 65))


def test_warm_memory_that_is_too_large_beats_fresh_memory_but_not_without_limit(line: Line) -> None:
    large = line.lease(7 * MB)
    line.pool.take_back(large)
    assert line.lease(MB).segment != large.segment
    assert line.lease(4 * MB).segment == large.segment


def test_a_descriptor_is_sent_until_the_peer_was_told_and_then_closed(line: Line) -> None:
    before = len(os.listdir("/proc/self/fd"))
    block = line.lease(MB)
    line.pool.take_back(block)
    block = line.lease(MB)
    assert block.file is not None
    line.announce(block)
    line.pool.take_back(block)
    block = line.lease(MB)
    assert block.file is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_is_being_sent_is_not_closed_under_its_sender(line: Line) -> None:
    block = line.lease(MB)
    line.pool.close()
    assert resident(block) == 0  # fstat would raise
    copy_into(block.view, bytes(MB))
    assert resident(block) == MB


def test_taking_back_twice_does_not_take_it_from_the_next(line: Line) -> None:
    first = line.lease(MB)
    line.pool.take_back(first)
    second = line.lease(MB)
    line.pool.take_back(first)
    assert first.segment == second.segment
    assert line.lease(MB).segment != second.segment


def test_a_message_that_nobody_wants_gives_its_memory_back(line: Line) -> None:
    block = line.lease(MB)
    line.announce(block)
    line.mapped.discard(block.segment)
    assert line.lease(MB).segment == block.segment


def test_a_spent_budget_is_none_and_idle_memory_of_other_connections_is_taken_first() -> None:
    budget = Budget(4 * MB)
    a, b = Line(budget), Line(budget)
    kept, idle = a.send(bytes(2 * MB)), a.send(bytes(2 * MB))
    assert b.pool.lease(MB) is None
    assert b.pool.lease(5 * MB) is None
    assert a.pool.statistics().segments == 2
    del idle
    assert b.pool.lease(3 * MB) is None
    assert a.pool.statistics().segments == 2, "given up for a block that did not fit anyway"
    assert b.lease(2 * MB).capacity == 2 * MB
    assert a.pool.statistics() == shm.Statistics(1, 1, 2 * MB, 0)
    assert bytes(kept) == bytes(2 * MB)
    a.close()
    assert b.lease(2 * MB).capacity == 2 * MB
    b.close()
    assert budget.used == 0


def test_what_was_idle_longest_is_given_up_first() -> None:
    budget = Budget(3 * MB)
    line = Line(budget)
    blocks = [line.lease(MB), line.lease(MB), line.lease(MB)]
    for number in (1, 0, 2):
        line.pool.take_back(blocks[number])
    line.lease(KB64)  # 1 is removed
    numbers = {line.lease(MB).segment, line.lease(MB).segment}
    assert numbers == {0, 2}
    line.close()


def test_trimmed_memory_is_free_though_the_peer_has_it_mapped(line: Line) -> None:
    block = line.lease(4 * MB)
    copy_into(block.view, bytes(4 * MB))
    line.announce(block)
    view = line.mapped.view(block.segment, block.size)
    assert line.pool.trim() == 0
    assert resident(block) == 4 * MB
    del view
    before = time.monotonic()
    assert line.pool.statistics().idle_bytes == 4 * MB
    assert line.pool.trim(before) == 0
    assert line.pool.trim(time.monotonic()) == 4 * MB
    assert resident(block) == 0
    # The peer's mapping goes when it hears of another segment, even of one with another number.
    first, second = line.lease(MB), line.lease(MB)
    assert first.segment == block.segment
    line.announce(second)
    line.announce(first)
    assert line.mapped.statistics().bytes == 2 * MB


def test_a_number_that_is_used_again_means_the_new_file(line: Line) -> None:
    line.send(b"old" + bytes(MB))
    line.pool.trim()
    view = line.send(b"new" + bytes(5 * MB))
    assert bytes(view[:3]) == b"new"
    assert line.pool.statistics().segments == 1


def test_all_numbers_taken_is_none_and_idle_ones_make_room(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm.pool, "MAX_SEGMENTS", 3)
    blocks = [line.lease(KB64) for _ in range(3)]
    assert line.pool.lease(MB) is None
    line.pool.take_back(blocks[1])
    assert line.lease(MB).segment == 1
    assert line.pool.lease(MB) is None


def test_a_system_without_descriptors_is_none_and_nothing_is_counted(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", fails)
        assert line.pool.lease(MB) is None
        with pytest.raises(OSError, match="Too many"):
            Pool.open(Budget(MB))
    assert line.pool.statistics().bytes == 0
    assert line.lease(MB).segment == 0


def test_closing_leaves_alone_what_the_peer_holds(line: Line) -> None:
    held, freed = line.lease(MB), line.lease(MB)
    copy_into(held.view, b"x" * MB)
    copy_into(freed.view, b"x" * MB)
    line.announce(held)
    line.pool.take_back(freed)
    view = line.mapped.view(held.segment, MB)
    line.close()
    line.close()
    assert bytes(view) == b"x" * MB
    assert (resident(held), resident(freed)) == (MB, 0)
    assert line.pool.lease(MB) is None
    assert line.pool.trim() == 0
    del view  # its finalizer runs after both ends were closed
    assert line.pool.statistics() == shm.Statistics(0, 0, 0, 0)


def test_one_connection_never_gets_memory_of_another() -> None:
    budget = Budget(2 * MB)
    a, b = Line(budget), Line(budget)
    a.send(b"secret" + bytes(2 * MB - 6))
    assert bytes(b.lease(2 * MB).view[:6]) == bytes(6)
    a.close()
    b.close()


@pytest.mark.parametrize("number", [-1, 1, 4095, 4096, 1 << 70])
def test_a_segment_number_that_is_none_is_refused(line: Line, number: int) -> None:
    line.announce(line.lease(MB))
    with pytest.raises(ProtocolError, match="unknown segment"):
        line.mapped.view(number, 1)
    with pytest.raises(ProtocolError):
        line.mapped.discard(number)


@pytest.mark.parametrize("size", [-1, 0, MB + 1, 1 << 70])
def test_a_size_that_does_not_fit_is_refused(line: Line, size: int) -> None:
    block = line.lease(MB)
    line.announce(block)
    with pytest.raises(ProtocolError, match="expected 1 to 1048576"):
        line.mapped.view(block.segment, size)
    assert bytes(line.mapped.view(block.segment, MB)) == bytes(MB), "refused, but not freed"


def test_a_block_that_is_not_on_its_way_is_refused(line: Line) -> None:
    block = line.lease(MB)
    line.announce(block)
    view = line.mapped.view(block.segment, MB)
    for use in (lambda: line.mapped.view(block.segment, MB), lambda: line.mapped.discard(0)):
        with pytest.raises(ProtocolError, match="state is 3"):
            use()
    with pytest.raises(ProtocolError, match="in use"):
        line.mapped.add(block.segment, os.dup(block.file.fileno()), MB)  # type: ignore[union-attr]
    del view
    with pytest.raises(ProtocolError, match="state is 0"):
        line.mapped.view(block.segment, MB)


def test_a_peer_that_writes_nonsense_on_its_page_harms_itself_only(line: Line) -> None:
    other = Line()
    views = [line.send(bytes(MB)) for _ in range(3)]
    page = mmap.mmap(line.control.fileno(), shm.MAX_SEGMENTS)
    page[:] = random.randbytes(shm.MAX_SEGMENTS)
    assert line.lease(MB).capacity == MB
    page[:] = bytes(shm.MAX_SEGMENTS)
    assert line.pool.statistics().leased == 0
    assert line.lease(MB).segment in {0, 1, 2, 3}
    page.close()
    del views
    assert bytes(other.send(b"fine")) == b"fine"
    other.close()


def file_in_memory(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: file_in_memory(MB, 0), "not sealed"),
        (lambda: file_in_memory(MB, fcntl.F_SEAL_GROW), "not sealed"),
        (lambda: file_in_memory(MB - 1), "as a file of 1048575"),
        (lambda: file_in_memory(MB, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE), "cannot map"),
        (lambda: os.open("/proc/self/exe", os.O_RDONLY), "not in memory"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "not in memory"),
    ],
)
def test_a_file_that_could_kill_the_reader_is_refused(
    line: Line, make: Callable[[], int], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        line.mapped.add(0, make(), MB)
    if message != "as a file of 1048575":
        with pytest.raises(ProtocolError, match=message):
            Mapped.open(make())
    assert line.mapped.statistics().segments == 0


@pytest.mark.parametrize("number", [-1, shm.MAX_SEGMENTS, 1 << 70])
def test_announcing_a_number_that_is_none_is_refused(line: Line, number: int) -> None:
    with pytest.raises(ProtocolError, match="expected a number from 0 to 4095"):
        line.mapped.add(number, file_in_memory(MB), MB)


@pytest.mark.parametrize("capacity", [-1, 0])
def test_announcing_no_capacity_is_refused(line: Line, capacity: int) -> None:
    with pytest.raises(ProtocolError, match=f"segment 0 of {capacity} bytes"):
        line.mapped.add(0, file_in_memory(MB), capacity)


def test_a_peer_cannot_have_more_mapped_than_the_limit_but_all_of_it_over_and_over() -> None:
    line = Line(Budget(4 * MB), limit_bytes=4 * MB)
    views = [line.send(bytes(MB)) for _ in range(4)]
    with pytest.raises(ProtocolError, match="expected at most 4194304 in total"):
        line.mapped.add(9, file_in_memory(MB), MB)
    for size in (4 * MB, KB64, 2 * MB, MB, KB64, 4 * MB):
        views.clear()
        views += [line.send(bytes(size)) for _ in range(4 * MB // size)]
    views.clear()
    for _ in range(2):  # under the same number: its former file does not count
        line.pool.trim()
        assert line.send(bytes(4 * MB)).nbytes == 4 * MB
    line.close()


@pytest.mark.parametrize("size", [0, -5])
def test_leasing_nothing_is_an_error(line: Line, size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        line.pool.lease(size)


def test_a_negative_budget_is_refused_and_none_leases_nothing() -> None:
    with pytest.raises(ConfigError, match="limit_bytes -1"):
        Budget(-1)
    pool, _ = Pool.open(Budget(0))
    assert pool.lease(1) is None
    pool.close()


@given(st.integers(1, 1 << 45))
def test_a_capacity_fits_wastes_a_quarter_at_most_and_is_whole_pages(size: int) -> None:
    capacity = capacity_for(size)
    assert size <= capacity and capacity % 4096 == 0
    assert capacity == KB64 or 4 * capacity <= 5 * size
    assert capacity_for(capacity) == capacity


@pytest.mark.parametrize("size", [KB64 * n // 4 << k for n in (4, 5, 6, 7) for k in (0, 1, 9)])
def test_sizes_that_tensors_often_have_fit_exactly(size: int) -> None:
    assert capacity_for(size) == size


@pytest.mark.parametrize("size", [1, 1000, MB, MB + 3])
@pytest.mark.parametrize("wrap", [bytes, bytearray, lambda b: memoryview(b"__" + b)[2:]])
def test_copying_takes_any_contiguous_buffer(size: int, wrap: Callable[[bytes], Any]) -> None:
    payload = random.randbytes(size)
    target = memoryview(bytearray(size + 4))
    copy_into(target[2:-2], wrap(payload))
    assert bytes(target) == bytes(2) + payload + bytes(2)


def test_copying_counts_bytes_and_refuses_what_does_not_fit() -> None:
    target = memoryview(bytearray(MB))
    copy_into(target, array.array("d", [1.0]) * (MB // 8))
    assert target[-8:].cast("d")[0] == 1.0
    for size in (MB - 1, MB + 1, 0):
        with pytest.raises(ValueError, match=f"{size} bytes"):
            copy_into(target, bytes(size))
    with pytest.raises(BufferError):
        copy_into(target, memoryview(bytes(2 * MB))[::2])
    with pytest.raises(BufferError):
        copy_into(memoryview(bytes(MB)), bytes(MB))


def test_threads_that_lease_send_and_drop_never_see_each_others_bytes() -> None:
    line = Line(Budget(24 * KB64))
    problems: list[str] = []
    announcing = threading.Lock()  # messages of a connection are sent one after another

    def work(mark: int) -> None:
        rng = random.Random(mark)
        held: list[tuple[int, memoryview]] = []
        for turn in range(150):
            block = line.pool.lease(rng.choice([100, KB64, 3 * KB64]))
            if block is None:
                held.clear()
                continue
            stamp = (mark * 151 + turn) % 251
            copy_into(block.view, bytes([stamp]) * block.size)
            with announcing:
                line.announce(block)
            held.append((stamp, line.mapped.view(block.segment, block.size)))
            for expected, view in held:
                if {view[0], view[-1]} != {expected}:
                    problems.append(f"thread {mark} found {view[0]}, {view[-1]}, not {expected}")
            if len(held) > 4:
                del held[rng.randrange(len(held))]

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not problems
    assert line.pool.statistics().leased == 0
    line.close()


def test_garbage_that_holds_a_view_may_be_found_while_the_lock_is_held(line: Line) -> None:
    cycle: list[object] = [line.send(bytes(MB))]
    cycle.append(cycle)
    del cycle
    with line.pool._budget.lock, line.mapped._lock:
        gc.collect()
    assert line.pool.statistics().leased == 0


# --- Two processes. ---


def peer(number: int) -> None:
    """Runs alone in another process, as sender and as receiver, and obeys orders."""
    import json
    import os
    import socket
    import sys

    from rallypoint.wire.shm import Budget, Mapped, Pool

    line = socket.socket(fileno=number)
    kept = vars(sys.modules["__main__"])  # so that they live until Python exits
    while True:
        message, fds, _, _ = socket.recv_fds(line, 65536, 4)
        if not message:
            break
        order, *arguments = json.loads(message)
        answer: object = None
        sent: list[int] = []
        if order == "receive":  # the control page
            mapped = Mapped.open(fds[0])
        elif order == "view":
            name, segment, size, capacity = arguments
            if fds:
                mapped.add(segment, fds[0], capacity)
            kept[name] = mapped.view(segment, size)
            if "torch" in sys.modules:
                import torch

                kept[name] = torch.frombuffer(kept[name], dtype=torch.uint8)
        elif order == "torch":
            import torch
        elif order == "read":
            view = kept[arguments[0]]
            answer = [int(view[0]), int(view[-1])]
        elif order == "drop":
            del kept[arguments[0]]
        elif order == "fork":
            child = os.fork()
            if not child:
                del kept[arguments[0]]
                os._exit(0)
            os.waitpid(child, 0)
        elif order == "send":  # a block of one byte value, repeated
            size, value = arguments
            pool, control = Pool.open(Budget(1 << 30))
            block = pool.lease(size)
            assert block is not None and block.file is not None
            block.view[:] = bytes([value]) * size
            sent = [control.fileno(), block.file.fileno()]
            answer = [block.segment, block.size, block.capacity]
        elif order == "cut":  # truncate the files that it has sent
            for each in (control.fileno(), block.file.fileno()):
                try:
                    os.ftruncate(each, 0)
                    answer = "cut"
                except PermissionError:
                    pass
        elif order == "exit":
            sys.exit(7)
        socket.send_fds(line, [json.dumps(answer).encode()], sent)


class Peer:
    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            code = f"{inspect.getsource(peer)}\npeer({number})"
            self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[number])
        self.fds: list[int] = []

    def ask(self, *order: object, fds: tuple[int, ...] = ()) -> Any:
        socket.send_fds(self.line, [json.dumps(order).encode()], fds)
        answer, self.fds, _, _ = socket.recv_fds(self.line, 65536, 4)
        assert answer, f"the peer ended at {order}"
        return json.loads(answer)

    def view(self, name: str, pool: Pool, block: shm.Block) -> None:
        fds = () if block.file is None else (block.file.fileno(),)
        self.ask("view", name, block.segment, block.size, block.capacity, fds=fds)
        pool.told(block)

    def end(self, how: int = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        return self.process.wait()


@pytest.fixture
def other() -> Iterator[Peer]:
    other = Peer()
    yield other
    other.line.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        other.process.wait(5)
    other.process.kill()
    other.process.wait()


@pytest.fixture
def pool(other: Peer) -> Iterator[Pool]:
    pool, control = Pool.open(Budget(1 << 30))
    other.ask("receive", fds=(control.fileno(),))
    del control
    yield pool
    pool.close()


def filled(pool: Pool, size: int, value: int) -> shm.Block:
    block = pool.lease(size)
    assert block is not None
    copy_into(block.view, bytes([value]) * size)
    return block


def test_processes_not_before_it_is_free_and_then_the_same_pages(pool: Pool, other: Peer) -> None:
    for name, value in (("a", 1), ("b", 2)):
        other.view(name, pool, filled(pool, MB, value))
    other.ask("drop", "a")
    other.view("c", pool, filled(pool, MB, 3))
    assert [other.ask("read", name) for name in "bc"] == [[2, 2], [3, 3]]
    assert pool.statistics() == shm.Statistics(2, 2, 2 * MB, 0)


def test_processes_a_fork_of_the_receiver_does_not_give_back_what_it_holds(
    pool: Pool, other: Peer
) -> None:
    other.view("a", pool, filled(pool, MB, 1))
    other.ask("fork", "a")
    assert pool.statistics().leased == 1
    other.ask("drop", "a")
    assert pool.statistics().leased == 0


def test_a_fork_of_the_sender_leaves_its_memory_alone(line: Line) -> None:
    view = line.send(b"a" * MB)
    freed = line.lease(MB)
    copy_into(freed.view, bytes(MB))
    line.pool.take_back(freed)
    child = os.fork()
    if not child:
        nothing = line.pool.lease(MB) is None and line.pool.trim() == 0
        line.close()
        os._exit(0 if nothing else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (bytes(view), resident(freed)) == (b"a" * MB, MB)


def test_the_receiver_is_killed_and_all_memory_comes_back(pool: Pool, other: Peer) -> None:
    budget = pool._budget
    other.view("a", pool, filled(pool, 8 * MB, 1))
    other.view("b", pool, filled(pool, MB, 1))
    other.end()
    pool.close()
    assert budget.used == 0
    assert mappings() == 0


def test_the_sender_is_killed_while_its_tensor_is_used(other: Peer) -> None:
    segment, size, capacity = other.ask("send", 3 * MB, 5)
    mapped = Mapped.open(other.fds[0])
    mapped.add(segment, other.fds[1], capacity)
    view = mapped.view(segment, size)
    other.end()
    mapped.close()
    assert bytes(view) == b"\x05" * 3 * MB
    view[:2] = b"ab"
    assert bytes(view[:3]) == b"ab\x05"


def test_a_sender_cannot_cut_off_what_is_mapped(other: Peer) -> None:
    segment, size, capacity = other.ask("send", MB, 5)
    mapped = Mapped.open(other.fds[0])
    mapped.add(segment, other.fds[1], capacity)
    view = mapped.view(segment, size)
    assert other.ask("cut") is None
    assert bytes(view) == b"\x05" * MB
    mapped.close()


def test_the_receiver_exits_with_live_tensors_and_nothing_crashes(pool: Pool, other: Peer) -> None:
    pytest.importorskip("torch")
    other.ask("torch")
    for name in "abc":
        other.view(name, pool, filled(pool, MB, ord(name)))
    assert other.ask("read", "b") == [ord("b")] * 2
    other.ask("drop", "a")
    assert pool.statistics().leased == 2
    socket.send_fds(other.line, [b'["exit"]'], [])
    assert other.process.wait(240) == 7
    assert pool.statistics().leased == 2, "what is alive at exit is not given back"


def test_large_copies_let_other_threads_run() -> None:
    source, target = bytearray(128 * MB), memoryview(bytearray(128 * MB))
    copy_into(target, source)
    ran: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ran.append(time.perf_counter())
            done.wait(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)  # whoever holds the interpreter's lock keeps it
    try:
        start = time.perf_counter()
        for _ in range(5):
            copy_into(target, source)
        end = time.perf_counter()
    finally:
        sys.setswitchinterval(before)
        done.set()
        thread.join()
    assert any(start < each < end for each in ran)

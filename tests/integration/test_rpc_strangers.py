"""An agent, and peers that know its secret and mean no good, or die at the worst moment: only they pay for it."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rallypoint import rpc
from rallypoint._core.clock import Deadline
from rallypoint.rpc.agent.agent import Agent
from rallypoint.rpc.connections.connections import Connections
from rallypoint.rpc.connections.handshake import introduce
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.references.ids import ForkId, RRefId
from rallypoint.rpc.threads.poller import WRITE
from rallypoint.wire import auth, tcp, uds
from rallypoint.wire.auth import Connecting
from rallypoint.wire.frames import DESCRIPTOR, INLINE, FrameParser, Shared, encode, header
from rallypoint.wire.line import Line
from rallypoint.wire.seal import Sealer
from rallypoint.wire.sharing import Sharing
from rallypoint.wire.shm import Budget
from rallypoint.wire.transport import Way
from rpc_workers import lone_agent
from sealed_end import SealedEnd, records


SECRET = b"known to all the members"

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with lone_agent(tmp_path_factory.mktemp("group"), SECRET) as made:
        serves()
        yield made


def serves() -> None:
    """A healthy peer's calls: here the agent's own, which take the same path as all others."""
    assert rpc.rpc_sync("w0", torch.add, (torch.ones(2), 1), timeout=10.0).tolist() == [2.0, 2.0]


def descriptors() -> Counter[str]:
    """How many are open, by what they are open for."""
    found: Counter[str] = Counter()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of listdir itself
            found[os.readlink(f"/proc/self/fd/{each}").partition("[")[0]] += 1
    return found


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _only_the_stranger_pays(agent: Agent) -> Iterator[None]:
    serves()
    before = descriptors()
    yield
    serves()
    # There may be fewer: garbage collection closes what an earlier test has left in a cycle.
    with contextlib.suppress(AssertionError):
        until(lambda: descriptors() <= before, "descriptors are left over")
    assert descriptors() <= before
    # Threads of the pool stay for a while; there are never more than may work, plus a few that wait.
    most = agent.options.num_worker_threads + 6
    until(lambda: threading.active_count() <= most, "threads are left over")
    until(lambda: all(each["name"] == "w0" for each in agent.peers()), "a stranger is left over")
    ours = {
        each.sharing._pool
        for each in (*agent.connections.outgoing.values(), *agent.connections.incoming)
        if each.sharing is not None
    }
    until(lambda: agent.lines.budget.pools <= ours, "shared memory is left over")


class Stranger:
    """One that knows the secret."""

    def __init__(self, agent: Agent, kind: str = "uds", **said: Any) -> None:
        (address,) = (each.address for each in agent.acceptor.listeners if each.kind == kind)
        deadline = Deadline(5.0)
        self.sock: Any
        if kind == "uds":
            self.sock = uds.connect(address, deadline)
        else:
            self.sock = tcp.connect(("127.0.0.1", address[1]), deadline, 5.0)
        me = {**agent.roster.introduction(), "name": "stranger", "id": 77, "incarnation": "ab" * 8}
        _, rest, self.side, keys = introduce(
            self.sock,
            SECRET,
            {**me, **said},
            deadline,
            side=kind == "uds",
            channel=b"" if kind == "uds" else Way(tcp.TRANSPORT).channel(address),
            seals=() if kind == "uds" else auth.SEALS(),
        )
        if keys is not None:
            self.sock = SealedEnd(self.sock, keys, rest)

    def send(self, *pieces: bytes | memoryview) -> None:
        self.sock.sendall(b"".join(pieces))

    def is_cut_off(self) -> bool:
        self.sock.settimeout(5.0)
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.sock.close()
        if self.side is not None:
            self.side.close()


@pytest.fixture(params=["uds", "tcp"])
def stranger(agent: Agent, request: pytest.FixtureRequest) -> Iterator[Stranger]:
    made = Stranger(agent, request.param)
    yield made
    made.close()


def call(number: int = 1, *, time_left: int = 0) -> list[bytes | memoryview]:
    return encode(Kind.CALL, number, pickle.dumps((abs, (-5,), None)), time_left=time_left)


def answer(stranger: Stranger) -> bytes:
    stranger.sock.settimeout(5.0)
    return stranger.sock.recv(4096)


# -- whom it lets in -------------------------------------------------------------------------------


def test_a_peer_that_dies_right_after_it_has_proved_itself(agent: Agent) -> None:
    # Its end of the side socket is gone when our control page is due to be sent there.
    for _ in range(30):
        sock = uds.connect(agent.acceptor.listeners[1].address, Deadline(5.0))
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.close()
        talk = Connecting(SECRET, {**agent.roster.introduction(), "id": 77}, os.urandom(32))
        socket.send_fds(sock, [talk.start()], [there.fileno()])
        there.close()
        sock.settimeout(5.0)
        sock.sendall(talk.receive(sock.recv(9000)))
        sock.recv(9000)
        sock.close()
    serves()


@pytest.mark.parametrize("said", ["x", None, [], {}, 1.5, -(2**70), "7" * 4000])
def test_a_peer_that_says_it_is_nobody(agent: Agent, said: object) -> None:
    with contextlib.closing(Stranger(agent, id=said)) as stranger:
        serves()
        with contextlib.suppress(OSError):
            stranger.send(*call())
    serves()


def test_a_peer_whose_side_socket_is_of_another_kind(agent: Agent) -> None:
    for family, kind in ((socket.AF_UNIX, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)):
        with socket.socket(family, kind) as side:
            sock = uds.connect(agent.acceptor.listeners[1].address, Deadline(5.0))
            talk = Connecting(SECRET, {**agent.roster.introduction(), "id": 77}, os.urandom(32))
            socket.send_fds(sock, [talk.start()], [side.fileno()])
            sock.settimeout(5.0)
            sock.sendall(talk.receive(sock.recv(9000)))
            # Its proof, and then the end.
            while sock.recv(9000):
                pass
            sock.close()
        serves()


# -- what they send --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, Kind.REPLY, Kind.END, Kind.END + 1, 255])
def test_a_request_of_a_kind_that_is_none(stranger: Stranger, kind: int) -> None:
    stranger.send(header(kind, 1, 0))
    assert stranger.is_cut_off()


@pytest.mark.parametrize("kind", [Kind.SEGMENT, Kind.LEAVE, Kind.LEAVE + 1, Kind.REPLY - 1])
def test_a_request_that_this_version_does_not_know_is_answered(
    stranger: Stranger, kind: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger.send(*encode(kind, 3, pickle.dumps(())))
    assert answer(stranger)[4] == Kind.FAILURE
    stranger.send(*call())
    assert answer(stranger)[4] == Kind.REPLY
    capsys.readouterr()


@pytest.mark.parametrize("size", [1 << 39, (1 << 40) - 1, 1 << 41, 2**63, 2**64 - 1])
def test_a_buffer_larger_than_there_is_memory(stranger: Stranger, size: int) -> None:
    stranger.send(header(Kind.CALL, 1, 0, buffers=1), DESCRIPTOR.pack(size, 0, INLINE, 0), b"x")
    serves()
    stranger.sock.shutdown(socket.SHUT_WR)
    assert stranger.is_cut_off()


@pytest.mark.parametrize("length", [(1 << 30) + 1, 2**32 - 1])
def test_a_payload_beyond_the_limit(stranger: Stranger, length: int) -> None:
    stranger.send(struct.pack("<IBBHQII", length, Kind.CALL, 0, 0, 1, 0, 0))
    assert stranger.is_cut_off()


def test_garbage_for_a_pickle_is_answered(
    stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in range(1, Kind.CANCEL):
        stranger.send(*encode(kind, kind, b"\x80\x05garbage", flags=kind % 2))
        assert answer(stranger)[4] == Kind.FAILURE
    capsys.readouterr()


def test_one_number_for_many_calls(stranger: Stranger) -> None:
    stranger.send(*call(7) * 500)
    serves()
    assert answer(stranger)[4] == Kind.REPLY


def test_shared_memory_over_a_way_that_has_none(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(Stranger(agent, "tcp")) as stranger:
        payload = pickle.dumps((abs, (-5,), None))
        stranger.send(*encode(Kind.CALL, 1, payload, [Shared(0, 0, 1, 100_000)]))
        # Nothing in it names a tensor: nobody looks at the buffer.
        assert answer(stranger)[4] in (Kind.REPLY, Kind.FAILURE)
    capsys.readouterr()


def test_a_cancel_right_behind_the_handshake_is_no_request(agent: Agent) -> None:
    # Both in one piece: what the handshake leaves over is handled like all that arrives.
    sock = tcp.connect(("127.0.0.1", agent.acceptor.listeners[2].address[1]), Deadline(5.0), 5.0)
    me = {**agent.roster.introduction(), "id": 77}
    channel = Way(tcp.TRANSPORT).channel(agent.acceptor.listeners[2].address)
    talk = Connecting(SECRET, me, os.urandom(32), channel, auth.SEALS())
    sock.sendall(talk.start())
    proof = talk.receive(sock.recv(9000))
    # The keys follow from both hellos, so they exist before the last word of the handshake.
    keys = talk._derive_keys()
    assert keys is not None
    frames = header(Kind.CANCEL, 9, 0) + header(Kind.CREDIT, 9, 0) + b"".join(call(2))
    sock.sendall(proof + records(Sealer(keys[0]), frames))
    sock.settimeout(5.0)
    while not talk.done:
        talk.receive(sock.recv(9000))
    data = SealedEnd(sock, keys, talk.rest).recv(9000)
    kind, number = data[4], int.from_bytes(data[8:16], "little")
    assert (kind, number) == (Kind.REPLY, 2)
    sock.close()


def test_calls_that_nobody_waits_for_any_more_give_their_memory_back(agent: Agent) -> None:
    with contextlib.closing(Stranger(agent)) as stranger:
        assert stranger.side is not None
        sharing = Sharing(stranger.side, Budget(1 << 30))
        # The leader is busy until they are all late.
        payload = pickle.dumps((time.sleep, (0.002,), None))
        for number in range(1, 20):
            placed, _ = sharing.place([memoryview(bytes(100_000))])
            data = b"".join(encode(Kind.CALL, number, payload, placed, time_left=1))
            stranger.send(data)
        until(lambda: sharing.statistics()["shared_leased"] == 0, "memory is still lent")
        sharing.close()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Kind.REMOTE, (abs, (-5,), None)),
        (Kind.REMOTE, (RRefId(5, 1), (5, 2), b"")),
        (Kind.REMOTE, (RRefId(5, "x"), ForkId(5, 2), b"")),
        (Kind.SCRIPT_REMOTE, (RRefId(5, None), ForkId(5, 2), b"")),
        (Kind.FETCH, (abs,)),
        (Kind.SCRIPT_FETCH, (ForkId(5, 1),)),
        (Kind.FORK_REQUEST, (7, 8)),
        (Kind.CHILD_ACCEPT, (ForkId(5, 1), RRefId(5, 1))),
        (Kind.USER_DELETE, ("x", 2.5)),
    ],
)
def test_what_is_no_id_is_not_put_among_ids(
    stranger: Stranger, kind: int, content: object, capsys: pytest.CaptureFixture[str]
) -> None:
    # It would be compared with true ones in everyone's statistics.
    stranger.send(*encode(kind, 1, pickle.dumps(content)))
    assert answer(stranger)[4] == Kind.FAILURE
    rpc.statistics()
    capsys.readouterr()


def test_who_waits_for_a_value_that_never_comes_is_forgotten_when_it_leaves(agent: Agent) -> None:
    with contextlib.closing(Stranger(agent)) as stranger:
        stranger.send(*encode(Kind.FETCH, 1, pickle.dumps((RRefId(5, 987_654),))))
        until(
            lambda: any(each.peer.id == 77 and each.active for each in agent.connections.incoming),
            "the request did not come",
        )
        kept = next(weakref.ref(each) for each in agent.connections.incoming if each.peer.id == 77)

    def is_forgotten() -> bool:
        gc.collect()
        return kept() is None

    until(is_forgotten, "its connection is kept")


# -- a peer that reads slowly ----------------------------------------------------------------------


def test_a_line_that_is_filled_while_its_last_bytes_go_is_still_written() -> None:
    # Between our look (nothing is left) and our telling the poller, another thread fills the line: what it told
    # the poller came first, and we would undo it.
    ours, theirs = socket.socketpair()
    line = Line(ours, FrameParser())
    asked: list[tuple[int, int]] = []

    class FakePoller:
        def change(self, fd: int, *, on: int = 0, off: int = 0) -> None:
            assert fd == line.fileno()
            if off:
                while line.send([bytes(100_000)]):
                    pass
            asked.append((on, off))

    Connections.is_written(SimpleNamespace(_poller=FakePoller()), line)  # type: ignore[arg-type]
    assert asked == [(0, WRITE), (WRITE, 0)]
    line.shut()
    line.close()
    theirs.close()


def test_answers_to_a_peer_that_reads_late_all_come(agent: Agent) -> None:
    with contextlib.closing(Stranger(agent)) as stranger:
        payload = pickle.dumps((bytes, (60_000,), None))
        numbers = range(1, 101)
        for number in numbers:
            stranger.send(*encode(Kind.CALL, number, payload))
        serves()
        line = Line(stranger.sock, FrameParser())
        came: list[int] = []
        end = time.monotonic() + 10.0
        while len(came) < len(numbers) and time.monotonic() < end:
            came += [frame.call for frame in line.read(0.5)]
        assert sorted(came) == list(numbers)

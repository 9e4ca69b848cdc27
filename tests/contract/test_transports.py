"""One suite over all transports between processes: uds, tcp (both versions of IP), memory."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pace import pace
from rallypoint._core import forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError
from rallypoint.wire import memory, tcp, uds
from rallypoint.wire.memory import MemoryListener
from rallypoint.wire.tcp import TcpListener
from rallypoint.wire.transport import Address, Listener
from rallypoint.wire.uds import UnixListener


HEARTBEAT = 5.0


@dataclass(frozen=True)
class Way:
    listen: Callable[[], Listener]
    connect: Callable[[Address, Deadline], socket.socket]
    source: str = "this host"


def _tcp(host: str | None, advertise: str) -> Way:
    return Way(
        lambda: TcpListener(host, advertise, [0], HEARTBEAT),
        lambda address, deadline: tcp.connect(address, deadline, HEARTBEAT),
    )


WAYS = {
    "uds": Way(UnixListener, uds.connect, f"user {os.geteuid()}"),
    "tcp": _tcp("127.0.0.1", "127.0.0.1"),
    "tcp, all addresses": _tcp(None, "127.0.0.1"),
    "tcp over IPv6": _tcp("::1", "::1"),
    "tcp, all addresses, over IPv6": _tcp(None, "::1"),
    "memory": Way(MemoryListener, memory.connect, "this process"),
}


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    if "IPv6" in request.param and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    return WAYS[request.param]


@pytest.fixture
def listener(way: Way) -> Iterator[Listener]:
    made = way.listen()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _descriptors_are_returned() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    # Fewer, if what an earlier test has left was collected meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before


def is_ready(listener: Listener | socket.socket, seconds: float = 0.0) -> bool:
    return bool(select.select([listener], [], [], seconds)[0])


def accept(listener: Listener) -> socket.socket:
    assert is_ready(listener, 5.0)
    sock = listener.accept()
    assert sock is not None
    return sock


def soon() -> Deadline:
    return Deadline(5.0)


def test_bytes_go_both_ways(way: Way, listener: Listener) -> None:
    with way.connect(listener.address, soon()) as ours, accept(listener) as theirs:
        ours.sendall(b"to")
        assert theirs.recv(10) == b"to"
        theirs.sendall(b"back")
        assert ours.recv(10) == b"back"


def nobody_waits(listener: Listener) -> bool:
    try:
        sock = listener.accept()
    except BlockingIOError:
        return True
    if sock is not None:
        sock.close()
    return False


def test_it_can_be_read_from_when_somebody_has_connected_and_only_then(
    way: Way, listener: Listener
) -> None:
    assert not is_ready(listener)
    assert nobody_waits(listener)
    first = way.connect(listener.address, soon())
    second = way.connect(listener.address, soon())
    for ours in (first, second):
        accept(listener).close()
        ours.close()
    assert not is_ready(listener)
    assert nobody_waits(listener)


def test_whose_a_connection_is(way: Way, listener: Listener) -> None:
    with way.connect(listener.address, soon()), accept(listener) as theirs:
        assert listener.source(theirs) == way.source


def test_many_connections_wait_and_are_accepted_in_order(way: Way, listener: Listener) -> None:
    # That many members may connect at once when a group starts.
    connected = []
    for number in range(200):
        connected.append(way.connect(listener.address, soon()))
        connected[-1].sendall(number.to_bytes(2, "little"))
    for number in range(200):
        with accept(listener) as theirs:
            theirs.settimeout(5.0)
            assert int.from_bytes(theirs.recv(2), "little") == number
    assert nobody_waits(listener)
    for ours in connected:
        ours.settimeout(5.0)
        assert ours.recv(1) == b""
        ours.close()


def test_many_threads_connect_at_once(way: Way, listener: Listener) -> None:
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            with way.connect(listener.address, Deadline(20.0)) as ours:
                ours.settimeout(20.0)
                assert ours.recv(5) == b"hello"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=connect) for _ in range(30)]
    for thread in threads:
        thread.start()
    for _ in threads:
        with accept(listener) as theirs:
            theirs.sendall(b"hello")
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_end_that_is_closed_is_seen_by_the_other(way: Way, listener: Listener) -> None:
    ours = way.connect(listener.address, soon())
    with accept(listener) as theirs:
        ours.close()
        theirs.settimeout(5.0)
        assert theirs.recv(1) == b""


def test_who_connected_and_left_before_it_was_accepted(way: Way, listener: Listener) -> None:
    way.connect(listener.address, soon()).close()
    assert is_ready(listener, 5.0)
    sock = listener.accept()
    if sock is not None:
        with sock:
            sock.settimeout(5.0)
            assert sock.recv(1) == b""


def test_nobody_connects_to_an_address_that_is_no_longer_listened_on(way: Way) -> None:
    listener = way.listen()
    address = listener.address
    listener.close()
    with pytest.raises(OSError, match=r"refused|nobody listens"):
        way.connect(address, soon())


def test_who_waits_to_be_accepted_when_the_listener_closes_is_told(way: Way) -> None:
    listener = way.listen()
    with way.connect(listener.address, soon()) as ours:
        listener.close()
        ours.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert ours.recv(1) == b""


def test_connections_outlive_their_listener(way: Way) -> None:
    listener = way.listen()
    with way.connect(listener.address, soon()) as ours, accept(listener) as theirs:
        listener.close()
        ours.sendall(b"still here")
        assert theirs.recv(20) == b"still here"


def test_closing_twice_does_nothing(way: Way) -> None:
    listener = way.listen()
    listener.close()
    with open("/dev/null") as other:  # takes the descriptor's number
        listener.close()
        other.read()


def test_no_two_listeners_have_one_address(way: Way) -> None:
    listeners = [way.listen() for _ in range(5)]
    assert len({str(each.address) for each in listeners}) == 5
    for each in listeners:
        each.close()


def test_children_do_not_inherit_anything(way: Way, listener: Listener) -> None:
    # A child process started by user code would keep the connection open after this process is gone.
    with way.connect(listener.address, soon()) as ours, accept(listener) as theirs:
        for fd in (listener.fileno(), ours.fileno(), theirs.fileno()):
            assert not os.get_inheritable(fd)


# -- each transport's own ------------------------------------------------------------------------


def test_a_unix_address_leaves_nothing_in_the_file_system() -> None:
    names = Path("/proc/net/unix")
    listener = UnixListener()
    assert not os.path.exists(str(listener.address))
    assert f"@{listener.address}" in names.read_text()
    listener.close()
    assert f"@{listener.address}" not in names.read_text()


def test_a_unix_address_of_a_process_that_was_killed_is_refused() -> None:
    program = (
        "import sys; from rallypoint.wire.uds import UnixListener; listener = UnixListener();"
        "print(listener.address, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        uds.connect(address, soon()).close()
        child.kill()
        child.wait()
    with pytest.raises(ConnectionRefusedError):
        uds.connect(address, soon())


def test_another_users_process_is_not_let_in_and_not_believed() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user for a while")
    # An unprivileged listener refuses an unprivileged stranger; root can be anyone anyway.
    program = (
        "import os, sys; sys.path[:0] = sys.argv[2:];"
        "from rallypoint._core.clock import Deadline; from rallypoint.wire import uds;"
        "os.setuid(int(sys.argv[1]));"
        "listener = uds.UnixListener(); print(listener.address, flush=True);\n"
        "for line in sys.stdin:\n"
        "    if line.strip() == 'accept':\n"
        "        sock = listener.accept()\n"
        "        print('refused' if sock is None else 'accepted', flush=True)\n"
        "    else:\n"
        "        try: uds.connect(line.strip(), Deadline(5.0)); print('connected', flush=True)\n"
        "        except PermissionError as error: print(error, flush=True)\n"
        "        except OSError as error: print('OSError', error, flush=True)\n"
    )

    class User:
        def __init__(self, uid: int) -> None:
            self.child = subprocess.Popen(
                [sys.executable, "-c", program, str(uid), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",
            )
            self.address = self.answer()

        def answer(self) -> str:
            assert self.child.stdout is not None
            return self.child.stdout.readline().strip()

        def ask(self, what: object) -> str:
            assert self.child.stdin is not None
            self.child.stdin.write(f"{what}\n")
            self.child.stdin.flush()
            return self.answer()

        def close(self) -> None:
            self.child.communicate("")

    one, other, same = User(65534), User(65533), User(65534)
    mine = UnixListener()
    try:
        # The connecting side notices first; by then it has connected, and the listener sees who it was.
        assert other.ask(one.address) == "another user listens on this address"
        assert one.ask("accept") == "refused"
        assert same.ask(one.address) == "connected"
        assert one.ask("accept") == "accepted"
        # Everyone lets root in, and root lets in nobody else.
        sock = uds.connect
        with pytest.raises(PermissionError, match=r"another user"):
            sock(one.address, soon())
        assert one.ask("accept") == "accepted"
        assert one.ask(mine.address) == "connected"
        assert is_ready(mine, 5.0)
        assert mine.accept() is None
    finally:
        mine.close()
        for each in (one, other, same):
            each.close()


def test_a_full_unix_backlog_ends_a_connect_in_time() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0rallypoint-test-full")
        listener.listen(0)
        waiting = uds.connect("rallypoint-test-full", soon())
        began = time.monotonic()
        with pytest.raises(OSError, match=r"timed out|temporarily"):
            uds.connect("rallypoint-test-full", Deadline(0.2))
        assert time.monotonic() - began < 2.0 * pace()
        waiting.close()


def test_tcp_takes_the_first_free_port_of_a_range() -> None:
    first = TcpListener("127.0.0.1", "h", [0], HEARTBEAT)
    taken = first.address[1]
    second = TcpListener("127.0.0.1", "advertised", [taken, 0], HEARTBEAT)
    assert second.address[0] == "advertised"
    assert second.address[1] != taken
    with pytest.raises(
        ConfigError, match=rf"no port could be bound on 127.0.0.1 \({taken}: .*in use"
    ):
        TcpListener("127.0.0.1", "h", [taken], HEARTBEAT)
    first.close()
    second.close()


def test_tcp_ports_of_a_listener_that_ended_can_be_had_at_once() -> None:
    listener = TcpListener("127.0.0.1", "127.0.0.1", [0], HEARTBEAT)
    port = listener.address[1]
    with tcp.connect(listener.address, soon(), HEARTBEAT), accept(listener) as theirs:
        theirs.shutdown(socket.SHUT_RDWR)
    listener.close()
    TcpListener("127.0.0.1", "127.0.0.1", [port], HEARTBEAT).close()


def test_tcp_connections_probe_and_do_not_wait_for_more() -> None:
    listener = TcpListener("127.0.0.1", "127.0.0.1", [0], 9.0)
    with tcp.connect(listener.address, soon(), 9.0) as ours, accept(listener) as theirs:
        for sock in (ours, theirs):
            read = sock.getsockopt
            assert read(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert read(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert read(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
            assert read(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 3
            assert read(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 2
            # It would also count the time while a process is stopped.
            assert read(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    listener.close()


def test_a_host_that_does_not_answer_ends_a_connect_in_time() -> None:
    # A full backlog: no answer comes.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        began = time.monotonic()
        with contextlib.ExitStack() as waiting, pytest.raises(OSError, match=r"timed out"):
            for _ in range(10):
                address = listener.getsockname()
                waiting.enter_context(tcp.connect(address, Deadline(0.3), HEARTBEAT))
        assert time.monotonic() - began < 5.0 * pace()


def test_a_connect_does_not_wait_for_the_kernel_to_ask_a_second_time() -> None:
    # The kernel retries after a second; strangers may fill the backlog again and again.
    def is_soon() -> bool:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
            address = listener.getsockname()
            with contextlib.ExitStack() as waiting:
                for _ in range(2):
                    sock = waiting.enter_context(socket.socket())
                    sock.setblocking(False)
                    sock.connect_ex(address)
                assert is_ready(listener, 5.0)
                room = threading.Timer(0.2, lambda: [listener.accept()[0].close() for _ in "ab"])
                room.start()
                with contextlib.suppress(TimeoutError):
                    tcp.connect(address, Deadline(0.95), HEARTBEAT).close()
                    return True
                room.join()
        return False

    assert any(is_soon() for _ in range(5))  # the machine may be busy: once is enough


def test_memory_is_not_reached_from_a_child() -> None:
    # After a fork the name and the table exist, but nobody would accept.
    listener = forks.close_in_child(MemoryListener())
    pid = os.fork()
    if not pid:
        try:
            memory.connect(listener.address, soon())
        except OSError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    listener.close()
    assert os.waitstatus_to_exitcode(status) == 0

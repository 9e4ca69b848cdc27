"""A standby that takes over: what others find at its port before it serves."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends import probes, tcp_home
from rallypoint.rendezvous.backends.places import Answer, Place
from rallypoint.rendezvous.backends.tcp_home import TcpHome, serve_here
from rallypoint.rendezvous.backends.tcpstore import LifeSigns
from rallypoint.rendezvous.home import LastRound, Server


pytestmark = pytest.mark.integration

PATIENCE = 60.0
ROOM = 40


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def is_closed(line: socket.socket) -> bool:
    line.settimeout(0.05)
    try:
        return line.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_strangers_do_not_fill_the_port_of_a_standby_that_begins_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes the place of an earlier one, and members are told that the store is starting."""
    pytest.importorskip("torch")
    monkeypatch.setattr("rallypoint.rendezvous.held_lines.room", lambda *_: ROOM)
    preparing, ready = threading.Event(), threading.Event()

    def prepare(listener: socket.socket) -> Callable[[], Server]:
        preparing.set()
        assert ready.wait(PATIENCE)
        return serve_here(listener)

    home = TcpHome(
        [("127.0.0.1", closed_port())],
        silence=5.0,
        is_host=False,
        say=lambda _: None,
        prepare=prepare,
    )
    port = home.standby("127.0.0.1")["port"]
    standby = {"id": "me", "addr": "127.0.0.1", "port": port}
    last = LastRound(plan={"store": "gone", "standbys": [standby]}, node_id="me")
    lost = RendezvousConnectionError("the store is lost")
    stop = threading.Event()
    recovered = []
    thread = threading.Thread(
        target=lambda: recovered.append(home.recover(lost, last, Deadline(PATIENCE), stop)),
        daemon=True,
    )
    with ExitStack() as stack:
        stack.callback(home.close)
        assert probes.store_at("127.0.0.1", port) is Answer.DEAD, "it does not listen yet"
        thread.start()
        assert preparing.wait(PATIENCE)
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
            for _ in range(5 * ROOM)
        ]
        assert probes.store_at("127.0.0.1", port, PATIENCE) is Answer.ALIVE
        deadline = time.monotonic() + PATIENCE
        while not all(map(is_closed, strangers[:-ROOM])):
            assert time.monotonic() < deadline
        ready.set()
        thread.join(PATIENCE)
        assert recovered
        stack.callback(recovered[0].store.close)
        recovered[0].store.set("key", b"value")
        assert probes.store_at("127.0.0.1", port, PATIENCE) is Answer.SERVES


def test_a_node_whose_own_store_ends_asks_where_it_was_before() -> None:
    """It was led to another store and, when that was lost, back to its own; then the other one is there again."""
    pytest.importorskip("torch")
    home = TcpHome([("127.0.0.1", closed_port())], silence=5.0, is_host=False, say=lambda _: None)
    elsewhere = closed_port()
    standby = {"id": "me", "addr": "127.0.0.1", "port": home.standby("127.0.0.1")["port"]}
    last = LastRound(plan={"store": "gone", "standbys": [standby]}, node_id="me")
    lost = RendezvousConnectionError("the store is lost")

    with ExitStack() as stack:
        stack.callback(home.close)

        def recover() -> None:
            recovery = home.recover(lost, last, Deadline(PATIENCE), threading.Event())
            stack.callback(recovery.store.close)

        recover()
        assert home.serves
        other = serve_here(socket.create_server(("127.0.0.1", elsewhere)))()
        home.follow("127.0.0.1", elsewhere, last.plan)
        assert not home.serves
        other.close()
        recover()
        assert home.serves
        own = home._server
        assert own is not None
        own.close()
        stack.callback(serve_here(socket.create_server(("127.0.0.1", elsewhere)))().close)
        recover()
        assert not home.serves
        assert home._current.port == elsewhere


@pytest.mark.parametrize(
    ("addr", "bind", "listed"),
    [
        ("127.0.0.2", None, True),
        ("127.0.0.1", None, True),
        ("127.0.0.3", None, False),
        ("127.0.0.3", "*", True),  # at all addresses, so at those as well
    ],
)
def test_a_standby_says_whether_newcomers_look_for_the_store_at_its_place(
    addr: str, bind: str | None, *, listed: bool
) -> None:
    port = closed_port()
    home = TcpHome(
        [("127.0.0.1", port), ("127.0.0.2", port)],
        silence=5.0,
        is_host=False,
        say=lambda _: None,
        bind=addr if bind is None else bind,
    )
    try:
        told = home.standby(addr)
        assert told["port"] == port
        assert told.get("listed", False) == listed
    finally:
        home.close()


def test_a_standby_at_another_port_is_not_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hosts = [taken.getsockname()]
        home = TcpHome(hosts, silence=5.0, is_host=False, say=lambda _: None, bind="127.0.0.1")
        try:
            assert "listed" not in home.standby("127.0.0.1")
        finally:
            home.close()


@pytest.mark.parametrize(
    ("heard", "left"),
    [(None, 2.0), (3.5, 1.5), (4.9, tcp_home.LEAST_REACH), (60.0, tcp_home.LEAST_REACH)],
    ids=["never", "before it broke", "nearly a whole silence ago", "long ago"],
)
def test_a_silent_host_is_asked_until_the_silence_is_over(heard: float | None, left: float) -> None:
    home = TcpHome([("127.0.0.1", 1)], silence=5.0, say=lambda _: None)
    if heard is not None:
        signs = home._signs["127.0.0.1", 1] = LifeSigns()
        signs.at = MONOTONIC.now() - heard
    assert home._left_of_silence(Place("127.0.0.1", 1)) == pytest.approx(left, abs=0.05)
    home.close()


def test_a_store_that_cannot_be_served_leaves_its_port_free() -> None:
    port = closed_port()

    def prepare(_: socket.socket) -> Callable[[], Server]:
        raise RuntimeError("no fork server")

    home = TcpHome(
        [("127.0.0.1", port)], silence=5.0, is_host=True, say=lambda _: None, prepare=prepare
    )
    with pytest.raises(RuntimeError, match="no fork server") as raised:
        home.connect(Deadline(PATIENCE), threading.Event())
    socket.create_server(("127.0.0.1", port)).close()
    assert raised.value.__traceback__ is not None, "its frames refer to the socket"
    home.close()

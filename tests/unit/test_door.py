"""Who is at an endpoint: real sockets, and what their answers mean."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given, strategies as st

from rallypoint.rendezvous.backends import door, greeting
from rallypoint.rendezvous.backends.door import Doorman
from rallypoint.rendezvous.backends.greeting import Door
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from tcp_stores import ServedStore


PATIENCE = 30.0


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


@contextmanager
def saying(words: bytes) -> Iterator[int]:
    """A server that says something to everybody and hangs up."""
    with listener() as sock:
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                line, _ = sock.accept()
                with line, suppress(OSError):
                    line.sendall(words)
                    line.settimeout(PATIENCE)
                    while line.recv(100):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield port_of(sock)
        stop.set()
        socket.create_connection(("127.0.0.1", port_of(sock))).close()
        thread.join(PATIENCE)


@given(st.binary(max_size=600))
def test_any_answer_means_something_that_can_be_printed(answer):
    reply = greeting.read(answer)
    assert reply.why.isprintable()
    assert bool(reply.why) == (reply.door is Door.STRANGER)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an SSH server (OpenSSH_9.6) answers there"),
        (b"HTTP/1.0 200 OK\r\nServer: nginx/1.2\r\n\r\n", "an HTTP server (nginx/1.2) answers"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP server answers"),
        (b"220 mail ready\x07\r\n", "another program (it says '220 mail ready') answers there"),
        (b"\x00\xff\x00\xff", "another program answers there"),
        (b"", "the store just ended"),
    ],
)
def test_a_stranger_is_called_what_it_is(answer, why):
    assert why in greeting.read(answer).why


def test_a_lost_packet_is_noticed_before_the_kernel_does():
    """The listener's queue is full, so the kernel drops packets; it would retry only after a second."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(0)
    crowd = [socket.create_connection(sock.getsockname())]

    def admit():
        while not stop.is_set():
            line, _ = sock.accept()
            crowd.append(line)

    stop = threading.Event()
    with pytest.raises(TimeoutError):
        door._connected("127.0.0.1", port_of(sock), 0.4)
    thread = threading.Timer(0.3, admit)
    thread.start()
    with door._connected("127.0.0.1", port_of(sock), 0.9):
        stop.set()
    socket.create_connection(("127.0.0.1", port_of(sock))).close()
    thread.join(PATIENCE)
    for line in (*crowd, sock):
        line.close()


def test_a_server_that_speaks_first_is_named():
    with saying(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        assert "an SSH server (OpenSSH_9.6)" in door.greet("127.0.0.1", port, PATIENCE).why


def test_a_server_that_waits_for_its_own_kind_of_question_is_named():
    class IdleCondition(BaseHTTPRequestHandler):
        server_version, sys_version = "Teapot/1", ""

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), IdleCondition) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.server_address[1]
        assert "an HTTP server (Teapot/1)" in door.ask("127.0.0.1", port, PATIENCE).why
        server.shutdown()
        thread.join(PATIENCE)


def test_who_listens_and_keeps_silent_is_told_from_who_does_not_listen():
    with listener() as sock:
        assert door.greet("127.0.0.1", port_of(sock), 0.2) is greeting.SILENT
        assert door.ask("127.0.0.1", port_of(sock), 0.2) is greeting.SILENT
        port = port_of(sock)
    assert door.greet("127.0.0.1", port, PATIENCE).door is Door.REFUSED


def test_a_name_without_an_address_is_no_error_of_the_network():
    reply = door.greet("no-such-host.invalid", 1, PATIENCE)
    assert reply.door is Door.UNKNOWN
    assert "no-such-host.invalid has no address yet" in reply.why


def test_a_doorman_answers_until_the_socket_is_handed_on():
    sock = listener()
    doorman = Doorman(sock)
    greet = partial(door.greet, "127.0.0.1", doorman.port)
    silent = socket.create_connection(("127.0.0.1", doorman.port))
    other = socket.create_connection(("127.0.0.1", doorman.port))
    other.sendall(b"hello")
    other.settimeout(PATIENCE)
    try:
        assert other.recv(10) == b""  # the server hung up
    except ConnectionResetError:
        pass
    for _ in range(3):
        assert greet(PATIENCE).door is Door.STARTING
    assert doorman.hand_on() is sock
    assert greet(0.2) is greeting.SILENT  # it waits in the queue for whoever holds the socket now
    for each in (silent, other, sock):
        each.close()


def test_a_client_goes_on_with_the_connection_on_which_the_store_answered():
    with closing(ServedStore()) as served:
        reply, line = door.enter("127.0.0.1", served.port, PATIENCE)
        assert reply.door is Door.SERVES and line is not None
        own = line.getsockname()
        with closing(TcpStore("127.0.0.1", served.port, silence=PATIENCE, greeted=line)) as store:
            assert store._socket.getsockname() == own
            store.set("key", b"value")
            with closing(store.clone()) as other:
                assert other.get("key", PATIENCE) == b"value"


@pytest.mark.parametrize("words", [greeting.ECHO + b"and more", greeting.STARTING, b"SSH-2.0-x"])
def test_there_is_no_connection_to_go_on_with_unless_a_store_answered(words):
    with saying(words) as port:
        reply, line = door.enter("127.0.0.1", port, PATIENCE)
    assert line is None and reply.door is not Door.SERVES

"""A worker's way to the store where the others of its meeting are."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from pace import pace
from ports import free_port
from rallypoint.elastic.communication.connections import STORE_PATIENCE, Wiring
from rallypoint.errors import RendezvousConnectionError
from tcp_stores import ServedStore


def test_a_store_that_cannot_be_reached_for_a_moment_is_reached_then() -> None:
    port = free_port()
    wiring = Wiring("127.0.0.1", port, "meeting")
    served = []

    def serve() -> None:
        time.sleep(0.3)  # meanwhile it is refused, as by a host that has just come back
        served.append(ServedStore(listener=socket.create_server(("127.0.0.1", port))))

    thread = threading.Thread(target=serve)
    thread.start()
    wiring.set("here", b"1")
    thread.join()
    with closing(served[0]) as store:
        assert store.get("meeting/here", 5.0) == b"1"
        wiring.cut()


def test_a_meeting_that_is_over_is_not_waited_for() -> None:
    wiring = Wiring("127.0.0.1", free_port(), "meeting")
    threading.Timer(0.3, wiring.cut).start()
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError):
        wiring.set("here", b"1")
    assert wiring.is_cut
    assert time.monotonic() - began < min(3 * pace(), STORE_PATIENCE / 2)

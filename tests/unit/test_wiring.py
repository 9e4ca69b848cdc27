"""A worker's connection to the store through which it meets the others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

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
        time.sleep(0.3)  # until then it is refused, as by a host that has just come back
        served.append(ServedStore(listener=socket.create_server(("127.0.0.1", port))))

    thread = threading.Thread(target=serve)
    thread.start()
    wiring.set("here", b"1")
    thread.join()
    with closing(served[0]) as store:
        assert store.get("meeting/here", 5.0) == b"1"
        wiring.cut()


@pytest.fixture(params=["refused", "not served", "silent"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port where no store answers: nobody listens; somebody has bound it but serves nothing yet; or its host is silent."""
    with ExitStack() as stack:
        if request.param == "refused":
            yield free_port()
            return
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = listener.getsockname()[1]
        if request.param == "silent":
            # Once the queue is full, Linux drops connection requests.
            for _ in range(2):
                queued = stack.enter_context(socket.socket())
                queued.setblocking(False)
                queued.connect_ex(("127.0.0.1", port))
        yield port


def test_a_meeting_that_is_over_is_not_waited_for(nowhere: int) -> None:
    wiring = Wiring("127.0.0.1", nowhere, "meeting")
    cut_took: list[float] = []

    def cut() -> None:
        began = time.monotonic()
        wiring.cut()
        cut_took.append(time.monotonic() - began)

    timer = threading.Timer(0.3, cut)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError):
        wiring.set("here", b"1")
    timer.join()
    assert wiring.is_cut
    assert time.monotonic() - began < min(3 * pace(), STORE_PATIENCE / 2)
    # The caller has others to cut, and does not wait for this one.
    assert cut_took[0] < min(pace(), STORE_PATIENCE / 2)


def test_what_is_cut_is_not_begun(nowhere: int) -> None:
    wiring = Wiring("127.0.0.1", nowhere, "meeting")
    wiring.cut()
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError):
        wiring.set("here", b"1")
    assert time.monotonic() - began < min(pace(), STORE_PATIENCE / 2)

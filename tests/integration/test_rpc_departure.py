"""A worker that waits for the others at shutdown is told when one of them will never come."""

import signal
import time

import pytest

import rpc_workers
from pace import pace
from rallypoint import rpc
from rallypoint.errors import PeerLost
from rallypoint.rpc.connections import connections
from rallypoint.rpc.current_agent import leave_group
from rpc_workers import Workers


pytestmark = [pytest.mark.integration, pytest.mark.alone]


def shut_down_without(*names):
    """Shut down, and return how that failed."""
    with pytest.raises(PeerLost) as caught:
        rpc.shutdown()
    assert caught.value.worker in names
    return caught.value.worker


@pytest.mark.parametrize("dead", [0, 2], ids=["leader", "follower"])
def test_a_shutdown_does_not_wait_for_ever_for_one_that_died_unnoticed(dead):
    with Workers(3) as workers:
        workers.run(rpc_workers.join)
        # Nobody has called anybody: there are no connections that could break.
        workers.kill(dead)
        began = time.monotonic()
        told = workers.run(shut_down_without, "w0", f"w{dead}")
        assert f"w{dead}" in told
        assert time.monotonic() - began < 5 * pace()


@pytest.mark.parametrize("dead", [0, 2], ids=["leader", "follower"])
def test_a_shutdown_that_waits_ends_when_one_dies(dead):
    with Workers(3) as workers:
        workers.run(rpc_workers.join)
        others = [rank for rank in range(3) if rank != dead]
        waiting = [workers.begin(rank, shut_down_without, "w0", f"w{dead}") for rank in others]
        time.sleep(0.3)
        workers.kill(dead)
        began = time.monotonic()
        assert f"w{dead}" in [each.result() for each in waiting]
        assert time.monotonic() - began < 5 * pace()


def test_who_comes_when_the_first_one_is_just_leaving_is_told_whom_it_has_lost():
    """As after a death that the first one has noticed already: it still serves calls."""
    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        workers.on(0, lambda: leave_group(shut_down=True) and None)
        assert workers.on(1, shut_down_without, "w0") == "w0"


def be_impatient():
    connections._CONNECT_SECONDS = 0.3


def test_one_that_is_stopped_is_waited_for():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        workers.on(0, be_impatient)
        workers.signal(1, signal.SIGSTOP)
        waiting = workers.begin(0, rpc.shutdown)
        time.sleep(1.0)
        workers.signal(1, signal.SIGCONT)
        workers.on(1, rpc.shutdown)
        waiting.result()

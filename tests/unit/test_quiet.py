"""Waiting for quiet: whatever the order in which calls end and people begin to wait, nobody waits in vain."""

import threading
import time

from rallypoint._core.clock import Deadline
from rallypoint.rpc.connections.quiet import Quiet


def test_who_waits_is_woken_by_the_last_call_and_not_before():
    quiet, calls = Quiet(), {1, 2}
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(quiet.wait(lambda: not calls, Deadline(10.0)))
    )
    waiting.start()
    while not quiet.is_wanted:
        time.sleep(0.001)
    calls.discard(1)
    quiet.note()
    waiting.join(0.05)
    assert waiting.is_alive()
    calls.discard(2)
    quiet.note()
    waiting.join(5.0)
    assert found == [True]
    assert not quiet.is_wanted


def test_the_time_is_kept():
    quiet = Quiet()
    began = time.monotonic()
    assert not quiet.wait(lambda: False, Deadline(0.05))
    assert 0.05 <= time.monotonic() - began < 5.0
    assert not quiet.wait(lambda: False, Deadline(0.0))
    assert quiet.wait(lambda: True, Deadline(0.0))


def test_a_close_ends_the_wait():
    quiet = Quiet()
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(quiet.wait(lambda: False, Deadline(None)))
    )
    waiting.start()
    while not quiet.is_wanted:
        time.sleep(0.001)
    quiet.close()
    waiting.join(5.0)
    assert found == [True]
    assert quiet.wait(lambda: False, Deadline(None))


def test_nobody_waits_in_vain():
    quiet, rounds, waiters = Quiet(), 300, 3
    under_way = [0]
    start = threading.Barrier(waiters + 1)
    found = []

    def wait():
        for _ in range(rounds):
            start.wait()
            found.append(quiet.wait(lambda: not under_way[0], Deadline(20.0)))

    threads = [threading.Thread(target=wait) for _ in range(waiters)]
    for each in threads:
        each.start()
    for number in range(rounds):
        under_way[0] = 3
        start.wait()
        for _ in range(3):
            under_way[0] -= 1
            if quiet.is_wanted:
                quiet.note()
        while len(found) < (number + 1) * waiters:
            time.sleep(0)
    for each in threads:
        each.join(30.0)
    assert found == [True] * (rounds * waiters)

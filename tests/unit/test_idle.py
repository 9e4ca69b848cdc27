"""Waiting for idle: in whatever order calls end and waits start, nobody waits in vain."""

import threading
import time

from pace import pace
from rallypoint._core.clock import Deadline
from rallypoint.rpc.connections.idle import IdleCondition


def test_who_waits_is_woken_by_the_last_call_and_not_before():
    idle, calls = IdleCondition(), {1, 2}
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(idle.wait(lambda: not calls, Deadline(10.0)))
    )
    waiting.start()
    while not idle.is_wanted:
        time.sleep(0.001)
    calls.discard(1)
    idle.note()
    waiting.join(0.05)
    assert waiting.is_alive()
    calls.discard(2)
    idle.note()
    waiting.join(5.0)
    assert found == [True]
    assert not idle.is_wanted


def test_the_time_is_kept():
    idle = IdleCondition()
    began = time.monotonic()
    assert not idle.wait(lambda: False, Deadline(0.05))
    assert 0.05 <= time.monotonic() - began < 5.0 * pace()
    assert not idle.wait(lambda: False, Deadline(0.0))
    assert idle.wait(lambda: True, Deadline(0.0))


def test_a_close_ends_the_wait():
    idle = IdleCondition()
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(idle.wait(lambda: False, Deadline(None)))
    )
    waiting.start()
    while not idle.is_wanted:
        time.sleep(0.001)
    idle.close()
    waiting.join(5.0)
    assert found == [True]
    assert idle.wait(lambda: False, Deadline(None))


def test_nobody_waits_in_vain():
    idle, rounds, waiters = IdleCondition(), 300, 3
    under_way = [0]
    start = threading.Barrier(waiters + 1)
    found = []

    def wait():
        for _ in range(rounds):
            start.wait()
            found.append(idle.wait(lambda: not under_way[0], Deadline(20.0)))

    threads = [threading.Thread(target=wait) for _ in range(waiters)]
    for each in threads:
        each.start()
    for number in range(rounds):
        under_way[0] = 3
        start.wait()
        for _ in range(3):
            under_way[0] -= 1
            if idle.is_wanted:
                idle.note()
        while len(found) < (number + 1) * waiters:
            time.sleep(0)
    for each in threads:
        each.join(30.0)
    assert found == [True] * (rounds * waiters)

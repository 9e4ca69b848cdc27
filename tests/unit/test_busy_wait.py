"""When a thread stays awake for what arrives, and when it stops doing that."""

from rallypoint.wire.busy_wait import SHORT, BusyWait


def test_the_first_wait_sleeps():
    assert not BusyWait(True).is_worth_it()


def test_after_a_short_wait_the_next_one_is_begun_awake_and_after_a_long_one_not():
    busy_wait = BusyWait(True)
    busy_wait.slept(SHORT / 2)
    assert busy_wait.is_worth_it()
    busy_wait.tried(True)
    assert busy_wait.is_worth_it()
    busy_wait.slept(2 * SHORT)
    assert not busy_wait.is_worth_it()


def test_a_single_core_is_never_kept_awake():
    busy_wait = BusyWait(False)
    busy_wait.slept(0.0)
    assert not busy_wait.is_worth_it()


def test_what_fails_is_tried_ever_less_often_but_again():
    busy_wait = BusyWait(True)
    tries = 0
    for _ in range(10_000):
        if busy_wait.is_worth_it():
            tries += 1
            busy_wait.tried(False)
        busy_wait.slept(SHORT / 2)
    assert 10 < tries < 60


def test_successes_make_up_for_failures():
    busy_wait = BusyWait(True)
    busy_wait.slept(0.0)
    for _ in range(300):
        if busy_wait.is_worth_it():
            busy_wait.tried(False)
    for _ in range(10_000):
        if busy_wait.is_worth_it():
            busy_wait.tried(True)
    assert all(busy_wait.is_worth_it() for _ in range(100))

"""When a thread stays awake for what comes, and when it leaves that."""

from rallypoint.wire.spinning import SHORT, Spinning


def test_the_first_wait_sleeps():
    assert not Spinning(True).is_worth_it()


def test_after_a_short_wait_the_next_one_is_begun_awake_and_after_a_long_one_not():
    spinning = Spinning(True)
    spinning.slept(SHORT / 2)
    assert spinning.is_worth_it()
    spinning.tried(True)
    assert spinning.is_worth_it()
    spinning.slept(2 * SHORT)
    assert not spinning.is_worth_it()


def test_a_single_core_is_never_kept_awake():
    spinning = Spinning(False)
    spinning.slept(0.0)
    assert not spinning.is_worth_it()


def test_what_fails_is_tried_ever_less_often_but_again():
    spinning = Spinning(True)
    tries = 0
    for _ in range(10_000):
        if spinning.is_worth_it():
            tries += 1
            spinning.tried(False)
        spinning.slept(SHORT / 2)
    assert 10 < tries < 60


def test_successes_make_up_for_failures():
    spinning = Spinning(True)
    spinning.slept(0.0)
    for _ in range(300):
        if spinning.is_worth_it():
            spinning.tried(False)
    for _ in range(10_000):
        if spinning.is_worth_it():
            spinning.tried(True)
    assert all(spinning.is_worth_it() for _ in range(100))

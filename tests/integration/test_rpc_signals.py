"""Signal handlers make calls of their own while the main thread waits in one."""

import os
import random
import signal
import time

import pytest
import torch

import rpc_workers
from rallypoint import rpc
from rallypoint.rpc import interruptions
from rpc_workers import Workers


pytestmark = pytest.mark.integration

# How often the handler has run before a case ends, and what all cases together may take on a busy machine.
STRIKES = 60
LIMIT = 240.0


def add(a, b):
    return a + b


def interrupt_and_nap(pid, seconds):
    """Interrupts its caller, whose main thread waits for this very call."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(seconds)
    return seconds


def ask_back(to, a, b):
    return rpc.rpc_sync(to, add, (a, b))


def ways():
    """What a handler may do."""
    assert rpc.rpc_sync("w1", add, (1, 2)) == 3
    assert rpc.rpc_async("w1", add, (3, 4)).wait() == 7
    futures = [rpc.rpc_async("w1", add, (n, n)) for n in range(20)]
    assert [each.wait() for each in futures] == [2 * n for n in range(20)]
    assert rpc.remote("w1", add, (5, 6)).to_here() == 11
    assert rpc.rpc_sync("w1", ask_back, ("w0", 1, 1)) == 2
    return True


@pytest.mark.parametrize("options", [{}, {"transports": ("tcp",), "tls": True}], ids=["uds", "tls"])
@pytest.mark.parametrize("how", ["sync", "async", "nested"])
def test_calls_in_a_handler_are_answered(options, how):
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(**options))

        def case():
            done = []

            def handle(number, frame):
                if how == "nested" and not done:
                    done.append("outer")
                    signal.raise_signal(signal.SIGUSR1)
                done.append(ways())

            signal.signal(signal.SIGUSR1, handle)
            args = (os.getpid(), 1.0)
            began = time.monotonic()
            if how == "async":
                assert rpc.rpc_async("w1", interrupt_and_nap, args, timeout=60).wait() == 1.0
            else:
                assert rpc.rpc_sync("w1", interrupt_and_nap, args, timeout=60) == 1.0
            assert done.count(True) == (2 if how == "nested" else 1)
            assert rpc.rpc_sync("w1", add, (1, 2)) == 3
            return time.monotonic() - began

        assert workers.on(0, case, limit=60) < 30
        workers.run(rpc_workers.leave)


class Strikes:
    """Unpickling it interrupts the process, amid the work of a call."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGUSR1,)


def strikes(count):
    return [Strikes() for _ in range(count)]


def gives_strikes(count):
    yield from strikes(count)


def test_a_handler_has_run_when_the_call_returns_that_it_was_late_in():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def case():
            interruptions._AGAIN = 20.0  # the signal is not sent again meanwhile
            ran = []
            signal.signal(signal.SIGUSR1, lambda *_: ran.append(True))
            counts = []
            rpc.rpc_sync("w1", strikes, (1,))
            counts.append(len(ran))
            rpc.rpc_async("w1", strikes, (1,)).wait()
            counts.append(len(ran))
            rpc.remote("w1", strikes, (1,)).to_here()
            counts.append(len(ran))
            return counts + [len(ran) for _ in rpc.rpc_stream("w1", gives_strikes, (3,))]

        assert workers.on(0, case, limit=60) == [1, 2, 3, 4, 5, 6]
        workers.run(rpc_workers.leave)


def test_a_handler_that_shuts_down_waits_for_the_call_that_it_has_interrupted():
    with Workers(2) as workers:
        workers.run(rpc_workers.join_dynamic)

        def case():
            rpc.wait_for("w1", 20)
            signal.signal(signal.SIGUSR1, lambda *_: rpc.shutdown(timeout=30))
            return rpc.rpc_sync("w1", interrupt_and_nap, (os.getpid(), 0.5), timeout=60)

        assert workers.on(0, case, limit=60) == 0.5
        workers.on(1, rpc_workers.leave)


class Alarms:
    """SIGALRM at random, set again as soon as its handler is done."""

    def __init__(self, act):
        self.act, self.count, self.chance = act, 0, random.Random(7)

    def handle(self, number, frame):
        try:
            self.act(self)
        finally:
            self.count += 1
            self.set()

    def set(self):
        signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-4, 4e-3))

    def __enter__(self):
        signal.signal(signal.SIGALRM, self.handle)
        self.set()
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def call_in_turn(alarms):
    """Call in one of the ways, a different one each time."""
    n = alarms.count
    match n % 6:
        case 0:
            assert rpc.rpc_sync("w1", add, (n, 1)) == n + 1
        case 1:
            assert rpc.rpc_async("w1", add, (n, 2)).wait() == n + 2
        case 2:
            assert rpc.remote("w1", add, (n, 3)).to_here() == n + 3
        case 3:
            assert rpc.rpc_sync("w1", ask_back, ("w0", n, 4)) == n + 4
        case 4:
            assert rpc.rpc_sync("w1", there_and_back, (n, 5)) == n + 5
        case 5:
            x = torch.full((100_000,), n)
            assert torch.equal(rpc.rpc_sync("w1", add, (x, 6)), x + 6)


def there_and_back(a, b):
    """Served by w1, which has w0 call it in turn: over the connection that the handler has interrupted."""
    return rpc.rpc_sync("w0", ask_back, ("w1", a, b))


def doings():
    """What the main thread may be doing."""

    def small():
        assert rpc.rpc_sync("w1", add, (20, 1)) == 21

    def bundle():
        futures = [rpc.rpc_async("w1", add, (n, 1)) for n in range(30)]
        assert [each.wait() for each in futures] == list(range(1, 31))

    def awaited():
        assert rpc.api.wait_all([rpc.rpc_async("w1", add, (n, 1)) for n in range(10)])[9] == 10

    def elsewhere():
        rref = rpc.remote("w1", add, (40, 2))
        assert rref.to_here() == 42 and rref.rpc_sync().bit_length() == 6

    def tensor():
        x = torch.arange(200_000)
        assert torch.equal(rpc.rpc_sync("w1", add, (x, 1)), x + 1)

    def nested():
        assert rpc.rpc_sync("w1", ask_back, ("w0", 3, 4)) == 7

    def stream():
        assert list(rpc.rpc_stream("w1", range, (50,))) == list(range(50))

    return (small, bundle, awaited, elsewhere, tensor, nested, stream)


def amid_alarms(act):
    """Do each of the main thread's doings until the handler has struck often. Returns how often each was done."""
    done = {}
    for each in doings():
        with Alarms(act) as alarms:
            number = 0
            while alarms.count < STRIKES:
                each()
                number += 1
        done[each.__name__] = number
    return done


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_calls_in_handlers_at_random_amid_calls_of_every_kind(transport):
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=(transport,), rpc_timeout=LIMIT))
        done = workers.on(0, amid_alarms, call_in_turn, limit=LIMIT)
        assert all(done.values())
        assert workers.on(1, lambda: rpc.rpc_sync("w0", add, (1, 2))) == 3
        workers.run(rpc_workers.leave)


def struck_down():
    """A handler raises what sockets raise, amid calls. Returns how many it ended, how many it did not, and a last answer."""
    ended = whole = 0

    def out(number, frame):
        raise TimeoutError("the user's own")

    signal.signal(signal.SIGALRM, out)
    chance = random.Random(3)
    while ended < STRIKES:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 2e-3))
            for n in range(20):
                assert rpc.rpc_async("w1", add, (n, 1)).wait() == n + 1
                assert rpc.rpc_sync("w1", add, (n, 1)) == n + 1
                whole += 1
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except TimeoutError as error:
            assert "the user's own" in str(error)
            ended += 1
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return ended, whole, rpc.rpc_sync("w1", add, (1, 1))


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_what_a_handler_raises_ends_a_call_and_no_connection(transport):
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=(transport,), rpc_timeout=LIMIT))
        ended, whole, last = workers.on(0, struck_down, limit=LIMIT)
        assert ended == STRIKES and whole and last == 2
        workers.run(rpc_workers.leave)


# -- what others see of it --------------------------------------------------------------------------


def test_handlers_are_seen_as_they_were_given():
    def first(number, frame):
        pass

    def second(number, frame):
        pass

    before = signal.signal(signal.SIGUSR2, first)
    at_first = signal.signal, signal.getsignal
    interruptions.begin()
    try:
        interruptions.begin()
        assert signal.getsignal(signal.SIGUSR2) is first
        assert signal.signal(signal.SIGUSR2, second) is first
        assert signal.getsignal(signal.SIGUSR2) is second
        assert signal.signal(signal.SIGUSR2, signal.SIG_IGN) is second
        assert signal.signal(signal.SIGUSR2, second) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(TypeError):
            signal.signal(signal.SIGUSR2, "a handler")
    finally:
        interruptions.end()
    assert (signal.signal, signal.getsignal) == at_first
    assert signal.signal(signal.SIGUSR2, before) is second

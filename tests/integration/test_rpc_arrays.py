"""NumPy arrays and bytes between processes take the same path as tensors."""

import threading

import numpy as np
import pytest

import rpc_workers
from rallypoint import rpc
from rpc_workers import Workers


pytestmark = [pytest.mark.integration]

COUNT = 1 << 20
kept = []


def echo(x):
    return x


def keep(x):
    kept.append(x)
    return x


def keep_view(x):
    kept.append(x[10:20])
    return x


def keep_base(x):
    kept.append(x.base)
    return x


def keep_memory(x):
    kept.append(memoryview(x.base.base))
    return x


def increase(x):
    x += 1
    return x


def first_kept():
    found = kept.pop()
    return float(np.frombuffer(found, dtype=np.float64)[0])


@pytest.fixture(scope="module", params=["uds", "tcp", "tls"])
def pair(request):
    transports = ("uds",) if request.param == "uds" else ("tcp",)
    tls = request.param == "tls" or None
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=transports, tls=tls))
        yield workers
        workers.run(rpc_workers.leave)


def test_large_ones_come_and_go_as_they_are(pair):
    def case():
        for made in (
            np.arange(COUNT, dtype=np.float64),
            np.asfortranarray(np.arange(COUNT).reshape(1024, 1024)),
            bytes(range(256)) * 8000,
            bytearray(range(256)) * 8000,
            "text" * COUNT,
        ):
            found = rpc.rpc_sync("w1", echo, (made,))
            assert type(found) is type(made)
            assert np.array_equal(found, made)
        array, data = rpc.rpc_sync("w1", echo, ([np.ones(COUNT), {"x": bytes(COUNT)}],))
        assert array.sum() == COUNT and data == {"x": bytes(COUNT)}
        assert rpc.remote("w1", echo, (bytes(COUNT),)).to_here() == bytes(COUNT)
        assert rpc.remote("w1", np.ones, (COUNT,)).to_here().sum() == COUNT
        view = rpc.rpc_sync("w1", echo, (memoryview(np.arange(float(COUNT))),))
        assert view.format == "d" and view[COUNT - 1] == COUNT - 1

    pair.on(0, case, limit=60)


@pytest.mark.parametrize("function", [echo, keep, keep_view, keep_base, keep_memory])
def test_what_somebody_over_there_keeps_is_not_changed_here(pair, function):
    def case():
        for _ in range(3):
            found = rpc.rpc_sync("w1", function, (np.ones(COUNT),))
            found += 1
            assert (found == 2).all()
            again = rpc.rpc_sync("w1", echo, (np.full(COUNT, 7.0),))
            assert (again == 7).all() and (found == 2).all()
            if function is not echo:
                assert rpc.rpc_sync("w1", first_kept) == 1

    pair.on(0, case)


def test_an_array_that_nobody_keeps_goes_back_without_a_copy():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def case():
            sent = rpc.rpc_sync("w1", increase, (np.zeros(COUNT),))
            peers = rpc.statistics()["peers"]
            assert (sent == 1).all()
            return sum(each.get("mapped_bytes", 0) for each in peers)

        # What comes back lies in this process's own memory: nothing of the other's is mapped here.
        assert workers.on(0, case) == 0
        workers.run(rpc_workers.leave)


def test_a_buffer_that_is_given_back_may_grow_at_once():
    """Its owner resizes it while the answer still waits for a caller that does not read."""
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=("tcp",)))

        def case():
            futures = [rpc.rpc_async("w1", lend_and_grow) for _ in range(40)]
            # Whole, as it was at some moment: a busy host may let it grow before an answer is written.
            sizes = {len(each.wait()) for each in futures}
            assert sizes <= {(1 << 22) + grown for grown in range(41)}

        workers.on(0, case, limit=60)
        workers.run(rpc_workers.leave)


lent = bytearray(1 << 22)


def lend_and_grow():
    threading.Timer(0.01, lent.extend, (b"x",)).start()
    return lent

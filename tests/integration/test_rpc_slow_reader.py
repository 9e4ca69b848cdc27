"""A caller that does not read its answers: they do not pile up without limit where they are made."""

import os
import signal
import time

import pytest

import rpc_workers
from rallypoint import rpc
from rpc_workers import Workers, eventually


pytestmark = [pytest.mark.integration, pytest.mark.alone]

MIB = 1 << 20
made = 0


PIECE = MIB // 16


def block(number: int) -> list[bytes]:
    """1 MiB in pieces that go over the socket: larger ones would go through shared memory."""
    global made
    made += 1
    time.sleep(0.03)  # sixteen at once: the caller stands still long before all are made
    piece = number.to_bytes(4, "little") * (PIECE // 4)
    return [bytes(bytearray(piece)) for _ in range(MIB // PIECE)]  # the same one would be sent once


def count() -> int:
    return made


def settled() -> bool:
    """Whether no further answer is made."""
    before = made
    time.sleep(0.3)
    return 0 < before == made


@pytest.mark.parametrize("is_known", [False, True], ids=["new function", "known to be long"])
@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_answers_that_nobody_reads_hold_up_further_calls_and_none_is_lost(transport, is_known):
    """Calls of a function known to be long wait in line, already read, while the others are still unread."""
    calls = 200
    with Workers(2) as workers:
        workers.run(lambda: rpc_workers.join(transports=(transport,), in_flight_bytes=8 * MIB))

        if is_known:
            workers.on(0, lambda: len(rpc.rpc_sync("w1", block, (0,))))

        def begin_and_stand_still():
            rpc_workers.held["calls"] = [
                rpc.rpc_async("w1", block, (n,), timeout=60) for n in range(calls)
            ]
            time.sleep(0.05)  # those that go out in bundles have left by now
            os.kill(os.getpid(), signal.SIGSTOP)

        pending = workers.begin(0, begin_and_stand_still)
        eventually(lambda: workers.on(1, settled))
        assert workers.on(1, count) < calls
        workers.signal(0, signal.SIGCONT)
        pending.result()

        def finish():
            answers = [each.wait() for each in rpc_workers.held.pop("calls")]
            numbers = [int.from_bytes(each[0][:4], "little") for each in answers]
            return numbers, {sum(map(len, each)) for each in answers}

        numbers, sizes = workers.on(0, finish)
        assert numbers == list(range(calls))
        assert sizes == {MIB}
        workers.run(rpc_workers.leave)

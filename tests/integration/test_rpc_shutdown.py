"""Start and shutdown: what is refused before and after, what a shutdown waits for, and that it ends."""

import contextlib
import functools
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rpc_workers
from pace import pace
from rallypoint import rpc
from rallypoint.errors import ConfigError, DeadlineExceeded, PeerLost
from rallypoint.rpc import finalization
from rallypoint.rpc.current_agent import required_agent
from rpc_workers import Workers, eventually, timed


pytestmark = pytest.mark.integration

happened: list[Any] = []


def seen() -> list[Any]:
    return list(happened)


def double(x: Any) -> Any:
    return 2 * x


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def nap_then_call(seconds: float, to: str) -> None:
    """A function that still calls others when its caller has long been shutting down."""
    time.sleep(seconds)
    rpc.rpc_sync(to, note, (rpc.get_worker_info().name,))


def note(what: Any) -> None:
    happened.append(what)


def value(x: Any) -> Any:
    return rpc.RRef(x)


_NOT_IN = "RPC has not been initialized in this process: call init_rpc first"


def nothing_can_be_done(left: str = "") -> None:
    """Every way in is refused at once; torch's words come first, as programs look for them.

    Args:
        left: the worker that this process was until its shutdown.
    """
    why = f". Worker {left!r} was in a group here, which it has left: rpc.shutdown() was called"
    told = _NOT_IN + (why if left else "")
    ways = [
        lambda: rpc.rpc_sync("w1", double, (1,)),
        lambda: rpc.rpc_async("w1", double, (1,)),
        lambda: rpc.remote("w1", double, (1,)),
        lambda: rpc.rpc_stream("w1", range, (3,)),
        rpc.get_worker_info,
        lambda: rpc.get_worker_info("w1"),
        rpc.get_rpc_timeout,
        rpc.members,
        rpc.statistics,
        lambda: rpc.wait_for("w1"),
        lambda: rpc.on_join(print),
        lambda: rpc.on_leave(print),
        rpc.shutdown,
    ]
    for way in ways:
        with timed(0.2), pytest.raises(rpc.RpcError) as caught:
            way()
        assert str(caught.value) == told
    with timed(0.2), pytest.raises(rpc.RpcError, match="Current RPC agent is not set!") as caught:
        rpc.RRef(1)
    assert ("rpc.shutdown() was called" in str(caught.value)) == bool(left)


# -- before and after ---------------------------------------------------------------------------


def test_calls_before_init_and_after_shutdown_are_refused():
    with Workers(2) as workers:
        workers.run(nothing_can_be_done)
        workers.run(rpc_workers.join)
        workers.run(rpc_workers.leave)
        workers.run(lambda: nothing_can_be_done(f"w{rpc_workers.rank}"))


def test_a_process_comes_and_goes_many_times_and_keeps_nothing():
    with Workers(2) as workers:

        def once():
            with rpc_workers.timed(10):
                rpc_workers.join()
            other = f"w{1 - rpc_workers.rank}"
            assert rpc.rpc_sync(other, double, (2,)) == 4
            assert rpc.remote(other, double, (3,)).to_here() == 6
            rpc.shutdown()

        workers.run(once)
        before = workers.run(rpc_workers.resources)
        for _ in range(5):
            workers.run(once)
        assert workers.run(rpc_workers.resources) == before


def test_a_second_init_is_refused_and_the_first_goes_on():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def case():
            with timed(0.5), pytest.raises(rpc.RpcError, match="is already initialized"):
                rpc_workers.join()
            return rpc.rpc_sync("w1", double, (1,))

        assert workers.on(0, case) == 2
        workers.run(rpc_workers.leave)


def test_two_of_one_name_are_told_so_everywhere_and_leave_nothing():
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)

        def come():
            name = "same" if rpc_workers.rank else "other"
            with timed(5), pytest.raises(rpc.RpcError, match="same is not unique"):
                rpc.init_rpc(name, rank=rpc_workers.rank, world_size=3, store=rpc_workers.store())
            nothing_can_be_done()

        workers.run(come)
        assert workers.run(rpc_workers.resources) == before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "must be non-empty"),
        ("a b", "Worker name must match"),
        ("x" * 200, "shorter than 128"),
    ],
)
def test_a_name_that_is_none_is_refused_before_anybody_is_waited_for(name, told):
    with Workers(1) as workers:

        def come():
            with timed(1), pytest.raises(rpc.RpcError, match=told):
                rpc.init_rpc(name, rank=0, world_size=2, store=rpc_workers.store())

        workers.on(0, come)


def test_a_member_that_never_comes_is_named_and_what_was_begun_is_given_back():
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)

        def come():
            if rpc_workers.rank == 1:
                return
            with timed(4), pytest.raises(DeadlineExceeded) as caught:
                rpc_workers.join(rpc_timeout=0.5)
            # One that has given up a moment ago counts as missing, too.
            assert re.search(r"missing: rank (0, )?1\b|gave up", str(caught.value))
            nothing_can_be_done()

        workers.run(come)
        assert workers.run(rpc_workers.resources) == before


# -- shutdown -----------------------------------------------------------------------------------


def test_an_end_in_good_order_serves_what_late_ones_still_ask_for():
    with Workers(3) as workers:
        workers.run(rpc_workers.join)

        def work():
            if rpc_workers.rank == 0:
                for i in range(10):
                    rpc.rpc_async(f"w{1 + i % 2}", nap_then_call, (0.2, f"w{2 - i % 2}"))
            rpc.shutdown()

        workers.run(work)
        notes = workers.run(seen)
        assert notes == [[], ["w2"] * 5, ["w1"] * 5]


def test_an_end_waits_for_one_that_still_works():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def end():
            if rpc_workers.rank:
                time.sleep(0.4)
            began = time.monotonic()
            rpc.shutdown()
            return began, time.monotonic()

        # All processes of a host share this clock; the one that was to wait may have started late.
        (_, ended), (began, _) = workers.run(end)
        assert ended > began


def test_an_end_compares_counts_of_its_own_and_not_the_statistics():
    """Statistics may lose additions made by several threads at once; a shutdown that relied on them could end too early."""

    def call() -> None:
        for _ in range(5):
            assert rpc.rpc_sync("w1", double, (1,)) == 2

    def lose_statistics() -> None:
        required_agent().counters.sent = required_agent().counters.served = 0

    def work() -> tuple[int, int]:
        made, served, _ = finalization._work_of(required_agent())
        return made, served

    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        for times in (1, 2):
            workers.on(0, call)
            workers.run(lose_statistics)
            assert workers.on(0, work) == (5 * times, 0)
            # It is counted after the answer has been sent.
            workers.on(1, lambda n=5 * times: eventually(lambda: work() == (0, n), 10 * pace()))
        workers.run(rpc_workers.leave)


def test_an_end_that_somebody_never_comes_to_names_them_and_still_cleans_up():
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(rpc_workers.join)

        def end():
            if rpc_workers.rank == 2:
                return ""
            with timed(3, 0.2), pytest.raises(RuntimeError) as caught:
                rpc.shutdown(timeout=0.3)
            nothing_can_be_done(f"w{rpc_workers.rank}")
            return str(caught.value)

        told = workers.run(end)
        assert "timed out in _all_gather after 0.30 seconds; missing: w2" in told[0]
        assert workers.run(rpc_workers.resources)[:2] == before[:2]


def test_an_end_without_grace_waits_for_nobody():
    with Workers(2) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(rpc_workers.join)

        def end():
            pending = rpc.rpc_async("w1", nap, (0.3,))
            kept = rpc.remote("w1", double, (1,))
            with timed(0.6):
                rpc.shutdown(graceful=False)
            with timed(0.1), pytest.raises(PeerLost):
                pending.wait()
            with pytest.raises(RuntimeError, match="after deletion"):
                kept.to_here()

        workers.on(0, end)
        workers.on(1, functools.partial(rpc.shutdown, graceful=False))
        assert workers.run(rpc_workers.resources) == before


def test_an_end_right_after_the_beginning_is_fine():
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)

        def once(graceful):
            rpc_workers.join()
            rpc.shutdown(graceful=graceful)

        workers.run(once, True)
        workers.run(once, False)
        assert workers.run(rpc_workers.resources) == before


def test_threads_that_call_while_their_worker_leaves_are_told_and_do_not_hang():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def end():
            errors = []

            def call():
                try:
                    while True:
                        rpc.rpc_async("w1", double, (1,)).wait()
                        rpc.rpc_sync("w1", double, (1,))
                except RuntimeError as error:
                    errors.append(error)

            threads = [threading.Thread(target=call) for _ in range(4)]
            for each in threads:
                each.start()
            time.sleep(0.1)
            rpc.shutdown(graceful=False)
            for each in threads:
                each.join(3 * pace())
                assert not each.is_alive()
            assert len(errors) == 4

        workers.on(0, end)


def test_a_served_function_that_never_ends_does_not_hold_up_an_end_with_a_limit():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def begin():
            rpc_workers.held["call"] = rpc.rpc_async("w1", nap, (60,), timeout=0)
            time.sleep(0.05)

        def end():
            with timed(9), pytest.raises(RuntimeError) as caught:
                rpc.shutdown(timeout=0.5)
            return str(caught.value)

        workers.on(0, begin)
        told = workers.run(end)
        assert any("this worker waits for" in each and "nap on 'w1'" in each for each in told)


def test_a_program_that_ends_without_leaving_ends_at_once():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def use():
            rpc_workers.held["call"] = rpc.rpc_async("w1", nap, (30,))
            rpc_workers.held["value"] = rpc.remote("w1", double, (1,))
            return rpc.rpc_sync("w1", double, (1,))

        workers.on(0, use)
        assert workers.leave(0, limit=10) == 0
        assert "Fatal" not in workers.output(0)
        assert workers.leave(1, limit=10) == 0


def test_the_import_starts_nothing():
    script = (
        "import atexit, gc, os, threading\n"
        # Or collections take a third of this time, half of it when the interpreter ends.
        "gc.set_threshold(1_000_000)\n"
        "atexit.register(gc.freeze)\n"
        "import torch\n"
        "fds = len(os.listdir('/proc/self/fd'))\n"
        "import rallypoint.rpc, rallypoint.compat\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert len(os.listdir('/proc/self/fd')) == fds\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_group_of_one_is_a_group():
    with Workers(1) as workers:

        def case():
            rpc_workers.join()
            assert rpc.rpc_sync("w0", double, (1,)) == 2
            assert rpc.rpc_async(0, double, (1,)).wait() == 2
            assert rpc.remote("w0", double, (2,)).to_here() == 4
            assert rpc.rpc_sync("w0", value, (5,)).local_value() == 5
            assert list(rpc.rpc_stream("w0", range, (3,))) == [0, 1, 2]
            rpc.shutdown()

        workers.on(0, case)


def test_members_that_do_not_agree_on_their_number_are_told():
    with Workers(2) as workers:

        def come():
            with timed(5), pytest.raises((ConfigError, DeadlineExceeded, rpc.RpcError)) as caught:
                rpc.init_rpc(
                    f"w{rpc_workers.rank}",
                    rank=rpc_workers.rank,
                    world_size=2 + rpc_workers.rank,
                    store=rpc_workers.store(),
                    rpc_backend_options=rpc.NativeRpcBackendOptions(rpc_timeout=1),
                )
            nothing_can_be_done()
            return str(caught.value)

        assert any("world_size" in each for each in workers.run(come))


def test_the_end_of_one_is_no_surprise_to_those_who_are_idle():
    """They log no error, and hold nothing of it."""
    with Workers(3) as workers:
        workers.run(rpc_workers.join)
        workers.on(0, lambda: [rpc.rpc_sync(f"w{i}", double, (1,)) for i in (1, 2)])
        workers.run(rpc_workers.leave)
        for text in workers.run(lambda: list(rpc_workers.logged)):
            assert not [line for line in text if line.startswith(("ERROR", "CRITICAL"))]
        assert not any(workers.output(rank) for rank in range(3))


def test_what_was_asked_of_a_worker_before_it_served_is_not_lost():
    """Its listener is up before its init has finished."""
    with Workers(2) as workers:

        def come():
            rpc_workers.join()
            futures = [rpc.rpc_async(f"w{1 - rpc_workers.rank}", double, (i,)) for i in range(50)]
            return sum(each.wait() for each in futures)

        for _ in range(3):
            assert workers.run(come) == [2 * sum(range(50))] * 2
            workers.run(rpc_workers.leave)
            eventually(lambda: True)


# -- several threads ----------------------------------------------------------------------------


def in_threads(*acts: Any) -> list[Any]:
    """What each returns or raises, each on a thread of its own."""

    def outcome(act: Any) -> Any:
        try:
            return act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(acts)) as threads:
        return [each.result() for each in [threads.submit(outcome, act) for act in acts]]


def called(threads: int) -> bool:
    """Whether this many threads are in a call of shutdown."""
    return sum("rpc/finalization.py" in each for each in stacks()) >= threads


def stacks() -> list[str]:
    return ["".join(traceback.format_stack(each)) for each in sys._current_frames().values()]


def test_an_end_that_several_threads_ask_for_at_once_is_one_end():
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)
        for _ in range(3):
            workers.run(rpc_workers.join)

            def end():
                together = threading.Barrier(3)

                def one():
                    together.wait()
                    rpc.shutdown()

                # One that comes when all is over is refused, as any second shutdown is.
                found = in_threads(one, one, one)
                assert None in found
                assert all(each is None or "has not been initialized" in each for each in found)

            workers.run(end, limit=30 * pace())
        assert workers.run(rpc_workers.resources) == before


def test_who_waits_for_the_end_of_another_thread_returns_with_it():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def end():
            if rpc_workers.rank:
                eventually(lambda: rpc_workers.held.get("go"))
                return [rpc.shutdown()]
            return in_threads(rpc.shutdown, rpc.shutdown, rpc.shutdown, go)

        def go():
            eventually(lambda: called(3))
            rpc.rpc_sync("w1", may_go)

        assert workers.run(end, limit=30 * pace()) == [[None] * 4, [None]]


def may_go() -> None:
    rpc_workers.held["go"] = True


def test_who_waits_for_the_end_of_another_thread_raises_what_it_raises():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def end():
            return in_threads(*[functools.partial(rpc.shutdown, timeout=0.5)] * 2)

        found = workers.on(0, end, limit=30 * pace())
        assert all("GatherTimeout" in each for each in found)
        # One may reach its own limit while it waits for the other.
        assert any("missing: w1" in each for each in found)


@pytest.mark.parametrize("how", [{"graceful": False}, {"timeout": 0.3}])
def test_an_end_without_grace_or_with_a_shorter_limit_ends_one_that_waits(how):
    with Workers(2) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(rpc_workers.join)

        def end():
            def second():
                eventually(lambda: called(1))
                rpc.shutdown(**how)

            return in_threads(rpc.shutdown, second)

        first, second = workers.on(0, end, limit=30 * pace())
        assert "has left the group" in first
        if "timeout" in how:
            assert "GatherTimeout: shutdown() timed out after 0.30 seconds" in second
        else:
            assert second is None
        workers.on(1, functools.partial(rpc.shutdown, graceful=False))
        assert workers.run(rpc_workers.resources) == before


def test_an_end_in_a_thread_waits_for_the_call_that_the_main_thread_makes():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def end():
            if rpc_workers.rank:
                return rpc.shutdown()
            with ThreadPoolExecutor(1) as threads:
                pending = rpc.rpc_async("w1", nap, (0.5,))
                ending = threads.submit(rpc.shutdown)
                found = pending.wait()
                ending.result()
            return found

        assert workers.run(end, limit=30 * pace()) == [0.5, None]


def test_an_end_during_the_beginning_is_refused_and_the_beginning_goes_on(tmp_path):
    refused = tmp_path / "refused"
    with Workers(2) as workers:

        def begin():
            with ThreadPoolExecutor(1) as threads:
                joining = threads.submit(rpc_workers.join)
                eventually(lambda: any("in init_rpc" in each for each in stacks()))
                with timed(0.5), pytest.raises(rpc.RpcError, match="has not been initialized"):
                    rpc.shutdown()
                refused.touch()
                joining.result()

        begun = workers.begin(0, begin)
        eventually(refused.exists)  # until then it waits for the other one
        workers.on(1, rpc_workers.join)
        begun.result(30 * pace())
        assert workers.on(0, functools.partial(rpc.rpc_sync, "w1", double, (2,))) == 4
        workers.run(rpc_workers.leave)


def test_a_handler_that_interrupts_an_end_may_end_it_at_once_but_not_wait_for_it():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def end():
            told = []

            def handler(*_):
                try:
                    rpc.shutdown()
                except rpc.RpcError as error:
                    told.append(str(error))
                with contextlib.suppress(rpc.RpcError):  # a later signal, after the end
                    rpc.shutdown(graceful=False)

            signal.signal(signal.SIGUSR2, handler)
            main = threading.main_thread().ident

            def interrupt():
                eventually(lambda: called(1))
                # Python sees a signal only later if it comes just before the main thread starts to wait: send another one.
                while not over.wait(0.2):
                    signal.pthread_kill(main, signal.SIGUSR2)

            over = threading.Event()
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(rpc.RpcError):
                rpc.shutdown()
            over.set()
            thread.join()
            return told

        told = workers.on(0, end, limit=30 * pace())
        assert "signal handler that interrupted shutdown()" in told[0]

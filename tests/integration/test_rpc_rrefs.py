"""References: who keeps a value alive, when it goes, and what becomes of references when somebody dies."""

import functools
import gc
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rpc_workers
from pace import pace
from rallypoint import rpc
from rallypoint.errors import PeerLost
from rallypoint.rpc import finalization
from rpc_workers import Workers, eventually, timed


pytestmark = pytest.mark.integration


@pytest.fixture
def trio() -> Iterator[Workers]:
    """w0, w1, w2; in the end nobody refers to anybody's values, and nothing is left."""
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(functools.partial(rpc_workers.join, num_worker_threads=4))
        yield workers
        workers.run(forget_all)
        workers.run(nothing_is_referred_to)
        workers.run(rpc_workers.leave)
        assert workers.run(rpc_workers.resources) == before


values: "weakref.WeakSet[Value]" = weakref.WeakSet()


def forget_all() -> None:
    rpc_workers.held.clear()
    gc.collect()


def nothing_is_referred_to() -> None:
    eventually(
        lambda: not any(rpc.statistics()["rrefs"][what] for what in ("owned", "forks", "users"))
    )


class Value:
    """Something that can be seen to live."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        values.add(self)

    def add(self, x: int = 0) -> int:
        self.number += x
        return self.number

    def fail(self) -> None:
        raise ValueError("bad")

    def myself(self) -> "Value":
        return self

    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @rpc.async_execution
    def later(self, to: str) -> Any:
        return rpc.rpc_async(to, living).then(lambda done: (self.number, done.value()))

    def __reduce__(self) -> Any:
        return Value, (self.number,)


def living() -> int:
    gc.collect()
    return len(values)


def slow_value(seconds: float) -> Value:
    time.sleep(seconds)
    return Value(7)


def fail() -> None:
    raise ValueError("it could not be made")


def keep(name: str, what: Any) -> None:
    rpc_workers.held[name] = what


def drop(name: str) -> None:
    rpc_workers.held.pop(name, None)
    gc.collect()


def fetch(rref: Any, timeout: float = -1.0) -> Any:
    return rref.to_here(timeout).number


def fetch_kept(name: str) -> Any:
    return rpc_workers.held[name].to_here().number


def is_confirmed(rref: Any) -> bool:
    return rref.confirmed_by_owner()


def pass_on(rref: Any, ways: list[str]) -> Any:
    """Pass it through all of these workers, which keep nothing; the last one fetches."""
    if not ways:
        return rref.to_here().number
    return rpc.rpc_sync(ways[0], pass_on, (rref, ways[1:]))


def own(number: int) -> Any:
    return rpc.RRef(Value(number))


def unpack(what: Any) -> Any:
    several = sorted(each.to_here().number for each in what["several"])
    return [*several, what["one"].to_here().number]


# -- what a reference does ----------------------------------------------------------------------


def test_a_value_made_elsewhere_is_fetched_used_and_called(trio):
    def case():
        rref = rpc.remote("w1", Value, (5,))
        assert (rref.owner().name, rref.owner_name(), rref.is_owner()) == ("w1", "w1", False)
        assert rref.to_here().number == 5
        assert rref.rpc_sync().add(3) == 8
        assert rref.rpc_async().add(1).wait() == 9
        assert rref.remote().add(1).to_here() == 10
        assert rref.to_here().number == 10
        assert rref.rpc_sync().later("w2") == (10, 0)
        assert rref.rpc_async().later("w2").wait() == (10, 0)
        with pytest.raises(ValueError, match="bad"):
            rref.rpc_sync().fail()
        for way in (rref.rpc_sync, rref.remote):
            with pytest.raises(AttributeError, match="has no attribute 'missing'"):
                way().missing()
        with pytest.raises(
            AttributeError, match="__len__ cannot be called through a reference: pass"
        ):
            rref.rpc_sync().__len__()
        with pytest.raises(rpc.RpcTimeout):
            rref.rpc_sync(timeout=0.05).nap(0.2)
        assert rpc.rpc_sync("w1", living) == 1

    trio.on(0, case)


def test_the_owner_has_the_value_itself_and_others_a_copy(trio):
    def case():
        mine = rpc.RRef(Value(3))
        assert mine.is_owner()
        assert mine.confirmed_by_owner()
        assert mine.local_value() is mine.to_here() is mine.local_value()
        assert rpc.rpc_sync("w1", fetch, (mine,)) == 3
        assert rpc.remote("w0", mine.local_value().add, (0,)).to_here() == 3
        own_by_remote = rpc.remote("w0", Value, (4,))
        assert own_by_remote.to_here() is own_by_remote.local_value()
        theirs = rpc.remote("w1", Value)
        with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user.*name=w0"):
            theirs.local_value()

    trio.on(0, case)


def scripted() -> Any:
    return torch.jit.script(torch.nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_module_is_fetched_and_called(trio):
    def case():
        inputs = torch.ones(2)
        rref = rpc.remote("w1", scripted)
        expected = rref.to_here()(inputs)
        for got in (rref.rpc_sync().forward(inputs), rref.remote().forward(inputs).to_here()):
            assert torch.equal(got, expected)

    trio.on(0, case)


def test_a_tensor_is_fetched_as_it_is(trio):
    def case():
        rref = rpc.remote("w1", torch.ones, (300_000,))
        assert rref.to_here().sum() == 300_000
        total = rpc.remote("w2", torch.add, (torch.ones(3), 1))
        assert total.to_here().tolist() == [2, 2, 2]
        assert rref.rpc_sync().sum().item() == 300_000

    trio.on(0, case)


def test_fetching_waits_until_the_value_has_been_made(trio):
    def case():
        with timed(0.1):
            rref = rpc.remote("w1", slow_value, (0.2,))
        with timed(0.5, 0.1):
            assert rref.to_here().number == 7
        again = rpc.remote("w1", slow_value, (0.3,))
        with timed(0.25), pytest.raises(rpc.RpcTimeout, match="RPC ran for more than"):
            again.to_here(timeout=0.05)
        assert again.to_here().number == 7

    trio.on(0, case)


def test_a_value_that_could_not_be_made_says_why_each_time_and_to_everyone(trio):
    def case():
        for to in ("w0", "w1"):
            rref = rpc.remote(to, fail)
            for _ in range(2):
                with pytest.raises(ValueError, match="it could not be made") as caught:
                    rref.to_here(timeout=5)
            assert "in fail" in str(caught.value.__cause__)
            with pytest.raises(ValueError, match="it could not be made"):
                rpc.rpc_sync("w2", fetch, (rref,), timeout=5)
            with pytest.raises(ValueError, match="it could not be made"):
                rref.rpc_sync(timeout=5).add()

    trio.on(0, case)


def test_a_reference_cannot_leave_by_another_way_than_a_call(trio):
    def case():
        rref = rpc.remote("w1", Value)
        with pytest.raises(RuntimeError, match="rref can only be pickled when using RPC"):
            pickle.dumps(rref)
        rref.to_here()

    trio.on(0, case)


def test_without_a_group_there_are_no_references():
    with Workers(1) as workers:

        def case():
            with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you"):
                rpc.RRef(1)

        workers.on(0, case)


# -- how long a value lives ---------------------------------------------------------------------


def test_a_value_goes_when_its_last_reference_does(trio):
    def case():
        first = rpc.remote("w1", Value)
        second = rpc.remote("w1", Value)
        first.to_here()
        second.to_here()
        assert rpc.rpc_sync("w1", living) == 2
        del first
        eventually(lambda: rpc.rpc_sync("w1", living) == 1)
        time.sleep(0.05)
        assert second.to_here().number == 0
        del second
        eventually(lambda: rpc.rpc_sync("w1", living) == 0)

    trio.on(0, case)


def test_a_reference_that_was_passed_on_keeps_the_value_when_the_first_one_goes(trio):
    def case():
        rref = rpc.remote("w1", Value, (6,))
        rpc.rpc_sync("w2", keep, ("it", rref))
        del rref
        gc.collect()
        time.sleep(0.1)
        assert rpc.rpc_sync("w2", fetch_kept, ("it",)) == 6
        assert rpc.rpc_sync("w1", living) == 1
        rpc.rpc_sync("w2", drop, ("it",))
        eventually(lambda: rpc.rpc_sync("w1", living) == 0)

    trio.on(0, case)


def test_a_reference_that_is_on_its_way_keeps_the_value(trio):
    """The caller drops its own before the callee has even started."""

    def case():
        for number in range(20):
            future = rpc.rpc_async("w2", fetch, (rpc.remote("w1", Value, (number,)),))
            gc.collect()
            assert future.wait() == number
        eventually(lambda: rpc.rpc_sync("w1", living) == 0)

    trio.on(0, case)


def test_a_reference_passes_through_many_workers(trio):
    def case():
        ways = ["w1", "w2", "w0", "w1", "w0", "w2", "w2", "w1"]
        assert rpc.rpc_sync("w2", pass_on, (rpc.remote("w1", Value, (9,)), ways)) == 9
        assert rpc.rpc_sync("w2", pass_on, (rpc.RRef(Value(8)), ways)) == 8
        eventually(lambda: rpc.rpc_sync("w1", living) == 0)
        eventually(lambda: living() == 0)

    trio.on(0, case)


def test_references_come_back_as_results_and_inside_of_other_things(trio):
    def case():
        theirs = rpc.rpc_sync("w1", own, (4,))
        assert theirs.owner_name() == "w1"
        assert theirs.to_here().number == 4
        home = rpc.rpc_sync("w1", echo, (rpc.RRef(Value(5)),))
        assert home.is_owner()
        assert home.local_value().number == 5
        what = {"several": [theirs, home, theirs], "one": rpc.remote("w2", Value, (1,))}
        assert rpc.rpc_sync("w2", unpack, (what,)) == [4, 4, 5, 1]
        nested = rpc.remote("w1", own, (6,))
        assert nested.to_here().to_here().number == 6

    trio.on(0, case)


def echo(x: Any) -> Any:
    return x


def test_references_among_the_arguments_are_known_to_the_owner_before_the_function_runs(trio):
    def case():
        for _ in range(10):
            assert rpc.rpc_sync("w2", is_confirmed, (rpc.remote("w1", slow_value, (0.005,)),))
            assert rpc.remote("w2", is_confirmed, (rpc.remote("w1", Value),)).to_here()

    trio.on(0, case)


def test_values_in_cycles_and_finalizers_on_other_threads_go_too(trio):
    def case():
        def make_and_drop(number):
            for i in range(10):
                rref = rpc.remote(f"w{1 + number % 2}", Value, (i,))
                cycle = [rref]
                cycle.append(cycle)
                if i % 2:
                    assert rref.to_here().number == i

        threads = [threading.Thread(target=make_and_drop, args=(i,)) for i in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        gc.collect()
        eventually(lambda: rpc.rpc_sync("w1", living) + rpc.rpc_sync("w2", living) == 0)

    trio.on(0, case)


def test_a_call_that_is_refused_or_given_up_does_not_keep_its_references_alive(trio):
    def case():
        rref = rpc.remote("w1", Value)
        rref.to_here()
        with pytest.raises(TypeError):
            rpc.rpc_sync("w2", keep, ("it", [rref, threading.Lock()]))
        with pytest.raises(rpc.RpcTimeout):
            rpc.rpc_sync("w2", nap_with, (0.2, rref), timeout=0.05)
        future = rpc.rpc_async("w2", nap_with, (0.2, rref))
        future.cancel()
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("w2", divide_with, (rref,))
        del rref, future
        gc.collect()
        eventually(lambda: rpc.rpc_sync("w1", living) == 0)

    trio.on(0, case)


def nap_with(seconds: float, rref: Any) -> None:
    time.sleep(seconds)


def divide_with(rref: Any) -> float:
    return 1 / 0


def test_a_reference_whose_making_timed_out_cannot_be_used_and_leaves_nothing(trio):
    def case():
        rref = rpc.remote("w1", slow_value, (0.3,), timeout=0.05)
        with pytest.raises(rpc.RpcTimeout):
            rref._get_future().wait()
        with timed(0.5), pytest.raises(RuntimeError, match="RRef creation via rpc.remote"):
            rref.to_here()
        with timed(0.5), pytest.raises(RuntimeError, match="RRef creation via rpc.remote"):
            rpc.rpc_sync("w2", fetch, (rref,))
        del rref
        eventually(lambda: rpc.rpc_sync("w1", living) == 0)

    trio.on(0, case)


# -- death --------------------------------------------------------------------------------------


def test_values_whose_owner_is_dead_are_lost_at_once_also_for_those_who_already_wait():
    with Workers(3) as workers:
        workers.run(rpc_workers.join)

        def hold():
            rref = rpc.remote("w1", Value, (1,))
            rref.to_here()
            rpc_workers.held["it"] = rref
            rpc_workers.held["unmade"] = rpc.remote("w1", slow_value, (60,))
            rpc.rpc_sync("w2", keep, ("it", rref))

        def fetch_it(name):
            began = time.monotonic()
            with pytest.raises(PeerLost) as caught:
                rpc_workers.held[name].to_here()
            assert caught.value.worker == "w1"
            return time.monotonic() - began

        workers.on(0, hold)
        waiting = workers.begin(0, fetch_it, "unmade")
        time.sleep(0.1)
        workers.kill(1)
        assert waiting.result() < 2 * pace()
        for rank in (0, 2):
            assert workers.on(rank, fetch_it, "it") < 0.5 * pace()


def test_values_that_only_the_dead_referred_to_are_let_go():
    with Workers(3) as workers:
        workers.run(rpc_workers.join)

        def hold():
            rpc_workers.held["it"] = rpc.remote("w1", Value, (1,))
            rpc_workers.held["it"].to_here()
            rpc_workers.held["mine"] = rpc.RRef(Value())
            rpc.rpc_sync("w1", keep, ("theirs", rpc_workers.held["mine"]))

        workers.on(0, hold)
        assert workers.on(1, living) == 1
        # w1 refers to a value of w0's, and w0 to one of w1's.
        workers.kill(0)
        workers.on(1, lambda: eventually(lambda: living() == 0))


def test_a_reference_passed_on_by_one_who_dies_right_after_either_works_or_says_why():
    with Workers(3) as workers:
        workers.run(rpc_workers.join)

        def hand_over():
            rref = rpc.remote("w1", Value, (1,))
            rref.to_here()
            rpc.rpc_sync("w2", keep, ("it", rref))

        workers.on(0, hand_over)
        workers.kill(0)

        def use():
            time.sleep(0.2)
            return rpc_workers.held["it"].to_here(timeout=5).number

        assert workers.on(2, use) == 1


def test_a_leak_is_named_at_shutdown():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def hold():
            rpc_workers.held["mine"] = rpc.RRef(Value())
            rpc.rpc_sync("w1", keep, ("theirs", rpc_workers.held["mine"]))

        def leave():
            # As torch's own suite does: references of others are not given back first.
            finalization._delete_all_user_and_unforked_owner_rrefs = lambda *_: None
            if rpc.get_worker_info().name == "w1":
                # What a worker holds is given back once its end is noticed: w0 looks before that.
                end = finalization.finalize
                finalization.finalize = lambda *args, **more: (time.sleep(1), end(*args, **more))
            try:
                rpc.shutdown()
            except RuntimeError as error:
                assert not rpc.api._is_current_rpc_agent_set()
                return str(error)
            return ""

        workers.on(0, hold)
        assert workers.run(leave)[0].startswith("Leaking RRefs: Leaking RRef: ")


def test_references_cannot_be_used_after_shutdown():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def hold():
            rpc_workers.held["it"] = rpc.remote("w1", Value)
            rpc_workers.held["it"].to_here()

        def use():
            for way in ("to_here", "rpc_sync().add", "remote().add"):
                with pytest.raises(RuntimeError):
                    eval(f"it.{way}()", {"it": rpc_workers.held["it"]})
            with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion"):
                rpc_workers.held["it"].to_here()

        workers.on(0, hold)
        workers.run(rpc_workers.leave)
        workers.on(0, use)


def absent(rref: Any) -> None:
    """Removed on w1."""


def lacks_a_function() -> None:
    delattr(sys.modules[Value.__module__], "absent")


def count_owned() -> int:
    return int(rpc.api._rref_context_get_debug_info()["num_owner_rrefs"])


def test_a_reference_in_a_call_that_could_not_be_read_is_let_go(trio):
    """The callee does not find the function, so it does not get to the reference among the arguments."""

    def case() -> None:
        rref = rpc.remote("w1", Value, (3,))
        rref.to_here()
        with pytest.raises(RuntimeError, match="Can't get attribute 'absent'"):
            rpc.rpc_sync("w1", absent, (rref,))
        with pytest.raises(RuntimeError, match="Can't get attribute 'absent'"):
            list(rpc.rpc_stream("w1", absent, (rref,)))

    trio.on(1, lacks_a_function)
    trio.on(0, case)
    trio.on(0, forget_all)
    trio.on(1, lambda: eventually(lambda: count_owned() == 0, 10))

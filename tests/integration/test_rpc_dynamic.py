"""Groups whose members come and go: who is called, who is told, and what a name means after a death."""

import functools
import gc
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rpc_workers
from ports import free_port
from rallypoint import rpc
from rallypoint.errors import DeadlineExceeded, PeerLost
from rpc_workers import Workers, eventually, timed


pytestmark = pytest.mark.integration

happened: list[Any] = []


@pytest.fixture
def trio() -> Iterator[Workers]:
    """w0, w1, w2 of a dynamic group; those that are left leave in the end and hold nothing."""
    with Workers(3) as workers:
        before = workers.run(rpc_workers.resources)
        workers.run(rpc_workers.join_dynamic)
        workers.run(lambda: rpc.wait_for(["w0", "w1", "w2"], 5))
        yield workers
        workers.run(leave_if_in)
        for resources in workers.run(rpc_workers.resources):
            assert resources == before[0] | {"fds": resources["fds"]}
            assert sum(resources["fds"].values()) == sum(before[0]["fds"].values())


def leave_if_in() -> None:
    rpc_workers.held.clear()
    if rpc.api._is_current_rpc_agent_set():
        rpc.shutdown()


def seen() -> list[Any]:
    return list(happened)


def double(x: Any) -> Any:
    return 2 * x


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def note_and_nap(seconds: float) -> float:
    happened.append("naps")
    return nap(seconds)


def nap_and_note(seconds: float) -> None:
    time.sleep(seconds)
    happened.append("done")


def names() -> list[str]:
    return [each.name for each in rpc.members()[1]]


def listen() -> None:
    rpc.on_join(lambda who: happened.append(f"+{who.name}"))
    rpc.on_leave(lambda who, reason: happened.append((f"-{who.name}", reason)))


def listen_and_call() -> None:
    rpc.on_join(lambda who: happened.append(rpc.rpc_sync(who, double, (21,))))


def named() -> list[str]:
    return [each if isinstance(each, str) else each[0] for each in happened]


def call(to: Any) -> Any:
    return rpc.rpc_sync(to, double, (3,))


def call_in_the_end(to: str) -> Any:
    """Call until the name means a worker that answers."""

    def attempt():
        try:
            return rpc.rpc_sync(to, double, (3,), timeout=5)
        except rpc.RpcError:
            return None

    return eventually(attempt)


def test_who_comes_later_calls_and_is_called_at_once(trio):
    def case():
        return [rpc.rpc_sync(f"w{i}", double, (i,)) for i in range(3)]

    assert trio.run(case) == [[0, 2, 4]] * 3
    new = trio.more()
    trio.on(new, rpc_workers.join_dynamic, "late")
    assert trio.on(new, call, "w0") == 6
    # w1 has not been told of it: its first look at the journal shows it.
    assert trio.on(1, call, "late") == 6
    assert trio.on(2, call, 3) == 6, "by its number"


def test_all_agree_on_who_is_there_at_each_epoch(trio):
    trio.run(listen)
    first = trio.run(rpc.members)
    epochs = []
    for turn in range(3):
        trio.on(2, rpc.shutdown)
        trio.on(2, rpc_workers.join_dynamic, f"again{turn}")
        found = [
            trio.on(rank, lambda name=f"again{turn}": (rpc.wait_for(name, 5), rpc.members())[1])
            for rank in range(3)
        ]
        assert len({epoch for epoch, _ in found}) == 1, found
        assert all(each == found[0] for each in found)
        epochs.append(found[0][0])
    assert epochs == sorted(set(epochs))
    assert epochs[0] > first[0][0]
    assert all("w2" not in each for each in trio.run(names))


def test_callbacks_tell_who_has_come_and_who_has_left_in_that_order(trio):
    trio.on(0, listen)
    new = trio.more()
    trio.on(new, rpc_workers.join_dynamic, "late")
    trio.on(new, rpc.shutdown)
    trio.on(1, rpc.shutdown)
    trio.on(0, lambda: eventually(lambda: named() == ["+late", "-late", "-w1"]))
    assert [reason for _, reason in trio.on(0, seen)[1:]] == ["it has shut down"] * 2


def test_a_callback_that_fails_does_not_keep_the_others_from_being_called(trio):
    def listen_badly():
        rpc.on_join(lambda _: 1 / 0)
        listen()

    trio.on(0, listen_badly)
    new = trio.more()
    trio.on(new, rpc_workers.join_dynamic, "late")
    trio.on(0, lambda: eventually(lambda: named() == ["+late"]))
    assert any("a callback of the group failed" in line for line in trio.on(0, all_logged))


def all_logged() -> list[str]:
    return list(rpc_workers.logged)


def test_a_callback_may_call_the_one_that_has_come(trio):
    trio.on(0, listen_and_call)
    new = trio.more()
    trio.on(new, rpc_workers.join_dynamic, "late")
    trio.on(0, lambda: eventually(lambda: seen() == [42]))


def test_waiting_for_names_ends_when_all_are_there_and_says_who_is_not(trio):
    def wait():
        with timed(5):
            found = rpc.wait_for(["w1", "late", "later"], timeout=5)
        return [each.name for each in found]

    waiting = [trio.begin(rank, wait) for rank in range(3)]
    for name in ("later", "late"):
        new = trio.more()
        trio.on(new, rpc_workers.join_dynamic, name)
    assert [each.result() for each in waiting] == [["w1", "late", "later"]] * 3

    def wait_in_vain():
        with timed(1, 0.2), pytest.raises(DeadlineExceeded) as caught:
            rpc.wait_for(["w1", "nobody", "noone"], timeout=0.3)
        assert "nobody, noone not in the group" in str(caught.value)
        with timed(0.2):
            assert rpc.wait_for("w1")[0].name == "w1"

    trio.on(0, wait_in_vain)


def test_one_that_has_left_is_unknown_and_calls_to_it_fail_at_once(trio):
    trio.on(0, call, "w1")
    number = trio.on(1, rpc.get_worker_info).id
    trio.on(1, rpc.shutdown)

    def case():
        eventually(lambda: "w1" not in names())
        for to in ("w1", number):
            # Until its connection has ended too, the error may be about that.
            eventually(lambda to=to: "could not find destination" in refused(to))

    def refused(to):
        with timed(0.5), pytest.raises(rpc.RpcError) as caught:
            rpc.rpc_sync(to, double, (1,))
        return str(caught.value)

    trio.on(0, case)
    trio.on(2, case)


def test_a_death_is_told_to_everybody_and_the_name_is_free_for_another(trio):
    trio.run(listen)
    trio.on(0, call, "w1")
    trio.kill(1)

    def hear():
        eventually(lambda: "-w1" in named())
        eventually(lambda: "w1" not in names())

    # Only w0 had a connection to it; w2 hears of it from the group.
    for rank in (0, 2):
        trio.on(rank, hear)
    new = trio.more()
    trio.on(new, rpc_workers.join_dynamic, "w1")
    for rank in (0, 2):
        assert trio.on(rank, call_in_the_end, "w1") == 6
    ids = trio.on(0, lambda: {each.name: each.id for each in rpc.members()[1]})
    assert ids["w1"] == 3, "numbers are not used again"


def test_a_name_that_is_in_use_is_refused_and_the_group_goes_on(trio):
    new = trio.more()

    def come():
        with timed(5), pytest.raises(rpc.RpcError, match="w1"):
            rpc_workers.join_dynamic("w1")
        assert not rpc.api._is_current_rpc_agent_set()
        rpc_workers.join_dynamic("another")
        return rpc.rpc_sync("w1", double, (1,))

    assert trio.on(new, come) == 2


def test_one_that_leaves_in_good_order_finishes_what_it_has_asked_for(trio):
    def leave():
        rpc.rpc_async("w1", nap_and_note, (0.3,))
        rpc.shutdown()

    trio.on(0, leave)
    assert trio.on(1, seen) == ["done"]


def test_one_that_leaves_finishes_what_it_is_asked_for(trio):
    asking = trio.begin(0, lambda: rpc.rpc_sync("w1", note_and_nap, (0.4,)))
    trio.on(1, lambda: eventually(seen))
    trio.on(1, rpc.shutdown)
    assert asking.result() == 0.4


def test_calls_to_one_that_dies_while_many_come_and_go_all_end(trio):
    stop = 1.5

    def churn():
        until = time.monotonic() + stop
        count = 0
        rpc.shutdown()
        while count <= 2 or time.monotonic() < until:
            rpc_workers.join_dynamic(f"guest{rpc_workers.rank}-{count}")
            rpc.rpc_sync("w0", double, (1,))
            rpc.shutdown()
            count += 1
        rpc_workers.join_dynamic("last")
        return count

    def calls():
        until = time.monotonic() + stop
        outcomes = set()
        while not outcomes or time.monotonic() < until:
            for name in names():
                try:
                    assert rpc.rpc_sync(name, double, (2,), timeout=5) == 4
                    outcomes.add("answered")
                except rpc.RpcError as error:
                    assert isinstance(error, PeerLost) or "could not find" in str(error), error
                    outcomes.add("gone")
        return sorted(outcomes)

    begun = [trio.begin(0, calls), trio.begin(2, churn)]
    time.sleep(0.5)
    trio.kill(1)
    outcomes, count = (each.result() for each in begun)
    assert "answered" in outcomes
    assert count > 2
    trio.on(0, lambda: eventually(lambda: names() == ["w0", "last"]))


def test_one_that_was_stopped_for_a_while_is_still_a_member(trio):
    trio.on(0, call, "w1")
    trio.signal(1, signal.SIGSTOP)

    def late():
        with pytest.raises(rpc.RpcTimeout):
            rpc.rpc_sync("w1", double, (1,), timeout=0.3)

    trio.on(0, late)
    trio.signal(1, signal.SIGCONT)
    assert trio.on(0, call, "w1") == 6
    assert sorted(trio.on(0, names)) == ["w0", "w1", "w2"]


def test_references_to_values_of_one_that_left_say_so(trio):
    def hold():
        rpc_workers.held["it"] = rpc.remote("w1", double, (1,))
        assert rpc_workers.held["it"].to_here() == 2

    def use():
        eventually(lambda: "w1" not in names())
        with timed(1), pytest.raises(rpc.RpcError):
            rpc_workers.held["it"].to_here()

    trio.on(0, hold)
    trio.on(1, functools.partial(rpc.shutdown, graceful=False))
    trio.on(0, use)


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_who_comes_with_the_rank_of_one_that_is_gone_is_not_taken_for_it(trio, end):
    def come():
        rpc.init_rpc("actor", rank=7, store=rpc_workers.store())

    def use(peer):
        assert rpc.remote(peer, double, (2,)).to_here() == 4
        local = torch.ones(2, requires_grad=True)
        with rpc.autograd.context() as context:
            rpc.autograd.backward(context, [rpc.rpc_sync(peer, double, (local,)).sum()])
            assert rpc.autograd.get_gradients(context)[local].tolist() == [2.0, 2.0]

    def hold():
        rpc_workers.held["it"] = rpc.remote("actor", double, (1,))
        assert rpc_workers.held["it"].to_here() == 2

    def use_held():
        with timed(1), pytest.raises(PeerLost, match="which owns the value, is lost"):
            rpc_workers.held["it"].to_here()
        # So does a call through the reference.
        with timed(1), pytest.raises(PeerLost, match="which owns the value, is lost"):
            rpc_workers.held["it"].rpc_sync().bit_length()

    first = trio.more()
    trio.on(first, come)
    trio.on(0, use, "actor")
    trio.on(first, use, "w0")
    trio.on(0, hold)
    if end == "leaves":
        trio.on(first, functools.partial(rpc.shutdown, graceful=False))
    else:
        trio.kill(first)
    trio.on(0, lambda: eventually(lambda: "actor" not in names()))
    second = trio.more()
    trio.on(second, come)
    trio.on(second, use, "w0")
    trio.on(0, use, "actor")
    trio.on(0, use_held)


def test_ranks_may_be_given_and_are_unique(trio):
    new, other = trio.more(), trio.more()

    def come(name, rank):
        rpc.init_rpc(name, rank=rank, store=rpc_workers.store())
        return rpc.get_worker_info().id

    assert trio.on(new, come, "tenth", 10) == 10

    def refused():
        with timed(5), pytest.raises(rpc.RpcError, match="10"):
            come("another", 10)

    trio.on(other, refused)
    assert trio.on(0, call_in_the_end, "tenth") == 6
    assert trio.on(0, call, 10) == 6


def test_what_only_dynamic_groups_do_is_refused_in_a_static_one():
    with Workers(2) as workers:
        workers.run(rpc_workers.join)

        def case():
            for way in (
                lambda: rpc.wait_for("w1"),
                lambda: rpc.on_join(print),
                lambda: rpc.on_leave(print),
            ):
                with pytest.raises(rpc.RpcError, match="this group is static"):
                    way()
            epoch, found = rpc.members()
            assert (epoch, [each.name for each in found]) == (1, ["w0", "w1"])

        workers.on(0, case)


def test_static_and_dynamic_members_do_not_mix():
    with Workers(2) as workers:
        prefix = "rpc_prefix_0"
        workers.on(0, rpc_workers.join_dynamic)

        def come():
            with timed(5), pytest.raises(rpc.RpcError, match="mixes statically and dynamically"):
                rpc_workers.join(rpc_timeout=1)

        assert prefix
        workers.on(1, come)


def test_many_join_at_the_same_moment_and_all_see_all():
    with Workers(8) as workers:
        workers.run(rpc_workers.join_dynamic)
        wanted = [f"w{i}" for i in range(8)]

        def case():
            rpc.wait_for(wanted, timeout=10)
            assert sorted(names()) == wanted
            futures = [rpc.rpc_async(name, double, (1,)) for name in wanted]
            return sum(each.wait() for each in futures)

        assert workers.run(case) == [16] * 8
        threads = threading.active_count()
        workers.run(rpc_workers.leave)
        assert threading.active_count() == threads


def test_a_name_means_the_successor_though_the_predecessor_still_owes_an_answer(trio):
    new = trio.more()

    def begin() -> None:
        rpc_workers.held["owed"] = rpc.rpc_async("w1", nap, (2.0,))
        assert call("w1") == 6

    def call_the_successor() -> None:
        eventually(lambda: any(each.id == 3 for each in rpc.members()[1]))
        assert not rpc_workers.held["owed"].done()
        assert call("w1") == 6
        with pytest.raises(PeerLost):
            rpc_workers.held["owed"].wait()

    trio.on(0, begin)
    leaving = trio.begin(1, functools.partial(rpc.shutdown, graceful=False))
    trio.on(0, lambda: eventually(lambda: "w1" not in names()))
    trio.on(new, rpc_workers.join_dynamic, "w1")
    trio.on(0, call_the_successor)
    leaving.result()


def join_at(address: str, name: str) -> None:
    rpc.init_rpc(name, rpc_backend_options=rpc.NativeRpcBackendOptions(init_method=address))


def leave_and_collect() -> None:
    rpc.shutdown()
    gc.collect()


def test_who_serves_the_store_may_leave_and_come_back() -> None:
    """Its process still serves it: the group goes on, others join, and so does that process."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with Workers(3) as workers:
        workers.on(0, join_at, address, "a")
        workers.on(1, join_at, address, "b")
        workers.on(0, leave_and_collect)
        workers.on(2, join_at, address, "c")
        assert workers.on(1, call, "c") == 6
        workers.on(0, join_at, address, "a")
        assert workers.on(0, call, "c") == workers.on(2, call, "a") == 6
        for rank in (1, 2, 0):
            workers.on(rank, rpc_workers.leave)

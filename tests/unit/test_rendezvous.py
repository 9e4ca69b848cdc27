"""Fixed membership over the memory store: every node gets the same plan, or learns why not."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, RendezvousTimeout
from rallypoint.rendezvous import RendezvousInfo
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.dynamic import DynamicRendezvous, Listener
from rallypoint.rendezvous.fixed_home import FixedHome
from rallypoint.rendezvous.lease import Leases
from rallypoint.rendezvous.protocol import Timing
from rallypoint.rendezvous.quorum import Settings, natural_key
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec


def node(
    store: MemoryStore, name: str, *, rank: int | None, nodes: int, join: float = 20.0, **more: Any
) -> DynamicRendezvous:
    return DynamicRendezvous(
        FixedHome(lambda: store),
        backend="static",
        run_id="job",
        settings=Settings(min_nodes=nodes, max_nodes=nodes),
        timing=Timing(join=join, lease=5.0),
        host=name,
        local_addr="127.0.0.1",
        given_rank=rank,
        say=lambda _: None,
        **more,
    )


def meet(nodes: list[DynamicRendezvous]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(lambda each: each.next_rendezvous(), nodes))


def end(*nodes: DynamicRendezvous) -> None:
    for each in nodes:
        each.shutdown()


@pytest.mark.parametrize("num_nodes", [1, 2, 7])
def test_given_ranks_are_kept_whatever_the_order_of_arrival(num_nodes: int) -> None:
    store = MemoryStore()
    nodes = [node(store, f"host{r}", rank=r, nodes=num_nodes) for r in reversed(range(num_nodes))]
    infos = meet(nodes)
    assert [info.rank for info in infos] == list(reversed(range(num_nodes)))
    for info in infos:
        assert [member.host for member in info.members] == [f"host{r}" for r in range(num_nodes)]
        _store, _rank, world_size = info
        assert world_size == num_nodes
    end(*nodes)


def test_ranks_that_were_not_given_follow_the_natural_order_of_names() -> None:
    store = MemoryStore()
    names = ["n10", "n2", "n1"]
    nodes = [node(store, name, rank=None, nodes=3) for name in names]
    found = {name: info.rank for name, info in zip(names, meet(nodes), strict=True)}
    assert found == {"n1": 0, "n2": 1, "n10": 2}
    end(*nodes)


def test_the_next_generation_waits_for_all_again() -> None:
    store = MemoryStore()
    nodes = [node(store, f"host{r}", rank=r, nodes=2) for r in range(2)]
    assert [i.generation for i in meet(nodes)] == [0, 0]
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(nodes[1].next_rendezvous)
        with pytest.raises(TimeoutError):
            one.result(0.2)  # the plan of generation 0 exists, but is not taken for this one
        assert nodes[0].next_rendezvous().generation == 1
        assert one.result(20).generation == 1
    end(*nodes)


def test_a_time_out_names_who_came_and_who_is_missing() -> None:
    lone = node(MemoryStore(), "hostA", rank=0, nodes=3, join=0.2)
    with pytest.raises(RendezvousTimeout) as caught:
        lone.next_rendezvous()
    assert caught.value.missing == (1, 2)
    assert "hostA" in str(caught.value) and "1 of 3" in str(caught.value)
    end(lone)


def test_two_nodes_with_one_rank_are_told_apart() -> None:
    store = MemoryStore()
    first, second = (node(store, name, rank=1, nodes=2, join=0.5) for name in "ab")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.next_rendezvous)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        with pytest.raises(ConfigError, match="host a has this rank|a has this rank"):
            second.next_rendezvous()
        with pytest.raises(RendezvousTimeout):
            waiting.result(20)
    end(first, second)


@pytest.mark.parametrize(("earlier", "later"), [("a2", "a10"), ("a", "b"), ("n9-b1", "n9-b02")])
def test_names_are_sorted_as_people_number_them(earlier: str, later: str) -> None:
    assert natural_key(earlier) < natural_key(later)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 80), st.booleans()), max_size=30))
def test_a_lease_is_lost_after_its_time_without_a_move_and_not_before(
    steps: list[tuple[int, bool]],
) -> None:
    """Of a pause in which the observer itself was stopped, half a lease counts."""
    leases, now, counter, waited = Leases(timeout=5.0), 0.0, 0, 0.0
    leases.observe(now, {1: counter})
    for eighths, moves in steps:
        pause = eighths / 8  # exact, as binary fractions are
        now += pause
        waited += min(pause, 2.5)
        if moves:
            counter += 1
            waited = 0.0
        assert leases.observe(now, {1: counter}) == ((1,) if waited > 5.0 else ())


def test_nodes_are_not_lost_because_all_of_them_stood_still() -> None:
    """A job that Slurm has suspended, or a store that did not answer: the first node to look has seen no beat since."""
    leases = Leases(timeout=5.0)
    for second in range(10):
        assert leases.observe(float(second), {1: second}) == ()
    assert leases.observe(3600.0, {1: 9}) == ()
    assert leases.observe(3600.5, {1: 10}) == (), "it was only a little later to wake up"
    found = [second for second in range(1, 20) if leases.observe(3600.5 + second, {1: 10})]
    assert found[0] == 6, "and a dead one is found one lease later"


def test_a_node_that_came_back_starts_a_fresh_lease() -> None:
    leases = Leases(timeout=1.0)
    leases.observe(0.0, {1: 7})
    leases.observe(2.0, {})
    assert leases.observe(10.0, {1: 7}) == ()


def test_a_node_that_goes_on_waiting_is_told_of_again_in_case_the_news_was_overwritten() -> None:
    told: list[int] = []
    handler = DynamicRendezvous(
        FixedHome(MemoryStore),
        backend="memory",
        run_id="job",
        settings=Settings(min_nodes=1, max_nodes=2),
        timing=Timing(join=20.0, lease=0.2),
        host="host",
        local_addr="127.0.0.1",
        listener=Listener(on_waiting=told.append),
    )
    records = RecordStore(MemoryStore(), Codec("job"))
    look = handler._watch.look_for_waiting(1)
    look(records)
    assert told == []
    records.increment("1/waiting")
    look(records)
    assert told == [1]
    deadline = Deadline(60.0)
    while len(told) < 3:
        assert not deadline.expired()
        look(records)
    assert told == [1, 1, 1]
    handler.shutdown()

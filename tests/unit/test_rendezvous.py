"""Fixed membership over the memory store: every node gets the same plan, or is told why not."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.errors import ConfigError, RendezvousError, RendezvousTimeout
from rallypoint.rendezvous import RendezvousInfo, StaticRendezvous
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.lease import Leases
from rallypoint.rendezvous.ordering import assign_node_ranks, natural_key


def node(
    store: MemoryStore, name: str, *, rank: int | None, nodes: int, **more: Any
) -> StaticRendezvous:
    given = {
        "leader": rank == 0,
        "run_id": "job",
        "host": name,
        "node_id": name,
        "join_timeout": 5.0,
    }
    return StaticRendezvous(
        store, num_nodes=nodes, node_rank=rank, say=lambda _: None, **{**given, **more}
    )


def meet(nodes: list[StaticRendezvous], generation: int = 0) -> list[RendezvousInfo]:
    def one(each: StaticRendezvous) -> RendezvousInfo:
        each.bring(generation, {"from": each.get_run_id()})
        return each.next_rendezvous()

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


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


def test_assigned_ranks_put_the_leader_first_then_hosts_in_natural_order() -> None:
    store = MemoryStore()
    names = ["n10", "n2", "n1"]
    nodes = [node(store, n, rank=None, nodes=3, leader=n == "n10") for n in names]
    assert {name: info.rank for name, info in zip(names, meet(nodes), strict=True)} == {
        "n10": 0,
        "n1": 1,
        "n2": 2,
    }


def test_the_next_generation_reads_nothing_of_the_one_before() -> None:
    store = MemoryStore()
    nodes = [node(store, f"host{r}", rank=r, nodes=2) for r in range(2)]
    assert [i.generation for i in meet(nodes, 0)] == [0, 0]
    nodes[1].bring(1, {})
    waiting = threading.Thread(target=nodes[1].next_rendezvous)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()  # the plan of generation 0 is there, and is not taken for this one
    nodes[0].bring(1, {})
    assert nodes[0].next_rendezvous().generation == 1
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_time_out_names_who_came_and_who_is_missing() -> None:
    store = MemoryStore()
    lone = node(store, "hostA", rank=0, nodes=3, join_timeout=0.2)
    lone.bring(0, {})
    with pytest.raises(RendezvousTimeout) as caught:
        lone.next_rendezvous()
    assert caught.value.missing == (1, 2)
    assert "node 0 (hostA)" in str(caught.value) and "1 of 3" in str(caught.value)


def test_two_nodes_with_one_rank_are_told_apart() -> None:
    store = MemoryStore()
    first, second = (node(store, name, rank=1, nodes=2, join_timeout=0.2) for name in "ab")
    first.bring(0, {})
    with pytest.raises(RendezvousTimeout):
        first.next_rendezvous()
    second.bring(0, {})
    with pytest.raises(ConfigError, match="host a has this rank"):
        second.next_rendezvous()


def test_one_node_too_many_is_refused() -> None:
    store = MemoryStore()
    nodes = [node(store, f"h{i}", rank=None, nodes=2, leader=i == 0) for i in range(2)]
    meet(nodes)
    late = node(store, "late", rank=None, nodes=2, leader=False)
    late.bring(0, {})
    with pytest.raises(RendezvousError, match="2 nodes already"):
        late.next_rendezvous()


@given(st.lists(st.sampled_from(["a1", "a2", "a10", "b"]), min_size=1, max_size=8), st.data())
def test_ranks_are_a_permutation_with_the_leader_first(
    hosts: list[str], data: st.DataObject
) -> None:
    leader = data.draw(st.integers(0, len(hosts) - 1))
    order = assign_node_ranks(hosts, leader)
    assert sorted(order) == list(range(len(hosts)))
    assert order[0] == leader
    rest = [natural_key(hosts[i]) for i in order[1:]]
    assert rest == sorted(rest)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=30))
def test_a_lease_is_lost_after_its_time_without_a_move_and_not_before(
    steps: list[tuple[float, bool]],
) -> None:
    leases, now, counter, moved_at = Leases(timeout=5.0), 0.0, 0, 0.0
    leases.observe(now, {1: counter})
    for pause, moves in steps:
        now += pause
        if moves:
            counter += 1
            moved_at = now
        assert leases.observe(now, {1: counter}) == ((1,) if now - moved_at > 5.0 else ())


def test_a_node_that_came_back_starts_a_fresh_lease() -> None:
    leases = Leases(timeout=1.0)
    leases.observe(0.0, {1: 7})
    leases.observe(2.0, {})
    assert leases.observe(10.0, {1: 7}) == ()

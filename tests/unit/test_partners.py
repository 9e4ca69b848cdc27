"""Which rank keeps state for which."""

from __future__ import annotations

from hypothesis import given, strategies as st

from rallypoint.elastic.replication.partners import guests, hosts, partners


def test_partners_are_on_the_next_node():
    assert partners([0, 0, 1, 1, 2]) == (2, 3, 4, 4, 0)
    assert guests([0, 0, 1, 1, 2], 4, 2) == (2, 3)
    assert guests([0, 0, 1, 1, 2], 1, 2) == ()
    assert guests([0, 0, 1, 1, 2], 4, 3) == (0, 1, 2, 3)


def test_one_node_has_nowhere_to_keep_anything():
    assert partners([3, 3]) == (None, None)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=20).map(sorted))
def test_every_rank_has_one_partner_and_it_is_elsewhere(nodes):
    found = partners(nodes)
    if len(set(nodes)) == 1:
        return
    for rank, partner in enumerate(found):
        assert partner is not None
        assert nodes[partner] != nodes[rank]
        assert rank in guests(nodes, partner, 2)
    assert sum(len(guests(nodes, rank, 2)) for rank in range(len(nodes))) == len(nodes)


def test_copies_are_on_the_next_nodes_one_on_each():
    nodes = [0, 0, 1, 1, 2]
    assert [hosts(nodes, rank, 2) for rank in range(5)] == [(2,), (3,), (4,), (4,), (0,)]
    assert hosts(nodes, 1, 3) == (3, 4)
    assert hosts(nodes, 1, 9) == (3, 4)
    assert hosts(nodes, 1, 1) == hosts([0, 0], 1, 2) == ()

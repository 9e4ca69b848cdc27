"""Which local parts of a backward pass run when, and which sent tensors take part, for every order of arrivals."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.rpc.autograd.schedule import Schedule
from rallypoint.rpc.autograd.search import Search


needs_of_inputs = st.dictionaries(
    st.integers(0, 7), st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=8
)


@given(needs_of_inputs, st.permutations(range(6)), st.integers(0, 6), st.data())
def test_each_input_is_computed_once_with_all_that_it_needs(
    needs: dict[int, list[int]], order: list[int], count: int, data: st.DataObject
) -> None:
    """The first ``count`` outputs take part, which becomes known at some point."""
    needs = {each: list(dict.fromkeys(needed)) for each, needed in needs.items()}
    schedule = Schedule(range(6), needs)
    taking_part = set(order[:count])
    arrived: set[Any] = set()
    computed: set[Any] = set()
    freed: set[Any] = set()
    is_settled = False

    def run() -> None:
        while (step := schedule.next_step()) is not None:
            assert step.inputs and not computed & set(step.inputs)
            wanted = {each for one in step.inputs for each in needs[one]} & taking_part  # type: ignore[index]
            assert set(step.outputs) == wanted <= arrived
            # What an earlier step has freed is not used again.
            assert not freed & set(step.outputs)
            computed.update(step.inputs)
            below = {one for one, needed in needs.items() if wanted & set(needed)}
            assert step.frees == (below <= computed)
            if step.frees:
                freed.update(step.outputs)
            for each in arrived:
                left = any(each in needs[one] for one in needs.keys() - computed)
                assert schedule.is_needed(each) == left
        begun = {one for one, needed in needs.items() if arrived & set(needed)}
        assert schedule.has_waiting == bool(begun - computed)

    settled_at = data.draw(st.integers(0, count))
    for at, each in enumerate(order[:count]):
        if at == settled_at:
            schedule.settle(taking_part)
            is_settled = True
            run()
        assert schedule.expects(each)
        schedule.arrive(each)
        arrived.add(each)
        if data.draw(st.booleans()):
            run()
    run()
    if not is_settled:
        schedule.settle(taking_part)
        run()
    assert not schedule.has_waiting
    assert computed == {one for one, needed in needs.items() if taking_part & set(needed)}


def test_what_is_not_expected_is_refused() -> None:
    schedule = Schedule(["root"], {"leaf": ["root"]})
    with pytest.raises(KeyError):
        schedule.arrive("other")
    schedule.arrive("root")
    with pytest.raises(KeyError):
        schedule.arrive("root")


graphs = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(1, 6), max_size=3)), min_size=1, max_size=20
)


@given(graphs, st.data())
def test_a_pass_over_workers_ends_and_gives_each_tensor_one_gradient(
    made: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """Tensor k was sent by ``made[k][0]`` and depends on earlier ones; the last one is the root, which takes part."""
    below: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at, (worker, backwards) in enumerate(made):
        earlier = {at - each for each in backwards if at - each >= 0}
        below[worker, at] = [(made[each][0], each) for each in sorted(earlier)]
    root = (made[-1][0], len(made) - 1)

    search = Search()
    asked = search.reached(below[root])
    while asked:
        worker = data.draw(st.sampled_from(sorted(asked)))
        numbers = asked.pop(worker)
        for to, more in search.reached(
            [each for number in numbers for each in below[worker, number]]
        ).items():
            asked.setdefault(to, []).extend(more)
    expected: set[tuple[int, int]] = set()
    left = list(below[root])
    while left:
        each = left.pop()
        if each not in expected:
            expected.add(each)
            left += below[each]
    found = {(worker, number) for worker, some in search.found.items() for number in some}
    assert found == expected
    assert sum(map(len, search.found.values())) == len(expected)

    # Each worker's schedule: at first, whatever was sent may take part. Messages arrive in any order.
    taking_part = {root, *expected}
    schedules = {}
    for worker in {each[0] for each in below}:
        own = [each for each in below if each[0] == worker and (each == root or each[1] < root[1])]
        needs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for each in own:
            for one in below[each]:
                needs.setdefault(one, []).append(each)
        schedules[worker] = Schedule(own, needs)
    on_their_way = [root]
    delivered: list[tuple[int, int]] = []
    # A tensor's dependents may be on several workers, each of which received it in its own message.
    shares: dict[tuple[int, int], set[int]] = {}
    for other in taking_part:
        for one in below[other]:
            shares.setdefault(one, set()).add(other[0])

    def run(worker: int) -> None:
        while (step := schedules[worker].next_step()) is not None:
            for computed in step.inputs:
                shares[computed].discard(worker)  # type: ignore[index]
                if not shares[computed]:  # type: ignore[index]
                    on_their_way.append(computed)  # type: ignore[arg-type]

    def deliver() -> None:
        while on_their_way:
            one = on_their_way.pop(data.draw(st.integers(0, len(on_their_way) - 1)))
            delivered.append(one)
            schedules[one[0]].arrive(one)
            run(one[0])

    deliver()
    if any(each.has_waiting for each in schedules.values()):
        for worker, each in schedules.items():
            each.settle(taking_part)
            run(worker)
        deliver()
    assert sorted(delivered) == sorted(taking_part)
    assert not any(each.has_waiting for each in schedules.values())

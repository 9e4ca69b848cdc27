"""The cores of sessions: which ranks are right after a loss, memory slots, a rank's own state, records of a set-up."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.elastic import torch_private
from rallypoint.elastic.checkpointing.checkpoints import Checkpoints
from rallypoint.elastic.communication.gloo_device import Watch, watched
from rallypoint.elastic.loops import rng
from rallypoint.elastic.loops.own_state import OwnState, Place
from rallypoint.elastic.loops.rng import RandomState
from rallypoint.elastic.recovery.agreement import (
    Fetch,
    Standing,
    differing,
    judge,
    longest_timeouts,
)
from rallypoint.elastic.session import Session
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.state.settings import Settings
from rallypoint.elastic.storage import memory
from rallypoint.elastic.storage.memory import Memory
from rallypoint.elastic.storage.schedule import Held
from rallypoint.errors import ElasticError


def standing(rank: int, steps: int, *, whole: bool = True, **others: Any) -> Standing:
    return Standing(rank=rank, steps=steps, whole=whole, objects="Net", **others)


# -- agreement ----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6).filter(
        lambda ranks: any(whole for _, whole in ranks)
    )
)
def test_who_is_furthest_and_whole_is_right(ranks: list[tuple[int, bool]]) -> None:
    found = judge([standing(rank, *each[:1], whole=each[1]) for rank, each in enumerate(ranks)])
    furthest = max(steps for steps, whole in ranks if whole)
    assert found.steps == furthest
    assert ranks[found.source] == (furthest, True)
    has_it = {rank for rank, each in enumerate(ranks) if each == (furthest, True)}
    assert has_it.isdisjoint(found.receivers)
    assert has_it.union(found.receivers) == set(range(len(ranks)))


def test_a_step_that_failed_behind_the_optimizer_on_all_ranks_is_an_error() -> None:
    with pytest.raises(ElasticError, match="out of session.step"):
        judge([standing(0, 5, whole=False), standing(1, 5, whole=False, waits=True)])
    with pytest.raises(ElasticError, match="those that had it were lost while the others waited"):
        judge([standing(rank, 5, whole=False, waits=True) for rank in (0, 1)])


def test_sessions_of_different_objects_are_an_error() -> None:
    other = Standing(rank=1, steps=0, whole=True, objects="Other")
    with pytest.raises(ElasticError, match="rank 0: Net; rank 1: Other"):
        judge([standing(0, 0), other])


class Env:
    def __init__(self, seed: int) -> None:
        self.state = {"rng": torch.Generator().manual_seed(seed).get_state(), "info": [1, {"a"}]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_states_that_differ_at_the_start_are_named() -> None:
    def begins(rank: int, seed: int) -> Standing:
        net = torch.nn.Linear(1, 1)
        objects = Objects([net, Env(0), Env(seed), torch.optim.Adam(net.parameters())])
        told = standing(rank, 0, states=tuple(objects.digests()))
        return Standing.from_json(json.loads(json.dumps(told.to_json())))

    assert differing([begins(0, 5), begins(1, 5), begins(2, 5)]) == []
    assert differing([begins(0, 5), begins(1, 5), begins(2, 6)]) == [("a Env", 0, 2)]


def test_parameters_that_differ_at_the_start_are_an_error() -> None:
    with pytest.raises(ElasticError, match="ranks 0 and 1 begin with different parameters"):
        judge([standing(0, 0, fingerprint=1), standing(1, 0, fingerprint=2)])
    net = torch.nn.Linear(3, 3)
    before = Objects([net]).fingerprint()
    assert Objects([net]).fingerprint() == before
    with torch.no_grad():
        net.weight[1, 1] += 1e-3
    assert Objects([net]).fingerprint() != before
    # Parts of one flat tensor, which start anywhere in it.
    after = Objects([net]).fingerprint()
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, net.parameters())
    assert Objects([net]).fingerprint() == after


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
@pytest.mark.parametrize("size", [0, 1, 3, 4_099])
def test_each_byte_of_each_parameter_counts(dtype: torch.dtype, size: int) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(each, dtype=dtype)) for each in (size, 5, size)]
    of_all = Objects([torch.nn.ParameterList(parameters)])
    before = of_all.fingerprint()
    for each in parameters:
        whole = each.detach().view(torch.uint8)
        for place in {0, len(whole) // 2, len(whole) - 1} if len(whole) else ():
            whole[place] = 1
            assert of_all.fingerprint() != before
            whole[place] = 0
    assert of_all.fingerprint() == before


LARGE = """
import resource, torch
from rallypoint.elastic.state.objects import Objects
given = Objects([torch.nn.Linear(4096, 4096)])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
given.fingerprint()
print(peak() - before)
"""


def test_a_fingerprint_takes_no_memory() -> None:
    """It once took eight times the memory of all parameters, at the start of each session."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4096 * 4096 * 4 / 1024


def test_a_group_that_a_member_lacks_is_an_error() -> None:
    pair = (("1", (0, 1)),)
    judge([standing(0, 0, groups=pair), standing(1, 0, groups=pair), standing(2, 0)])
    with pytest.raises(ElasticError, match=r"ranks \[0, 1\] that rank 1 has not"):
        judge([standing(0, 0, groups=pair), standing(1, 0)])


# -- objects ------------------------------------------------------------------------------------------


def test_what_has_no_state_is_refused_and_sharded_state_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TypeError, match="'int' has no state_dict"):
        Objects([3])
    assert not Objects([torch.nn.Linear(2, 2)]).is_sharded
    monkeypatch.setattr(torch_private, "is_sharded", lambda _: True)
    net = torch.nn.Linear(2, 2)
    assert Objects([net]).is_sharded
    monkeypatch.setattr(torch_private, "local_optimizer", lambda _: None)
    with pytest.raises(ElasticError, match="sharded parameters that belong to no module"):
        Objects([torch.optim.SGD(net.parameters())])
    zero = Objects([net, torch.optim.SGD(net.parameters())])
    checkpoints = Checkpoints("somewhere", every=1, keep=1)
    with pytest.raises(ElasticError, match="cannot keep a ZeroRedundancyOptimizer"):
        Session(zero, None, checkpoints)


def test_who_lacks_a_snapshot_gets_its_own_copy_or_that_of_another_replica() -> None:
    first, second = Held(1, 4), Held(2, 8)
    both = (first, second)
    ranks = [
        standing(rank, 9, snapshots=both if rank < 4 else (), replica=2, guests=guests)
        for rank, guests in enumerate([(), ((5, both),), (), (), (), (), (), ()])
    ]
    found = judge(ranks)
    assert found.snapshot == second
    assert found.fetches == (Fetch(4, 0, 0), Fetch(5, 1, 5), Fetch(6, 0, 0), Fetch(7, 1, 1))
    for each in ranks:
        object.__setattr__(each, "replica", 0)
    with pytest.raises(ElasticError, match="no snapshot of the state is complete"):
        judge(ranks)


def test_what_a_step_began_with_is_restored_as_often_as_it_takes() -> None:
    """CyclicLR and ChainedScheduler remove parts of the state that they load."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cyclic = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, step_size_up=3)
    chained = torch.optim.lr_scheduler.ChainedScheduler([cyclic])
    settings = Settings([optimizer], [cyclic, chained])
    saved = settings.copied()
    for _ in range(3):
        optimizer.step()
        chained.step()
        assert optimizer.param_groups[0]["lr"] != 0.1
        settings.restore(saved)
        assert optimizer.param_groups[0]["lr"] == 0.1 and cyclic.last_epoch == 0


def test_sparse_buffers_are_refused_by_name() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    net[0].register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(
        ElasticError, match="'0.adjacency' of a Sequential has the layout sparse_coo"
    ):
        Objects([net])


def test_gradients_that_a_step_leaves_are_seen() -> None:
    net = torch.nn.Linear(2, 2)
    objects = Objects([net])
    before = objects.gradients()
    assert not list(objects.accumulated(before))
    net(torch.ones(1, 2)).sum().backward()
    assert [each for each, _ in objects.accumulated(before)] == [net.weight, net.bias]
    net.weight.grad[0, 0] = torch.inf  # type: ignore[index]
    assert [each for each, _ in objects.accumulated(before)] == [net.bias]
    net.zero_grad(set_to_none=False)
    assert not list(objects.accumulated(before))
    objects.drop_gradients(before)
    assert net.weight.grad is None


def test_a_layout_that_one_rank_has_settled_is_everybodys() -> None:
    layout = ((1,), (0, 2))
    found = judge(
        [
            standing(0, 1, layouts=(None, None)),
            standing(1, 1, layouts=(layout, None)),
            standing(2, 0, whole=False, layouts=(((0, 1, 2),), None)),
        ]
    )
    assert found.layouts == (layout, None)


def test_a_standing_survives_its_way_through_the_store() -> None:
    told = standing(
        3, 7, layouts=(((2, 1), (0,)), None), groups=(("0", (3, 4)),), timeouts=(1800.0,)
    )
    assert Standing.from_json(json.loads(json.dumps(told.to_json()))) == told


def test_a_newcomer_takes_the_longest_timeout_of_each_of_its_groups() -> None:
    everybody, some = ("0", (0, 1, 2)), ("1", (0, 2))
    standings = [
        standing(0, 1, groups=(everybody, some), timeouts=(60.0, 5.0)),
        standing(1, 1, groups=(everybody,), timeouts=(60.0,)),
        standing(2, 0, whole=False, groups=(everybody, some), timeouts=(1800.0, 4.0)),
    ]
    assert longest_timeouts(standings) == {everybody: 1800.0, some: 5.0}


# -- memory -------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.data())
def test_a_torn_slot_is_never_used(kept: list[bytes], data: st.DataObject) -> None:
    """The last write stops anywhere: the previous slot is found, or the last one if it is complete."""
    slots = [bytearray(300), bytearray(300)]
    for number, each in enumerate(kept, 1):
        slot = memory.packed(number, each)
        end = len(slot)
        if number == len(kept):
            end = data.draw(st.integers(0, len(slot)))
        slots[number % 2][:end] = slot[:end]
    found = memory.newest([bytes(slot) for slot in slots])
    possible = {(len(kept), kept[-1])}
    if len(kept) > 1:
        possible.add((len(kept) - 1, kept[-2]))
        assert found in possible
    else:
        assert found is None or found in possible


def test_memory_is_found_again_by_the_next_process() -> None:
    first = Memory()
    try:
        for number in range(5):
            first.keep(b"state %d" % number)
        import os

        second = Memory(os.dup(first.fd))
        assert second.held == b"state 4"
        second.keep(b"more")
        third = Memory(os.dup(first.fd))
        assert third.held == b"more"
        second.close()
        third.close()
        with pytest.raises(ElasticError, match="bytes"):
            first.keep(b"x" * memory.SLOT)
    finally:
        first.close()


# -- a rank's own state ---------------------------------------------------------------------------


def drawn() -> list[float]:
    return [torch.rand(1).item(), random.random()]


@pytest.fixture
def generators() -> Any:
    held = RandomState.now()
    yield
    held.restore()


@pytest.mark.usefixtures("generators")
def test_generators_continue_where_they_were() -> None:
    pytest.importorskip("numpy").random.rand(3)
    torch.rand(3)
    random.gauss(0, 1)
    state = RandomState.now()
    assert state.equals(RandomState.now())
    expected = drawn()
    assert not state.equals(RandomState.now())
    again = RandomState.unpack(*state.pack())
    assert again.equals(state)
    again.restore()
    assert drawn() == expected


@pytest.mark.usefixtures("generators")
def test_each_way_to_draw_is_noticed() -> None:
    numpy = pytest.importorskip("numpy")
    ways = {
        "torch": lambda: torch.rand(1).item(),
        "python": random.random,
        "gauss": lambda: random.gauss(0, 1),
        "the gauss that is held": lambda: random.gauss(0, 1),
        "numpy": numpy.random.rand,
        "numpy's gauss": lambda: numpy.random.normal(),
        "numpy's gauss that is held": lambda: numpy.random.normal(),
    }
    for way, draw in ways.items():
        state = RandomState.now()
        assert RandomState.now() is state, way
        drawn = draw()
        changed = RandomState.now()
        assert not changed.equals(state), way
        RandomState.unpack(*state.pack()).restore()
        assert RandomState.now().equals(state), way
        assert draw() == drawn, way


@pytest.mark.usefixtures("generators")
def test_pythons_generator_is_read_from_its_memory_as_it_says_itself() -> None:
    for _ in range(3):
        random.gauss(0, 1)
        assert rng._python_at is not None
        assert rng._python_now() == rng._python_asked()


@pytest.mark.usefixtures("generators")
def test_a_rank_that_died_behind_its_last_collective_continues_in_the_next_step() -> None:
    first = RandomState.now()
    torch.rand(1)
    later = RandomState.now()
    place = Place(1, 3, in_body=True, begun=first)
    own = OwnState(7, place, first, later, None, None, b"bn", b"later bn")
    told = OwnState.unpack(own.pack())
    now, after = told.at(7), told.at(8)
    assert now is not None and after is not None
    assert (now.place.batch, now.buffers) == (3, b"bn") and now.random.equals(first)
    # It starts with the body of the same batch, one step of which is complete.
    assert (after.place.batch, after.place.done, after.buffers) == (3, 1, b"later bn")
    assert after.random.equals(first) and after.newest.equals(later)
    assert after.place.begun is not None and after.place.begun.equals(first)
    assert told.at(9) is None and told.at(6) is None


@pytest.mark.usefixtures("generators")
def test_a_task_counts_as_a_task() -> None:
    state = RandomState.now()
    own = OwnState(7, Place(1, 3), state, state, is_task=True)
    after = OwnState.unpack(own.pack()).at(8)
    assert after is not None and (after.place.batch, after.place.tasks) == (3, 1)


# -- connections ----------------------------------------------------------------------------------


def test_what_an_epoll_instance_watches() -> None:
    text = (
        "pos:\t0\nflags:\t02\nino:\t1039\n"
        "tfd:        6 events:       19 data:     5633610aed30  pos:0 ino:998a8 sdev:9\n"
        "tfd:       13 events:       19 data:     563366179f88  pos:0 ino:f sdev:f\n"
        "tfd: cut off"
    )
    assert watched(text) == [
        Watch(6, 0x998A8, 0x19, 0x5633610AED30),
        Watch(13, 15, 0x19, 0x563366179F88),
    ]


def test_a_snapshot_of_a_lost_node_comes_from_its_partners() -> None:
    first, second = Held(1, 4), Held(2, 8)
    lost = standing(0, 0, snapshots=(), node=0)
    survivors = [
        standing(1, 9, snapshots=(first, second), guests=((0, (first,)),)),
        standing(2, 9, snapshots=(first, second), guests=((0, (first, second)), (1, (first,)))),
    ]
    found = judge([lost, *survivors])
    assert (found.snapshot, found.steps, found.fetches) == (second, 8, (Fetch(0, 2, 0),))
    found = judge(
        [Standing.from_json(json.loads(json.dumps(e.to_json()))) for e in (lost, *survivors)]
    )
    assert found.fetches == (Fetch(0, 2, 0),)
    with pytest.raises(ElasticError, match=r"complete on all ranks .*rank 0: none; rank 1: 4, 8"):
        judge([lost, standing(1, 9, snapshots=(first, second))])

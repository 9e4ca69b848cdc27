"""What the nodes of a job tell each other, without supervisors: this test reads what they hear."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.errors import RendezvousConnectionError
from rallypoint.launch.config import Job, LaunchConfig, RendezvousConfig, TargetKind
from rallypoint.launch.coordination.interface import (
    CoordinationEvent,
    NodeFacts,
    PeerEvent,
    RoundReady,
)
from rallypoint.launch.coordination.peers import PeerNodes
from rallypoint.rendezvous import RendezvousInfo, parse_endpoint
from rallypoint.rendezvous.record_store import RecordStore


PATIENCE = 30.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[PeerNodes]]:
    rendezvous = RendezvousConfig(
        run_id="x",
        node_rank=None,
        endpoint=parse_endpoint(f"file://{tmp_path}"),
        join_timeout=60.0,
        last_call=0.1,
    )
    config = LaunchConfig(
        job=Job(kind=TargetKind.FUNCTION, name="f"),
        rendezvous=rendezvous,
        min_nodes=2,
        num_nodes=2,
        workers_per_node=1,
        secret=b"s" * 40,
    )
    made = [PeerNodes(config, lambda text, *_, **__: None) for _ in range(2)]
    yield made
    for each in made:
        each.close("")


def ready(node: PeerNodes) -> bool:
    """Wait for something to take. Returns whether there is anything."""
    return bool(select.select([node], [], [], PATIENCE)[0])


def meet(nodes: list[PeerNodes], generation: int) -> list[RoundReady]:
    for node in nodes:
        node.join(generation, NodeFacts(num_workers=1))
    return [taken_round(node) for node in nodes]


def taken_round(node: PeerNodes) -> RoundReady:
    while ready(node):
        for event in node.take():
            if isinstance(event, RoundReady):
                return event
    raise AssertionError("no round forms")


def test_a_node_that_leaves_as_a_round_forms_leaves_that_round(nodes: list[PeerNodes]) -> None:
    """Its supervisor says that it leaves before it has heard of the round, and says so again after."""
    meet(nodes, 0)
    stays, leaves = nodes
    for node in nodes:
        node.join(1, NodeFacts(num_workers=1))
    assert taken_round(stays).generation == 1
    assert ready(leaves)
    leaves.tell("leaving", 0, ())
    its = taken_round(leaves)
    leaves.tell("leaving", its.generation, ())
    assert ready(stays)
    told = [event for event in stays.take() if isinstance(event, PeerEvent)]
    assert [(event.what, event.node_rank) for event in told] == [("leaving", its.node_rank)]


def test_a_round_is_heard_of_before_a_node_that_leaves_it_at_once(
    nodes: list[PeerNodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor would take the news to be about the round before, and then wait for a node that is gone."""
    stays, leaves = nodes
    has_left = threading.Event()
    describe = stays._round_ready

    def describe_late(formed: RendezvousInfo) -> RoundReady:
        assert has_left.wait(PATIENCE)
        time.sleep(0.2)  # for a journal that is being read already
        return describe(formed)

    monkeypatch.setattr(stays, "_round_ready", describe_late)
    for node in nodes:
        node.join(0, NodeFacts(num_workers=1))
    its = taken_round(leaves)
    leaves.tell("leaving", its.generation, ())
    has_left.set()
    heard: list[CoordinationEvent] = []
    while len(heard) < 2:
        assert ready(stays)
        heard += stays.take()
    assert isinstance(heard[0], RoundReady)
    assert heard[1] == PeerEvent("leaving", its.node_rank, its.generation)


@pytest.mark.parametrize("generation", [0, 1])
def test_a_round_is_heard_of_if_its_store_is_lost_at_once(
    nodes: list[PeerNodes], monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    """Otherwise the others would wait for this node, whose supervisor would still wait for the round."""
    if generation:
        meet(nodes, 0)
    unlucky, other = nodes

    def lost() -> RecordStore:
        raise RendezvousConnectionError("the store is gone")

    monkeypatch.setattr(unlucky, "_clone", lost)
    for node in nodes:
        node.join(generation, NodeFacts(num_workers=1))
    assert taken_round(other).generation == generation
    heard: list[CoordinationEvent] = []
    while len(heard) < 2:
        assert ready(unlucky)
        heard += unlucky.take()
    formed, told, *_ = heard
    assert isinstance(formed, RoundReady)
    assert isinstance(told, PeerEvent)
    assert (formed.generation, told.generation, told.what) == (generation, generation, "lost")

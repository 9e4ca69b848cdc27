"""Pooled memory is released after a minute without use, and no timer runs while there is none."""

import time
from collections.abc import Callable, Iterator

import pytest

from rallypoint.rpc.connections import unused_memory
from rallypoint.rpc.connections.unused_memory import KEPT, LOOK, UnusedMemory
from rallypoint.wire.recycler import Recycler
from rallypoint.wire.shm import Budget
from rallypoint.wire.shm.pool import Pool


MB = 1 << 20


class Agent:
    """An agent's timers, and what they look after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.ahead = 0.0
        unused = UnusedMemory(lambda seconds, act: self.timers.append((seconds, act)))
        self.budget = Budget(64 * MB, unused.used)
        self.recycler = Recycler(on_use=unused.used)
        unused.watch(self.budget, self.recycler)
        self.pool, self.control = Pool.open(self.budget)
        real = time.monotonic
        monkeypatch.setattr(unused_memory.time, "monotonic", lambda: real() + self.ahead)

    def look(self) -> float:
        """Fire the only timer; returns the seconds that it was set for."""
        ((seconds, act),) = self.timers
        self.timers.clear()
        self.ahead += seconds
        act()
        return seconds


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    made = Agent(monkeypatch)
    yield made
    made.pool.close()
    vars(made).clear()  # files close with the last reference, and pytest holds this object


def test_shared_memory_goes_a_minute_after_it_was_free(agent):
    assert not agent.timers
    block = agent.pool.lease(MB)
    agent.pool.lease(2 * MB)  # no second timer
    assert agent.look() == KEPT
    assert agent.look() == LOOK  # the other end has both
    assert agent.budget.used == 3 * MB
    agent.pool.take_back(block)
    agent.look()
    for _ in range(int(KEPT / LOOK) + 1):
        agent.look()
    assert agent.budget.used == 2 * MB


def test_memory_that_is_used_again_stays(agent, monkeypatch):
    for _ in range(5):
        agent.pool.take_back(agent.pool.lease(MB))
        monkeypatch.setattr(agent, "ahead", 0.0)
        _, act = agent.timers.pop()
        act()
        assert agent.budget.used == MB
        assert KEPT - 5 < agent.timers[0][0] <= KEPT
    agent.look()
    agent.look() if agent.timers else None
    assert agent.budget.used == 0
    assert not agent.timers


def test_received_memory_goes_as_well_and_nothing_looks_afterwards(agent):
    lent = agent.recycler.allocate(MB)
    agent.look()
    assert agent.timers  # it is in use
    del lent
    assert agent.recycler.kept >= MB
    agent.look()
    while agent.timers:
        agent.look()
    assert agent.recycler.kept == 0
    agent.recycler.allocate(MB)
    assert len(agent.timers) == 1

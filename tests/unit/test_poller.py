"""How long the leader stays awake for what arrives."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest

from rallypoint.rpc.threads.poller import READ, Poller
from rallypoint.wire.busy_wait import LOOK, BusyWait


class Epoll:
    """Each look takes a while."""

    def __init__(self, seconds: float, ready: list[tuple[int, int]]) -> None:
        self.seconds, self.ready, self.looks = seconds, ready, 0

    def poll(self, _: float) -> list[tuple[int, int]]:
        self.looks += 1
        time.sleep(self.seconds)
        return self.ready


@pytest.mark.parametrize("ready", [[], [(7, READ)]])
def test_who_is_in_the_way_of_others_does_not_stay_awake(ready: list[tuple[int, int]]) -> None:
    with closing(Poller(lambda _: None)) as poller:
        real, poller._epoll = poller._epoll, Epoll(2 * LOOK, ready)  # type: ignore[assignment]
        looks: Any = poller._epoll
        poller._busy_wait = BusyWait(True)
        poller._busy_wait.slept(0.0)
        assert poller._busy_wait.is_worth_it()
        assert poller._spin() == ready
        assert looks.looks == 1
        assert not poller._busy_wait.is_worth_it()
        poller._epoll = real

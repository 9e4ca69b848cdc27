"""The process that serves the job's store is killed or stands still: the others meet elsewhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import supervisors
from pace import pace


pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "rendezvous_nodes.py"
LEASE = 2.0


@pytest.fixture(scope="module")
def forks() -> Iterator[Callable[[dict[str, Any]], int]]:
    """Starts a node; the process it is forked from has loaded torch."""
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    parent = supervisors.Popen(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    assert parent.stdout.readline().strip() == "ready"

    def fork(order: dict[str, Any]) -> int:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(json.dumps(order) + "\n")
        parent.stdin.flush()
        return int(parent.stdout.readline())

    yield fork
    parent.stdin.close()
    parent.wait(60)
    parent.stdout.close()


class Node:
    """One process, and what it has noted."""

    def __init__(self, name: str, pid: int, out: Path) -> None:
        self.name, self.pid, self.out = name, pid, out
        self.alive = True

    def notes(self, what: str = "", since: float = 0.0) -> list[dict[str, Any]]:
        if not self.out.exists():
            return []
        complete = self.out.read_text().rpartition("\n")[0]
        found = [json.loads(line) for line in complete.splitlines()]
        for each in found:
            if each["what"] == "error":
                raise AssertionError(f"{self.name}: {each['trace']}")
        return [each for each in found if what in {"", each["what"]} and each["at"] > since]

    def last_round(self) -> dict[str, Any] | None:
        rounds = self.notes("round")
        return rounds[-1] if rounds else None

    def signal(self, number: int) -> float:
        """Send it. Returns the time."""
        os.kill(self.pid, number)
        self.alive = number not in {signal.SIGKILL, signal.SIGSTOP}
        return time.monotonic()


class Nodes:
    """The nodes of one job."""

    def __init__(self, fork: Callable[[dict[str, Any]], int], folder: Path) -> None:
        self._fork, self._folder = fork, folder
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.endpoint = ["127.0.0.1", probe.getsockname()[1]]
        self.all: list[Node] = []

    def start(self, **more: Any) -> Node:
        name = f"n{len(self.all)}"
        out = self._folder / name
        order = {
            "name": name,
            "out": str(out),
            "hosts": [self.endpoint],
            "lease": LEASE,
            "min": 2,
            "max": 4,
            **more,
        }
        node = Node(name, self._fork(order), out)
        self.all.append(node)
        return node

    @property
    def living(self) -> list[Node]:
        return [node for node in self.all if node.alive]

    def together(self, nodes: list[Node] | None = None, timeout: float = 120.0) -> dict[str, int]:
        """Wait until these are the members of one round. Returns their ranks."""
        wanted = self.living if nodes is None else nodes
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            rounds = [node.last_round() for node in wanted]
            if all(each is not None and each["size"] == len(wanted) for each in rounds):
                found = [each for each in rounds if each is not None]
                if len({each["generation"] for each in found}) == 1:
                    ranks = {n.name: r["rank"] for n, r in zip(wanted, found, strict=True)}
                    assert sorted(ranks.values()) == list(range(len(wanted))), ranks
                    assert sum(each["serves"] for each in found) <= 1, "one job, one store"
                    return ranks
            time.sleep(0.01)
        seen = {node.name: node.notes()[-6:] for node in self.all}
        raise AssertionError(
            f"no round of {[n.name for n in wanted]}:\n{json.dumps(seen, indent=1)}"
        )

    def until(self, condition: Callable[[], object], timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, {node.name: node.notes()[-6:] for node in self.all}
            time.sleep(0.01)

    def formed(self) -> float:
        """When the last of the living nodes entered its last round."""
        return max(node.notes("round")[-1]["at"] for node in self.living)

    def host(self) -> Node:
        """The node that serves the store."""
        serving = [n for n in self.living if (r := n.last_round()) is not None and r["serves"]]
        assert len(serving) == 1, serving
        return serving[0]

    def place(self) -> list[Any]:
        """Where the store is, according to a client of it."""
        client = next(node for node in self.living if node is not self.host())
        last = client.last_round()
        assert last is not None
        place: list[Any] = last["store"]
        return place

    def by_rank(self, rank: int) -> Node:
        return next(
            n for n in self.living if (r := n.last_round()) is not None and r["rank"] == rank
        )

    def end(self) -> None:
        for node in self.all:
            try:
                os.kill(node.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended


@pytest.fixture
def nodes(forks: Callable[[dict[str, Any]], int], tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(forks, tmp_path)
    yield made
    made.end()


def four(nodes: Nodes, **more: Any) -> dict[str, int]:
    for _ in range(4):
        nodes.start(**more)
    ranks = nodes.together()
    assert ranks == {"n0": 0, "n1": 1, "n2": 2, "n3": 3}
    return ranks


def test_the_host_is_killed_ten_times_and_each_time_the_others_go_on(nodes: Nodes) -> None:
    ranks = four(nodes)
    took = []
    for _ in range(10):
        victim = nodes.host()
        killed = victim.signal(signal.SIGKILL)
        after = nodes.together()
        took.append(nodes.formed() - killed)
        for name, rank in after.items():
            if ranks[name] < 3:
                assert rank == ranks[name], "a survivor keeps its rank"
        nodes.start(hosts=[nodes.place()])
        ranks = nodes.together()
        for name, rank in after.items():
            assert ranks[name] == rank
    print("host killed, round of 3 after (s):", [round(each, 2) for each in sorted(took)])
    assert max(took) <= LEASE + 2 * pace()


def test_the_host_and_the_first_in_line_are_killed_together(nodes: Nodes) -> None:
    four(nodes)
    host = nodes.host()
    standby = next(nodes.by_rank(rank) for rank in range(4) if nodes.by_rank(rank) is not host)
    os.kill(standby.pid, signal.SIGKILL)
    standby.alive = False
    killed = host.signal(signal.SIGKILL)
    nodes.together()
    took = nodes.formed() - killed
    print(f"host and first standby killed, round of 2 after {took:.2f} s")
    assert took <= LEASE + 3 * pace()


@pytest.mark.parametrize(
    ("count", "others", "with_host"),
    [(3, 1, True), (3, 2, False), (5, 2, True), (5, 3, False)],
    ids=["host-and-one-of-3", "two-of-3", "host-and-two-of-5", "three-of-5"],
)
def test_who_is_left_of_several_killed_together_goes_on(
    nodes: Nodes, count: int, others: int, with_host: bool
) -> None:
    """They are not a majority, but they can see that the others have ended."""
    for _ in range(count):
        nodes.start(min=1, max=count)
    nodes.together()
    host = nodes.host()
    by_rank = [nodes.by_rank(rank) for rank in range(count)]
    victims = [node for node in by_rank if node is not host][-others:]
    for node in [host, *victims] if with_host else victims:
        killed = node.signal(signal.SIGKILL)
    nodes.together()
    print(f"next round after {nodes.formed() - killed:.2f} s")


def test_the_next_host_is_killed_while_the_others_wait_for_it_to_serve(nodes: Nodes) -> None:
    four(nodes)
    host = nodes.host()
    standby = next(nodes.by_rank(rank) for rank in range(4) if nodes.by_rank(rank) is not host)
    left = [node for node in nodes.all if node not in (host, standby)]
    standby.signal(signal.SIGSTOP)  # its turn comes, and it does not take it
    killed = host.signal(signal.SIGKILL)
    # They notice by the connection to the store or by the watch over the host, whichever breaks first.
    nodes.until(lambda: all(node.notes(since=killed) for node in left))
    standby.signal(signal.SIGKILL)
    nodes.together(left)


def test_one_node_is_killed_and_another_one_stands_still(nodes: Nodes) -> None:
    """Two of the three that may be alive go on, and the third comes back."""
    four(nodes)
    host = nodes.host()
    sleeper = nodes.by_rank(3) if nodes.by_rank(3) is not host else nodes.by_rank(2)
    sleeper.signal(signal.SIGSTOP)
    host.signal(signal.SIGKILL)
    nodes.together()
    sleeper.signal(signal.SIGCONT)
    sleeper.alive = True
    nodes.together()


def test_a_node_that_comes_back_is_lost_again_before_it_is_in(nodes: Nodes) -> None:
    four(nodes)
    lost = nodes.by_rank(3) if nodes.by_rank(3) is not nodes.host() else nodes.by_rank(2)
    for _ in range(2):
        lost.signal(signal.SIGKILL)
        lost = nodes.start()
        nodes.until(lambda back=lost: back.notes())
    nodes.together()


def test_who_waits_goes_on_where_all_members_were_killed(nodes: Nodes) -> None:
    members = [nodes.start(min=1, max=2) for _ in range(2)]
    nodes.together()
    spare = nodes.start(min=1, max=2)
    nodes.until(lambda: any("as a spare" in each["text"] for each in spare.notes("says")))
    generation = members[0].notes("round")[-1]["generation"]
    for node in members:
        killed = node.signal(signal.SIGKILL)
    nodes.together()
    print(f"members killed, round of the spare after {nodes.formed() - killed:.2f} s")
    assert spare.notes("round")[-1]["generation"] > generation
    nodes.start(min=1, max=2)
    nodes.together()


def test_a_host_that_slept_comes_back_as_a_newcomer_where_the_others_are(nodes: Nodes) -> None:
    four(nodes)
    host = nodes.host()
    stopped = host.signal(signal.SIGSTOP)
    ranks = nodes.together()
    took = nodes.formed() - stopped
    print(f"host stopped, round of 3 after {took:.2f} s")
    host.signal(signal.SIGCONT)
    woken = time.monotonic()
    host.alive = True
    after = nodes.together()
    print(f"host woken, back in a round of 4 after {nodes.formed() - woken:.2f} s")
    assert any(n.notes("waiting", since=woken) for n in nodes.living if n is not host)
    assert {name: after[name] for name in ranks} == ranks
    assert took <= 3 * LEASE + 5 * pace()


def test_a_newcomer_at_the_old_endpoint_is_led_to_the_new_one(nodes: Nodes) -> None:
    """Its own machine has the endpoint's address, so it serves an empty store there."""
    four(nodes)
    nodes.host().signal(signal.SIGKILL)
    nodes.together()
    started = time.monotonic()
    newcomer = nodes.start()
    nodes.together()
    print(f"newcomer at the old endpoint, in a round of 4 after {nodes.formed() - started:.2f} s")
    assert any("connecting there" in each["text"] for each in newcomer.notes("says"))


def test_who_was_led_on_from_its_own_store_goes_on_when_the_next_one_is_lost(nodes: Nodes) -> None:
    """The store it still serves at the old endpoint is not the job's."""
    four(nodes)
    nodes.host().signal(signal.SIGKILL)
    nodes.together()
    newcomer = nodes.start()
    nodes.together()
    assert nodes.host() is not newcomer
    killed = nodes.host().signal(signal.SIGKILL)
    nodes.together()
    assert nodes.formed() - killed <= LEASE + 2 * pace()


@pytest.mark.long
def test_the_second_host_sleeps_and_comes_back(nodes: Nodes) -> None:
    """No endpoint names its place, so those who left it have to tell it where they went."""
    four(nodes)
    nodes.host().signal(signal.SIGKILL)
    nodes.together()
    second = nodes.host()
    second.signal(signal.SIGSTOP)
    nodes.together()
    second.signal(signal.SIGCONT)
    second.alive = True
    nodes.together()


@pytest.mark.long
def test_a_half_that_is_cut_off_does_not_go_on_without_the_other(nodes: Nodes) -> None:
    """Two of four are silent, the host among them: they may be alive behind a broken network."""
    ranks = four(nodes)
    host = nodes.host()
    other = nodes.by_rank(3) if nodes.by_rank(3) is not host else nodes.by_rank(2)
    for node in (host, other):
        stopped = node.signal(signal.SIGSTOP)
    time.sleep(3 * LEASE + 3)
    assert not any(node.notes("round", since=stopped) for node in nodes.living)
    other.signal(signal.SIGCONT)
    woken = time.monotonic()
    other.alive = True
    after = nodes.together()  # three of four may go on
    print(f"third node back, round of 3 after {nodes.formed() - woken:.2f} s")
    assert len(after) == 3
    assert {name: after[name] for name in after if ranks[name] < 3}.items() <= ranks.items()

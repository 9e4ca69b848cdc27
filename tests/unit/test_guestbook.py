"""The guestbook over the memory store: which nodes are told what, and which are turned away."""

import threading
from dataclasses import replace

import pytest

from rallypoint.errors import ConfigError
from rallypoint.rendezvous import guestbook
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.guestbook import MOST, MOST_SAID, Guestbook
from rallypoint.rendezvous.introduction import Introduction


ME = Introduction(
    node_id="host",
    host="host-a",
    run_id="job",
    nodes="2",
    given_rank=False,
    rallypoint="0.1.0",
    torch="2.13",
    python="3.11",
)


class Node:
    """A node at a store that a node serves, or (``place`` is empty) at one that no node serves."""

    def __init__(self, store, name="host", secret=None, place="node0:29400", **differs) -> None:
        mine = replace(ME, node_id=name, host=name, **differs)
        self.store, self.lines = store, []
        self.book = Guestbook(mine, secret, self.lines.append, place)

    def serve(self):
        self.book.visit(self.store, serves=True, newcomer=True)
        return self

    def come(self, **more):
        self.book.visit(self.store, serves=False, newcomer=True, **more)
        return self

    def look(self):
        self.book.look(self.store)
        return self.lines


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(guestbook, "LOOK_EVERY", 0.0)


@pytest.fixture
def store():
    return MemoryStore()


def test_who_goes_with_the_host_leaves_nothing_and_hears_nothing(store):
    host = Node(store).serve()
    guests = [Node(store, f"guest{i}").come() for i in range(3)]
    assert [each.look() for each in (host, *guests)] == [[]] * 4
    assert store.get_many(["rally-guests/other/0"]) == [None]


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({"run_id": "b"}, "another job uses this endpoint"),
        ({"secret": b"x"}, "has a secret"),
        ({"torch": "2.12"}, "install the same"),
    ],
)
def test_a_difference_is_said_by_both_sides_once(store, differs, says):
    host = Node(store).serve()
    other = Node(store, "other", **differs).come()
    bystander = Node(store, "bystander").come()
    for each in (host, other, bystander):
        each.look()
        (line,) = each.look()
        assert says in line
        assert each.book.said == line


@pytest.mark.parametrize("differs", [{"nodes": "3"}, {"given_rank": True}])
def test_who_cannot_go_with_the_host_is_turned_away_and_the_host_learns_who(store, differs):
    host = Node(store).serve()
    with pytest.raises(ConfigError):
        Node(store, "other", **differs).come()
    (line,) = host.look()
    assert "other" in line


def test_the_host_is_right_whoever_was_first(store):
    """A node that arrived before the host had introduced itself waits for that."""
    told = []

    def come() -> None:
        try:
            Node(store, "other", nodes="3").come()
        except ConfigError as error:
            told.append(str(error))

    thread = threading.Thread(target=come)
    thread.start()
    host = Node(store).serve()
    thread.join(30)
    assert "2 on host" in told[0]
    assert host.look()


def test_a_stored_introduction_of_a_job_that_is_gone_turns_nobody_away(store):
    Node(store, "gone", place="").come()
    later = Node(store, "later", place="", nodes="3").come()
    assert "2 on gone" in later.lines[0]


def test_a_store_that_no_node_serves_is_called_so(store, monkeypatch):
    monkeypatch.setattr(guestbook, "HOST_PATIENCE", 0.05)
    guest = Node(store, "guest").come()
    assert "node0:29400 is not served by a node of a job" in guest.lines[0]
    with pytest.raises(ConfigError, match="the port is in use"):
        Node(store, "node0").come(should_serve=True)


def test_node_0_whose_port_another_job_has_is_told_whose(store):
    Node(store, "other", run_id="b").serve()
    with pytest.raises(ConfigError, match="another job uses this endpoint: 'b', of other"):
        Node(store, "node0").come(should_serve=True)


def test_junk_and_crowds_do_no_harm(store):
    host = Node(store).serve()
    store.set("rally-guests/other/0", b"\xff junk")
    for index in range(MOST + 5):
        Node(store, f"other{index}", run_id=f"job{index}").come()
    for _ in range(MOST):
        host.look()
    assert len(host.lines) == MOST_SAID
    store.set("rally-guests/host", b"\x00")
    assert Node(store, "guest").come().lines == []


def test_an_introduction_that_a_stranger_moves_or_changes_turns_nobody_away(store):
    """With a secret, a guest's own introduction does not pass for the host's."""
    secret = b"known to the members"
    Node(store, secret=secret).serve()
    with pytest.raises(ConfigError):
        Node(store, "other", secret=secret, nodes="3").come()
    (left,) = store.get_many(["rally-guests/other/0"])
    assert left is not None
    host = store.get("rally-guests/host", 1.0)
    for forged in (left, host.replace(b'"nodes": "2"', b'"nodes": "3"')):
        assert forged != host
        store.set("rally-guests/host", forged)
        assert Node(store, "guest", secret=secret).come().lines == []

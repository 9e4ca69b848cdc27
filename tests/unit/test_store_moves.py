"""The store's node is lost again and again: the remaining nodes meet at one store, whatever the order of losses and take-overs.

A model of the nodes on one machine. The real :class:`Search` decides where they go and what they do there; the real :mod:`notes`
decides which of two stores is newer and where notes lead. Ports, stores and rounds are a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.rendezvous import notes
from rallypoint.rendezvous.backends import places
from rallypoint.rendezvous.backends.places import Answer, Place, Search, Way
from rallypoint.rendezvous.notes import Age, Moved


ENDPOINT = 1
HOST = "machine"
STEP = 0.25
AT_ENDPOINT = Place(HOST, ENDPOINT)


@dataclass
class Store:
    """What is served at a port. Until ``opens_at``, the node that serves it says that it is starting."""

    port: int
    node: int
    age: Age
    opens_at: float = 0.0
    note: dict[str, Any] | None = None
    plan: int = -1  # the last round that it knows of


@dataclass
class Node:
    number: int
    at: Store | None = None
    moves: int = 0
    generation: int = -1  # of the last round that it was a member of
    current: Place = AT_ENDPOINT
    standby: int | None = None
    serves: Store | None = None
    left: list[Store] = field(default_factory=list)
    may_serve: bool = True
    search: Search | None = None
    answers: dict[Place, Answer] = field(default_factory=dict)
    looks_at: tuple[int, ...] = ()  # ports at which it leaves notes
    ended: frozenset[str] = frozenset()
    knows_plan: bool = False
    was_led: bool = False  # led to a store by a note since the last plan
    back_from: Place | None = None  # where it was before it went back to a store of its own

    @property
    def name(self) -> str:
        return f"n{self.number}"


class Machine:
    """All nodes and stores, and the last plan."""

    def __init__(self) -> None:
        self.now = 0.0
        self.nodes: dict[int, Node] = {}  # live ones
        self.stores: dict[int, Store] = {}  # by port; those that have not ended
        self.generation = -1
        self.plan: list[Place] = []
        self.server = ""
        self.server_at: Place | None = None
        self._count = self._names = 0
        self.mistaken: list[str] = []  # members that took a newcomer's empty store for theirs
        self.forgotten: list[
            str
        ] = []  # members that were led to a store that does not know their round
        self._ports = ENDPOINT

    # -- what happens to it -----------------------------------------------------------------------

    def start(self) -> Node:
        node = self.nodes[self._count] = Node(self._count)
        self._count += 1
        if ENDPOINT in self.stores:
            node.at = self.stores[ENDPOINT]
        else:
            node.at = node.serves = self._serve(node, ENDPOINT, Age(0, 0, self._new_name()))
        return node

    def kill(self, node: Node) -> None:
        del self.nodes[node.number]
        self.stores = {p: s for p, s in self.stores.items() if s.node != node.number}

    def end_store(self, node: Node) -> None:
        """Only the process that serves the store ends."""
        if node.serves is not None:
            self.stores.pop(node.serves.port, None)

    @property
    def living(self) -> list[Node]:
        return list(self.nodes.values())

    # -- what a node does -------------------------------------------------------------------------

    def act(self, node: Node, *, hears: bool = True, slowly: float = 0.0) -> None:
        """One turn of a node. ``hears``: answers arrive; ``slowly``: seconds that a store takes to open."""
        self._leave_notes(node)
        store = node.at
        if store is None or self.stores.get(store.port) is not store:
            self._look_for_store(node, hears=hears, slowly=slowly)
            return
        self._keep_a_port(node)
        node.knows_plan = node.knows_plan or store.plan >= 0
        moved = notes.leads_on(store.note, store.age, node.ended)
        if moved is not None:
            self._follow(node, store, moved)

    def _look_for_store(self, node: Node, *, hears: bool, slowly: float) -> None:
        if node.search is None:
            if node.serves is not None and node.serves is node.at:
                node.serves, node.may_serve = None, False
            node.search, node.answers = self._search(node), {}
        search = node.search
        for place in search.to_ask():
            if hears or place in node.answers:
                node.answers[place] = self._ask(place)
        while (place := search.choose(self.now, node.answers)) is not None:
            if self._go_to(node, place, search, slowly):
                node.search = None
                return
            node.answers[place] = Answer.SILENT
            if search.is_own(place):
                search.note_unable(place)
        if search.nobody_is_left(node.answers) and ENDPOINT not in self.stores:
            node.serves = self._serve(node, ENDPOINT, Age(0, 0, self._new_name()))
            self._come(node, node.serves)
            self._begin_notes(node, search)
            node.search = None

    def _search(self, node: Node) -> Search:
        host = node.current.node_id or (self.server if node.knows_plan and not node.was_led else "")
        old = node.current
        if host and host != node.name:
            old = replace(old, watch=1 + int(host[1:]))
        known = self.server_at if node.knows_plan and self.server != node.name else None
        others = places.others(
            old,
            host,
            self.plan if node.knows_plan else [],
            [AT_ENDPOINT],
            own=node.name,
            may_serve=node.may_serve,
            been=[each for each in (known, node.back_from) if each is not None],
        )
        return Search(
            old,
            host,
            others,
            own=node.name,
            dead=(),
            alive_patience=6.0,
            silent_patience=2.0,
        )

    def _has_ended(self, node: Node) -> bool:
        """Whether the node that served the lost store has ended, as far as this node can know: a note does not say who serves."""
        host = node.current.node_id or ("" if node.was_led else self.server)
        return bool(host) and int(host[1:]) not in self.nodes

    def _ask(self, place: Place) -> Answer:
        store = self.stores.get(place.port)
        answer = Answer.DEAD
        if store is not None:
            answer = Answer.SERVES if store.opens_at <= self.now else Answer.ALIVE
        if not place.watch:
            return answer
        if place.watch - 1 not in self.nodes:
            return Answer.DEAD
        return answer if answer is Answer.SERVES else Answer.ALIVE

    def _go_to(self, node: Node, place: Place, search: Search, slowly: float) -> bool:
        left = {each.port: each for each in node.left}
        way = search.way(place, standby=node.standby, left=left)
        if way is Way.VISIT:
            store = self.stores.get(place.port)
            if store is None or store.opens_at > self.now:
                return False
            is_old = place is search.places[0]
            is_member = node.generation >= 0 and node.generation == self.generation
            if is_old and is_member and store.plan != self.generation and self._has_ended(node):
                self.mistaken.append(node.name)
            self._come(node, store, moved=not is_old, place=place)
            return True
        if way is Way.AGAIN:
            node.serves = left[place.port]
            node.left.remove(node.serves)
            node.back_from = replace(node.current, node_id="")
        elif place.port in self.stores:
            return False
        else:
            if way is Way.STANDBY:
                node.standby = None
            node.serves = self._serve(node, place.port, Age(), self.now + slowly)
        self._come(node, node.serves, place=place)
        self._begin_notes(node, search)
        return True

    def _come(
        self, node: Node, store: Store, *, moved: bool = True, place: Place | None = None
    ) -> None:
        node.at = store
        node.current = Place(HOST, store.port) if place is None else place
        is_member = node.generation >= 0 and node.generation == self.generation
        is_empty = is_member and store.age.generation == 0
        if not (is_empty or (moved and (is_member or node.serves is store))):
            node.moves = store.age.moves
            return
        moves = notes.moves_after(node.moves, by_member=is_member)
        store.age = Age(
            max(store.age.generation, self.generation + 1),
            max(store.age.moves, moves),
            store.age.store or self._new_name(),
        )
        if is_member:
            store.plan = self.generation
        node.moves = store.age.moves

    def _follow(self, node: Node, store: Store, moved: Moved) -> None:
        found = self.stores.get(moved.port)
        if found is None or found.age.store != moved.age.store:
            node.ended |= {moved.age.store}
            if store.note == notes.written(moved):
                store.note = None
            return
        if found.opens_at > self.now:
            return
        if node.serves is not None:
            node.left.append(node.serves)
            node.serves = None
        if found in node.left:
            node.left.remove(found)
            node.serves, node.looks_at = found, (ENDPOINT,)
        node.at, node.moves, node.current = found, found.age.moves, Place(HOST, moved.port)
        node.was_led = True
        if found.plan != self.generation and node.generation == self.generation:
            self.forgotten.append(node.name)
        if found.plan != self.generation:
            node.generation = -1  # that store knows nothing of the node's last round

    def _begin_notes(self, node: Node, search: Search) -> None:
        node.looks_at = (ENDPOINT, *(each.port for each in search.places))

    def _leave_notes(self, node: Node) -> None:
        own = node.at
        if own is None or self.stores.get(own.port) is not own or own.opens_at > self.now:
            return
        for port in [
            *(node.looks_at if own is node.serves else ()),
            *(left.port for left in node.left),
        ]:
            other = self.stores.get(port)
            if other is None or other is own or other.opens_at > self.now:
                continue
            newer = notes.to_lead_to(own.age, other.age)
            if newer is None:
                continue
            wrong, right = (other, own) if newer == own.age else (own, other)
            note = Moved(HOST, right.port, newer)
            if notes.is_news(note, wrong.note):
                wrong.note = notes.written(note)

    # -- rounds -----------------------------------------------------------------------------------

    def meet(self) -> bool:
        """If all live nodes are at one store, they form a round. Returns whether they did."""
        places = {id(node.at) for node in self.living}
        store = self.living[0].at if self.living else None
        if store is None or len(places) != 1 or self.stores.get(store.port) is not store:
            return False
        self.generation = max(self.generation, store.age.generation - 1) + 1
        store.age = replace(store.age, generation=self.generation + 1)
        store.plan, self.plan = self.generation, []
        self.server, self.server_at = "", None
        for node in self.living:
            self._keep_a_port(node)
            assert node.standby is not None
            node.generation, node.knows_plan, node.was_led = self.generation, True, False
            self.plan.append(Place(HOST, node.standby, node.name, 1 + node.number))
            if node.serves is store:
                self.server = node.name
                self.server_at = Place(HOST, store.port, watch=1 + node.number)
        return True

    def _keep_a_port(self, node: Node) -> None:
        """A port for its next record: the endpoint's if nobody listens there. Several nodes of a machine may keep that one."""
        if node.standby is None:
            self._ports += 1
            node.standby = self._ports if ENDPOINT in self.stores else ENDPOINT

    def _serve(self, node: Node, port: int, age: Age, opens_at: float = 0.0) -> Store:
        assert port not in self.stores, "two processes listen at one port"
        store = self.stores[port] = Store(port, node.number, age, opens_at)
        return store

    def _new_name(self) -> str:
        # Which of two names is greater is random.
        self._names += 1
        return f"{self._names * 7919 % 97:02}n{self._names}"


HAPPENS = st.sampled_from(["kill the server", "kill the server", "kill", "end the store", "start"])


ACTS = st.lists(
    st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from([0.0, 1.0, 9.0])), max_size=20
)


History = list[tuple[str, list[tuple[int, bool, float]], bool]]
ORDERS = given(st.integers(2, 4), st.lists(st.tuples(HAPPENS, ACTS, st.booleans()), max_size=6))


@settings(max_examples=200, deadline=None)
@ORDERS
def test_all_that_are_left_meet_at_one_store(count: int, history: History) -> None:
    assert_all_meet(count, history)


def test_a_node_that_went_back_to_its_own_store_asks_where_it_came_from() -> None:
    """It had been led away from its store; the other store ended and opened again; then its own store ended too."""
    slow = [(0, False, 0.0), (1, False, 0.0), (1, False, 0.0)]
    assert_all_meet(
        2,
        [
            ("kill the server", [(0, True, 0.0)], True),
            ("start", slow, False),
            ("end the store", [(1, True, 0.0)], False),
            ("end the store", [], False),
        ],
    )


def test_the_node_that_the_plan_names_may_have_taken_over_from_another() -> None:
    """Its store had ended, and a newcomer's became the job's; that node lost its store, too, and searches by the plan."""
    turns = [(0, True, 0.0), (1, True, 0.0), (0, False, 0.0), (2, True, 0.0), (3, True, 0.0)]
    assert_all_meet(
        4,
        [
            ("end the store", [], False),
            ("start", [], False),
            ("kill the server", [], False),
            ("start", [(0, True, 0.0), (4, False, 0.0)], False),
            ("end the store", [*turns, (4, False, 0.0)], False),
            ("kill the server", [], False),
        ],
    )


def test_a_newcomer_learns_from_the_plan_where_its_store_was() -> None:
    """It came to another node's store; the plan's node serves again, at a port other than its next one."""
    assert_all_meet(
        2,
        [
            ("kill the server", [(0, True, 0.0), (0, False, 0.0)], False),
            ("start", [(0, False, 0.0), (1, False, 0.0)], True),
            ("end the store", [], False),
            ("start", [(1, True, 0.0), (2, False, 0.0)], False),
            ("kill the server", [], False),
        ],
    )


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@ORDERS
def test_so_they_do_in_many_more_orders(count: int, history: History) -> None:
    assert_all_meet(count, history)


def assert_all_meet(count: int, history: History) -> None:
    machine = Machine()
    for _ in range(count):
        machine.start()
    assert machine.meet()
    for what, acts, may_meet in history:
        happen(machine, what)
        for index, hears, slowly in acts:
            machine.now += STEP
            node = machine.living[index % len(machine.living)]
            machine.act(node, hears=hears, slowly=slowly)
        if may_meet:
            machine.meet()
    settle(machine)
    at = {node.name: node.at and node.at.port for node in machine.living}
    assert machine.meet(), f"they wait for one another: {at}"
    assert not machine.mistaken
    assert not machine.forgotten, "its workers would start anew"


def test_a_node_that_waits_finds_a_newcomer_at_the_port_of_a_node_that_has_ended() -> None:
    """All members are lost, and a node that had come waits; then another comes and serves at the endpoint, as a lost one did."""
    machine = Machine()
    members = [machine.start() for _ in range(2)]
    machine.meet()
    waits = machine.start()
    machine.act(waits)
    for node in members:
        machine.kill(node)
    newcomer = machine.start()
    assert newcomer.serves is not None
    settle(machine)
    assert waits.at is newcomer.serves
    assert machine.meet()


def happen(machine: Machine, what: str) -> None:
    serving = [node for node in machine.living if node.serves is not None]
    if what == "start":
        machine.start()
    elif what == "end the store" and serving:
        machine.end_store(serving[-1])
    elif len(machine.living) > 1:
        chosen = serving if what == "kill the server" and serving else machine.living
        machine.kill(chosen[-1])


def settle(machine: Machine) -> None:
    """Nothing else happens: every node acts in every turn."""
    for _ in range(200):
        machine.now += STEP
        for node in machine.living:
            machine.act(node)


def test_a_node_that_served_and_was_led_on_serves_at_the_place_that_the_others_know() -> None:
    """Two nodes took over, one was led to the other, and the other is lost before all have met."""
    machine = Machine()
    zero, first, second, _ = (machine.start() for _ in range(4))
    machine.meet()
    machine.kill(zero)
    machine.act(first)
    assert first.serves is not None
    before = first.serves.port
    # Its turn took too long for the second one.
    second.serves = machine._serve(
        second, 40, Age(first.serves.age.generation, first.serves.age.moves + 1, "x")
    )
    second.at, second.serves.plan = second.serves, machine.generation
    first.serves.note = notes.written(Moved(HOST, 40, second.serves.age))
    machine.act(first)
    assert first.at is second.serves
    first.standby = 50  # from its next record
    machine.kill(second)
    machine.act(first)
    assert first.at is not None and first.at.port == before
    settle(machine)
    assert machine.meet()

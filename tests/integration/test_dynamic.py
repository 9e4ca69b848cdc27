"""Nodes that meet over every kind of store: who gets in, who waits, who is told what, and what junk cannot do.

Handlers run in threads of this process, each with a connection of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ports import free_port
from rallypoint._core import addresses
from rallypoint._core.clock import Deadline
from rallypoint.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeout,
)
from rallypoint.rendezvous import plan as plans
from rallypoint.rendezvous.api import RendezvousInfo
from rallypoint.rendezvous.backend import Endpoint, HostPort, Meeting
from rallypoint.rendezvous.backends.etcd_store import EtcdStore
from rallypoint.rendezvous.backends.file_store import FileStore
from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.backends.tcp_home import TcpHome
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.create import home_for
from rallypoint.rendezvous.dynamic import DynamicRendezvous, Listener
from rallypoint.rendezvous.fixed_home import FixedHome
from rallypoint.rendezvous.home import Home
from rallypoint.rendezvous.liveness import Loss
from rallypoint.rendezvous.notes import Age, Moved, read, written
from rallypoint.rendezvous.protocol import Timing
from rallypoint.rendezvous.quorum import Settings
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec
from rallypoint.rendezvous.store import Store
from servers.etcd_server import EtcdCluster, require_etcd
from tcp_stores import ServedStore


pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LEASE = 1.5
JOIN = 60.0
_numbers = itertools.count()


class Backend:
    """One store: a home for each node, and a connection for whoever meddles with it."""

    def __init__(self, name: str, home: Callable[[], Home], meddle: Callable[[], Store]) -> None:
        self.name, self.home, self.meddle = name, home, meddle


@pytest.fixture(scope="module")
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    require_etcd()
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.stop()


@pytest.fixture(params=["memory", "tcpstore", "file", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    match request.param:
        case "memory":
            shared = MemoryStore()
            return Backend("memory", lambda: FixedHome(lambda: shared), lambda: shared)
        case "tcpstore":
            port = free_port()
            return Backend(
                "c10d",
                lambda: TcpHome([("127.0.0.1", port)], silence=LEASE, say=lambda _: None),
                lambda: TcpStore("127.0.0.1", port, silence=LEASE),
            )
        case "file":

            def opened() -> Store:
                return FileStore(tmp_path / "store", shared=False)

            return Backend("file", lambda: FixedHome(opened), opened)
        case _:
            endpoints = request.getfixturevalue("etcd_cluster").endpoints
            prefix = f"dynamic/{next(_numbers)}"

            def connected() -> Store:
                return EtcdStore(endpoints=endpoints, prefix=prefix)

            return Backend("etcd", lambda: FixedHome(connected), connected)


class Job:
    """Nodes over one store; each call of ``join`` runs in a thread of its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.handlers: list[DynamicRendezvous] = []
        self.pool = ThreadPoolExecutor(16)

    def node(self, least: int, most: int, **more: Any) -> DynamicRendezvous:
        settings = Settings(
            min_nodes=least, max_nodes=most, last_call=more.pop("last_call", 0.5), straggler=10.0
        )
        handler = DynamicRendezvous(
            self.backend.home(),
            backend=self.backend.name,
            run_id=more.pop("run_id", "job"),
            settings=settings,
            timing=Timing(join=more.pop("join", JOIN), lease=LEASE),
            host=more.pop("host", f"n{len(self.handlers)}"),
            local_addr="127.0.0.1",
            say=more.pop("say", lambda _: None),
            **more,
        )
        self.handlers.append(handler)
        return handler

    def join(self, *handlers: DynamicRendezvous) -> list[Future[RendezvousInfo]]:
        return [self.pool.submit(handler.next_rendezvous) for handler in handlers]

    def meet(self, *handlers: DynamicRendezvous) -> list[RendezvousInfo]:
        """Have all of them join one round. Returns their infos in the order of the arguments."""
        infos = [each.result(JOIN + 5) for each in self.join(*handlers)]
        assert len({info.generation for info in infos}) == 1
        return infos

    def end(self) -> None:
        # The one that serves the store goes last, as the launcher ensures.
        for handler in sorted(self.handlers, key=lambda each: each.serves):
            assert handler.shutdown()
        self.pool.shutdown()


@pytest.fixture
def job(backend: Backend) -> Iterator[Job]:
    made = Job(backend)
    yield made
    made.end()


def ranks(infos: list[RendezvousInfo]) -> list[int]:
    return [info.rank for info in infos]


def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.02)


# -- rounds ---------------------------------------------------------------------------------------


def test_a_round_of_fixed_size_and_sticky_ranks_in_those_that_follow(job: Job) -> None:
    nodes = [job.node(3, 3, host=f"n{10 - index}") for index in range(3)]
    infos = job.meet(*nodes)
    assert ranks(infos) == [2, 1, 0]
    assert [info.world_size for info in infos] == [3, 3, 3]
    assert [member.host for member in infos[1].members] == ["n8", "n9", "n10"]
    for generation in (1, 2, 3):
        infos = job.meet(*reversed(nodes))
        assert ranks(infos) == [0, 1, 2]
        assert infos[0].generation == generation


def test_fewer_than_max_meet_after_the_last_call_and_who_comes_later_is_admitted(job: Job) -> None:
    nodes = [job.node(2, 4) for _ in range(3)]
    assert sorted(ranks(job.meet(*nodes))) == [0, 1, 2]
    assert nodes[0].num_nodes_waiting() == 0
    late = job.node(2, 4)
    (waiting,) = job.join(late)
    for node in nodes:
        until(lambda node=node: node.num_nodes_waiting() == 1)
    assert not waiting.done()
    again = job.meet(*nodes)
    assert waiting.result(JOIN).world_size == 4
    assert waiting.result().generation == again[0].generation == 1
    assert waiting.result().rank == 3


def test_members_on_their_way_come_before_newcomers(job: Job) -> None:
    nodes = [job.node(2, 4, last_call=10.0) for _ in range(4)]
    before = job.meet(*nodes)
    newcomers = job.join(*(job.node(2, 4, last_call=10.0) for _ in range(2)))
    quick, slow = nodes[:2], nodes[2:]
    futures = job.join(*quick)
    until(lambda: max((node.arrived or 0) for node in quick) == 4)  # as many as there are places
    assert not wait([*futures, *newcomers], timeout=1, return_when=FIRST_COMPLETED).done
    futures += job.join(*slow)
    assert ranks([each.result(JOIN) for each in futures]) == ranks(before)
    assert not any(each.done() for each in newcomers)


@pytest.mark.parametrize("how", ["told", "noticed", "left"])
def test_a_spare_waits_and_steps_in_for_a_member_that_is_gone(job: Job, how: str) -> None:
    nodes = [job.node(2, 2) for _ in range(3)]
    futures = job.join(*nodes)
    until(lambda: sum(each.done() for each in futures) == 2)
    time.sleep(0.1)
    (spare,) = [each for each in futures if not each.done()]
    members = [node for node, each in zip(nodes, futures, strict=True) if each.done()]
    # The node that serves the store stays: tests/faults covers losing it.
    staying, leaving = sorted(members, key=lambda each: not each.serves)
    infos = {
        id(node): each.result() for node, each in zip(nodes, futures, strict=True) if each.done()
    }
    rank = infos[id(leaving)].rank
    assert staying.num_nodes_waiting() == 0, "there is no room"
    if how == "left":
        leaving.shutdown()
    else:
        leaving._watch.stop(leaving=False)
    if how == "told":
        staying.note_gone(0, rank, certain=True)
    again = job.meet(staying)[0]
    assert (spare.result(JOIN).rank, spare.result().world_size) == (rank, 2)
    assert again.rank == infos[id(staying)].rank


class _Interrupted(BaseException):
    pass


def _interrupt(*_: object) -> None:
    raise _Interrupted


# The exception may strike between the creation of a socket and the block that closes it.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("how", ["by another thread", "by an exception"])
def test_a_member_that_leaves_on_its_way_to_the_next_round_is_lost_to_it(
    job: Job, how: str
) -> None:
    """The others may form the round with it: nobody is told that it left, so it has not left in good order."""
    losses: list[Loss] = []
    nodes = [job.node(3, 3, listener=Listener(on_loss=losses.append)) for _ in range(3)]
    job.meet(*nodes)
    leaving, *staying = sorted(nodes, key=lambda each: each.serves)  # the store's node is last
    records = staying[0].records
    assert records is not None
    places = [f"1/node/{at}" for at in range(3)]
    if how == "by another thread":
        (on_its_way,) = job.join(leaving)
        until(lambda: any(records.look(places)))
        leaving.shutdown()
        with pytest.raises(RendezvousConnectionError):
            on_its_way.result(JOIN)
    else:
        main = threading.get_ident()

        def interrupt() -> None:
            until(lambda: any(records.look(places)))
            signal.pthread_kill(main, signal.SIGALRM)

        held = signal.signal(signal.SIGALRM, _interrupt)
        job.pool.submit(interrupt)
        with pytest.raises(_Interrupted):
            leaving.next_rendezvous()
        signal.signal(signal.SIGALRM, held)
        leaving.shutdown()
    assert {each.generation for each in job.meet(*staying)} == {1}
    until(lambda: any(each.neighbour.generation == 1 for each in losses))
    assert not any(each.left for each in losses)


@pytest.mark.parametrize("backend", ["memory"], indirect=True)
def test_a_spare_that_waits_through_several_rounds_says_so_once(job: Job) -> None:
    said: list[str] = []
    members = [job.node(2, 2) for _ in range(2)]
    job.meet(*members)
    spare = job.node(2, 2, say=said.append)
    (waiting,) = job.join(spare)
    for generation in (1, 2, 3):
        until(lambda awaited=f"{generation}/waiting": members[0].records.count(awaited) == 1)
        assert job.meet(*members)[0].generation == generation
    until(lambda: members[0].records.count("4/waiting") == 1)
    assert not waiting.done()
    assert said == ["the job is running with 2 nodes; waiting as a spare until one is lost"]


@pytest.mark.parametrize("backend", ["memory"], indirect=True)
@pytest.mark.parametrize("news_of", [0, 1])
def test_who_leads_a_round_does_not_wait_for_members_it_knows_to_be_gone(
    job: Job, monkeypatch: pytest.MonkeyPatch, news_of: int
) -> None:
    """Nor does it leave out others because of news from an earlier round, in which they had other ranks."""
    monkeypatch.setattr(plans, "NUM_STANDBYS", 0)  # as beyond the sixteenth node: ids are not known
    nodes = [job.node(2, 3) for _ in range(3)]
    job.meet(*nodes)
    infos = job.meet(*nodes)
    *staying, gone = nodes  # it is still alive, so only the others' knowledge counts
    for node in staying:
        node.note_gone(news_of, infos[2].rank, certain=True)
    futures = job.join(*staying)
    if news_of == 0:
        time.sleep(0.5)
        assert not any(each.done() for each in futures)
        futures += job.join(gone)
    sizes = [each.result(JOIN / 2).world_size for each in futures]
    assert sizes == [2 + (news_of == 0)] * len(sizes)


def test_a_closed_rendezvous_wakes_whoever_waits(job: Job) -> None:
    members = [job.node(2, 2) for _ in range(2)]
    job.meet(*members)
    (waiting,) = job.join(job.node(2, 2))
    time.sleep(0.3)
    assert not members[0].is_closed()
    members[0].close_rendezvous("the job has ended")
    assert members[1].is_closed()
    with pytest.raises(RendezvousClosedError, match="the job has ended"):
        waiting.result(JOIN)
    with pytest.raises(RendezvousClosedError, match="the job has ended"):
        job.join(members[1])[0].result(JOIN)
    with pytest.raises(RendezvousClosedError):
        job.join(job.node(2, 2))[0].result(JOIN)


@pytest.fixture(params=["file", "etcd"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A store that outlives jobs; the last node clears it."""
    if request.param == "file":

        def folder() -> FileStore:
            return FileStore(tmp_path / "store", shared=False)

        return Backend("file", lambda: FixedHome(folder, clear=FileStore.remove), folder)
    endpoints = request.getfixturevalue("etcd_cluster").endpoints
    prefix = f"lasting/{next(_numbers)}"

    def connected() -> EtcdStore:
        return EtcdStore(endpoints=endpoints, prefix=prefix)

    return Backend("etcd", lambda: FixedHome(connected, clear=EtcdStore.delete_prefix), connected)


def _job_of_two(lasting: Backend) -> tuple[list[DynamicRendezvous], list[RendezvousInfo]]:
    job = Job(lasting)
    nodes = [job.node(2, 2, clears=True, last_call=0.0) for _ in range(2)]
    infos = job.meet(*nodes)
    job.pool.shutdown()
    return nodes, infos


@pytest.mark.parametrize("closes", [True, False])
def test_the_last_node_to_leave_clears_a_store_that_outlives_it(
    lasting: Backend, closes: bool
) -> None:
    for _ in range(3):
        nodes, infos = _job_of_two(lasting)
        assert infos[0].generation == 0
        if closes:
            nodes[1].set_closed()
        nodes[1].shutdown()
        assert RecordStore(lasting.meddle(), Codec("job")).look(["head"]) != [None]
        nodes[0].shutdown()
    store = lasting.meddle()
    assert RecordStore(store, Codec("job")).look(["head", "closed", "0/plan"]) == [None] * 3
    store.close()


def test_nodes_that_wait_have_read_that_it_is_over_before_the_store_is_cleared(
    lasting: Backend,
) -> None:
    nodes, _ = _job_of_two(lasting)
    job = Job(lasting)
    (waiting,) = job.join(job.node(2, 2, clears=True))
    records = RecordStore(lasting.meddle(), Codec("job"))
    until(lambda: records.count("1/waiting") == 1)
    nodes[1].set_closed()
    for each in reversed(nodes):
        each.shutdown()
    with pytest.raises(RendezvousClosedError):
        waiting.result(JOIN)
    job.end()
    records.close()


def test_nodes_that_wait_open_a_round_if_all_others_leave_without_closing(
    lasting: Backend,
) -> None:
    nodes, _ = _job_of_two(lasting)
    job = Job(lasting)
    waiting = job.join(*[job.node(2, 2, clears=True) for _ in range(2)])
    records = RecordStore(lasting.meddle(), Codec("job"))
    until(lambda: records.count("1/waiting") == 2)
    for each in reversed(nodes):
        each.shutdown()
    assert {each.result(JOIN).generation for each in waiting} == {1}
    job.end()
    records.close()


def test_a_job_whose_last_node_was_killed_after_it_was_closed_does_not_bar_its_name(
    lasting: Backend,
) -> None:
    nodes, _ = _job_of_two(lasting)
    nodes[1].set_closed()
    nodes[1].shutdown()
    nodes[0]._watch.stop(leaving=False)  # as if it were killed: it does not count itself out
    successors, infos = _job_of_two(lasting)
    assert sorted(ranks(infos)) == [0, 1]
    for each in reversed(successors):
        each.shutdown()
    nodes[0]._clears = False
    nodes[0].shutdown()


def test_a_round_that_does_not_fill_says_who_came_and_how_many_were_wanted(job: Job) -> None:
    futures = job.join(*[job.node(3, 4, join=1.0) for _ in range(2)])
    texts = []
    for each in futures:
        with pytest.raises(RendezvousTimeout) as caught:
            each.result(JOIN)
        texts.append(str(caught.value))
        assert (caught.value.wanted, caught.value.at_most) == (3, 4)
    assert any("2 of 3 to 4 nodes" in text and "n0" in text and "n1" in text for text in texts), (
        texts
    )


@pytest.mark.parametrize("by", ["run_id", "secret"])
def test_two_jobs_in_one_store_do_not_see_each_other(job: Job, by: str) -> None:
    one, other = ("a", "b") if by == "run_id" else (b"one secret", b"other secret")
    first = [job.node(2, 2, **{by: one}) for _ in range(2)]  # type: ignore[arg-type]
    second = [job.node(2, 2, **{by: other}) for _ in range(2)]  # type: ignore[arg-type]
    futures = job.join(*first, *second)
    infos = [each.result(JOIN) for each in futures]
    assert sorted(ranks(infos[:2])) == sorted(ranks(infos[2:])) == [0, 1]
    first[0].close_rendezvous("over")
    assert first[1].is_closed()
    assert not second[1].is_closed()


# -- junk -----------------------------------------------------------------------------------------

KEYS = [
    *("head", "closed", "moved"),
    *(
        f"{generation}/{name}"
        for generation in (0, 1)
        for name in ("call", "plan", "arrivals", "waiting", "node/0", "node/1", "leader/1")
    ),
]
JUNK = st.binary(max_size=40) | st.sampled_from(
    [b"", b"-3", b"2", b"999", b"12abc", b"9" * 30, b'{"v":1,"body":{}}', b"[" * 5000, b"null"]
)
NOT_A_NUMBER = st.binary(max_size=40).filter(lambda data: not data.strip().isdigit())


def draw(strategy: st.SearchStrategy[Any], seed: int) -> Any:
    """One example, always the same for a seed: a whole round for each of hypothesis' hundred would take too long."""
    from hypothesis import Phase, given, seed as seeded, settings

    drawn: list[Any] = []

    @seeded(seed)
    @settings(max_examples=6, database=None, phases=[Phase.generate], deadline=None)
    @given(strategy)
    def take(value: Any) -> None:
        drawn.append(value)

    take()
    return drawn[-1]


def meddle(backend: Backend, codec: Codec, junk: dict[str, bytes]) -> None:
    store = backend.meddle()
    for key, value in junk.items():
        store.set(codec.prefix + key, value)
    if backend.name != "memory":
        store.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("secret", [None, b"secret"], ids=["plain", "secret"])
def test_junk_under_every_key_before_the_round_holds_up_nobody(
    job: Job, seed: int, secret: bytes | None
) -> None:
    junk = draw(st.fixed_dictionaries(dict.fromkeys(KEYS, JUNK)), seed)
    codec = Codec("job", secret)
    host = job.node(3, 3, secret=secret)
    if job.backend.name == "c10d":
        other = job.node(1, 1, secret=secret, run_id="another")
        job.meet(other)
    meddle(job.backend, codec, junk)
    nodes = [host, *(job.node(3, 3, secret=secret) for _ in range(2))]
    for _ in range(2):
        before = time.monotonic()
        infos = job.meet(*nodes)
        assert time.monotonic() - before < JOIN / 2
        assert sorted(ranks(infos)) == [0, 1, 2]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_junk_written_all_the_while_holds_up_nobody(job: Job, seed: int) -> None:
    """It also replaces sound records: then the round may be lost, and the nodes meet in another."""
    secret = b"secret"
    codec = Codec("job", secret)
    chance = random.Random(seed)
    first = [job.node(1, 1, run_id="another")]
    job.meet(*first)
    store = job.backend.meddle()
    stop = threading.Event()
    beats: list[str] = []

    def spoil() -> None:
        # No plans, calls or counts of waiting nodes: destroying a sound one is another matter.
        while not stop.wait(0.01):
            key = chance.choice(
                [*beats, "head", "closed", "moved", "0/arrivals", "0/node/0", "0/node/2", "0/ids/x"]
            )
            store.set(codec.prefix + key, chance.randbytes(chance.randrange(30)))

    nodes = [job.node(3, 3, secret=secret) for _ in range(3)]
    beats += [f"beat/{node._standing.node.node_id}" for node in nodes]
    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        futures = job.join(*nodes[:2])
        time.sleep(0.3)
        futures += job.join(nodes[2])
        before = time.monotonic()
        infos = [each.result(JOIN) for each in futures]
        assert time.monotonic() - before < JOIN / 2
    finally:
        stop.set()
        thread.join()
        if job.backend.name != "memory":
            store.close()
    assert sorted(ranks(infos)) == [0, 1, 2]


@pytest.mark.parametrize("how", ["overwritten", "deleted"])
def test_a_newcomer_finds_the_running_round_though_its_records_are(job: Job, how: str) -> None:
    """It must not start at round 0, where another newcomer might join it."""
    secret = b"known to all the nodes"
    codec = Codec("job", secret)
    nodes = [job.node(2, 3, secret=secret) for _ in range(2)]
    job.meet(*nodes)
    infos = job.meet(*nodes)
    assert {info.generation for info in infos} == {1}
    store = job.backend.meddle()
    for key in ("head", "store", "0/plan", "0/call"):
        if how == "deleted":
            store.delete(codec.prefix + key)
        else:
            store.set(codec.prefix + key, b"a stranger's")
    futures = job.join(job.node(2, 3, secret=secret))
    until(lambda: any(node.num_nodes_waiting() for node in nodes))
    futures += job.join(*nodes)
    infos = [each.result(JOIN) for each in futures]
    assert sorted(ranks(infos)) == [0, 1, 2]
    (generation,) = {info.generation for info in infos}
    assert generation > 1
    if job.backend.name != "memory":
        store.close()


def test_a_port_that_somebody_holds_for_a_moment_is_served_later() -> None:
    """The endpoint's port may have been given to a connection: it then refuses connections and cannot be bound either."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        home = TcpHome([("127.0.0.1", port)], silence=LEASE, say=lambda _: None)
        connecting = ThreadPoolExecutor(1).submit(home.connect, Deadline(10.0), threading.Event())
        time.sleep(0.3)
        assert not connecting.done()
    store = connecting.result(JOIN)
    store.set("k", b"v")
    store.close()
    home.close()


@pytest.mark.parametrize("order", [1, -1])
def test_a_store_the_job_has_left_leads_to_the_newer_one_and_never_back(order: int) -> None:
    """Both have seen the same rounds, and the old one still serves while its node leaves."""
    ports = sorted([free_port(), free_port()])[::order]
    codec = Codec("job")
    stores = []
    for moves, port in enumerate(ports):
        listener = addresses.bind_store(None, port, "port")
        records = RecordStore(ServedStore(LEASE, listener), codec)
        records.write("head", {"generation": 3})
        records.write("store", {"name": "za"[moves], "moves": moves})
        stores.append(records)
    old, new = stores
    endpoint = Endpoint(scheme="tcp", backend="tcpstore", hosts=(HostPort("127.0.0.1", ports[1]),))
    home = home_for(Meeting(endpoint=endpoint, run_id="job", lease=LEASE))
    assert isinstance(home, TcpHome) and home._forward is not None
    at = [("127.0.0.1", port) for port in ports]
    home._forward(new.store, old.store, at[1], at[0])
    home._forward(old.store, new.store, at[0], at[1])
    assert new.look(["moved"]) == [None]
    (note,) = old.look(["moved"])
    assert read(note) == Moved("127.0.0.1", ports[1], Age(3, 1, "a"))
    for records in stores:
        records.close()


def test_a_node_that_is_led_to_a_store_that_has_ended_stays_and_goes_on() -> None:
    port, gone = free_port(), free_port()
    nodes = [
        DynamicRendezvous(
            TcpHome([("127.0.0.1", port)], silence=LEASE, say=lambda _: None),
            backend="tcpstore",
            run_id="job",
            settings=Settings(min_nodes=2, max_nodes=2),
            timing=Timing(join=JOIN, lease=LEASE),
            host=f"n{index}",
            local_addr="127.0.0.1",
        )
        for index in range(2)
    ]
    pool = ThreadPoolExecutor(2)
    infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
    assert sorted(ranks(infos)) == [0, 1]
    records = nodes[0].records
    assert records is not None
    records.write("moved", written(Moved("127.0.0.1", gone, Age(9, 9, "gone"))))
    infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
    assert sorted(ranks(infos)) == [0, 1]
    for node in nodes:
        node.shutdown()


# -- nothing is left ------------------------------------------------------------------------------


def test_nothing_is_left_after_shutdown(backend: Backend) -> None:
    def once() -> None:
        job, run_id = Job(backend), f"job{next(_numbers)}"
        nodes = [job.node(2, 3, run_id=run_id) for _ in range(2)]
        job.meet(*nodes)
        (waiting,) = job.join(job.node(2, 3, run_id=run_id))
        until(lambda: nodes[0].num_nodes_waiting() == 1)
        job.meet(*nodes)
        waiting.result(JOIN)
        job.end()

    def mine() -> set[str]:
        # The watchdog over c10d's connections belongs to the process, and stays.
        return {t.name for t in threading.enumerate()} - {"rally-watchdog"}

    once()  # what is loaded once is loaded now
    threads, descriptors = mine(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    until(lambda: mine() == threads, 3)
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, 3)

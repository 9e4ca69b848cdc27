"""The embedded store's home: one node of the job serves the store, and another takes over when that node is lost.

Binding decides which node serves first: the endpoint's address can be bound on only one machine, so
no names are compared. If several nodes run on that machine, the first one gets the port. It binds
before it has imported torch, which provides the server. Meanwhile a *doorman* (:mod:`.door`) tells arriving nodes that the
store is starting: they wait, and that time is not counted against them.

When the store is lost, the members of the last round ask the old place and each *standby* of the plan, and
:mod:`.places` chooses. A standby has bound its port beforehand but does not listen there until it serves, so
connecting is refused at once; its watch port shows whether its process lives and so will serve. Once it listens, a doorman
answers there, too, so strangers cannot fill the port's queue before the store accepts connections. If a
newcomer meanwhile serves an empty store at the original endpoint, the new host leaves a note there that
leads to the new place.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rallypoint._core import addresses
from rallypoint._core.clock import MONOTONIC, Deadline
from rallypoint.errors import ConfigError, RendezvousConnectionError
from rallypoint.rendezvous import plan
from rallypoint.rendezvous.home import LastRound, Prepare, Recovery, Server
from rallypoint.rendezvous.store import Store

from . import door, places, plan_places, probes
from .door import Doorman
from .greeting import SILENT, Door, Reply
from .places import Answer, Place, Search, Way
from .questions import Questions
from .tcpstore import BREAK, LifeSigns, TcpStore


_log = logging.getLogger(__name__)


Say = Callable[[str], None]
LeaveNote = Callable[[Store, Store, tuple[str, int], tuple[str, int] | None], None]

# Seconds between attempts to connect while looking for a place.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
# The first pause between two questions after a loss, and the pause after news, as a part of the longest pause.
FIRST_PART = 1 / 8
# The least time for the kernel of the lost store's host to answer.
LEAST_REACH = 0.15
# How many reasons for the missing store get a line of their own.
MOST_SAID = 4
# The most seconds of a store's start-up that do not count.
LONGEST_START = 600.0
# How often the new host checks whether a store is served at the old place, to find a newcomer there before it
# has formed a round of its own. After it has left a note, it checks less often whether the note is still there.
FORWARD_EVERY, FORWARD_AGAIN = 0.5, 2.0


def serve_here(listener: socket.socket) -> Callable[[], Server]:
    """Prepare to serve a store in this process; see :data:`~rallypoint.rendezvous.home.Prepare`."""
    from .native_store import StoreServer, load

    load()
    return partial(StoreServer, listener)


class _Served:
    """A store that this node serves, and the way to it."""

    def __init__(self, server: Server, host: str, port: int, silence: float) -> None:
        self._server, self._host, self.port, self._silence = server, host, port, silence

    def connect(self) -> TcpStore:
        return TcpStore(self._host, self.port, silence=self._silence)

    def close(self) -> None:
        self._server.close()


class TcpHome:
    """Implements :class:`~rallypoint.rendezvous.home.Home` for c10d's ``TCPStore``.

    Args:
        hosts: where the store may be at first, in this order; the first one serves it.
        silence: seconds without an answer after which a connection counts as broken.
        is_host: whether this node serves the store; None: it does if the first of ``hosts`` is this machine.
        say: prints a line to the user.
        bind: address that a store served here listens on; ``*``: all; None: the one that other nodes connect to.
        prepare: makes the server of a store served here, in this process or in another one.
        option: the flag that the port was given with, for errors.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        *,
        silence: float,
        is_host: bool | None = None,
        say: Say,
        bind: str | None = None,
        prepare: Prepare = serve_here,
        option: str = "--rdzv-endpoint",
    ) -> None:
        self._hosts = tuple(hosts)
        self._prepare = prepare
        self._option = option
        self._bind = bind
        self._silence = silence
        self._is_host = is_host
        self._say = say
        self._server: _Served | None = None
        self._left: list[_Served] = []  # served here only to lead nodes to where the job is now
        self._standby: socket.socket | None = None
        self._standby_port = 0
        self._is_listed = False  # whether the standby is at a place of the endpoint
        self._current: Place = Place(*self._hosts[0])
        self._outside: Place | None = None  # the current place for others, once it has moved
        # A note has led here since this plan was made, so the plan does not say which node serves at the current place.
        self._overtaken: Mapping[str, Any] | None = None
        self._back_from: Place | None = None  # where the store was before this node took it back
        self._may_serve = True  # False: the server of the store here was lost
        self._told = False  # whether the user knows that the endpoint is not this host's
        self._forward: LeaveNote | None = None
        self._forwarder: threading.Thread | None = None
        self._redirector: threading.Thread | None = None
        self._signs: dict[tuple[str, int], LifeSigns] = {}  # life signs of hosts, by place
        self._closed = threading.Event()

    @property
    def host(self) -> str | None:
        return self._current.addr

    @property
    def serves(self) -> bool:
        return self._server is not None

    def towards(self) -> tuple[str, int] | None:
        return self._hosts[0]

    def forward_with(self, leave_note: LeaveNote) -> None:
        """Set the function that leaves a note, in the older of two stores, that leads to the newer one.

        It takes the job's store as this node sees it, another store, and the places where other nodes find the two. The
        other store's place may be None, if unknown; then no note leads there.
        """
        self._forward = leave_note

    # -- the first connection -------------------------------------------------------------------

    def connect(self, deadline: Deadline, stop: threading.Event) -> Store:
        pause = FIRST_PAUSE
        while True:
            try:
                return self._connect(deadline, stop)
            except RendezvousConnectionError:
                # Either the server has just exited, and another node will serve; or the store cannot be served here now.
                if stop.is_set() or deadline.expired():
                    raise
                stop.wait(min(pause, deadline.remaining() or pause))
                pause = min(2 * pause, LONGEST_PAUSE)

    def _connect(self, deadline: Deadline, stop: threading.Event) -> Store:
        listener = self._listener_if_host()
        if listener is not None:
            # With several endpoints, a store may already be served at another one: this node has come back.
            for host, port in self._hosts[1:]:
                if probes.store_at(host, port) is Answer.SERVES:
                    listener.close()
                    store = self._client(Place(host, port))
                    self._current = Place(host, port)
                    return store
            return self._serve_when_ready(listener, deadline)
        return self._wait_for_host(deadline, stop)

    def _listener_if_host(self) -> socket.socket | None:
        """The store's listening socket, if this node should serve the store.

        Raises:
            ConfigError: this node was told to serve, and the port is in use.
        """
        host, port = self._hosts[0]
        if self._is_host is False:
            return None
        here = addresses.is_this_host(host)
        if self._is_host is None and not here:
            return None
        try:
            to = addresses.listening_address(self._bind, host)
            listener = addresses.bind_store(to, port, self._option)
        except ConfigError as error:
            if self._is_host is None:
                return None  # another supervisor on this machine was first
            if error.problem != addresses.IN_USE:
                raise
            reply = probes.who_is_at(to or addresses.own_host(), port)
            if reply.door in {Door.SERVES, Door.STARTING}:
                return None  # the node that serves it can report it
            problem = f"{error.problem}: {reply.why}" if reply.why else error.problem
            hint = "choose another one, the same on all nodes"
            raise ConfigError(error.field, error.value, problem, hint) from None
        if not here:
            # This node was told to serve, so the name may have no address yet, or only one outside a NAT.
            what = (
                "is not an address of this machine"
                if addresses.exists(host)
                else "has no address yet"
            )
            if not self._told:
                self._say(f"{host} {what}; serving on all addresses of this machine")
            self._told = True
        return listener

    def _wait_for_host(self, deadline: Deadline, stop: threading.Event) -> Store:
        pause = FIRST_PAUSE
        names = ", ".join(f"{host}:{port}" for host, port in self._hosts)
        said: set[str] = set()
        asked_at = MONOTONIC.now()
        granted = LONGEST_START
        starting = False
        while True:
            replies: list[Reply] = []
            for host, port in self._hosts:
                left = deadline.remaining()
                timeout = probes.FIRST_ANSWER
                if left is not None and not starting:
                    timeout = min(timeout, max(left, 0.001))
                reply, line = door.enter(host, port, timeout)
                if reply is SILENT:
                    # While the doorman hands over to the store, there is briefly no answer.
                    reply = Reply(Door.STARTING) if starting else door.ask(host, port)
                replies.append(reply)
                if line is not None:
                    self._current = Place(host, port)
                    return self._client(self._current, greeted=line)
            # An answer says more than none.
            reply = max(replies, key=lambda each: each.door in {Door.STARTING, Door.STRANGER})
            starting = any(each.door is Door.STARTING for each in replies)
            before, asked_at = asked_at, MONOTONIC.now()
            if starting and granted > 0:
                granted -= asked_at - before
                deadline.extend(asked_at - before)
            if deadline.expired() or stop.is_set():
                raise RendezvousConnectionError(
                    probes.cannot_reach(names, reply, starting=starting)
                )
            if (
                pause > 8 * FIRST_PAUSE
                and (why := "starting" if starting else reply.why) not in said
            ):
                said.add(why)
                left = deadline.remaining()
                until = "" if left is None else f", for up to {left:.0f} s"
                if starting:
                    self._say(f"the rendezvous at {names} is starting; waiting for it")
                elif len(said) <= MOST_SAID:
                    self._say(f"waiting for the rendezvous at {names} ({why}){until}")
            stop.wait(min(pause, deadline.remaining() or pause))
            pause = min(pause * 2, LONGEST_PAUSE)
            # Whatever used the port, perhaps only a connection, may be gone by now.
            listener = self._listener_if_host()
            if listener is not None:
                return self._serve_when_ready(listener, deadline)

    def _serve_when_ready(self, listener: socket.socket, deadline: Deadline) -> Store:
        began = MONOTONIC.now()
        try:
            return self._serve(listener)
        finally:
            deadline.extend(MONOTONIC.now() - began)  # starting to serve does not count

    def _serve(self, listener: socket.socket, node_id: str = "") -> Store:
        """Serve the store on a listening socket; a doorman answers until it is ready. ``node_id``: this node's, if known."""
        doorman = Doorman(listener)
        try:
            try:
                serve = self._prepare(listener)
            finally:
                doorman.hand_on()
            host, port = addresses.reached_at(listener), int(listener.getsockname()[1])
            self._server = _Served(serve(), host, port, self._silence)
        except BaseException:
            listener.close()  # its port is free for another attempt, though a traceback may still refer to it
            raise
        self._current = Place(host, port, node_id)
        return self._server.connect()

    def _client(self, place: Place, greeted: socket.socket | None = None) -> TcpStore:
        store = TcpStore(place.addr, place.port, silence=self._silence, greeted=greeted)
        self._signs[place.addr, place.port] = store.signs
        return store

    # -- when it is lost ------------------------------------------------------------------------

    def standby(self, addr: str) -> Mapping[str, Any]:
        if self._standby is None:
            # Use the endpoint's port if it is free: then newcomers need only a list of hosts.
            to = addresses.listening_address(self._bind, addr)
            for port in (self._hosts[0][1], 0):
                try:
                    self._standby = addresses.bind_only(to, port)
                    self._standby_port = self._standby.getsockname()[1]
                    self._is_listed = self._are_newcomers_to_find(to, self._standby_port)
                    break
                except OSError:
                    continue
        if self._standby is None:
            return {}
        told: dict[str, Any] = {"addr": addr, "port": self._standby_port}
        if self._is_listed:
            told["listed"] = True
        if self._server is not None:
            told["serves_at"] = self._server.port
        return told

    def _are_newcomers_to_find(self, to: str | None, port: int) -> bool:
        """Whether a store served here would be at one of the endpoint's places.

        Args:
            to: the address at which this node would listen; None: all.
            port: the port that it would use.
        """
        # One by one: names listed after this host's own may not resolve yet, and failing to resolve takes seconds.
        here = (addresses.own_address(host) for host, its in self._hosts if its == port)
        return any(each is not None and to in (None, each) for each in here)

    def recover(
        self,
        error: RendezvousConnectionError,
        last: LastRound | None,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Recovery:
        if self._server is not None:
            with contextlib.suppress(RendezvousConnectionError):
                # This node serves the store, so only the connection broke.
                return Recovery(self._server.connect(), moved=False)
            # The process that served the store here is gone. The others no longer count on this node, so it follows them.
            self._server.close()
            self._server = None
            self._may_serve = False
        search = self._search(last)
        # The connection to the old place broke before a whole silence had passed; grant the rest of it.
        reach = {search.places[0]: self._left_of_silence(search.places[0])}
        longest = _longest_pause(last)
        pause = first = longest * FIRST_PART
        answers: dict[Place, Answer] = {}

        def ask(place: Place) -> Answer:
            return self._ask(place, reach.get(place, probes.ATTEMPT))

        with contextlib.closing(Questions(ask, len(search.places))) as questions:
            while True:
                questions.put(search.to_ask())
                turn = Deadline(pause)
                pause = min(2 * pause, longest)
                while True:
                    news = questions.answers(turn.remaining() or 0.0)
                    if any(answers.get(place) is not answer for place, answer in news.items()):
                        # Others have learned this, too, and one of them may serve at once.
                        turn, pause = Deadline(min(first, turn.remaining() or 0.0)), 2 * first
                    answers.update(news)
                    if (found := self._found(search, answers)) is not None:
                        return found
                    if stop.is_set() or deadline.expired():
                        raise RendezvousConnectionError(
                            f"{error}; no other node serves it either ({len(search.places)} places tried)"
                        )
                    if not news:
                        break
                left = turn.remaining() or 0.0
                stop.wait(min(left, deadline.remaining() or left))

    def _found(self, search: Search, answers: dict[Place, Answer]) -> Recovery | None:
        """Go where the answers lead, or serve here; None if they do not decide yet. An unusable place counts as silent."""
        while (choice := search.choose(MONOTONIC.now(), answers)) is not None:
            with contextlib.suppress(RendezvousConnectionError):
                return self._go_to(choice, search)
            answers[choice] = Answer.SILENT
            if search.is_own(choice):
                search.note_unable(choice)
        if search.nobody_is_left(answers) and (store := self._start_over(search)) is not None:
            return Recovery(store, True, frozenset(search.dead))
        return None

    def _left_of_silence(self, place: Place) -> float:
        """Seconds until the host of a store has been silent long enough to count as lost."""
        signs = self._signs.get((place.addr, place.port))
        if signs is None or signs.at is None:
            return (1 - BREAK) * self._silence
        return min(max(LEAST_REACH, signs.at + self._silence - MONOTONIC.now()), self._silence)

    def _search(self, last: LastRound | None) -> Search:
        own = "" if last is None else last.node_id
        # The store may have moved since the plan was made.
        host_id = self._current.node_id
        if not host_id and last is not None and last.plan != self._overtaken:
            host_id = str(last.plan.get("store", ""))
        # Watch the host's process, too: a newcomer may serve an empty store at the port of a node that has exited.
        host = next(
            (
                each
                for each in plan_places.standbys(last)
                if each.node_id and each.node_id == host_id
            ),
            None,
        )
        old = self._current
        if host is not None and host_id != own:
            old = replace(old, watch=host.watch, watch_addr=host.addr)
        others = places.others(
            old,
            host_id,
            plan_places.standbys(last),
            [Place(*each) for each in self._hosts],
            own=own,
            may_serve=self._may_serve,
            been=[
                each for each in (plan_places.served_at(last), self._back_from) if each is not None
            ],
        )
        return Search(
            old,
            host_id,
            others,
            own=own,
            dead=() if last is None else last.dead,
            # Another node's turn may take longer than this node's.
            alive_patience=max(self._silence, 2 * probes.ATTEMPT) + probes.ATTEMPT,
            silent_patience=2 * probes.ATTEMPT,
        )

    def _go_to(self, place: Place, search: Search) -> Recovery:
        is_here = bool(self._left) and addresses.is_this_host(place.addr)
        left = {each.port: each for each in self._left if is_here}
        kept = None if self._standby is None else self._standby_port
        way = search.way(place, standby=kept, left=left)
        if way is Way.AGAIN:
            return self._serve_again(left[place.port], place, search)
        if way is not Way.VISIT:
            return self._take_over(place, search, way)
        store = self._client(place)
        store.exists("probe")
        moved = place is not search.places[0]
        self._current = self._outside = place
        return Recovery(store, moved, frozenset(search.dead))

    def _ask(self, place: Place, reach: float) -> Answer:
        answer = probes.store_at(place.addr, place.port, reach=reach)
        if not place.watch or answer is Answer.SILENT:
            return answer
        alive = probes.listens(place.watch_addr or place.addr, place.watch)
        if answer is Answer.SERVES:
            # The node's process is gone and another process of that machine has its port, so this is not the job's store.
            return Answer.DEAD if alive is Answer.DEAD else answer
        return Answer.ALIVE if alive is Answer.SERVES else alive

    def _start_over(self, search: Search) -> Store | None:
        """Serve at the original place, for nodes that wait there. None if this node cannot."""
        host, port = self._hosts[0]
        try:
            listener = self._listener_if_host()
        except ConfigError:
            return None  # another process has that port, and may be about to serve there
        if listener is None:
            return None
        self._say(f"all nodes that served the job's store have ended; serving it here, port {port}")
        store = self._serve(listener)
        self._outside = Place(host, port)
        self._begin_forwarding(self._outside, search.places)
        return store

    def _serve_again(self, left: _Served, place: Place, search: Search) -> Recovery:
        """Serve the job's store again, from one that this node had kept: all nodes that served after it have exited."""
        again = left.connect()
        self._say(
            f"the job's store at {self._current.addr} is lost; serving it here again, port {left.port}"
        )
        self._left.remove(left)
        self._back_from = replace(self._current, node_id="")
        self._server, self._current, self._outside = left, place, place
        self._begin_forwarding(place, search.places)
        return Recovery(again, True, frozenset(search.dead))

    def _take_over(self, place: Place, search: Search, way: Way) -> Recovery:
        standby = self._standby
        if way is Way.STANDBY and standby is not None:
            listener, self._standby = standby, None
        else:
            listener = self._bound_again(place)
        try:
            listener.listen(addresses.BACKLOG)
        except OSError:
            # Another supervisor on this machine had bound the same port, and listened first.
            listener.close()
            raise RendezvousConnectionError(
                "another node of this machine serves the store already"
            ) from None
        old = self._current
        self._say(
            f"the job's store at {old.addr}:{old.port} is lost; serving it here, port {place.port}"
        )
        store = self._serve(listener, place.node_id)
        self._outside = place
        self._begin_forwarding(place, search.places)
        return Recovery(store, True, frozenset(search.dead))

    def _bound_again(self, place: Place) -> socket.socket:
        """Bind the port of this node's own place again, which it no longer holds.

        Raises:
            RendezvousConnectionError: another process has it.
        """
        try:
            to = addresses.listening_address(self._bind, place.addr)
            return addresses.bind_only(to, place.port)
        except OSError as error:
            raise RendezvousConnectionError(
                f"this node cannot serve the store at port {place.port}: {error.strerror}"
            ) from None

    def _begin_forwarding(self, here: Place, known: Iterable[Place]) -> None:
        """Redirect nodes that come to other places: a newcomer at the endpoint, or another part of a broken network."""
        if self._forward is None:
            return
        assert self._server is not None
        found = dict.fromkeys([*self._hosts, *((each.addr, each.port) for each in known)])
        self._forwarder = threading.Thread(
            target=self._keep_forwarding,
            args=(self._server, here, tuple(found)),
            name="rally-forwarder",
            daemon=True,
        )
        self._forwarder.start()

    def _keep_forwarding(
        self, server: _Served, here: Place, others: Sequence[tuple[str, int]]
    ) -> None:
        """Redirect nodes that come to an earlier or possible place of the store to its current place."""
        assert self._forward is not None
        pause = FORWARD_EVERY
        while not self._closed.wait(pause) and self._server is server:
            pause = FORWARD_EVERY
            for host, port in others:
                if (host, port) == (here.addr, here.port) or (
                    port == here.port and addresses.is_this_host(host)
                ):
                    continue
                if probes.store_at(host, port) is not Answer.SERVES:
                    continue
                with (
                    contextlib.suppress(RendezvousConnectionError, TimeoutError),
                    contextlib.closing(server.connect()) as own,
                    contextlib.closing(self._client(Place(host, port))) as there,
                ):
                    self._forward(own, there, (here.addr, here.port), (host, port))
                    pause = FORWARD_AGAIN

    def visit(self, addr: str, port: int) -> Store | None:
        match probes.store_at(addr, port):
            case Answer.SERVES:
                return self._client(Place(addr, port))
            case Answer.DEAD:
                return None
            case _:
                raise RendezvousConnectionError(f"no answer from the store at {addr}:{port}")

    def follow(self, addr: str, port: int, plan: Mapping[str, Any] | None) -> None:
        self._current = self._outside = Place(addr, port)
        self._overtaken = plan
        is_here = bool(self._left) and addresses.is_this_host(addr)
        again = next((left for left in self._left if is_here and left.port == port), None)
        self._retire()
        if again is not None:
            self._left.remove(again)
            self._server = again
            self._begin_forwarding(self._current, ())

    def _retire(self) -> None:
        """Keep the store served here, which is no longer the job's, to redirect others."""
        if self._server is not None:
            self._left.append(self._server)
            self._server = None

    def redirect(self, store: Store) -> None:
        outside = self._outside
        if self._forward is None or outside is None:
            return
        for left in tuple(self._left):
            with (
                contextlib.suppress(RendezvousConnectionError, TimeoutError),
                contextlib.closing(left.connect()) as there,
            ):
                self._forward(store, there, (outside.addr, outside.port), None)
        if self._left and self._redirector is None:
            self._redirector = threading.Thread(
                target=self._keep_redirecting, name="rally-redirector", daemon=True
            )
            self._redirector.start()

    def _keep_redirecting(self) -> None:
        # Others may come to a retired store after its note was written, and make it the newer one.
        while not self._closed.wait(FORWARD_AGAIN):
            outside = self._outside
            if self._left and outside is not None:
                with (
                    contextlib.suppress(RendezvousConnectionError, TimeoutError),
                    contextlib.closing(self._client(outside)) as store,
                ):
                    self.redirect(store)

    def clear(self, store: Store, *, well: bool) -> None:
        pass  # the store ends with the node that serves it

    def close(self) -> None:
        self._closed.set()
        if self._standby is not None:
            self._standby.close()
            self._standby = None
        for thread in (self._forwarder, self._redirector):
            if thread is not None:
                thread.join(probes.ATTEMPT + 0.5)
        if self._server is not None:
            self._left.append(self._server)
            self._server = None
        while self._left:
            self._left.pop().close()


def _longest_pause(last: LastRound | None) -> float:
    """The longest pause between two questions to each place: the more nodes there are, the less often each asks."""
    count = 0 if last is None else len(plan.order(last.plan))
    return min(LONGEST_PAUSE / 4, 0.05 + count / 2000)

"""One worker's end of a group: listens, connects, sends calls, serves calls.

Who does what: :class:`Outgoing` and :class:`Incoming` are the two kinds of connections, :class:`Crew` the threads,
:class:`Request` a call that is served; the agent brings them together, and knows when a peer is lost.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import math
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from rallypoint._core import env
from rallypoint._core.clock import Deadline
from rallypoint.errors import (
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
)
from rallypoint.wire import memory, tcp, tls, uds
from rallypoint.wire.copying import Copier
from rallypoint.wire.frames import Frame, FrameParser
from rallypoint.wire.line import Line
from rallypoint.wire.recycler import Recycler
from rallypoint.wire.remote_error import rebuild
from rallypoint.wire.sharing import Sharing
from rallypoint.wire.shm import Budget
from rallypoint.wire.transport import Address, Listener, choose, why_none

from . import payload as payloads
from .allowlist import AllowList
from .calls import Call
from .certificates import identity_of
from .crew import TICK, Crew, Job
from .cuda_ipc import Way, visible_names, way_to
from .current_call import SERVING
from .device_map import Device
from .future import RpcFuture
from .group import DynamicGroup, StaticGroup
from .handshake import Welcome, introduce
from .incoming import Incoming
from .member import Member
from .messages import CALL, FAILURE, FLAG_PACKED, FLAG_REFS, NOTHING, REMOTES, STREAM, Kind
from .options import NativeRpcBackendOptions
from .outgoing import Outgoing
from .poller import READ, WRITE, Poller
from .rref_table import RRefTable
from .serving import CoroutineLoop, Request
from .statistics import Counters, of_incoming, of_outgoing
from .streams import WINDOW, ItemChannel, ItemSource, RpcStream
from .tensors import Devices, TensorWriter
from .worker_info import WorkerInfo


logger = logging.getLogger(__name__)

Group = StaticGroup | DynamicGroup

# What a connection attempt may take, where the call itself may take longer.
_CONNECT_SECONDS = 10.0
# What it may take at least for a call of ``remote``, however short its own time-out is.
_REMOTE_CONNECT_SECONDS = 0.2
# A peer whose connection broke is asked again before it is taken for dead.
_PROBE_SECONDS = 1.0
# Strangers that have not proved themselves yet: more are not let in.
_MOST_STRANGERS = 256
# A function that was long is tried by the leader again after it was short so many times.
_SHORT_AGAIN = 8
# What a closing agent gives its threads and its peers to finish what they are at.
_LAST_WORDS = 0.5
# Gathering is done by functions of this module.
_OWN_MODULE = "rallypoint.rpc.api"
# How often a shutdown looks whether the last calls are done.
_IDLE_LOOK = 0.005
# Asynchronous calls go out in bundles when more than so many are under way to a peer.
_CROWD = 4
_HANG_UP = select.EPOLLRDHUP


class Agent:
    """A member of an RPC group.

    Args:
        name: this worker's name.
        options: how it works.
        secret: what all members know.
        job: tells this group from every other one that could meet at the same addresses.
    """

    def __init__(
        self, name: str, options: NativeRpcBackendOptions, secret: bytes, job: str
    ) -> None:
        self.options = options
        self.me = WorkerInfo(name, -1)
        # One bound method for all calls.
        self._complete = self._finish
        self.default_timeout = options.rpc_timeout
        self.allowed = (
            None if options.allowed_modules is None else AllowList(options.allowed_modules)
        )
        self.counters = Counters()
        self.incarnation = secrets.token_hex(8)
        self.skipped: dict[str, str] = {}
        self._gil_profiling = False
        self.long_ones: dict[Any, int] = {}
        self.rrefs: RRefTable = None  # type: ignore[assignment]  # set by start(), before anything is served
        self.group: Group | None = None
        # Called with the name of a worker that is gone, and why.
        self.on_lost: Callable[[str, str], None] = lambda name, reason: None
        self._secret = secret
        self._identity = identity_of(options.tls)
        self._transports = tuple(
            tls.KIND if self._identity is not None and each == tcp.KIND else each
            for each in options.transports
        )
        self._job = job
        self._soon: deque[Callable[[], None]] = deque()
        self._poller = Poller(self._on_wake)
        self._kept: deque[Outgoing] = deque()
        self._crew = Crew(
            f"rpc-{name}", options.num_worker_threads, self._poller, self._due, self._tick
        )
        self._loop = CoroutineLoop(f"rpc-{name}")
        self._budget = Budget(options.shared_memory_bytes)
        self._copier = Copier()
        self._recycler = Recycler()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        # Under the lock:
        self._routes: dict[Any, Outgoing] = {}
        self._outgoing: dict[int, Outgoing] = {}
        self._connecting: dict[int, threading.Lock] = {}
        self._incoming: set[Incoming] = set()
        # Those that have ended and are not closed yet.
        self._ended: set[Outgoing | Incoming] = set()
        self._strangers: set[Welcome] = set()
        self._dead: dict[str, str] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._closed = False
        # Whether the crew has ended.
        self._is_alone = False
        # Set when the agent closes.
        self._idle = threading.Event()

    # -- coming and going ---------------------------------------------------------------------------

    def listen(self, advertise: str) -> dict[str, Address]:
        """Open the ways on which others can connect; nobody is served yet.

        Args:
            advertise: the address that workers on other hosts are to use.

        Raises:
            RpcError: none of the transports can be used; says why.
        """
        for kind in self._transports:
            try:
                self._listeners.append(self._open(kind, advertise))
            except OSError as error:
                self.skipped[kind] = error.strerror or str(error)
                logger.info("transport %s is not used: %s", kind, error)
        if not self._listeners:
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in self.skipped.items())
            raise RpcError(f"no transport can be used ({reasons})")
        return {each.kind: each.address for each in self._listeners}

    def _open(self, kind: str, advertise: str) -> Listener:
        match kind:
            case memory.KIND:
                return memory.MemoryListener()
            case uds.KIND:
                return uds.UnixListener()
            case _:
                pass
        options = self.options
        listener = tls.TlsListener if kind == tls.KIND else tcp.TcpListener
        return listener(
            options.bind, options.advertise or advertise, options.ports, options.heartbeat
        )

    def enter(self, group: Group) -> None:
        """This worker is a member of ``group`` from here on."""
        self.group = group
        self.me = WorkerInfo(group.me.name, group.me.id)
        self.rrefs = RRefTable(self)

    def start(self) -> None:
        """Serve. What others have sent meanwhile is done now."""
        group = self.group
        for listener in self._listeners:
            self._poller.add(listener.fileno(), _Door(self, listener))
        self._crew.start()
        if isinstance(group, DynamicGroup):
            group.on_leave(self._on_leave)

    def close(self, timeout: float = 5.0) -> None:
        """Leave: all calls fail, all threads end, everything is given back. Idempotent.

        What functions that are running right now do cannot be ended; their answers go nowhere.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._idle.set()
            outgoing = list(self._outgoing.values())
            incoming = list(self._incoming)
            strangers = list(self._strangers)
            self._routes.clear()
            self._outgoing.clear()
        for listener in self._listeners:
            self._poller.remove(listener.fileno())
            listener.close()
        for each in outgoing:
            each.fail("this worker has left the group")
        # Answers of what has just been done go out first.
        self._crew.close(_LAST_WORDS)
        # Nobody else tells those who wait for an answer that there is none.
        self._is_alone = True
        self._complete_left()
        for peer in incoming:
            peer.finish(Deadline(_LAST_WORDS))
        self._loop.close(timeout)
        ended = self._crew.close(timeout)
        self._complete_left()
        for stranger in strangers:
            stranger.close("this worker has left the group")
        for each in outgoing:
            each.close()
        for peer in incoming:
            peer.close()
        with self._lock:
            # Nobody is left to close those that were lost just before.
            left = list(self._ended)
            self._ended.clear()
        for connection in left:
            connection.close()
        if self.group is not None:
            self.group.close()
            self.rrefs.close()
        with self._lock:
            self._timers.clear()
        self._soon.clear()
        self._recycler.clear()
        self._copier.close()
        if ended:
            self._poller.close()
        else:
            logger.warning(
                "%s has left the group while it still runs functions that others have called; their"
                " results are dropped",
                self.me.name,
            )

    @property
    def is_closed(self) -> bool:
        return self._closed

    # -- who is there -------------------------------------------------------------------------------

    def find(self, to: str | int | WorkerInfo) -> Member:
        """The member that is called by this name, rank or info.

        Raises:
            RpcError: there is none.
            ValueError: it is none of these three.
        """
        if isinstance(to, WorkerInfo):
            to = to.id
        elif isinstance(to, bool) or not isinstance(to, (str, int)):
            raise ValueError(  # noqa: TRY004  # torch's, for a rank that is a float
                f"a worker is called by its name, its rank or its WorkerInfo, not by {to!r}"
            )
        assert self.group is not None
        return self.group.find(to)

    def info(self, to: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Name and id of a worker; None: of this one."""
        if to is None:
            return self.me
        member = self.find(to)
        return WorkerInfo(member.name, member.id)

    def infos(self) -> list[WorkerInfo]:
        assert self.group is not None
        return [WorkerInfo(each.name, each.id) for each in self.group.members()[1]]

    # -- calling ------------------------------------------------------------------------------------

    def route(self, to: Any, until: float | None = None, seconds: float = 0.0) -> Outgoing:
        """The connection to a worker, made if there is none. Blocks for as long as that takes.

        Args:
            until: monotonic seconds, the call's deadline; ``seconds`` is what it was given, for the error.

        Raises:
            PeerLost: there is no way to it.
            RpcTimeout: ``until`` is over.
            RpcError: there is no such worker.
        """
        try:
            return self._routes[to]
        except (KeyError, TypeError):
            return self._route(to, until, seconds)

    def _route(self, to: Any, until: float | None, seconds: float) -> Outgoing:
        member = self.find(to)
        outgoing = self._outgoing.get(member.id)
        if outgoing is None or outgoing.lost_reason is not None:
            with self.waiting():
                outgoing = self.connect(member, until, seconds)
        with self._lock:
            if outgoing.lost_reason is None and not self._closed:
                self._routes[to] = outgoing
        return outgoing

    def watch(self, to: str) -> None:
        """Be connected to a worker: that is how its loss is noticed.

        Raises:
            PeerLost: it is gone. One that is only late is not.
        """
        try:
            self.route(to)
        except PeerLost as error:
            if not isinstance(error.__cause__, DeadlineExceeded):
                raise

    def is_connected_to(self, worker: int) -> bool:
        """Whether a call to this worker would go out at once."""
        return worker in self._outgoing

    def is_gone(self, worker: int) -> bool:
        """Whether there is no such worker any more."""
        try:
            return self.find(worker).incarnation in self._dead
        except RpcError:
            return True

    def deadline(self, timeout: float) -> tuple[float | None, float]:
        """When a call that is made now must be answered, and how many seconds that is; nested calls inherit it.

        Args:
            timeout: as the user gave it: negative for the default, 0 for no limit.
        """
        try:
            seconds = self.default_timeout if timeout < 0 else timeout
        except TypeError:
            raise TypeError(
                f"timeout is {timeout!r}: expected seconds as a number (0: no limit)"
            ) from None
        serving = SERVING.get()
        outer = None if serving is None else serving.deadline
        if not seconds or seconds == math.inf:
            if outer is None:
                return None, 0.0
            return outer, max(0.0, outer - time.monotonic())
        now = time.monotonic()
        deadline = now + seconds
        if outer is not None and outer < deadline:
            # What it really has: an error that names the default would send people to the wrong setting.
            return outer, max(0.0, outer - now)
        return deadline, seconds

    def dumps(self, obj: Any, to: WorkerInfo) -> tuple[bytes, TensorWriter]:
        """Pickle something for a peer."""
        return payloads.dumps(
            obj,
            to=to.id,
            devices=self._devices_for(to),
            by_value=self.options.pickle_by_value,
        )

    def dumps_plain(self, obj: Any) -> tuple[bytes, TensorWriter]:
        """Pickle something of builtin types."""
        return payloads.dumps(obj)

    def _devices_for(self, to: WorkerInfo) -> Devices | None:
        """What becomes of tensors on accelerators on their way to a peer: our map, else its own backwards."""
        group = self.group
        assert group is not None
        own = self.options.device_maps.get(to.name)
        if own is None:
            with contextlib.suppress(RpcError):
                theirs = group.find(to.name).devices.maps.get(self.me.name)
                if theirs:
                    own = {there: here for here, there in theirs.items()}
        if not own:
            return None
        pairs = own

        def target(device: torch.device) -> str:
            found = pairs.get(Device.parse(device))
            if found is None:
                known = ", ".join(f"{a}: {b}" for a, b in pairs.items())
                raise ValueError(
                    f"the device map for {to.name!r} does not say where tensors on {device} go (it has"
                    f" {known}); add it with options.set_device_map"
                )
            return str(found)

        def way(device: torch.device, target: str, nbytes: int) -> Way:
            options = self.options
            decide = way_to(
                group.me, group.find(to.name), options.transports, enabled=options.cuda_ipc
            )
            return decide(device, target, nbytes)

        return Devices(target, way)

    def send(
        self,
        outgoing: Outgoing,
        kind: int,
        call: Call,
        payload: bytes,
        tensors: TensorWriter,
        *,
        flags: int = 0,
        block: bool = True,
    ) -> None:
        """Send a request that carries buffers or references. Raises what :meth:`Outgoing.begin` does."""
        if tensors.parcels:
            flags |= FLAG_REFS
        if tensors.forks:
            flags |= FLAG_REFS
            outgoing.passed.add(tensors.forks, self.rrefs.unsettled)
        if not tensors.buffers:
            outgoing.begin(kind, call, payload, flags=flags, block=block)
            return
        sharing: Sharing | None = outgoing.sharing
        total = sum(each.nbytes for each in tensors.buffers)
        outgoing.reserve(call, total, self.options.in_flight_bytes)
        if sharing is None:
            outgoing.begin(
                kind, call, payload, tensors.buffers, flags=flags, held=tensors.held, block=block
            )
            return
        placed, _ = sharing.place(tensors.buffers)
        outgoing.begin(kind, call, payload, placed, flags=flags, held=tensors.held, block=block)

    def call_sync(
        self,
        to: Any,
        kind: int,
        what: Any,
        content: tuple[Any, ...],
        timeout: float,
        flags: int = 0,
    ) -> Any:
        """Call and wait. ``content`` is a function, its positional and its keyword arguments."""
        deadline, seconds = self.deadline(timeout)
        outgoing = self.route(to, deadline, seconds)
        payload, tensors, flags = self._pickle(kind, content, outgoing, flags)
        call = Call(what, deadline, seconds)
        self._dispatch(outgoing, kind, call, payload, tensors, flags)
        crew = Crew.current()
        if crew is None:
            outgoing.wait(call)
        else:
            with crew.waiting():
                outgoing.wait(call)
        return self.decode(call, outgoing)

    def _pickle(
        self, kind: int, content: tuple[Any, ...], outgoing: Outgoing, flags: int
    ) -> tuple[bytes, TensorWriter | None, int]:
        """A request's payload, its buffers, and the flags that say how to read it."""
        if kind in REMOTES:
            # The ids can be read even where the rest cannot be: then the value is there as an error.
            rref_id, fork_id, *what = content
            inner, tensors, flags = self._pickle(CALL, tuple(what), outgoing, flags)
            try:
                return payloads.dumps((rref_id, fork_id, inner))[0], tensors, flags
            except BaseException:
                payloads.unsent(tensors)
                raise
        options = self.options
        if len(content) == 3 and not flags:
            # The short way first: a call that carries nothing.
            known = payloads.known_call(content)
            if known is not None and not options.pickle_by_value:
                return known, None, 0
            if not options.pickle_by_value:
                packed = payloads.packed_call(content)
                if packed is not None:
                    return packed, None, FLAG_PACKED
        to = outgoing.info
        devices = self._devices_for(to) if options.device_maps or outgoing.has_maps else None
        if len(content) == 3 and not flags:
            payload, tensors = payloads.dumps_call(
                *content, to=to.id, devices=devices, by_value=options.pickle_by_value
            )
        else:
            payload, tensors = payloads.dumps(
                content, to=to.id, devices=devices, by_value=options.pickle_by_value
            )
        return payload, tensors, flags

    def _dispatch(
        self,
        outgoing: Outgoing,
        kind: int,
        call: Call,
        payload: bytes,
        tensors: TensorWriter | None,
        flags: int = 0,
        *,
        block: bool = True,
    ) -> None:
        """Where faults are injected: every request goes through here."""
        counters = self.counters
        counters.sent += 1
        if kind <= STREAM and not self.is_own(call.what):
            counters.user_sent += 1
        if tensors is None or not (tensors.buffers or tensors.forks or tensors.parcels):
            crowd = _CROWD if call.on_done is not None else 0
            outgoing.begin(kind, call, payload, flags=flags, block=block, crowd=crowd)
            return
        try:
            self.send(outgoing, kind, call, payload, tensors, flags=flags, block=block)
        except BaseException:
            payloads.unsent(tensors)
            raise

    def call_async(
        self,
        to: Any,
        kind: int,
        what: Any,
        content: tuple[Any, ...],
        timeout: float,
        flags: int = 0,
        finish: Callable[[Call, Outgoing], Any] | None = None,
        future: RpcFuture[Any] | None = None,
        lost: Callable[[RpcError], None] | None = None,
    ) -> RpcFuture[Any]:
        """Call, and give the answer as a future.

        Args:
            finish: makes the future's value out of the reply; :meth:`decode` by default.
            lost: called if the worker cannot be reached at all.
        """
        made: RpcFuture[Any] = RpcFuture() if future is None else future
        deadline, seconds = self.deadline(timeout)
        call = Call(what, deadline, seconds)
        try:
            until = deadline
            if until is not None and kind in REMOTES:
                # A value that was asked for is made even if that is too late for whoever asked: others may hold it.
                until = max(until, time.monotonic() + _REMOTE_CONNECT_SECONDS)
            outgoing = self.route(to, until, seconds)
        except (PeerLost, RpcTimeout) as error:
            made.fail(error)
            if lost is not None:
                lost(error)
            return made

        call.future = made
        call.outgoing = outgoing
        done = self._complete if finish is None else functools.partial(_complete_by, finish)
        call.on_done = done
        payload, tensors, flags = self._pickle(kind, content, outgoing, flags)
        made.call = call
        try:
            self._dispatch(
                outgoing, kind, call, payload, tensors, flags, block=Crew.current() is None
            )
        except RpcError as error:
            call.error = error
            call.done = True
            done(call)
            return made
        if deadline is not None:
            self.expect(deadline)
        outgoing.attend()
        return made

    def _finish(self, call: Call) -> None:
        """The answer of a call that has a future."""
        future = call.future
        # It has the call: in a cycle, it and what has come would stay until the garbage collector comes by.
        call.future = None
        try:
            error = call.error
            if error is not None:
                raise error
            frame = call.frame
            assert frame is not None
            value = None if frame.kind == NOTHING else self.read(frame, call.outgoing)
            call.frame = None
        except BaseException as raised:  # noqa: BLE001  # it belongs to whoever waits
            future.fail(raised)
        else:
            _set_result(future, value)

    def call_control(
        self,
        to: int,
        kind: int,
        content: tuple[Any, ...],
        timeout: float,
        finish: Callable[[Call, Outgoing], None],
    ) -> None:
        """Send a message of our own; ``finish`` is called with the answer, or with why there is none.

        Raises:
            RpcError: it could not be sent.
        """
        deadline = time.monotonic() + timeout
        outgoing = self.route(to, deadline, timeout)
        call = Call(kind.name if isinstance(kind, Kind) else str(kind), deadline, timeout)
        call.on_done = lambda done: finish(done, outgoing)
        self._dispatch(outgoing, kind, call, payloads.dumps(content)[0], None, block=False)
        self.expect(deadline)
        outgoing.attend()

    def new_future(self) -> RpcFuture[Any]:
        return RpcFuture()

    def expect(self, deadline: float) -> None:
        """Have the overseer look at the calls at this time."""
        due_at = self._crew.due_at
        if due_at is None or deadline < due_at:
            self._crew.wake_at(deadline)

    def call_stream(
        self, to: Any, what: Any, content: tuple[Any, ...], timeout: float, window: int = WINDOW
    ) -> RpcStream[Any]:
        """Call a generator function; its items come as they are made."""
        deadline, seconds = self.deadline(timeout)
        outgoing = self.route(to, deadline, seconds)
        call = Call(what, deadline, seconds)
        stream: ItemChannel[Any] = ItemChannel(lambda frame: self.read(frame, outgoing), window)
        call.on_item = stream.on_item
        call.on_done = stream.on_done
        func, args, kwargs = content
        kwargs = {**(kwargs or {})}
        payload, tensors, flags = self._pickle(
            STREAM, (func, args, {**kwargs, _WINDOW: window}), outgoing, 0
        )
        stream.begun(call, outgoing)
        self._dispatch(outgoing, Kind.STREAM, call, payload, tensors, flags)
        if deadline is not None:
            self.expect(deadline)
        outgoing.attend()
        return RpcStream(stream, self.soon)

    def decode(self, call: Call, outgoing: Outgoing) -> Any:
        """What a completed call has returned; raises what it has raised."""
        if call.error is not None:
            raise call.error
        frame = call.frame
        assert frame is not None
        if frame.kind == NOTHING:
            return None
        return self.read(frame, outgoing)

    def read(self, frame: Frame, outgoing: Outgoing) -> Any:
        """The content of a reply; raises the error that it tells of."""
        buffers = frame.buffers
        if buffers and outgoing.sharing is not None:
            try:
                buffers = outgoing.sharing.take(buffers)
            except ProtocolError as error:
                # Of the connection's two sockets one may end before the other.
                outgoing.fail(str(error))
                raise PeerLost(outgoing.peer, str(error)) from error
        allowed = self.allowed
        content = payloads.loads(frame.payload, buffers, sender=outgoing.info.id, allowed=allowed)
        if frame.flags & FLAG_PACKED:
            return payloads.unpacked(content)
        if frame.kind == FAILURE:
            load = None if allowed is None else payloads.checked(allowed)
            raise _harmless(rebuild(content, outgoing.peer, load), outgoing.peer)
        return content

    # -- connections --------------------------------------------------------------------------------

    def connect(self, member: Member, until: float | None = None, seconds: float = 0.0) -> Outgoing:
        """A connection to a member: the one there is, or a new one by the best way that works.

        Args:
            until: as for :meth:`route`.

        Raises:
            PeerLost: none works; says why each did not.
            RpcTimeout: ``until`` is over, and nobody has answered yet.
        """
        limit = time.monotonic() + _CONNECT_SECONDS
        if until is not None:
            limit = min(limit, until)
        with self._lock:
            gate = self._connecting.setdefault(member.id, threading.Lock())
        try:
            if not gate.acquire(timeout=max(0.0, limit - time.monotonic())):
                raise PeerLost(member.name, "it cannot be reached: it does not answer")
            try:
                return self._connect_first(member, limit)
            finally:
                gate.release()
        except PeerLost as error:
            if until is not None and until <= time.monotonic():
                raise RpcTimeout(seconds, f"a connection to {member.name!r}") from error
            raise

    def _connect_first(self, member: Member, limit: float) -> Outgoing:
        """By whoever is at it alone."""
        outgoing = self._outgoing.get(member.id)
        if outgoing is not None and outgoing.lost_reason is None:
            return outgoing
        dead = self._dead.get(member.incarnation)
        if dead is not None:
            raise PeerLost(member.name, dead)
        outgoing = self._connect(member, Deadline(max(0.0, limit - time.monotonic())))
        with self._lock:
            closed = self._closed
            if not closed:
                # First: who finds it in the table may have it watched at once.
                self._poller.add(outgoing.line.fileno(), _Replies(self, outgoing), _HANG_UP)
                self._outgoing[member.id] = outgoing
        if closed:
            outgoing.close()
            raise PeerLost(member.name, "this worker has left the group")
        return outgoing

    def _connect(self, member: Member, deadline: Deadline, *, probe: bool = False) -> Outgoing:
        assert self.group is not None
        ways = choose(
            self._transports,
            member.addresses,
            same_host=self.group.me.shares_host(member),
            same_process=member.incarnation == self.incarnation,
        )
        reasons = []
        late: DeadlineExceeded | None = None
        refused = 0
        for kind, address in ways:
            try:
                return self._connect_by(kind, address, member, deadline, probe=probe)
            except (OSError, ProtocolError, DeadlineExceeded) as error:
                late = error if isinstance(error, DeadlineExceeded) else late
                refused += isinstance(error, ConnectionRefusedError)
                text = getattr(error, "strerror", None) or str(error)
                reasons.append(f"{kind}: {text}")
        if not ways:
            reasons = [why_none(self._transports, member.addresses)]
        elif refused == len(ways) and not probe:
            # Nobody listens there any more. It may have died before anybody was connected to it, and nobody else
            # would ever notice.
            info = WorkerInfo(member.name, member.id)
            self._crew.submit(_Task(lambda: self._investigate(info, "; ".join(reasons), None)))
        raise PeerLost(member.name, f"it cannot be reached ({'; '.join(reasons)})") from late

    def _connect_by(
        self, kind: str, address: Address, member: Member, deadline: Deadline, *, probe: bool
    ) -> Outgoing:
        sock: tls.Connection
        match kind:
            case memory.KIND:
                sock = memory.connect(address, deadline)
            case uds.KIND:
                sock = uds.connect(address, deadline)
            case _:
                sock = tcp.connect(address, deadline, self.options.heartbeat)
                if kind == tls.KIND:
                    assert self._identity is not None
                    sock = tls.TlsSocket(sock, self._identity, accepts=False)
        sharing = None
        try:
            me = self._introduction()
            if probe:
                me["probe"] = True
            peer, rest, side = introduce(
                sock, self._secret, me, deadline, side=kind == uds.KIND and not probe
            )
            if peer.get("incarnation") != member.incarnation:
                if side is not None:
                    side.close()
                raise ProtocolError(
                    f"{peer.get('name')!r} listens there now, not the worker that was looked for"
                )
            if side is not None:
                sharing = Sharing(side, self._budget, self._copier.move)
            line = tls.new_line(sock, FrameParser(allocate=self._recycler.allocate), kind)
            outgoing = Outgoing(
                line, WorkerInfo(member.name, member.id), self, sharing, bool(member.devices.maps)
            )
            line.on_full = lambda: self._poller.change(line.fileno(), on=WRITE)
            line.parse(rest)
        except BaseException:
            sock.close()
            if sharing is not None:
                sharing.close()
            raise
        return outgoing

    def _introduction(self) -> dict[str, Any]:
        return {
            "job": self._job,
            "generation": 0,
            "name": self.me.name,
            "id": self.me.id,
            "incarnation": self.incarnation,
        }

    # What an Outgoing asks of its watch:

    def kept(self, outgoing: Outgoing) -> None:
        self._kept.append(outgoing)
        self._crew.attend()

    def full(self, outgoing: Outgoing) -> None:
        self._poller.change(outgoing.line.fileno(), on=WRITE)

    def _tick(self) -> None:
        while self._kept:
            outgoing = self._kept.popleft()
            if outgoing.line.has_kept:
                outgoing.send_kept()

    def arm(self, outgoing: Outgoing) -> None:
        self._poller.change(outgoing.line.fileno(), on=READ | _HANG_UP)

    def disarm(self, outgoing: Outgoing) -> None:
        self._poller.change(outgoing.line.fileno(), off=READ | _HANG_UP)

    def wake_at(self, when: float) -> None:
        self._crew.wake_at(when)

    def unwanted(self, outgoing: Outgoing, frame: Frame) -> None:
        """An answer that nobody waits for any more carries references: they are taken, and dropped."""
        self._crew.submit(_Task(lambda: self.read(frame, outgoing)))

    def defer(self, calls: list[Call]) -> None:
        for call in calls:
            self._crew.submit(_Completion(call))
        if self._is_alone:
            self._complete_left()

    def _complete_left(self) -> None:
        """The crew has ended: complete the calls that it has not."""
        for job in self._crew.take_left():
            if isinstance(job, (_Completion, _Completions)):
                job.run()

    def forget(self, outgoing: Outgoing) -> None:
        with self._lock:
            if self._outgoing.get(outgoing.info.id) is outgoing:
                del self._outgoing[outgoing.info.id]
            for key in [key for key, each in self._routes.items() if each is outgoing]:
                del self._routes[key]

    def lost(self, outgoing: Outgoing, reason: str) -> None:
        self._poller.remove(outgoing.line.fileno())
        with self._lock:
            self._ended.add(outgoing)
            closed = self._closed
        if not closed:
            self._crew.submit(_Task(lambda: self._investigate(outgoing.info, reason, outgoing)))

    # -- the loss of a peer -------------------------------------------------------------------------

    def _investigate(
        self, info: WorkerInfo, reason: str, ended: Outgoing | Incoming | None
    ) -> None:
        """A connection has broken: is it only that, or is the peer gone?"""
        if ended is not None:
            ended.close()
            with self._lock:
                self._ended.discard(ended)
        if self._closed:
            return
        try:
            member = self.find(info.id)
        except RpcError:
            self._bury(info, None, reason)
            return
        if member.name != info.name or member.incarnation in self._dead:
            return
        try:
            self._connect(member, Deadline(_PROBE_SECONDS), probe=True).close()
        except PeerLost:
            self._bury(info, member, reason)
        else:
            if ended is not None and ended.passed:
                self.rrefs.inquire(info.id, ended.passed.all())

    def _bury(self, info: WorkerInfo, member: Member | None, reason: str) -> None:
        """A peer is gone: nobody waits for it any more."""
        if member is not None:
            with self._lock:
                if self._closed or member.incarnation in self._dead:
                    return
                self._dead[member.incarnation] = reason
        outgoing = self._outgoing.get(info.id)
        if outgoing is not None and (member is None or outgoing.peer == info.name):
            # Answers that have come already are still read.
            outgoing.hang_up()
        logger.info("worker %s has gone: %s", info.name, reason)
        self.rrefs.peer_lost(info.id, reason)
        self.on_lost(info.name, reason)
        if member is not None and isinstance(self.group, DynamicGroup):
            with contextlib.suppress(RpcError, OSError):
                self.group.report_lost(member, reason)

    def _on_leave(self, member: Member, reason: str) -> None:
        """The group says that a member has left, or was lost."""
        self._crew.submit(
            _Task(lambda: self._bury(WorkerInfo(member.name, member.id), member, reason))
        )

    # -- serving ------------------------------------------------------------------------------------

    def admit(self, listener: Listener) -> None:
        """Somebody has connected."""
        sock = listener.accept()
        if sock is None:
            return
        with self._lock:
            if self._closed or len(self._strangers) >= _MOST_STRANGERS:
                sock.close()
                return
            stranger = Welcome(
                sock,
                self._secret,
                self._introduction(),
                takes_side=listener.kind == uds.KIND,
                identity=self._identity if listener.kind == tls.KIND else None,
                accepted=functools.partial(self._accept, listener.kind),
                ended=self._dismiss,
            )
            self._strangers.add(stranger)
        self._poller.add(sock.fileno(), stranger)
        self._crew.wake_at(stranger.until)

    def _dismiss(self, stranger: Welcome, reason: str) -> None:
        self._poller.remove(stranger.sock.fileno())
        with self._lock:
            self._strangers.discard(stranger)
        if reason:
            logger.info("a connection was refused: %s", reason)

    def _accept(
        self,
        kind: str,
        sock: tls.Connection,
        peer: dict[str, Any],
        rest: bytes,
        side: socket.socket | None,
        jobs: deque[Job],
    ) -> None:
        if peer.get("probe"):
            # It wanted to know whether we are there, and does. Its end says nothing about the peer: whoever
            # probed in return would never come to an end.
            sock.close()
            if side is not None:
                side.close()
            return
        sharing = None
        try:
            worker = WorkerInfo(str(peer.get("name")), int(peer.get("id", -1)))
            if side is not None:
                sharing = Sharing(side, self._budget, self._copier.move)
            line = tls.new_line(sock, FrameParser(allocate=self._recycler.allocate), kind)
        except (OSError, TypeError, ValueError, OverflowError) as error:
            # It has gone again, or does not say who it is.
            logger.info("a connection of %r was given up: %s", peer.get("name"), error)
            if sharing is not None:
                sharing.close()
            elif side is not None:
                side.close()
            sock.close()
            return
        incoming = Incoming(
            line,
            worker,
            sharing,
            job=self._make_job,
            lost=self._lose,
            hold_back=self._poller.hold_back,
            most_unread=self.options.in_flight_bytes,
            listen=self._listen_to,
            submit=self._crew.submit,
        )
        line.on_full = lambda: self._poller.change(line.fileno(), on=WRITE)
        with self._lock:
            closed = self._closed
            if not closed:
                self._incoming.add(incoming)
        if closed:
            incoming.close()
            return
        self._poller.add(sock.fileno(), _Requests(self, incoming))
        incoming.feed(rest, jobs)

    def _listen_to(self, incoming: Incoming, listen: bool) -> None:
        fd = incoming.line.fileno()
        if listen:
            self._poller.change(fd, on=READ)
        else:
            self._poller.change(fd, off=READ)
            logger.info(
                "%s does not read its answers: no further calls of it are taken until it does",
                incoming.peer.name,
            )

    def is_written(self, line: Line) -> None:
        """Nothing is left to be sent on it: the poller need not say when it can be written to."""
        self._poller.change(line.fileno(), off=WRITE)
        if line.is_full:
            # A thread has filled it since: what it asked of the poller may have come before we took it back.
            self._poller.change(line.fileno(), on=WRITE)

    def _make_job(self, incoming: Incoming, frame: Frame) -> Request:
        return Request(self, incoming, frame)

    def _lose(self, incoming: Incoming, reason: str) -> None:
        self._poller.remove(incoming.line.fileno())
        with self._lock:
            self._incoming.discard(incoming)
            self._ended.add(incoming)
            closed = self._closed
        if not closed:
            self._crew.submit(_Task(lambda: self._investigate(incoming.peer, reason, incoming)))

    def is_own(self, target: Any) -> bool:
        """Whether a call of this function is the package's own: a shutdown does not look for those."""
        return getattr(target, "__module__", None) == _OWN_MODULE

    def is_long(self, target: Any) -> bool:
        """Whether a function took long when it was last called."""
        if not self.long_ones:
            return False
        try:
            return self.long_ones.get(target, 0) > 0
        except TypeError:
            return False

    def leads(self) -> bool:
        """Whether the calling thread is the leader's."""
        return self._crew.leads()

    def hand_over(self, job: Job) -> bool:
        """Have a job done by a worker, if this is the leader's thread."""
        if not self._crew.leads():
            return False
        self._crew.submit(job)
        return True

    def note_length(self, target: Any, seconds: float) -> None:
        try:
            if seconds > TICK:
                if len(self.long_ones) < 4096:
                    self.long_ones[target] = _SHORT_AGAIN
            elif target in self.long_ones:
                self.long_ones[target] -= 1
                if self.long_ones[target] <= 0:
                    del self.long_ones[target]
        except (TypeError, KeyError):
            return

    def run_coroutine(self, request: Request, coroutine: Any) -> None:
        self._loop.run(request, coroutine)

    def stream(
        self, request: Request, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """Run a generator on a thread of its own: it waits for its consumer."""
        kwargs = dict(kwargs or {})
        source = ItemSource(request, int(kwargs.pop(_WINDOW, WINDOW)))
        self._crew.submit(_Task(lambda: source.run(func, args, kwargs)))

    def served(self, arrived: float, *, failed: bool, is_user: bool = True) -> None:
        counters = self.counters
        counters.served += 1
        if is_user:
            counters.user_served += 1
        if failed:
            counters.failed += 1
        counters.note(time.monotonic() - arrived)

    def read_foreign(self, content: Any) -> Any:
        """What a pickler that user code has put in place of ours has written."""
        from . import api

        data, tensors = content
        call = api._default_pickler.deserialize(data, tensors)  # torch's name
        return call.func, call.args, call.kwargs

    # -- time, and threads --------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Have a job done by a worker."""
        self._crew.submit(job)

    def soon(self, act: Callable[[], None]) -> None:
        """Have something done by a worker. Safe in finalizers: takes no lock."""
        self._soon.append(act)
        self._poller.wake()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """The same, after some time."""
        when = time.monotonic() + seconds
        with self._lock:
            heapq.heappush(self._timers, (when, next(self._timer_numbers), act))
        self._crew.wake_at(when)

    def waiting(self) -> AbstractContextManager[None]:
        """Around waiting, in a function that is being served: others are served meanwhile."""
        crew = Crew.current()
        return contextlib.nullcontext() if crew is None else crew.waiting()

    def _on_wake(self, jobs: deque[Job]) -> None:
        while self._soon:
            jobs.append(_Task(self._soon.popleft()))

    def _due(self, now: float) -> float | None:
        """Fail what has run out of time; returns when to look again."""
        following: float | None = None
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                self._crew.submit(_Task(heapq.heappop(self._timers)[2]))
            if self._timers:
                following = self._timers[0][0]
        for outgoing in list(self._outgoing.values()):
            expired, then = outgoing.expire(now)
            self.defer(expired)
            if then is not None and (following is None or then < following):
                following = then
        for stranger in list(self._strangers):
            if stranger.until <= now:
                stranger.close("it has not proved itself in time")
            elif following is None or stranger.until < following:
                following = stranger.until
        return following

    # -- for people ---------------------------------------------------------------------------------

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no call is under way here; False if the time was up before."""
        while not self.is_idle():
            left = deadline.remaining()
            if left == 0.0:
                return False
            # Nothing tells when the last one is done; the ends of calls are too frequent to tell it each time.
            self._idle.wait(_IDLE_LOOK if left is None else min(left, _IDLE_LOOK))
        return True

    def work(self) -> str:
        """The calls that are under way, for an error."""
        own = [
            f"{call.describe()} on {each.peer!r}"
            for each in list(self._outgoing.values())
            for call in each.calls.all()
        ]
        theirs = [
            f"{len(each.active)} of {each.peer.name!r}"
            for each in list(self._incoming)
            if each.active
        ]
        more = f" and {len(own) - 8} more" if len(own) > 8 else ""
        parts = []
        if own:
            parts.append(f"this worker waits for {', '.join(own[:8])}{more}")
        if theirs:
            parts.append(f"it still serves calls: {', '.join(theirs)}")
        return "; ".join(parts)

    def is_idle(self) -> bool:
        """Whether no call is under way, in either direction."""
        return not any(each.calls for each in list(self._outgoing.values())) and not any(
            not each.is_idle for each in list(self._incoming)
        )

    def debug_info(self) -> dict[str, str]:
        """Under torch's names."""
        idle, _ = self._crew.counts()
        return {
            "agent.thread_pool_size": str(self.options.num_worker_threads),
            "agent.num_idle_threads": str(idle),
            "agent.client_active_calls": str(
                sum(len(each.calls) for each in list(self._outgoing.values()))
            ),
            "agent.server_active_calls": str(
                sum(len(each.active) for each in list(self._incoming))
            ),
            "agent.server_active_async_calls": str(self._loop.count()),
        }

    def get_debug_info(self) -> dict[str, str]:
        """torch's name for it."""
        info = self.debug_info()
        if self._gil_profiling:
            info["agent.gil_average_wait_time_us"] = "0"
        return info

    def enable_gil_profiling(self, flag: bool) -> None:
        self._gil_profiling = flag

    def get_worker_infos(self) -> list[WorkerInfo]:
        """torch's name for it."""
        return self.infos()

    def get_worker_info(self, name: str | int | None = None) -> WorkerInfo:
        """torch's name for it."""
        return self.info(name)

    def peers(self) -> list[dict[str, Any]]:
        """The connections, as plain data."""
        outgoing, incoming = list(self._outgoing.values()), list(self._incoming)
        return [of_outgoing(each) for each in outgoing] + [of_incoming(each) for each in incoming]

    def queue(self) -> int:
        """Calls that wait for a thread."""
        return self._crew.counts()[1]


# The stream's window travels among its keyword arguments, under a name that no function has.
_WINDOW = " window"


class _Door:
    """A listener in the poller."""

    def __init__(self, agent: Agent, listener: Listener) -> None:
        self._agent = agent
        self._listener = listener

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        del mask, jobs
        self._agent.admit(self._listener)


class _Requests:
    """An incoming connection in the poller."""

    __slots__ = ("_agent", "_incoming")

    def __init__(self, agent: Agent, incoming: Incoming) -> None:
        self._agent = agent
        self._incoming = incoming

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        incoming = self._incoming
        if mask & WRITE and not incoming.line.is_full:
            self._agent.is_written(incoming.line)
        incoming.on_ready(mask, jobs)


class _Replies:
    """An outgoing connection in the poller."""

    __slots__ = ("_agent", "_outgoing")

    def __init__(self, agent: Agent, outgoing: Outgoing) -> None:
        self._agent = agent
        self._outgoing = outgoing

    def on_ready(self, mask: int, jobs: deque[Job]) -> None:
        outgoing = self._outgoing
        if mask & WRITE:
            try:
                if outgoing.line.flush():
                    self._agent.is_written(outgoing.line)
            except ConnectionError as error:
                outgoing.fail(str(error))
                return
        if mask & ~WRITE:
            outgoing.read_now(lambda calls: _complete_soon(calls, jobs))


_set_result = torch._C.Future.set_result


def _complete_by(finish: Callable[[Call, Outgoing], Any], call: Call) -> None:
    """The same, where the value is made out of the reply by ``finish``."""
    future, call.future = call.future, None
    try:
        value = finish(call, call.outgoing)
    except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
        future.fail(error)
    else:
        future.set_result(value)


def _complete_soon(calls: list[Call], jobs: deque[Job]) -> None:
    """User code hangs on some of them, which may take long: those are jobs of their own."""
    short = [each for each in calls if not each.has_callbacks]
    if short:
        jobs.append(_Completions(short, jobs))
    if len(short) < len(calls):
        jobs.extend(_Completion(each) for each in calls if each.has_callbacks)


class _Completions:
    """Calls whose replies have come together, and on which nothing of the user's hangs."""

    __slots__ = ("_calls", "_jobs")

    def __init__(self, calls: list[Call], jobs: deque[Job]) -> None:
        self._calls = deque(calls)
        self._jobs = jobs

    def run(self) -> None:
        if not self._calls:
            return
        # Something of the user's may be hung on one of them at this moment, and wait for a later one: whoever leads
        # then goes on with the rest.
        self._jobs.append(self)
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            _Completion(call).run()


class _Completion:
    """A call whose reply has come: what hangs on it is done by the crew."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def run(self) -> None:
        done = self._call.on_done
        if done is not None:
            try:
                done(self._call)
            except BaseException:
                logger.exception("a callback of a call failed")


class _Task:
    """Anything else."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def run(self) -> None:
        try:
            self._act()
        except BaseException:
            logger.exception("a task of the agent failed")


def _harmless(error: BaseException, worker: str) -> BaseException:
    """What ends a program (SystemExit, KeyboardInterrupt) over there does not end this one."""
    if isinstance(error, Exception):
        return error
    traceback = getattr(error.__cause__, "traceback", "")
    return RemoteError(type(error).__name__, str(error), traceback, worker)


def node_devices(options: NativeRpcBackendOptions) -> Any:
    """What this worker tells the others about its devices."""
    from .device_map import NodeDevices

    counts = {"cuda": torch.cuda.device_count()} if torch.cuda.is_available() else {}
    visible: tuple[str, ...] = ()
    if counts and options.cuda_ipc and torch.version.cuda:
        setting, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER")
        visible = visible_names(counts["cuda"], setting, order)
    return NodeDevices(
        counts=counts,
        devices=tuple(options.devices),
        maps=options.device_maps,
        visible=visible,
    )

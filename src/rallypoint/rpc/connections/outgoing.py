"""The connection on which this process calls one peer: requests go out, replies come in.

Who reads the replies: a thread that waits for one reads itself, since every hand-over to another thread costs more
than the call. The *role* of the reader goes from thread to thread; while nobody who waits has it, the pool's leader
reads (the connection is *armed*). What a reader finds for others it completes for them.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, PeerLost, ProtocolError, RpcError, RpcTimeout
from rallypoint.rpc.current_agent import ELSEWHERE
from rallypoint.rpc.interruptions import DUE, Lent, Rest
from rallypoint.rpc.references.ids import Fork
from rallypoint.rpc.references.sent import SentReferences
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire.frames import Frame, Shared, encode
from rallypoint.wire.line import PATIENCE, Closed, Line
from rallypoint.wire.sharing import Sharing

from .calls import Call, CallTable
from .idle import IdleCondition
from .messages import CANCEL, FAILURE, FLAG_REFS, GIVEN_UP, ITEM, REMOTE, REPLY, SCRIPT_REMOTE


# Bytes of small requests that go out in one write.
_MOST_KEPT = 16 * 1024


class Watch(Protocol):
    """Has the pool's leader look at a connection."""

    idle: IdleCondition

    def arm(self, outgoing: Outgoing) -> None: ...

    def disarm(self, outgoing: Outgoing) -> None: ...

    def kept(self, outgoing: Outgoing) -> None:
        """It has frames that wait for more: have them sent by :meth:`Outgoing.send_kept` soon."""

    def full(self, outgoing: Outgoing) -> None:
        """The kernel takes no more for now: have the rest sent when it does."""

    def forget(self, outgoing: Outgoing) -> None:
        """It is lost: no further call goes this way. Several calls do no harm."""

    def lost(self, outgoing: Outgoing, reason: str) -> None:
        """It has ended, and all its calls with it; called once."""

    def wake_at(self, when: float) -> None: ...

    def failed(self, outgoing: Outgoing, forks: Sequence[Fork]) -> None:
        """A call that carried these references has failed, perhaps before the peer read them."""

    def unwanted(self, outgoing: Outgoing, frame: Frame) -> None:
        """An answer came too late that must not simply be dropped."""

    def defer(self, calls: list[Call]) -> None:
        """Complete these calls on a thread of the pool: user code hangs on them."""


class Outgoing:
    """A connection to one peer, for this process's calls.

    Args:
        line: connected and authenticated.
        info: the peer.
        watch: the agent.
        sharing: the way of large buffers, or None.
        has_maps: whether the peer has device maps, which its answers follow.
    """

    def __init__(
        self,
        line: Line,
        info: WorkerInfo,
        watch: Watch,
        sharing: Sharing | None = None,
        has_maps: bool = False,
    ) -> None:
        self.line = line
        self.info = info
        self.peer = info.name
        self.sharing = sharing
        self.has_maps = has_maps
        self.calls = CallTable()
        self.is_armed = False
        self.lost_reason: str | None = None
        self.in_flight = 0
        self.sent_references = SentReferences()
        # Calls that were given up and whose answers are still to come: they hold memory until somebody reads them.
        self._owed: set[int] = set()
        self._watch = watch
        self._idle = watch.idle
        self._numbers = itertools.count(1)
        self._role = threading.Lock()
        # Whose thread has the role, if it has not given it away to run a handler.
        self._reader: Call | None = None
        # Guards who waits, whether it is armed, and the end.
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        # Notified when bytes in flight have been answered.
        self._room = threading.Condition(self._lock)

    # -- requests ---------------------------------------------------------------------------------

    def reserve(self, call: Call, size: int, most: int) -> None:
        """Count bytes that ``call`` sends as in flight; waits while there are too many. One alone always goes.

        Raises:
            RpcTimeout: the call's time is up.
            PeerLost: the peer is gone.
        """

        def has_room() -> bool:
            return (
                not self.in_flight or self.in_flight + size <= most or self.lost_reason is not None
            )

        with self._room:
            if not has_room():
                left = None if call.deadline is None else call.deadline - time.monotonic()
                # Those that nobody waits for must be read for: then they make room.
                self._lock.release()
                try:
                    self.attend()
                finally:
                    self._lock.acquire()
                if not self._room.wait_for(has_room, left):
                    raise RpcTimeout(call.seconds, f"{call.describe()} on {self.peer!r}")
            self.in_flight += size
            call.size = size

    def release(self, call: Call) -> None:
        """``call`` is not made: its bytes are not in flight."""
        with self._room:
            self.in_flight -= call.size
            call.size = 0
            self._room.notify_all()

    def begin(
        self,
        kind: int,
        call: Call,
        payload: bytes,
        buffers: Sequence[Shared | memoryview] = (),
        *,
        flags: int = 0,
        held: Any = None,
        block: bool = True,
        crowd: int = 0,
    ) -> int:
        """Send a request whose reply completes ``call``; returns its number.

        Args:
            crowd: small requests wait for each other when more than so many are under way; 0: never.
            block: wait until the kernel has taken all of it; else the leader sends the rest.

        Raises:
            PeerLost: the peer is gone. ``call`` is not in the table then.
        """
        number = next(self._numbers)
        call.kind = kind
        call.number = number
        call.held = held
        call.is_owed = True
        time_left = 0
        deadline = call.deadline
        if deadline is not None:
            time_left = max(1, int((deadline - time.monotonic()) * 1000))
        self.calls.add(number, call)
        if self.lost_reason is not None:
            self._withdraw(number)
        pieces = encode(kind, number, payload, buffers, flags=flags, time_left=time_left)
        try:
            if crowd and not buffers and len(self.calls) > crowd:
                # Many are under way: their answers will have this one sent, or the overseer's next tick.
                piece: bytes = pieces[0]  # type: ignore[assignment]  # the only piece is bytes
                kept = self.line.send_later(piece)
                if kept < _MOST_KEPT:
                    if kept == len(piece):
                        # The first since the last write: the others need no word of their own.
                        self._watch.kept(self)
                    return number
                done = self.line.flush()
                if not done:
                    self._watch.full(self)
            else:
                done = self.line.send(pieces, held)
            if not done and block:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self.line.push(Deadline(left))
        except Closed as error:
            self.fail(str(error))
            self._withdraw(number)
        except DeadlineExceeded:
            # What is left of it goes out when the peer reads again: the next request follows it.
            self._expire(call)
        return number

    def adopt(self, call: Call, kind: int) -> int:
        """Take a call into the table without sending anything: for faults that are made on purpose."""
        number = next(self._numbers)
        call.number, call.kind = number, kind
        self.calls.add(number, call)
        return number

    def settle(self, call: Call, error: BaseException) -> None:
        """Complete a call that is in nobody's table with an error."""
        call.error = error
        theirs: list[Call] = []
        self._settle(call, theirs)
        self._complete(theirs)

    def _withdraw(self, number: int) -> None:
        """The peer is lost: the call is not made, unless somebody has failed it already."""
        # Whoever has found that out may not have come so far yet.
        self._watch.forget(self)
        call = self.calls.take(number)
        if call is not None:
            with self._room:
                self.in_flight -= call.size
                call.size = 0
            if self._idle.is_wanted:
                self._idle.note()
            raise PeerLost(self.peer, self.lost_reason or "the connection has ended")

    def tell(self, kind: int, number: int, payload: bytes = b"") -> None:
        """Send a message that has no reply, about call ``number``."""
        try:
            self.line.send(encode(kind, number, payload))
        except Closed as error:
            self.fail(str(error))

    def send_kept(self) -> None:
        """Send what waits for more."""
        try:
            if not self.line.flush():
                self._watch.full(self)
        except Closed as error:
            self.fail(str(error))

    # -- replies ----------------------------------------------------------------------------------

    def attend(self) -> None:
        """Somebody must read the reply of a call that nobody waits for: the leader, if nobody does already."""
        if not self.is_armed and not self._role.locked():
            self._arm()

    def wait(self, call: Call) -> None:
        """Wait until ``call`` is completed, or its time is up.

        Raises:
            RpcTimeout: it is; the call is taken out of the table.
        """
        role = self._role
        if self.line.has_kept:
            self.send_kept()
        while not call.done:
            if role.acquire(False):
                self._read_until(call)
                continue
            self._sleep(call)

    def _read_until(self, call: Call) -> None:
        """Read as the one who has the role; gives it up whenever something is to be completed."""
        late = False
        theirs: list[Call] = []
        self._reader = call
        try:
            if self.is_armed:
                self._disarm()
            while not (call.done or theirs):
                left = None if call.deadline is None else call.deadline - time.monotonic()
                if left is not None and left <= 0.0:
                    late = True
                    break
                try:
                    if DUE and (rest := self.rest()) is not None:
                        rest.check()
                    frames = self.line.read(left, self)
                except (Closed, ProtocolError) as error:
                    self.fail(str(error))
                    break
                except Lent:
                    break
                for frame in frames:
                    self._accept(frame, theirs)
        finally:
            if self._reader is call:
                self._give_role_away()
        if theirs:
            self._complete(theirs)
        if late and not call.done:
            self._expire(call)

    def read_now(self, into: Callable[[list[Call]], None]) -> None:
        """For the leader: read what has come. What it completes is handed over."""
        if not self._role.acquire(False):
            # A thread that waits reads. It arms the connection when it is done, perhaps before we disarm it.
            self._disarm()
            if not self._role.acquire(False):
                return
        theirs: list[Call] = []
        try:
            for frame in self.line.read_now():
                self._accept(frame, theirs)
        except (Closed, ProtocolError) as error:
            self.fail(str(error))
        finally:
            self._role.release()
        if theirs:
            into(theirs)
        if self.line.has_kept:
            self.send_kept()
        self._hand_on()

    def _accept(self, frame: Frame, theirs: list[Call]) -> None:
        kind = frame.kind
        if kind == ITEM:
            call = self.calls.get(frame.call)
            if call is not None and call.on_item is not None:
                call.on_item(frame)
            else:
                self.discard(frame)
            return
        if kind < REPLY or kind > GIVEN_UP:
            raise ProtocolError(f"worker {self.peer!r} has answered with a message of kind {kind}")
        if kind == GIVEN_UP:
            # If it was given up over there first, since its time was over, it still is for us to find that out.
            call = self.calls.get(frame.call)
            if call is not None:
                call.is_owed = False
            self._owed.discard(frame.call)
            return
        call = self.calls.take(frame.call)
        if call is None:
            # Its time was up, or it was cancelled.
            self._owed.discard(frame.call)
            self.discard(frame)
            return
        call.frame = frame
        if call.forks and kind == FAILURE:
            self._watch.failed(self, call.forks)
        self._settle(call, theirs)

    def discard(self, frame: Frame) -> None:
        """An answer that nobody takes: what it holds in shared memory is free, references in it are let go."""
        if frame.flags & FLAG_REFS:
            self._watch.unwanted(self, frame)
        elif self.sharing is not None:
            self.sharing.discard(frame.buffers)

    def _settle(self, call: Call, theirs: list[Call]) -> None:
        """Mark it done and wake who waits; what else there is to do is left to the caller."""
        call.held = None
        if call.size:
            with self._room:
                self.in_flight -= call.size
                self._room.notify_all()
        call.done = True
        waiter = call.waiter
        if waiter is not None:
            _release(waiter)
        if call.on_done is not None:
            theirs.append(call)
        if self._idle.is_wanted:
            self._idle.note()

    def _complete(self, calls: list[Call]) -> None:
        deferred = []
        for call in calls:
            done = call.on_done
            assert done is not None
            if call.has_callbacks:
                deferred.append(call)
            else:
                done(call)
        if deferred:
            self._watch.defer(deferred)

    def _sleep(self, call: Call) -> None:
        """Another thread reads: sleep until it has our reply, or gives the role up."""
        waiter = threading.Lock()
        waiter.acquire()
        rest = Rest.of_main(lambda: self._wait_no_longer(call))
        with self._lock:
            call.waiter = waiter
            self._waiting.append(call)
        try:
            # It may have given it up just now, when nobody was waiting yet.
            if not call.done and self._role.locked():
                left = None if call.deadline is None else call.deadline - time.monotonic()
                if left is None or left > 0.0:
                    seconds = -1 if left is None else min(left, 1e6)
                    if rest is None:
                        waiter.acquire(timeout=seconds)
                    else:
                        rest.check()
                        rest.call(functools.partial(waiter.acquire, True), seconds)
        except Lent:
            # A handler has run on top: look again.
            pass
        finally:
            self._forget_waiter(call)
            if call.deadline is not None and call.deadline <= time.monotonic():
                self._expire(call)
            if call.done:
                # We may have been woken to read, and been answered at the same moment: the next one must be.
                self._hand_on()

    def _forget_waiter(self, call: Call) -> None:
        with self._lock:
            if call.waiter is not None:
                call.waiter = None
                self._waiting.remove(call)

    def _wait_no_longer(self, call: Call) -> None:
        """Who sleeps until it may read does something else for a while; it may have been woken just now."""
        self._forget_waiter(call)
        self._hand_on()

    def rest(self) -> Rest | None:
        """For whoever reads, before it sleeps."""
        return Rest.of_main(self._give_role_away)

    def _give_role_away(self) -> None:
        self._reader = None
        self._role.release()
        self._hand_on()

    def _hand_on(self) -> None:
        """Nobody reads now: wake one that waits to do so, or have the leader do it."""
        if self._role.locked():
            return
        with self._lock:
            heir = next((each for each in self._waiting if not each.done), None)
            if heir is not None and heir.waiter is not None:
                _release(heir.waiter)
                return
        if (self.calls or self._owed) and not self.is_armed and self.lost_reason is None:
            self._arm()

    def _arm(self) -> None:
        with self._lock:
            if not self.is_armed and self.lost_reason is None:
                self._watch.arm(self)
                self.is_armed = True

    def _disarm(self) -> None:
        with self._lock:
            if self.is_armed:
                self._watch.disarm(self)
                self.is_armed = False

    # -- the end of a call, or of the connection -------------------------------------------------

    def _expire(self, call: Call) -> None:
        self.cancel(call.number, RpcTimeout(call.seconds, f"{call.describe()} on {self.peer!r}"))

    def expire(self, now: float) -> tuple[list[Call], float | None]:
        """Fail the calls whose time is up; returns those that are still to be completed, and the next time."""
        expired, following = self.calls.take_expired(now)
        theirs: list[Call] = []
        for number, call in expired:
            self._give_up(number, call)
            call.error = RpcTimeout(call.seconds, f"{call.describe()} on {self.peer!r}")
            self._settle(call, theirs)
        return theirs, following

    def cancel(self, number: int, error: BaseException) -> bool:
        """Give a call up; False if it is done already."""
        call = self.calls.take(number)
        if call is None:
            return False
        self._give_up(number, call)
        self.settle(call, error)
        return True

    def _give_up(self, number: int, call: Call) -> None:
        """Tell the peer that nobody waits. A value that it was to make is made all the same: others may hold it."""
        if call.kind not in (REMOTE, SCRIPT_REMOTE):
            self.tell(CANCEL, number)
        # In this order: what the peer says about it may be read at this moment.
        self._owed.add(number)
        if call.is_owed:
            self.attend()
        else:
            self._owed.discard(number)

    def hang_up(self) -> None:
        """End the connection when what has come is read: every call without an answer fails then."""
        self.line.shut()

    def fail(self, reason: str) -> None:
        """The peer is lost, or we leave: every call fails, and no further one is made."""
        with self._lock:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
        self.line.shut()
        # Before anybody hears of it: who tries again shall find another way.
        self._watch.forget(self)
        theirs: list[Call] = []
        for call in self.calls.take_all():
            call.error = PeerLost(self.peer, reason)
            self._settle(call, theirs)
        if theirs:
            self._watch.defer(theirs)
        self._watch.lost(self, reason)

    def abandon(self) -> None:
        """In a forked child: the parent gets the answers. A thread that forked in the middle of waiting is woken."""
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self.lost_reason = ELSEWHERE
        for call in self.calls.take_all():
            call.error = RpcError(ELSEWHERE)
            call.done = True
            if call.waiter is not None:
                _release(call.waiter)

    def close(self) -> None:
        """Give the socket back, after :meth:`fail`. Waits for a thread that is still reading."""
        with self._lock:
            self.lost_reason = self.lost_reason or "this worker has left"
        self.line.shut()
        if self._role.acquire(timeout=PATIENCE + 1.0):
            self._role.release()
        self.line.close()
        if self.sharing is not None:
            self.sharing.close()


def _release(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:
        # It was released already: one is enough to wake its owner.
        return

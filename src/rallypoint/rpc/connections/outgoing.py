"""The connection on which this process calls one peer: requests go out, replies come in.

A thread that waits for a reply reads the socket itself, since a hand-over between threads costs more than the call.
One thread at a time has the *role* of the reader, and completes the calls of others as it reads their replies. While
no waiting thread has the role, the pool's leader reads (the connection is *armed*).
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
from rallypoint.rpc.current_call import current_call
from rallypoint.rpc.interruptions import DUE, Lent, Rest
from rallypoint.rpc.references.ids import Fork
from rallypoint.rpc.references.sent import SentReferences
from rallypoint.rpc.threads.thread_pool import waiting
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire.frames import Frame, Shared, encode
from rallypoint.wire.line import PATIENCE, Closed, Line
from rallypoint.wire.sharing import Sharing

from .calls import Call, CallTable
from .idle import IdleCondition
from .messages import CANCEL, FAILURE, FLAG_REFS, GIVEN_UP, ITEM, REMOTE, REPLY, SCRIPT_REMOTE


# Bytes of small requests that are collected for one write.
_MOST_KEPT = 16 * 1024


class Watch(Protocol):
    """Has the pool's leader serve a connection."""

    idle: IdleCondition

    def arm(self, outgoing: Outgoing) -> None: ...

    def disarm(self, outgoing: Outgoing) -> None: ...

    def kept(self, outgoing: Outgoing) -> None:
        """The connection holds frames back: have :meth:`Outgoing.send_kept` send them soon."""

    def full(self, outgoing: Outgoing) -> None:
        """The socket's buffer is full: have the rest sent when there is room."""

    def forget(self, outgoing: Outgoing) -> None:
        """The connection is lost: route no further calls to it. Idempotent."""

    def lost(self, outgoing: Outgoing, reason: str) -> None:
        """The connection and all its calls have ended. Called once."""

    def wake_at(self, when: float) -> None: ...

    def failed(self, outgoing: Outgoing, forks: Sequence[Fork]) -> None:
        """A call that carried these references has failed, perhaps before the peer read them."""

    def unwanted(self, outgoing: Outgoing, frame: Frame) -> None:
        """A late answer that must be read before it is dropped."""

    def defer(self, calls: list[Call]) -> None:
        """Complete these calls on a thread of the pool: they have callbacks."""


def _is_passed_on(size: int) -> bool:
    """Whether the call that this code serves came with that many bytes."""
    serving = current_call()
    return serving is not None and size <= serving.size


class Outgoing:
    """A connection to one peer, for this process's calls.

    Args:
        line: connected and authenticated.
        info: the peer.
        watch: arms the connection, and is told of its end.
        sharing: shared memory for large buffers, or None.
        has_maps: whether the peer has device maps; its answers follow them.
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
        # The peer's; empty: not known. A later worker may have the same name and id.
        self.incarnation = ""
        self.sharing = sharing
        self.has_maps = has_maps
        self.calls = CallTable()
        self.is_armed = False
        self.lost_reason: str | None = None
        self.in_flight = 0
        self.sent_references = SentReferences()
        # Cancelled calls whose answers are still to come. Answers hold memory until they are read.
        self._owed: set[int] = set()
        self._watch = watch
        self._idle = watch.idle
        self._numbers = itertools.count(1)
        self._role = threading.Lock()
        # The call whose thread has the role, unless the thread gave it away to run a signal handler.
        self._reader: Call | None = None
        # Guards _waiting, is_armed and lost_reason.
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        # Notified when fewer bytes are in flight.
        self._room = threading.Condition(self._lock)

    # -- requests ---------------------------------------------------------------------------------

    def reserve(self, call: Call, size: int, most: int) -> None:
        """Count the bytes of ``call`` as in flight. Waits while that would exceed ``most``, unless nothing else is in flight.

        A function that passes on no more bytes than came with the call that it serves does not wait: that call itself
        takes up room until it is answered, and others like it may wait for that room, in a cycle.

        Raises:
            RpcTimeout: the call has timed out.
        """

        def has_room() -> bool:
            return (
                not self.in_flight or self.in_flight + size <= most or self.lost_reason is not None
            )

        with self._room:
            if not (has_room() or _is_passed_on(size)):
                left = None if call.deadline is None else call.deadline - time.monotonic()
                # Answers must be read to make room, even if no thread waits for them.
                self._lock.release()
                try:
                    self.attend()
                finally:
                    self._lock.acquire()
                with waiting():
                    found = self._room.wait_for(has_room, left)
                if not found:
                    raise RpcTimeout(call.seconds, f"{call.describe()} on {self.peer!r}")
            self.in_flight += size
            call.size = size

    def release(self, call: Call) -> None:
        """``call`` is not made: its bytes no longer count."""
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
            crowd: with more calls in progress than this, small requests are held back and sent together; 0: never.
            block: wait until all of it is in the socket's buffer; otherwise the leader sends the rest.

        Raises:
            PeerLost: the peer is gone, and ``call`` is not in the table.
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
                # Sent with the next answer, or at the overseer's next tick.
                piece: bytes = pieces[0]  # type: ignore[assignment]  # the only piece is bytes
                kept = self.line.send_later(piece)
                if kept < _MOST_KEPT:
                    if kept == len(piece):
                        # The first since the last write. One notice is enough.
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
            # The rest of the request goes out, before the next one, when the peer reads again.
            self._expire(call)
        return number

    def adopt(self, call: Call, kind: int) -> int:
        """Add a call to the table without sending anything: for injected faults."""
        number = next(self._numbers)
        call.number, call.kind = number, kind
        self.calls.add(number, call)
        return number

    def settle(self, call: Call, error: BaseException) -> None:
        """Complete a call that is in no table with an error."""
        call.error = error
        theirs: list[Call] = []
        self._settle(call, theirs)
        self._complete(theirs)

    def _withdraw(self, number: int) -> None:
        """The peer is lost: take the call back, unless another thread has already failed it."""
        # The thread that noticed the loss may not have done this yet.
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
        """Send the frames that were held back."""
        try:
            if not self.line.flush():
                self._watch.full(self)
        except Closed as error:
            self.fail(str(error))

    # -- replies ----------------------------------------------------------------------------------

    def attend(self) -> None:
        """Have the leader read replies, unless another thread already reads them."""
        if not self.is_armed and not self._role.locked():
            self._arm()

    def wait(self, call: Call) -> None:
        """Wait until ``call`` is completed, at the latest by its timeout."""
        role = self._role
        if self.line.has_kept:
            self.send_kept()
        while not call.done:
            if role.acquire(False):
                self._read_until(call)
                continue
            self._sleep(call)

    def _read_until(self, call: Call) -> None:
        """Read replies until ``call`` or calls of others are done. The caller has the role; it is released here."""
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
        """For the leader: read what has arrived, and pass completed calls to ``into``."""
        if not self._role.acquire(False):
            # A waiting thread reads. It may have stopped and armed the connection before we disarm it, so try again.
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
            # Read once: another thread may complete the call now, which resets it.
            on_item = None if call is None else call.on_item
            if on_item is not None:
                on_item(frame)
            else:
                self.discard(frame)
            return
        if kind < REPLY or kind > GIVEN_UP:
            raise ProtocolError(f"worker {self.peer!r} sent an answer of unknown kind {kind}")
        if kind == GIVEN_UP:
            # If the peer timed the call out first, this end still does so by its own clock.
            call = self.calls.get(frame.call)
            if call is not None:
                call.is_owed = False
            self._owed.discard(frame.call)
            return
        call = self.calls.take(frame.call)
        if call is None:
            # It timed out or was cancelled.
            self._owed.discard(frame.call)
            self.discard(frame)
            return
        call.frame = frame
        if call.forks and kind == FAILURE:
            self._watch.failed(self, call.forks)
        self._settle(call, theirs)

    def discard(self, frame: Frame) -> None:
        """Drop an unwanted answer: release its shared memory and references."""
        if frame.flags & FLAG_REFS:
            self._watch.unwanted(self, frame)
        elif self.sharing is not None:
            self.sharing.discard(frame.buffers)

    def _settle(self, call: Call, theirs: list[Call]) -> None:
        """Mark a call done and wake its thread. Calls with ``on_done`` are appended to ``theirs``, for the caller."""
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
        """Sleep until the thread that reads has our reply, or gives up the role."""
        waiter = threading.Lock()
        waiter.acquire()
        rest = Rest.of_main(lambda: self._wait_no_longer(call))
        with self._lock:
            call.waiter = waiter
            self._waiting.append(call)
        try:
            # The reader may have given up the role before we were in the list.
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
            # A signal handler has run meanwhile: check again.
            pass
        finally:
            self._forget_waiter(call)
            if call.deadline is not None and call.deadline <= time.monotonic():
                self._expire(call)
            if call.done:
                # We may have been woken to read, and answered at the same moment: wake the next.
                self._hand_on()

    def _forget_waiter(self, call: Call) -> None:
        with self._lock:
            if call.waiter is not None:
                call.waiter = None
                self._waiting.remove(call)

    def _wait_no_longer(self, call: Call) -> None:
        """The sleeping thread runs a signal handler. It may have been woken to read just now: pass that on."""
        self._forget_waiter(call)
        self._hand_on()

    def rest(self) -> Rest | None:
        """For the reading thread, before it sleeps."""
        return Rest.of_main(self._give_role_away)

    def _give_role_away(self) -> None:
        self._reader = None
        self._role.release()
        self._hand_on()

    def _hand_on(self) -> None:
        """Find the next reader: a waiting thread, or else the leader."""
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
        """Fail the calls that have timed out. Returns those still to be completed, and the next deadline."""
        expired, following = self.calls.take_expired(now)
        theirs: list[Call] = []
        for number, call in expired:
            self._give_up(number, call)
            call.error = RpcTimeout(call.seconds, f"{call.describe()} on {self.peer!r}")
            self._settle(call, theirs)
        return theirs, following

    def cancel(self, number: int, error: BaseException) -> bool:
        """Cancel a call; False if it is already done."""
        call = self.calls.take(number)
        if call is None:
            return False
        self._give_up(number, call)
        self.settle(call, error)
        return True

    def _give_up(self, number: int, call: Call) -> None:
        """Tell the peer that the answer is no longer needed. Remote values are still created: others may refer to them."""
        if call.kind not in (REMOTE, SCRIPT_REMOTE):
            self.tell(CANCEL, number)
        # In this order: another thread may read the peer's answer at this moment.
        self._owed.add(number)
        if call.is_owed:
            self.attend()
        else:
            self._owed.discard(number)

    def hang_up(self) -> None:
        """End the connection once the data that has arrived is read. Then every unanswered call fails."""
        self.line.shut()

    def fail(self, reason: str) -> None:
        """The peer is lost, or this worker leaves: fail all calls, and make no more."""
        with self._lock:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
        self.line.shut()
        # Before the calls fail: a retry must not be routed here.
        self._watch.forget(self)
        theirs: list[Call] = []
        for call in self.calls.take_all():
            call.error = PeerLost(self.peer, reason)
            self._settle(call, theirs)
        if theirs:
            self._watch.defer(theirs)
        self._watch.lost(self, reason)

    def abandon(self) -> None:
        """In a forked child: the parent gets the answers. Wakes a thread that forked while it waited."""
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self.lost_reason = ELSEWHERE
        for call in self.calls.take_all():
            call.error = RpcError(ELSEWHERE)
            call.done = True
            if call.waiter is not None:
                _release(call.waiter)

    def close(self) -> None:
        """Close the socket, after :meth:`fail`. Waits for a thread that still reads."""
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
        # Released already, which is enough.
        return

"""How a worker calls others: a request is pickled, sent by way of its connection, and its answer waited for or not."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, PeerLost, RpcError, RpcTimeout
from rallypoint.rpc.connections.calls import Call
from rallypoint.rpc.connections.completions import complete_by
from rallypoint.rpc.connections.connections import Connections
from rallypoint.rpc.connections.messages import (
    CALL,
    FLAG_PACKED,
    FLAG_REFS,
    NOTHING,
    REMOTES,
    STREAM,
    Kind,
)
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.current_call import SERVING
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.interruptions import DUE, run_due
from rallypoint.rpc.options import NativeRpcBackendOptions
from rallypoint.rpc.references.rref_table import RRefTable
from rallypoint.rpc.serialization import payload as payloads
from rallypoint.rpc.serialization.tensor_writer import TensorWriter
from rallypoint.rpc.stream import WINDOW, WINDOW_NAME, ItemChannel, RpcStream
from rallypoint.rpc.threads.task_queue import TaskQueue
from rallypoint.rpc.threads.thread_pool import ThreadPool
from rallypoint.rpc.torch_private import NativeFuture
from rallypoint.wire.remote_error import RemoteTraceback
from rallypoint.wire.sharing import Sharing

from .counters import Counters, Tally, is_own
from .devices import PeerDevices
from .replies import Replies


# What connecting may take at least for a call of ``remote``, however short its own time-out is.
_REMOTE_CONNECT_SECONDS = 0.2
# Asynchronous calls go out in bundles when more than so many are under way to a peer.
_CROWD = 4

_set_result = NativeFuture.set_result


class Caller:
    """Makes the calls of one agent.

    Args:
        connections: the ways to others.
        replies: reads the answers.
        devices: of the others.
        pool: looks at the calls when their time is up.
        tasks: what is done later.
        counters: of all calls.
        made: counts the program's own.
    """

    # Set by the agent before any call is made.
    rrefs: RRefTable

    def __init__(
        self,
        options: NativeRpcBackendOptions,
        connections: Connections,
        replies: Replies,
        devices: PeerDevices,
        pool: ThreadPool,
        tasks: TaskQueue,
        counters: Counters,
        made: Tally,
    ) -> None:
        self._pool = pool
        self._tasks = tasks
        self.options = options
        self.default_timeout = options.rpc_timeout
        self._counters = counters
        self._count_made = made.add
        # What each call needs of others, without a way around.
        self.route = connections.route
        self.decode = replies.decode
        self.read = replies.read
        self._devices_for = devices.towards
        # One bound method for all calls.
        self._complete = self._finish

    # -- calls --------------------------------------------------------------------------------------

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
        call = Call(what, deadline, seconds)
        payload, tensors, flags = self._pickle(kind, content, outgoing, flags, call)
        self._dispatch(outgoing, kind, call, payload, tensors, flags)
        pool = ThreadPool.current()
        if pool is None:
            outgoing.wait(call)
        else:
            with pool.waiting():
                outgoing.wait(call)
        try:
            return self.decode(call, outgoing)
        except BaseException as error:
            if isinstance(error.__cause__, RemoteTraceback):
                # It was raised over there: our own steps on its way lead nobody to its reason.
                raise error.with_traceback(None) from error.__cause__
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
        if DUE:
            run_due()
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
        done = self._complete if finish is None else functools.partial(complete_by, finish)
        call.on_done = done
        try:
            payload, tensors, flags = self._pickle(kind, content, outgoing, flags, call)
        except RpcTimeout as error:
            call.error = error
            call.done = True
            done(call)
            return made
        made.call = call
        try:
            self._dispatch(
                outgoing, kind, call, payload, tensors, flags, block=ThreadPool.current() is None
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
        self._dispatch(outgoing, kind, call, payloads.dumps_whole(content), None, block=False)
        self.expect(deadline)
        outgoing.attend()

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
            STREAM, (func, args, {**kwargs, WINDOW_NAME: window}), outgoing, 0, call
        )
        stream.begun(call, outgoing)
        self._dispatch(outgoing, Kind.STREAM, call, payload, tensors, flags)
        if deadline is not None:
            self.expect(deadline)
        outgoing.attend()
        return RpcStream(stream, self._tasks.soon)

    # -- requests -----------------------------------------------------------------------------------

    def _pickle(
        self, kind: int, content: tuple[Any, ...], outgoing: Outgoing, flags: int, call: Call
    ) -> tuple[bytes, TensorWriter | None, int]:
        """A request's payload, its buffers, and the flags that say how to read it.

        Raises:
            RpcTimeout: it took all of the call's time.
            Exception: whatever an argument raises that cannot be pickled.
        """
        if kind in REMOTES:
            # The ids can be read even where the rest cannot be: then the value is there as an error.
            rref_id, fork_id, *what = content
            call.kind = kind
            inner, tensors, flags = self._pickle(CALL, tuple(what), outgoing, flags, call)
            try:
                return payloads.dumps_whole((rref_id, fork_id, inner)), tensors, flags
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
                    return *packed, FLAG_PACKED
        to = outgoing.info
        devices = self._devices_for(to) if options.device_maps or outgoing.has_maps else None
        # A value that was asked for is made even if that is too late for whoever asked.
        until = None if call.kind in REMOTES else call.deadline
        try:
            if len(content) == 3 and not flags:
                payload, tensors = payloads.dumps_call(
                    *content,
                    to=to.id,
                    devices=devices,
                    by_value=options.pickle_by_value,
                    until=until,
                )
            else:
                payload, tensors = payloads.dumps(
                    content,
                    to=to.id,
                    devices=devices,
                    by_value=options.pickle_by_value,
                    until=until,
                )
        except payloads.TooSlow:
            raise RpcTimeout(call.seconds, f"{call.describe()} on {to.name!r}") from None
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
        self._counters.sent += 1
        if kind <= STREAM and not is_own(call.what):
            self._count_made()
        if tensors is None or not (tensors.buffers or tensors.forks or tensors.parcels):
            crowd = _CROWD if call.on_done is not None else 0
            outgoing.begin(kind, call, payload, flags=flags, block=block, crowd=crowd)
            return
        try:
            self.send(outgoing, kind, call, payload, tensors, flags=flags, block=block)
        except BaseException:
            payloads.unsent(tensors)
            raise

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
            call.forks = tensors.forks
            outgoing.sent_references.add(tensors.forks, self.rrefs.unsettled)
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
        try:
            left = None
            if call.deadline is not None and kind not in REMOTES:
                left = call.deadline - time.monotonic()
            placed, _ = sharing.place(tensors.buffers, deadline=Deadline(left))
        except BaseException as error:
            outgoing.release(call)
            if isinstance(error, DeadlineExceeded):
                raise RpcTimeout(call.seconds, f"{call.describe()} on {outgoing.peer!r}") from error
            raise
        outgoing.begin(kind, call, payload, placed, flags=flags, held=tensors.held, block=block)

    # -- time -------------------------------------------------------------------------------------

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

    def expect(self, deadline: float) -> None:
        """Have the overseer look at the calls at this time."""
        due_at = self._pool.due_at
        if due_at is None or deadline < due_at:
            self._pool.wake_at(deadline)

"""Making calls: pickle a request, send it, and wait for its answer or return a future."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, PeerLost, RpcError, RpcTimeout
from rallypoint.rpc.autograd.transfer import recorder
from rallypoint.rpc.connections.calls import Call, describe
from rallypoint.rpc.connections.completions import complete_by
from rallypoint.rpc.connections.connections import Connections
from rallypoint.rpc.connections.messages import (
    CALL,
    FLAG_PACKED,
    FLAG_REFS,
    FLAG_TRACKED,
    NOTHING,
    REMOTES,
    STREAM,
    Kind,
)
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.current_call import SERVING
from rallypoint.rpc.current_context import CURRENT
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.interruptions import DUE, run_due
from rallypoint.rpc.options import NativeRpcBackendOptions
from rallypoint.rpc.references.rref_table import RRefTable
from rallypoint.rpc.serialization import payload as payloads
from rallypoint.rpc.serialization.tensor_writer import TensorWriter
from rallypoint.rpc.stream import WINDOW, WINDOW_NAME, ItemChannel, RpcStream
from rallypoint.rpc.threads.task_queue import TaskQueue
from rallypoint.rpc.threads.thread_pool import ThreadPool
from rallypoint.rpc.time_limits import FOREVER, limit_of
from rallypoint.rpc.torch_private import NativeFuture
from rallypoint.wire.remote_error import RemoteTraceback
from rallypoint.wire.sharing import Sharing

from .counters import Counters, Tally, is_own
from .devices import PeerDevices
from .replies import Replies


# The least time that ``remote`` allows for connecting, however short its timeout.
_REMOTE_CONNECT_SECONDS = 0.2
# With more calls than this in progress to a peer, asynchronous calls are sent in batches.
_CROWD = 4

_set_result = NativeFuture.set_result


def _unconnected(error: RpcTimeout, what: Any) -> RpcTimeout:
    """The error of a call that timed out while it waited for a connection."""
    return RpcTimeout(error.seconds, f"{describe(what)}, {error.what}")


def _wait_for(call: Call, outgoing: Outgoing) -> None:
    pool = ThreadPool.current()
    if pool is None:
        outgoing.wait(call)
    else:
        with pool.waiting():
            outgoing.wait(call)


class Caller:
    """Makes the calls of one agent.

    Args:
        connections: to the other workers.
        replies: reads the answers.
        devices: the peers' devices.
        pool: wakes for the timeouts of calls.
        tasks: the background tasks.
        counters: count all calls.
        made: counts calls by the program.
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
        # Bound methods of the other parts, called directly for speed.
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
        call, outgoing = self.begin(to, kind, what, content, timeout, flags)
        _wait_for(call, outgoing)
        # As in finish(). Calling it would add a line to programs' tracebacks.
        try:
            return self.decode(call, outgoing)
        except BaseException as error:
            if isinstance(error.__cause__, RemoteTraceback):
                # The error is the callee's. The frames of this package would not explain it.
                raise error.with_traceback(None) from error.__cause__
            # The error refers to this frame, and so to the call.
            call.error = None
            raise
        finally:
            if DUE:
                run_due()

    def begin(
        self,
        to: Any,
        kind: int,
        what: Any,
        content: tuple[Any, ...],
        timeout: float,
        flags: int = 0,
    ) -> tuple[Call, Outgoing]:
        """Send a call. This thread must :meth:`finish` it, and reads the answer itself: no other thread has to wake up."""
        deadline, seconds = self.deadline(timeout)
        try:
            outgoing = self.route(to, deadline, seconds)
        except RpcTimeout as error:
            raise _unconnected(error, what) from error.__cause__
        call = Call(what, deadline, seconds)
        payload, tensors, flags = self._pickle(kind, content, outgoing, flags, call)
        self._dispatch(outgoing, kind, call, payload, tensors, flags)
        return call, outgoing

    def finish(self, call: Call, outgoing: Outgoing) -> Any:
        """Wait for the answer to a call."""
        _wait_for(call, outgoing)
        try:
            return self.decode(call, outgoing)
        except BaseException as error:
            if isinstance(error.__cause__, RemoteTraceback):
                # The error is the callee's. The frames of this package would not explain it.
                raise error.with_traceback(None) from error.__cause__
            # The error refers to this frame, and so to the call.
            call.error = None
            raise
        finally:
            if DUE:
                run_due()

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
        """Call, and return a future of the answer.

        Args:
            finish: turns the reply into the future's value; :meth:`decode` by default.
            lost: called if the worker cannot be reached.
        """
        if DUE:
            run_due()
        made: RpcFuture[Any] = RpcFuture() if future is None else future
        deadline, seconds = self.deadline(timeout)
        call = Call(what, deadline, seconds)
        try:
            until = deadline
            if until is not None and kind in REMOTES:
                # A remote value is created even after the timeout: other workers may refer to it.
                until = max(until, time.monotonic() + _REMOTE_CONNECT_SECONDS)
            outgoing = self.route(to, until, seconds)
        except (PeerLost, RpcTimeout) as error:
            # Without its frames, this one among them.
            told = (
                _unconnected(error, what)
                if isinstance(error, RpcTimeout)
                else error.with_traceback(None)
            )
            made.fail(told)
            if lost is not None:
                lost(told)
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
        """Complete the future of a call."""
        future = call.future
        # The future refers to the call: otherwise the cycle would keep the reply alive until the next garbage collection.
        call.future = None
        try:
            error = call.error
            if error is not None:
                raise error
            frame = call.frame
            assert frame is not None
            value = None if frame.kind == NOTHING else self.read(frame, call.outgoing)
            call.frame = None
        except BaseException as raised:  # noqa: BLE001  # raised where the future is waited for
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
        """Send a control message. ``finish`` is called with the answered or failed call.

        Raises:
            RpcError: the message could not be sent.
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
        """Call a generator function, and return a stream of its items."""
        deadline, seconds = self.deadline(timeout)
        try:
            outgoing = self.route(to, deadline, seconds)
        except RpcTimeout as error:
            raise _unconnected(error, what) from error.__cause__
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
        """A request's payload, buffers and flags.

        Raises:
            RpcTimeout: pickling took longer than the call's timeout.
            Exception: an argument cannot be pickled.
        """
        if kind in REMOTES:
            # The ids are pickled separately: if the callee cannot read the rest, the value becomes an error.
            rref_id, fork_id, *what = content
            call.kind = kind
            inner, tensors, flags = self._pickle(CALL, tuple(what), outgoing, flags, call)
            try:
                return payloads.dumps_whole((rref_id, fork_id, inner)), tensors, flags
            except BaseException:
                payloads.unsent(tensors)
                raise
        options = self.options
        context = CURRENT.get()
        recording = None if context is None else recorder(context, outgoing.info.id)
        if recording is not None:
            assert context is not None
            if len(content) == 3 and not flags and not options.pickle_by_value:
                packed = payloads.packed_call(content, recording, context.id)
                if packed is not None:
                    return *packed, FLAG_TRACKED | FLAG_PACKED
            content = (context.id, content)
            flags |= FLAG_TRACKED
        if len(content) == 3 and not flags:
            # The fast path for small calls.
            known = payloads.known_call(content)
            if known is not None and not options.pickle_by_value:
                return known, None, 0
            if not options.pickle_by_value:
                packed = payloads.packed_call(content)
                if packed is not None:
                    return *packed, FLAG_PACKED
        to = outgoing.info
        devices = self._devices_for(to) if options.device_maps or outgoing.has_maps else None
        # A remote value is created even after the timeout.
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
                    recorder=recording,
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
        """Send a request. Every request passes through here, so that ``faulty`` can override it."""
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
        """Send a request with buffers or references. Raises the same errors as :meth:`Outgoing.begin`."""
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
        """The deadline of a call that starts now, and its timeout in seconds. An outer call's deadline is an upper limit.

        Args:
            timeout: the user's; negative: the default; 0: no limit.
        """
        try:
            seconds = self.default_timeout if timeout < 0 else timeout
        except TypeError:
            raise TypeError(
                f"timeout is {timeout!r}: expected seconds as a number (0: no limit)"
            ) from None
        serving = SERVING.get()
        # A task that a coroutine has started keeps the coroutine's call, even once that is over.
        outer = None if serving is None or serving.is_over else serving.deadline
        if not 0 < seconds < FOREVER and limit_of(seconds) is None:
            if outer is None:
                return None, 0.0
            return outer, max(0.0, outer - time.monotonic())
        now = time.monotonic()
        deadline = now + seconds
        if outer is not None and outer < deadline:
            # The effective timeout: an error that named the default would point to the wrong setting.
            return outer, max(0.0, outer - now)
        return deadline, seconds

    def expect(self, deadline: float) -> None:
        """Have the overseer check for timeouts at this time."""
        due_at = self._pool.due_at
        if due_at is None or deadline < due_at:
            self._pool.wake_at(deadline)

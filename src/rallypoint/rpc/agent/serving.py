"""A request, from arrival to answer: unpickle, call, answer. Coroutines and futures answer later."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.futures import Future

from rallypoint._core import raised
from rallypoint.errors import CallCancelled, NotAllowed, RpcError
from rallypoint.rpc.autograd.context import Context
from rallypoint.rpc.autograd.contexts import Contexts
from rallypoint.rpc.autograd.transfer import Recorder, recorder
from rallypoint.rpc.calling import read_foreign
from rallypoint.rpc.connections.incoming import Incoming
from rallypoint.rpc.connections.messages import (
    END,
    FAILURE,
    FETCH,
    FLAG_FOREIGN,
    FLAG_PACKED,
    FLAG_REFS,
    FLAG_TRACED,
    FLAG_TRACKED,
    GIVEN_UP,
    ITEM,
    NOTHING,
    REMOTES,
    REPLY,
    SCRIPT_FETCH,
    STREAM,
)
from rallypoint.rpc.current_call import SERVING, CurrentCall
from rallypoint.rpc.current_context import CURRENT
from rallypoint.rpc.references.rref_table import RRefTable, check_ids
from rallypoint.rpc.rref_proxy import AnswerLater
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.rpc.serialization.arrays import is_array, memory_of_array
from rallypoint.rpc.serialization.payload import (
    Records,
    dumps_whole,
    loads,
    loads_call,
    packed_result,
    unpacked,
    unsent,
)
from rallypoint.rpc.serialization.sole_reference import memory_of_one
from rallypoint.rpc.serialization.tensor_writer import TensorWriter
from rallypoint.rpc.threads.thread_pool import TICK, Job
from rallypoint.rpc.torch_private import NativeFuture
from rallypoint.rpc.worker_info import WorkerInfo
from rallypoint.wire.frames import Frame, size_of
from rallypoint.wire.remote_error import describe, traceback_text

from . import traced_calls
from .call_errors import as_value, forget_our_frames, translated, wrong_return_type
from .counters import is_own


logger = logging.getLogger(__name__)

_is_inference = torch.is_inference_mode_enabled
_is_grad_enabled = torch.is_grad_enabled

_FETCHES = (FETCH, SCRIPT_FETCH)


class Threads(Protocol):
    """Chooses the thread of a function."""

    # Functions whose recent runs took long.
    long_ones: dict[Any, int]

    def submit(self, job: Job) -> None: ...

    def leads(self) -> bool:
        """Whether the calling thread is the leader, which must not block."""

    def is_long(self, target: Any) -> bool: ...

    def note_length(self, target: Any, seconds: float) -> None: ...

    def hand_over(self, job: Job) -> bool:
        """Give a job to a follower if the calling thread leads; False if it does not."""


class Runners(Protocol):
    """Runs functions whose answers come after they return."""

    def run_coroutine(self, request: Request, coroutine: Any) -> None: ...

    def stream(
        self, request: Request, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None: ...


class Worker(Threads, Runners, Protocol):
    """What a request needs from its worker. Flat, because each attribute lookup costs time in every call."""

    me: WorkerInfo
    # The names that a message may contain; None: any.
    allowed: AllowList | None
    rrefs: RRefTable
    contexts: Contexts

    def dumps(
        self, obj: Any, to: WorkerInfo, recorder: Records | None = None
    ) -> tuple[bytes, TensorWriter]: ...

    def served(self, arrived: float, *, failed: bool, is_user: bool = True) -> None:
        """Count a served request."""


class Request:
    """One request of a peer."""

    __slots__ = (
        "_arrived",
        "_began",
        "_call",
        "_content",
        "_flow",
        "_frame",
        "_home",
        "_ids",
        "_incoming",
        "_is_array",
        "_is_user",
        "_made",
        "_on_cancel",
        "_worker",
        "context",
    )

    def __init__(self, worker: Worker, incoming: Incoming, frame: Frame) -> None:
        self._worker = worker
        self._incoming = incoming
        self._frame = frame
        self._call: CurrentCall | None = None
        self._on_cancel: Callable[[], None] | None = None
        # Function and arguments, until the function is called.
        self._content: Any = None
        # Address of the result's memory if nothing else refers to it.
        self._home = 0
        self._is_array = False
        # The ItemSource of a stream.
        self._flow: Any = None
        # For a remote call: the ids of the value and its first fork, and the future of the value.
        self._ids: tuple[Any, Any] | None = None
        self._made: Future[Any] | None = None
        # The context of distributed autograd.
        self.context: Context | None = None
        self._is_user = frame.kind <= STREAM
        self._arrived = time.monotonic()
        self._began = 0.0
        incoming.active[frame.call] = self

    # -- called by the pool -----------------------------------------------------------------------

    def run(self) -> None:
        if self._incoming.is_paused and self._incoming.park(self):
            return
        if self._content is not None:
            if self._is_unwanted():
                self._content = None
                self.give_up()
                return
            try:
                self._begin(later=False)
            except BaseException as error:  # noqa: BLE001  # sent to the caller
                self._fail_to_begin(error)
            return
        frame = self._frame
        if self._call is None:
            deadline = self._arrived + frame.time_left / 1000.0 if frame.time_left else None
            self._call = CurrentCall(self._incoming.peer, deadline)
            if frame.buffers:
                self._call.size = sum(map(size_of, frame.buffers))
        if self._is_unwanted():
            self._forget()
            return
        try:
            forks: list[Any] = []
            self._content = self._read(frame, forks)
            if forks and self._worker.rrefs.when_confirmed(forks, self._resume):
                return
            self._begin(later=True)
        except BaseException as error:  # noqa: BLE001  # sent to the caller
            self._fail_to_begin(error)

    def _is_unwanted(self) -> bool:
        """Whether it was cancelled or has timed out."""
        call = self._call
        if call is None or call.cancelled:
            return call is not None
        # A remote value is created all the same: other workers may refer to it.
        return (
            call.deadline is not None
            and call.deadline <= time.monotonic()
            and self._frame.kind not in REMOTES
        )

    def _resume(self, error: RpcError | None) -> None:
        """The references among the arguments are confirmed, or never will be."""
        if error is not None:
            self._fail_to_begin(error)
            return
        self._worker.submit(self)

    def _fail_to_begin(self, error: BaseException) -> None:
        """The function is not called. For a remote call, the error becomes the value."""
        self._content = None
        if self._made is None and self._ids is not None:
            self._made = self._worker.rrefs.begin_remote(*self._ids, self._incoming.peer.id)
        self.fail(error)

    def _begin(self, *, later: bool) -> None:
        """Call the function, or serve a message about references."""
        kind = self._frame.kind
        if kind > STREAM or kind in _FETCHES:
            content, self._content = self._content, None
            self._worker.rrefs.serve(self, kind, content)
            return
        target = self._content[0]
        if is_own(target):
            self._is_user = False
        if later and self._worker.is_long(target) and self._worker.hand_over(self):
            return
        if self._ids is not None:
            made = self._worker.rrefs.begin_remote(*self._ids, self._incoming.peer.id)
            if made is None:
                self._content = None
                self.answer(None)
                return
            self._made = made
        self._execute(later=later)

    def _read(self, frame: Frame, forks: list[Any]) -> Any:
        if _is_inference() or not _is_grad_enabled():
            # An earlier function has left its thread in this mode.
            with torch.inference_mode(False):  # which enables gradients as well
                return self._read(frame, forks)
        buffers = frame.buffers
        payload, allowed = frame.payload, self._worker.allowed
        if frame.kind in REMOTES:
            rref_id, fork_id, payload = loads(payload, allowed=allowed)
            self._ids = check_ids(rref_id, fork_id)
        if not (frame.flags or buffers) and allowed is None:
            return loads_call(payload, self._incoming.peer.id)
        if buffers and self._incoming.sharing is not None:
            buffers = self._incoming.sharing.take(buffers)
        content = loads(
            payload,
            buffers,
            sender=self._incoming.peer.id,
            allowed=allowed,
            forks=forks,
        )
        if frame.flags & FLAG_TRACKED:
            context_id, content = content
            self.context = self._worker.contexts.arriving(context_id, self._incoming.peer.id)
        traced = frame.flags & FLAG_TRACED
        if traced:
            headers, content = content
        if frame.flags & FLAG_PACKED:
            content = unpacked(content, buffers, self._incoming.peer.id)
        elif frame.flags & FLAG_FOREIGN:
            if allowed is not None:
                raise NotAllowed(
                    "the call was pickled by a pickler of the caller's own, which cannot be checked against this worker's"
                    " allowed_modules and allowed_calls"
                )
            content = read_foreign(content)
        if allowed is not None and frame.kind <= STREAM and frame.kind not in _FETCHES:
            content = allowed.call(content)
        if traced:
            caller, is_stream = self._incoming.peer.name, frame.kind == STREAM
            return traced_calls.below(headers, content, caller, is_stream=is_stream)
        return content

    def _execute(self, *, later: bool) -> None:
        """Call the function and answer."""
        call = self._call
        assert call is not None
        # The only references to the arguments, so that they are released as early as possible.
        (func, args, kwargs), self._content = self._content, None
        if self._frame.kind == STREAM:
            self._worker.stream(self, func, args, kwargs)
            return
        token = SERVING.set(call)
        # The thread may already be serving another call, whose code is waiting.
        entered = None if CURRENT.get() is self.context else CURRENT.set(self.context)
        grad = _is_grad_enabled()
        self._began = began = time.monotonic()
        try:
            wrapped = getattr(func, "_wrapped_async_rpc_function", None)
            result = func(*args, **kwargs) if kwargs else func(*args)
            took = time.monotonic() - began
            if took > TICK or self._worker.long_ones:
                self._worker.note_length(func, took)
            if wrapped is not None:
                self.answer_with(result)
                return
            if type(result) is AnswerLater:
                self.answer_with(result.future)
                return
            if inspect.iscoroutine(result):
                self._worker.run_coroutine(self, result)
                return
            if type(result) is torch.Tensor:
                del args, kwargs
                self._home = memory_of_one(result)
            elif result is not None and is_array(result):
                del args, kwargs
                self._home = memory_of_array(result)
                self._is_array = True
        except BaseException as error:  # noqa: BLE001  # sent to the caller
            self.fail(error)
            return
        finally:
            SERVING.reset(token)
            if entered is not None:
                CURRENT.reset(entered)
            if _is_grad_enabled() is not grad:  # torch.set_grad_enabled(False) holds for the thread
                torch.set_grad_enabled(grad)
        # Only the leader flushes answers that are held back.
        self.answer(result, later=later and self._worker.leads())

    def answer_with(self, future: Any) -> None:
        """Answer when the future that an ``@async_execution`` function returned is done."""
        if not isinstance(future, NativeFuture):
            self.fail(wrong_return_type(future))
            return

        def done(finished: Future[Any]) -> None:
            try:
                result = finished.value()
            except BaseException as error:  # noqa: BLE001  # sent to the caller
                self.fail(error, printed=False)
                # The future keeps the error, which would keep this frame alive, and so the future.
                raised.forget_frames(error)
            else:
                self.answer(result)

        if self._made is None:
            self.on_cancel(self.give_up)
        # Not RpcFuture's method, which would give the callback a thread of its own.
        NativeFuture.add_done_callback(future, done)

    # -- answers ----------------------------------------------------------------------------------

    @property
    def call(self) -> CurrentCall:
        assert self._call is not None
        return self._call

    @property
    def frame(self) -> Frame:
        return self._frame

    @property
    def incoming(self) -> Incoming:
        return self._incoming

    def on_cancel(self, act: Callable[[], None]) -> None:
        """Have ``act`` called when the caller cancels the request; at once if it already has."""
        self._on_cancel = act
        if self._call is not None and self._call.cancelled:
            act()

    def give_up(self) -> None:
        """Tell the caller that no answer will follow, so that a shutdown need not wait for one."""
        if self._incoming.claim(self._frame.call):
            self.call.is_over = True
            self._say_given_up()

    def _say_given_up(self) -> None:
        self._incoming.reply(GIVEN_UP, self._frame.call)
        self._incoming.answered(self._frame.call)

    def _forget(self) -> None:
        """Drop a cancelled request, and release what it carries."""
        frame = self._frame
        is_ours = self._incoming.claim(frame.call)
        try:
            if frame.flags & FLAG_REFS:
                self._read(frame, [])
            elif frame.buffers and self._incoming.sharing is not None:
                self._incoming.sharing.discard(frame.buffers)
        except Exception as error:  # noqa: BLE001  # the peer may have sent anything
            logger.info("a cancelled request could not be read: %s", error)
        if is_ours:
            self._say_given_up()

    def answer(self, result: Any, *, later: bool = False) -> None:
        """Send the function's result."""
        made = self._made
        if made is not None:
            self._made = None
            if not made.done():
                made.set_result(result)
            result = None
        number = self._frame.call
        if not self._incoming.claim(number):
            return
        call = self._call
        assert call is not None
        call.is_over = True
        try:
            recording = self._recorder()
            packed = None if result is None else packed_result(result, recording)
            if result is None:
                self._incoming.reply(NOTHING, number, later=later)
            elif packed is not None:
                payload, large = packed
                if large is None:
                    self._incoming.reply(REPLY, number, payload, later=later, flags=FLAG_PACKED)
                else:
                    self._reply(REPLY, payload, large, later=later, flags=FLAG_PACKED)
            else:
                payload, tensors = self._worker.dumps(result, self._incoming.peer, recording)
                self._reply(REPLY, payload, tensors, later=later)
        except BaseException as error:  # noqa: BLE001  # a result that cannot be pickled
            raised.add_note(error, "The function returned, but its result could not be sent.")
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                raised.add_note(error, "It returned a generator: rpc.rpc_stream() gives its items.")
            self._incoming.active[number] = self
            self.fail(error)
            return
        self._incoming.answered(number)
        self._worker.served(self._arrived, failed=False, is_user=self._is_user)

    def _recorder(self) -> Recorder | None:
        if self.context is None:
            return None
        # The graph may use the result's memory.
        self._home = 0
        return recorder(self.context, self._incoming.peer.id)

    def fail(self, error: BaseException, *, printed: bool = True) -> None:
        """Send the function's error; for a remote call, keep it as the value."""
        made = self._made
        if made is not None:
            self._made = None
            forget_our_frames(error)
            if printed:
                self._print(error)
            if not made.done():
                made.set_exception(as_value(translated(error), self._worker.me.name))
            self.answer(None)
            return
        if not self._incoming.claim(self._frame.call):
            return
        self.call.is_over = True
        forget_our_frames(error)
        if printed and not isinstance(error, (CallCancelled, asyncio.CancelledError)):
            self._print(error)
        payload = dumps_whole(describe(translated(error)))
        self._incoming.reply(FAILURE, self._frame.call, payload)
        self._incoming.answered(self._frame.call)
        self._worker.served(self._arrived, failed=True, is_user=self._is_user)

    def _print(self, error: BaseException) -> None:
        # As torch does: the error should also show in the output of the process in which it occurred.
        text = f"On {self._worker.me}:\n{traceback_text(error)}"
        try:
            print(text, file=sys.stderr)  # noqa: T201
        except Exception:  # noqa: BLE001  # a stream of the program's may raise anything
            # Or stderr is closed. The caller still gets the error.
            logger.info("%s", text)

    def item(self, value: Any) -> None:
        """Send one item of a stream."""
        payload, tensors = self._worker.dumps(value, self._incoming.peer, self._recorder())
        self._reply(ITEM, payload, tensors)

    def _reply(
        self,
        kind: int,
        payload: bytes,
        tensors: TensorWriter,
        *,
        later: bool = False,
        flags: int = 0,
    ) -> None:
        incoming, forks = self._incoming, tensors.forks
        if forks:
            incoming.sent_references.add(forks, self._worker.rrefs.unsettled)
        sent = incoming.reply(
            kind,
            self._frame.call,
            payload,
            tensors.buffers,
            held=tensors.held,
            later=later,
            home=self._home,
            is_alone=self._is_array,
            flags=flags | FLAG_REFS if forks or tensors.parcels else flags,
        )
        if not sent:
            unsent(tensors)

    def end_stream(self) -> None:
        if self._incoming.claim(self._frame.call):
            self.call.is_over = True
            self._incoming.reply(END, self._frame.call)
            self._incoming.answered(self._frame.call)
            self._worker.served(self._arrived, failed=False, is_user=self._is_user)

    # -- on behalf of the caller ------------------------------------------------------------------

    def cancel(self) -> None:
        call = self._call
        if call is None:
            call = self._call = CurrentCall(self._incoming.peer, None)
        call.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel()

    def credit(self, amount: int) -> None:
        if self._flow is not None:
            self._flow.credit(amount)

    def abandon(self) -> None:
        """In a forked child: the parent answers."""
        self._made = None
        if self._flow is not None:
            self._flow.abandon()

    def flow(self, source: Any) -> None:
        """Set the receiver of credit for this stream."""
        self._flow = source

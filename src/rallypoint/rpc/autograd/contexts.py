"""The contexts that a worker knows: its own, and those of others in which it was called."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from rallypoint.errors import RpcError
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.current_call import SERVING
from rallypoint.rpc.current_context import CURRENT
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.ports import Tasks
from rallypoint.rpc.torch_private import NativeFuture

from .context import Context, context_id_of, first_count, owner_of, unknown


# How many ended contexts of others are remembered, so that a late message does not bring one back.
_MOST_ENDED = 8192
# Seconds for which ended contexts are gathered, so that not each of them takes a message and wakes a thread.
_GATHER_SECONDS = 0.01
# Seconds before a message is repeated; each later pause is twice as long.
_RETRY_SECONDS = 0.05
_MOST_RETRIES = 10
_PATIENCE = 60.0


class AsyncCalls(Protocol):
    def call_async(
        self, to: Any, kind: int, what: Any, content: tuple[Any, ...], timeout: float
    ) -> RpcFuture[Any]: ...


class Gone(Protocol):
    def is_gone(self, worker: int) -> bool: ...


class Contexts:
    """The contexts of one worker. Thread-safe.

    Each context has an owner, the worker that began it. The owner knows all workers that a message of the context has
    reached: it sent them one, or they tell it (``enrol``). When the context ends, the owner tells them (``release``).
    When the owner is lost, they find out on their own.

    Args:
        me: this worker's id.
        term: its term in the group; earlier workers with the same id had lower ones.
        enrol, release: the served functions, which take a context's id and several ids.
    """

    def __init__(
        self,
        me: int,
        *,
        term: int,
        calls: AsyncCalls,
        peers: Gone,
        tasks: Tasks,
        enrol: Callable[[int], bool],
        release: Callable[[list[int]], None],
    ) -> None:
        self._me = me
        self._calls = calls
        self._peers = peers
        self._tasks = tasks
        self._enrol = enrol
        self._release = release
        self._lock = threading.Lock()
        self._live: dict[int, Context] = {}
        self._ended: dict[int, None] = {}
        # By worker to be told, contexts of this worker that have ended.
        self._to_tell: dict[int, list[int]] = {}
        self._count = itertools.count(first_count(term)).__next__
        self._is_closed = False

    # -- finding --------------------------------------------------------------------------------------

    def begin(self) -> Context:
        """A new context of this worker."""
        made = Context(context_id_of(self._me, self._count()))
        with self._lock:
            self._live[made.id] = made
        return made

    def get(self, context_id: int) -> Context:
        """Raises ``RpcError`` if this worker knows no such context, or it has ended."""
        found = self._live.get(context_id)
        if found is None:
            raise unknown(context_id)
        return found

    def arriving(self, context_id: int, sender: int) -> Context | None:
        """The context of a message that has arrived; None if it is over."""
        owner = owner_of(context_id)
        with self._lock:
            found = self._live.get(context_id)
            if found is not None or owner == self._me:
                return found
            if self._is_closed or context_id in self._ended or self._peers.is_gone(owner):
                return None
            made = self._live[context_id] = Context(context_id)
        if sender != owner:
            self._tasks.soon(
                lambda: self._tell(
                    owner, self._enrol, context_id, lambda lives: self._enrolled(context_id, lives)
                )
            )
        return made

    def enrol(self, context_id: int, worker: int) -> bool:
        """A worker has received a message of one of this worker's contexts; False if the context is over."""
        found = self._live.get(context_id)
        return found is not None and found.sends_to(worker)

    def counts(self) -> tuple[int, int]:
        """The numbers of contexts, and of backward passes in progress."""
        with self._lock:
            live = list(self._live.values())
        return len(live), sum(each.num_active_passes() for each in live)

    # -- ending ---------------------------------------------------------------------------------------

    def end(self, context: Context) -> None:
        """End a context of this worker, here and everywhere. Does not block."""
        with self._lock:
            self._live.pop(context.id, None)
        peers = [each for each in context.end() if each != self._me]
        if not peers:
            return
        with self._lock:
            is_first = not self._to_tell
            for worker in peers:
                self._to_tell.setdefault(worker, []).append(context.id)
        if is_first:
            self._tasks.later(_GATHER_SECONDS, self.tell_ended)

    def tell_ended(self) -> None:
        """Tell other workers which contexts have ended, without waiting for more to end."""
        with self._lock:
            to_tell, self._to_tell = self._to_tell, {}
        for worker, ended in to_tell.items():
            if not self._peers.is_gone(worker):
                self._tell(worker, self._release, ended, lambda _: None)

    def forget(self, context_id: int) -> None:
        """Another worker's context is over."""
        with self._lock:
            found = self._live.pop(context_id, None)
            self._ended[context_id] = None
            while len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        if found is not None:
            found.end()

    def peer_lost(self, worker: int) -> None:
        """A worker is gone, and with it its contexts."""
        with self._lock:
            lost = [each for each in self._live if owner_of(each) == worker]
        for each in lost:
            self.forget(each)

    def close(self) -> None:
        """This worker leaves."""
        with self._lock:
            self._is_closed = True
            live, self._live = list(self._live.values()), {}
        for each in live:
            each.end()

    # -- telling others -------------------------------------------------------------------------------

    def _enrolled(self, context_id: int, lives: bool) -> None:
        if not lives:
            self.forget(context_id)

    def _tell(
        self,
        worker: int,
        what: Callable[[Any], Any],
        content: Any,
        answered: Callable[[Any], None],
        attempt: int = 0,
    ) -> None:
        """Send until it is acknowledged, or the worker is gone."""

        def finish(done: Any) -> None:
            try:
                answer = done.value()
            except RpcError:
                again()
            except Exception:  # noqa: BLE001  # the worker has refused it: nothing to repeat
                return
            else:
                answered(answer)

        def again() -> None:
            if attempt < _MOST_RETRIES and not self._is_closed and not self._peers.is_gone(worker):
                self._tasks.later(
                    _RETRY_SECONDS * 2**attempt,
                    lambda: self._tell(worker, what, content, answered, attempt + 1),
                )

        # Not with the deadline or in the context of a call that this thread may be serving.
        serving, current = SERVING.set(None), CURRENT.set(None)
        try:
            future = self._calls.call_async(
                worker, Kind.CALL, what, (what, (content,), None), _PATIENCE
            )
            future.is_watched = True
            NativeFuture.add_done_callback(future, finish)
        except RpcError:
            again()
        finally:
            CURRENT.reset(current)
            SERVING.reset(serving)

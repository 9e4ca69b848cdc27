"""Any ``torch.distributed.Store`` as one of ours: the store that a plug-in's round comes with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError


# No key ever holds this.
_NEVER = b"\x00rally: never\x00"
# A store without a second connection is asked for a key this often (seconds): a blocked wait would hold up others.
_PAUSE = 0.05
# Others wait in turns of so many seconds, to notice that they are closed.
_TURN = 0.5


class C10dClient:
    """Implements :class:`~rallypoint.rendezvous.store.Store` over c10d's interface.

    Args:
        store: c10d's, or what behaves like one.
    """

    def __init__(self, store: Any, shared: threading.Lock | None = None) -> None:
        self._store = store
        # With a lock, this is one of several users of one connection.
        self._shared = shared
        self._closed = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str, timeout: float) -> bytes:
        deadline = Deadline(timeout)
        # Not the store's own get: it would wait for a key that is deleted meanwhile.
        while not self.exists(key) or (value := self.peek(key)) is None:
            left = deadline.remaining() or 0.0
            if left <= 0:
                raise TimeoutError(f"{key} did not appear within {timeout:.1f} s")
            if self._shared is not None:
                self._closed.wait(min(_PAUSE, left))
                continue
            # Nothing wakes a thread that waits in there, and none may still do so when the process ends.
            turn = timedelta(seconds=min(_TURN, max(left, 0.001)))
            try:
                self._store.wait([key], turn)
            except Exception as error:  # noqa: BLE001  # a plug-in's store may raise anything
                if not _is_timeout(error):
                    raise self._gone(str(error)) from None
        return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.peek(key) for key in keys]

    def peek(self, key: str) -> bytes | None:
        # A compare-and-set whose condition cannot hold answers with what is there; where there is no key,
        # with the condition, or with nothing.
        value = bytes(self._call(lambda: self._store.compare_set(key, _NEVER, _NEVER)))
        if value == _NEVER or (not value and not self.exists(key)):
            return None
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda: self._store.add(key, amount)))

    def put_new(self, key: str, value: bytes) -> bytes:
        return bytes(self._call(lambda: self._store.compare_set(key, "", value)))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._call(lambda: self._store.compare_set(key, expected, desired)))

    def exists(self, key: str) -> bool:
        return bool(self._call(lambda: self._store.check([key])))

    def delete(self, key: str) -> bool:
        return bool(self._call(lambda: self._store.delete_key(key)))

    def clone(self) -> C10dClient:
        if self._shared is None:
            try:
                return C10dClient(self._store.clone())
            except (AttributeError, NotImplementedError, RuntimeError):
                self._shared = threading.Lock()  # it has one connection for all
        return C10dClient(self._store, self._shared)

    def close(self) -> None:
        self._closed.set()
        self._store = None  # the connection is the plug-in's, or ends with the last reference to it

    def _call(self, ask: Any) -> Any:
        if self._closed.is_set():
            raise self._gone("it is closed")
        try:
            if self._shared is None:
                return ask()
            with self._shared:
                return ask()
        except Exception as error:  # noqa: BLE001  # the same
            raise self._gone(str(error)) from None

    def _gone(self, why: str) -> RendezvousConnectionError:
        first = (why.splitlines() or ["no answer"])[0]
        return RendezvousConnectionError(f"the store of the rendezvous backend: {first[:200]}")


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or "timeout" in str(error).lower()

"""Any ``torch.distributed.Store`` as one of ours: the store that a plug-in's round comes with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError


# A value that no key ever holds.
_NEVER = b"\x00rally: never\x00"
# How often a store without a second connection is polled for a key (seconds): a blocking wait would hold up other users.
_PAUSE = 0.05
# Other stores wait in turns of this many seconds, to notice that they are closed.
_TURN = 0.5


class C10dClient:
    """Implements :class:`~rallypoint.rendezvous.store.Store` over c10d's interface.

    Args:
        store: a c10d store, or an object that behaves like one.
        shared: a lock, if this is one of several users of one connection.
    """

    def __init__(self, store: Any, shared: threading.Lock | None = None) -> None:
        self._store = store
        self._shared = shared
        self._closed = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str, timeout: float) -> bytes:
        deadline = Deadline(timeout)
        # The store's own get will not do: it would wait for a key that is deleted meanwhile.
        while not self.exists(key) or (value := self.peek(key)) is None:
            left = deadline.remaining() or 0.0
            if left <= 0:
                raise TimeoutError(f"{key} did not appear within {timeout:.1f} s")
            if self._shared is not None:
                self._closed.wait(min(_PAUSE, left))
                continue
            # Nothing can wake a thread that waits in the store, and no thread may still wait there when the process exits.
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
        # A compare-and-set whose condition cannot hold returns the current value or, if there is no key,
        # the condition or an empty value.
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
                self._shared = threading.Lock()  # the store has one connection for all users
        return C10dClient(self._store, self._shared)

    def close(self) -> None:
        self._closed.set()
        self._store = None  # the plug-in owns the connection, or it closes with its last reference

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

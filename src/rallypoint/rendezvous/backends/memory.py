"""A store in this process's memory: the reference implementation, for tests."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from rallypoint._core import forks
from rallypoint.rendezvous.backend import Backend, Meeting, Scheme
from rallypoint.rendezvous.fixed_home import FixedHome
from rallypoint.rendezvous.home import Home


class MemoryStore:
    """Implements :class:`rallypoint.rendezvous.store.Store`; thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(f"no key {key!r} within {timeout:g} s")
            return self._values[key]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._changed:
            return [self._values.get(key) for key in keys]

    def peek(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def put_new(self, key: str, value: bytes) -> bytes:
        with self._changed:
            held = self._values.setdefault(key, value)
            self._changed.notify_all()
            return held

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            held = self._values.get(key)
            if (held or b"") != expected:
                return expected if held is None else held
            self._values[key] = desired
            self._changed.notify_all()
            return desired

    def exists(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def clone(self) -> MemoryStore:
        return self

    def close(self) -> None:
        pass


# All handlers of this process share the store of a name, for as long as one of them lives.
_stores: weakref.WeakValueDictionary[str, MemoryStore] = weakref.WeakValueDictionary()
_lock = forks.Lock()


def _home(meeting: Meeting) -> Home:
    with _lock:
        store = _stores.setdefault(meeting.endpoint.path, MemoryStore())
    return FixedHome(lambda: store)


MEMORY = Backend(
    name="memory",
    help="threads of one process, for tests",
    schemes=(Scheme(name="memory", example="memory://name", takes="name"),),
    home=_home,
    one_process=True,
)

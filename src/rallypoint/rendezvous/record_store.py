"""Records over a store that other programs may write to.

Bytes that are not a record of this job (:mod:`.records`) count as absent and are logged once. A write-once key
(a plan, a call) may already hold such bytes. Then the record goes under the next name of that key, ``plan~1``, and
readers look there: all readers skip the same bytes, so all agree which record counts. A waiting reader blocks until the
next name appears. When every name holds foreign bytes, those under the last name are replaced, by compare-and-set if
writers must agree on one record. So no number of overwritten records uses up the names, but readers of such a key have to
poll, because a store announces only new keys.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError, RendezvousStateError

from .records import BadRecord, Codec
from .store import ComparingStore, FilledStore, PairingStore, Store, StoreSilent


_log = logging.getLogger(__name__)

# How many names a key has. Waiting costs nothing as long as one of them is free.
MAX_SKIPPED = 8
# How often another writer may be faster before replacing the value under the last name is given up.
MAX_REPLACED = 64
# Seconds between two looks at a key all of whose names hold junk: no store announces a replaced value. This takes
# a stranger who overwrites one key eight times; it costs five reads a second until the caller's timeout.
FIRST_LOOK, LONGEST_LOOK = 0.01, 0.2
# A counter above this cannot have been counted by nodes.
MAX_COUNT = 1_000_000


_operations = 0


def operations() -> int:
    """How many operations this process has requested from stores. It may miss some."""
    return _operations


class RecordStore:
    """One connection's view of one job's records. Calls block as the store's do.

    Args:
        store: the connection, which is closed with this object.
        codec: the job's codec.
    """

    def __init__(self, store: Store, codec: Codec) -> None:
        self._store = store
        self._codec = codec
        self._is_filled, self._is_pairing = _abilities(type(store))
        self._mentioned: set[str] = set()
        self.operations = 0

    def _count(self) -> None:
        global _operations  # noqa: PLW0603  of this process
        _operations += 1
        self.operations += 1

    @property
    def store(self) -> Store:
        return self._store

    def clone(self) -> RecordStore:
        """The same records over a connection of its own."""
        return RecordStore(self._store.clone(), self._codec)

    def close(self) -> None:
        self._store.close()

    def full(self, key: str) -> str:
        """The name of a key in the store."""
        return self._codec.prefix + key

    def claim(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Put a record if there is none; returns the body now in place."""
        for name in _names(key):
            full = self.full(name)
            self._count()
            held = self._unpack(full, self._store.put_new(full, self._codec.pack(full, body)))
            if held is not None:
                return held
        return self._claim_last(key, body)

    def _claim_last(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace foreign data under the last name with a record; returns the body now in place."""
        full = self.full(_last_name(key))
        wanted, expected = self._codec.pack(full, body), b""
        if isinstance(self._store, ComparingStore):
            for _ in range(MAX_REPLACED):
                self._count()
                raw = self._store.compare_set(full, expected, wanted)
                held = self._unpack(full, raw)
                if held is not None:
                    return held
                # If the key has vanished, c10d returns what was expected.
                expected = b"" if raw == expected else raw
        raise self._unusable(key)

    def write(self, key: str, body: Mapping[str, Any]) -> None:
        full = self.full(key)
        self._count()
        self._store.set(full, self._codec.pack(full, body))

    def improve(
        self, key: str, better: Callable[[dict[str, Any] | None], Mapping[str, Any] | None]
    ) -> None:
        """Replace a record with a better one, even if other nodes do the same at this moment.

        Args:
            better: receives the current body, or None; returns the new one, or None to leave it.

        Raises:
            RendezvousStateError: other writers were faster every time.
        """
        store, full = self._store, self.full(key)
        assert isinstance(store, ComparingStore)
        self._count()
        (raw,) = store.get_many([full])
        for _ in range(MAX_REPLACED):
            body = better(None if raw is None else self._unpack(full, raw))
            if body is None:
                return
            wanted = self._codec.pack(full, body)
            self._count()
            held = store.compare_set(full, raw or b"", wanted)
            if held == wanted:
                return
            # If the key has vanished, c10d returns what was expected.
            raw = None if held == raw else held
        raise self._unusable(key)

    def wait(self, key: str, timeout: float) -> dict[str, Any] | None:
        """The body under ``key``, waiting up to ``timeout`` seconds for it; None if it does not appear."""
        deadline = Deadline(timeout)
        for name in _names(key):
            full = self.full(name)
            self._count()
            try:
                body = self._unpack(full, self._store.get(full, deadline.remaining() or 0.0))
            except TimeoutError:
                return None
            if body is not None:
                return body
        pause = FIRST_LOOK
        while left := deadline.remaining():
            threading.Event().wait(min(pause, left))
            pause = min(2 * pause, LONGEST_LOOK)
            (body,) = self.look([key])
            if body is not None:
                return body
        return None

    def look(self, keys: Sequence[str]) -> list[dict[str, Any] | None]:
        """The bodies as they are now; None where there is none."""
        names = [self.full(key) for key in keys]
        self._count()
        return self._bodies(keys, names, self._read(names))

    def _bodies(
        self, keys: Sequence[str], names: Sequence[str], values: Sequence[bytes | None]
    ) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = []
        for key, name, data in zip(keys, names, values, strict=True):
            body = None if data is None else self._unpack(name, data)
            if data is not None and body is None:
                body = self._look_further(key)
            found.append(body)
        return found

    def _read(self, names: Sequence[str]) -> list[bytes | None]:
        # A record is never empty, and an empty value does not stop one from being put.
        store: Any = self._store
        found: list[bytes | None] = (store.get_filled if self._is_filled else store.get_many)(names)
        return found

    def peek(self, key: str) -> dict[str, Any] | None:
        """As :meth:`look` for one key that no node waits for, in one round trip."""
        full = self.full(key)
        self._count()
        data = self._store.peek(full)
        body = None if data is None else self._unpack(full, data)
        return self._look_further(key) if data is not None and body is None else body

    def _look_further(self, key: str) -> dict[str, Any] | None:
        names = [self.full(name) for name in _names(key) if name != key]
        self._count()
        for full, data in zip(names, self._read(names), strict=True):
            if data is None:
                return None
            body = self._unpack(full, data)
            if body is not None:
                return body
        return None

    def increment(self, key: str, most: int = MAX_COUNT) -> int:
        """Add 1 to a counter; returns the sum. A counter that was overwritten may restart at 0.

        Args:
            key: the counter's key.
            most: a value above this cannot have been counted by nodes.
        """
        for name in _names(key):
            if (count := self._add(self.full(name), most)) is not None:
                return count
        last = self.full(_last_name(key))
        for _ in range(MAX_REPLACED):
            # If two nodes do this at once, one loses its count. That is fine: no decision rests on a counter alone.
            self._count()
            self._store.delete(last)
            if (count := self._add(last, most)) is not None:
                return count
        raise self._unusable(key)

    def increment_and_look(
        self, counter: str, keys: Sequence[str]
    ) -> tuple[int, list[dict[str, Any] | None]]:
        """:meth:`increment` and then :meth:`look`; in one round trip, if the store can do that."""
        full = self.full(counter)
        if self._is_pairing and keys:
            names = [self.full(key) for key in keys]
            store: Any = self._store
            self._count()
            try:
                count, values = store.add_and_get(full, 1, names)
            except StoreSilent:
                raise
            except (RendezvousConnectionError, ValueError):
                if self._holds_count(full):
                    raise
            else:
                if 0 < count <= MAX_COUNT:
                    return count, self._bodies(keys, names, values)
        return self.increment(counter), self.look(keys)

    def _add(self, full: str, most: int) -> int | None:
        """Add 1; None if the key does not hold a count."""
        self._count()
        try:
            count = self._store.add(full, 1)
        except StoreSilent:
            raise
        except (RendezvousConnectionError, ValueError):
            if self._holds_count(full):
                raise
            return None
        if 0 < count <= most:
            return count
        self._mention(full, f"{count} is not a number that nodes have counted")
        return None

    def _holds_count(self, full: str) -> bool:
        """Whether a counter that could not be added to holds a number, or nothing. If not, continues on a new connection.

        c10d's server hangs up on a client that adds to a key without a number.
        """
        again = self._store.clone()
        (data,) = again.get_many([full])
        if data is None or _number(data) is not None:
            again.close()
            return True
        self._store.close()
        self._store = again
        self._mention(full, "not a number")
        return False

    def count(self, key: str, most: int = MAX_COUNT) -> int:
        """A counter's value; 0 if it does not exist, or if all its names hold something else. See :meth:`increment`."""
        for name in _names(key):
            full = self.full(name)
            self._count()
            data = self._store.peek(full)
            number = 0 if data is None else _number(data)
            if number is not None and 0 <= number <= most:
                return number
            self._mention(full, "not a number that nodes have counted")
        return 0

    def delete(self, key: str) -> None:
        self._count()
        self._store.delete(self.full(key))

    def _unpack(self, full: str, data: bytes) -> dict[str, Any] | None:
        try:
            return self._codec.unpack(full, data)
        except BadRecord as error:
            self._mention(full, str(error))
            return None

    def _mention(self, full: str, why: str) -> None:
        if full not in self._mentioned:
            self._mentioned.add(full)
            _log.warning("ignored the value of %s in the job's store: %s", full, why)

    def _unusable(self, key: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"the job's store contains only foreign data under {self.full(key)}: another program"
            " keeps writing to it; give the job another --rdzv-id or a secret (--secret-file)"
        )


def _names(key: str) -> Iterator[str]:
    """A key's names. Nearly always, the first is all that is needed."""
    yield key
    for index in range(1, MAX_SKIPPED):
        yield f"{key}~{index}"


def _last_name(key: str) -> str:
    return f"{key}~{MAX_SKIPPED - 1}"


@cache
def _abilities(kind: type) -> tuple[bool, bool]:
    """Whether stores of this class are filled and pairing ones: asked once, because protocols answer slowly."""
    return issubclass(kind, FilledStore), issubclass(kind, PairingStore)


def _number(data: bytes) -> int | None:
    try:
        return int(data) if len(data) < 20 else None
    except ValueError:
        return None

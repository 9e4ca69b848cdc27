"""The small store that a rendezvous needs: what every backend implements, and nothing more.

Keys are text of at most :data:`MAX_KEY` characters (``/`` separates levels), values are bytes of at
most :data:`MAX_VALUE`. Every method blocks for the network or the disk and raises
``RendezvousConnectionError`` when the store is gone; a store that is merely slow is waited for.
One object is one connection: threads that may block have a :meth:`Store.clone` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rallypoint.errors import RendezvousConnectionError


class StoreSilent(RendezvousConnectionError):
    """No answer came for as long as a store may take, or we hung up ourselves: it need not be asked again."""


MAX_KEY = 512
MAX_VALUE = 1024 * 1024


class Store(Protocol):
    """Shared keys. Every operation takes effect at once and for all (linearizable)."""

    def set(self, key: str, value: bytes) -> None:
        """Have ``key`` hold ``value``, whatever it held; whoever waits for it is told."""

    def get(self, key: str, timeout: float) -> bytes:
        """The value; waits for the key. Raises ``TimeoutError`` if it does not come in ``timeout`` seconds."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """What the keys hold now, None for those that do not exist. Does not wait.

        A constant number of round trips for each few hundred keys.
        """

    def peek(self, key: str) -> bytes | None:
        """What one key holds now, in one round trip.

        For keys that nobody waits for: those who do may be kept busy by it.
        """

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key`` (0 if new) and return the sum.

        N callers at once cost O(1) round trips each: no compare-and-set race.
        """

    def put_new(self, key: str, value: bytes) -> bytes:
        """Set ``key`` to ``value`` if it does not exist; return what it holds now, ours or another's."""

    def exists(self, key: str) -> bool:
        """Whether ``key`` has been set."""

    def delete(self, key: str) -> bool:
        """Remove a key or counter; False if there was none."""

    def clone(self) -> Store:
        """The same store over a connection of its own: a blocked call does not hold up others."""

    def close(self) -> None:
        """Give the connection back. A second call does nothing; other clones stay usable."""


@runtime_checkable
class ComparingStore(Store, Protocol):
    """A store that can also replace a value on condition."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if it holds ``expected``, and return what it holds now.

        Empty ``expected`` stands for a key that does not exist, too. Where there is no key, and one
        was expected, nothing is set and ``expected`` is returned: c10d's rules.
        """


@runtime_checkable
class CountingStore(Store, Protocol):
    """A store that can tell how many keys it has."""

    def num_keys(self) -> int:
        """Keys and counters of this job."""

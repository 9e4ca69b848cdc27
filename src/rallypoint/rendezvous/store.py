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
    """The store did not answer in time, or this end closed the connection: asking again is pointless."""


MAX_KEY = 512
MAX_VALUE = 1024 * 1024


class Store(Protocol):
    """Shared keys. Every operation takes effect at once and for all clients (linearizable)."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key, whatever it holds, and wake those that wait for it.

        Args:
            key: the key.
            value: its new value.
        """

    def get(self, key: str, timeout: float) -> bytes:
        """The value of a key. Blocks until the key exists.

        Args:
            key: the key.
            timeout: the most seconds to wait.
        Returns:
            Its value.
        Raises:
            TimeoutError: the key did not appear in time.
        """

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The present values of several keys, in a constant number of round trips for a few hundred of them.

        Args:
            keys: the keys.
        Returns:
            A value for each, None for those that do not exist.
        """

    def peek(self, key: str) -> bytes | None:
        """The present value of one key, in one round trip.

        Args:
            key: a key that nobody waits for: looking at it may wake those that do.
        Returns:
            Its value, or None if it does not exist.
        """

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. N callers at once cost O(1) round trips each: there is no race of compare-and-set.

        Args:
            key: the counter, 0 if it does not exist. Its value is the sum, as decimal text.
            amount: what to add.
        Returns:
            The sum.
        """

    def put_new(self, key: str, value: bytes) -> bytes:
        """Set a key if it does not exist.

        Args:
            key: the key.
            value: its value.
        Returns:
            What the key holds now: ``value``, or what another client has set.
        """

    def exists(self, key: str) -> bool:
        """Whether a key exists.

        Args:
            key: the key.
        Returns:
            True if it does.
        """

    def delete(self, key: str) -> bool:
        """Remove a key or counter.

        Args:
            key: the key.
        Returns:
            Whether it existed.
        """

    def clone(self) -> Store:
        """Another connection to the same store: a call that blocks on one does not delay the other.

        Returns:
            The connection; it is closed on its own.
        """

    def close(self) -> None:
        """Close this connection, but no clones; a second call does nothing.

        A call that blocks in another thread ends with ``RendezvousConnectionError``.
        """


@runtime_checkable
class ComparingStore(Store, Protocol):
    """A store that can also replace a value on condition."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if it holds ``expected``, and return what it holds now.

        Empty ``expected`` also stands for a key that does not exist. If there is no key, and one
        was expected, nothing is set and ``expected`` is returned: c10d's rules.
        """


@runtime_checkable
class FilledStore(Store, Protocol):
    """A store that reads several keys faster if nobody asks whether those that hold nothing exist."""

    def get_filled(self, keys: Sequence[str]) -> list[bytes | None]:
        """As :meth:`Store.get_many`, in one round trip for some hundreds; None also for keys that hold nothing."""


@runtime_checkable
class CountingStore(Store, Protocol):
    """A store that can tell how many keys it has."""

    def num_keys(self) -> int:
        """The number of keys and counters of this job."""

"""The small store that a rendezvous needs: what every backend implements, and nothing more.

Keys are text of at most :data:`MAX_KEY` characters (``/`` separates levels), values are bytes of at
most :data:`MAX_VALUE`. Every method blocks for the network or the disk and raises
``RendezvousConnectionError`` when the store is gone; calls wait for a store that is merely slow.
One object is one connection, so each thread that may block needs its own :meth:`Store.clone`.
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
    """Shared keys. Every operation takes effect at once, for all clients (linearizable)."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key, whatever it holds, and wake the clients that wait for it.

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
        """The current values of several keys. A few hundred keys cost a constant number of round trips.

        Args:
            keys: the keys.
        Returns:
            A value for each, None for those that do not exist.
        """

    def peek(self, key: str) -> bytes | None:
        """The current value of one key, in one round trip.

        Args:
            key: a key that nobody waits for; reading it may wake clients that do.
        Returns:
            Its value, or None if it does not exist.
        """

    def add(self, key: str, amount: int) -> int:
        """Add to a counter. N concurrent callers cost O(1) round trips each, because there is no compare-and-set loop.

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
            What the key holds now: ``value``, or what another client set before.
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
        """Another connection to the same store. A call that blocks on one does not delay the other.

        Returns:
            The connection; closing either does not close the other.
        """

    def close(self) -> None:
        """Close this connection, but not its clones; a second call does nothing.

        A call that blocks in another thread ends with ``RendezvousConnectionError``.
        """


@runtime_checkable
class ComparingStore(Store, Protocol):
    """A store that can also compare and set."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if it holds ``expected``, and return what it holds now.

        An empty ``expected`` also matches a key that does not exist. If the key does not exist and
        ``expected`` is not empty, nothing is set and ``expected`` is returned. These are c10d's rules.
        """


@runtime_checkable
class FilledStore(Store, Protocol):
    """A store that reads several keys faster if it need not tell an empty value from a missing key."""

    def get_filled(self, keys: Sequence[str]) -> list[bytes | None]:
        """As :meth:`Store.get_many`, but a few hundred keys take one round trip, and empty values are None as well."""


@runtime_checkable
class PairingStore(FilledStore, Protocol):
    """A store that can add to a counter and read keys in one round trip."""

    def add_and_get(
        self, key: str, amount: int, keys: Sequence[str]
    ) -> tuple[int, list[bytes | None]]:
        """As :meth:`Store.add`, and then :meth:`FilledStore.get_filled` for a few hundred keys."""


@runtime_checkable
class CountingStore(Store, Protocol):
    """A store that can tell how many keys it has."""

    def num_keys(self) -> int:
        """The number of keys and counters of this job."""

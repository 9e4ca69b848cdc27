"""The workers' store as Gloo sees it while forming a group: needs fewer requests, though Gloo asks for one address at a time."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.rendezvous.backends.tcpstore import TcpStore


# Ranks whose addresses one request asks for.
_AT_ONCE = 512


class FormingStore:
    """A :class:`.Store` for keys that never change, which reads all keys of a group together.

    Gloo stores each rank's address under ``…/RANK``, and reads the addresses of all ranks in turn. Any other names that it might
    use would work as well.

    Args:
        store: the one that is asked.
    """

    def __init__(self, store: TcpStore) -> None:
        self._store = store
        self._sizes: dict[str, int] = {}
        self._known: dict[str, bytes] = {}

    def expect(self, prefix: str, size: int) -> None:
        """A group of this many ranks is being formed, with keys of this prefix."""
        self._sizes[prefix] = size

    def forget(self, prefix: str) -> None:
        """The group is formed, or was given up."""
        del self._sizes[prefix]
        self._known = {
            key: value for key, value in list(self._known.items()) if not key.startswith(prefix)
        }

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._known[key] = value

    def get(self, key: str, timeout: float) -> bytes:
        value = self._known.get(key)
        if value is None:
            value = self._known[key] = self._store.get(key, timeout)
        return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        known = self._known
        if any(key not in known for key in keys):
            asked = list(dict.fromkeys([*keys, *self._others(keys[0])]))
            asked = [key for key in asked if key not in known]
            for key, value in zip(asked, self._store.get_filled(asked), strict=True):
                if value is not None:
                    known[key] = value
        return [known.get(key) for key in keys]

    def _others(self, key: str) -> list[str]:
        """The keys under which the other ranks' addresses may be."""
        place, _, rank = key.rpartition("/")
        size = next(
            (size for prefix, size in list(self._sizes.items()) if key.startswith(prefix)), 0
        )
        if not rank.isdecimal():
            return []
        # Gloo goes through them in order.
        ranks = range(int(rank), min(size, int(rank) + _AT_ONCE))
        return [f"{place}/{each}" for each in ranks]

    def peek(self, key: str) -> bytes | None:
        return self._store.peek(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def put_new(self, key: str, value: bytes) -> bytes:
        return self._store.put_new(key, value)

    def exists(self, key: str) -> bool:
        return self._store.exists(key)

    def delete(self, key: str) -> bool:
        return self._store.delete(key)

    def clone(self) -> FormingStore:
        return FormingStore(self._store.clone())

    def close(self) -> None:
        self._store.close()

"""Any of our stores as a ``torch.distributed.Store``: for process groups, and for code that needs c10d's type.

The class subclasses torch's, so it is created on first use: importing this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import RendezvousConnectionError, RendezvousError

from .store import ComparingStore, CountingStore, Store


if TYPE_CHECKING:
    from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]


# How long c10d waits for a key unless told otherwise (seconds).
DEFAULT_TIMEOUT = 300.0
# c10d holds the C++ half of a store and calls its Python half, but keeps only the C++ half alive. So a
# PrefixStore over a store with no other reference would fail its first call ("Not implemented").
_IN_USE: set[Any] = set()


def c10d_store(store: Store, timeout: float = DEFAULT_TIMEOUT) -> TorchStore:
    """``store`` as a c10d store, for ``PrefixStore`` and ``init_process_group(store=…)``.

    The result takes ownership of ``store`` and stays alive until its ``close()`` or until the process exits.

    Args:
        store: a connection that nothing else uses.
        timeout: seconds that ``get`` and ``wait`` wait for a key; ``set_timeout`` changes it.
    """
    made: TorchStore = _store_class()(store, timeout)
    return made


@cache
def _store_class() -> type[Any]:
    import torch.distributed as dist

    class C10dStore(dist.Store):  # type: ignore[name-defined, misc]  # torch re-exports it by *
        """Raises what c10d does: ``DistStoreError`` if a key does not appear, ``DistNetworkError`` for a lost store."""

        def __init__(self, store: Store, timeout: float) -> None:
            super().__init__()
            self._store = store
            self.set_timeout(timedelta(seconds=timeout))
            _IN_USE.add(self)

        def set(self, key: str, value: str | bytes) -> None:
            with _as_c10d(dist):
                self._store.set(key, _bytes(value))

        def get(self, key: str) -> bytes:
            seconds = self.timeout.total_seconds()
            try:
                with _as_c10d(dist):
                    return self._store.get(key, seconds)
            except TimeoutError:
                raise _timed_out(dist, seconds, [key]) from None

        def add(self, key: str, amount: int) -> int:
            with _as_c10d(dist):
                return self._store.add(key, amount)

        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            before, after = _bytes(expected), _bytes(desired)
            with _as_c10d(dist):
                if isinstance(self._store, ComparingStore):
                    return self._store.compare_set(key, before, after)
                if before == b"":
                    return self._store.put_new(key, after)
            raise RendezvousError(
                f"{type(self._store).__name__} can set a key that does not exist, but not replace"
                " a value on condition (compare_set); use another backend"
            )

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            seconds = (self.timeout if timeout is None else timeout).total_seconds()
            deadline = Deadline(seconds)
            with _as_c10d(dist):
                held = self._store.get_many(keys)
                missing = [key for key, value in zip(keys, held, strict=True) if value is None]
                for key in missing:
                    try:
                        self._store.get(key, deadline.remaining() or 0.0)
                    except TimeoutError:
                        raise _timed_out(dist, seconds, missing) from None

        def check(self, keys: Sequence[str]) -> bool:
            with _as_c10d(dist):
                return None not in self._store.get_many(keys)

        def delete_key(self, key: str) -> bool:
            with _as_c10d(dist):
                return self._store.delete(key)

        def num_keys(self) -> int:
            if not isinstance(self._store, CountingStore):
                raise RendezvousError(f"{type(self._store).__name__} cannot count its keys")
            with _as_c10d(dist):
                return self._store.num_keys()

        # The names under which c10d's C++ looks for these two.
        deleteKey = delete_key  # noqa: N815
        getNumKeys = num_keys  # noqa: N815

        def multi_get(self, keys: Sequence[str]) -> list[bytes]:
            self.wait(keys)
            with _as_c10d(dist):
                held = self._store.get_many(keys)
            # Wait again for a key that was removed since.
            return [
                self.get(key) if value is None else value
                for key, value in zip(keys, held, strict=True)
            ]

        def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def append(self, key: str, value: str | bytes) -> None:
            added = _bytes(value)
            while added:
                with _as_c10d(dist):
                    held = self._store.get_many([key])[0] or b""
                if self.compare_set(key, held, held + added) == held + added:
                    return

        def has_extended_api(self) -> bool:
            """Whether append, multi_get and multi_set work."""
            return isinstance(self._store, ComparingStore)

        def clone(self) -> Any:
            """The same store over a connection of its own."""
            with _as_c10d(dist):
                return C10dStore(self._store.clone(), self.timeout.total_seconds())

        def close(self) -> None:
            """Give the connection back; c10d must not use the store any more."""
            _IN_USE.discard(self)
            self._store.close()

    return C10dStore


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _timed_out(dist: Any, seconds: float, keys: Sequence[str]) -> Exception:
    names = ", ".join(keys)
    error: Exception = dist.DistStoreError(
        f"wait timeout after {seconds * 1000:.0f}ms, keys: {names}"
    )
    return error


@contextmanager
def _as_c10d(dist: Any) -> Iterator[None]:
    try:
        yield
    except RendezvousConnectionError as error:
        raise dist.DistNetworkError(str(error)) from error

"""A c10d store as groups use it: calls with the group's keys, and waiting for a key to appear.

[Note: Watching] There are two ways to wait for a key. A TCPStore's server notifies waiting clients: the watcher
blocks in a call on a connection of its own, which costs nothing until the key appears. Other stores poll when they
wait, or have waits that cannot be interrupted: there the watcher checks for the next entry every ``POLL`` seconds. It
uses a clone of the store, except for FileStore (each clone counts as a user of the file, which is deleted when the
last user is gone) and HashStore.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, Protocol, Self

from rallypoint._core import resolver
from rallypoint._core.clock import Deadline
from rallypoint.errors import RpcError

from .signing import PUBLIC, Signer


_log = logging.getLogger(__name__)


# Seconds between checks of stores that do not notify.
POLL: Final = 0.05
# For waits without a limit: c10d passes milliseconds to poll(2) as a C int, so 24 days is the maximum.
NO_LIMIT: Final = timedelta(days=20)
# c10d counts in milliseconds, and 0 means no limit.
SHORTEST: Final = timedelta(milliseconds=1)
# Seconds between checks for signals during a wait.
SIGNALS: Final = 0.25
# Keys in one call.
BATCH: Final = 512
# Attempts to write a key that another program keeps changing.
_MOST_TRIES: Final = 100


class C10dStore(Protocol):
    """The methods of ``torch.distributed.Store`` that are used. Some stores also have ``clone()``."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...
    def has_extended_api(self) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class _Released:
    """In the place of a store that a worker has let go."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this worker has left the group")


class Calls:
    """Calls to a store with the group's keys. Errors of the store become RpcError.

    Values are signed. A value that no member has signed is treated as absent, logged once, and overwritten by the next
    member that writes the key.
    """

    def __init__(self, store: C10dStore, signer: Signer = PUBLIC) -> None:
        self._store = store
        self.signer = signer
        self._named: set[str] = set()
        # Not every TCPStore server notifies waiting clients of a compare_set, but all do of a set.
        self._needs_set = pushes(store)

    @property
    def store(self) -> C10dStore:
        return self._store

    def release(self) -> None:
        """Let go of the store: its connection, and its server if this process serves it, end with the last reference.

        Later calls raise RpcError.
        """
        self._store = _Released()

    def set(self, key: str, value: bytes) -> None:
        with _as_rpc_error():
            self._store.set(_key(key), self.signer.sign(key, value))

    def add(self, key: str, amount: int) -> int:
        with _as_rpc_error():
            return self._store.add(_key(key), amount)

    def put_new(self, key: str, value: bytes) -> bytes:
        """Set a key unless a member has already set it. Returns its value."""
        signed, expected = self.signer.sign(key, value), b""
        for _ in range(_MOST_TRIES):
            with _as_rpc_error():
                held = bytes(self._store.compare_set(_key(key), expected, signed))
            if held == signed:
                return value
            content = self._content(key, held)
            if content is not None:
                return content
            # If the key was deleted meanwhile, some stores return the expected value.
            expected = b"" if held == expected else held
        raise RpcError(
            f"another program keeps overwriting {_key(key)!r} in the group's store: protect the store, or give the group"
            " its own"
        )

    def _content(self, key: str, value: bytes) -> bytes | None:
        """The content of a value; None if no member has signed it."""
        content = self.signer.read(key, value)
        if content is None and key not in self._named and len(self._named) < BATCH:
            self._named.add(key)
            _log.warning(
                "ignored the value of %r in the group's store, which no member of this group has signed: another program"
                " writes to the store",
                _key(key),
            )
        return content

    def announce_new(self, key: str, value: bytes) -> bytes:
        """:meth:`put_new` for a key that others wait for."""
        held = self.put_new(key, value)
        if held == value and self._needs_set:
            self.set(key, value)
        return held

    def delete(self, key: str) -> None:
        with _as_rpc_error():
            self._store.delete_key(_key(key))

    def present(self, keys: Sequence[str]) -> bool:
        """Whether all these keys exist."""
        with _as_rpc_error():
            return all(self._store.check([_key(key) for key in some]) for some in _batches(keys))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """The keys that do not exist, found by bisection."""
        if not keys or self.present(keys):
            return []
        if len(keys) == 1:
            return list(keys)
        half = len(keys) // 2
        return self.absent(keys[:half]) + self.absent(keys[half:])

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The contents of existing keys; None for values that no member has signed."""
        with _as_rpc_error():
            if not self._store.has_extended_api():
                values = [bytes(self._store.get(_key(key))) for key in keys]
            else:
                values = [
                    bytes(value)
                    for some in _batches(keys)
                    for value in self._store.multi_get([_key(key) for key in some])
                ]
        return [self._content(key, value) for key, value in zip(keys, values, strict=True)]

    def are_there(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values signed by members."""
        return self.present(keys) and None not in self.read(keys)

    def read_or_none(self, key: str) -> bytes | None:
        """The content of a key; None if it does not exist or no member has signed it."""
        return self.read([key])[0] if self.present([key]) else None

    def wait(self, keys: Sequence[str], timeout: float | None) -> bool:
        """Wait until all keys exist; False on timeout."""
        limit = NO_LIMIT
        if timeout is not None:
            limit = min(max(timedelta(seconds=timeout), SHORTEST), NO_LIMIT)
        try:
            self._store.wait([_key(key) for key in keys], limit)
        except RuntimeError:
            # Stores report timeouts in different ways. A lost store raises here again.
            return self.present(keys)
        return True

    def wait_interruptibly(self, keys: Sequence[str], timeout: float | None) -> bool:
        """:meth:`wait`, but interruptible by signals, unlike c10d's own waits. For the main thread."""
        if self.present(keys):
            return True
        if pushes(self._store):
            # One long wait in a thread: c10d prints a warning for each wait that times out.
            return self._wait_beside(keys, timeout)
        deadline = Deadline(timeout)
        while True:
            left = deadline.remaining()
            if self.wait(keys, SIGNALS if left is None else min(left, SIGNALS)):
                return True
            if deadline.expired():
                return False

    def _wait_beside(self, keys: Sequence[str], timeout: float | None) -> bool:
        """:meth:`wait` in a thread. If a signal interrupts this, the thread ends at its timeout."""
        listener = Listener.of(self._store, self.signer)
        answers: SimpleQueue[bool | BaseException] = SimpleQueue()

        def wait() -> None:
            try:
                answers.put(listener.calls.wait(keys, timeout))
            except BaseException as error:  # noqa: BLE001  # raised in the caller
                answers.put(error)

        thread = threading.Thread(target=wait, name="rally: waits for members", daemon=True)
        thread.start()
        answer = answers.get()
        thread.join()
        listener.close()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _key(key: str) -> str:
    return f"rpc/{key}"


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH]


@contextmanager
def _as_rpc_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RpcError(f"the group's store is lost: {why[:200]}") from error


@dataclass(frozen=True, slots=True)
class Listener:
    """Waits for entries: [Note: Watching].

    Args:
        calls: the store, for the watcher.
        blocks: whether its waits block until the key appears, without polling.
        clone: the clone to close, if any.
    """

    calls: Calls
    blocks: bool
    clone: Any

    @classmethod
    def of(cls, store: C10dStore, signer: Signer = PUBLIC) -> Self:
        blocks = pushes(store)
        clone = getattr(store, "clone", None)
        if clone is None or type(innermost(store)).__name__ in ("FileStore", "HashStore"):
            return cls(Calls(store, signer), False, None)
        with _as_rpc_error(), resolver.connecting_to(getattr(innermost(store), "host", "")):
            own = clone()
        return cls(Calls(own, signer), blocks, own)

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Wait for a key; False once ``stop`` is set."""
        while not stop.is_set():
            if self.calls.present([key]):
                return True
            if self.blocks:
                # Also returns without the key, when another client's compare_set fails.
                self.calls.wait([key], None)
            else:
                stop.wait(POLL)
        return False

    def close(self) -> None:
        end = getattr(
            innermost(self.clone), "close", None
        )  # a TCPStore has none: it ends with the object
        if end is not None:
            end()


def innermost(store: Any) -> Any:
    """The store under all prefixes."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def pushes(store: Any) -> bool:
    # By name, to avoid importing torch here.
    return hasattr(store, "clone") and type(innermost(store)).__name__ == "TCPStore"

"""c10d's store as groups use it: calls under their keys, and how one hears of a key that comes.

[Note: Watching] What others write is heard of in one of two ways. A TCPStore's server tells those who wait for a
key: one blocked call on a connection of our own, no cost until something happens, and then at most four calls. All
other stores poll when they wait, or have waits that cannot be broken off: there the watcher asks for the next entry
every ``POLL`` seconds, on the same object where that is a file or this process's memory (cloned FileStores would
count as users of the file, and it goes when these have ended), else on a clone. News is that much late there.
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


# Seconds between two looks where the store does not tell by itself.
POLL: Final = 0.05
# A wait without limit: c10d hands milliseconds to poll(2) as a C int, which ends at 24 days.
NO_LIMIT: Final = timedelta(days=20)
# c10d counts milliseconds, and takes none for no limit at all.
SHORTEST: Final = timedelta(milliseconds=1)
# Seconds after which a wait lets signals through.
SIGNALS: Final = 0.25
# Keys in one call.
BATCH: Final = 512
# To put something where somebody else writes, too.
_MOST_TRIES: Final = 100


class C10dStore(Protocol):
    """What is used of ``torch.distributed.Store``. Some have ``clone()``."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def delete_key(self, key: str, /) -> bool: ...
    def has_extended_api(self) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class Calls:
    """A store's calls under the group's keys; whatever else goes wrong in them is an RpcError.

    Values are signed: what no member has put there counts as not there, is named once in the log, and is replaced by whoever
    has something to put there.
    """

    def __init__(self, store: C10dStore, signer: Signer = PUBLIC) -> None:
        self._store = store
        self.signer = signer
        self._named: set[str] = set()
        # A TCPStore's server tells those who wait of what was set; of a compare_set only the libuv one tells them,
        # and a client cannot know which one it talks to.
        self._deaf = pushes(store)

    def set(self, key: str, value: bytes) -> None:
        with _as_rpc_error():
            self._store.set(_key(key), self.signer.sign(key, value))

    def add(self, key: str, amount: int) -> int:
        with _as_rpc_error():
            return self._store.add(_key(key), amount)

    def put_new(self, key: str, value: bytes) -> bytes:
        """Set a key under which no member has put anything; what it holds now."""
        signed, expected = self.signer.sign(key, value), b""
        for _ in range(_MOST_TRIES):
            with _as_rpc_error():
                held = bytes(self._store.compare_set(_key(key), expected, signed))
            if held == signed:
                return value
            content = self._content(key, held)
            if content is not None:
                return content
            # Where it is gone again meanwhile, some stores answer with what was expected.
            expected = b"" if held == expected else held
        raise RpcError(
            f"another program keeps writing to the group's store, under {_key(key)!r}: protect the store, or give the"
            " group its own"
        )

    def _content(self, key: str, value: bytes) -> bytes | None:
        """What a member has put there; None: it was somebody else."""
        content = self.signer.read(key, value)
        if content is None and key not in self._named and len(self._named) < BATCH:
            self._named.add(key)
            _log.warning(
                "the group's store holds under %r what no member of this group has put there; it is not used: somebody else"
                " writes into the store",
                _key(key),
            )
        return content

    def announce_new(self, key: str, value: bytes) -> bytes:
        """:meth:`put_new` for a key that others wait for."""
        held = self.put_new(key, value)
        if held == value and self._deaf:
            self.set(key, value)
        return held

    def delete(self, key: str) -> None:
        with _as_rpc_error():
            self._store.delete_key(_key(key))

    def present(self, keys: Sequence[str]) -> bool:
        """Whether all of them exist."""
        with _as_rpc_error():
            return all(self._store.check([_key(key) for key in some]) for some in _batches(keys))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Those that do not exist: found by halves."""
        if not keys or self.present(keys):
            return []
        if len(keys) == 1:
            return list(keys)
        half = len(keys) // 2
        return self.absent(keys[:half]) + self.absent(keys[half:])

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """What members have put under these, which exist; None where it was somebody else."""
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
        """Whether members have put something under all of them."""
        return self.present(keys) and None not in self.read(keys)

    def read_or_none(self, key: str) -> bytes | None:
        """What a member has put under this; None: nothing, or somebody else did."""
        return self.read([key])[0] if self.present([key]) else None

    def wait(self, keys: Sequence[str], timeout: float | None) -> bool:
        """Wait until all exist; False if they do not in time."""
        limit = NO_LIMIT
        if timeout is not None:
            limit = min(max(timedelta(seconds=timeout), SHORTEST), NO_LIMIT)
        try:
            self._store.wait([_key(key) for key in keys], limit)
        except RuntimeError:
            # Stores say in different ways that time is up. One that is lost says so again here.
            return self.present(keys)
        return True

    def wait_interruptibly(self, keys: Sequence[str], timeout: float | None) -> bool:
        """:meth:`wait`, for the main thread: c10d's waits let no signal through."""
        if self.present(keys):
            return True
        if pushes(self._store):
            # A wait that ends without the key makes c10d print warnings: one on another connection and thread.
            return self._wait_beside(keys, timeout)
        deadline = Deadline(timeout)
        while True:
            left = deadline.remaining()
            if self.wait(keys, SIGNALS if left is None else min(left, SIGNALS)):
                return True
            if deadline.expired():
                return False

    def _wait_beside(self, keys: Sequence[str], timeout: float | None) -> bool:
        """:meth:`wait` in a thread, which a signal leaves behind until its time is up."""
        listener = Listener.of(self._store, self.signer)
        answers: SimpleQueue[bool | BaseException] = SimpleQueue()

        def wait() -> None:
            try:
                answers.put(listener.calls.wait(keys, timeout))
            except BaseException as error:  # noqa: BLE001  # it belongs to the caller
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
    """How the watcher hears of an entry: [Note: Watching].

    Args:
        calls: the store, for the watcher.
        blocks: whether its waits end when a key comes, and cost nothing until then.
        clone: what is ours of it.
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
        """Wait for a key; False if it is time to stop."""
        while not stop.is_set():
            if self.calls.present([key]):
                return True
            if self.blocks:
                self.calls.wait(
                    [key], None
                )  # ends without the key, too: when another's comparison fails
            else:
                stop.wait(POLL)
        return False

    def close(self) -> None:
        end = getattr(innermost(self.clone), "close", None)  # a TCPStore's ends with the object
        if end is not None:
            end()


def innermost(store: Any) -> Any:
    """The store under all prefixes."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def pushes(store: Any) -> bool:
    # By name: importing torch takes a second, and this package is loaded by those who never meet a TCPStore.
    return hasattr(store, "clone") and type(innermost(store)).__name__ == "TCPStore"

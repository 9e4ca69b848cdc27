"""Small notes between the ranks of a session, left in the workers' store, without collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from rallypoint._core import env as environment
from rallypoint.elastic import torch_private
from rallypoint.errors import ElasticError

from .connections import Wiring


_PREFIX = "rally/checkpoints"


class Board(Protocol):
    """Notes by key."""

    def post(self, key: str, note: bytes) -> None:
        """Leave a note for all ranks."""

    def drop(self, key: str) -> None:
        """Remove a note."""

    def peek(self, key: str) -> bytes | None:
        """A note; None if it does not exist yet."""

    def await_note(self, key: str, timeout: float) -> bytes:
        """A note. Blocks: until it exists.

        Raises:
            RuntimeError or OSError: it did not appear in time, or the store is gone.
        """

    def close(self) -> None:
        """End the connection to the store."""


class _Workers:
    """Notes in the store of a job's workers, even after another node has started to serve it.

    Args:
        address: tells where the store is.
    """

    def __init__(self, address: Callable[[], tuple[str, int]]) -> None:
        self._address = address
        self._connected = address()
        self._wiring = Wiring(*self._connected, _PREFIX)

    def _now(self) -> Wiring:
        if (address := self._address()) != self._connected:
            self.close()
            self._connected, self._wiring = address, Wiring(*address, _PREFIX)
        return self._wiring

    def post(self, key: str, note: bytes) -> None:
        self._now().set(key, note)

    def drop(self, key: str) -> None:
        self._now().store().delete(f"{_PREFIX}/{key}")

    def peek(self, key: str) -> bytes | None:
        return self._now().store().peek(f"{_PREFIX}/{key}")

    def await_note(self, key: str, timeout: float) -> bytes:
        return self._now().wait(key, timeout)

    def close(self) -> None:
        self._wiring.cut()


class _Default:
    """Notes in the store that ``init_process_group`` was given, under other launchers."""

    def __init__(self) -> None:
        # A clone, because a store's client can do nothing else while it waits.
        self._store: Any = torch_private.prefixed(torch_private.clone_of_default_store(), _PREFIX)

    def post(self, key: str, note: bytes) -> None:
        self._store.set(key, note)

    def drop(self, key: str) -> None:
        self._store.delete_key(key)

    def peek(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def await_note(self, key: str, timeout: float) -> bytes:
        self._store.wait([key], timedelta(seconds=timeout))
        return bytes(self._store.get(key))

    def close(self) -> None:
        self._store = None  # torch closes a client that nobody refers to


def boards(address: Callable[[], tuple[str, int]] | None) -> Callable[[], Board] | None:
    """A function that makes boards, one for each thread; None if this process is the only rank.

    Args:
        address: tells where the workers' store is; None under other launchers.
    Raises:
        ElasticError: this process has peers, but no process group.
    """
    variables = environment.snapshot()
    if not dist.is_initialized():
        if variables.get("WORLD_SIZE", "1") != "1":
            raise ElasticError(
                "elastic.session: call torch.distributed.init_process_group before the session, so that one rank writes"
                " its checkpoints"
            )
        return None
    if dist.get_world_size() == 1:
        return None
    if address is not None:
        return lambda: _Workers(address)
    return _Default

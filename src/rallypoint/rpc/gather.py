"""Every worker's object on every worker, over calls: the alphabetically first one collects and distributes."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, PeerLost, RpcError


class AllGatherStates:
    """What one gathering has brought so far."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.lost: PeerLost | None = None


class Gatherings:
    """The gatherings that are under way in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._states: dict[tuple[str, ...], AllGatherStates] = {}
        # Those of the same workers are told apart by their number; each thread takes the next.
        self._numbers: dict[frozenset[str], int] = {}

    def next_number(self, names: Collection[str]) -> int:
        with self._lock:
            key = frozenset(names)
            number = self._numbers.get(key, 0)
            self._numbers[key] = number + 1
            return number

    def state(self, sequence_id: tuple[str, ...]) -> AllGatherStates:
        with self._lock:
            return self._states.setdefault(sequence_id, AllGatherStates())

    def add(
        self, sequence_id: tuple[str, ...], names: Collection[str], name: str, obj: Any
    ) -> bool:
        """An object has come; True if it was the last.

        Raises:
            RpcError: this worker takes no part, or has spoken before.
        """
        if name not in names:
            raise RpcError(
                f"{name} is not expected to take part in this gathering: {sorted(names)}"
            )
        with self._lock:
            state = self._states.setdefault(sequence_id, AllGatherStates())
            if name in state.gathered_objects:
                raise RpcError(f"{name} has given its object for this gathering twice")
            state.gathered_objects[name] = obj
            if set(names) == set(state.gathered_objects):
                state.proceed_signal.set()
                return True
            return False

    def put(self, sequence_id: tuple[str, ...], objects: dict[str, Any]) -> None:
        """The leader has sent all of them."""
        with self._lock:
            state = self.state(sequence_id)
            state.gathered_objects = objects
            state.proceed_signal.set()

    def lose(self, me: str, name: str, reason: str) -> None:
        """A worker is gone: the gatherings that wait for it here end."""
        with self._lock:
            for (_, *names), state in self._states.items():
                leader = names[0]
                is_missing = me == leader and name in names and name not in state.gathered_objects
                if (name == leader or is_missing) and not state.proceed_signal.is_set():
                    state.lost = PeerLost(name, reason)
                    state.proceed_signal.set()

    def take(self, sequence_id: tuple[str, ...]) -> AllGatherStates:
        """The end of a gathering here."""
        with self._lock:
            return self._states.pop(sequence_id, AllGatherStates())

    def clear(self) -> None:
        with self._lock:
            self._states.clear()
            self._numbers.clear()


def wait(
    state: AllGatherStates, deadline: Deadline, seconds: float | None, names: Collection[str]
) -> None:
    """Wait until all objects are there.

    Raises:
        DeadlineExceeded: says who is missing.
        PeerLost: one that is missing is gone.
    """
    if not state.proceed_signal.wait(deadline.remaining()):
        missing = sorted(set(names) - set(state.gathered_objects))
        shown = f"{seconds:.2f}" if seconds is not None else "?"
        # torch's words come first.
        raise GatherTimeout(
            f"timed out in _all_gather after {shown} seconds; missing: {', '.join(missing) or 'the answer'}"
        )
    if state.lost is not None:
        raise state.lost


class GatherTimeout(DeadlineExceeded, RpcError):
    """Not everybody came."""

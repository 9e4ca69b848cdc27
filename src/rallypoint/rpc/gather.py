"""All-gather of objects, implemented with calls. The worker whose name sorts first collects and distributes them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

from rallypoint._core import forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, PeerLost, RpcError

from . import constants
from .calling import rpc_async, rpc_sync
from .current_agent import member_agent, required_agent
from .current_call import current_call
from .time_limits import limit_of


_LEFT = "this worker has left the group: another thread called rpc.shutdown(graceful=False), or one with a shorter timeout"


class AllGatherStates:
    """The state of one all-gather."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        # Why it failed.
        self.lost: RpcError | None = None


class Gatherings:
    """The all-gathers in progress in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._states: dict[tuple[str, ...], AllGatherStates] = {}
        # Numbers distinguish all-gathers among the same workers.
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
        """Add a worker's object; True if it was the last one.

        Raises:
            RpcError: the worker does not take part, or has already sent an object.
        """
        if name not in names:
            raise RpcError(
                f"{name} does not take part in this all_gather, which is among {sorted(names)}"
            )
        with self._lock:
            state = self._states.setdefault(sequence_id, AllGatherStates())
            if name in state.gathered_objects:
                raise RpcError(f"{name} has sent its object for this all_gather twice")
            state.gathered_objects[name] = obj
            if set(names) == set(state.gathered_objects):
                state.proceed_signal.set()
                return True
            return False

    def put(self, sequence_id: tuple[str, ...], objects: dict[str, Any]) -> None:
        """The leader has sent all objects."""
        with self._lock:
            state = self.state(sequence_id)
            state.gathered_objects = objects
            state.proceed_signal.set()

    def lose(self, me: str, name: str, reason: str) -> None:
        """A worker is gone: end the all-gathers that wait for it."""
        with self._lock:
            for (_, *names), state in self._states.items():
                leader = names[0]
                is_missing = me == leader and name in names and name not in state.gathered_objects
                if (name == leader or is_missing) and not state.proceed_signal.is_set():
                    state.lost = PeerLost(name, reason)
                    state.proceed_signal.set()

    def take(self, sequence_id: tuple[str, ...]) -> AllGatherStates:
        """Remove a finished all-gather."""
        with self._lock:
            return self._states.pop(sequence_id, AllGatherStates())

    def clear(self) -> None:
        """This process joins or leaves a group: end all, and wake the threads that wait for one."""
        with self._lock:
            for state in self._states.values():
                if not state.proceed_signal.is_set():
                    state.lost = RpcError(_LEFT)
                    state.proceed_signal.set()
            self._states.clear()
            self._numbers.clear()


def wait(
    state: AllGatherStates, deadline: Deadline, seconds: float | None, names: Collection[str]
) -> None:
    """Wait until all objects have arrived.

    Raises:
        DeadlineExceeded: some are missing; the error names the workers.
        PeerLost: a worker whose object is missing is gone.
        RpcError: this worker has left the group.
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
    """Some workers did not take part in time."""


_gatherings = Gatherings()


def forget_all() -> None:
    """Reset when this process joins or leaves a group."""
    forks.call_in_child(_abandon)
    _gatherings.clear()


def lose(me: str, name: str, reason: str) -> None:
    """A worker is gone: the all-gathers that wait for it fail."""
    _gatherings.lose(me, name, reason)


def _abandon() -> None:
    """In a forked child: a thread of the parent may have held the lock."""
    global _gatherings  # noqa: PLW0603  # of this process
    _gatherings = Gatherings()


def _all_gather(
    obj: Any,
    worker_names: Collection[str] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> dict[str, Any]:
    """Every worker's object, by the worker's name.

    Collective: each of ``worker_names`` (by default all current members) calls it. Blocks.

    Raises:
        DeadlineExceeded: some did not call it in time; the error names them.
        PeerLost: one of them is gone and had not called it.
        RpcError: another thread of this worker has left the group.
    """
    agent = required_agent()
    names = (
        sorted(each.name for each in agent.infos())
        if worker_names is None
        else sorted(worker_names)
    )
    me = agent.me.name
    if me not in names:
        raise RpcError(
            f"this worker, {me}, is not among the workers of this all_gather: {', '.join(names)}"
        )
    leader = names[0]
    seconds = agent.default_timeout if timeout < 0 else timeout
    limit = limit_of(seconds)
    # The names identify the membership: it changes with each join or departure.
    sequence_id = (str(_gatherings.next_number(names)), *names)
    deadline = Deadline(limit)
    call_timeout = timeout if timeout >= 0 else constants.UNSET_RPC_TIMEOUT
    if me == leader:
        _gatherings.add(sequence_id, names, me, obj)
    else:
        rpc_sync(
            leader,
            _gather_to_leader,
            (sequence_id, me, obj, names),
            timeout=call_timeout,
        )
    state = _gatherings.state(sequence_id)
    try:
        # The agent closes before the states are cleared, so one or the other is seen here.
        if getattr(agent, "is_closed", False):
            raise RpcError(_LEFT)
        watch = getattr(agent, "watch", None)
        if watch is not None:
            # Connect to those we wait for, to notice their loss.
            for name in names if me == leader else [leader]:
                if name not in state.gathered_objects and not state.proceed_signal.is_set():
                    watch(name)
        with agent.waiting():
            wait(state, deadline, limit, names)
        if me == leader:
            _broadcast(
                agent, sequence_id, state, [name for name in names if name != me], call_timeout
            )
    finally:
        _gatherings.take(sequence_id)
    return state.gathered_objects


def _gather_to_leader(
    sequence_id: tuple[str, ...],
    worker_name: str,
    obj: Any,
    worker_names: Collection[str] | None = None,
) -> None:
    """Runs on the leader, for the worker that calls it.

    Raises:
        PeerLost: this worker is leaving the group, because another one is gone or did not take part in time.
        RpcError: the object is not the caller's own, or this worker does not lead such an all-gather.
    """
    leader, agent = _leader_of(sequence_id), member_agent()
    if agent is None:
        raise PeerLost(leader, "it has left the group, and waits for nobody any longer")
    names = worker_names or [each.name for each in agent.infos()]
    caller = _caller(agent)
    if leader != agent.me.name or worker_name != caller or sorted(names) != [*sequence_id[1:]]:
        raise RpcError(f"{caller} calls for no all_gather of its own that {agent.me.name} leads")
    _gatherings.add(tuple(sequence_id), names, worker_name, obj)


def _broadcast_to_followers(sequence_id: tuple[str, ...], objects_map: dict[str, Any]) -> None:
    """Runs on each of the others, for the leader.

    Raises:
        RpcError: the caller does not lead such an all-gather, or this worker does not take part.
    """
    agent = required_agent()
    me, caller = agent.me.name, _caller(agent)
    if _leader_of(sequence_id) != caller or me not in sequence_id[2:]:
        raise RpcError(f"{caller} leads no all_gather of {me}")
    _gatherings.put(tuple(sequence_id), objects_map)


def _caller(agent: Any) -> str:
    """The name of the calling worker; this worker's own if no other one is calling."""
    serving = current_call()
    return str(agent.me.name if serving is None else serving.caller.name)


def _leader_of(sequence_id: object) -> str:
    """The leader's name, which follows the number in an all-gather's id.

    Raises:
        RpcError: it is not such an id.
    """
    parts = sequence_id if isinstance(sequence_id, tuple | list) else ()
    if len(parts) < 2 or not all(type(each) is str for each in parts):
        raise RpcError("this is no id of an all_gather: expected a number and the names of workers")
    return str(parts[1])


def _broadcast(
    agent: Any,
    sequence_id: tuple[str, ...],
    state: AllGatherStates,
    followers: Sequence[str],
    timeout: float,
) -> None:
    futures = [
        (
            name,
            rpc_async(
                name,
                _broadcast_to_followers,
                (sequence_id, state.gathered_objects),
                timeout=timeout,
            ),
        )
        for name in followers
    ]
    errors = []
    for name, future in futures:
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        seconds = agent.default_timeout if timeout < 0 else timeout
        raise RpcError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {seconds:.2f} seconds."
            f" The first exception is {errors[0][1]}"
        )


def _barrier(worker_names: Collection[str]) -> None:
    """Wait until each of these workers has called this."""
    _all_gather(None, set(worker_names))

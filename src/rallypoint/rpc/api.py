"""The calls: torch.distributed.rpc's, with its private names that programs use, and what goes beyond them.

State of the module is what torch's module has as state, since programs and torch's own tests replace it there:
``_default_pickler``, ``_ignore_rref_leak``, ``_wait_all_workers`` and others are looked up when they are needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.futures import Future

from rallypoint._core import forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, DeadlineExceeded, RpcError

from . import agent_in_use, constants
from .agent.agent import Agent
from .agent.streams import WINDOW, RpcStream
from .collect import wait_all
from .connections.messages import FLAG_FOREIGN, Kind
from .content.script import check_arguments, is_builtin
from .current_call import SERVING
from .gather import AllGatherStates, Gatherings, GatherTimeout, wait as wait_gathered
from .groups import stores
from .groups.dynamic_group import DynamicGroup
from .groups.member import Member
from .internal import PythonUDF, _internal_rpc_pickler
from .options import NativeRpcBackendOptions, RpcBackendOptions
from .references.rref import RRef, call_remote
from .registry import BackendType, construct_rpc_backend_options, init_backend
from .worker_info import WorkerInfo


logger = logging.getLogger(__name__)

T = TypeVar("T")

_BUILTIN_TYPE = type(torch.add)
# Whether a rank must be given, as torch wants it; set by ``compat``.
_torch_rules = False
_default_pickler: Any = _internal_rpc_pickler
_ignore_rref_leak = True
_default_timeout = constants.DEFAULT_RPC_TIMEOUT_SEC
_current: Any = None
_not_ours: list[Any] = []
# Seconds that a worker which leaves in good order gives to answers that are on their way.
_LAST_WORDS = 5.0
# Seconds that a closing agent gives functions that still run; and after Ctrl-C.
_CLOSING, _AT_ONCE = 5.0, 0.1
_init_count = 0
_init_lock = threading.Lock()
_gatherings = Gatherings()
_thread_local_var = threading.local()

# torch's words: programs look for them.
_NOT_INITIALIZED = "RPC has not been initialized in this process: call init_rpc first"


# -- coming ---------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether calls can be made at all: always. torch's own needs a torch that was built with it."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    *,
    store: Any = None,
) -> None:
    """Become a member of a group; calls may be made and are served from here on. So may one that was :class:`Expelled`.

    Collective, for a group of fixed size: every member calls it. Blocks until all have come.

    Args:
        name: this worker's name, unique in the group.
        backend: by default the one that the options belong to, else the native one.
        rank: this worker's id, unique in the group. May be left out in a dynamic group.
        world_size: how many members there are; None: a dynamic group, which members join and leave at any time.
        rpc_backend_options: the backend's options; by default its default ones, which meet at ``env://``.
        store: a c10d store to meet in, instead of ``init_method``.

    Raises:
        RpcError: this process is a member already; the name is taken; the group cannot be had.
        DeadlineExceeded: some members have not come; says which.
        TypeError: backend or options are none.
        ConfigError: the rank is none of a group of that size.
    """
    backend, options = _choose(backend, rpc_backend_options)
    if not _torch_rules:
        _check_rank(rank, world_size)
    if isinstance(_current, Agent) and _current.roster.expelled is not None:
        _finalize_shutdown()
    if _is_current_rpc_agent_set():
        raise RpcError(
            "RPC is already initialized in this process: shut it down before another init_rpc"
        )
    if not store:
        store = stores.open_store(
            options.init_method, rank, world_size, options.rpc_timeout, torch_rules=_torch_rules
        )
    global _init_count  # noqa: PLW0603  # how many groups this process was in: each has keys of its own
    number = _init_count if world_size else 0
    prefixed = stores.prefixed(f"rpc_prefix_{number}", store)
    _init_rpc_backend(backend, prefixed, name, rank, world_size, options)
    # An attempt that failed does not count: the others wait for this process where it was missing.
    with _init_lock:
        _init_count += 1


def _check_rank(rank: int, world_size: int | None) -> None:
    if world_size is None:
        return
    if world_size < 1:
        raise ConfigError(
            "world_size", world_size, "expected at least 1, or None for a dynamic group"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(
            "rank",
            rank,
            f"expected 0 to {world_size - 1}: each worker of a group of fixed size has a rank of its own",
            "rank=int(os.environ['RANK']) where rally run starts the workers",
        )


def _choose(backend: Any, options: Any) -> tuple[BackendType, Any]:
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, but got {backend!r}")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, but got {options!r}"
        )
    if backend is None:
        if (
            options is None
            or type(options) is RpcBackendOptions
            or isinstance(options, NativeRpcBackendOptions)
        ):
            backend = BackendType["RALLYPOINT"]
        else:
            for candidate in BackendType:
                with contextlib.suppress(Exception):
                    if type(options) is type(construct_rpc_backend_options(candidate)):
                        backend = candidate
                        break
            else:
                raise TypeError(f"Could not infer backend for options {options}")
    if options is None:
        options = construct_rpc_backend_options(backend)
    return backend, options


def _init_rpc_backend(
    backend: BackendType | None = None,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    if _is_current_rpc_agent_set():
        raise RpcError("RPC is already initialized in this process")
    backend, options = _choose(backend, rpc_backend_options)
    agent = init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=options,
    )
    _init_rpc_states(agent)


def _init_rpc_states(agent: Any) -> None:
    _gatherings.clear()
    if isinstance(agent, Agent) and _torch_rules:
        # Programs, and torch's tests, ask it for its debug information. All else of it is refused.
        dist_autograd = sys.modules.get("torch.distributed.autograd")
        if dist_autograd is not None:
            with contextlib.suppress(Exception):
                dist_autograd._init(agent.me.id)
    _set_and_start_rpc_agent(agent)


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Calls of others are served from here on: not before this process can make calls itself."""
    global _current  # noqa: PLW0603  # the one agent of the process
    forks.call_in_child(_abandon)
    _current = agent
    agent_in_use.set_current_agent(agent)
    if isinstance(agent, Agent):
        agent.on_lost = functools.partial(_gatherings.lose, agent.me.name)
        try:
            agent.start()
        except BaseException:
            _finalize_shutdown()
            raise


def _abandon() -> None:
    """In a forked child: the parent's agent is not this process's."""
    global _current, _gatherings, _init_lock  # noqa: PLW0603  # of this process
    if _current is not None and not isinstance(_current, Agent):
        # The end of torch's object would wait for threads that do not exist here.
        _not_ours.append(_current)
    _current = None
    _gatherings = Gatherings()
    _init_lock = threading.Lock()


def _get_current_rpc_agent() -> Any:
    return _agent()


def _is_current_rpc_agent_set() -> bool:
    return _current is not None


def _require_initialized(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of torch's: the function needs a group."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _agent()
        return func(*args, **kwargs)

    return wrapper


def _agent() -> Any:
    agent = _current
    if agent is None:
        raise RpcError(agent_in_use.without_agent(_NOT_INITIALIZED))
    return agent


# -- who is there ---------------------------------------------------------------------------------


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Name and rank of a worker.

    Args:
        worker_name: name or rank; None: this worker.

    Raises:
        RpcError: there is no such worker, or this process is in no group.
    """
    found: WorkerInfo = _agent().info(worker_name)
    return found


def _to_worker_info(to: Any) -> WorkerInfo:
    found: WorkerInfo = to if isinstance(to, WorkerInfo) else _agent().info(to)
    return found


def wait_for(names: str | Sequence[str], timeout: float | None = None) -> tuple[WorkerInfo, ...]:
    """Wait until workers of these names are members of the dynamic group. Blocks.

    Args:
        names: one name, or several.
        timeout: seconds; None: for ever.

    Returns:
        Their infos, in the order of ``names``.

    Raises:
        DeadlineExceeded: some have not come; says which.
        RpcError: the group is a static one, or this process is in none.
    """
    group = _dynamic_group()
    wanted = [names] if isinstance(names, str) else list(names)
    found: Collection[Member] = group.wait_for(wanted, timeout)
    return tuple(WorkerInfo(each.name, each.id) for each in found)


def members() -> tuple[int, tuple[WorkerInfo, ...]]:
    """Who is in the group now. Does not ask the store.

    Returns:
        The membership's epoch, a number that only grows (in a static group it is 1), and the members by rank.

    Raises:
        RpcError: this process is in no group.
    """
    agent = _agent()
    if not isinstance(agent, Agent):
        return 1, tuple(agent.infos())
    epoch, found = agent.group.members()  # type: ignore[union-attr]  # it is in one
    return epoch, tuple(WorkerInfo(each.name, each.id) for each in found)


def on_join(callback: Callable[[WorkerInfo], None]) -> None:
    """Have each worker announced that joins the dynamic group from here on.

    Args:
        callback: called as ``callback(worker)`` on a thread of the group's, one call after the other. What it raises is logged.

    Raises:
        RpcError: the group is a static one, or this process is in none.
    """
    _dynamic_group().on_join(lambda member: callback(WorkerInfo(member.name, member.id)))


def on_leave(callback: Callable[[WorkerInfo, str], None]) -> None:
    """Have each worker announced that leaves the dynamic group or is lost from here on.

    Args:
        callback: called as ``callback(worker, reason)``, as for :func:`on_join`.

    Raises:
        RpcError: the group is a static one, or this process is in none.
    """
    _dynamic_group().on_leave(
        lambda member, reason: callback(WorkerInfo(member.name, member.id), reason)
    )


def _dynamic_group() -> DynamicGroup:
    group = _agent().group
    if not isinstance(group, DynamicGroup):
        raise RpcError(
            "this group's members are fixed: only in a dynamic one (init_rpc without world_size) do"
            " members come and go"
        )
    return group


# -- calls ----------------------------------------------------------------------------------------


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> T:
    """Run a function on a worker and return its result. Blocks.

    Args:
        to: name, rank or info of the worker; this one is allowed.
        func: known to both sides under the same module and name; may be ``async def``.
        args, kwargs: its arguments; tensors on the CPU, or where a device map says.
        timeout: seconds; 0: for ever; the default is the options' ``rpc_timeout``. A call that is served passes
            what is left of its time on to the calls that it makes.

    Returns:
        What the function returned. Tensors keep their device where a device map says so, else they are on the CPU.

    Raises:
        RpcError: there is no such worker, or this process is in no group.
        RpcTimeout: no answer came in time. The function may still run.
        PeerLost: the worker is gone.
        Exception: what the function raised, of its own type where that can be made here, else ``RemoteError``.
    """
    agent = _agent()
    kind, flags, content = _prepare(func, args, kwargs)
    result: T = agent.call_sync(to, kind, func, content, timeout, flags)
    return result


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """Run a function on a worker without waiting for it.

    Returns as soon as the arguments are serialized. Tensors are not copied before they are sent: do not change them until
    the future is done.

    Args:
        to: name, rank or info of the worker; this one is allowed.
        func: known to both sides under the same module and name; may be ``async def``.
        args, kwargs: its arguments; tensors on the CPU, or where a device map says.
        timeout: seconds, as for :func:`rpc_sync`.

    Returns:
        A future of the result, which is also a ``torch.futures.Future``. ``wait()`` blocks and raises what
        :func:`rpc_sync` would; it can be awaited in a coroutine, and cancelled.

    Raises:
        RpcError: there is no such worker, or this process is in no group.
    """
    agent = _agent()
    kind, flags, content = _prepare(func, args, kwargs)
    future: Future[T] = agent.call_async(to, kind, func, content, timeout, flags)
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Run a function on a worker and leave its result there. Does not wait for it.

    Args:
        to: name, rank or info of the worker; this one is allowed.
        func: known to both sides under the same module and name.
        args, kwargs: its arguments; tensors on the CPU, or where a device map says.
        timeout: seconds until the value must have been made; as for :func:`rpc_sync`.

    Returns:
        A reference to the result. The worker keeps the value for as long as any worker holds a reference; what the
        function raised is raised where the value is used.

    Raises:
        RpcError: there is no such worker, or this process is in no group.
    """
    agent = _agent()
    _, _, (func, arguments, keywords) = _prepare(func, args, kwargs)
    if not isinstance(agent, Agent):
        made: RRef[T] = agent.remote(to, func, arguments, keywords, timeout)
        return made
    return call_remote(agent, to, func, arguments, keywords, timeout)


def rpc_stream(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
    *,
    window: int = WINDOW,
) -> RpcStream[Any]:
    """Run a generator function (``async def`` too) on a worker, and iterate over what it yields, as it comes.

    Args:
        to: name, rank or info of the worker; this one is allowed.
        func: a generator function, known to both sides under the same module and name.
        args, kwargs: its arguments.
        timeout: seconds for the whole stream; as for :func:`rpc_sync`.
        window: how many items may be under way that have not been taken; the generator waits beyond that.

    Returns:
        An iterator, also for ``async for``. Each step blocks until the next item is there, and raises what
        :func:`rpc_sync` would. Closing it, or dropping it, closes the generator.

    Raises:
        RpcError: there is no such worker, or this process is in no group.
    """
    _, _, content = _prepare(func, args, kwargs)
    stream: RpcStream[Any] = _agent().call_stream(to, func, content, timeout, window)
    return stream


def _prepare(
    func: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[int, int, tuple[Any, tuple[Any, ...], dict[str, Any] | None]]:
    arguments = args if type(args) is tuple else _positional(args)
    if kwargs is not None and type(kwargs) is not dict and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs is {_shown(kwargs)}: expected keyword arguments by name, in a dict"
        )
    if type(func) is _BUILTIN_TYPE or isinstance(func, torch.jit.ScriptFunction):
        if is_builtin(func):
            check_arguments(func, arguments, kwargs)
            return Kind.SCRIPT_CALL, 0, (func, arguments, kwargs)
    elif not callable(func):
        # torch's words come first.
        raise TypeError(f"function should be callable. It is {_shown(func)}")
    if _default_pickler is not _internal_rpc_pickler:
        pickled = _default_pickler.serialize(PythonUDF(func, arguments, kwargs or {}))
        return Kind.CALL, FLAG_FOREIGN, (pickled[0], pickled[1])  # type: ignore[return-value]
    return Kind.CALL, 0, (func, arguments, kwargs)


def _positional(args: Any) -> tuple[Any, ...]:
    if args is None:
        return ()
    # These can be iterated over, and never are meant to be.
    if isinstance(args, (str, bytes, torch.Tensor)) or not isinstance(args, Iterable):
        raise TypeError(
            f"args is {_shown(args)}: expected positional arguments in a tuple, as in (x,)"
        )
    return tuple(args)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait for all ``rpc_async`` calls that the block makes; not if it is interrupted."""
    futures = _thread_local_var.future_list = []
    try:
        try:
            yield
        except Exception:
            wait_all(futures)
            raise
        wait_all(futures)
    finally:
        del _thread_local_var.future_list


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Have calls pickled by something else."""
    global _default_pickler  # noqa: PLW0603  # torch's state
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def get_rpc_timeout() -> float:
    """Seconds that a call waits by default; 0: for ever.

    Raises:
        RpcError: this process is in no group.
    """
    seconds: float = _agent().default_timeout
    return seconds


def _set_rpc_timeout(timeout: float) -> None:
    """For calls that are made from here on."""
    _agent().default_timeout = float(timeout)


# -- together -------------------------------------------------------------------------------------


def _all_gather(
    obj: Any,
    worker_names: Collection[str] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> dict[str, Any]:
    """Every worker's object, by worker's name.

    Collective: each of ``worker_names`` (by default all members of this epoch) calls it. Blocks.

    Raises:
        DeadlineExceeded: some have not called it in time; says who.
        PeerLost: one of them is gone, and has not called it before.
    """
    agent = _agent()
    names = (
        sorted(each.name for each in agent.infos())
        if worker_names is None
        else sorted(worker_names)
    )
    me = agent.me.name
    if me not in names:
        raise RpcError(f"{me} is not among the workers that gather: {', '.join(names)}")
    leader = names[0]
    seconds = agent.default_timeout if timeout < 0 else timeout
    limit = seconds or None
    # The names stand for the epoch: a worker that comes or goes makes another group of them.
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
        if isinstance(agent, Agent):
            # Who waits must notice when the others die, also those that it has never called.
            for name in names if me == leader else [leader]:
                if name not in state.gathered_objects and not state.proceed_signal.is_set():
                    agent.watch(name)
        with agent.waiting():
            wait_gathered(state, deadline, limit, names)
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
    """Runs on the leader."""
    names = worker_names or [each.name for each in _agent().infos()]
    _gatherings.add(tuple(sequence_id), names, worker_name, obj)


def _broadcast_to_followers(sequence_id: tuple[str, ...], objects_map: dict[str, Any]) -> None:
    """Runs on each of the others."""
    _gatherings.put(tuple(sequence_id), objects_map)


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
    """Wait until each of these workers has come here."""
    _all_gather(None, set(worker_names))


# -- leaving --------------------------------------------------------------------------------------


def _wait_all_workers(timeout: float = constants.DEFAULT_SHUTDOWN_TIMEOUT) -> dict[str, Any]:
    """Wait until every worker has come to its end. Returns what each had done by then.

    Raises:
        DeadlineExceeded: some have not; says who.
    """
    agent = _agent()
    try:
        return _all_gather(_work_of(agent) if isinstance(agent, Agent) else None, timeout=timeout)
    except RuntimeError as error:
        logger.error("Failed to respond to 'Shutdown Proceed' in time, got error %s", error)  # noqa: TRY400  # raised below
        raise


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Give up all references to values of others, and wait until their owners know."""
    agent = _agent()
    if isinstance(agent, Agent):
        agent.rrefs.delete_all(timeout)


def shutdown(graceful: bool = True, timeout: float = constants.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group. Everything that the agent holds is given back, also if this raises.

    Args:
        graceful: in a static group, first wait until all workers call it, and until nobody has calls under
            way: collective, blocks. In a dynamic group, until this worker has no calls under way.
        timeout: seconds for waiting; 0: for ever.

    Raises:
        DeadlineExceeded: others have not come in time; says who.
        PeerLost: another one of a static group is gone.
        RpcError: this process is in no group; or values of this worker are still referred to by others; or
            a function that is being served calls this.
    """
    agent = _agent()
    if not isinstance(agent, Agent):
        try:
            agent.shutdown(graceful, timeout)
        finally:
            _finalize_shutdown()
        return
    if graceful and SERVING.get() is not None:
        raise RpcError(
            "shutdown() in a function that another worker has called would wait for this very call: let the"
            " function tell the main thread (threading.Event) to do it, or use graceful=False"
        )
    deadline = Deadline(timeout or None)
    patience = _CLOSING
    try:
        if graceful:
            first: dict[str, Any] | None = None
            if not isinstance(agent.group, DynamicGroup):
                first = _wait_all_workers(timeout)
            left = deadline.remaining()
            # Without an argument where there is no limit: programs, and torch's tests, put theirs in its place.
            _delete_all_user_and_unforked_owner_rrefs(*(() if left is None else (left,)))
            _quiesce(agent, deadline, first)
            # Others may still wait for the answers to their last words.
            agent.wait_idle(Deadline(_LAST_WORDS))
            if not _ignore_rref_leak:
                leaks = agent.rrefs.leaks()
                if leaks:
                    raise RpcError("Leaking RRefs: Leaking RRef: " + "; ".join(leaks))
    except BaseException as error:
        if not isinstance(error, Exception):
            # Ctrl-C: whoever pressed it has waited enough.
            patience = _AT_ONCE
        raise
    finally:
        _finalize_shutdown(patience)


def _quiesce(agent: Agent, deadline: Deadline, first: dict[str, Any] | None) -> None:
    """Wait until no call is under way: late ones, made by functions that still run, are served.

    In a static group that is so when all say so twice in a row, with nobody having made or served a call
    in between (Mattern's two waves).

    Args:
        first: what all have said already, when they came here.
    """
    _wait_idle(agent, deadline)
    if isinstance(agent.group, DynamicGroup):
        return
    names = sorted(each.name for each in agent.infos())
    if len(names) == 1:
        return
    before = first
    while True:
        left = deadline.remaining()
        said = _all_gather(_work_of(agent), names, 0 if left is None else max(left, 0.001))
        # Where more was sent than was served, and nothing changes: calls that were given up are never served, nor
        # is one whose callee has gone.
        if said == before:
            return
        before = said
        _wait_idle(agent, deadline)


def _work_of(agent: Agent) -> tuple[int, int, bool]:
    """How many calls it has made and served for the program, and whether it has nothing to do now."""
    return agent.made.value(), agent.done.value(), agent.is_idle()


def _wait_idle(agent: Agent, deadline: Deadline) -> None:
    if not agent.wait_idle(deadline):
        raise GatherTimeout(
            f"calls were still under way when the shutdown's time was up: {agent.work()}"
        )


def _finalize_shutdown(patience: float = _CLOSING) -> None:
    global _current  # the one agent of the process
    agent, _current = _current, None
    try:
        if isinstance(agent, Agent):
            with contextlib.suppress(RpcError, DeadlineExceeded, OSError):
                if agent.group is not None:
                    agent.group.leave("it has shut down")
            agent.close(patience)
    finally:
        agent_in_use.set_current_agent(None)
        _gatherings.clear()


# -- for people -----------------------------------------------------------------------------------


def statistics() -> dict[str, Any]:
    """What this worker has done, and what is under way, as numbers and lists that JSON takes.

    Returns:
        ``calls``: sent, served, failed, under way; ``latency_s``: quantiles in seconds; ``peers``, ``rrefs``, and the
        transports that could not be used with the reason. The counts are statistics, and may lag by a call.

    Raises:
        RpcError: the backend is not the native one, or this process is in no group.
    """
    agent = _agent()
    if not isinstance(agent, Agent):
        raise RpcError(f"a {type(agent).__name__} has no statistics: use the native backend")
    counters = agent.counters
    return {
        "worker": {"name": agent.me.name, "id": agent.me.id},
        "calls": {
            "sent": counters.sent,
            "served": counters.served,
            "failed": counters.failed,
            "under_way": int(agent.debug_info()["agent.client_active_calls"]),
            "being_served": int(agent.debug_info()["agent.server_active_calls"]),
            "queue": agent.queue(),
        },
        "latency_s": {
            "p50": counters.quantile(0.5),
            "p99": counters.quantile(0.99),
        },
        "changed_frames": agent.lines.num_changed,
        "peers": agent.peers(),
        "rrefs": agent.rrefs.overview(),
        "transports_skipped": dict(agent.skipped),
    }


def _rref_context_get_debug_info() -> dict[str, str]:
    agent = _agent()
    source = agent.rrefs.debug_info if isinstance(agent, Agent) else agent.rref_debug_info
    info: dict[str, str] = source()
    return info


def _get_debug_info() -> dict[str, str]:
    info = dict(_rref_context_get_debug_info())
    info.update(_agent().get_debug_info())
    with contextlib.suppress(Exception):
        import torch.distributed.autograd

        dist_autograd: Any = torch.distributed.autograd
        info.update(dist_autograd._get_debug_info())
    return info


def enable_gil_profiling(flag: bool) -> None:
    """torch's switch for a measurement of its C++ agent; here it only adds the key to the debug information."""
    _agent().enable_gil_profiling(flag)


__all__ = [
    "AllGatherStates",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "members",
    "on_join",
    "on_leave",
    "remote",
    "rpc_async",
    "rpc_stream",
    "rpc_sync",
    "shutdown",
    "statistics",
    "wait_for",
]

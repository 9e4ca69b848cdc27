"""Calls to functions on other workers: blocking, as a future, or as a stream of items."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from typing import Any, TypeVar

import torch
from torch.futures import Future

from rallypoint._core.whole_numbers import is_whole

from . import constants
from .collect import wait_all
from .connections.messages import FLAG_FOREIGN, Kind
from .current_agent import required_agent
from .internal import PythonUDF, _internal_rpc_pickler
from .serialization.script import check_arguments, is_builtin
from .stream import WINDOW, RpcStream, single_result
from .time_limits import limit_of
from .worker_info import WorkerInfo


T = TypeVar("T")

_BUILTIN_TYPE = type(torch.add)
_NOT_SEVERAL = (str, bytes, Mapping, AbstractSet, torch.Tensor)
# State under torch's names, which programs and torch's own tests use.
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> T:
    """Run a function on a worker and return its result. Blocks.

    Args:
        to: name, rank or info of the worker, which may be this one.
        func: a function that both workers can import under the same module and name; may be ``async def``.
        args, kwargs: its arguments. Tensors must be on the CPU, or on a device of a device map.
        timeout: seconds; 0: no limit. The default is the ``rpc_timeout`` of the options. If this code itself serves a
            call, the remaining time of that call is an upper limit.

    Returns:
        What the function returned. Tensors are on the CPU, or on the device that the device map assigns.

    Raises:
        RpcError: there is no such worker, or this process is not in a group.
        RpcTimeout: no reply arrived in time. The function may still run.
        PeerLost: the worker is gone.
        NotAllowed: the worker's options do not allow this call.
        Exception: what the function raised, with its own type if this process has it, else as ``RemoteError``.
    """
    agent = required_agent()
    kind, flags, content = prepare(func, args, kwargs)
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
        to: name, rank or info of the worker, which may be this one.
        func: a function that both workers can import under the same module and name; may be ``async def``.
        args, kwargs: its arguments. Tensors must be on the CPU, or on a device of a device map.
        timeout: seconds, as for :func:`rpc_sync`.

    Returns:
        A future of the result, which is also a ``torch.futures.Future``. ``wait()`` blocks and raises what
        :func:`rpc_sync` would; it can be awaited in a coroutine, and cancelled.

    Raises:
        RpcError: there is no such worker, or this process is not in a group.
    """
    agent = required_agent()
    kind, flags, content = prepare(func, args, kwargs)
    future: Future[T] = agent.call_async(to, kind, func, content, timeout, flags)
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


def rpc_stream(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
    *,
    window: int = WINDOW,
) -> RpcStream[Any]:
    """Run a generator function (``async def`` too) on a worker, and iterate over its items as they arrive.

    Args:
        to: name, rank or info of the worker, which may be this one.
        func: a generator function that both workers can import under the same module and name.
        args, kwargs: its arguments.
        timeout: seconds for the whole stream; as for :func:`rpc_sync`.
        window: how many items may be sent ahead of the consumer. The generator pauses at this number.

    Returns:
        An iterator, also for ``async for``. Each step blocks until the next item arrives, and raises the same errors as
        :func:`rpc_sync`. Closing or dropping it closes the generator.

    Raises:
        RpcError: there is no such worker, or this process is not in a group.
        TypeError: one of the arguments has the wrong type; a coroutine function, for example, yields nothing.
        ValueError: ``window`` is less than 1.
    """
    _, _, content = prepare(func, args, kwargs)
    if inspect.iscoroutinefunction(func):
        raise single_result(func)
    if not is_whole(window):
        raise TypeError(f"window is {window!r}: expected an integer")
    if window < 1:
        raise ValueError(f"window is {window!r}: expected at least 1; no item would ever be sent")
    stream: RpcStream[Any] = required_agent().call_stream(to, func, content, timeout, window)
    return stream


def prepare(
    func: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[int, int, tuple[Any, tuple[Any, ...], dict[str, Any] | None]]:
    """The message for a call: its kind, its flags, and the function with its arguments.

    Raises:
        TypeError: one of them has the wrong type.
        RuntimeError: the arguments do not match torch's operator.
    """
    arguments = args if type(args) is tuple else positional(args)
    if kwargs is not None and type(kwargs) is not dict and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is {_shown(kwargs)}: expected a dict of keyword arguments")
    if kwargs and not all(type(each) is str or isinstance(each, str) for each in kwargs):
        raise TypeError(f"kwargs is {_shown(kwargs)}: expected names of arguments as its keys")
    if type(func) is _BUILTIN_TYPE or isinstance(func, torch.jit.ScriptFunction):
        if is_builtin(func):
            check_arguments(func, arguments, kwargs)
            return Kind.SCRIPT_CALL, 0, (func, arguments, kwargs)
    elif not callable(func):
        # torch's words.
        raise TypeError(f"function should be callable. It is {_shown(func)}")
    if _default_pickler is not _internal_rpc_pickler:
        pickled = _default_pickler.serialize(PythonUDF(func, arguments, kwargs or {}))
        return Kind.CALL, FLAG_FOREIGN, (pickled[0], pickled[1])  # type: ignore[return-value]
    return Kind.CALL, 0, (func, arguments, kwargs)


def positional(args: Any) -> tuple[Any, ...]:
    """The positional arguments of a call, as the user gave them.

    Raises:
        TypeError: they are not in a tuple or list.
    """
    if args is None:
        return ()
    # Iterable, but certainly a mistake.
    is_one = isinstance(args, _NOT_SEVERAL) or hasattr(args, "__array__")
    if is_one or not isinstance(args, Iterable):
        raise TypeError(
            f"args is {_shown(args)}: expected positional arguments in a tuple, as in (x,)"
        )
    return tuple(args)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _wait_all(contextlib.AbstractContextManager[None]):  # noqa: N801  # a function in torch
    """Wait for all ``rpc_async`` calls made in the block, unless it is interrupted.

    A class, since contextlib's generators assign to the exceptions that leave a block, which not every exception allows.
    """

    def __enter__(self) -> None:
        self._futures = _thread_local_var.future_list = []

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                wait_all(self._futures)
        finally:
            del _thread_local_var.future_list


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pickle calls with another pickler."""
    global _default_pickler  # noqa: PLW0603  # torch's state
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def read_foreign(content: Any) -> tuple[Any, Any, Any]:
    """A call pickled with another pickler: function, positional and keyword arguments."""
    data, tensors = content
    call = _default_pickler.deserialize(data, tensors)
    return call.func, call.args, call.kwargs


def get_rpc_timeout() -> float:
    """The default timeout of calls.

    Returns:
        Seconds; 0: no limit.

    Raises:
        RpcError: this process is not in a group.
    """
    seconds: float = required_agent().default_timeout
    return seconds


def _set_rpc_timeout(timeout: float) -> None:
    """Set the default timeout of later calls."""
    agent = required_agent()
    limit_of(timeout)  # or every later call would fail
    agent.default_timeout = float(timeout)

"""Function calls: sent to the workers, run there, and their results sent back.

Theory of operation
-------------------
The caller pickles the call (function, arguments, ``setup``) once into a memory file, which each worker
maps. Each worker writes its result to a memory file of its own, which the caller reads when all have
ended. Only processes that the caller started hold these descriptors, so no other process can write
to them: this is the only place in the package that unpickles without authentication.

Functions of importable modules are pickled by name. Functions of ``__main__``, lambdas, closures, and
objects of modules that a worker could not import (loaded from a path, as pytest does) are pickled by
value. Their classes keep their identity: a returned instance has the caller's class.

With launch method ``fork`` the worker has the call already; only results are pickled.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import mmap
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, TextIO

from rallypoint._core import code_files, collector, env as environment, forks, limits, linux, raised
from rallypoint.errors import ConfigError, LaunchError
from rallypoint.launch import torch_private
from rallypoint.launch.multiprocess_config import MultiprocessConfig

from . import process_group
from .job import WorkerFds


# Depth of the search for the object that cannot be pickled.
_MAX_DEPTH = 4
# Size of the length field before the JSON part of a packed call.
_LENGTH_BYTES = 8

_by_value_lock = forks.Lock()


@dataclass(frozen=True, slots=True)
class Call:
    """What each worker is to call.

    Args:
        setup: called first, before the process group is formed.
    """

    func: Callable[..., Any]  # Any: the user's
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    setup: Callable[[], object] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerFacts:
    """What a worker inherits from the calling process.

    Args:
        cfg: without the fields that differ between workers; their environment has those.
        argv: the caller's ``sys.argv``.
        log_level: the level of the caller's root logger.
        joins: another launch serves the store.
    """

    cfg: MultiprocessConfig
    argv: tuple[str, ...]
    log_level: int
    joins: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CallerFacts:
        record: dict[str, Any] = json.loads(data)
        return cls(
            cfg=MultiprocessConfig(**record["cfg"]),
            argv=tuple(record["argv"]),
            log_level=record["log_level"],
            joins=record["joins"],
        )


# -- in the caller --------------------------------------------------------------------------------


def pack(call: Call, facts: CallerFacts, *, installed_only: bool = False) -> int:
    """Pickle the call into a memory file; the caller owns the descriptor.

    Args:
        call: what to pickle.
        facts: what goes with it.
        installed_only: workers may be on other hosts, which have only what is installed; other modules go by value.

    Raises:
        ConfigError: a part of it, which the error names, cannot be pickled.
        OSError: a limit of the system, such as that of the size of files.
    """
    fd = linux.memfd_create("rally-call", linux.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            head = facts.to_json()
            file.write(len(head).to_bytes(_LENGTH_BYTES) + head)
            with _by_value(call, _is_installed if installed_only else _can_be_imported):
                try:
                    _dump(call, file)
                except Exception as error:  # a user's __reduce__ may raise anything
                    if limits.explain(error) is not None:
                        raise
                    raise _unpicklable(call, error) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def unpack_result(rank: int, data: bytes) -> Any:  # Any: what the user's function returned
    """Load what a worker returned.

    Raises:
        LaunchError: it cannot be unpickled here.
    """
    try:
        return pickle.loads(data)  # noqa: S301  written by a worker that we started: see the top
    except Exception as error:
        raise LaunchError(
            f"the result of rank {rank} cannot be loaded here: {_in_a_line(error)};"
            " return plain data (numbers, CPU tensors, containers of them)"
        ) from error


def name_of(func: object) -> str:
    """The name of ``func`` for messages."""
    inner = _unwrapped(func)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _dump(what: object, file: Any) -> None:  # Any: only write() is needed
    import cloudpickle

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        dispatch_table = code_files.keeping(cloudpickle.Pickler.dispatch_table)

    ByValue(file, protocol=pickle.HIGHEST_PROTOCOL).dump(what)


@contextmanager
def _by_value(call: Call, is_there: Callable[[ModuleType, str], bool]) -> Iterator[None]:
    """Within the block, have cloudpickle pickle by value the objects of modules that a worker does not have."""
    import cloudpickle

    things = [_unwrapped(thing) for thing in (call.func, call.setup, *call.args)]
    things += [_unwrapped(thing) for thing in call.kwargs.values()]
    names = {getattr(thing, "__module__", None) or type(thing).__module__ for thing in things}
    with _by_value_lock:  # cloudpickle's table is global
        registered = cloudpickle.list_registry_pickle_by_value()
        modules = [
            sys.modules[name]
            for name in names
            if name in sys.modules
            and name not in registered
            and name != "__main__"  # always pickled by value
            and not is_there(sys.modules[name], name)
        ]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType, name: str) -> bool:
    """Whether a module is part of Python or of an installed package, so that hosts with the same interpreter have it."""
    file = getattr(module, "__file__", None)
    if file is None or name.partition(".")[0] == "rallypoint":
        return True
    places = {sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(os.path.realpath(file).startswith(os.path.realpath(each) + "/") for each in places)


def _can_be_imported(module: ModuleType, name: str) -> bool:
    """Whether an import in a new process would find this module."""
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        package = sys.modules.get(parent)
        path = getattr(package, "__path__", None)
        if package is None or path is None or not _can_be_imported(package, parent):
            return False
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # noqa: BLE001, S112  a user's finder may raise anything
            continue
        if spec is not None:
            origin = getattr(module.__spec__, "origin", None)
            return origin is None or spec.origin is None or spec.origin == origin
    return False


def _unwrapped(thing: object) -> object:
    """The function inside partials and bound methods."""
    while True:
        inner = getattr(thing, "func", None) if _is_partial(thing) else None
        if isinstance(thing, MethodType):
            inner = thing.__func__
        if inner is None:
            return thing
        thing = inner


def _is_partial(thing: object) -> bool:
    from functools import partial

    return isinstance(thing, partial)


class _Nowhere:
    """A file that discards what is written."""

    def write(self, data: Any) -> int:  # Any: any buffer
        return memoryview(data).nbytes


def _why_not(thing: object) -> BaseException | None:
    """Why ``thing`` cannot be pickled, or None."""
    try:
        _dump(thing, _Nowhere())
    except Exception as error:  # noqa: BLE001  a user's __reduce__ may raise anything
        return error
    return None


def _unpicklable(call: Call, error: BaseException) -> ConfigError:
    """The error that names the smallest part of the call that cannot be pickled."""
    name = name_of(call.func)
    parts: dict[str, object] = {f"the function {name!r}": call.func}
    parts |= {f"argument {index} of {name!r}": value for index, value in enumerate(call.args)}
    parts |= {f"argument {key!r} of {name!r}": value for key, value in call.kwargs.items()}
    parts |= {} if call.setup is None else {f"the setup {name_of(call.setup)!r}": call.setup}
    where, what = f"the call of {name!r}", None
    for label, part in parts.items():
        found = _why_not(part)
        if found is not None:
            inside, what, error = _innermost(part, found, _MAX_DEPTH)
            where = label + inside
            break
    kind = "" if what is None else f" ({_kind(what)})"
    return ConfigError(
        "launch_subprocesses",
        None,
        f"{where}{kind} cannot be pickled, so it cannot be sent to workers: {_in_a_line(error)}",
        "create it inside the function, or set launch_method='fork', which needs no pickling",
    )


def _innermost(
    thing: object, error: BaseException, depth: int
) -> tuple[str, object, BaseException]:
    """The innermost part of ``thing`` that cannot be pickled: its path within ``thing``, the part, the error."""
    for label, part in _parts(thing) if depth else ():
        found = _why_not(part)
        if found is not None:
            inside, what, error = _innermost(part, found, depth - 1)
            return f", {label}{inside}", what, error
    return "", thing, error


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if _is_partial(thing):
        yield "its function", thing.func  # type: ignore[attr-defined]
        yield from _parts(thing.args)  # type: ignore[attr-defined]
        yield from _parts(thing.keywords)  # type: ignore[attr-defined]
    elif isinstance(thing, MethodType):
        yield "the object it is bound to", thing.__self__
    elif isinstance(thing, FunctionType):
        try:
            outer = inspect.getclosurevars(thing)
        except ValueError:  # a variable that has no value yet
            return
        for name, value in {**outer.nonlocals, **outer.globals}.items():
            yield f"its variable {name!r}", value
        for value in thing.__defaults__ or ():
            yield "a default argument", value
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield f"its item {key!r}", value
    elif isinstance(thing, (list, tuple)):
        for index, value in enumerate(thing):
            yield f"its item {index}", value
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, ModuleType)):
        for name, value in vars(thing).items():
            yield f"its attribute {name!r}", value


def _kind(thing: object) -> str:
    kind = type(thing)
    name = kind.__qualname__
    return name if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}.{name}"


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# -- in a worker ----------------------------------------------------------------------------------


def run(fds: WorkerFds) -> None:
    """In a worker: load the call, join the job, call, store the result."""
    assert fds.payload is not None
    # Map it: workers share the descriptor's offset, so read() would move it for all. Pages are shared too.
    with mmap.mmap(fds.payload, 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:_LENGTH_BYTES])
        start = _LENGTH_BYTES + length
        facts = CallerFacts.from_json(data[_LENGTH_BYTES:start])
        sys.argv = list(facts.argv)
        with memoryview(data) as view, view[start:] as packed:
            call = _load(packed)
    run_call(fds, call, facts)


def _load(packed: memoryview) -> Call:
    try:
        # This imports the modules of the call: torch, too, if this process is no fork.
        with collector.paused():
            call: Call = pickle.loads(packed)  # noqa: S301  written by the caller of this job: see the top
    except ImportError as error:
        _show_less(error)
        raise LaunchError(
            f"a worker cannot load the call: {_in_a_line(error)}; it looked along the caller's sys.path."
            " Put the module there, or call cloudpickle.register_pickle_by_value(module)"
        ) from error
    except Exception as error:
        _show_less(error)
        raise LaunchError(f"a worker cannot load the call: {_in_a_line(error)}") from error
    return call


def _show_less(error: BaseException) -> None:
    """Remove our own frame from the traceback."""
    frames = error.__traceback__
    raised.set_traceback(error, frames and frames.tb_next)


def run_in_fork(fds: WorkerFds, call: Call, facts: CallerFacts) -> None:
    """Run the call in a worker that is a fork of the caller (launch method ``fork``)."""
    torch_private.forget_children()
    _use_own_streams()
    process_group.use_one_thread()
    run_call(fds, call, facts)


def run_call(fds: WorkerFds, call: Call, facts: CallerFacts) -> None:
    """Join the job, call, store the result in its memory file."""
    own_pid = os.getpid()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Several workers share the output: write whole lines, at once.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    cfg = facts.cfg.with_environment(environment.snapshot())
    assert cfg.rank is not None
    if call.setup is not None:
        _call_setup(call.setup)
    _set_up_logging(cfg, facts.log_level)
    if facts.joins:
        assert cfg.master_addr is not None
        assert cfg.master_port is not None
        process_group.wait_for_store(cfg.master_addr, cfg.master_port)
    process_group.init_dist(cfg)
    # An exception from here on ends the process without leaving the group: leaving it while others
    # still compute may block (NCCL) and would delay the report.
    result = None
    try:
        result = call.func(*call.args, **call.kwargs)
    except SystemExit as error:
        if error.code:
            raise
    if os.getpid() != own_pid:
        return  # a fork made by the function returned here: it is not the worker
    _leave_result(fds, cfg.rank, result)
    process_group.leave_dist()


def _call_setup(setup: Callable[[], object]) -> None:
    try:
        setup()
    except SystemExit as error:
        if error.code:
            raise
        # Exit code 0 would not count as a failure, and the other ranks would wait for this one.
        raise LaunchError("setup called sys.exit(): this rank cannot join the others") from error


def _leave_result(fds: WorkerFds, rank: int, result: object) -> None:
    assert fds.result is not None
    try:
        with open(fds.result, "wb", closefd=False) as file:
            _dump(result, file)
    except Exception as error:  # noqa: BLE001  a user's __reduce__ may raise anything
        if (reached := limits.explain(error)) is not None:
            raise LaunchError(f"the result of rank {rank} cannot be stored: {reached}") from None
        inside, what, error_inside = _innermost(result, error, _MAX_DEPTH)
        inner = f"{inside} ({_kind(what)})," if inside else ""
        raise TypeError(
            f"the result of rank {rank}, of type {_kind(result)}{inner or ','} cannot be pickled:"
            f" {_in_a_line(error_inside)}. Return plain data: numbers, tensors, containers of them"
        ) from None


def _set_up_logging(cfg: MultiprocessConfig, level: int) -> None:
    """Log lines with the rank, unless the user has configured logging (in ``setup`` or on import)."""
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    place = f"[rank {cfg.rank}/{cfg.world_size}]"
    handler.setFormatter(logging.Formatter(f"{place} %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)


# -- in a fork of the caller ----------------------------------------------------------------------


def _use_own_streams() -> None:
    """Write to descriptors 1 and 2. In a notebook the caller's streams are different ones, which forks cannot use."""
    sys.stdout = _stream_on(1, sys.stdout)
    sys.stderr = _stream_on(2, sys.stderr)


def _stream_on(fd: int, stream: TextIO) -> TextIO:
    try:
        if stream.fileno() == fd:
            return stream
    except (OSError, ValueError, AttributeError):
        pass
    file = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), errors="replace", line_buffering=True)

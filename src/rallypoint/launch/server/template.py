"""A template: a fork of the fork server that imports more packages, and from which the next workers are forked.

The imports run here, not in the fork server, so one that crashes, hangs or starts a thread costs only this
process. See ``learning`` for which packages these are.

[Note: Forks of a template] These workers, like any others, must be children of the fork server. So a template forks a
*midwife*, which forks the workers of one batch, reports their pids and exits. The workers then become children of the
fork server, the nearest subreaper. Each waits for that, and for word that its pid has been reported. If its
midwife ends first, it exits without having run any code, and the fork server starts that worker itself.

[Note: Workers in waiting] Forking so large a process takes some 10 ms, and a worker takes two forks, while survivors
wait for it. So a template also forks workers *ahead*: they become children of the fork server like any others, and then
wait for their start, each on its own line. Signals that arrive meanwhile are meant for others.

Messages to the template: ``spawn``, as to the fork server · ``wait``: fork a worker ahead (``name``; its descriptor: the
line on which its ``spawn`` will come). Reports (``is``): ``importing`` · ``imported`` · ``ready`` · ``forked``.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import os
import select
import signal
import site
import socket
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rallypoint._core import collector, env as environment, linux, process, supervisor_line
from rallypoint.launch import signals
from rallypoint.launch.worker import ending

from . import learning
from .channel import Channel, Message


# Starts a worker in this fork; takes its "spawn" message and what the imports have changed in the environment.
Become = Callable[[Message, list[int], Mapping[str, str | None]], None]
_FEW = 8


def run(
    channel: Channel, packages: Sequence[str], paths: Sequence[str], become: Become
) -> NoReturn:
    """Import the packages, report, and fork workers until the fork server closes the channel.

    Args:
        channel: to the fork server.
        packages: what to import.
        paths: folders that workers search for modules first, and the fork server does not.
        become: turns a fork into a worker.
    """
    process.set_title("rally: template of the next workers")
    output = linux.memfd_create("rally-output", linux.MFD_CLOEXEC)
    for fd in (1, 2):
        os.dup2(output, fd)
    before = environment.snapshot()
    changes: dict[str, str | None] = {}
    with collector.paused():
        for package in packages:
            channel.send({"is": "importing", "package": package})
            seen, changed = _import(package, paths, output)
            changes |= changed
            channel.send({"is": "imported", "package": package, "seen": to_json(seen)})
            if seen.error:
                os._exit(1)
        collector.settle()
    os.close(output)  # workers would inherit it
    environment.apply({name: before.get(name) for name in changes})
    ending.flush_quietly()
    ctypes.CDLL(None).fflush(None)
    channel.send({"is": "ready"})
    poller = select.poll()
    while not channel.closed_by_peer:
        poller.register(channel.fileno(), select.POLLIN | select.POLLOUT * channel.wants_write())
        poller.poll()
        channel.flush()
        spawns = channel.receive(_FEW)
        if spawns:
            _fork_batch(channel, spawns, become, changes)
        for _, fds in spawns:
            for fd in fds:
                os.close(fd)
    os._exit(0)


# -- forking: see [Note: Forks of a template] -------------------------------------------------------


def _fork_batch(
    channel: Channel,
    spawns: list[tuple[Message, list[int]]],
    become: Become,
    changes: Mapping[str, str | None],
) -> None:
    template = os.getpid()
    midwife = os.fork()
    if midwife:
        os.waitpid(midwife, 0)
        return
    try:
        process.die_with_parent(template)
        pid_here, own = os.getpid(), linux.pidfd_open(os.getpid())
        signals.block()  # until the workers are set up
        for message, fds in spawns:
            go, say_go = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
            if pid == 0:
                try:
                    others = {fd for _, each in spawns for fd in each}.difference(fds)
                    channel.close()
                    for fd in (*others, say_go):
                        os.close(fd)
                    _wait_to_be_adopted(go, pid_here, own)
                    if message["do"] == "wait":
                        message, fds = _awaited_start(fds[0])
                    become(message, fds, changes)
                finally:
                    os._exit(1)
            os.close(go)
            channel.send({"is": "forked", "name": message["name"], "pid": pid})
            while channel.wants_write() and not channel.closed_by_peer:
                poller = select.poll()
                poller.register(channel.fileno(), select.POLLOUT)
                poller.poll()
                channel.flush()
            if not channel.closed_by_peer:
                os.write(say_go, b"g")
            os.close(say_go)
    finally:
        os._exit(0)


def _wait_to_be_adopted(go: int, midwife: int, pidfd: int) -> None:
    """In a worker: wait until it has been reported and is a child of the fork server.

    Args:
        go: readable once it has been reported.
        midwife: the pid of the process that forked it, and is about to end.
        pidfd: a pidfd of that process.
    """
    if os.read(go, 1) != b"g":
        os._exit(1)
    os.close(go)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()  # the kernel hands its children over first
    os.close(pidfd)
    while os.getppid() == midwife:
        # What takes a pidfd's place on an old kernel is ready some microseconds earlier.
        threading.Event().wait(0.0005)


def _awaited_start(line: int) -> tuple[Message, list[int]]:
    """In a worker that was forked ahead: wait for its start. Exits if none will come."""
    process.set_title("rally: next worker")
    channel = Channel(socket.socket(fileno=line))
    poller = select.poll()
    poller.register(line, select.POLLIN)
    while True:
        poller.poll()
        signals.forget_blocked()
        if starts := channel.receive(1):
            channel.close()
            return starts[0]
        if channel.closed_by_peer:
            os._exit(0)


# -- importing ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    """What an import must leave as it was."""

    threads: int
    files: frozenset[tuple[str, str]]
    processes: tuple[int, ...]
    handlers: tuple[object, ...]
    folder: str
    path: tuple[str, ...]
    hooks: tuple[object, ...]
    output: int


def _state(output: int) -> _State:
    files = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            files.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:  # that of the listing itself
            continue
    return _State(
        threads=len(os.listdir("/proc/self/task")),
        files=frozenset(files),
        processes=tuple(process.children(os.getpid())),
        handlers=tuple(signal.getsignal(each) for each in sorted(signal.valid_signals())),
        folder=os.getcwd(),
        path=tuple(sys.path),
        hooks=(sys.excepthook, sys.unraisablehook, sys.displayhook, sys.getrecursionlimit()),
        output=os.fstat(output).st_size,
    )


_LEFT = {
    "threads": "starts a thread",
    "files": "leaves a file open",
    "processes": "starts a process",
    "handlers": "handles a signal",
    "folder": "changes the working folder",
    "path": "changes sys.path",
    "hooks": "changes a setting of the interpreter",
    "output": "prints",
}


def _import(
    package: str, paths: Sequence[str], output: int
) -> tuple[learning.Observation, dict[str, str | None]]:
    before, modules, libraries = _state(output), set(sys.modules), _libraries()
    error = ""
    with environment.watched() as reads, supervisor_line.nothing_awaited():
        try:
            importlib.import_module(package)
        except BaseException as raised:  # noqa: BLE001  any error of an import is reported, SystemExit too
            error = f"{type(raised).__name__}: {raised}".splitlines()[0][:200]
    changes = reads.changes()
    ending.flush_quietly()
    ctypes.CDLL(None).fflush(None)
    after = _state(output)
    left = [text for name, text in _LEFT.items() if getattr(before, name) != getattr(after, name)]
    if _is_cuda_initialized():
        left.append("initialises CUDA")
    packages, system = _folders()
    files = {name: _file_of(sys.modules[name]) for name in set(sys.modules) - modules}
    installed = (*packages, *system)
    libraries = _libraries() - libraries
    unknown = {learning.unknown_library(each, packages, system) for each in libraries}
    seen = learning.Observation(
        error=error,
        reads=frozenset(reads.names),
        reads_all=reads.everything,
        sets=frozenset(changes),
        foreign=tuple(
            sorted(
                name
                for name, file in files.items()
                if file and not learning.is_installed(file, installed)
            )
        ),
        hidden=tuple(sorted(_in_folders(files, paths))),
        native=tuple(sorted(unknown - {""})),
        left=tuple(left),
    )
    return seen, changes


def _file_of(module: types.ModuleType | None) -> str:
    """The file that a module was loaded from; "" for built-in ones."""
    if not isinstance(module, types.ModuleType):
        return ""
    file = vars(module).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) else ""


def _in_folders(modules: Iterable[str], folders: Sequence[str]) -> Iterator[str]:
    """Which of these top-level modules the folders have too. (We use our own finders: ``sys.path`` is the script's.)"""
    kinds = (
        (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES),
        (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    )
    names = {name for name in modules if "." not in name}
    for folder in folders:
        if os.path.isfile(folder):  # an archive
            yield from names
            continue
        finder = importlib.machinery.FileFinder(folder, *kinds)
        for name in names:
            spec = finder.find_spec(name)
            if (
                spec is not None and spec.loader is not None
            ):  # else a folder that is not a regular package
                yield name


def _libraries() -> set[str]:
    with open("/proc/self/maps", errors="replace") as file:
        paths = {line.split(maxsplit=5)[5].rstrip() for line in file if ".so" in line}
    return {path for path in paths if path.startswith("/")}


def _folders() -> tuple[list[str], list[str]]:
    """Folders with installed packages, and those with Python's own files and the system's libraries."""
    paths = sysconfig.get_paths()
    packages = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        packages.add(site.getusersitepackages())
    # torch and this package may lie elsewhere.
    ours = [
        os.path.dirname(sys.modules[name].__file__ or "")
        for name in ("rallypoint", "torch")
        if name in sys.modules
    ]
    system = {paths["stdlib"], paths["platstdlib"], *ours}
    system |= {f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    return [os.path.realpath(each) for each in packages], sorted(system)


def _is_cuda_initialized() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized())


# -- messages -------------------------------------------------------------------------------------------


def to_json(seen: learning.Observation) -> dict[str, object]:
    """An observation as JSON values."""
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name in seen.__slots__
        for value in [getattr(seen, name)]
    }


def from_json(record: Mapping[str, object]) -> learning.Observation:
    """The observation that :func:`to_json` was given."""
    values = {
        name: (
            (frozenset(value) if name in {"reads", "sets"} else tuple(value))
            if isinstance(value, list)
            else value
        )
        for name, value in record.items()
    }
    return learning.Observation(**values)  # type: ignore[arg-type]  # as to_json made it

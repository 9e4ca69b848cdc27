"""Worker processes for rpc tests: each is a fork of a process that has imported torch and the test's module.

    with Workers(2) as workers:
        workers.run(join)                        # on all of them; the results in rank order
        assert workers.on(0, lambda: rpc.rpc_sync("w1", double, (2,))) == 4
        workers.kill(1)

Cases may be local functions: they travel by value. Names of their module (``double``) are looked up in the workers,
as calls need them. Each worker does one case at a time, on its main thread; what it prints goes to a file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import inspect
import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from huge_pages import use_huge_pages
from pace import pace
from rallypoint._core import collector


# Seconds for one case, unless it says otherwise.
LIMIT = 120.0
_SRC = Path(__file__).parents[1] / "src"
_TESTS = Path(__file__).parent


class CaseFailed(AssertionError):
    """A worker raised, died or did not finish in time; the message includes its traceback."""


# -- in the test ------------------------------------------------------------------------------------


class Workers:
    """``size`` processes that wait for cases.

    Args:
        size: how many; :meth:`more` adds more.
    """

    def __init__(self, size: int, module: types.ModuleType | None = None) -> None:
        caller = inspect.currentframe()
        while module is None and caller is not None:
            found = inspect.getmodule(caller)
            if found is not None and found.__name__ != __name__:
                module = found
            caller = caller.f_back
        assert module is not None
        self._module = module
        self._server = _server()
        self._meeting = self._server.new_meeting()
        self._folder = Path(tempfile.mkdtemp(prefix="rpc-workers-"))
        self._processes: list[_Process] = []
        for _ in range(size):
            self.more(size)

    def more(self, world_size: int | None = None) -> int:
        """Start one more process; returns its number."""
        rank = len(self._processes)
        log = self._folder / f"worker{rank}.log"
        order = {
            "module": self._module.__name__,
            "file": self._module.__file__,
            "rank": rank,
            "world_size": world_size or 0,
            "meeting": self._meeting,
            "log": str(log),
        }
        pid, connection = self._server.fork(order)
        self._processes.append(_Process(pid, connection, log))
        return rank

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._processes]

    def begin(self, rank: int, case: Callable[..., Any], *args: Any) -> Pending:
        """Have a worker start a case."""
        process = self._processes[rank]
        process.connection.send_bytes(cloudpickle.dumps((case, args)))
        return Pending(rank, process)

    def on(self, rank: int, case: Callable[..., Any], *args: Any, limit: float = LIMIT) -> Any:
        """Run a case on one worker, and return its result.

        Raises:
            CaseFailed: it raised, or did not finish in time.
        """
        return self.begin(rank, case, *args).result(limit)

    def run(self, case: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Run a case on all live workers; returns the results in rank order.

        Raises:
            CaseFailed: some failed; says how each did.
        """
        begun = [
            self.begin(rank, case, *args)
            for rank, process in enumerate(self._processes)
            if process.code is None
        ]
        until = time.monotonic() + limit
        found, failures = [], []
        for each in begun:
            try:
                found.append(each.result(max(0.0, until - time.monotonic())))
            except CaseFailed as error:
                failures.append(str(error))
        if failures:
            raise CaseFailed("\n".join(failures))
        return found

    def output(self, rank: int) -> str:
        """What a worker has printed."""
        return self._processes[rank].log.read_text(errors="replace")

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker. It is not reaped, so its pid stays its own. After SIGSTOP, returns once it has stopped."""
        pid = self._processes[rank].pid
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            eventually(lambda: _states(pid) == {"T"})

    def kill(self, rank: int) -> None:
        """Kill a worker as ``kill -9`` does, and reap it."""
        process = self._processes[rank]
        if process.code is None:
            process.code = self._server.end(process.pid)
            process.connection.close()

    def leave(self, rank: int, limit: float = LIMIT) -> int:
        """Have a worker exit as a program does, through its interpreter; returns its exit code."""
        process = self._processes[rank]
        process.connection.send_bytes(b"")
        fd = os.pidfd_open(process.pid)
        try:
            ended = bool(select.select([fd], [], [], limit)[0])
        finally:
            os.close(fd)
        if not ended:
            said = process.whereabouts()
            self.kill(rank)
            raise CaseFailed(f"worker {rank} did not end within {limit:g} s\n{said}")
        self.kill(rank)
        assert process.code is not None
        return process.code

    def close(self) -> None:
        """Kill all of them."""
        for rank in range(len(self._processes)):
            self.kill(rank)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending:
    """A case that a worker has started."""

    def __init__(self, rank: int, process: _Process) -> None:
        self._rank = rank
        self._process = process

    def result(self, limit: float = LIMIT) -> Any:
        """Its result; may be called once.

        Raises:
            CaseFailed: it raised, the worker died, or it did not finish in time; then the worker continues until it is
                killed.
        """
        connection = self._process.connection
        if not wait([connection], limit):
            raise CaseFailed(
                f"worker {self._rank} did not end within {limit:g} s\n{self._process.whereabouts()}"
            )
        try:
            ok, value = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            said = self._process.log.read_text(errors="replace")[-4000:]
            raise CaseFailed(f"worker {self._rank} has ended; it said:\n{said}") from None
        if not ok:
            raise CaseFailed(f"worker {self._rank}:\n{value}")
        return value


class _Process:
    def __init__(self, pid: int, connection: Connection, log: Path) -> None:
        self.pid = pid
        self.connection = connection
        self.log = log
        self.code: int | None = None

    def whereabouts(self) -> str:
        """The stacks of its threads."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self.log.read_text(errors="replace")[-8000:]


class _Server:
    """The process that forks, seen from outside."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path[:0] = {[str(_SRC), str(_TESTS)]!r}\n"
                f"import rpc_workers; rpc_workers.serve({theirs.fileno()}, {os.getpid()})",
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **one},
        )
        theirs.close()
        self._port = int(self._ask({"do": "start"}))
        self._meetings = 0

    def new_meeting(self) -> dict[str, Any]:
        self._meetings += 1
        return {"port": self._port, "prefix": f"{os.getpid()}-{self._meetings}"}

    def fork(self, order: Mapping[str, Any]) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            pid = int(self._ask({"do": "fork", **order}, theirs.fileno()))
        return pid, Connection(ours.detach())

    def end(self, pid: int) -> int:
        return int(self._ask({"do": "end", "pid": pid}))

    def _ask(self, order: Mapping[str, Any], *fds: int) -> Any:
        data = json.dumps(order).encode()
        socket.send_fds(self._sock, [data], fds)
        answer = self._sock.recv(1 << 16)
        if not answer:
            raise RuntimeError(f"the fork server has ended with {self._process.wait(5)}")
        said = json.loads(answer)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["ok"]

    def close(self) -> None:
        self._sock.close()
        self._process.kill()  # its children die with it
        self._process.wait()


_one_server: _Server | None = None


def _states(pid: int) -> set[str]:
    """The states of a process's threads."""
    found = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{task}/stat") as file:
            found.add(file.read().rpartition(")")[2].split()[0])
    return found


def _server() -> _Server:
    global _one_server
    if _one_server is None:
        _one_server = _Server()
        atexit.register(_one_server.close)
    return _one_server


# -- in the process that forks ------------------------------------------------------------------

# Requests served before it is worth half a second to make forks cheaper.
_FEW = 50


def serve(fd: int, parent: int) -> None:
    """Fork workers on request. Single-threaded, so that it may fork."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)

    gc.disable()  # collections are a fifth of the time that these imports take
    import torch.distributed  # noqa: F401  # what takes its time is done once

    import rallypoint.rpc  # noqa: F401

    gc.enable()
    gc.freeze()
    collector.settle()
    port = _fork_store(sock)
    for count in itertools.count():
        if count == _FEW:
            use_huge_pages()
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1)
        if not data:
            return
        order = json.loads(data)
        try:
            match order["do"]:
                case "start":
                    answer: Any = port
                case "fork":
                    _load(order["module"], order["file"])
                    gc.freeze()  # no worker's collector need look through what exists now
                    answer = os.fork()
                    if answer == 0:
                        sock.close()
                        _be_worker(order, fds[0])
                case "end":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(order["pid"], signal.SIGKILL)
                    answer = os.waitstatus_to_exitcode(os.waitpid(order["pid"], 0)[1])
            said = {"ok": answer}
        except Exception:
            said = {"error": traceback.format_exc()}
        for each in fds:
            os.close(each)
        sock.send(json.dumps(said).encode())


def _fork_store(sock: socket.socket) -> int:
    """Have one more process host the store through which all groups meet, so that it survives any worker's death."""
    from torch.distributed import TCPStore

    reader, writer = os.pipe()
    server = os.getpid()
    if os.fork() == 0:
        _die_with(server)
        sock.close()
        os.close(reader)
        # c10d looks up the name of each client, which may take seconds; an IPv4 address's name is in /etc/hosts.
        listener = socket.create_server(("127.0.0.1", 0))
        store = TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        os.write(writer, str(store.port).encode())
        os.close(writer)
        while True:
            signal.pause()
    os.close(writer)
    with os.fdopen(reader) as file:
        return int(file.read())


def _load(name: str, path: str) -> None:
    """Load the test's module, under the name that it has in the test."""
    if name in sys.modules:
        return
    package = name.rpartition(".")[0]
    while package and package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        package = package.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _die_with(parent: int) -> None:
    """Make sure that this process does not outlive its parent, however the parent ends."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# -- in a worker ------------------------------------------------------------------------------------


# Set in workers: this worker's number, how many there are, and where they meet.
rank = -1
world_size = 0
_meeting: dict[str, Any] = {}
# What cases keep for later ones: a case that travels by value has copies of its module's own names.
held: dict[str, Any] = {}
# What the package has logged in this worker since it started.
logged: list[str] = []


def _be_worker(order: Mapping[str, Any], fd: int) -> NoReturn:
    global rank, world_size, _meeting
    _die_with(os.getppid())
    out = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, world_size, _meeting = order["rank"], order["world_size"], order["meeting"]
    logging.getLogger("rallypoint").addHandler(_Noting())
    logging.getLogger("rallypoint").setLevel(logging.INFO)
    connection = Connection(fd)
    try:
        while True:
            work = connection.recv_bytes()
            if not work:
                break
            try:
                case, args = cloudpickle.loads(work)
                answer = cloudpickle.dumps((True, case(*args)))
            except BaseException as error:
                answer = cloudpickle.dumps((False, _tell(error, order["file"])))
            connection.send_bytes(answer)
    except (EOFError, OSError):
        os._exit(0)
    sys.exit(0)


def _tell(error: BaseException, test: str) -> str:
    """The traceback, with the values of the test's own variables."""
    told = traceback.TracebackException.from_exception(error, capture_locals=True)
    for frame in told.stack:
        shown = frame.locals if frame.filename == test else None
        frame.locals = shown and {name: value[:200] for name, value in shown.items()}
    del told.stack[0]
    return "".join(told.format())


class _Noting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logged.append(f"{record.levelname} {record.getMessage()}")


def store() -> Any:
    """The store of this set of workers."""
    import torch.distributed as dist

    from rallypoint._core import resolver

    with resolver.connecting_to("127.0.0.1"):
        shared = dist.TCPStore(
            "127.0.0.1", _meeting["port"], is_master=False, wait_for_workers=False
        )
    return dist.PrefixStore(_meeting["prefix"], shared)


def join(**options: Any) -> None:
    """Become member ``w<rank>`` of the static group of all workers."""
    from rallypoint import rpc
    from rallypoint.rpc import finalization

    finalization._ignore_rref_leak = False
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.NativeRpcBackendOptions(**options),
        store=store(),
    )


def join_dynamic(name: str | None = None, **options: Any) -> None:
    """Become a member of the dynamic group."""
    from rallypoint import rpc

    rpc.init_rpc(
        name or f"w{rank}",
        rpc_backend_options=rpc.NativeRpcBackendOptions(**options),
        store=store(),
    )


def leave() -> None:
    from rallypoint import rpc

    rpc.shutdown()


def resources() -> dict[str, Any]:
    """What this process holds: threads, descriptors by kind, mapped memory of ours."""
    for _ in range(3):  # what a C++ object held is garbage only after that object has gone
        gc.collect()
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{fd}").split("[")[0]] += 1
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:" in line or "/dev/shm" in line for line in maps)
    return {
        "threads": sorted(each.name for each in threading.enumerate()),
        "fds": dict(kinds),
        "shared": shared,
    }


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> Any:
    """Wait until a condition is true; returns its value. ``seconds`` is for a fast machine."""
    seconds *= pace()
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"it has not come about in {seconds:g} s"
        time.sleep(0.002)
    return found


@contextlib.contextmanager
def lone_agent(folder: Path, secret: bytes) -> Iterator[Any]:
    """This process's agent in a group of its own, over all transports, for a test to connect to."""
    from rallypoint import rpc
    from rallypoint.rpc.current_agent import current_agent

    options = rpc.NativeRpcBackendOptions(init_method=f"file://{folder / 'store'}", secret=secret)
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    yield current_agent()
    rpc.shutdown()


@contextlib.contextmanager
def timed(at_most: float, at_least: float = 0.0) -> Iterator[None]:
    """Check how long a block takes; ``at_most`` is for a fast machine."""
    at_most *= pace()
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert at_least <= took <= at_most, f"it took {took:.3f} s, not {at_least:g} to {at_most:g} s"

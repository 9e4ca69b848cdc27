"""A rendezvous of many nodes compared with torch's, in one run on one machine; prints JSON.

    python bench/rendezvous.py --quick
    python bench/rendezvous.py --output bench/results/rendezvous.json --plot bench/results/rendezvous.png

Nodes are threads in 8 processes and use one real store, which another process serves. A node is the handler that each node's
launcher would have. Competitors alternate. See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


# c10d's C++ code warns about every wait that ends without its key. Must be set before torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed as dist
from jobs import Progress, machine, publish, ratio, spread
from torch.distributed.elastic.rendezvous import RendezvousParameters as TorchParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from rallypoint._core import resolver
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends.etcd_store import EtcdStore
from rallypoint.rendezvous.backends.file_store import FileStore
from rallypoint.rendezvous.backends.tcp_home import TcpHome
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.dynamic import DynamicRendezvous, Listener
from rallypoint.rendezvous.fixed_home import FixedHome
from rallypoint.rendezvous.home import Home
from rallypoint.rendezvous.liveness import Loss
from rallypoint.rendezvous.protocol import Timing
from rallypoint.rendezvous.quorum import Settings


PROCESSES = 8
SIZES = [16, 64, 128, 256, 512, 1024, 2048, 4096]
ETCD_SIZES = [16, 64, 256]
FILE_SIZES = [16, 64, 128]
IDLE_SIZES = [16, 64, 256, 1024]
IDLE_SECONDS = 5.0
# Nodes join within this time, or not at all; a rival that needs longer is not asked for more nodes.
LIMIT = 120.0
# torch notices a loss after 15 s, and makes its next round after the last call.
TORCH_LOSS_SIZES = [16, 64, 256]
# With more, the heartbeats of all nodes alone keep two cores busy, and nodes that only wait for their turn count as lost.
MOST_FOR_LOSS = 2048
LEASE = 5.0
# Bytes per thread: each of the thousands needs little.
STACK = 512 * 1024
# A thread that waits for the interpreter's lock wakes up this often to ask for it; at Python's own 5 ms
# hundreds of threads in one process would do little else. (Both rivals alike; a real node has its own process.)
# With fewer threads Python's interval stays: torch's nodes need their turn often.
SWITCH_INTERVAL, MOST_THREADS_AT_PYTHONS_OWN = 0.1, 64
# Closed connections keep their ports for a minute.
PORTS, PORTS_PER_NODE = 26000, 6


# -- what is counted ------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """The counts of one connection, or of several of one node."""

    operations: int = 0
    sent_and_read: int = 0

    def note(self, result: Any, *arguments: Any) -> Any:
        self.operations += 1
        self.sent_and_read += _size(arguments) + _size(result)
        return result


def _size(value: Any) -> int:
    """Bytes of keys and values, without the frames around them, for all rivals alike."""
    match value:
        case bytes() | str():
            return len(value)
        case list() | tuple():
            return sum(map(_size, value))
        case _:
            return 8 if isinstance(value, int) else 0


class CountedC10d:
    """c10d's store: every call is one request to the server, and is counted."""

    def __init__(self, store: Any, tally: Tally) -> None:
        self._store, self._tally = store, tally

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)  # sends no request

    def __getattr__(self, name: str) -> Any:
        call, note = getattr(self._store, name), self._tally.note
        return lambda *arguments: note(call(*arguments), *arguments)


@dataclass
class Tallies:
    """The counts of the connection for rounds, and of that for the pulse."""

    main: Tally = field(default_factory=Tally)
    pulse: Tally = field(default_factory=Tally)


class CountedTcpHome(TcpHome):
    """Counts the requests of its connections, and of their clones, to c10d's server."""

    def __init__(self, host: str, port: int, tallies: Tallies) -> None:
        super().__init__([(host, port)], silence=LEASE, is_host=False, say=_silent)
        self._tallies = tallies

    def _client(self, *args: Any, **kwargs: Any) -> TcpStore:
        return _counted(super()._client(*args, **kwargs), self._tallies.main, self._tallies.pulse)


def _counted(store: TcpStore, tally: Tally, of_clones: Tally) -> TcpStore:
    """Makes the store's connection count each request, and likewise those of its clones."""
    clone, exchange = store.clone, store._exchange  # noqa: SLF001
    inner: Any = store

    def noted(each: Any, patience: float | None) -> Any:
        tally.sent_and_read += len(each.request)
        return tally.note(exchange(each, patience))

    inner._exchange = noted  # noqa: SLF001
    inner.clone = lambda: _counted(clone(), of_clones, of_clones)
    return store


class CountedStore:
    """Any other store: calls of its interface are counted."""

    def __init__(self, store: Any, tallies: Tallies) -> None:
        self._store, self._tallies, self._tally = store, tallies, tallies.main

    def clone(self) -> CountedStore:
        return CountedStore(self._store.clone(), Tallies(main=self._tallies.pulse))

    def close(self) -> None:
        self._store.close()

    def get(self, key: str, timeout: float) -> bytes:
        self._tally.operations += 1
        value: bytes = self._store.get(key, timeout)
        self._tally.sent_and_read += len(key) + len(value)
        return value

    def __getattr__(self, name: str) -> Any:
        call, note = getattr(self._store, name), self._tally.note
        return lambda *arguments: note(call(*arguments), *arguments)


def _silent(_: str) -> None:
    pass


# -- one node, ours or torch's --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One measurement: which rival, how many nodes, what is done after the first round."""

    kind: str
    backend: str
    nodes: int
    endpoint: str
    run_id: str
    # Each process reaches the store at its own address: one address has too few ports for 4096 nodes.
    address: str = "127.0.0.1"
    idle: float = 0.0
    loss: bool = False


class OurNode:
    def __init__(self, spec: Spec, number: int) -> None:
        self.spec, self.number = spec, number
        self.tallies = Tallies()
        self.rank = -1
        self.on_loss: Any = None
        self._handler: DynamicRendezvous | None = None

    def create(self) -> None:
        spec = self.spec
        self._handler = DynamicRendezvous(
            self._home(),
            backend=spec.backend,
            run_id=spec.run_id,
            settings=Settings(min_nodes=spec.nodes, max_nodes=spec.nodes),
            timing=Timing(join=LIMIT, lease=LEASE),
            host=f"node{self.number}",
            local_addr=spec.address,
            say=_silent,
            listener=Listener(on_loss=self._lost),
        )

    def _home(self) -> Home:
        spec, tallies = self.spec, self.tallies
        if spec.backend == "tcpstore":
            return CountedTcpHome(spec.address, int(spec.endpoint), tallies)
        if spec.backend == "etcd":
            return FixedHome(
                lambda: CountedStore(
                    EtcdStore(endpoints=[spec.endpoint], prefix=spec.run_id), tallies
                ),
            )
        return FixedHome(lambda: CountedStore(FileStore(spec.endpoint), tallies))

    def _lost(self, loss: Loss) -> None:
        if self.on_loss is not None:
            self.on_loss(self)

    def join(self) -> None:
        assert self._handler is not None
        info = self._handler.next_rendezvous()
        self.rank = info.rank

    def allow_loss(self) -> None:
        """The first round had to be complete; the next one may do without one node."""
        handler = self._handler
        assert handler is not None
        least = self.spec.nodes - 1
        handler._settings = replace(handler._settings, min_nodes=least)  # noqa: SLF001

    def die(self) -> None:
        """As if the process had ended: sockets are closed, and nothing is sent."""
        handler = self._handler
        assert handler is not None
        handler._connection.close(leaving=False)  # noqa: SLF001
        handler._watch.close()  # noqa: SLF001


class TorchNode:
    def __init__(self, spec: Spec, number: int) -> None:
        self.spec, self.number = spec, number
        self.tallies = Tallies()
        self.rank = -1
        self.on_loss: Any = None
        self._handler: Any = None

    def create(self) -> None:
        """Like c10d_rendezvous_backend.create_backend, with a store whose calls are counted."""
        spec = self.spec
        # A name server that does not answer at once would cost torch 5 s per connection (pytorch#150532).
        with resolver.without_name_servers():
            store = dist.TCPStore(
                spec.address,
                int(spec.endpoint),
                is_master=False,
                multi_tenant=True,
                timeout=timedelta(seconds=60),
            )
        counted: Any = CountedC10d(store, self.tallies.main)
        backend = C10dRendezvousBackend(counted, spec.run_id)
        parameters = TorchParameters(
            "c10d",
            f"{spec.address}:{spec.endpoint}",
            spec.run_id,
            spec.nodes,
            spec.nodes,
            local_addr=spec.address,
            join_timeout=int(LIMIT),
            last_call_timeout=1,
        )
        self._handler = create_handler(store, backend, parameters)

    def join(self) -> None:
        with resolver.without_name_servers():
            self.rank = self._handler.next_rendezvous().rank

    def allow_loss(self) -> None:
        # The handler's parts share one settings object, which is frozen.
        object.__setattr__(self._handler.settings, "min_nodes", self.spec.nodes - 1)

    def die(self) -> None:
        self._handler._stop_heartbeats()  # noqa: SLF001


# -- a process of nodes ---------------------------------------------------------------------------


class Crowd:
    """The nodes in one process. Receives commands through a pipe, and answers with measurements."""

    def __init__(self, pipe: Connection, spec: Spec, numbers: range) -> None:
        self._pipe, self._spec = pipe, spec
        make = OurNode if spec.kind == "rally" else TorchNode
        self._nodes = [make(spec, number) for number in numbers]
        self._done: dict[int, float] = {}
        self._errors: list[str] = []
        self._known: list[float] = []
        self._again = threading.Event()

    def run(self) -> None:
        start = threading.Event()
        threads = [
            threading.Thread(target=self._first, args=(node, start), daemon=True)
            for node in self._nodes
        ]
        for thread in threads:
            thread.start()
        self._pipe.send("ready")
        while True:
            match self._pipe.recv():
                case "first":
                    start.set()
                    self._pipe.send(self._finish(threads))
                case ("idle", seconds):
                    self._pipe.send(self._idle(seconds))
                case ("loss", victim):
                    self._pipe.send(self._lose(victim))
                case _:
                    return

    def _first(self, node: Any, start: threading.Event) -> None:
        start.wait()
        try:
            node.create()
        except Exception as error:
            self._errors.append(_described(error))
            return
        self._join(node)

    def _join(self, node: Any) -> None:
        try:
            node.join()
            self._done[node.number] = time.monotonic()
        except Exception as error:
            self._errors.append(_described(error))

    def _finish(self, threads: Sequence[threading.Thread]) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT + 10.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done, self._done = self._done, {}
        return {
            "done": list(done.values()),
            "errors": self._errors[:3],
            "ranks": [node.rank for node in self._nodes if node.number in done],
            "operations": [node.tallies.main.operations for node in self._nodes],
            "bytes": [node.tallies.main.sent_and_read for node in self._nodes],
            "pulse": [node.tallies.pulse.operations for node in self._nodes],
            "known": self._known[:1],
        }

    def _counts(self) -> list[tuple[int, int]]:
        tallies = [(node.tallies.main, node.tallies.pulse) for node in self._nodes]
        return [
            (a.operations + b.operations, a.sent_and_read + b.sent_and_read) for a, b in tallies
        ]

    def _idle(self, seconds: float) -> list[tuple[float, float]]:
        """Each node's operations and bytes per second."""
        before, began = self._counts(), time.monotonic()
        time.sleep(seconds)
        after, took = self._counts(), time.monotonic() - began
        pairs = zip(before, after, strict=True)
        return [((b[0] - a[0]) / took, (b[1] - a[1]) / took) for a, b in pairs]

    def _lose(self, victim: int) -> dict[str, Any]:
        """One node dies. Nodes start the next round when they notice, or when they hear of it."""
        nodes = [node for node in self._nodes if node.number != victim]
        for node in self._nodes:
            node.tallies.main.operations = node.tallies.main.sent_and_read = 0
            node.tallies.pulse.operations = 0
            node.allow_loss()
        started: set[int] = set()
        lock = threading.Lock()
        threads: list[threading.Thread] = []

        def begin(node: Any) -> None:
            with lock:
                if node.number in started:
                    return
                started.add(node.number)
                thread = threading.Thread(target=self._join, args=(node,), daemon=True)
                threads.append(thread)
            thread.start()

        def noticed(node: Any) -> None:
            self._known.append(time.monotonic())
            begin(node)

        for node in nodes:
            node.on_loss = noticed
        died = time.monotonic()
        for node in self._nodes:
            if node.number == victim:
                # By then all processes wait.
                time.sleep(0.5)
                died = time.monotonic()
                node.die()
        if self._spec.kind == "rally":
            self._wait_for_call()
        else:
            time.sleep(0.5)
        for node in nodes:
            begin(node)
        return {**self._finish(threads), "died": died if len(nodes) < len(self._nodes) else None}

    def _wait_for_call(self) -> None:
        """Every node's launcher waits for the next round's call; here one per process does."""
        records = self._nodes[0]._handler.records.clone()  # noqa: SLF001
        records.wait("1/call", 30.0)
        records.close()


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def crowd(pipe: Connection, spec: Spec, numbers: range) -> None:
    raise_limits()
    threading.stack_size(STACK)
    if len(numbers) > MOST_THREADS_AT_PYTHONS_OWN:
        sys.setswitchinterval(SWITCH_INTERVAL)
    # The objects of torch's import are shared with the process that forked us: collecting garbage among
    # them would copy them, during the measurement.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        Crowd(pipe, spec, numbers).run()
    os._exit(0)  # do not wait for thousands of threads


def serve(pipe: Connection) -> None:
    """c10d's server, in its own process."""
    raise_limits()
    listener = socket.create_server(("", 0), backlog=4096)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    # As the node that serves the store does. Its introduction is for others to read, and means nothing here.
    store.set("rally-guests/host", b"a benchmark")
    pipe.send(port)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    del store
    os._exit(0)


def raise_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- one measurement ------------------------------------------------------------------------------

# The fork server imports these, so that a process starts in milliseconds. (It cannot find this file.)
PRELOADED = [
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "rallypoint.rendezvous.backends.etcd_store",
    "rallypoint.rendezvous.backends.tcp_home",
    "rallypoint.rendezvous.dynamic",
]
processes = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def child(target: Any, *args: Any) -> Iterator[Connection]:
    ours, theirs = processes.Pipe()
    process = processes.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join(30)
        ours.close()


class Places:
    """Stores, one kind at a time. Each run has its own store, or its own name in one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._etcd: subprocess.Popen[bytes] | None = None
        self._endpoint = ""

    @contextlib.contextmanager
    def open(self, backend: str) -> Iterator[str]:
        if backend == "tcpstore":
            with child(serve) as pipe:
                yield str(_receive(pipe, 30))
        elif backend == "etcd":
            yield self._etcd_endpoint()
        else:
            yield str(self._folder / uuid.uuid4().hex)

    def _etcd_endpoint(self) -> str:
        if self._etcd is None:
            client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
            command = ["etcd", "--name", "m0", "--data-dir", str(self._folder / "etcd")]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", f"m0={peer}", "--logger", "zap"]
            env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
            with (self._folder / "etcd.log").open("wb") as log:
                self._etcd = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            self._endpoint = client.removeprefix("http://")
            deadline = time.monotonic() + 30.0
            while True:
                try:
                    EtcdStore(endpoints=[self._endpoint], prefix="probe").exists("probe")
                    break
                except RendezvousConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
        return self._endpoint

    def close(self) -> None:
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _receive(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError("a process of the benchmark does not answer")
    return pipe.recv()


def wait_for_ports(nodes: int) -> None:
    most = max(1000, PORTS - PORTS_PER_NODE * nodes)
    deadline = time.monotonic() + 90.0
    while time.monotonic() < deadline:
        words = Path("/proc/net/sockstat").read_text().split()
        if int(words[words.index("tw") + 1]) < most:
            return
        time.sleep(0.5)


def measure(places: Places, kind: str, backend: str, nodes: int, idle: bool, loss: bool) -> Any:
    """One run of one rival with ``nodes`` nodes. Figures are in seconds from the common start."""
    wait_for_ports(nodes)
    with contextlib.ExitStack() as stack:
        # Closed in reverse order: the server ends first, so that its side keeps the used-up ports.
        per_process = [range(i, nodes, PROCESSES) for i in range(PROCESSES)]
        server = contextlib.ExitStack()
        endpoint = server.enter_context(places.open(backend))
        spec = Spec(
            kind=kind, backend=backend, nodes=nodes, endpoint=endpoint, run_id=uuid.uuid4().hex[:12]
        )
        pipes = [
            stack.enter_context(child(crowd, replace(spec, address=f"127.0.0.{i + 1}"), each))
            for i, each in enumerate(per_process)
            if each
        ]
        stack.enter_context(server)
        for pipe in pipes:
            _receive(pipe, 60)
        time.sleep(0.5)  # by now all new threads are waiting
        began = time.monotonic()
        found: dict[str, Any] = {"first": _all(pipes, "first", began)}
        complete = found["first"]["nodes"] == nodes
        if complete and idle:
            time.sleep(1.0)
            for pipe in pipes:
                pipe.send(("idle", IDLE_SECONDS))
            rates = [rate for pipe in pipes for rate in _receive(pipe, 60)]
            found["idle"] = {
                "operations": _node_figures([operations for operations, _ in rates]),
                "bytes": _node_figures([size for _, size in rates]),
            }
        if complete and loss:
            time.sleep(1.0)
            found["loss"] = _all(pipes, ("loss", nodes - 1), time.monotonic())
        return found


def _all(pipes: Sequence[Connection], command: Any, began: float) -> dict[str, Any]:
    for pipe in pipes:
        pipe.send(command)
    answers = [_receive(pipe, LIMIT + 60) for pipe in pipes]
    died = [each["died"] for each in answers if each.get("died")]
    known = [moment for each in answers for moment in each["known"]]
    began = died[0] if died else began
    done = [moment for each in answers for moment in each["done"]]
    ranks = sorted(rank for each in answers for rank in each["ranks"])
    figures: dict[str, Any] = {
        "nodes": len(done),
        "first_s": min(done) - began if done else None,
        "last_s": max(done) - began if done else None,
        "errors": [text for each in answers for text in each["errors"]][:3],
    }
    if not figures["errors"] and ranks != list(range(len(ranks))):
        figures["errors"].append(f"{len(ranks)} nodes are there, and their ranks have holes")
    if known:
        figures["known_s"] = min(known) - began
        figures["known_to_last_s"] = max(done) - min(known) if done else None
    for name in ("operations", "bytes", "pulse"):
        figures[name] = _node_figures([value for each in answers for value in each[name]])
    return figures


def _node_figures(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "max": max(values)}


# -- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    kind: str
    backend: str
    nodes: int
    repeat: int
    idle: bool
    loss: bool


def plan(args: argparse.Namespace) -> list[Step]:
    """Rivals take turns within each number of nodes."""
    steps = []
    for backend, sizes in args.sizes.items():
        for nodes in sizes:
            repeats = args.repeats or (1 if args.quick else 3)
            for repeat in range(repeats):
                rivals = ["rally"]
                if backend == "tcpstore" and nodes <= args.torch_up_to:
                    rivals.append("torch")
                for kind in rivals:
                    last = repeat == repeats - 1
                    loss = backend == "tcpstore" and nodes <= MOST_FOR_LOSS
                    if kind == "torch":
                        loss = last and nodes in TORCH_LOSS_SIZES and not args.quick
                    idle = last and (args.quick or nodes in IDLE_SIZES or backend != "tcpstore")
                    steps.append(
                        Step(
                            kind=kind,
                            backend=backend,
                            nodes=nodes,
                            repeat=repeat,
                            idle=idle,
                            loss=loss,
                        )
                    )
    return steps


def run(places: Places, steps: Sequence[Step], progress: Progress) -> list[dict[str, Any]]:
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    given_up: set[str] = set()
    for step in steps:
        progress.step(f"{step.kind}, {step.backend}: {step.nodes} nodes ({step.repeat + 1})")
        if step.kind in given_up:
            continue
        result = measure(places, step.kind, step.backend, step.nodes, step.idle, step.loss)
        found.setdefault((step.kind, step.backend, step.nodes), []).append(result)
        if step.kind == "torch" and result["first"]["nodes"] < step.nodes:
            given_up.add("torch")
    return [_row(*key, results) for key, results in found.items()]


def _row(kind: str, backend: str, nodes: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    def figures(part: str, wanted: int, name: str, inner: str = "") -> dict[str, Any]:
        values = []
        for result in results:
            if part in result and result[part].get("nodes", wanted) == wanted:
                value = result[part].get(name)
                value = value[inner] if inner and value is not None else value
                if value is not None:
                    values.append(value)
        return spread(values)

    row: dict[str, Any] = {"rival": kind, "backend": backend, "nodes": nodes}
    for part, wanted in (("first", nodes), ("loss", nodes - 1)):
        tried = [result[part] for result in results if part in result]
        if not tried:
            continue
        row[part] = {
            "failed": sum(each["nodes"] != wanted for each in tried),
            "errors": [text for each in tried for text in each["errors"]][:3],
            "to_first_node_s": figures(part, wanted, "first_s"),
            "to_last_node_s": figures(part, wanted, "last_s"),
            "operations_per_node": figures(part, wanted, "operations", "mean"),
            "operations_of_busiest_node": figures(part, wanted, "operations", "max"),
            "bytes_per_node": figures(part, wanted, "bytes", "mean"),
            "pulse_operations_per_node": figures(part, wanted, "pulse", "mean"),
        }
        if part == "loss" and kind == "rally":
            row[part]["until_known_s"] = figures(part, wanted, "known_s")
            row[part]["known_to_last_node_s"] = figures(part, wanted, "known_to_last_s")
    idle = [result["idle"] for result in results if "idle" in result]
    if idle:
        row["idle"] = {
            "operations_per_node_per_s": spread([each["operations"]["mean"] for each in idle]),
            "operations_of_busiest_node_per_s": spread(
                [each["operations"]["max"] for each in idle]
            ),
            "bytes_per_node_per_s": spread([each["bytes"]["mean"] for each in idle], 0),
        }
    return row


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The promises of the rendezvous, with the measured values; None if this run did not measure it."""

    def row(kind: str, nodes: int) -> dict[str, Any]:
        key = (kind, "tcpstore", nodes)
        return next((r for r in rows if (r["rival"], r["backend"], r["nodes"]) == key), {})

    def last(kind: str, nodes: int) -> dict[str, Any]:
        return row(kind, nodes).get("first", {}).get("to_last_node_s", {})

    def growth(part: str, name: str, least: int) -> float | None:
        """The largest value for any number of nodes, divided by that for ``least`` nodes."""
        ours = [r for r in rows if (r["rival"], r["backend"]) == ("rally", "tcpstore")]
        found = {r["nodes"]: r[part][name]["median"] for r in ours if part in r}
        base = found.get(least)
        bigger = [value for nodes, value in found.items() if nodes > least and value]
        return round(max(bigger) / base, 2) if base and bigger else None

    checks = [
        (f"{nodes} nodes, from the start to the last one, s", last("rally", nodes).get("median"), s)
        for nodes, s in ((64, 0.5), (256, 1.0), (512, 2.0), (4096, 15.0))
    ]
    checks += [
        ("256 nodes, times torch's", ratio(last("rally", 256), last("torch", 256)), round(1 / 6, 3)),
        (
            "operations per node: most for any number of nodes, times those for 64",
            growth("first", "operations_per_node", 64),
            1.5,
        ),
        (
            "idle operations per node and second: most for any number of nodes, times those for 64",
            growth("idle", "operations_per_node_per_s", 64),
            1.1,
        ),
    ]  # fmt: skip
    return [
        {"what": what, "measured": value, "limit": limit, "holds": None if value is None else value <= limit}
        for what, value, limit in checks
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--plot", type=Path, help="plot the results to this file")
    parser.add_argument(
        "--quick", action="store_true", help="few nodes, each case once, as a quick check"
    )
    parser.add_argument("--nodes", help="numbers of nodes on c10d's store, for example 16,64,256")
    parser.add_argument("--backends", default="tcpstore,etcd,file", help="the stores to measure")
    parser.add_argument(
        "--torch-up-to",
        type=int,
        default=max(SIZES),
        metavar="NODES",
        help="the largest number of nodes for torch (it fails after 120 s)",
    )
    parser.add_argument("--repeats", type=int, help="repetitions of each (default 3)")
    args = parser.parse_args()
    sizes = {"tcpstore": SIZES, "etcd": ETCD_SIZES, "file": FILE_SIZES}
    if args.quick:
        sizes = {"tcpstore": [16, 64], "etcd": [16], "file": [16]}
    if args.nodes:
        sizes["tcpstore"] = [int(each) for each in args.nodes.split(",")]
    if shutil.which("etcd") is None:
        print("etcd is not installed: left out", file=sys.stderr)
        del sizes["etcd"]
    args.sizes = {name: each for name, each in sizes.items() if name in args.backends.split(",")}

    raise_limits()
    processes.set_forkserver_preload(PRELOADED)
    steps = plan(args)
    progress = Progress(len(steps))
    folder = Path(tempfile.mkdtemp(prefix="rally-bench-"))
    places = Places(folder)
    result: dict[str, Any] = {
        "benchmark": "rendezvous",
        "quick": args.quick,
        "machine": machine(),
        "processes": PROCESSES,
        "given_up_after_s": LIMIT,
        "torch_up_to": args.torch_up_to,
        "lease_s": LEASE,
        "torch_last_call_s": 1,
    }
    try:
        result["rounds"] = run(places, steps, progress)
    finally:
        progress.close()
        places.close()
        shutil.rmtree(folder, ignore_errors=True)
    result["targets"] = targets(result["rounds"])

    publish(result, args.output)
    if args.plot:
        from plot_rendezvous import plot as draw

        draw(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Calls between processes: rallypoint.rpc compared with TensorPipe (torch.distributed.rpc), in one run; prints JSON.

    python bench/rpc.py --quick
    python bench/rpc.py --output bench/results/rpc.json --plot bench/results/rpc.png

The same code measures both: a competitor is a module with ``init_rpc``, ``rpc_sync``, ``rpc_async`` and ``shutdown``. The
processes of both run at the same time and take turns block by block. The inactive ones are stopped (SIGSTOP), because an
idle process under TensorPipe keeps a core busy. A competitor that fails or hangs gets ``{"failed": reason}`` instead of a
figure. See bench/README.md for the meaning of the figures.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import Progress, machine, publish, ratio, spread
from plot_rpc import plot
from rpc_functions import digest, discard, echo, exchange, nothing


OURS, THEIRS = "rallypoint", "tensorpipe"
RIVALS = {OURS: "rallypoint.rpc", THEIRS: "torch.distributed.rpc"}
SAME_HOST, TCP = "same host", "tcp"
# Besides init_method. On the same host each makes its own choice: a Unix socket, TensorPipe's shared memory.
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    (OURS, SAME_HOST): {},
    (OURS, TCP): {"transports": ["tcp"]},
    (THEIRS, SAME_HOST): {},
    (THEIRS, TCP): {"_transports": ["uv"], "_channels": ["basic"]},
}

# For TCP between ours (the second is the default): what the handshake offers, and options.
PROTECTIONS: dict[str, tuple[tuple[str, ...] | None, dict[str, Any]]] = {
    "tcp, unprotected": (("none",), {}),
    "tcp, MAC": (None, {}),
    "tcp, MAC by SHA-256": (("sha-256",), {}),
    "tcp, TLS": (None, {"tls": True}),
}
# Our groups over Unix sockets, whose members share only the user, or a secret.
OVER_UNIX: dict[str, tuple[tuple[str, ...] | None, dict[str, Any]]] = {
    "uds, no secret": (None, {"transports": ("uds",), "insecure": True}),
    "uds, secret": (None, {"transports": ("uds",), "secret": "a secret for this benchmark"}),
}

MIB = 2**20
SIZES = [1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
ONE_WAY = "one way"
# If the same tensor comes back, it need not be copied; another one must be.
WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    ONE_WAY: discard,
    "there and back": echo,
    "there, another back": exchange,
}
# Other large values, compared with a tensor of the same size.
KINDS: dict[str, Callable[[int], Any]] = {
    "NumPy": lambda size: np.ones(size // 4, np.float32),
    "bytes": bytes,
}
MANY = 16
CALLER_THREADS = [1, 8]
WINDOW = 1000
# Members before the join that is measured. TensorPipe's join is two calls to each member, one after the other,
# and every member keeps a core busy: 64 of them would take the whole run.
MEMBERS = {OURS: 64, THEIRS: 16}
NEWCOMERS = 7
# A command that takes longer has failed.
TIMEOUT = 45.0
STARTS = 4
# Starts are repeated for this long: TensorPipe's take long if others need the cores too.
SECONDS_OF_STARTS = 12.0


# -- a rank ---------------------------------------------------------------------------------------


class Rank:
    """One process of a group. The parent may have its public methods called."""

    def __init__(self, rival: str, transport: str, rank: int) -> None:
        self._rpc = importlib.import_module(RIVALS[rival])
        self._rival, self._transport, self._rank = rival, transport, rank
        self._tensor = torch.empty(0)

    def init(self, meeting: str, world_size: int | None) -> tuple[float, float]:
        options = (
            self._rpc.NativeRpcBackendOptions
            if self._rival == OURS
            else self._rpc.TensorPipeRpcBackendOptions
        )
        protections = {**PROTECTIONS, **OVER_UNIX}
        if self._transport in protections:
            seals, chosen = protections[self._transport]
            chosen = {**OPTIONS[OURS, TCP], **chosen}
            if seals is not None:
                # No option selects these; they are here for comparison.
                importlib.import_module("rallypoint.wire.auth").SEALS = lambda: seals  # type: ignore[attr-defined]
        else:
            chosen = OPTIONS[self._rival, self._transport]
        began = time.monotonic()
        self._rpc.init_rpc(
            name(self._rank),
            rank=self._rank,
            world_size=world_size,
            rpc_backend_options=options(init_method=meeting, **chosen),
        )
        return began, time.monotonic()

    def shutdown(self) -> tuple[float, float]:
        began = time.monotonic()
        self._rpc.shutdown()
        return began, time.monotonic()

    def empty(self, count: int, warm_up: int) -> list[float]:
        return self._times(lambda: self._rpc.rpc_sync(name(1), nothing), count, warm_up)

    def tensor(self, num_bytes: int, way: str, count: int, warm_up: int) -> list[float]:
        """Seconds of each call that sends a tensor, or sends one and gets one back."""
        x = self._of_bytes(num_bytes)
        function = WAYS[way]
        return self._times(lambda: self._rpc.rpc_sync(name(1), function, (x,)), count, warm_up)

    def other(self, kind: str, num_bytes: int, count: int, warm_up: int) -> list[float]:
        """Seconds of each call that sends an array or bytes and gets the same back."""
        x = KINDS[kind](num_bytes)
        return self._times(lambda: self._rpc.rpc_sync(name(1), echo, (x,)), count, warm_up)

    def check(self, num_bytes: int) -> None:
        x = self._of_bytes(num_bytes)
        if self._rpc.rpc_sync(name(1), digest, (x,)) != digest(x):
            raise ValueError(f"a tensor of {num_bytes} bytes has not arrived as it was sent")
        if not torch.equal(self._rpc.rpc_sync(name(1), echo, (x,)), x):
            raise ValueError(f"a tensor of {num_bytes} bytes has not come back as it was sent")

    def asynchronous(self, seconds: float) -> float:
        """Calls per second, in windows of calls that are under way at once."""
        calls, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            futures = [self._rpc.rpc_async(name(1), nothing) for _ in range(WINDOW)]
            if isinstance(futures[0], torch.futures.Future):
                torch.futures.wait_all(futures)
            else:
                for future in futures:
                    future.wait()
            calls += WINDOW
        return calls / took

    def threads(self, count: int, seconds: float) -> list[float]:
        """Seconds of each empty call that ``count`` threads made within ``seconds``."""
        times: list[list[float]] = [[] for _ in range(count)]
        start, errors = threading.Barrier(count), []

        def run(mine: list[float]) -> None:
            start.wait()
            try:
                mine += self._times_within(lambda: name(1), 0.0, seconds)
            except BaseException as error:
                errors.append(error)

        callers = [threading.Thread(target=run, args=(mine,), daemon=True) for mine in times]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        if errors:
            raise errors[0]
        return [each for mine in times for each in mine]

    def to_one(self, start_in: float, seconds: float) -> list[float]:
        return self._times_within(lambda: name(0), start_in, seconds)

    def to_each(self, others: int, start_in: float, seconds: float) -> list[float]:
        turn = iter(range(sys.maxsize))
        return self._times_within(lambda: name(1 + next(turn) % others), start_in, seconds)

    def busy(self, seconds: float) -> None:
        """Keep this process' main thread in Python."""
        until, turns = time.monotonic() + seconds, 0
        while turns % 10_000 or time.monotonic() < until:
            turns += 1

    def empty_within(self, start_in: float, seconds: float) -> list[float]:
        return self._times_within(lambda: name(1), start_in, seconds)

    def _times(self, call: Callable[[], Any], count: int, warm_up: int) -> list[float]:
        for _ in range(warm_up):
            call()
        found = []
        for _ in range(count):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        return found

    def _times_within(self, to: Callable[[], str], start_in: float, seconds: float) -> list[float]:
        """Seconds of each empty call that ended within ``seconds``."""
        time.sleep(start_in)
        found: list[float] = []
        until = time.perf_counter() + seconds
        while True:
            began = time.perf_counter()
            self._rpc.rpc_sync(to(), nothing)
            ended = time.perf_counter()
            if ended > until:
                return found
            found.append(ended - began)

    def _of_bytes(self, num_bytes: int) -> torch.Tensor:
        if self._tensor.numel() * 4 != num_bytes:
            self._tensor = torch.arange(num_bytes // 4, dtype=torch.int32)
        return self._tensor


def name(rank: int) -> str:
    return f"worker{rank}"


def rank_main(
    pipe: Connection, rival: str, transport: str, rank: int, kind: type[Rank] = Rank
) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    warnings.simplefilter("ignore")  # torch warns about its older interfaces
    torch.set_num_threads(1)
    worker: Rank | None = None
    while True:
        try:
            what, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if worker is None:
                worker = kind(rival, transport, rank)
            answer = (True, getattr(worker, what)(*args) if what else None)
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {str(error).strip()[:300]}")
        pipe.send(answer)


# -- groups ---------------------------------------------------------------------------------------


class Failed(Exception):
    """A rival could not do it; the message says why."""


class Group:
    """Some processes of one rival. :meth:`close` ends them whatever they are doing."""

    def __init__(
        self, context: Any, rival: str, transport: str, size: int, kind: type[Rank] = Rank
    ) -> None:
        self.rival, self.size = rival, size
        self.pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                self.pipes.append(ours)
                process = context.Process(
                    target=rank_main, args=(theirs, rival, transport, rank, kind), daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
            self.ask(range(size), "")  # all have imported what they need
        except BaseException:
            self.close()
            raise

    def init(self, meeting: str) -> float:
        """Form a static group. Returns the seconds from the first process's start until the last one is in."""
        return length(self.ask(range(self.size), "init", meeting, self.size))

    def shutdown(self) -> float:
        return length(self.ask(range(self.size), "shutdown"))

    def ask(
        self, ranks: Sequence[int], what: str, *args: Any, timeout: float = TIMEOUT
    ) -> list[Any]:
        self.tell(ranks, what, *args)
        return self.answers(ranks, timeout)

    def tell(self, ranks: Sequence[int], what: str, *args: Any) -> None:
        for rank in ranks:
            try:
                self.pipes[rank].send((what, args))
            except OSError as error:
                raise Failed(f"rank {rank} is gone") from error

    def answers(self, ranks: Sequence[int], timeout: float = TIMEOUT) -> list[Any]:
        """The answers in the order of ``ranks``. The first failure is raised at once."""
        until = time.monotonic() + timeout
        waiting = {self.pipes[rank]: rank for rank in ranks}
        found: dict[int, Any] = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                raise Failed(f"ranks {sorted(waiting.values())}: no answer within {timeout:g} s")
            for pipe in [each for each in waiting if each in ready]:
                rank = waiting.pop(pipe)
                try:
                    well, value = pipe.recv()
                except (EOFError, OSError) as error:
                    raise Failed(f"rank {rank} died") from error
                if not well:
                    raise Failed(f"rank {rank}: {value}")
                found[rank] = value
        return [found[rank] for rank in ranks]

    def cpu_seconds(self) -> float:
        """CPU time used so far by all processes."""
        ticks = 0
        for process in self._processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self._processes, self.pipes = [], []

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)


def length(spans: Sequence[tuple[float, float]]) -> float:
    """From the first start to the last end. All processes are on one host and read the same clock."""
    return max(ended for _, ended in spans) - min(began for began, _ in spans)


def new_meeting() -> str:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{place.getsockname()[1]}"


Block = Callable[[Group], Any]
# What each rival's blocks returned, or why there is nothing.
Found = dict[str, "list[Any] | Failed"]


class Duel:
    """A group of each rival, of one size and transport, which take turns."""

    def __init__(self, context: Any, transport: str, size: int, kind: type[Rank] = Rank) -> None:
        self._context, self._transport, self._size, self._kind = context, transport, size, kind
        self._groups: dict[str, Group] = {}
        self._starts = dict.fromkeys(RIVALS, 0)
        self._never: dict[str, Failed] = {}
        self._last: dict[str, Failed] = {}

    def turns(self, block: Block, count: int) -> Found:
        """``count`` blocks of each rival. One that fails is out until the next measurement."""
        found: Found = {rival: [] for rival in RIVALS}
        for turn in range(count):
            order = list(RIVALS)
            for rival in order if turn % 2 else reversed(order):
                results = found[rival]
                if isinstance(results, Failed):
                    continue
                try:
                    with self._on_its_own(rival) as group:
                        results.append(block(group))
                except Failed as error:
                    found[rival] = self._last[rival] = error
        return found

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    @contextmanager
    def _on_its_own(self, rival: str) -> Iterator[Group]:
        """A rival's group, running. Outside this block every group is stopped."""
        if rival in self._groups:
            self._groups[rival].resume()
        else:
            self._groups[rival] = self._started(rival)
        try:
            yield self._groups[rival]
        except Failed:
            self._groups.pop(rival).close()
            raise
        finally:
            if rival in self._groups:
                self._groups[rival].pause()

    def _started(self, rival: str) -> Group:
        if rival in self._never:
            raise self._never[rival]
        self._starts[rival] += 1
        try:
            if self._starts[rival] > STARTS:
                raise Failed(f"started {STARTS} times already, last: {self._last[rival]}")
            group = Group(self._context, rival, self._transport, self._size, self._kind)
            try:
                group.init(new_meeting())
            except BaseException:
                group.close()
                raise
        except Failed as error:
            self._never[rival] = error
            raise
        return group


# -- figures --------------------------------------------------------------------------------------


def latency(blocks: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The latency of all calls. The 99th percentile is the median over blocks, since a burst of other load hits only a few."""
    us = [[1e6 * each for each in block] for block in blocks if len(block) > 1]
    if not us:
        return {"failed": "no two calls within the time"}
    tails = [statistics.quantiles(block, n=100, method="inclusive")[98] for block in us]
    return {**spread(flat(us), 1), "p99": round(statistics.median(tails), 1)}


def row(
    what: str, transport: str, unit: str, found: Found, figure: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    figures = {
        rival: {"failed": str(results)} if isinstance(results, Failed) else figure(results)
        for rival, results in found.items()
    }
    return {
        "what": what,
        "transport": transport,
        "unit": unit,
        **figures,
        "over_tensorpipe": ratio(figures[OURS], figures[THEIRS]),
        **(
            {"p99_over_tensorpipe": round(figures[OURS]["p99"] / figures[THEIRS]["p99"], 3)}
            if all("p99" in each for each in figures.values())
            else {}
        ),
    }


def flat(blocks: list[list[float]]) -> list[float]:
    return [each for block in blocks for each in block]


# -- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    blocks: int
    calls: int
    seconds: float
    turns: int
    repeats: int
    starts: int
    newcomers: int


FULL = Scale(20, 500, 1.0, 5, 5, 5, NEWCOMERS)
QUICK = Scale(2, 50, 0.2, 2, 2, 1, 2)


def measure_empty(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
    found = duel.turns(
        lambda group: group.ask([0], "empty", scale.calls, scale.calls // 5)[0], scale.blocks
    )
    return [row("empty call", transport, "us", found, latency)]


def measure_small(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
    def block(group: Group) -> list[float]:
        return group.ask([0], "tensor", 4096, "there and back", scale.calls, scale.calls // 5)[0]

    found = duel.turns(block, scale.blocks)
    return [row("4 KiB tensor there and back", transport, "us", found, latency)]


def measure_asynchronous(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
    def block(group: Group) -> float:
        group.ask([0], "asynchronous", 0.0)
        return group.ask([0], "asynchronous", scale.seconds)[0]

    found = duel.turns(block, scale.turns)
    what = f"asynchronous calls, {WINDOW} at once"
    return [row(what, transport, "calls/s", found, lambda b: spread(b, 0))]


def measure_threads(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
    rows = []
    for count in CALLER_THREADS:
        found = duel.turns(
            lambda group, n=count: group.ask([0], "threads", n, scale.seconds)[0],  # type: ignore[misc]
            scale.turns,
        )
        what = f"calls of {count} thread{'s' if count > 1 else ''}"
        rows += rate_and_latency(what, transport, scale.seconds, found)
    return rows


def measure_busy(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
    before = 0.1

    def block(group: Group) -> list[float]:
        group.tell([1], "busy", 2 * scale.seconds + 3 * before)
        group.tell([0], "empty_within", before, 2 * scale.seconds)
        return group.answers([0, 1])[0]

    found = duel.turns(block, min(3, scale.turns))
    what = "empty call, callee's main thread busy"
    return [row(what, transport, "us", found, latency)]


def measure_idle(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
    """CPU time of a process that gets no calls."""

    def block(group: Group) -> float:
        time.sleep(0.2)
        used, began = group.cpu_seconds(), time.monotonic()
        time.sleep(2 * scale.seconds)
        return (group.cpu_seconds() - used) / (time.monotonic() - began) / group.size

    found = duel.turns(block, min(2, scale.turns))
    return [row("processor time of an idle process", transport, "s/s", found, spread)]


def measure_tensors(num_bytes: int) -> Callable[[Duel, Scale, str], list[dict[str, Any]]]:
    def measure(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
        mib = num_bytes // MIB
        # A turn lasts about as long for every size.
        each = max(2, min(25, scale.repeats * 64 // mib))
        # One of up to 16 MiB lasts a tenth of a second, and a shared machine's memory bandwidth changes from one second to the
        # next, so there are more of them.
        turns = 2 if scale is QUICK else -(-10 // each) if mib > 64 else 16 if mib <= 16 else 4
        rows = []
        for way in WAYS:
            seen: set[int] = set()

            def block(group: Group, way: str = way, seen: set[int] = seen) -> list[float]:
                new = id(group) not in seen
                seen.add(id(group))
                if new and way == ONE_WAY:
                    group.ask([0], "check", num_bytes)
                return group.ask([0], "tensor", num_bytes, way, each, 3 if new else 1)[0]

            found = duel.turns(block, turns)
            moved = num_bytes * (1 if way == ONE_WAY else 2) / 1e9
            rows.append(
                row(
                    f"{mib} MiB tensor {way}",
                    transport,
                    "GB/s",
                    found,
                    lambda b, moved=moved: spread([moved / s for s in flat(b)]),  # type: ignore[misc]
                )
            )
        return rows

    return measure


def measure_others(num_bytes: int) -> Callable[[Duel, Scale, str], list[dict[str, Any]]]:
    """Arrays and bytes of one size."""

    def measure(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
        each = max(2, min(10, scale.repeats * 64 // (num_bytes // MIB)))
        rows = []
        for kind in KINDS:
            found = duel.turns(
                lambda group, kind=kind: group.ask([0], "other", kind, num_bytes, each, 2)[0], 2
            )
            rows.append(
                row(
                    f"{num_bytes // MIB} MiB of {kind} there and back",
                    transport,
                    "GB/s",
                    found,
                    lambda b: spread([2 * num_bytes / 1e9 / s for s in flat(b)]),
                )
            )
        return rows

    return measure


def measure_many(duel: Duel, scale: Scale, transport: str) -> list[dict[str, Any]]:
    others = range(1, MANY)
    start_in = 0.2

    def to_one(group: Group) -> list[float]:
        return flat(group.ask(others, "to_one", start_in, scale.seconds))

    def to_each(group: Group) -> list[float]:
        return group.ask([0], "to_each", len(others), start_in, scale.seconds)[0]

    rows = []
    for what, block in (("all to one", to_one), ("one to each in turn", to_each)):
        duel.turns(block, 1)  # connections are made
        found = duel.turns(block, min(3, scale.turns))
        rows += rate_and_latency(
            f"calls of {MANY} processes, {what}", transport, scale.seconds, found
        )
    return rows


def rate_and_latency(
    what: str, transport: str, seconds: float, found: Found
) -> list[dict[str, Any]]:
    return [
        row(what, transport, "calls/s", found, lambda b: spread([len(x) / seconds for x in b], 0)),
        row(what, transport, "us", found, latency),
    ]


def measure_init(
    context: Any, sizes: Sequence[int], scale: Scale, progress: Progress
) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        progress.step(f"a group of {size} begins and ends")
        inits: Found = {rival: [] for rival in RIVALS}
        ends: Found = {rival: [] for rival in RIVALS}
        left = dict.fromkeys(RIVALS, SECONDS_OF_STARTS)
        for _ in range(scale.starts if size < 64 else 1):
            for rival in RIVALS:
                if isinstance(inits[rival], Failed) or left[rival] < 0:
                    continue
                began = time.monotonic()
                try:
                    with closing(Group(context, rival, SAME_HOST, size)) as group:
                        inits[rival].append(group.init(new_meeting()))  # type: ignore[union-attr]
                        if not isinstance(ends[rival], Failed):
                            try:
                                ends[rival].append(group.shutdown())  # type: ignore[union-attr]
                            except Failed as error:
                                ends[rival] = error
                except Failed as error:
                    inits[rival] = ends[rival] = error
                left[rival] -= time.monotonic() - began
        rows += [
            row(f"init of {size} processes", SAME_HOST, "s", inits, lambda b: spread(b, 4)),
            row(f"shutdown of {size} processes", SAME_HOST, "s", ends, lambda b: spread(b, 4)),
        ]
    return rows


def measure_join(
    context: Any, members: dict[str, int], scale: Scale, progress: Progress
) -> list[dict[str, Any]]:
    """Once a group has as many members as ``members`` says, processes join it one after the other."""
    found: Found = {}
    for rival in RIVALS:
        progress.step(f"one joins {members[rival]} ({rival})")
        try:
            size = members[rival] + scale.newcomers
            with closing(Group(context, rival, SAME_HOST, size)) as group:
                meeting, until = new_meeting(), time.monotonic() + 2 * TIMEOUT
                times: list[float] = []
                for rank in range(size):
                    left = max(0.0, until - time.monotonic())
                    times.append(length(group.ask([rank], "init", meeting, None, timeout=left)))
                    if sum(times[members[rival] :]) > SECONDS_OF_STARTS:
                        break
                # The last of them calls and can be called.
                group.ask([len(times) - 1], "to_one", 0.0, 0.05)
                group.ask([0], "to_each", len(times) - 1, 0.0, 0.2)
                found[rival] = times[members[rival] :]
        except Failed as error:
            found[rival] = error
    result = row("join of a dynamic group", SAME_HOST, "s", found, lambda b: spread(b, 4))
    return [{**result, "members_before": members}]


# -- the whole of it ------------------------------------------------------------------------------

Measure = Callable[[Duel, Scale, str], list[dict[str, Any]]]


def plan(sizes: list[int]) -> list[tuple[str, int, str, Measure]]:
    """Transport, processes, name, function; neighbours of one transport and size share their groups."""
    tensors: list[tuple[str, Measure]] = [
        (f"tensors of {each // MIB} MiB", measure_tensors(each)) for each in sizes
    ]
    tensors.append(("arrays and bytes of 64 MiB", measure_others(64 * MIB)))
    calls: list[tuple[str, Measure]] = [
        ("empty calls", measure_empty),
        ("4 KiB tensors", measure_small),
        ("asynchronous calls", measure_asynchronous),
    ]
    pair: list[tuple[str, Measure]] = [
        ("several threads", measure_threads),
        ("a busy callee", measure_busy),
        ("idle processes", measure_idle),
    ]
    return [
        *((SAME_HOST, 2, what, function) for what, function in calls + pair + tensors),
        *((TCP, 2, what, function) for what, function in calls + tensors),
        (SAME_HOST, MANY, f"{MANY} processes", measure_many),
    ]


def measure(
    steps: list[tuple[str, int, str, Measure]],
    inits: Sequence[int],
    members: dict[str, int],
    scale: Scale,
) -> list[dict[str, Any]]:
    # Inherited by the ranks: no name server, no interface but the loopback, no messages about killed peers.
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    context = multiprocessing.get_context("forkserver")
    # The ranks are forked from a process that has imported what it can; they themselves report what cannot be imported.
    context.set_forkserver_preload([module for module in RIVALS.values() if importable(module)])
    progress = Progress(len(steps) + len(inits) + len(RIVALS) * bool(members))
    rows: list[dict[str, Any]] = []
    duel, key = None, None
    with closing(progress):
        try:
            for transport, size, what, function in steps:
                progress.step(f"{what}, {transport}")
                if key != (transport, size):
                    if duel is not None:
                        duel.close()
                    duel, key = Duel(context, transport, size), (transport, size)
                assert duel is not None
                rows += function(duel, scale, transport)
        finally:
            if duel is not None:
                duel.close()
        rows += measure_init(context, inits, scale, progress)
        if members:
            rows += measure_join(context, members, scale, progress)
    return rows


def importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:
        return False
    return True


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A target that we fail does not hold; one that the rival fails, or that this run left out, is null."""

    def find(what: str, transport: str, unit: str) -> dict[str, Any]:
        for each in rows:
            if (each["what"], each["transport"], each["unit"]) == (what, transport, unit):
                return each
        return {}

    ours, times, tail = "ours", "over_tensorpipe", "p99_over_tensorpipe"
    asynchronous = f"asynchronous calls, {WINDOW} at once"
    small = "4 KiB tensor there and back"
    tensors = [
        (f"{mib} MiB tensor {way}", SAME_HOST, "GB/s", times, "at least", 4.0)
        for mib in (16, 64, 256)
        for way in WAYS
    ]
    promises = [
        ("empty call", SAME_HOST, "us", times, "at most", 0.2),
        ("empty call", SAME_HOST, "us", tail, "at most", 0.333),
        (asynchronous, SAME_HOST, "calls/s", times, "at least", 5.0),
        (small, SAME_HOST, "us", times, "at most", 0.25),
        *tensors,
        ("64 MiB tensor one way", SAME_HOST, "GB/s", ours, "at least", 6.0),
        ("empty call", TCP, "us", times, "at most", 0.333),
        ("64 MiB tensor one way", TCP, "GB/s", times, "at least", 1.5),
        (f"init of {MANY} processes", SAME_HOST, "s", times, "at most", 1.0),
        ("join of a dynamic group", SAME_HOST, "s", ours, "at most", 0.05),
    ]
    found = []
    for what, transport, unit, which, side, limit in promises:
        row = find(what, transport, unit)
        value = row.get(OURS, {}).get("median") if which == ours else row.get(which)
        if value is None:
            holds = False if "failed" in row.get(OURS, {}) else None
        else:
            holds = value <= limit if side == "at most" else value >= limit
        measure = {
            ours: unit,
            times: f"{unit} times TensorPipe's",
            tail: "p99 times TensorPipe's",
        }[which]
        found.append(
            {
                "what": f"{what}, {transport}: {measure}, {side}",
                "measured": value,
                "limit": limit,
                "holds": holds,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="plot the results to this file")
    parser.add_argument(
        "--quick", action="store_true", help="a little of everything, as a quick check"
    )
    parser.add_argument("--full", action="store_true", help="also a group of 64 processes")
    parser.add_argument("--only", metavar="WORD", help="only steps whose name contains this")
    args = parser.parse_args()
    scale = QUICK if args.quick else FULL
    steps = plan(SIZES[:2] if args.quick else SIZES)
    inits = [2] if args.quick else [2, MANY, 64] if args.full else [2, MANY]
    members = dict.fromkeys(RIVALS, 4) if args.quick else MEMBERS
    if args.only:
        steps = [step for step in steps if args.only in f"{step[2]}, {step[0]}"]
        inits = inits if args.only == "init" else []
        members = members if args.only == "join" else {}
    result: dict[str, Any] = {
        "benchmark": "rpc",
        "quick": args.quick,
        "machine": machine(),
        "rivals": RIVALS,
        "options": {f"{rival}, {transport}": chosen for (rival, transport), chosen in OPTIONS.items()},
    }  # fmt: skip
    began = time.monotonic()
    result["rows"] = measure(steps, inits, members, scale)
    result["took_s"] = round(time.monotonic() - began, 1)
    result["targets"] = targets(result["rows"])
    if args.plot is not None:
        plot(result, args.plot)
    publish(result, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The calls of the members of the RPC soak (soak_rpc.py), and the expected answers."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import json
import math
import random
import re
import socket
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rallypoint import rpc
from rallypoint.wire.remote_error import RemoteTraceback


# How long beyond its time-out a call may take to end, not counting time in which its process could not run.
GRACE = 1.0
WITNESS_EVERY = 0.02
# Threads that an answer passes through: from the overseer or the leader, by a worker and asyncio's loop, to the waiting thread.
HANDS = 4
CALLERS = 3
# Tensors are pieces of a tensor of this length, so either end can check every byte of any of them.
LENGTH = 16 << 20
SMALLEST, LARGEST = 1 << 10, 8 << 20
HELD_BYTES = 32 << 20
# Bytes of the tensors that are sent to a member stopped meanwhile, and how long such a call may take.
LARGE, LARGE_SECONDS = 64 << 20, 60.0
TIMEOUTS = (0.5, 1.0, 2.0, 3.0)

# A reference whose creation has failed, or whose sender was gone before its owner heard of it.
DEAD_REFERENCE = (
    "RRef creation via rpc.remote|was released before its owner heard|was never created"
)

BASE = torch.empty(0, dtype=torch.uint8)


def prepare(seed: int) -> None:
    """Called once, before any member is forked, so that all share the result."""
    global BASE  # noqa: PLW0603
    torch.set_num_threads(1)
    BASE = torch.randint(
        0, 256, (LENGTH,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


# -- what this process knows of itself ---------------------------------------------------------------


class Given(Exception):
    """A call ended with an error that a fault explains, which ends the operation."""


class Ledger:
    """The open calls, the outcomes of those that have ended, and what was wrong."""

    def __init__(self) -> None:
        self.name = ""
        self.control: socket.socket | None = None
        self.outcomes: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.running = threading.Event()
        self.parked = 0
        self.ending = False
        self.expelled = False
        self._open: dict[int, tuple[str, str, float, float]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._said: Counter[str] = Counter()
        # Calls of :func:`send_large` that are under way.
        self.large = 0
        # When this process was runnable but could not run: begin and end, the latest last.
        self._starved: deque[tuple[float, float]] = deque(maxlen=500)
        self._due = math.inf

    def become(self, name: str) -> None:
        """Start afresh in a forked child, which answers for itself."""
        self.name = name
        self._lock = threading.Lock()
        self._open.clear()

    def send(self, **message: Any) -> None:
        assert self.control is not None
        with self._lock:
            self.control.sendall(json.dumps(message).encode() + b"\n")

    def problem(self, kind: str, **facts: Any) -> None:
        self._said[kind] += 1
        if self._said[kind] <= 20:
            with suppress(OSError):
                self.send(problem=kind, **facts)

    @contextmanager
    def call(
        self, operation: str, to: Any, seconds: float, began: float | None = None
    ) -> Iterator[None]:
        """Surrounds everything that waits for another process: it must end in time, with a permitted outcome."""
        number = next(self._numbers)
        entered = time.monotonic()
        until = max(entered, (entered if began is None else began) + seconds)
        self._open[number] = (operation, str(to), entered, until)
        outcome = "answer"
        try:
            yield
        except Given:
            raise
        except Exception as error:
            outcome = self._outcome(operation, to, error, entered, until)
            raise Given from None
        finally:
            ended = time.monotonic()
            del self._open[number]
            self.outcomes[outcome] += 1
            # A thread that waits for a core, or for the interpreter, cannot be in time: that is the machine's doing.
            starved = self.starved_within(until, ended) if ended > until + GRACE else 0.0
            if ended > until + GRACE + starved:
                self.problem(
                    "late",
                    starved=round(starved, 3),
                    operation=operation,
                    to=str(to),
                    began=entered,
                    until=until,
                    ended=ended,
                    outcome=outcome,
                )

    def _outcome(
        self, operation: str, to: Any, error: Exception, entered: float, until: float
    ) -> str:
        remote = isinstance(error.__cause__, RemoteTraceback)
        if self.expelled or isinstance(error, rpc.Expelled):
            return "expelled"
        # torch turns what a callback of `then` raises into text.
        wrapped = re.search(r"(PeerLost|RpcTimeout|CallCancelled): ", str(error))
        if wrapped and type(error) is RuntimeError:
            return wrapped[1]
        if isinstance(error, rpc.RpcError) and re.search(DEAD_REFERENCE, str(error)):
            return "dead reference"
        if remote and re.search("RPC has not been initialized|has shut RPC down", str(error)):
            return "callee left"
        for kind in (rpc.PeerLost, rpc.RpcTimeout, rpc.CallCancelled):
            if isinstance(error, kind):
                if (
                    kind is rpc.RpcTimeout
                    and not remote
                    and until > entered
                    and time.monotonic() < until - 0.005
                ):
                    self.problem("early", operation=operation, to=str(to), error=str(error))
                return kind.__name__
        self.problem(
            "error",
            operation=operation,
            to=str(to),
            error=f"{type(error).__name__}: {error}"[:600],
            trace="".join(traceback.format_exception(error))[-2500:],
        )
        return type(error).__name__

    def check(self, operation: str, to: Any, good: bool, got: Any = None) -> None:
        self.operations[operation] += 1
        if not good:
            self.problem("wrong", operation=operation, to=str(to), got=repr(got)[:500])

    def starved_within(self, begin: float, end: float) -> float:
        """How much of this time may have been lost to others on the machine: the seconds in which a thread that only sleeps was
        due but did not get to run, times the number of threads that an answer passes through.
        """
        # The witness may still be kept from running while we run.
        spans = [*self._starved, (self._due, time.monotonic())]
        return HANDS * sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans)

    def witness(self) -> None:
        """A thread that records how long this process is kept from running."""
        while True:
            self._due = time.monotonic() + WITNESS_EVERY
            time.sleep(WITNESS_EVERY)
            now = time.monotonic()
            if now - self._due > WITNESS_EVERY:
                self._starved.append((self._due, now))

    def begin_large(self) -> None:
        with self._lock:
            self.large += 1

    def end_large(self) -> None:
        with self._lock:
            self.large -= 1

    def watch(self) -> None:
        """A thread that reports calls that do not end at all."""
        told: set[int] = set()
        while True:
            time.sleep(0.5)
            now = time.monotonic()
            # Not its items: a garbage collection while that list is made lets other threads start and end calls.
            for number in list(self._open):
                if (call := self._open.get(number)) is None:
                    continue
                operation, to, entered, until = call
                starved = self.starved_within(until, now)
                if now > until + 5.0 + starved and number not in told:
                    told.add(number)
                    self.problem(
                        "hang",
                        operation=operation,
                        to=to,
                        began=entered,
                        until=until,
                        ended=now,
                        starved=round(starved, 3),
                        stacks=stacks(),
                    )


LEDGER = Ledger()
HELD: deque[tuple[torch.Tensor, int, int, int]] = deque()
KEPT: deque[tuple[Any, int, int, int]] = deque(maxlen=12)
COROUTINES: Counter[str] = Counter()
_held_lock = threading.Lock()
_held_bytes = 0


def stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()[-12000:]


def piece(offset: int, size: int) -> torch.Tensor:
    return BASE[offset : offset + size]


def draw_piece(chance: random.Random, largest: int = LARGEST) -> tuple[int, int]:
    """A tensor's offset and its number of bytes, which is drawn from a logarithmic scale."""
    size = int(SMALLEST * (largest / SMALLEST) ** chance.random()) & ~7
    return chance.randrange(0, LENGTH - size, 64), size


def same(tensor: torch.Tensor, offset: int, size: int, added: int = 0) -> bool:
    expected = piece(offset, size)
    if added:
        expected = expected + added
    return torch.equal(tensor.reshape(-1).view(torch.uint8), expected)


def hold(
    tensor: torch.Tensor, offset: int, size: int, chance: random.Random, *, as_it_is: bool = False
) -> None:
    """Keep a received tensor for a while, so that memory which is reused too early is noticed."""
    global _held_bytes  # noqa: PLW0603
    added = 0
    if not as_it_is and chance.random() < 0.3:
        tensor = tensor.reshape(-1).view(torch.uint8)
        tensor += 1  # it is ours to change
        added = 1
    gone = []
    with _held_lock:
        HELD.append((tensor, offset, size, added))
        _held_bytes += size
        while _held_bytes > HELD_BYTES or len(HELD) > 64:
            gone.append(HELD.popleft())
            _held_bytes -= gone[-1][2]
    check_held(gone)


def check_held(gone: list[tuple[torch.Tensor, int, int, int]]) -> None:
    for tensor, offset, size, added in gone:
        if not same(tensor, offset, size, added):
            LEDGER.problem("wrong", operation="held tensor", to="", got=f"{size} bytes at {offset}")


def let_go() -> None:
    """Hold nothing any more."""
    global _held_bytes  # noqa: PLW0603
    with _held_lock:
        gone = list(HELD)
        HELD.clear()
        _held_bytes = 0
    check_held(gone)
    gone.clear()
    KEPT.clear()
    gc.collect()


# -- what is called ------------------------------------------------------------------------------------

_callee = random.Random(1)


def add(nonce: int, a: int, b: int) -> tuple[str, int, int]:
    return LEDGER.name, nonce, a + b


def turn_large(nonce: int, tensor: torch.Tensor) -> torch.Tensor:
    tensor += nonce % 1000
    return tensor


def send_large(to: str, nonce: int) -> None:
    """64 MiB there and back, with a member that is stopped meanwhile."""
    tensor = torch.arange(LARGE // 8)
    try:
        with suppress(Given), LEDGER.call("large tensor turned", to, LARGE_SECONDS):
            got = rpc.rpc_sync(to, turn_large, (nonce, tensor), timeout=LARGE_SECONDS)
            good = torch.equal(got, tensor + nonce % 1000)
            LEDGER.check("large tensor turned", to, good, got.shape)
    finally:
        LEDGER.end_large()


def take(nonce: int, offset: int, size: int, tensor: torch.Tensor) -> tuple[str, int, bool]:
    good = same(tensor, offset, size)
    hold(tensor, offset, size, _callee)
    return LEDGER.name, nonce, good


def turn(offset: int, size: int, keep: bool, tensor: torch.Tensor) -> torch.Tensor:
    """Return the received tensor: in the same memory, unless it is kept here as well."""
    if not same(tensor, offset, size):
        raise AssertionError("wrong bytes have come")
    if keep:
        hold(tensor, offset, size, _callee, as_it_is=True)
    return tensor


def give(nonce: int, offset: int, size: int, whole: bool) -> tuple[str, int, torch.Tensor]:
    found = piece(offset, size)
    return LEDGER.name, nonce, found.clone() if whole else found


def swap(nonce: int, tensors: dict[str, Any]) -> tuple[str, int, list[Any]]:
    return LEDGER.name, nonce, [tensors["b"], tensors["a"], tensors["a"][::2]]


def relay(nonce: int, path: list[str]) -> tuple[int, list[str]]:
    if not path:
        return nonce, [LEDGER.name]
    again, names = rpc.rpc_sync(path[0], relay, (nonce, path[1:]))
    return again, [LEDGER.name, *names]


async def nap(nonce: int, seconds: float) -> tuple[str, int]:
    COROUTINES["begun"] += 1
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        COROUTINES["cancelled"] += 1
        raise
    COROUTINES["ended"] += 1
    return LEDGER.name, nonce


async def forward(nonce: int, to: str, a: int, b: int) -> tuple[str, Any]:
    return LEDGER.name, await rpc.rpc_async(to, add, (nonce, a, b))


@rpc.async_execution
def later(nonce: int, to: str, a: int, b: int) -> Any:
    name = LEDGER.name
    return rpc.rpc_async(to, add, (nonce, a, b)).then(lambda done: (name, done.value()))


def slow(nonce: int, seconds: float) -> tuple[str, int]:
    time.sleep(seconds)
    return LEDGER.name, nonce


def fail(nonce: int) -> None:
    raise ValueError("on purpose", nonce)


def count(nonce: int, items: int, size: int) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    for number in range(items):
        yield LEDGER.name, nonce, number, piece(64 * number, size)


async def count_async(nonce: int, items: int, size: int) -> Any:
    for number in range(items):
        await asyncio.sleep(0)
        yield LEDGER.name, nonce, number, piece(64 * number, size)


class Box:
    """Something to refer to."""

    def __init__(self, nonce: int, offset: int, size: int) -> None:
        self.made_by = LEDGER.name
        self.nonce = nonce
        self.tensor = piece(offset, size).clone()

    def get(self, a: int) -> tuple[str, int, int]:
        return LEDGER.name, self.nonce, a

    def double(self, nonce: int) -> tuple[str, int]:
        return LEDGER.name, 2 * nonce


def is_box(box: Any, owner: str, nonce: int, offset: int, size: int) -> bool:
    return (
        isinstance(box, Box)
        and box.made_by == owner
        and box.nonce == nonce
        and same(box.tensor, offset, size)
    )


def use(rref: Any, owner: str, nonce: int, offset: int, size: int) -> tuple[str, bool]:
    return LEDGER.name, is_box(rref.to_here(), owner, nonce, offset, size)


def keep(rref: Any, nonce: int, offset: int, size: int) -> str:
    KEPT.append((rref, nonce, offset, size))
    return LEDGER.name


# -- what calls ----------------------------------------------------------------------------------------


class Caller:
    """One thread's operations."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._nonces = itertools.count(seed << 32)

    def draw(self) -> tuple[str, Any, float, int]:
        """A member's name, the same member in any form that calls accept, a time-out, and a number."""
        chance = self.chance
        _, infos = rpc.members()
        others = [each for each in infos if each.name != LEDGER.name]
        if not others or chance.random() < 0.03:
            found = rpc.get_worker_info()
        else:
            found = chance.choice(others)
        to = chance.choice((found.name, found.name, found.id, found))
        return found.name, to, chance.choice(TIMEOUTS), next(self._nonces)

    def small(self) -> None:
        for _ in range(self.chance.randint(1, 10)):
            name, to, seconds, nonce = self.draw()
            with LEDGER.call("small", name, seconds):
                got = rpc.rpc_sync(to, add, (nonce, 3, nonce), timeout=seconds)
                LEDGER.check("small", name, got == (name, nonce, 3 + nonce), got)

    def tensor_there(self) -> None:
        name, to, seconds, nonce = self.draw()
        offset, size = draw_piece(self.chance)
        tensor = piece(offset, size)
        if self.chance.random() < 0.5:
            tensor = tensor.clone()
        if self.chance.random() < 0.5:
            tensor = tensor.view(self.chance.choice((torch.float32, torch.int64)))
        with LEDGER.call("tensor there", name, seconds):
            got = rpc.rpc_sync(to, take, (nonce, offset, size, tensor), timeout=seconds)
            LEDGER.check("tensor there", name, got == (name, nonce, True), got)

    def tensor_back(self) -> None:
        name, to, seconds, nonce = self.draw()
        offset, size = draw_piece(self.chance)
        args = (nonce, offset, size, self.chance.random() < 0.5)
        with LEDGER.call("tensor back", name, seconds):
            who, number, tensor = rpc.rpc_sync(to, give, args, timeout=seconds)
            good = (who, number) == (name, nonce) and same(tensor, offset, size)
            LEDGER.check("tensor back", name, good, (who, number, tensor.shape))
            hold(tensor, offset, size, self.chance)

    def tensor_turned(self) -> None:
        name, to, seconds, _ = self.draw()
        offset, size = draw_piece(self.chance)
        args = (offset, size, self.chance.random() < 0.3, piece(offset, size).clone())
        with LEDGER.call("tensor turned", name, seconds):
            tensor = rpc.rpc_sync(to, turn, args, timeout=seconds)
            LEDGER.check("tensor turned", name, same(tensor, offset, size), tensor.shape)
            hold(tensor, offset, size, self.chance)

    def tensors_swapped(self) -> None:
        name, to, seconds, nonce = self.draw()
        (i, m), (j, n) = draw_piece(self.chance, 1 << 20), draw_piece(self.chance, 1 << 20)
        tensors = {"a": piece(i, m), "b": piece(j, n).clone()}
        with LEDGER.call("swap", name, seconds):
            who, number, (b, a, half) = rpc.rpc_sync(to, swap, (nonce, tensors), timeout=seconds)
            good = (who, number) == (name, nonce) and same(a, i, m) and same(b, j, n)
            good = good and torch.equal(half, piece(i, m)[::2])
            LEDGER.check("swap", name, good, (who, number))

    def batch(self) -> None:
        """Many calls at once, to several members."""
        begun = []
        for _ in range(self.chance.randint(2, 24)):
            name, to, seconds, nonce = self.draw()
            offset, size = draw_piece(self.chance, 256 << 10)
            began = time.monotonic()
            with suppress(Given), LEDGER.call("rpc_async()", name, seconds):
                if self.chance.random() < 0.3:
                    args: Any = (nonce, offset, size, piece(offset, size))
                    future: Any = rpc.rpc_async(to, take, args, timeout=seconds)
                    expected: Any = (name, nonce, True)
                else:
                    future = rpc.rpc_async(to, add, (nonce, nonce, 1), timeout=seconds)
                    expected = (name, nonce, nonce + 1)
                if self.chance.random() < 0.2:
                    future = future.then(lambda done: done.value())
                begun.append((future, expected, name, seconds, began))
        self.chance.shuffle(begun)
        for future, expected, name, seconds, began in begun:
            with suppress(Given), LEDGER.call("batch", name, seconds, began):
                got = future.wait()
                LEDGER.check("batch", name, got == expected, got)

    def nested(self) -> None:
        name, to, seconds, nonce = self.draw()
        path = [self.draw()[0] for _ in range(self.chance.randint(1, 5))]
        with LEDGER.call("nested", name, seconds):
            got = rpc.rpc_sync(to, relay, (nonce, path), timeout=seconds)
            LEDGER.check("nested", name, got == (nonce, [name, *path]), got)

    def coroutine(self) -> None:
        name, to, seconds, nonce = self.draw()
        other = self.draw()[0]
        with LEDGER.call("async def", name, seconds):
            if self.chance.random() < 0.5:
                got: Any = rpc.rpc_sync(to, nap, (nonce, 0.01), timeout=seconds)
                LEDGER.check("async def", name, got == (name, nonce), got)
            else:
                func = self.chance.choice((forward, later))
                got = rpc.rpc_sync(to, func, (nonce, other, nonce, 5), timeout=seconds)
                LEDGER.check("async def", name, got == (name, (other, nonce, nonce + 5)), got)

    def exception(self) -> None:
        name, to, seconds, nonce = self.draw()
        with LEDGER.call("exception", name, seconds):
            try:
                got = rpc.rpc_sync(to, fail, (nonce,), timeout=seconds)
            except ValueError as error:
                LEDGER.check(
                    "exception", name, error.args == ("on purpose", nonce), repr(error.args)
                )
            else:
                LEDGER.check("exception", name, False, got)

    def timeout(self) -> None:
        name, to, _, nonce = self.draw()
        with LEDGER.call("time-out", name, 0.1):
            got = rpc.rpc_sync(to, slow, (nonce, 0.4), timeout=0.1)
            # A member that was stopped meanwhile may already find the answer.
            LEDGER.check("time-out", name, got == (name, nonce), got)

    def cancel(self) -> None:
        name, to, seconds, nonce = self.draw()
        func = self.chance.choice((slow, nap))
        began = time.monotonic()
        with LEDGER.call("cancel", name, seconds):
            future = rpc.rpc_async(to, func, (nonce, 0.2), timeout=seconds)
        time.sleep(self.chance.choice((0.0, 0.0, 0.01, 0.1)))
        cancelled = future.cancel()
        with LEDGER.call("cancel", name, seconds, began):
            try:
                got = future.wait()
            except rpc.CallCancelled:
                LEDGER.check("cancel", name, cancelled, "cancelled though cancel() said no")
                raise
            LEDGER.check("cancel", name, not cancelled and got == (name, nonce), got)

    def cancel_tensor(self) -> None:
        """Cancel a call with much of its tensor on the way."""
        name, to, seconds, nonce = self.draw()
        offset, size = draw_piece(self.chance)
        began = time.monotonic()
        with LEDGER.call("cancel tensor", name, seconds):
            if self.chance.random() < 0.5:
                args: Any = (nonce, offset, size, piece(offset, size))
                future: Any = rpc.rpc_async(to, take, args, timeout=seconds)
            else:
                future = rpc.rpc_async(to, give, (nonce, offset, size, True), timeout=seconds)
        time.sleep(self.chance.choice((0.0, 0.0, 0.001, 0.01)))
        future.cancel()
        with LEDGER.call("cancel tensor", name, seconds, began):
            got = future.wait()
            good = got[:2] == (name, nonce)
            LEDGER.check("cancel tensor", name, good, got[:2])

    def reference(self) -> None:
        name, to, seconds, nonce = self.draw()
        chance = self.chance
        offset, size = draw_piece(chance, 1 << 20)
        what = (nonce, offset, size)
        with LEDGER.call("remote()", name, seconds):
            rref = rpc.remote(to, Box, what, timeout=seconds)
        for _ in range(chance.randint(0, 3)):
            match chance.randrange(5):
                case 0:
                    with LEDGER.call("to_here()", name, seconds):
                        box = rref.to_here(timeout=seconds)
                        LEDGER.check("to_here()", name, is_box(box, name, *what))
                case 1:
                    with LEDGER.call("rref.rpc_sync()", name, seconds):
                        got = rref.rpc_sync(timeout=seconds).get(7)
                        LEDGER.check("rref.rpc_sync()", name, got == (name, nonce, 7), got)
                case 2:
                    with LEDGER.call("rref.remote()", name, seconds):
                        other = rref.remote(timeout=seconds).double(nonce)
                    with LEDGER.call("rref.remote().to_here()", name, seconds):
                        got = other.to_here(timeout=seconds)
                        LEDGER.check("rref.remote()", name, got == (name, 2 * nonce), got)
                case 3:
                    third = self.draw()[0]
                    with LEDGER.call("shared rref", third, seconds):
                        got = rpc.rpc_sync(third, use, (rref, name, *what), timeout=seconds)
                        LEDGER.check("shared rref", third, got == (third, True), got)
                case 4:
                    third = self.draw()[0]
                    with LEDGER.call("kept rref", third, seconds):
                        got = rpc.rpc_sync(third, keep, (rref, *what), timeout=seconds)
                        LEDGER.check("kept rref", third, got == third, got)

    def kept_reference(self) -> None:
        try:
            rref, nonce, offset, size = KEPT.popleft()
        except IndexError:
            return
        owner, seconds = rref.owner_name(), self.chance.choice(TIMEOUTS)
        with LEDGER.call("use of kept rref", owner, seconds):
            box = rref.to_here(timeout=seconds)
            LEDGER.check("use of kept rref", owner, is_box(box, owner, nonce, offset, size))

    def stream(self) -> None:
        name, to, seconds, nonce = self.draw()
        chance = self.chance
        items, size = chance.randint(0, 60), draw_piece(chance, 128 << 10)[1]
        stop = chance.randint(1, items + 1) if chance.random() < 0.4 else items + 1
        func = chance.choice((count, count_async))
        with LEDGER.call("stream", name, seconds):
            args = (nonce, items, size)
            window = chance.choice((1, 4, 16))
            with rpc.rpc_stream(to, func, args, timeout=seconds, window=window) as stream:
                number = 0
                for who, again, place, tensor in stream:
                    good = (who, again, place) == (name, nonce, number)
                    good = good and same(tensor, 64 * number, size)
                    if not good:
                        LEDGER.check("stream", name, False, (who, again, place, number))
                    number += 1
                    if number == stop:
                        break
            LEDGER.check("stream", name, number == min(stop, items), number)

    OPERATIONS: tuple[tuple[int, Callable[[Caller], None]], ...] = (
        (20, small),
        (10, tensor_there),
        (10, tensor_back),
        (6, tensor_turned),
        (4, tensors_swapped),
        (10, batch),
        (8, nested),
        (8, coroutine),
        (4, exception),
        (1, timeout),
        (4, cancel),
        (4, cancel_tensor),
        (12, reference),
        (4, kept_reference),
        (6, stream),
    )

    def run(self, pause: float) -> None:
        """The body of a thread."""
        weights = [weight for weight, _ in self.OPERATIONS]
        acts = [act for _, act in self.OPERATIONS]
        while park():
            with suppress(Given):
                self.chance.choices(acts, weights)[0](self)
            time.sleep(self.chance.expovariate(1 / pause))

    # The same from asyncio.

    async def gathered(self) -> None:
        begun = []
        for _ in range(self.chance.randint(1, 12)):
            name, to, seconds, nonce = self.draw()
            began = time.monotonic()
            with suppress(Given), LEDGER.call("rpc_async()", name, seconds):
                func: Any = self.chance.choice((add, forward))
                if func is add:
                    args: Any = (nonce, 1, 2)
                    expected: Any = (name, nonce, 3)
                else:
                    args, expected = (nonce, name, 1, 2), (name, (name, nonce, 3))
                future = rpc.rpc_async(to, func, args, timeout=seconds)
                begun.append((future, expected, name, seconds, began))

        async def one(future: Any, expected: Any, name: str, seconds: float, began: float) -> None:
            with suppress(Given), LEDGER.call("await", name, seconds, began):
                got = await future
                LEDGER.check("await", name, got == expected, got)

        await asyncio.gather(*(one(*each) for each in begun))

    async def given_up(self) -> None:
        name, to, seconds, nonce = self.draw()
        began = time.monotonic()
        with LEDGER.call("await, given up", name, seconds):
            future: Any = rpc.rpc_async(to, nap, (nonce, 0.3), timeout=seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await future
        with LEDGER.call("await, given up", name, seconds, began):
            future.wait()

    async def stream_async(self) -> None:
        name, to, seconds, nonce = self.draw()
        items = self.chance.randint(0, 40)
        with LEDGER.call("async stream", name, seconds):
            number = 0
            args = (nonce, items, 2048)
            async for who, again, place, tensor in rpc.rpc_stream(to, count, args, timeout=seconds):
                if (who, again, place) != (name, nonce, number) or not same(
                    tensor, 64 * number, 2048
                ):
                    LEDGER.check("async stream", name, False, (who, again, place, number))
                number += 1
            LEDGER.check("async stream", name, number == items, number)

    def run_async(self, pause: float) -> None:
        """The body of a thread with an event loop."""
        acts = (self.gathered, self.gathered, self.given_up, self.stream_async)
        with asyncio.Runner() as runner:
            runner.get_loop()
            while park():
                with suppress(Given):
                    runner.run(self.chance.choice(acts)())
                time.sleep(self.chance.expovariate(1 / pause))


def park() -> bool:
    """Called between two operations of a thread; False when the thread should end."""
    if not LEDGER.running.is_set():
        with _held_lock:
            LEDGER.parked += 1
        LEDGER.running.wait()
        with _held_lock:
            LEDGER.parked -= 1
    return not LEDGER.ending

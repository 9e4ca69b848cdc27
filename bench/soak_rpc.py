"""A series of random faults on a group of processes that keep calling each other; prints JSON.

    python bench/soak_rpc.py --faults 100
    python bench/soak_rpc.py --faults 10000 --seed 7 --output bench/results/soak_rpc.json

Eight members of a dynamic group (soak_rpc_member.py) use every kind of call and check every answer byte by byte.
Meanwhile:

- members are killed and replaced, or stopped for a while (also for 12 s during 64 MiB tensors);
- their connections are reset, and their messages delayed and dropped;
- they fork children that exit, call or join;
- strangers send garbage, with and without proof of the secret, and request large answers that they do not read.

Every few hundred faults, all faults are undone and the calls pause. Then every call, reference, block of shared memory,
descriptor, thread and process must be accounted for. The exit code is 1 if an answer was wrong, a call late, an error
unexpected, or anything was left. See bench/README.md.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import os
import pickle
import random
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import soak_rpc_calls as calls
import soak_rpc_member as member
import torch.distributed as dist
from jobs import Progress, machine, publish

from rallypoint._core.clock import Deadline
from rallypoint.rpc.connections.handshake import introduce
from rallypoint.rpc.connections.messages import Kind
from rallypoint.wire import auth, tcp, uds
from rallypoint.wire.frames import HEADER, Shared, encode
from rallypoint.wire.transport import Way


MEMBERS = 8
# At least this many are left to call each other.
LEAST_ACTIVE = 5
TRANSPORTS = (("memory", "uds", "tcp"), ("memory", "uds", "tcp"), ("tcp",), ("uds", "tcp"))
JOIN_TIMEOUT = 30.0
# Seconds until calls under way at a quiet point have ended, with all that follows from them.
PAUSE_PATIENCE = 20.0
CENSUS_PATIENCE = 12.0
# How long a member is stopped amid large tensors: more than twice as long as a silent host is waited for.
STILL_SECONDS = 12.0
# The most that are stopped in this way at once.
MOST_STANDING = 2
# How long after the last refusal of a connection a member may still be expelled for it.
LATE_EXPULSION = 5.0


# -- the nursery: forks members without importing torch again ---------------------------------------


def nursery(line: socket.socket) -> None:
    """A process that forks members and reports their ends. Does not return."""
    line.settimeout(0.02)
    # Members' garbage collections need not go through what is here now.
    gc.collect()
    gc.freeze()
    while True:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                line.settimeout(None)
                line.sendall(json.dumps({"pid": pid, "status": status}).encode() + b"\n")
                line.settimeout(0.02)
        try:
            data, fds, _, _ = socket.recv_fds(line, 65536, 1)
        except TimeoutError:
            continue
        if not data:
            os._exit(0)
        wanted = json.loads(data)
        control = socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            line.close()
            member.live(wanted["name"], control, wanted)
        control.close()
        line.settimeout(None)
        line.sendall(json.dumps({"name": wanted["name"], "pid": pid}).encode() + b"\n")
        line.settimeout(0.02)


# -- members, as the driver sees them ------------------------------------------------------------------


@dataclass(eq=False)
class Process:
    """A member."""

    name: str
    control: socket.socket
    born: float
    pid: int = 0
    hello: dict[str, Any] | None = None
    stopped_since: float | None = None
    # When new connections to it were last refused: the others are then right to take it for dead.
    refused: float = 0.0
    stops: list[tuple[float, float]] = field(default_factory=list)
    killed: bool = False
    expelled: bool = False
    ended: bool = False
    status: int | None = None
    rest: bytes = b""
    answers: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        return not (self.killed or self.ended or self.expelled)

    @property
    def is_active(self) -> bool:
        return self.is_there and self.hello is not None and self.stopped_since is None

    def tell(self, **command: Any) -> None:
        with suppress(OSError):
            self.control.sendall(json.dumps(command).encode() + b"\n")

    def stopped_within(self, begin: float, end: float) -> float:
        """For how many seconds of this time it was stopped."""
        spans = list(self.stops)
        if self.stopped_since is not None:
            spans.append((self.stopped_since, end))
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans)


class Crowd:
    """All members: starts them, receives their messages, records problems."""

    def __init__(self, seed: int, folder: Path, port: int, nursery_line: socket.socket) -> None:
        self.chance = random.Random(seed)
        self.everyone: dict[str, Process] = {}
        self.problems: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.coroutines: Counter[str] = Counter()
        self.join_seconds: list[float] = []
        self._folder, self._port = folder, port
        self._nursery = nursery_line
        self._nursery_rest = b""
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._selector.register(nursery_line, selectors.EVENT_READ, None)

    def spawn(self) -> None:
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        name = f"w{number}"
        wanted = {
            "name": name,
            "seed": self.chance.randrange(1 << 30),
            "port": self._port,
            "pause": 0.004,
            "transports": TRANSPORTS[number % len(TRANSPORTS)],
            # Now and then too little, so that tensors are sent without shared memory.
            "shared_memory_bytes": self.chance.choice((1 << 30, 64 << 20, 1 << 20)),
            "crashes": str(self._folder / "crashes"),
            "stacks": str(self._folder / f"stacks-{name}"),
        }
        socket.send_fds(self._nursery, [json.dumps(wanted).encode()], [theirs.fileno()])
        theirs.close()
        process = Process(name, ours, time.monotonic())
        self.everyone[name] = process
        self._selector.register(ours, selectors.EVENT_READ, process)

    def there(self) -> list[Process]:
        return [each for each in self.everyone.values() if each.is_there]

    def active(self) -> list[Process]:
        return [each for each in self.everyone.values() if each.is_active]

    def listen(self, seconds: float) -> None:
        """Receive messages, for at most ``seconds``."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                self._hear_nursery()
            else:
                self._hear(key.data)
        now = time.monotonic()
        for each in self.there():
            waited = now - each.born - each.stopped_within(each.born, now)
            if each.hello is None and waited > JOIN_TIMEOUT:
                self.note("join", each, error=f"has not joined in {JOIN_TIMEOUT:g} s")
                os.kill(each.pid, signal.SIGKILL)
                each.killed = True

    def _hear_nursery(self) -> None:
        data = self._nursery.recv(65536)
        if not data:
            raise SystemExit("the nursery has died")
        *lines, self._nursery_rest = (self._nursery_rest + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "name" in said:
                self.everyone[said["name"]].pid = said["pid"]
                continue
            # Pids are reused.
            here = (each for each in self.everyone.values() if not each.ended)
            process = next((each for each in here if each.pid == said["pid"]), None)
            if process is None:
                continue
            process.ended, process.status = True, said["status"]
            expected = signal.SIGKILL if process.killed else 0
            if said["status"] != expected:
                self.note("died", process, error=f"status {said['status']}")
            self._forget(process)

    def _forget(self, process: Process) -> None:
        """Forget a process that is gone. What it did still counts."""
        self._hear(process, last=True)
        with suppress(KeyError):
            self._selector.unregister(process.control)
        process.control.close()
        self.outcomes.update(process.outcomes)
        self.operations.update(process.operations)
        process.stops = process.stops[-50:]

    def _hear(self, process: Process, *, last: bool = False) -> None:
        if process.control.fileno() < 0:
            return
        while True:
            try:
                data = process.control.recv(1 << 20, socket.MSG_DONTWAIT)
            except OSError:
                break
            if not data:
                with suppress(KeyError):
                    self._selector.unregister(process.control)
                break
            *lines, process.rest = (process.rest + data).split(b"\n")
            for line in lines:
                self._take(process, json.loads(line))
            if not last:
                break

    def _take(self, process: Process, said: dict[str, Any]) -> None:
        for what in ("outcomes", "operations"):
            if what in said:
                setattr(process, what, said.pop(what))
        match said:
            case {"hello": _}:
                process.hello = said
                now = time.monotonic()
                self.join_seconds.append(
                    now - process.born - process.stopped_within(process.born, now)
                )
            case {"expelled": _}:
                process.expelled = True
                self.counts["expelled"] += 1
                if time.monotonic() - process.refused > LATE_EXPULSION:
                    self.note("expelled", process, error="it lives, and could be connected to")
            case {"problem": kind}:
                self._judge(process, kind, said)
            case _:
                process.answers.update(said)

    def _judge(self, process: Process, kind: str, said: dict[str, Any]) -> None:
        if kind in ("late", "hang") and "until" in said:
            stopped = process.stopped_within(said["began"], said["ended"])
            over = said["ended"] - said["until"] - stopped - said["starved"]
            if over <= calls.GRACE:
                return
            said["seconds_over"] = round(over, 3)
        facts = {key: value for key, value in said.items() if key != "problem"}
        self.note(kind, process, **facts)

    def stacks_of(self, process: Process) -> str:
        """Where its threads are, if it can still report that."""
        with suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
            return (self._folder / f"stacks-{process.name}").read_text()[-12000:]
        return ""

    def note(self, kind: str, process: Process | None, **facts: Any) -> None:
        self.counts[f"problem: {kind}"] += 1
        found = {"kind": kind, "member": process.name if process else None, **facts}
        self.problems.append(found)
        with (self._folder / "problems.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        shown = {
            k: v[-400:] if isinstance(v, str) else v
            for k, v in found.items()
            if k not in ("stacks", "trace", "held")
        }
        print(f"problem: {shown}", file=sys.stderr, flush=True)


# -- strangers -----------------------------------------------------------------------------------------


class Stranger:
    """A program that connects to members and misbehaves."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = random.Random(chance.randrange(1 << 30))
        self._numbers = itertools.count(1)

    def connect(self, process: Process) -> tuple[str, socket.socket]:
        assert process.hello is not None
        addresses = process.hello["addresses"]
        kind = self.chance.choice([each for each in ("uds", "tcp") if each in addresses])
        deadline = Deadline(1.0)
        if kind == "uds":
            return kind, uds.connect(addresses["uds"], deadline)
        return kind, tcp.connect(tuple(addresses["tcp"]), deadline, 5.0)

    def enter(self, process: Process, alias: Process | None = None) -> tuple[socket.socket, Any]:
        """Prove the secret, perhaps under a member's name."""
        assert process.hello is not None
        hello = process.hello
        kind, sock = self.connect(process)
        number = next(self._numbers)
        me = {
            "job": hello["job"],
            "generation": 0,
            "name": f"stranger-{number}",
            "id": 1_000_000 + number,
            "incarnation": "00" * 8,
        }
        if alias is not None and alias.hello is not None:
            me |= {
                "name": alias.name,
                "id": alias.hello["id"],
                "incarnation": alias.hello["incarnation"],
            }
        try:
            side = kind == "uds" and self.chance.random() < 0.7
            _, _, channel, _ = introduce(
                sock,
                bytes.fromhex(hello["secret"]),
                me,
                Deadline(1.0),
                side=side,
                channel=Way(tcp.TRANSPORT).channel(tuple(hello["addresses"]["tcp"]))
                if kind == "tcp"
                else b"",
                seals=auth.SEALS() if kind == "tcp" else (),
            )
        except BaseException:
            sock.close()
            raise
        return sock, channel

    def without_proof(self, process: Process) -> str:
        """Garbage instead of a handshake."""
        _, sock = self.connect(process)
        chance = self.chance
        with sock:
            match chance.randrange(5):
                case 0:
                    data = chance.randbytes(chance.randint(1, 65536))
                case 1:
                    text = chance.randbytes(chance.randint(0, 200))
                    data = b"RLY1" + struct.pack("<I", len(text)) + text
                case 2:
                    text = json.dumps({"version": 1, "role": "connecting", "nonce": "", "me": {}})
                    data = b"RLY1" + struct.pack("<I", len(text)) + text.encode()
                case 3:
                    data = b"RLY1" + struct.pack("<I", 0xFFFFFFFF)
                case _:
                    data = b"GET / HTTP/1.1\r\nHost: member\r\n\r\n"
            sock.settimeout(0.2)
            with suppress(OSError):
                sock.sendall(data)
                if chance.random() < 0.3:
                    sock.recv(8192)
        return "stranger's garbage"

    def silent(self, process: Process) -> str:
        """Connects, sends nothing or half a message, and stays."""
        _, sock = self.connect(process)
        with sock:
            if self.chance.random() < 0.5:
                sock.send(b"RLY1\x40\x00\x00\x00{")
            time.sleep(self.chance.uniform(0.1, 2.0))
        return "silent stranger"

    def with_proof(self, process: Process, alias: Process | None) -> str:
        """Garbage after the handshake. Its pickles are invalid, since a member trusts peers that know the secret."""
        sock, channel = self.enter(process, alias)
        chance = self.chance
        deep = b"\xff" + chance.randbytes(chance.randint(0, 500))
        with sock, suppress(OSError):
            sock.settimeout(0.3)
            match chance.randrange(8):
                case 0:
                    # Not a length that a member would accept, or it would wait for the rest.
                    data = b"\xff\xff\xff\xff" + chance.randbytes(chance.randint(20, 4096))
                case 1:
                    kind = chance.choice((0, 13, 14, 20, 40, 255))
                    data = HEADER.pack(0, kind, 0, 0, 1, 0, 0)
                case 2:
                    kind = chance.choice([each for each in Kind if each not in (11, 12, 13, 14)])
                    data = b"".join(encode(kind, chance.randrange(1 << 60), deep))
                case 3:
                    places = [Shared(chance.randrange(5000), 0, chance.randrange(2), 1 << 20)]
                    pieces = encode(Kind.CALL, 7, deep, places)
                    data = b"".join(bytes(each) for each in pieces)
                case 4:
                    data = b"".join(
                        bytes(each)
                        for each in encode(Kind.CALL, 7, deep, [memoryview(bytes(1 << 20))])
                    )
                    data = data[: chance.randint(10, len(data))]
                case 5:
                    data = b"".join(
                        encode(chance.choice((Kind.CANCEL, Kind.CREDIT)), n, b"12345678"[:n])[0]
                        for n in range(8)
                    )
                case 6:
                    data = HEADER.pack(64, Kind.CALL, 0, 65535, 1, 0, 0) + bytes(64)
                case _:
                    # Calls that are served after their caller has gone.
                    call = pickle.dumps((calls.give, (1, 0, 4 << 20, True), None), 5)
                    data = b"".join(encode(Kind.CALL, n, call, time_left=2000)[0] for n in (1, 2))
            sock.sendall(data)
            if chance.random() < 0.3:
                time.sleep(chance.uniform(0, 0.3))
        if channel is not None:
            channel.close()
        return "member's garbage" if alias is not None else "garbage after the handshake"

    def slow_reader(self, process: Process) -> str:
        """Asks for large answers and does not read them."""
        sock, channel = self.enter(process)
        chance = self.chance
        with sock, suppress(OSError):
            sock.settimeout(0.5)
            for number in range(chance.randint(4, 24)):
                size = chance.randint(1, 4) << 20
                if chance.random() < 0.3:
                    what: Any = (calls.count, (number, 50, 100_000), {" window": 50})
                    kind = Kind.STREAM
                else:
                    what, kind = (calls.give, (number, 0, size, True), None), Kind.CALL
                call = pickle.dumps(what, 5)
                sock.sendall(encode(kind, number, call, time_left=3000)[0])
            time.sleep(chance.uniform(0.5, 2.0))
            if chance.random() < 0.3:
                sock.recv(1 << 16)
        if channel is not None:
            channel.close()
        return "slow reader"


# -- faults --------------------------------------------------------------------------------------------


class Faults:
    """Causes faults, and undoes them later where necessary."""

    def __init__(self, crowd: Crowd, seed: int) -> None:
        self.crowd = crowd
        self.chance = random.Random(seed + 1)
        self.struck: Counter[str] = Counter()
        self._stranger = Stranger(self.chance)
        self._pool = ThreadPoolExecutor(48, thread_name_prefix="stranger")
        self._running: list[Any] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        # Members that are stopped amid large tensors, and how many have been until the end.
        self._standing = 0
        self.stood = 0

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), act))

    def due(self) -> float:
        """Undo what is due. Returns the seconds until the next one is due."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        return self._later[0][0] - time.monotonic() if self._later else 1.0

    def undo_all(self) -> None:
        """Undo all at once, except that members stopped amid large tensors stay so for their full time."""
        while self._standing:
            time.sleep(max(0.0, self.due()))
        while self._later:
            heapq.heappop(self._later)[2]()
        for each in self._running:
            each.result()
        self._running.clear()

    def strike(self) -> str | None:
        """Cause one fault; None if there is no member for it now."""
        names = [name for name, _ in KINDS]
        name = self.chance.choices(names, [weight for _, weight in KINDS])[0]
        active = self.crowd.active()
        if not active:
            return None
        victim = self.chance.choice(active)
        struck = getattr(self, f"_{name}")(victim, active)
        if struck:
            self.struck[name.replace("_", " ")] += 1
        return name if struck else None

    def _kill(self, victim: Process, active: list[Process]) -> bool:
        if len(active) <= LEAST_ACTIVE:
            return False
        joining = [p for p in self.crowd.there() if p.hello is None and p.pid]
        if joining and self.chance.random() < 0.3:
            victim = joining[0]
        victim.killed = True
        os.kill(victim.pid, signal.SIGKILL)
        self.crowd.spawn()
        return True

    def _stop(self, victim: Process, active: list[Process]) -> bool:
        if len(active) <= LEAST_ACTIVE:
            return False
        os.kill(victim.pid, signal.SIGSTOP)
        victim.stopped_since = time.monotonic()

        def go_on() -> None:
            if victim.stopped_since is not None and victim.is_there:
                os.kill(victim.pid, signal.SIGCONT)
                victim.stops.append((victim.stopped_since, time.monotonic()))
                victim.stopped_since = None

        # Most are shorter than any call's time-out, some much shorter.
        self.later(self.chance.choice((0.02, 0.1, 0.3, 0.6, 1.5)), go_on)
        return True

    def _stand_still(self, victim: Process, active: list[Process]) -> bool:
        """Two members send it 64 MiB each, it sends as much, and is stopped for longer than a silent host is waited for."""
        if len(active) <= LEAST_ACTIVE or self._standing >= MOST_STANDING:
            return False
        began = self.chance.uniform(0.0, 0.4)
        self._standing += 1
        others = self.chance.sample([each for each in active if each is not victim], 2)
        for each in others:
            each.tell(do="send_large", to=victim.name)
        victim.tell(do="send_large", to=others[0].name)

        def stop() -> None:
            if not victim.is_active:
                self._standing -= 1
                return
            os.kill(victim.pid, signal.SIGSTOP)
            victim.stopped_since = time.monotonic()
            self.later(STILL_SECONDS, go_on)

        def go_on() -> None:
            self._standing -= 1
            if victim.is_there:
                self.stood += 1
            if victim.stopped_since is not None and victim.is_there:
                os.kill(victim.pid, signal.SIGCONT)
                victim.stops.append((victim.stopped_since, time.monotonic()))
                victim.stopped_since = None

        self.later(began, stop)
        return True

    def _reset(self, victim: Process, _: list[Process]) -> bool:
        victim.tell(do="reset")
        return True

    def _disturb(self, victim: Process, how: str) -> bool:
        victim.tell(do="disturb", how=how)
        self.later(self.chance.uniform(0.05, 0.6), lambda: victim.tell(do="undisturb"))
        return True

    def _fork(self, victim: Process, _: list[Process]) -> bool:
        victim.tell(do="fork", how=self.chance.choice(("exit", "call", "join")))
        return True

    def _delay(self, victim: Process, _: list[Process]) -> bool:
        return self._disturb(victim, "delay")

    def _drop(self, victim: Process, _: list[Process]) -> bool:
        return self._disturb(victim, "drop")

    def _refuse(self, victim: Process, _: list[Process]) -> bool:
        victim.refused = time.monotonic()
        return self._disturb(victim, "refuse")

    def _start(self, act: Callable[..., str], *args: Any) -> bool:
        self._running = [each for each in self._running if not each.done()]
        if len(self._running) >= 40:
            return False

        def run() -> None:
            # The victim may be stopped, or dead.
            with suppress(Exception):
                act(*args)

        self._running.append(self._pool.submit(run))
        return True

    def _garbage(self, victim: Process, _: list[Process]) -> bool:
        return self._start(self._stranger.without_proof, victim)

    def _silence(self, victim: Process, _: list[Process]) -> bool:
        return self._start(self._stranger.silent, victim)

    def _garbage_after_proof(self, victim: Process, active: list[Process]) -> bool:
        alias = self.chance.choice(active) if self.chance.random() < 0.5 else None
        return self._start(self._stranger.with_proof, victim, alias)

    def _slow_reader(self, victim: Process, _: list[Process]) -> bool:
        return self._start(self._stranger.slow_reader, victim)

    def close(self) -> None:
        self._pool.shutdown()


KINDS = (
    ("reset", 36),
    ("kill", 9),
    ("stop", 9),
    # Most are refused, since two members are already stopped in this way.
    ("stand_still", 6),
    ("delay", 8),
    ("drop", 5),
    ("refuse", 4),
    ("garbage", 12),
    ("garbage_after_proof", 12),
    ("silence", 4),
    ("slow_reader", 4),
    ("fork", 8),
)


# -- the run -------------------------------------------------------------------------------------------


class Soak:
    """Faults at a rate, and quiet points between them."""

    def __init__(self, crowd: Crowd, faults: Faults, rate: float) -> None:
        self.crowd, self.faults, self.rate = crowd, faults, rate
        self.quiet: list[dict[str, Any]] = []
        self.under_fire = 0.0

    def gather(self, question: str, answer: str, within: float, **more: Any) -> list[Process]:
        """Ask all members, and wait for their answers. Returns the members that gave one."""
        asked = [each for each in self.crowd.there() if each.hello is not None]
        for each in asked:
            each.answers.pop(answer, None)
            each.tell(do=question, **more)
        until = time.monotonic() + within
        while time.monotonic() < until:
            waiting = [each for each in asked if each.is_there and answer not in each.answers]
            if not waiting:
                break
            self.crowd.listen(0.05)
        for each in asked:
            if each.is_there and answer not in each.answers:
                self.crowd.note(
                    "hang",
                    each,
                    operation=question,
                    error="does not answer",
                    stacks=self.crowd.stacks_of(each),
                )
        return [each for each in asked if answer in each.answers]

    def settle(self) -> None:
        """Wait until there are as many members as there should be, and none is still joining."""
        until = time.monotonic() + JOIN_TIMEOUT
        while time.monotonic() < until:
            there = self.crowd.there()
            for _ in range(MEMBERS - len(there)):
                self.crowd.spawn()
            if all(each.hello is not None for each in there) and len(there) == MEMBERS:
                return
            self.crowd.listen(0.05)

    def rest(self, number: int) -> None:
        """A quiet point: nothing may be under way, held or left."""
        self.faults.undo_all()
        self.settle()
        began = time.monotonic()
        patience = PAUSE_PATIENCE
        self.gather("pause", "quiet", patience + calls.LARGE_SECONDS + 10.0, patience=patience)
        paused = time.monotonic()
        found = self.gather("census", "census", CENSUS_PATIENCE + 30.0, patience=CENSUS_PATIENCE)
        unrest = 0
        for each in found:
            for what in each.answers["census"]["unrest"]:
                unrest += 1
                held = each.answers["census"]["held"]
                self.crowd.note("unrest", each, error=what, after=number, held=held)
        all_found = [each.answers["census"] for each in found]
        threads: Counter[str] = Counter()
        for each in all_found:
            threads.update(each["threads"])
        self.quiet.append(
            {
                "after_faults": number,
                "members": len(found),
                "seconds_to_pause": round(paused - began, 2),
                "seconds_to_rest": round(time.monotonic() - paused, 2),
                "unrest": unrest,
                "descriptors": sum(each["descriptors"] for each in all_found),
                "mappings": sum(each["mappings"] for each in all_found),
                "connections": sum(each["connections"] for each in all_found),
                "threads": sum(threads.values()),
                "resident_mib_largest": max((each["resident"] for each in all_found), default=0)
                >> 20,
                "ages_s": sorted(round(time.monotonic() - each.born) for each in found),
            }
        )

    def resume(self) -> None:
        for each in self.crowd.there():
            each.tell(do="resume")

    def run(self, count: int, minutes: float | None, every: int, progress: Progress) -> int:
        self.settle()
        end = None if minutes is None else time.monotonic() + 60.0 * minutes
        number = 0
        upcoming = time.monotonic()
        began = upcoming
        while number < count and (end is None or time.monotonic() < end):
            now = time.monotonic()
            if now < upcoming:
                self.crowd.listen(min(upcoming - now, max(0.0, self.faults.due())))
                self.faults.due()
                continue
            self.crowd.listen(0.0)
            self.faults.due()
            for _ in range(MEMBERS - len(self.crowd.there())):
                self.crowd.spawn()
            upcoming = max(upcoming + self.faults.chance.expovariate(self.rate), now - 1.0)
            if self.faults.strike() is None:
                continue
            number += 1
            if number % 100 == 0:
                problems = len(self.crowd.problems)
                progress.step(f"{number} faults, {problems} problems")
            if number % every == 0 and number < count:
                self.under_fire += time.monotonic() - began
                self.rest(number)
                self.resume()
                upcoming = began = time.monotonic()
        self.under_fire += time.monotonic() - began
        self.rest(number)
        return number

    def finish(self) -> None:
        """All leave; none may be left."""
        for each in self.crowd.there():
            each.tell(do="end")
        until = time.monotonic() + 40.0
        while time.monotonic() < until:
            self.crowd.listen(0.05)
            if all(each.ended for each in self.crowd.everyone.values()):
                return
        for each in self.crowd.everyone.values():
            if not each.ended:
                self.crowd.note("hang", each, operation="end", error="does not end")
                os.kill(each.pid, signal.SIGKILL)


def soak(
    faults: int, seed: int, minutes: float | None, rate: float, every: int, progress: Progress
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="rally-soak-"))
    calls.prepare(seed)
    ours, theirs = socket.socketpair()
    nursery_pid = os.fork()
    if nursery_pid == 0:
        ours.close()
        nursery(theirs)
    theirs.close()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    crowd = Crowd(seed, folder, store.port, ours)
    striker = Faults(crowd, seed)
    run = Soak(crowd, striker, rate)
    try:
        for _ in range(MEMBERS):
            crowd.spawn()
        struck = run.run(faults, minutes, every, progress)
        run.finish()
    finally:
        for each in crowd.everyone.values():
            if each.pid and not each.ended:
                with suppress(OSError):
                    os.kill(each.pid, signal.SIGKILL)
        striker.close()
        ours.close()
        os.waitpid(nursery_pid, 0)
    crashes = (folder / "crashes").read_text() if (folder / "crashes").exists() else ""
    problems = Counter(each["kind"] for each in crowd.problems)
    good = not crowd.problems and not crashes
    if good:
        shutil.rmtree(folder)
    outcomes = dict(crowd.outcomes.most_common())
    return {
        "faults": struck,
        "kinds": dict(striker.struck.most_common()),
        "faults_per_second": round(struck / max(run.under_fire, 1e-3), 1),
        "stood_still_to_the_end": striker.stood,
        "members": MEMBERS,
        "members_started": len(crowd.everyone),
        "members_expelled": crowd.counts["expelled"],
        "slowest_join_s": round(max(crowd.join_seconds, default=0.0), 2),
        "calls": sum(outcomes.values()),
        "outcomes": outcomes,
        "checked_answers": dict(sorted(crowd.operations.items())),
        "wrong_answers": problems["wrong"],
        "calls_not_in_time": problems["late"] + problems["hang"],
        "unexpected_errors": problems["error"],
        "left_over": problems["unrest"] + problems["leak"],
        "problems": dict(problems),
        "first_problems": crowd.problems[:20],
        "crashes": crashes[:2000],
        "quiet_points": run.quiet,
        "folder": None if good else str(folder),
        "passed": good,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--minutes", type=float, help="stop after this many minutes, even with fewer faults"
    )
    parser.add_argument("--rate", type=float, default=10.0, help="faults per second (default 10)")
    parser.add_argument(
        "--every", type=int, default=500, help="number of faults between two checks"
    )
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    progress = Progress(max(1, args.faults // 100))
    started = time.monotonic()
    result = soak(args.faults, args.seed, args.minutes, args.rate, args.every, progress)
    progress.close()
    document = {
        "benchmark": "soak_rpc",
        "machine": machine(),
        "seed": args.seed,
        "seconds": round(time.monotonic() - started, 1),
        **result,
    }
    publish(document, args.output)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

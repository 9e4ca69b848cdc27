"""Invalid bytes for a real RPC agent, before and after the handshake; prints JSON.

    python bench/fuzz_rpc.py --frames 10000
    python bench/fuzz_rpc.py --frames 1000000 --seed 1 --output bench/results/fuzz_rpc.json

An agent in its own process gets half of the frames from strangers without the secret, and half from a peer that has
it. Meanwhile a healthy peer keeps calling it; only the sender of a bad frame may be affected. Some frames go
through sockets, the rest through the same pure code without sockets; the JSON has the numbers. The exit code is 1 if
a promise in ``targets`` was broken. See bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import pickle
import random
import resource
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from jobs import Progress, children, machine, publish

from rallypoint import rpc
from rallypoint._core.clock import Deadline
from rallypoint.errors import ProtocolError
from rallypoint.rpc.connections.handshake import introduce
from rallypoint.rpc.connections.messages import FLAG_FOREIGN, FLAG_REFS, Kind
from rallypoint.rpc.current_agent import current_agent
from rallypoint.rpc.references.ids import ForkId, RRefId
from rallypoint.wire import auth, tcp, uds
from rallypoint.wire.auth import MAX_HANDSHAKE, NONCE_BYTES, Accepting, Connecting
from rallypoint.wire.frames import DESCRIPTOR, HEADER, INLINE, Frame, FrameParser, Shared, encode
from rallypoint.wire.recycler import Recycler
from rallypoint.wire.seal import MOST, SHORT, Keys, SealedParser, Sealer
from rallypoint.wire.sharing import Sharing
from rallypoint.wire.shm import Budget
from rallypoint.wire.transport import Way


TARGET, HEALTHY = "target", "healthy"
SECRET = b"the secret of the fuzzed group"
# The share of the frames that go through the agent's sockets, unless --through-agent says otherwise.
THROUGH_AGENT = 0.5
BATCHES = 20
# Strangers that are connected at once; the agent admits 256.
AT_ONCE = 64
# The most frames on one connection of a peer that knows the secret.
MOST_ON_ONE = 200
# How much the target's memory may grow after the first batch.
MOST_GROWTH_MIB = 64
SETTLES_WITHIN = 20.0
MOST_ADDRESSES = 16 << 30
HEARTBEAT = 5.0
# The number of the call whose answer shows that all frames before it were read.
PING = 2**63 + 12345


# -- the target: runs in its own process ----------------------------------------------------------

COUNTS: Counter[str] = Counter()


def trip() -> None:
    """What strangers try to call."""
    COUNTS["tripped"] += 1


def state(asked: int) -> dict[str, Any]:
    """The state of the target. ``asked`` makes every payload different, so that each is unpickled."""
    del asked
    gc.collect()
    agent = current_agent()
    assert agent is not None
    incoming = list(agent.connections.incoming)
    memory = Path("/proc/self/statm").read_text().split()
    return {
        **{
            name: COUNTS[name]
            for name in ("unpickled", "pickle.loads", "tripped", "logged", "unhandled")
        },
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(children(os.getpid())),
        "strangers": len(agent.acceptor.strangers),
        "connections": len(incoming),
        "being_served": sum(len(each.active) for each in incoming),
        "shared_memory_pools": len(agent.lines.budget.pools),
        "shared_memory_bytes": agent.lines.budget.used,
        "owned_values": agent.rrefs.diagnostics()["owned"],
        "rss_mib": round(int(memory[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
    }


def count_unpickling() -> None:
    """Count every unpickling, by any route and any caller."""
    from rallypoint.rpc.agent import serving
    from rallypoint.rpc.serialization import payload

    loads, plain = payload.loads, pickle.loads

    def counted(*args: Any, **kwargs: Any) -> Any:
        COUNTS["unpickled"] += 1
        return loads(*args, **kwargs)

    def counted_plain(*args: Any, **kwargs: Any) -> Any:
        COUNTS["pickle.loads"] += 1
        return plain(*args, **kwargs)

    payload.loads = counted
    serving.loads = counted
    pickle.loads = counted_plain


def count_mistakes() -> None:
    """Count what the agent logs as its own failure, and uncaught exceptions."""

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            COUNTS["logged"] += 1
            note(self.format(record))

    def note(text: str) -> None:
        with contextlib.suppress(ValueError):
            print(json.dumps(text[-2000:]), flush=True)

    def unhandled(what: Any) -> None:
        COUNTS["unhandled"] += 1
        note(f"{what}: {getattr(what, 'exc_value', None)!r}")

    logging.getLogger("rallypoint").addHandler(Counting(logging.ERROR))
    threading.excepthook = unhandled
    sys.unraisablehook = unhandled


def serve(store: str) -> None:
    """The target's whole life, until its input ends."""
    # If a damaged pickle does ask for all memory, it is refused, and this machine is unharmed.
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
    count_mistakes()
    begin(TARGET, 0, store)
    count_unpickling()
    print(json.dumps("ready"), flush=True)
    sys.stdin.read()
    rpc.shutdown(graceful=False)


def begin(name: str, rank: int, store: str) -> None:
    options = rpc.NativeRpcBackendOptions(
        init_method=f"file://{store}", secret=SECRET, bind="127.0.0.1", advertise="127.0.0.1"
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


class Target:
    """The other process, and where it listens."""

    def __init__(self, store: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--target", store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Failures of functions are printed there, as in torch: there are hundreds of thousands.
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(str(json.loads(line)))

    def close(self) -> int | None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            code = self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = None
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Healthy:
    """The peer that must not be affected. Calls in the background until it is asked to pause."""

    def __init__(self) -> None:
        self.made = 0
        self.wrong: list[str] = []
        self.slowest = 0.0
        self._large = torch.arange(200_000)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _go_on(self) -> None:
        while not self._ended.wait(0.02):
            self.check()

    def check(self) -> None:
        """One call, small or with a tensor in shared memory."""
        with self._lock:
            number = self.made
            sent = self._large if number % 5 == 0 else torch.tensor([number])
            began = time.monotonic()
            try:
                got = self.call(torch.add, (sent, number))
                if not torch.equal(got, sent + number):
                    self.wrong.append(f"call {number}: a wrong answer")
            except Exception as error:
                self.wrong.append(f"call {number}: {type(error).__name__}: {error}")
            self.slowest = max(self.slowest, time.monotonic() - began)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.made += 1
        return rpc.rpc_sync(TARGET, function, args, timeout=30.0)

    def state(self) -> dict[str, Any]:
        with self._lock:
            got: dict[str, Any] = self.call(state, (self.made,))
        return {**got, "calls": self.made}

    def settled(self) -> dict[str, Any]:
        """The state once nothing from the others is left, or whatever it is after some time."""
        until = time.monotonic() + SETTLES_WITHIN
        while True:
            now = self.state()
            busy = now["strangers"] or now["connections"] > 1 or now["being_served"] > 1
            if not busy or time.monotonic() > until:
                return now
            time.sleep(0.05)

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


# -- before the handshake -------------------------------------------------------------------------

JUNK: list[Any] = [
    None,
    True,
    -1,
    2**80,
    1.5,
    "",
    "x",
    "\x00\ud800",
    "é" * 300,
    [],
    [[[[]]]],
    {},
    {"refused": "x"},
]


class Strangers:
    """What senders without the secret send."""

    def __init__(self, chance: random.Random, me: dict[str, Any]) -> None:
        self._chance = chance
        self._me = me
        # A call that would be noticed, appended to whatever is sent.
        self._call = b"".join(encode(Kind.CALL, 1, pickle.dumps((trip, (), None))))
        # The proof from a handshake with another peer: valid once, and never again.
        other = Accepting(SECRET, me, bytes(NONCE_BYTES))
        talk = Connecting(SECRET, me, bytes(NONCE_BYTES))
        self._old = talk.start()
        self._old_proof = talk.receive(other.receive(self._old))

    def stream(self) -> bytes:
        """Everything that one stranger sends."""
        chance = self._chance
        hello = Connecting(self.guess(), self._me, chance.randbytes(NONCE_BYTES)).start()
        match chance.randrange(10):
            case 0:
                return chance.randbytes(chance.randrange(300)) + self._call
            case 1:
                return self._call * chance.randrange(1, 4)
            case 2:
                return self.damaged(hello) + self._old_proof + self._call
            case 3:
                return hello + self.damaged(self._old_proof) + self._call
            case 4:
                return self._old + self._old_proof + self._call
            case 5:
                return hello + self.message({"proof": secrets.token_hex(32)}) + self._call
            case 6:
                return self.message(self.twisted(hello)) + self._old_proof + self._call
            case 7:
                cut = hello + self._old_proof
                return cut[: chance.randrange(len(cut))]
            case 8:
                length = chance.choice([0, 1, MAX_HANDSHAKE, MAX_HANDSHAKE + 1, 2**31, 2**32 - 1])
                return b"RLY1" + struct.pack("<I", length) + hello[8:] + self._call
            case _:
                junk = chance.choice(
                    ["{", "[" * 4000, "nul", '{"a":' * 1300, "1" * 5000, '"\\ud800"']
                )
                return self.message(junk) + hello + self._old_proof + self._call

    def guess(self) -> bytes:
        return self._chance.randbytes(24)

    def damaged(self, data: bytes) -> bytes:
        chance, damaged = self._chance, bytearray(data)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(damaged))
            match chance.randrange(4):
                case 0 | 1:
                    damaged[at] ^= 1 << chance.randrange(8)
                case 2:
                    damaged[at:at] = chance.randbytes(chance.randrange(1, 20))
                case _:
                    del damaged[at : at + chance.randrange(1, 20)]
            if not damaged:
                break
        return bytes(damaged)

    def twisted(self, hello: bytes) -> dict[str, Any]:
        """A hello with valid JSON and invalid content."""
        chance = self._chance
        fields: dict[str, Any] = json.loads(hello[8:])
        inner = fields["me"] if chance.random() < 0.4 else fields
        key = chance.choice([*inner, "new"])
        if chance.random() < 0.3:
            inner.pop(key, None)
        else:
            inner[key] = chance.choice(JUNK)
        return fields

    def message(self, content: object) -> bytes:
        text = content if isinstance(content, str) else json.dumps(content)
        data = text.encode()
        return b"RLY1" + struct.pack("<I", len(data)) + data

    def pieces(self, data: bytes) -> list[bytes]:
        chance = self._chance
        if len(data) < 2 or chance.random() < 0.5:
            return [data]
        cuts = sorted(chance.randrange(len(data)) for _ in range(chance.randrange(1, 4)))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def strangers_alone(strangers: Strangers, me: dict[str, Any], count: int) -> Counter[str]:
    """Feed strangers' bytes straight into the handshake code."""
    found: Counter[str] = Counter()
    for _ in range(count):
        end = Accepting(SECRET, me, os.urandom(NONCE_BYTES))
        try:
            for piece in strangers.pieces(strangers.stream()):
                end.receive(piece)
            found["unfinished"] += 1
        except ProtocolError:
            found["refused"] += 1
        if end.done or end.peer is not None:
            found["believed"] += 1
    return found


def strangers_at_sockets(
    strangers: Strangers, chance: random.Random, addresses: dict[str, Any], count: int
) -> Counter[str]:
    """Send strangers' bytes to the agent, over some connections at a time."""
    found: Counter[str] = Counter()
    for first in range(0, count, AT_ONCE):
        open_ones: list[socket.socket] = []
        for _ in range(min(AT_ONCE, count - first)):
            kind = "tcp" if chance.random() < 0.2 else "uds"
            found[kind] += 1
            sock = connect(kind, addresses[kind], chance)
            sock.settimeout(10.0)
            try:
                for number, piece in enumerate(strangers.pieces(strangers.stream())):
                    if number == 0 and kind == "uds" and piece and chance.random() < 0.1:
                        fds = [chance.choice((0, sock.fileno()))] * chance.randrange(1, 4)
                        socket.send_fds(sock, [piece], fds)
                        found["with descriptors"] += 1
                    else:
                        sock.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                found["cut off while sending"] += 1
            open_ones.append(sock)
        for sock in open_ones:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            data = b""
            try:
                while more := sock.recv(65536):
                    data += more
                found["told why" if b'"refused"' in data else "closed without a word"] += 1
            except ConnectionResetError:
                found["reset"] += 1
            except TimeoutError:
                found["never closed"] += 1
            if b'"proof"' in data:
                found["believed"] += 1
            sock.close()
    return found


def connect(kind: str, address: Any, chance: random.Random) -> socket.socket:
    if kind == "uds":
        return uds.connect(address, Deadline(10.0))
    # From many addresses: a port is unusable for a minute after each connection.
    sock = socket.socket()
    sock.settimeout(10.0)
    sock.bind((f"127.0.0.{chance.randrange(2, 250)}", 0))
    sock.connect(tuple(address))
    tcp.prepare(sock, HEARTBEAT)
    return sock


# -- after the handshake --------------------------------------------------------------------------


class Frames:
    """Frames of a peer that knows the secret. What they ask for is harmless; how they ask is not."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        one = RRefId(1000, 1), ForkId(1000, 2)
        call = pickle.dumps((abs, (-5,), None), 5)
        contents: list[Any] = [
            None,
            (),
            (1,),
            (1, 2),
            (abs, (-5,), None),
            (abs, (), {"x": 1}),
            (len, (b"12",), {}),
            (int, ("x",), None),
            (list, ((1, 2, 3),), {}),
            (7, 8, 9),
            one,
            (*one, call),
            (*one, b"\xff"),
            (one[0],),
            ([], []),
            {"a": [1.5, None, b"x" * 50]},
            "text" * 20,
        ]
        self._pickles = [pickle.dumps(each, 5) for each in contents]
        self._kinds = [Kind(number) for number in range(1, 15)]

    def payload(self) -> bytes:
        chance = self._chance
        if chance.random() < 0.5:
            return chance.choice(self._pickles)
        # No opcode has this number, so nothing that follows is read.
        return b"\xff" * chance.randrange(60)

    def sound(self) -> tuple[bytes, Frame]:
        """A frame after which the next one can still be found."""
        chance = self._chance
        payload = self.payload()
        buffers: list[Any] = []
        if chance.random() < 0.3:
            buffers = [self.buffer() for _ in range(chance.randrange(1, 4))]
        kind = chance.choice(self._kinds)
        call = chance.choice((chance.randrange(20), chance.getrandbits(64)))
        flags = chance.choice((0, 0, 0, FLAG_FOREIGN, FLAG_REFS, chance.randrange(256)))
        left = chance.choice((0, 0, 1, 50, chance.getrandbits(32)))
        data = b"".join(encode(kind, call, payload, buffers, flags=flags, time_left=left))
        return data, Frame(kind, flags, call, left, payload, buffers)

    def buffer(self) -> Any:
        chance = self._chance
        if chance.random() < 0.5:
            return memoryview(b"\xfe" * chance.choice((0, 1, 100)))
        segment = chance.choice((0, 1, 4095, 4096, INLINE - 1))
        size = chance.choice((0, 1, 65536, 1 << 30, 1 << 38))
        return Shared(segment, chance.getrandbits(32), chance.randrange(2), size)

    def broken(self) -> bytes:
        """A frame after which nothing can be trusted."""
        chance = self._chance
        data = bytearray(self.sound()[0])
        match chance.randrange(6):
            case 0:
                # Only in the header and the descriptors: what the payload asks for must stay harmless.
                head = HEADER.size + DESCRIPTOR.size * int.from_bytes(data[6:8], "little")
                for _ in range(chance.randrange(1, 8)):
                    data[chance.randrange(head)] ^= 1 << chance.randrange(8)
            case 1:
                data[:4] = chance.randbytes(4)
            case 2:
                data[6:8] = chance.randbytes(2)
            case 3:
                data[4] = chance.choice((0, chance.randrange(32, 256)))
            case 4:
                size = chance.choice((1 << 20, 1 << 39, 1 << 41, chance.getrandbits(64)))
                data[6:8] = (1).to_bytes(2, "little")
                data[HEADER.size : HEADER.size] = DESCRIPTOR.pack(size, 0, INLINE, 0)
            case _:
                del data[chance.randrange(len(data)) :]
        return bytes(data) + b"\xff" * chance.randrange(100)

    def batch(self, most: int) -> tuple[list[bytes], list[Frame]]:
        """What is sent on one connection: sound frames, and a broken one at the end."""
        made = [self.sound() for _ in range(most - 1)]
        return [*(data for data, _ in made), self.broken()], [frame for _, frame in made]


def sealed(chance: random.Random, sealer: Sealer, data: bytes) -> list[bytes]:
    """``data``, sealed in records."""
    records, at = [], 0
    while at < len(data):
        size = chance.choice((1, 24, 500, SHORT, SHORT + 1, 50_000, MOST))
        part = memoryview(data)[at : at + size]
        records.append(
            bytes(sealer.long([part])) if len(part) > SHORT else sealer.short(bytes(part))
        )
        at += len(part)
    return records


def altered(chance: random.Random, records: list[bytes]) -> tuple[int, bytes]:
    """The index of the first altered record, and some records as altered by a relay without the keys."""
    at = chance.randrange(len(records))
    records = list(records)
    record = bytearray(records[at])
    match chance.randrange(6):
        case 0 | 1:
            record[chance.randrange(len(record))] ^= 1 << chance.randrange(8)
        case 2:
            del record[chance.randrange(len(record))]
        case 3:
            record[0:0] = chance.randbytes(chance.randrange(1, 40))
        case 4:
            record[0:0] = records[chance.randrange(len(records))]
            if record.startswith(records[at]):
                at += 1  # repeated: the first one is intact
                record = record[len(record) // 2 :]
                records.insert(at, b"")
        case _:
            record = bytearray()
    records[at] = bytes(record)
    # More data follows, so that no one waits for the rest of a record whose length was increased.
    return at, b"".join([*records, bytes(MOST + 100)])


def sealed_alone(frames: Frames, chance: random.Random, count: int) -> Counter[str]:
    """Feed sealed frames into the parser, altered by a relay."""
    found: Counter[str] = Counter()
    name = chance.choice(auth.SEALS())
    while count:
        most = min(count, chance.randrange(1, MOST_ON_ONE))
        count -= most
        found["frames"] += most
        found["sealed frames"] += most
        made = [frames.sound() for _ in range(most)]
        keys = Keys.of(SECRET, name, "there", (chance.randbytes(8),))
        sealer = Sealer(keys)
        groups = [sealed(chance, sealer, data) for data, _ in made]
        records = [record for each in groups for record in each]
        first, data = altered(chance, records)
        ends, total = [], 0
        for each in groups:
            total += len(each)
            ends.append(total)
        whole = sum(end <= first for end in ends)
        parser, came = SealedParser(keys, allocate=Recycler(keep=0).allocate), []
        size = max(chance.choice((1, 7, 24, 100, 5000, len(data))), len(data) // 200)
        try:
            for at in range(0, len(data), size):
                came += parser.feed(data[at : at + size])
            found["believed"] += 1
        except ProtocolError:
            found["refused"] += 1
        sound = [frame for _, frame in made]
        if len(came) > whole:
            found["believed"] += 1
        if any(map(differs, came, sound)):
            found["wrong"] += 1
        found["came out equal"] += len(came)
    return found


def frames_alone(frames: Frames, chance: random.Random, count: int) -> Counter[str]:
    """Feed frames straight into the parser."""
    found: Counter[str] = Counter()
    allocate = Recycler(keep=0).allocate
    while count:
        most = min(count, chance.randrange(1, MOST_ON_ONE))
        count -= most
        found["frames"] += most
        pieces, sound = frames.batch(most)
        data = b"".join(pieces)
        parser = FrameParser(allocate=allocate)
        came: list[Frame] = []
        size = chance.choice((1, 7, 24, 100, 5000, len(data)))
        size = max(size, len(data) // 200)
        try:
            for at in range(0, len(data), size):
                came += parser.feed(data[at : at + size])
        except ProtocolError:
            found["refused"] += 1
        # One piece may hold the last sound frames and the broken one, which are refused together.
        whole = came[: len(sound)]
        if any(map(differs, whole, sound)):
            found["wrong"] += 1
        found["came out equal"] += len(whole)
    return found


def differs(a: Frame, b: Frame) -> bool:
    if a[:4] != b[:4] or a.payload != b.payload or len(a.buffers) != len(b.buffers):
        return True
    return any(
        x != y if isinstance(y, Shared) else bytes(x) != bytes(y)
        for x, y in zip(a.buffers, b.buffers, strict=True)
    )


def frames_at_sockets(
    frames: Frames,
    chance: random.Random,
    addresses: dict[str, Any],
    me: dict[str, Any],
    count: int,
) -> Counter[str]:
    """Send frames to the agent, on connections that have completed the handshake."""
    found: Counter[str] = Counter()
    budget = Budget(1 << 26)
    while count:
        most = min(count, chance.randrange(1, MOST_ON_ONE))
        count -= most
        kind = "tcp" if chance.random() < 0.3 else "uds"
        sock = connect(kind, addresses[kind], chance)
        who = {**me, "name": "bad", "id": 1000 + chance.getrandbits(20)}
        _, rest, side, keys = introduce(
            sock,
            SECRET,
            who,
            Deadline(20.0),
            side=kind == "uds",
            channel=Way(tcp.TRANSPORT).channel(addresses[kind]) if kind == "tcp" else b"",
            seals=auth.SEALS() if kind == "tcp" else (),
        )
        found["connections"] += 1
        found["frames"] += most
        found[kind] += 1
        pieces, _ = frames.batch(most)
        sharing = None
        if side is not None and chance.random() < 0.5:
            # Real shared memory among much that is only claimed to be.
            sharing = Sharing(side, budget)
            side = None
            placed, _ = sharing.place([memoryview(bytes(70_000))] * chance.randrange(1, 4))
            payload = pickle.dumps((abs, (-1,), None))
            pieces.insert(0, b"".join(encode(Kind.CALL, 99, payload, placed)))
        broken = pieces.pop()
        ping = encode(Kind.CALL, PING, pickle.dumps((abs, (-1,), None)))
        calls, parser = b"".join([*pieces, *ping]), FrameParser()
        if keys is not None:
            sealer, parser = Sealer(keys[0]), SealedParser(keys[1])
            calls = b"".join(sealed(chance, sealer, calls))
            broken_records = sealed(chance, sealer, broken)
            if chance.random() < 0.5:
                # A call that would be noticed, altered by a relay: it must not be taken for the peer's.
                noticed = b"".join(encode(Kind.CALL, 1, pickle.dumps((trip, (), None))))
                _, data = altered(chance, [Sealer(keys[0]).short(noticed), *broken_records])
                broken = data
                found["altered by a relay"] += 1
            else:
                broken = b"".join(broken_records)
        exchange(sock, parser, calls, rest, found)
        exchange(sock, parser, broken, None, found)
        sock.close()
        if side is not None:
            side.close()
        if sharing is not None:
            sharing.close()
    return found


def exchange(
    sock: socket.socket,
    parser: FrameParser,
    data: bytes,
    before: bytes | None,
    found: Counter[str],
) -> None:
    """Send all of ``data`` while reading replies, until the ping is answered; without a ping, until the connection ends.

    Args:
        before: what has already arrived; None: there is no ping in ``data``.
    """
    sock.setblocking(False)
    rest = memoryview(data)
    replies = parser.feed(before or b"")
    is_half = False
    until = time.monotonic() + 60.0
    while True:
        found["replies"] += len(replies)
        if before is not None and any(frame.call == PING for frame in replies):
            return
        left = until - time.monotonic()
        if left <= 0.0:
            found["never answered" if before is not None else "never closed"] += 1
            return
        if not rest and not is_half and before is None:
            # At once if all of it was cut off: nothing sent gets no answer.
            is_half = True
            with contextlib.suppress(OSError):  # the other end was faster
                sock.shutdown(socket.SHUT_WR)
        readable, writable, _ = select.select([sock], [sock] if rest else [], [], left)
        replies = []
        try:
            if readable:
                got = sock.recv(1 << 18)
                if not got:
                    found["cut off too early" if before is not None else "ended"] += 1
                    return
                # After a cut, what arrives may start in mid-reply, and only whole replies are examined.
                replies = parser.feed(got) if before is not None else []
            if writable and rest:
                rest = rest[sock.send(rest) :]
        except (BrokenPipeError, ConnectionResetError):
            found["cut off too early" if before is not None else "reset"] += 1
            return


# -- all of it ------------------------------------------------------------------------------------


def split(count: int, parts: int) -> Iterator[int]:
    for number in range(parts):
        yield count * (number + 1) // parts - count * number // parts


def run(args: argparse.Namespace, folder: Path, progress: Progress) -> dict[str, Any]:
    chance = random.Random(args.seed)
    store = str(folder / "store")
    target, healthy = Target(store), Healthy()
    code: int | None = None
    try:
        begin(HEALTHY, 1, store)
        result = fuzz(args, chance, healthy, progress)
    finally:
        healthy.close()
        with contextlib.suppress(Exception):
            rpc.shutdown(graceful=False)
        code = target.close()
    result["target"]["exit_code"] = code
    result["target"]["said"] = target.said[1:20]
    result["targets"] += [
        {"what": "the target ends as it should", "holds": code == 0},
        {"what": "the target logged no failure of its own", "holds": len(target.said) <= 1},
    ]
    return result


def fuzz(
    args: argparse.Namespace, chance: random.Random, healthy: Healthy, progress: Progress
) -> dict[str, Any]:
    agent = current_agent()
    assert agent is not None
    addresses = dict(agent.find(TARGET).addresses)
    me = {**agent.roster.introduction(), "incarnation": "00" * 8}
    strangers, frames = Strangers(chance, me), Frames(chance)
    for _ in range(20):
        healthy.check()
    half = args.frames // 2
    before_sockets = int(half * args.through_agent)
    after_sockets = int((args.frames - half) * args.through_agent)
    alone = args.frames - half - after_sockets

    # Both kinds once, to fill pools, threads and caches.
    frames_at_sockets(frames, chance, addresses, me, 2000)
    strangers_at_sockets(strangers, chance, addresses, 200)
    base = healthy.settled()
    healthy.start()

    unpickled_before: list[int] = []
    found: dict[str, Counter[str]] = {
        name: Counter()
        for name in (
            "before, sockets",
            "before, handshake alone",
            "after, sockets",
            "after, parser alone",
            "after, sealed",
        )
    }
    states: list[dict[str, Any]] = []
    seconds: Counter[str] = Counter()

    def timed(name: str, act: Callable[[], Counter[str]]) -> None:
        began = time.monotonic()
        found[name].update(act())
        seconds[name] += time.monotonic() - began

    for count in split(before_sockets, BATCHES):
        progress.step("strangers, at the agent")
        first = healthy.settled()
        timed(
            "before, sockets",
            lambda count=count: strangers_at_sockets(strangers, chance, addresses, count),
        )
        last = healthy.settled()
        states.append(last)
        # Only the healthy peer's calls may have been unpickled meanwhile.
        calls = last["calls"] - first["calls"]
        unpickled_before += [
            last[name] - first[name] - calls for name in ("unpickled", "pickle.loads")
        ]
    progress.step("strangers, at the handshake's code")
    timed("before, handshake alone", lambda: strangers_alone(strangers, me, half - before_sockets))
    for count in split(after_sockets, BATCHES):
        progress.step("peers, at the agent")
        timed(
            "after, sockets",
            lambda count=count: frames_at_sockets(frames, chance, addresses, me, count),
        )
        states.append(healthy.settled())
    progress.step("peers, at the parser")
    timed(
        "after, parser alone",
        lambda: frames_alone(frames, chance, alone - alone // 2),
    )
    progress.step("relays, at the parser of sealed frames")
    timed("after, sealed", lambda: sealed_alone(frames, chance, alone // 2))
    healthy.close()
    for _ in range(20):
        healthy.check()
    end = healthy.settled()

    growth = round(max(each["rss_mib"] for each in [*states, end]) - base["rss_mib"], 1)
    threads = rpc.NativeRpcBackendOptions().num_worker_threads + 8
    everything = sum(found.values(), Counter())
    held = {
        "nothing was unpickled for a stranger": not any(unpickled_before)
        and not end["tripped"]
        and bool(unpickled_before),
        "no stranger was believed": not everything["believed"],
        "every connection was ended": not everything["never closed"],
        "no connection was ended for what can be answered": not everything["cut off too early"]
        and not everything["never answered"],
        "frames before a broken one came out equal": not everything["wrong"],
        "the healthy peer's calls were all right": not healthy.wrong and healthy.made > 40,
        "no descriptor is left over": end["descriptors"] <= base["descriptors"],
        "no thread is left over": end["threads"] <= max(base["threads"], threads),
        "no process is left over": end["processes"] == base["processes"],
        "no connection is left over": end["connections"] == 1 and not end["strangers"],
        "no shared memory is left over": end["shared_memory_pools"] <= base["shared_memory_pools"]
        and end["shared_memory_bytes"] <= base["shared_memory_bytes"] + (1 << 24),
        f"memory grew by at most {MOST_GROWTH_MIB} MiB": growth <= MOST_GROWTH_MIB,
        "no exception went unhandled": not end["unhandled"] and not end["logged"],
    }
    return {
        "frames": {
            "all": args.frames,
            "through_the_agents_sockets": before_sockets + found["after, sockets"]["frames"],
            "through_the_pure_code_alone": half
            - before_sockets
            + found["after, parser alone"]["frames"]
            + found["after, sealed"]["frames"],
            "before_authentication": {
                "sockets": before_sockets,
                "handshake_alone": half - before_sockets,
            },
            "after_authentication": {
                "sockets": found["after, sockets"]["frames"],
                "parser_alone": found["after, parser alone"]["frames"],
                "parser_of_sealed_frames": found["after, sealed"]["frames"],
            },
        },
        "found": {name: dict(sorted(each.items())) for name, each in found.items()},
        "seconds": {name: round(each, 1) for name, each in seconds.items()},
        "unpickled_for_strangers": sum(unpickled_before),
        "healthy": {
            "calls": healthy.made,
            "wrong": healthy.wrong[:10],
            "slowest_s": round(healthy.slowest, 3),
        },
        "target": {"first": base, "last": end, "grew_by_mib": growth},
        "targets": [{"what": what, "holds": holds} for what, holds in held.items()],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--frames", type=int, default=10_000, help="total number of frames (default 10,000)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument(
        "--through-agent",
        type=float,
        default=THROUGH_AGENT,
        help=f"the fraction that goes through sockets (default {THROUGH_AGENT})",
    )
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        serve(args.target)
        return 0

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="rally-fuzz-"))
    progress = Progress(2 * BATCHES + 3)
    result: dict[str, Any] = {"benchmark": "fuzz_rpc", "seed": args.seed, "machine": machine()}
    began = time.monotonic()
    try:
        result.update(run(args, folder, progress))
    finally:
        progress.close()
        shutil.rmtree(folder, ignore_errors=True)
    result["took_s"] = round(time.monotonic() - began, 1)
    return 1 if publish(result, args.output) else 0


if __name__ == "__main__":
    sys.exit(main())

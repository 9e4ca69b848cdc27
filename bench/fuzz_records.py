"""Invalid records for the code that reads the stores of a job with a secret; prints JSON.

    python bench/fuzz_records.py --records 100000
    python bench/fuzz_records.py --records 1000000 --seed 1 --output bench/results/fuzz_records.json

Half of the records are a stranger's: genuine ones that were changed, cut, joined, moved to another key, another job or another
secret, or stripped of their MAC. None may be accepted. The other half are a member's: any JSON under a valid MAC. They may
only raise the errors that their readers expect. All kinds take turns: records of the rendezvous, introductions, and member
records of rpc. The exit code is 1 if a promise in ``targets`` was broken.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs import Progress, machine, publish

from rallypoint.errors import ProtocolError, RpcError
from rallypoint.rendezvous import fields, introduction, notes, plan as plans
from rallypoint.rendezvous.introduction import Introduction, Role
from rallypoint.rendezvous.records import BadRecord, Codec
from rallypoint.rpc.groups.member import Member
from rallypoint.rpc.groups.signing import Signer


SECRET, ANOTHER = b"the secret of the fuzzed job", b"the secret of another job"
JOB, RPC_JOB = "fuzzed", "0011223344556677"
BATCHES = 20
# How much memory may grow after the first batch.
MOST_GROWTH_MIB = 16
# The most bytes in a record; a member's lists and texts are far shorter.
MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Reader:
    """One kind of record.

    Args:
        keys: it is stored under one of these.
        make: the bytes of a body under a key, by a process with this secret, of this job.
        accept: whether bytes under a key are accepted as genuine; raises only what is expected of it.
        use: what readers do with accepted bytes.
    """

    keys: tuple[str, ...]
    make: Callable[[str, Any, bytes, str], bytes]
    accept: Callable[[str, bytes], bool]
    use: Callable[[str, bytes], None]


# -- records of the rendezvous ------------------------------------------------------------------------

_CODEC = Codec(JOB, SECRET)


def _make_record(key: str, body: Any, secret: bytes, job: str) -> bytes:
    return Codec(job, secret).pack(key, body)


def _accepts_record(key: str, data: bytes) -> bool:
    try:
        _CODEC.unpack(key, data)
    except BadRecord:
        return False
    return True


def _use_record(key: str, data: bytes) -> None:
    """What the protocol does with a record, whatever its content."""
    try:
        body = _CODEC.unpack(key, data)
    except BadRecord:
        return
    plans.arrival(3, body)
    plans.ids_in(body)
    plans.ids_key(1, body)
    plans.first(body)
    plans.names(body, 0, "abc")
    plans.restarts([body], whole=True)
    plans.seeded(body)
    plans.make("me.0", 1, [3], [], {3: body})
    fields.generation(body), fields.beat_number(body), fields.has_left(body)
    notes.leads_on(body, notes.age(body, body))


# -- introductions ------------------------------------------------------------------------------------

_ME = Introduction(
    node_id="a",
    host="host",
    run_id=JOB,
    nodes="2",
    given_rank=False,
    rallypoint="1",
    torch="2",
    python="3",
)


def _make_introduction(key: str, body: Any, secret: bytes, job: str) -> bytes:
    told = {"host": str(body.get("host", "h"))[:90], "nodes": str(body.get("nodes", "3"))[:90]}
    return introduction.pack(
        replace(_ME, node_id="b", run_id=job, **told), secret, Role(key.rpartition("/")[2])
    )


def _accepts_introduction(key: str, data: bytes) -> bool:
    guest = introduction.unpack(data, SECRET, Role(key.rpartition("/")[2]))
    found = () if guest is None else introduction.mismatches(_ME, SECRET, guest)
    assert guest is None or guest.introduction.host.isprintable()
    # Another job's introduction is genuine, but results only in this mismatch.
    return (
        guest is not None and guest.proved and not any(each.field == "--rdzv-id" for each in found)
    )


def _use_introduction(key: str, data: bytes) -> None:
    _accepts_introduction(key, data)


# -- member records of rpc ----------------------------------------------------------------------------

_SIGNER = Signer(SECRET, RPC_JOB)


def _make_member(key: str, body: Any, secret: bytes, job: str) -> bytes:
    content = json.dumps({"v": 1, "member": body}).encode()
    return Signer(secret, RPC_JOB if job == JOB else job).sign(key, content)


def _accepts_member(key: str, data: bytes) -> bool:
    return _SIGNER.read(key, data) is not None


def _use_member(key: str, data: bytes) -> None:
    content = _SIGNER.read(key, data)
    if content is not None:
        try:
            Member.decode(content)
        except (ProtocolError, RpcError):
            pass


READERS = {
    "rendezvous": Reader(
        ("3/node/0", "3/node/1", "3/plan", "head", "beat/ab"),
        _make_record,
        _accepts_record,
        _use_record,
    ),
    "introduction": Reader(
        ("rally-guests/host", "rally-guests/other"),
        _make_introduction,
        _accepts_introduction,
        _use_introduction,
    ),
    "rpc member": Reader(("rank/0", "rank/1"), _make_member, _accepts_member, _use_member),
}


# -- what strangers and members write -----------------------------------------------------------------

_NAMES = [
    "id",
    "host",
    "label",
    "last_rank",
    "given_rank",
    "facts",
    "order",
    "names",
    "spares",
    "standbys",
    "first",
    "workers",
    "by",
    "ids",
    "generation",
    "beat",
    "left",
    "addr",
    "port",
    "moves",
    "store",
    "restarts",
    "verdict",
    "watch",
    "name",
    "incarnation",
    "addresses",
    "devices",
    "counts",
    "maps",
    "visible",
    "version",
    "extra",
    "pid",
    "nodes",
]


def any_json(chance: random.Random, depth: int = 3) -> Any:
    match chance.randrange(9 if depth else 6):
        case 0:
            return chance.choice([0, 1, -1, 2**31, 2**63, -(2**70), chance.getrandbits(16)])
        case 1:
            return chance.choice([True, False, None, 1.5, -0.0, 1e300])
        case 2:
            return chance.choice(
                ["", "a", "ab" * 16, "\x1b[2J", "ü\u2028", "\ud83d\ude00", "x" * 300]
            )
        case 3:
            return "".join(chr(chance.randrange(1, 0xD7FF)) for _ in range(chance.randrange(12)))
        case 4 | 5:
            return chance.choice(["host-a", "127.0.0.1", 29400, "tcp", [], {}])
        case 6:
            return [any_json(chance, depth - 1) for _ in range(chance.randrange(5))]
        case _:
            return any_body(chance, depth - 1)


def any_body(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    return {chance.choice(_NAMES): any_json(chance, depth) for _ in range(chance.randrange(7))}


def forged(chance: random.Random, reader: Reader) -> tuple[str, str, bytes]:
    """How it was forged, its key, and its bytes. Never a genuine record under its own key."""
    key, other = chance.sample(reader.keys, 2)
    true = reader.make(key, any_body(chance), SECRET, JOB)
    match chance.randrange(8):
        case 0:
            at = chance.randrange(len(true))
            changed = true[:at] + bytes([true[at] ^ (1 << chance.randrange(8))]) + true[at + 1 :]
            return "a bit changed", key, changed
        case 1:
            return "cut", key, true[: chance.randrange(len(true))]
        case 2:
            at = chance.randrange(len(true) + 1)
            return "longer", key, true[:at] + chance.randbytes(chance.randrange(1, 40)) + true[at:]
        case 3:
            return "of another key", key, reader.make(other, any_body(chance), SECRET, JOB)
        case 4:
            return "of another secret", key, reader.make(key, any_body(chance), ANOTHER, JOB)
        case 5:
            return "of another job", key, reader.make(key, any_body(chance), SECRET, "another")
        case 6:
            second = reader.make(key, {**any_body(chance), "host": "joined"}, SECRET, JOB)
            return "two joined", key, true[: len(true) // 2] + second[len(second) // 2 :]
        case _:
            return "no record", key, chance.randbytes(chance.randrange(200))


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def fuzz(count: int, seed: int, progress: Progress) -> dict[str, Any]:
    chance = random.Random(seed)
    done: Counter[str] = Counter()
    accepted: list[str] = []
    errors: list[str] = []
    names = list(READERS)
    before = 0.0
    for batch in range(BATCHES):
        progress.step(f"batch {batch + 1}")
        for number in range(count * batch // BATCHES, count * (batch + 1) // BATCHES):
            name = names[number % len(names)]
            reader = READERS[name]
            try:
                if number % 2:
                    how = "a member's"
                    key = chance.choice(reader.keys)
                    data = reader.make(key, any_body(chance), SECRET, JOB)
                    reader.use(key, data[:MOST_BYTES])
                else:
                    how, key, data = forged(chance, reader)
                    if reader.accept(key, data):
                        accepted.append(f"{name}, {how}: {data!r}")
                done[f"{name}: {how}"] += 1
            except Exception:  # whatever it is, it was not expected
                errors.append(f"{name}, record {number}: {traceback.format_exc(limit=-2)}")
        if batch == 0:
            before = rss_mib()
    return {
        "records": sum(done.values()),
        "by kind": dict(sorted(done.items())),
        "accepted": accepted[:5],
        "errors": errors[:5],
        "growth_mib": round(rss_mib() - before, 1),
        "targets": [
            {"what": "no forged record is accepted", "holds": not accepted},
            {"what": "readers raise only what is expected of them", "holds": not errors},
            {
                "what": f"memory grows by at most {MOST_GROWTH_MIB} MiB",
                "holds": rss_mib() - before <= MOST_GROWTH_MIB,
            },
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000, help="how many (default 10,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    progress = Progress(BATCHES)
    began = time.monotonic()
    try:
        found = fuzz(args.records, args.seed, progress)
    finally:
        progress.close()
    result = {"benchmark": "fuzz_records", "seed": args.seed, "machine": machine(), **found}
    result["took_s"] = round(time.monotonic() - began, 1)
    return 1 if publish(result, args.output) else 0


if __name__ == "__main__":
    sys.exit(main())

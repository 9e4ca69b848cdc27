"""A :class:`~rallypoint.rendezvous.store.Store` in an etcd cluster, which outlives every node of the job.

[Note: Keys in etcd]
Below the prefix, a key ``K`` (percent-encoded, so that it contains no ``=`` or ``:``) is stored as

    K=              its value
    K=+05, K=-00    additions: each put stands for +2**5, for -2**0, …
    :writer/UID     one per connection, see below
    :lease          the lease of the prefix, see :class:`JobLease`

etcd counts how often a key was put since its creation (its *version*), so a counter needs no compare-and-set. To add 37,
put ``+00``, ``+02`` and ``+05``; the sum is the value (0 if there is none) plus 2**n times the version of each. One
transaction puts them and reads all of them back. So each of N concurrent callers needs one round trip, and a counter has
at most 127 small keys. To read a key, read [``K=``, ``K>``), which includes value and counter.

[Note: Exactly-once writes]
An answer may be lost after its transaction has taken effect. So every transaction that writes also puts the connection's
writer key, on the condition that it was put n times before, as the connection has counted. If it was put n + 1 times, an
earlier attempt has taken effect, at the revision of that last put; its answer is then read as of that revision. After an
operation with an unknown outcome, the connection uses a new writer key.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, RendezvousConnectionError

from .etcd_client import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    EtcdAccess,
    EtcdClient,
    Interrupted,
    Item,
    LeaseLost,
    encoded,
    parse_items,
)


# The most operations in a transaction: etcd's default for --max-txn-ops.
CHUNK = 128
# Seconds after which a watch is renewed, to notice a silent server.
WATCH_SLICE = 20.0
# Bits of an amount; counters of c10d are signed 64-bit numbers.
DIGITS = 63

Json = dict[str, Any]


class EtcdStore:
    """One connection to a job's keys in etcd.

    It connects at the first operation. Writes through one object are serialized.

    Args:
        endpoints: ``host:port`` of members of the cluster. A majority of the cluster must be alive.
        prefix: the prefix of all the job's keys, like a folder (``rally/my-job``).
        ca_cert, cert, key: files for TLS: the authority of the servers' certificates, our certificate, and its key.
        user, password: for clusters with authentication.
        ttl: seconds after which the job's keys are removed once no live process has a connection; None: only
            :meth:`delete_prefix` removes them. The cluster rounds very short ones up.
        patience: seconds after which a cluster that does not answer counts as lost.
        lease: another connection's lease, in place of ``ttl``.

    Raises:
        ConfigError: a setting is invalid, a file cannot be read, or etcd3gw is not installed.
    """

    def __init__(
        self,
        *,
        endpoints: Sequence[str],
        prefix: str,
        ca_cert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        user: str | None = None,
        password: str | None = None,
        ttl: int | None = None,
        patience: float = 10.0,
        lease: JobLease | None = None,
    ) -> None:
        if not prefix.strip("/"):
            raise ConfigError("prefix", prefix, "expected a name, so that jobs do not share keys")
        if ttl is not None and ttl < 1:
            raise ConfigError("ttl", ttl, "expected whole seconds, at least 1")
        access = EtcdAccess(
            endpoints=tuple(endpoints),
            ca_cert=ca_cert,
            cert=cert,
            key=key,
            user=user,
            password=password,
            patience=patience,
        )
        self._client = EtcdClient(access)
        self._prefix = prefix
        self._root = quote(prefix.rstrip("/") + "/").encode()
        if lease is None and ttl is not None:
            lease = JobLease(access, self._root, ttl)
        self._lease = lease
        self._turn = threading.Lock()
        self._writer, self._written = self._new_writer(), 0
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        name = self._name(key)
        self._write([_delete(name + b"+", name + b"."), _put(name, value)])

    def get(self, key: str, timeout: float) -> bytes:
        name, deadline = self._name(key), Deadline(timeout)
        trouble: Deadline | None = None  # set while watches fail
        pause = FIRST_PAUSE
        while True:
            items, revision = self._read(name)
            if (value := _value(name, items)) is not None:
                return value
            left = deadline.remaining() or 0.0
            if left <= 0:
                raise TimeoutError(f"no key {key!r} within {timeout:g} s")
            try:
                # There was no value before, so the first change contains all of it.
                items = self._client.watch(name, _end(name), revision + 1, min(left, WATCH_SLICE))
                trouble, pause = None, FIRST_PAUSE
            except Interrupted as interruption:
                patience = self._client.access.patience
                trouble = trouble or Deadline(patience)
                if trouble.expired():
                    raise RendezvousConnectionError(
                        f"{self._client.name}: all watches have failed for {patience:g} s: {interruption}"
                    ) from None
                self._client.pause(min(pause, left))
                pause = min(pause * 2, LONGEST_PAUSE)
                continue
            if (value := _value(name, items)) is not None:
                return value

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [self._name(key) for key in keys]
        found: list[bytes | None] = []
        for start in range(0, len(names), CHUNK):
            chunk = names[start : start + CHUNK]
            answer = self._client.call("/kv/txn", {"success": [_range(name) for name in chunk]})
            for name, one in zip(chunk, answer["responses"], strict=True):
                found.append(_value(name, _items(one)))
        return found

    def peek(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def add(self, key: str, amount: int) -> int:
        if abs(amount) >= 2**DIGITS:
            raise ValueError(f"cannot add {amount}: more than 64 bits")
        name = self._name(key)
        if amount == 0:
            held = self.get_many([key])[0]
            if held is None:  # a counter of 0 must exist, too
                held = self.put_new(key, b"0")
            return _number(key, held)
        sign = b"+" if amount > 0 else b"-"
        digits = [bit for bit in range(DIGITS) if abs(amount) >> bit & 1]
        puts = [_put(name + sign + b"%02d" % digit, b"") for digit in digits]
        outcome = self._write([*puts, _range(name)])
        if outcome.repeated:
            items, _ = self._read(name, outcome.revision)
        else:
            items = _items(outcome.answers[-1])
        return _number(key, _value(name, items) or b"0")

    def put_new(self, key: str, value: bytes) -> bytes:
        name = self._name(key)
        outcome = self._write([_put(name, value)], when=[_absent(name)], otherwise=[_range(name)])
        held = None if outcome.done else _value(name, _items(outcome.answers[-1]))
        return value if held is None else held

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See :class:`~rallypoint.rendezvous.store.ComparingStore`. Two round trips without contention."""
        name = self._name(key)
        while True:
            items, _ = self._read(name)
            held = _value(name, items)
            if (held or b"") != expected:
                return expected if held is None else held
            # Unchanged since it was read: no key in the range was created, put or removed.
            newest = max((item.modified for item in items), default=0)
            when = [_compare(name, "MOD", "LESS", newest + 1, _end(name))]
            when += [_compare(item.key, "MOD", "EQUAL", item.modified) for item in items]
            change = [_delete(name + b"+", name + b"."), _put(name, desired)]
            if self._write(change, when=when).done:
                return desired

    def exists(self, key: str) -> bool:
        name = self._name(key)
        request = {**_range(name)["request_range"], "count_only": True}
        return int(self._client.call("/kv/range", request).get("count", 0)) > 0

    def delete(self, key: str) -> bool:
        name = self._name(key)
        outcome = self._write([_delete(name, _end(name))])
        if outcome.repeated:
            return bool(self._read(name, outcome.revision - 1)[0])
        return int(outcome.answers[0]["response_delete_range"].get("deleted", 0)) > 0

    def clone(self) -> EtcdStore:
        lease = None if self._lease is None else self._lease.shared()
        return EtcdStore(**asdict(self._client.access), prefix=self._prefix, lease=lease)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.close()
            if self._lease is not None:
                self._lease.release()

    def num_keys(self) -> int:
        """The number of keys and counters. Reads all their names."""
        request = {**_range(self._root, _after(self._root))["request_range"], "keys_only": True}
        found = parse_items(self._client.call("/kv/range", request).get("kvs", []))
        return len({item.key.partition(b"=")[0] for item in found if b"=" in item.key})

    def delete_prefix(self) -> None:
        """Remove all the job's keys, including deeper prefixes. For the end of the job, when nothing writes to it any more."""
        request = {"key": encoded(self._root), "range_end": encoded(_after(self._root))}
        self._client.call("/kv/deleterange", request)

    def _name(self, key: str) -> bytes:
        """[Note: Keys in etcd]."""
        return self._root + quote(key).encode() + b"="

    def _new_writer(self) -> bytes:
        return self._root + b":writer/" + uuid.uuid4().hex.encode()

    def _read(self, name: bytes, revision: int = 0) -> tuple[list[Item], int]:
        """The keys of a value or counter, now or as of a revision, and the revision of the answer."""
        request = {**_range(name)["request_range"], "revision": revision}
        answer = self._client.call("/kv/range", request)
        return parse_items(answer.get("kvs", [])), int(answer["header"]["revision"])

    def _write(
        self,
        change: list[Json],
        when: Sequence[Json] = (),
        otherwise: Sequence[Json] = (),
    ) -> _Outcome:
        """Execute ``change`` exactly once if ``when`` holds: [Note: Exactly-once writes]."""
        with self._turn:
            try:
                while True:
                    lease = 0 if self._lease is None else self._lease.number()
                    try:
                        outcome = self._try_write(change, when, otherwise, lease)
                    except LeaseLost:
                        # All connections were suspended for longer than ttl, or there was a long outage.
                        assert self._lease is not None
                        self._lease.lost(lease)
                        continue
                    if outcome is not None:
                        return outcome
            except RendezvousConnectionError:
                self._writer, self._written = self._new_writer(), 0
                raise

    def _try_write(
        self,
        change: list[Json],
        when: Sequence[Json],
        otherwise: Sequence[Json],
        lease: int,
    ) -> _Outcome | None:
        """None: the writer key's count was wrong, and was corrected."""
        ours = self._writer
        for one in [*change, mark := _put(ours, b"")]:
            if "request_put" in one:
                one["request_put"]["lease"] = lease
        answer = self._client.call(
            "/kv/txn",
            {
                "compare": [_compare(ours, "VERSION", "EQUAL", self._written), *when],
                "success": [*change, mark],
                "failure": [_range(ours, ours + b"\0"), *otherwise],
            },
        )
        answers = answer.get("responses", [])
        if answer.get("succeeded"):
            self._written += 1
            return _Outcome(True, answers[:-1])
        held = _items(answers[0])
        version = held[0].version if held else 0
        if version == self._written:  # so `when` does not hold
            return _Outcome(False, answers[1:])
        repeated = version == self._written + 1
        self._written = version  # 0 if the prefix was removed
        return _Outcome(True, [], repeated=True, revision=held[0].modified) if repeated else None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a transaction.

    Args:
        done: the change took effect.
        answers: to each operation of ``change``, or of ``otherwise``; none if ``repeated``.
        repeated: an earlier attempt took effect, at ``revision``.
    """

    done: bool
    answers: list[Json]
    repeated: bool = False
    revision: int = 0


class JobLease:
    """The lease of a prefix. Its keys are removed ``ttl`` seconds after the last renewal.

    The first connection stores the lease's number under the prefix, so that all connections of a job renew the same one.
    A thread in each process renews it, not the operations: a job may train for hours without using its store.
    """

    def __init__(self, access: EtcdAccess, root: bytes, ttl: int) -> None:
        self._client = EtcdClient(access)
        self._key = root + b":lease"
        self._ttl = ttl
        self._lock = threading.Lock()
        self._users = 1
        self._number = 0  # none yet
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def number(self) -> int:
        """The lease to bind a key to. The first call obtains one."""
        with self._lock:
            if not self._number:
                self._number = self._agree()
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="etcd-lease", daemon=True)
                self._thread.start()
            return self._number

    def lost(self, number: int) -> None:
        """This lease has expired: obtain another one."""
        with self._lock:
            if self._number == number:
                self._number = 0

    def shared(self) -> JobLease:
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """The last user's call ends the renewal."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            thread = self._thread
        self._closed.set()
        self._client.close()
        if thread is not None:
            # It may be in a request to a lost server. It is a daemon, so that it does not delay the process's exit.
            thread.join(1.0)

    def _renew(self) -> None:
        while not self._closed.wait(self._ttl / 3):
            number = self._number
            try:
                if number and not self._alive(number):
                    self.lost(number)
            except RendezvousConnectionError:
                pass  # retried; operations report the error

    def _alive(self, number: int) -> bool:
        result = self._client.call("/lease/keepalive", {"ID": number}).get("result", {})
        return int(result.get("TTL", 0)) > 0

    def _agree(self) -> int:
        while True:
            found = self._client.call("/kv/range", {"key": encoded(self._key)}).get("kvs", [])
            held = parse_items(found)
            if held and held[0].value.isdigit() and self._alive(int(held[0].value)):
                return int(held[0].value)
            number = int(self._client.call("/lease/grant", {"TTL": self._ttl})["ID"])
            put = _put(self._key, str(number).encode())
            put["request_put"]["lease"] = number
            seen = held[0].modified if held else 0
            compare = [_compare(self._key, "MOD", "EQUAL", seen)]
            self._client.call("/kv/txn", {"compare": compare, "success": [put]})
            # The next iteration reads which lease was stored first. An unused one expires.


def _end(name: bytes) -> bytes:
    """The end of the range of a value and its counter."""
    return name[:-1] + b">"


def _after(prefix: bytes) -> bytes:
    """The end of the range of all keys with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _put(key: bytes, value: bytes) -> Json:
    return {"request_put": {"key": encoded(key), "value": encoded(value)}}


def _delete(start: bytes, end: bytes) -> Json:
    return {"request_delete_range": {"key": encoded(start), "range_end": encoded(end)}}


def _range(name: bytes, end: bytes | None = None) -> Json:
    return {"request_range": {"key": encoded(name), "range_end": encoded(end or _end(name))}}


def _absent(name: bytes) -> Json:
    # An empty range counts as one key with all numbers 0.
    return _compare(name, "CREATE", "EQUAL", 0, _end(name))


_FIELDS = {"VERSION": "version", "CREATE": "create_revision", "MOD": "mod_revision"}


def _compare(key: bytes, target: str, result: str, number: int, end: bytes | None = None) -> Json:
    made = {"key": encoded(key), "target": target, "result": result, _FIELDS[target]: number}
    return made if end is None else {**made, "range_end": encoded(end)}


def _items(answer: Json) -> list[Item]:
    return parse_items(answer["response_range"].get("kvs", []))


def _value(name: bytes, items: Sequence[Item]) -> bytes | None:
    """The value of a key: [Note: Keys in etcd]."""
    held: bytes | None = None
    added: int | None = None
    for item in items:
        digit = item.key[len(name) :]
        if digit:
            sign = 1 if digit.startswith(b"+") else -1
            added = (added or 0) + sign * (item.version << int(digit[1:]))
        else:
            held = item.value
    if added is None:
        return held
    try:
        return str(int(held or b"0") + added).encode()
    except ValueError:
        return held  # not a number: an add() to it has failed, and it keeps its value


def _number(key: str, held: bytes) -> int:
    try:
        return int(held)
    except ValueError:
        raise ValueError(f"{key!r} is not a counter: it holds {held[:40]!r}") from None

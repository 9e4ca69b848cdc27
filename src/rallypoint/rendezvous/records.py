"""What nodes tell each other, as bytes: versioned JSON with limits, and a MAC if the job has a secret.

A record is one line of JSON, ``{"v": 1, "body": {…}}``, and, if the job has a secret, a second line: HMAC-SHA256
(RFC 2104) over the store key it is under and the first line, with a MAC key derived from secret and run id. The store key
contains the generation, so a record that is copied to another key, run or generation is not accepted there.
Bytes that cannot be accepted raise :class:`BadRecord`; the reader has to go on without them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from typing import Any, Final

from rallypoint._core.secret import derive


RECORD_VERSION: Final = 1
# A plan of 4096 nodes takes some 60 KB.
MAX_RECORD: Final = 1024 * 1024
# What is read may be written again, as part of a plan, so nesting has to stay far from Python's own limit.
MAX_DEPTH: Final = 32

Body = Mapping[str, Any]


class BadRecord(Exception):
    """These bytes are not a record of this job; the text gives the reason."""


class Codec:
    """Packs and unpacks the records of one job. Pure.

    Args:
        run_id: the job's name.
        secret: the secret that every node of the job knows; None: records carry no MAC.
    """

    def __init__(self, run_id: str, secret: bytes | None = None) -> None:
        # Derive a separate key for each job: several jobs may share a secret.
        self._key = None if secret is None else derive(secret, "records", run_id)
        self._prefix = f"rally/{run_id}/"
        if secret is not None:
            self._prefix = f"rally/{derive(secret, 'names of records', run_id).hex()[:24]}/"

    @property
    def prefix(self) -> str:
        """The prefix of the job's keys; with a secret, strangers cannot guess it."""
        return self._prefix

    def pack(self, key: str, body: Body) -> bytes:
        """The bytes of ``body`` under ``key``.

        Raises:
            ValueError: the record is larger than ``MAX_RECORD``, nested deeper than ``MAX_DEPTH``, or not JSON.
        """
        try:
            line = _ENCODER.encode({"v": RECORD_VERSION, "body": body}).encode()
        except RecursionError:
            line = b""
        if not line or _is_deep_in(line, body):
            raise ValueError(f"a record nested deeper than {MAX_DEPTH} levels")
        if self._key is not None:
            line += b"\n" + _mac(self._key, key.encode(), line).hex().encode()
        if len(line) > MAX_RECORD:
            raise ValueError(f"a record of {len(line)} bytes (at most {MAX_RECORD})")
        return line

    def unpack(self, key: str, data: bytes) -> dict[str, Any]:
        """The body of the record under ``key``.

        Raises:
            BadRecord: too large, forged or replayed (with a secret), malformed, or of another version.
        """
        if len(data) > MAX_RECORD:
            raise BadRecord(f"{len(data)} bytes, at most {MAX_RECORD} are read")
        line, _, mac = data.partition(b"\n")
        if self._key is not None:
            wanted = _mac(self._key, key.encode(), line).hex().encode()
            if not hmac.compare_digest(mac, wanted):
                raise BadRecord("it does not carry the job's secret")
        elif mac:
            raise BadRecord("it carries a secret, and this node has none (--secret-file)")
        try:
            envelope = _DECODER.decode(line.decode())
            if b"\\" in line:
                # Refuse half a surrogate pair: no key and no terminal accepts such text.
                json.dumps(envelope, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise BadRecord("not JSON") from None
        if not isinstance(envelope, dict) or not isinstance(envelope.get("body"), dict):
            raise BadRecord("not a record")
        if envelope.get("v") != RECORD_VERSION:
            raise BadRecord(
                f"version {envelope.get('v')!r}, this node speaks {RECORD_VERSION}: install the same"
                " version of rallypoint on all nodes"
            )
        body: dict[str, Any] = envelope["body"]
        if _is_deep_in(line, body):
            raise BadRecord(f"nested deeper than {MAX_DEPTH} levels")
        return body


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


# Made once: with such options, json.loads and json.dumps would make new ones at each call.
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

_CONTAINERS = frozenset({dict, list})


def is_deep(body: Body, most: int = MAX_DEPTH) -> bool:
    """Whether a body is nested deeper than ``most`` levels."""
    level: list[Any] = [body]
    for _ in range(most):
        inner: list[Any] = []
        for each in level:
            values = each.values() if isinstance(each, dict) else each
            # Most lists are a plan's, with thousands of numbers: check all their types at once.
            if not _CONTAINERS.isdisjoint(map(type, values)):
                inner += [value for value in values if isinstance(value, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _is_deep_in(line: bytes, body: Body) -> bool:
    """:func:`is_deep`, skipped for a body with few brackets in its JSON."""
    return line.count(b"{") + line.count(b"[") > MAX_DEPTH and is_deep(body)


def _mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, each preceded by its length, so that no two lists give the same bytes."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.digest()

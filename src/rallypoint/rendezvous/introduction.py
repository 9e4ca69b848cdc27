"""How a node introduces itself to every node that uses the same store, and where two nodes do not match.

Every version can read an introduction, even without the job's secret: it is one line of JSON and, if the
job has a secret, a second line, a MAC over the first line and the node's role. So no other node's introduction passes for
the host's. If a node shows another secret, or none, nothing else it says is believed; a node that shows ours without
proof is ignored. With a secret, an introduction has a keyed hash in place of the job's name.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from rallypoint._core.secret import derive, fingerprint


class Role(StrEnum):
    """Whose introduction it is."""

    HOST = "host"  # from the node that serves the store, or was first in one that no node serves
    OTHER = "other"


# The most bytes an introduction may have.
LONGEST = 4096
_LONGEST_TEXT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction:
    """What a node tells every other node.

    Args:
        node_id: distinguishes nodes on the same host.
        host: its host name, for messages.
        run_id: its job's name.
        nodes: its ``--nnodes``: "2", or "2:4".
        given_rank: whether it was given a rank.
        rallypoint: this package's version.
        torch: torch's major and minor version; empty if unknown.
        python: Python's major and minor version.
    """

    node_id: str
    host: str
    run_id: str
    nodes: str
    given_rank: bool
    rallypoint: str
    torch: str
    python: str


_FIELDS = tuple(each.name for each in fields(Introduction))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A point on which two nodes do not match.

    Args:
        field: the flag, or whatever else has to be changed.
        value: its value on this node.
        problem: the mismatch in words, with the other node's host.
        hint: what to do.
        hopeless: whether any round with both nodes would be wrong.
    """

    field: str
    value: str
    problem: str
    hint: str
    hopeless: bool = False

    def __str__(self) -> str:
        return f"{self.problem}: {self.hint}" if self.hint else self.problem


def pack(introduction: Introduction, secret: bytes | None, role: Role) -> bytes:
    """The introduction as bytes."""
    body = {name: _short(getattr(introduction, name)) for name in _FIELDS}
    body |= {"run_id": _shown_id(introduction.run_id, secret), "secret": secret is not None}
    if secret is not None:
        body["fingerprint"] = fingerprint(secret)
    line = json.dumps(body).encode()
    return line if secret is None else line + b"\n" + _mac(secret, role, line)


@dataclass(frozen=True, slots=True)
class Guest:
    """Another node's introduction, as it was read.

    Args:
        introduction: what it says.
        has_secret: whether the node says that it has a secret.
        proved: whether it has proved that it has ours.
        fingerprint: its secret's fingerprint, as it says.
    """

    introduction: Introduction
    has_secret: bool
    proved: bool
    fingerprint: str = ""


def unpack(data: bytes, secret: bytes | None, role: Role) -> Guest | None:
    """Another node's introduction in this role; None if it cannot be read, or claims our secret without proof."""
    line, _, mac = data.partition(b"\n")
    if len(data) > LONGEST:
        return None
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    words = {name: _word(body, name) for name in _FIELDS}
    words["given_rank"] = body.get("given_rank") is True
    proved = secret is not None and hmac.compare_digest(mac, _mac(secret, role, line))
    claimed = _word(body, "fingerprint")
    if secret is not None and not proved and claimed == fingerprint(secret):
        return None
    return Guest(Introduction(**words), body.get("secret") is True, proved, claimed)


def mismatches(mine: Introduction, secret: bytes | None, guest: Guest) -> tuple[Mismatch, ...]:
    """The points on which this node and another do not match; empty if they match.

    Args:
        mine: this node.
        secret: its secret, or None.
        guest: the other.
    """
    theirs, host = guest.introduction, guest.introduction.host
    if (secret is not None) != guest.has_secret or (secret is not None and not guest.proved):
        return (_secret(secret, guest),)
    if theirs.run_id != _shown_id(mine.run_id, secret):
        name = "" if secret is not None else f": {theirs.run_id!r}"
        problem = f"another job uses this endpoint{name}, of {host}; this one is {mine.run_id!r}"
        hint = "give all nodes of a job the same --rdzv-id, and another job another port"
        return (Mismatch("--rdzv-id", mine.run_id, problem, hint),)
    return tuple(
        each
        for each in (_nodes(mine, theirs), _ranks(mine, theirs), _versions(mine, theirs))
        if each is not None
    )


def _shown_id(run_id: str, secret: bytes | None) -> object:
    """The job's name as it appears in an introduction."""
    if secret is None:
        return _short(run_id)
    return "#" + derive(secret, "shown run id", run_id).hex()[:16]


def _secret(mine: bytes | None, guest: Guest) -> Mismatch:
    hint = "give all nodes the same --secret-file (or RALLY_SECRET), and another job another port"
    host = guest.introduction.host
    if mine is not None and guest.has_secret:
        problem = (
            f"{host} has another secret than this node (fingerprint {guest.fingerprint or 'unknown'} there,"
            f" {fingerprint(mine)} here)"
        )
    elif mine is not None:
        problem = f"this node has a secret and {host} has none"
    else:
        problem = f"{host} has a secret and this node has none"
    return Mismatch("--secret-file", "", problem, hint)


def _nodes(mine: Introduction, theirs: Introduction) -> Mismatch | None:
    if mine.nodes == theirs.nodes:
        return None
    # Ranges may differ: a running job is grown or shrunk node by node.
    fixed = ":" not in mine.nodes or ":" not in theirs.nodes
    problem = f"the number of nodes is {mine.nodes} here and {theirs.nodes} on {theirs.host}"
    return Mismatch("--nnodes", mine.nodes, problem, "give all nodes the same --nnodes", fixed)


def _ranks(mine: Introduction, theirs: Introduction) -> Mismatch | None:
    if mine.given_rank == theirs.given_rank:
        return None
    has, has_not = "this node", theirs.host
    if theirs.given_rank:
        has, has_not = has_not, has
    problem = f"{has} was given a rank and {has_not} was not"
    return Mismatch(
        "--node-rank", "", problem, "give every node a --node-rank, or none", hopeless=True
    )


def _versions(mine: Introduction, theirs: Introduction) -> Mismatch | None:
    differ = [
        f"{name} {ours} here and {others} on {theirs.host}"
        for name, ours, others in (
            ("rallypoint", mine.rallypoint, theirs.rallypoint),
            ("torch", mine.torch, theirs.torch),
            ("Python", mine.python, theirs.python),
        )
        if ours and others and ours != others
    ]
    if not differ:
        return None
    return Mismatch("versions", "", ", ".join(differ), "install the same on all nodes")


def _word(body: Mapping[str, Any], name: str) -> Any:
    value = body.get(name)
    text = value if isinstance(value, str) else ""
    # The text is printed to a terminal.
    return "".join(each for each in text if each.isprintable())[:_LONGEST_TEXT]


def _short(value: object) -> object:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


def _mac(secret: bytes, role: Role, line: bytes) -> bytes:
    key = derive(secret, "introduction", role.value)
    return hmac.new(key, line, hashlib.sha256).hexdigest().encode()

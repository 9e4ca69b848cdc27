"""How a node introduces itself to whoever comes to the same store, and where two of them do not go together.

An introduction can be read by every version and without the job's secret: one line of JSON, and where the
job has a secret a second line, a MAC over the first. A node that shows another secret, or none, is believed nothing
but that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


# Longer ones are no introductions.
LONGEST = 4096
_LONGEST_TEXT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction:
    """What a node tells everybody.

    Args:
        node_id: tells nodes of one host apart.
        host: its name, for people.
        run_id: its job.
        nodes: ``--nnodes``: "2", or "2:4".
        given_rank: whether it was given a rank.
        rallypoint: version of this package.
        torch: torch's major and minor version; empty if it is not known.
        python: Python's.
    """

    node_id: str
    host: str
    run_id: str
    nodes: str
    given_rank: bool
    rallypoint: str
    torch: str
    python: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where two nodes do not go together.

    Args:
        field: the flag, or what else is to be changed.
        value: what it is here.
        problem: the same in words, with the other node's host.
        hint: what to do.
        hopeless: no round of both is what anybody asked for.
    """

    field: str
    value: str
    problem: str
    hint: str
    hopeless: bool = False

    def __str__(self) -> str:
        return f"{self.problem}: {self.hint}" if self.hint else self.problem


def pack(introduction: Introduction, secret: bytes | None) -> bytes:
    """The introduction as bytes."""
    body = {key: _short(value) for key, value in asdict(introduction).items()}
    line = json.dumps({**body, "secret": secret is not None}).encode()
    return line if secret is None else line + b"\n" + _mac(secret, line)


@dataclass(frozen=True, slots=True)
class Guest:
    """Another node's introduction, as it was read.

    Args:
        introduction: what it says.
        has_secret: it says that it has one.
        proved: it has ours.
    """

    introduction: Introduction
    has_secret: bool
    proved: bool


def unpack(data: bytes, secret: bytes | None) -> Guest | None:
    """Another node's introduction; None if it cannot be read."""
    line, _, mac = data.partition(b"\n")
    if len(data) > LONGEST:
        return None
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    words = {each.name: _word(body, each.name) for each in fields(Introduction)}
    words["given_rank"] = body.get("given_rank") is True
    proved = secret is not None and hmac.compare_digest(mac, _mac(secret, line))
    return Guest(Introduction(**words), body.get("secret") is True, proved)


def mismatches(mine: Introduction, secret: bool, guest: Guest) -> tuple[Mismatch, ...]:
    """Where this node and another do not go together; none if they do.

    Args:
        mine: this node.
        secret: whether it has one.
        guest: the other.
    """
    theirs, host = guest.introduction, guest.introduction.host
    if theirs.run_id != mine.run_id:
        problem = (
            f"another job meets here: {theirs.run_id!r}, of {host}; this one is {mine.run_id!r}"
        )
        hint = "give all nodes of a job the same --rdzv-id, and another job another port"
        return (Mismatch("--rdzv-id", mine.run_id, problem, hint),)
    if secret != guest.has_secret or (secret and not guest.proved):
        return (_secret(secret, guest.has_secret, host),)
    return tuple(
        each
        for each in (_nodes(mine, theirs), _ranks(mine, theirs), _versions(mine, theirs))
        if each is not None
    )


def _secret(mine: bool, theirs: bool, host: str) -> Mismatch:
    hint = "give all nodes the same --secret-file (or RALLY_SECRET)"
    if mine and theirs:
        problem = f"{host} has another secret than this node"
    elif mine:
        problem = f"this node has a secret and {host} has none"
    else:
        problem = f"{host} has a secret and this node has none"
    return Mismatch("--secret-file", "", problem, hint)


def _nodes(mine: Introduction, theirs: Introduction) -> Mismatch | None:
    if mine.nodes == theirs.nodes:
        return None
    # Ranges may differ: a running job is made larger or smaller node by node.
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
    # It goes to a terminal.
    return "".join(each for each in text if each.isprintable())[:_LONGEST_TEXT]


def _short(value: object) -> object:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


def _mac(secret: bytes, line: bytes) -> bytes:
    key = hmac.new(secret, b"rallypoint introduction", hashlib.sha256).digest()
    return hmac.new(key, line, hashlib.sha256).hexdigest().encode()

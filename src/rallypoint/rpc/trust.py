"""The secret of a group: the job's, or one that its members can obtain on their own.

Each member chooses by its own settings and by the location of the store, never by the content of the store, which a
stranger may have written. Members that were started alike choose alike. If they were not, the signature of the group's
name, the first thing they share, does not match, and the error names both choices.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rallypoint._core import env, secret as job_secret
from rallypoint._core.addresses import is_loopback
from rallypoint._core.secret import derive
from rallypoint._core.user_key import user_key
from rallypoint.errors import RpcError
from rallypoint.wire import auth

from .groups.group_store import innermost
from .groups.signing import Signer


logger = logging.getLogger(__name__)

_SECRET_BYTES: Final = 32
# Keys of the group's name, and of the secret in a private store.
_GROUP: Final = "job"
_OWN: Final = "secret"
_NEXT: Final = "give all workers the same secret (secret=..., RALLY_SECRET or RALLY_SECRET_FILE; `rally secret FILE` makes one), or none"


class Choice(StrEnum):
    """The source of the secret."""

    GIVEN = "the secret that it was given"
    STORE = "a secret from the store, which only this user can read"
    HOST = "its user's key on its host"
    NONE = "no secret"


class Place(StrEnum):
    """Where a store is, as far as a member knows without reading it."""

    PRIVATE = "private"  # in this process, or in a file that only this user can read
    HOST = "host"  # all members are on this host
    ELSEWHERE = "elsewhere"


def choose(*, has_secret: bool, place: Place) -> Choice:
    """The source that a member uses. Pure."""
    if has_secret:
        return Choice.GIVEN
    match place:
        case Place.PRIVATE:
            return Choice.STORE
        case Place.HOST:
            return Choice.HOST
        case Place.ELSEWHERE:
            return Choice.NONE


@dataclass(frozen=True, slots=True, repr=False)
class Trust:
    """What a member knows of its group before it joins.

    Args:
        job: distinguishes this group from others at the same addresses.
        secret: the group's secret; without one, a public constant.
        seals: the allowed MACs for TCP, best first.
    """

    job: str
    secret: bytes
    seals: tuple[str, ...]

    @property
    def signer(self) -> Signer:
        return Signer(self.secret, self.job)


def agree(
    store: Any, given: bytes | None, world_size: int | None, *, insecure: bool = False
) -> Trust:
    """Choose the group's secret, and check that the first member has the same.

    Args:
        store: a c10d store, under a prefix for this group alone.
        world_size: the size of a static group.
        given: the secret in the options; None: that of the environment or the launcher, if any.
        insecure: do not warn if there is none.

    Raises:
        RpcError: the first member has another secret.
        ConfigError: the given secret is invalid.
    """
    secret = job_secret.find(given)
    choice = choose(has_secret=secret is not None, place=place_of(store, world_size))
    seals = auth.SEALS()
    match choice:
        case Choice.STORE:
            secret = bytes(store.compare_set(_OWN, "", secrets.token_hex(_SECRET_BYTES).encode()))
        case Choice.HOST:
            secret = user_key()
        case Choice.NONE:
            secret, seals = hashlib.sha256(b"rallypoint: no secret").digest(), (auth.NONE,)
            if not (insecure or job_secret.is_open()):
                _warn()
        case Choice.GIVEN:
            pass
    assert secret is not None
    job = _name_of_group(store, secret, choice)
    if choice in (Choice.HOST, Choice.NONE):
        secret = derive(secret, "rpc group", job)
    return Trust(job, secret, seals)


def _name_of_group(store: Any, secret: bytes, choice: Choice) -> str:
    """The group's name, which the first member creates and signs."""
    mark = job_secret.fingerprint(secret) if choice is not Choice.NONE else ""
    key = derive(secret, "rpc group's name")
    name = secrets.token_hex(8)
    held = bytes(store.compare_set(_GROUP, b"", _signed(key, name, choice, mark))).decode(
        errors="replace"
    )
    fields = held.split("|")
    if len(fields) == 4 and held.encode() == _signed(key, fields[0], choice, mark):
        return fields[0]
    theirs = next((each for each in Choice if len(fields) == 4 and fields[1] == each.name), None)
    if theirs is None:
        raise RpcError(
            f"the group's store has an unexpected value under {_GROUP!r}: {held[:60]!r}; another program writes to the store,"
            " or a member runs another release of rallypoint"
        )
    other = f"{theirs} ({fields[2][:12]})" if fields[2].isalnum() else str(theirs)
    own = f"{choice} ({mark})" if mark else str(choice)
    raise RpcError(
        f"the members of the group do not share a secret: this one uses {own}, the first one {other}; {_NEXT}"
    )


def _signed(key: bytes, name: str, choice: Choice, mark: str) -> bytes:
    content = f"{name}|{choice.name}|{mark}"
    tag = derive(key, "name", content).hex()
    return f"{content}|{tag}".encode()


def place_of(store: Any, world_size: int | None) -> Place:
    """Where a c10d store is."""
    inner = innermost(store)
    match type(inner).__name__:
        case "HashStore":
            return Place.PRIVATE
        case "FileStore":
            return Place.PRIVATE if _is_private(getattr(inner, "path", "")) else Place.HOST
        case _:
            pass
    return Place.HOST if _is_here(inner, world_size) else Place.ELSEWHERE


def _is_here(inner: Any, world_size: int | None) -> bool:
    host = getattr(inner, "host", None)
    if isinstance(host, str) and is_loopback(host):
        return True
    # Or the group consists of all the launcher's workers, and all of them are here.
    size = str(world_size) if world_size else None
    return size is not None and size == env.get("WORLD_SIZE") == env.get("LOCAL_WORLD_SIZE")


def _is_private(path: str) -> bool:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return False


def _warn() -> None:
    logger.warning(
        "this group has no secret: anyone who can reach its store or its workers' ports can join it and run code as this user;"
        " start the workers with RALLY_SECRET or RALLY_SECRET_FILE (`rally secret FILE` makes one) or give init_rpc"
        " secret=..., or say that the network is trusted: insecure=True or RALLY_INSECURE=1"
    )

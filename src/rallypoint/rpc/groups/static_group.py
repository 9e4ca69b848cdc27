"""A group whose members are fixed from the start."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from typing import Final, Self

from rallypoint._core.clock import Deadline
from rallypoint.errors import (
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    RpcError,
)
from rallypoint.rpc.device_map import find_problem

from .group import agree_on_kind, no_destination
from .group_store import C10dStore, Calls
from .member import RECORD_VERSION, Member, dump, load, member_from, shown, whole
from .signing import PUBLIC, Signer


class StaticGroup:
    """``world_size`` processes, each with its rank. Its epoch is always 1."""

    is_static = True
    # As in DynamicGroup: here, no member succeeds another.
    term = 0

    def __init__(
        self,
        store: C10dStore,
        me: Member,
        members: tuple[Member, ...],
        signer: Signer = PUBLIC,
    ) -> None:
        self._calls = Calls(store, signer)
        self._me = me
        self._members = members
        self._by_name = {member.name: member for member in members}

    @classmethod
    def form(
        cls,
        store: C10dStore,
        me: Member,
        world_size: int,
        timeout: float | None = None,
        signer: Signer = PUBLIC,
    ) -> Self:
        """Form a group of ``world_size``. Either all see the same group, or all fail for the same reason.

        Blocks until all members have arrived. Other users of the same store object are blocked, too.

        Args:
            me: its ``id`` is its rank.
            timeout: seconds to wait for the others; None: no limit.
            signer: signs the records in the store.

        Raises:
            ConfigError: the rank is not below ``world_size``, or device maps conflict.
            DeadlineExceeded: some ranks are missing; the error names them.
            RpcError: rank or name is taken, the group is dynamic, or the store is lost.
        """
        if not 0 <= me.id < world_size:
            raise ConfigError("rank", me.id, f"expected 0 to {world_size - 1}: one of {world_size}")
        deadline = Deadline(timeout)
        calls = Calls(store, signer)
        agree_on_kind(calls, b"static")
        record = dump(
            {"v": RECORD_VERSION, "world_size": world_size, "member": me.body()}, "member"
        )
        held = calls.announce_new(f"rank/{me.id}", record)
        if held != record:
            raise RpcError(
                f"rank {me.id} is taken by {_taker(held)}: each process needs its own rank, and a new group its own store prefix"
            )
        keys = [f"rank/{rank}" for rank in range(world_size)]
        if not calls.wait_interruptibly(keys, timeout):
            # Tell members that see our record that we gave up, unless all have already seen the complete group.
            seal = calls.put_new("formed", _given_up(me))
            missing = [key.removeprefix("rank/") for key in calls.absent(keys)]
            if missing or seal.startswith(_GIVEN_UP):
                calls.delete(f"rank/{me.id}")
                lacking = f"; missing: rank {', '.join(missing)}" if missing else ""
                raise DeadlineExceeded(
                    f"{world_size - len(missing)} of {world_size} members arrived within {timeout:g} s{lacking};"
                    " check why the others did not start, or raise the timeout"
                )
        members = _check(_read_all(calls, keys, me.id, record, deadline), world_size)
        gave_up = _confirm(calls, members)
        if gave_up is not None:
            calls.delete(f"rank/{me.id}")
            raise DeadlineExceeded(f"{gave_up} gave up before all members had arrived")
        return cls(store, me, members, signer)

    @property
    def me(self) -> Member:
        return self._me

    @property
    def epoch(self) -> int:
        return 1

    def members(self) -> tuple[int, tuple[Member, ...]]:
        return 1, self._members

    def find(self, key: str | int) -> Member:
        if isinstance(key, str):
            member = self._by_name.get(key)
        else:
            member = self._members[key] if 0 <= key < len(self._members) else None
        if member is None:
            raise no_destination(key, self._members)
        return member

    def abandon(self) -> None:
        """In a forked child: its copies of the store's connections are closed with the store."""
        del self._calls

    def last_words(self, member: Member) -> str | None:
        said = self._calls.read_or_none(f"left/{member.id}")
        return None if said is None else said.decode(errors="replace")

    def leave(self, reason: str = "") -> None:
        """Store the reason for leaving. The members of a static group do not change."""
        self._calls.set(f"left/{self._me.id}", (reason or "left").encode())

    def close(self) -> None:
        """Let go of the store. An agent that has ended is still referred to, until its cycles are collected."""
        self._calls.release()


def _read_all(
    calls: Calls, keys: Sequence[str], rank: int, own: bytes, deadline: Deadline
) -> list[bytes]:
    """The members' records, which all exist. If another program overwrites a record, its owner restores it.

    Raises:
        DeadlineExceeded: some records keep being overwritten.
    """
    pause = threading.Event()
    missing: list[str] = []
    while True:
        found = [] if missing else calls.read(keys)
        records = [each for each in found if each is not None]
        if len(records) == len(keys) and records[rank] == own:
            return records
        if keys[rank] in missing or not found or found[rank] != own:
            calls.set(keys[rank], own)
        left = deadline.remaining()
        if left == 0.0:
            bad = missing or [key for key, each in zip(keys, found, strict=True) if each is None]
            ranks = ", ".join(key.removeprefix("rank/") for key in bad)
            raise DeadlineExceeded(
                f"the records of rank {ranks} in the group's store were deleted or overwritten: another program writes to the"
                " store; protect the store, or give the group its own"
            )
        pause.wait(_LOOK_AGAIN if left is None else min(left, _LOOK_AGAIN))
        missing = calls.absent(keys)


# Seconds between checks for a record that its owner has to restore.
_LOOK_AGAIN: Final = 0.05
_GIVEN_UP: Final = b"given up by "


def _given_up(member: Member) -> bytes:
    return _GIVEN_UP + member.incarnation.encode()


def _taker(record: bytes) -> str:
    with contextlib.suppress(ProtocolError):
        return str(_read_static(record)[1])
    return f"an invalid record: {shown(record)}"


def _read_static(data: bytes) -> tuple[int, Member]:
    record = load(data, "member")
    return whole(record.get("world_size"), "world_size"), member_from(record.get("member"))


def _check(records: Sequence[bytes], world_size: int) -> tuple[Member, ...]:
    """The members, if their records form a valid group. The result depends only on the records."""
    read = [_read_static(each) for each in records]
    members = tuple(member for _, member in read)
    sizes = {size for size, _ in read}
    if sizes != {world_size}:
        each = ", ".join(f"rank {member.id}: {size}" for size, member in read)
        raise ConfigError("world_size", world_size, f"the members have different values: {each}")
    by_name: dict[str, Member] = {}
    for member in members:
        other = by_name.setdefault(member.name, member)
        if other is not member:
            raise RpcError(f"RPC worker name {member.name} is not unique: {other} and {member}")
    problem = find_problem({member.name: member.devices for member in members})
    if problem is not None:
        raise ConfigError("device maps", None, problem)
    return members


def _confirm(calls: Calls, members: tuple[Member, ...]) -> Member | None:
    """Confirm the group. Returns the member that gave up before all had arrived, if any."""
    crowd = " ".join(member.incarnation for member in members)
    seal = b"formed by " + hashlib.sha256(crowd.encode()).hexdigest().encode()
    while (held := calls.put_new("formed", seal)) != seal:
        if not held.startswith(_GIVEN_UP):
            raise RpcError(
                "other processes have formed a group under this store prefix: give each group its own prefix"
            )
        gave_up = next((member for member in members if _given_up(member) == held), None)
        if gave_up is not None:
            return gave_up
        calls.delete("formed")  # the one that gave up has since been replaced
    return None

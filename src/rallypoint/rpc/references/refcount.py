"""Distributed reference counting: one process's part. Pure.

Theory of operation
===================

A value lives on its *owner*. The owner's own objects *hold* it. Any other worker that refers to it has a *user*
reference, and each user reference is a *fork* with an id of its own: a worker with two references has two forks. For
each value, the owner keeps the forks that it knows (*registered*) and the number of its own holds. When it has neither,
it releases the value.

**Invariant.** A value is not released while a reference to it exists or is in transit. It is released once there is
none and the network is quiet.

This holds because at any time each fork is registered, or *covered* by a registered fork that cannot be deleted as
long as it covers another:

1. The owner registers a fork when it puts it into a message, before the message is sent. Such a fork is confirmed
   from the start.
2. A user that passes a reference on covers the new fork, its *pending child*: it does not delete its own fork before
   the child sends CHILD_ACCEPT, even if its object is collected. The child sends it once the owner has registered the
   child, that is, has answered its FORK_REQUEST. If the child is the owner itself, it sends CHILD_ACCEPT at once.
3. A user deletes its fork (USER_DELETE) when its objects are gone, it covers no other, and it is confirmed. So the
   delete cannot overtake the request that it undoes, which has been answered by then.
4. ``remote`` creates the ids of the value and of its first fork on the caller. They travel with the call, and its
   answer is the confirmation. The caller may pass the reference on before the call has arrived: the owner then
   registers forks of a value that is *expected*.

Every message may arrive twice and late. FORK_REQUEST and the call of ``remote`` must not register a fork that has
already been deleted, so ids of deleted forks are remembered. So are ids of released values: otherwise a late message
would make the owner expect them forever.
If a connection ends, its last messages may or may not have arrived. The sender asks (``on_inquiry``): what has not
arrived by then is never accepted, and counts as not sent (``unsent``).
If a confirmation is given up (``failed``), the fork may or may not be registered. The reference is dead to its holder,
but it still covers its children, keeps its parent alive until these are accepted, and is deleted like any other. Its delete
may then arrive before its request; the remembered id handles that, too.

**Limits of the guarantee.** A dead worker covers nothing, and its forks are reclaimed. A reference that it passed on
may then be refused if the owner has not registered it yet: the reference is dead, with the reason, and no call on it
waits forever. A worker that was declared lost stays lost. Another process may later join under its id (``peer_came``),
but must not reuse its ids of values and references (``first``). The number of remembered ids is limited: a duplicate
that arrives after more deletions than that leaves a fork registered until its worker ends.

Nothing here takes a lock. An object may be collected anywhere, even inside these methods, so its finalizer only records
the fork (``deque.append``), and the shell calls ``dropped`` later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from rallypoint.errors import InternalError, RpcError

from .commands import (
    Command,
    Confirmed,
    Counts,
    Kind,
    Lost,
    Orphaned,
    Received,
    Refuse,
    Release,
    Send,
)
from .ids import Fork, ForkId, RRefId


# A message is retried for 51 s (``control_sender``). 16,384 ids take 4 MB.
REMEMBER = 16_384


@dataclass(slots=True)
class _Owned:
    """A value that lives here. It is in the table as long as it has forks or holds."""

    made: bool  # False: the call that creates it has not arrived yet
    holds: int = 0
    forks: dict[ForkId, int] = field(default_factory=dict)  # to the worker that holds it
    orphaned: str = ""


@dataclass(slots=True)
class _User:
    """A reference to another worker's value. It is in the table until its deletion is sent."""

    rref_id: RRefId
    owner: int
    parent: int | None  # still to be sent CHILD_ACCEPT
    holds: int = 1
    confirmed: bool = False
    dead: str = ""
    lost: bool = False  # whether its owner is lost
    children: set[ForkId] = field(default_factory=set)

    @property
    def pending(self) -> bool:
        return not self.confirmed and not self.dead


class _Child(NamedTuple):
    """A fork that one of ours covers."""

    covered_by: ForkId
    to: int


_Id = TypeVar("_Id", RRefId, ForkId)


class _Recent(Generic[_Id]):
    """The most recently added ids, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: dict[_Id, None] = {}  # a dict keeps the order

    def add(self, new: _Id) -> None:
        self._ids[new] = None
        if len(self._ids) > self._limit:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, wanted: _Id) -> bool:
        return wanted in self._ids


class References:
    """All references of one process: to its own values, and to those of others.

    The caller of a method executes the commands it returns, in order. Methods named ``on_…`` take messages from
    other workers and are idempotent.

    Args:
        me: this worker's id.
        first: the number of the first value or reference. Those of earlier workers with the same id were lower.
        remember: how many ids of deleted forks and released values are remembered, against late duplicates.
    """

    def __init__(self, me: int, *, first: int = 0, remember: int = REMEMBER) -> None:
        self.me = me
        self._next_id = first
        self._owned: dict[RRefId, _Owned] = {}
        self._users: dict[ForkId, _User] = {}
        self._children: dict[ForkId, _Child] = {}
        self._calls_to_self: dict[ForkId, RRefId] = {}
        self._lost: dict[int, str] = {}
        self._deleted: _Recent[ForkId] = _Recent(remember)
        self._released: _Recent[RRefId] = _Recent(remember)

    # Making references

    def create_owned(self) -> RRefId:
        """The id of a new value of this process, which is held once."""
        rref_id = RRefId(self.me, self._new_id())
        self._owned[rref_id] = _Owned(made=True, holds=1)
        return rref_id

    def create_remote(self, owner: int) -> tuple[RRefId, ForkId]:
        """The ids for a call of ``remote``. Its answer goes to ``confirmed`` or ``failed``.

        If ``owner`` is this worker, its object holds the value, and the fork stands for the call until it is answered.
        """
        rref_id, fork_id = RRefId(self.me, self._new_id()), ForkId(self.me, self._new_id())
        if owner == self.me:
            self._owned[rref_id] = _Owned(made=True, holds=1, forks={fork_id: self.me})
            self._calls_to_self[fork_id] = rref_id
        else:
            self._users[fork_id] = self._user(rref_id, owner, None)
        return rref_id, fork_id

    def fork_owned(self, rref_id: RRefId, to: int, type_text: str = "") -> Fork:
        """A reference to a value of this process, for a message to ``to``. It is registered at once.

        If the message is not sent, call ``unsent``.
        """
        owned = self._owned.get(rref_id)
        if owned is None:
            raise InternalError(f"{rref_id} is shared, but it is not held here: it was released")
        fork = self._fork(rref_id, self.me, type_text)
        if to not in self._lost:
            owned.forks[fork.fork_id] = to
        return fork

    def fork_user(self, fork_id: ForkId, to: int, type_text: str = "") -> Fork:
        """A copy of a user reference, for a message to ``to``. The original is kept until the copy is accepted.

        If the message is not sent, call ``unsent``.

        Raises:
            RpcError: the reference is dead, or was deleted at shutdown.
        """
        user = self._users.get(fork_id)
        if user is None or not user.holds:
            # torch's words: code and tests look for them.
            raise RpcError(f"{fork_id}: Cannot call fork an UserRRef after deletion.")
        if user.dead:
            raise RpcError(f"{fork_id}: this reference cannot be passed on: {user.dead}")
        fork = self._fork(user.rref_id, user.owner, type_text)
        if to not in self._lost:
            user.children.add(fork.fork_id)
            self._children[fork.fork_id] = _Child(fork_id, to)
        return fork

    def unsent(self, fork: Fork) -> list[Command]:
        """The message with this fork was definitely not sent."""
        if fork.owner == self.me:
            return self._delete_fork(fork.rref_id, fork.fork_id)
        return self.on_child_accept(fork.fork_id)

    def receive(self, fork: Fork) -> Received:
        """A reference has arrived in a message."""
        if fork.owner == self.me:
            return self._receive_own(fork)
        user = self._users.get(fork.fork_id)
        if user is not None:  # the message arrived twice, and makes two objects
            user.holds += 1
            return Received(fork.fork_id, [], user.dead)
        user = self._user(fork.rref_id, fork.owner, fork.parent)
        self._users[fork.fork_id] = user
        if fork.fork_id in self._deleted:
            user.dead = "it arrived a second time, after it had been deleted"
        if fork.parent == fork.owner:
            user.parent, user.confirmed = None, not user.dead
        commands = self._settle_user(fork.fork_id)
        if user.pending:
            commands.append(Send(fork.owner, Kind.FORK_REQUEST, fork.rref_id, fork.fork_id))
        return Received(fork.fork_id, commands, user.dead)

    def _receive_own(self, fork: Fork) -> Received:
        owned = self._find(fork.rref_id)
        if isinstance(owned, _Owned):
            owned.holds += 1  # before the next lines release what has kept the value so far
        gone = "" if isinstance(owned, _Owned) else owned
        if fork.parent == self.me:
            return Received(None, self._delete_fork(fork.rref_id, fork.fork_id), gone)
        return Received(None, self._accept(fork.parent, fork.rref_id, fork.fork_id), gone)

    # The objects of this process

    def dropped(self, fork_id: ForkId) -> list[Command]:
        """One object of this user reference is gone."""
        user = self._users.get(fork_id)
        if user is None:  # delete_all was called
            return []
        user.holds = max(0, user.holds - 1)
        return self._settle_user(fork_id)

    def owner_local_held(self, rref_id: RRefId) -> bool:
        """Hold a value of this process once more, even if it is only expected. False: it is gone, or will never exist."""
        owned = self._find(rref_id)
        if not isinstance(owned, _Owned):
            return False
        owned.holds += 1
        return True

    def owner_local_dropped(self, rref_id: RRefId) -> list[Command]:
        """Release one hold on a value of this process, from ``create_owned``, ``receive`` or ``owner_local_held``."""
        owned = self._owned.get(rref_id)
        if owned is None or not owned.holds:
            raise InternalError(f"{rref_id} was dropped here more often than it was held")
        owned.holds -= 1
        return self._settle_owned(rref_id)

    # What the owner answers

    def confirmed(self, fork_id: ForkId) -> list[Command]:
        """The owner has answered FORK_REQUEST, or the call of ``remote``: the fork is registered."""
        rref_id = self._calls_to_self.pop(fork_id, None)
        if rref_id is not None:
            return self._delete_fork(rref_id, fork_id)
        user = self._users.get(fork_id)
        if user is None or not user.pending:
            return []
        user.confirmed = True
        return [Confirmed(fork_id), *self._settle_user(fork_id)]

    def failed(self, fork_id: ForkId, reason: str) -> list[Command]:
        """The owner has refused FORK_REQUEST or the call of ``remote``, or waiting for the answer was given up."""
        rref_id = self._calls_to_self.pop(fork_id, None)
        if rref_id is not None:
            return self._delete_fork(rref_id, fork_id)
        user = self._users.get(fork_id)
        if user is None or not user.pending:
            return []
        user.dead = reason
        return [Lost(fork_id, reason), *self._settle_user(fork_id)]

    # Messages of other workers

    def accept_remote(self, rref_id: RRefId, fork_id: ForkId, user: int) -> list[Command]:
        """The call of ``remote`` has arrived: create the value, unless Release is returned.

        It is not created for a lost worker, even if others wait for it: they have been told that it never will be.
        """
        owned = self._owned.get(rref_id)
        if user == self.me or user in self._lost or rref_id in self._released:
            # For this worker's own calls, create_remote has registered the fork.
            return [] if owned is not None and owned.made else [Release(rref_id)]
        if owned is None:
            owned = self._owned[rref_id] = _Owned(made=True)
        owned.made = True
        if fork_id not in self._deleted:
            owned.forks[fork_id] = user
        return self._settle_owned(rref_id)

    def on_fork_request(self, rref_id: RRefId, fork_id: ForkId, sender: int) -> list[Command]:
        """``sender`` holds a reference from another user. The answer is yes, unless Refuse is returned."""
        if sender in self._lost or fork_id in self._deleted:
            return []
        owned = self._find(rref_id)
        if not isinstance(owned, _Owned):
            return [Refuse(fork_id, owned)]
        owned.forks[fork_id] = sender
        return []

    def on_child_accept(self, fork_id: ForkId) -> list[Command]:
        """``fork_id``, which was passed on from here, is registered, or never will be."""
        child = self._children.pop(fork_id, None)
        if child is None:
            return []
        self._users[child.covered_by].children.remove(fork_id)
        return self._settle_user(child.covered_by)

    def on_user_delete(self, rref_id: RRefId, fork_id: ForkId, sender: int) -> list[Command]:
        """``sender`` has deleted a reference to a value of this process."""
        if sender in self._lost:
            return []
        return self._delete_fork(rref_id, fork_id)

    def on_inquiry(self, fork_ids: Iterable[ForkId]) -> list[ForkId]:
        """Another worker sent these references on a connection that has ended. Returns those that have not arrived.

        If one of those arrives later, it is dead.
        """
        missing = [each for each in fork_ids if each not in self._users]
        for fork_id in missing:
            self._deleted.add(fork_id)
        return missing

    # Ends

    def peer_lost(self, worker: int, reason: str) -> list[Command]:
        """A worker is gone for good: reclaim its forks, fail references to its values, and stop covering its forks."""
        if worker in self._lost or worker == self.me:
            return []
        self._lost[worker] = reason
        commands: list[Command] = []
        for rref_id, owned in list(self._owned.items()):
            if not owned.made and rref_id.created_on == worker:
                owned.orphaned = self._why_absent(rref_id)
                commands.append(Orphaned(rref_id, owned.orphaned))
            for fork_id in [each for each, holder in owned.forks.items() if holder == worker]:
                del owned.forks[fork_id]
            commands += self._settle_owned(rref_id)
        # All children first, before any reference is settled.
        let_go = [
            fork_id
            for fork_id, child in self._children.items()
            if child.to == worker or self._users[child.covered_by].owner == worker
        ]
        for fork_id in let_go:
            self._users[self._children.pop(fork_id).covered_by].children.remove(fork_id)
        for fork_id, user in list(self._users.items()):
            if user.owner == worker:
                user.lost = True
                if not user.dead:
                    user.dead = self._why_lost(worker)
                    commands.append(Lost(fork_id, user.dead))
            commands += self._settle_user(fork_id)
        return commands

    def peer_came(self, worker: int) -> None:
        """A worker has joined, perhaps under the id of a lost one."""
        self._lost.pop(worker, None)

    def delete_all(self) -> list[Command]:
        """For shutdown: delete all user references as if their objects were gone.

        Those that wait for a confirmation or a child follow later. All are deleted when ``counts().num_users`` is 0.
        """
        commands: list[Command] = []
        for fork_id, user in list(self._users.items()):
            user.holds = 0
            commands += self._settle_user(fork_id)
        return commands

    # Questions

    def is_confirmed(self, fork_id: ForkId) -> bool:
        """Whether the owner has registered this reference of ours."""
        user = self._users.get(fork_id)
        return user is not None and user.confirmed

    def unsettled(self, forks: Iterable[Fork]) -> list[Fork]:
        """Of these forks, which this worker sent, the ones that still keep something alive here."""
        return [
            each
            for each in forks
            if each.fork_id in self._children
            or (each.rref_id in self._owned and each.fork_id in self._owned[each.rref_id].forks)
        ]

    def owner_of(self, fork_id: ForkId) -> int | None:
        """The owner of this reference of ours; None if there is no such reference."""
        user = self._users.get(fork_id)
        return None if user is None else user.owner

    def is_lost(self, fork_id: ForkId) -> bool:
        """Whether the owner of this reference of ours is gone for good."""
        user = self._users.get(fork_id)
        return user is not None and user.lost

    def is_expected(self, rref_id: RRefId) -> bool:
        """Whether there are references to this value of this process, which may not exist yet."""
        return rref_id in self._owned

    def why_absent(self, rref_id: RRefId) -> str:
        """Why a value of this process does not exist and never will; empty if it does or may."""
        owned = self._owned.get(rref_id)
        return self._why_absent(rref_id) if owned is None else owned.orphaned

    def why_dead(self, fork_id: ForkId) -> str:
        """Why this reference of ours cannot be used; empty if it can."""
        user = self._users.get(fork_id)
        return "it was deleted" if user is None else user.dead

    def pending_confirmations(self, fork_ids: Iterable[ForkId]) -> set[ForkId]:
        """The ones that a function must wait for if it received these: Confirmed or Lost follows for each."""
        return {each for each in fork_ids if each in self._users and self._users[each].pending}

    def leaks(self, name_of: Callable[[int], str] = "worker {}".format) -> list[str]:
        """A line for each value of this process that others still refer to."""
        return [
            f"RRef {rref_id} is still held by "
            + ", ".join(
                f"{name_of(holder)} (fork {fork_id})"
                for fork_id, holder in sorted(
                    owned.forks.items(), key=lambda each: (each[1], each[0])
                )
            )
            for rref_id, owned in sorted(self._owned.items())
            if owned.forks
        ]

    def counts(self) -> Counts:
        """The number of references, by kind."""
        return Counts(
            num_owner_rrefs=sum(bool(each.forks) for each in self._owned.values()),
            num_forks=sum(len(each.forks) for each in self._owned.values()),
            num_users=len(self._users),
            num_pending_users=sum(each.pending for each in self._users.values()),
            num_pending_children=len(self._children),
        )

    # Inside

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _user(self, rref_id: RRefId, owner: int, parent: int | None) -> _User:
        return _User(rref_id, owner, parent, dead=self._why_lost(owner), lost=owner in self._lost)

    def _fork(self, rref_id: RRefId, owner: int, type_text: str) -> Fork:
        fork_id = ForkId(self.me, self._new_id())
        return Fork(
            rref_id=rref_id, fork_id=fork_id, owner=owner, parent=self.me, type_text=type_text
        )

    def _why_lost(self, owner: int) -> str:
        if owner not in self._lost:
            return ""
        return f"worker {owner}, which owns the value, is lost: {self._lost[owner]}"

    def _why_absent(self, rref_id: RRefId) -> str:
        """Why a value that is not in the table never will be; empty if it may."""
        creator = rref_id.created_on
        if creator == self.me or rref_id in self._released:
            return (
                f"the value of {rref_id} was released before its owner heard of this reference:"
                " a worker that passed it on has ended or given it up"
            )
        if creator in self._lost:
            return (
                f"the value of {rref_id} was never created: worker {creator}, which asked for it,"
                f" is lost: {self._lost[creator]}"
            )
        return ""

    def _find(self, rref_id: RRefId) -> _Owned | str:
        """A value of this process, expected from now on if it does not exist yet; or the reason why it never will."""
        owned = self._owned.get(rref_id)
        if owned is not None:
            return owned.orphaned or owned
        absent = self._why_absent(rref_id)
        if absent:
            return absent
        owned = self._owned[rref_id] = _Owned(made=False)
        return owned

    def _delete_fork(self, rref_id: RRefId, fork_id: ForkId) -> list[Command]:
        self._deleted.add(fork_id)
        owned = self._owned.get(rref_id)
        if owned is None:
            return []
        owned.forks.pop(fork_id, None)
        return self._settle_owned(rref_id)

    def _settle_owned(self, rref_id: RRefId) -> list[Command]:
        """Release the value if there is no reference to it."""
        owned = self._owned[rref_id]
        if owned.forks or owned.holds:
            return []
        del self._owned[rref_id]
        # A value that is only expected may still be created by a call that has not arrived. Ids of values created
        # here need not be remembered: if they are not in the table, they were released.
        if owned.made and rref_id.created_on != self.me:
            self._released.add(rref_id)
        return [Release(rref_id)]

    def _settle_user(self, fork_id: ForkId) -> list[Command]:
        """Send CHILD_ACCEPT and delete the reference, each if it is due."""
        user = self._users[fork_id]
        commands: list[Command] = []
        # A failed reference may not be registered: its children then depend on its own parent.
        if user.parent is not None and (user.confirmed or (user.dead and not user.children)):
            parent, user.parent = user.parent, None
            commands += self._accept(parent, user.rref_id, fork_id)
        if user.holds or user.children or user.pending:
            return commands
        del self._users[fork_id]
        self._deleted.add(fork_id)
        if user.owner not in self._lost:
            commands.append(Send(user.owner, Kind.USER_DELETE, user.rref_id, fork_id))
        return commands

    def _accept(self, parent: int, rref_id: RRefId, fork_id: ForkId) -> list[Command]:
        if parent == self.me:
            return self.on_child_accept(fork_id)
        if parent in self._lost:
            return []
        return [Send(parent, Kind.CHILD_ACCEPT, rref_id, fork_id)]

"""Who still refers to which value: the distributed reference counting of one process. Pure.

Theory of operation
===================

A value lives on its *owner*. The owner's own objects *hold* it. Any other worker that can reach it has a *user*
reference, and each user reference is a *fork* with an id of its own: who holds two has two forks. The owner keeps,
for each value, the forks that it knows (*registered*) and the number of its own holds; with none of either, the value
is released.

**Invariant.** A value is not released while a reference to it exists or is on its way; it is released when there is
none and the network is quiet.

It holds because at any time each fork is either registered, or *covered* by another fork that is, and that cannot be
deleted as long as it covers:

1. The owner registers a fork when it is put into a message, before the message leaves. Its receiver is confirmed from
   the first moment.
2. A user that passes a reference on covers the new fork, its *pending child*: it does not delete its own before the
   child says CHILD_ACCEPT, even if its object is collected meanwhile. The child says so when the owner has answered its
   FORK_REQUEST, that is when the owner has registered it. A child that is the owner itself says it at once.
3. A user deletes its fork (USER_DELETE) when its objects are gone, it covers nobody, and it has been confirmed. So the
   delete cannot overtake what it undoes: the request was answered before.
4. ``remote`` makes the value's id and the first fork's on the caller; they travel with the call, and its answer is the
   confirmation. The caller may pass the reference on before the call has arrived: the owner then registers forks
   of a value that is *expected*.

Every message may come twice and late. What registers a fork (FORK_REQUEST, the call of ``remote``) must not do so once
the fork is deleted: its id is remembered. So is the id of a released value, lest it be expected for ever.
A message whose connection ends may have come or not. Its sender asks (``on_inquiry``): what has not come then never
will, and was not sent (``unsent``).
A confirmation that was given up (``failed``) leaves it open whether the fork is registered. Such a reference is dead
to its holder, but it covers its children still, keeps its own parent until these are accepted, and is deleted as
others are; a delete may then come before what it undoes, and the remembered id takes care of that, too.

**Where the guarantee ends.** A worker that dies covers nobody any more, and its forks are reclaimed. A reference that
it had passed on, and that the owner has not registered yet, may be refused: it is then dead, with the reason, and no
call on it waits for ever. False alarms are not survived: who is said to be lost stays lost, and a worker that
comes again must have a new id. Ids are remembered up to a limit: a duplicate that comes later than that many deletions
leaves a fork registered until its worker ends.

Nothing here locks, and an object may be collected anywhere, also inside of these methods: a finalizer notes the fork
(``deque.append``) and the shell calls ``dropped`` later, outside of all of this.
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


# Retries of a message end after some 13 s (5 attempts, from 1 s, each wait 1.5 times the last): at 1000 deletions a
# second, these are enough; they take 4 MB.
REMEMBER = 16_384


@dataclass(slots=True)
class _Owned:
    """A value that lives here. It is in the table as long as it has forks or holds."""

    made: bool  # or somebody else's call that makes it is still to come
    holds: int = 0
    forks: dict[ForkId, int] = field(default_factory=dict)  # to the worker that holds it
    orphaned: str = ""


@dataclass(slots=True)
class _User:
    """A reference to another worker's value. It is in the table until its deletion is sent."""

    rref_id: RRefId
    owner: int
    parent: int | None  # to be told CHILD_ACCEPT; None: nobody, or it has been
    holds: int = 1
    confirmed: bool = False
    dead: str = ""
    children: set[ForkId] = field(default_factory=set)

    @property
    def pending(self) -> bool:
        return not self.confirmed and not self.dead


class _Child(NamedTuple):
    """A fork that one of mine covers."""

    covered_by: ForkId
    to: int


_Id = TypeVar("_Id", RRefId, ForkId)


class _Recent(Generic[_Id]):
    """The ids that were added last, up to a limit."""

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

    Whoever calls a method carries out the commands it returns, in their order. Methods named ``on_…`` take what
    another worker sent, and may be called again with the same.

    Args:
        me: this worker's id.
        remember: how many deleted forks and released values are kept in mind against late duplicates.
    """

    def __init__(self, me: int, *, remember: int = REMEMBER) -> None:
        self.me = me
        self._next_id = 0
        self._owned: dict[RRefId, _Owned] = {}
        self._users: dict[ForkId, _User] = {}
        self._children: dict[ForkId, _Child] = {}
        self._calls_to_self: dict[ForkId, RRefId] = {}
        self._lost: dict[int, str] = {}
        self._deleted: _Recent[ForkId] = _Recent(remember)
        self._released: _Recent[RRefId] = _Recent(remember)

    # Making references

    def create_owned(self) -> RRefId:
        """A value of this process gets an id. It is held once, and nobody else knows of it."""
        rref_id = RRefId(self.me, self._new_id())
        self._owned[rref_id] = _Owned(made=True, holds=1)
        return rref_id

    def create_remote(self, owner: int) -> tuple[RRefId, ForkId]:
        """The ids that a call of ``remote`` carries; its answer goes to ``confirmed`` or ``failed``.

        If ``owner`` is this worker, its object holds the value itself, and the fork stands for the call until then.
        """
        rref_id, fork_id = RRefId(self.me, self._new_id()), ForkId(self.me, self._new_id())
        if owner == self.me:
            self._owned[rref_id] = _Owned(made=True, holds=1, forks={fork_id: self.me})
            self._calls_to_self[fork_id] = rref_id
        else:
            self._users[fork_id] = _User(rref_id, owner, None, dead=self._why_lost(owner))
        return rref_id, fork_id

    def fork_owned(self, rref_id: RRefId, to: int, type_text: str = "") -> Fork:
        """A value of this process is put into a message to ``to``: that reference is registered at once.

        If the message is not sent after all: ``unsent``.
        """
        owned = self._owned.get(rref_id)
        if owned is None:
            raise InternalError(f"{rref_id} is shared, but it is not held here: it was released")
        fork = self._fork(rref_id, self.me, type_text)
        if to not in self._lost:
            owned.forks[fork.fork_id] = to
        return fork

    def fork_user(self, fork_id: ForkId, to: int, type_text: str = "") -> Fork:
        """A user reference is put into a message to ``to``: it is kept until the other is accepted.

        If the message is not sent after all: ``unsent``.

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
        """The message with this fork has not left and will not. If that is uncertain, this is not for it."""
        if fork.owner == self.me:
            return self._delete_fork(fork.rref_id, fork.fork_id)
        return self.on_child_accept(fork.fork_id)

    def receive(self, fork: Fork) -> Received:
        """A reference has come in a message."""
        if fork.owner == self.me:
            return self._receive_own(fork)
        user = self._users.get(fork.fork_id)
        if user is not None:  # the message came twice: so do the objects made of it
            user.holds += 1
            return Received(fork.fork_id, [], user.dead)
        user = _User(fork.rref_id, fork.owner, fork.parent)
        self._users[fork.fork_id] = user
        if fork.fork_id in self._deleted:
            user.dead = "it came a second time, after it had been deleted"
        else:
            user.dead = self._why_lost(fork.owner)
        if fork.parent == fork.owner:
            user.parent, user.confirmed = None, not user.dead
        commands = self._settle_user(fork.fork_id)
        if user.pending:
            commands.append(Send(fork.owner, Kind.FORK_REQUEST, fork.rref_id, fork.fork_id))
        return Received(fork.fork_id, commands, user.dead)

    def _receive_own(self, fork: Fork) -> Received:
        owned = self._find(fork.rref_id)
        if isinstance(owned, _Owned):
            owned.holds += 1  # first: what follows gives up what has kept the value so far
        gone = "" if isinstance(owned, _Owned) else owned
        if fork.parent == self.me:
            return Received(None, self._delete_fork(fork.rref_id, fork.fork_id), gone)
        return Received(None, self._accept(fork.parent, fork.rref_id, fork.fork_id), gone)

    # The objects of this process

    def dropped(self, fork_id: ForkId) -> list[Command]:
        """An object that stood for this user reference is gone. Once for each object."""
        user = self._users.get(fork_id)
        if user is None:  # delete_all has been there
            return []
        user.holds = max(0, user.holds - 1)
        return self._settle_user(fork_id)

    def owner_local_held(self, rref_id: RRefId) -> bool:
        """Hold a value of this process once more, also one that is only expected. False: it is gone, or never comes."""
        owned = self._find(rref_id)
        if not isinstance(owned, _Owned):
            return False
        owned.holds += 1
        return True

    def owner_local_dropped(self, rref_id: RRefId) -> list[Command]:
        """A hold on a value of this process is gone: ``create_owned``'s, ``receive``'s, ``owner_local_held``'s."""
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
        """The owner has refused FORK_REQUEST or the call of ``remote``, or nobody waits for an answer any more."""
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
        """The call of ``remote`` has come: the value will be made here. Release at once: nobody wants it any more.

        It is not made for a worker that is lost, even if others wait for it: they have been told that it never comes.
        """
        owned = self._owned.get(rref_id)
        if user == self.me or user in self._lost or rref_id in self._released:
            # One for this worker itself was registered by create_remote.
            return [] if owned is not None and owned.made else [Release(rref_id)]
        if owned is None:
            owned = self._owned[rref_id] = _Owned(made=True)
        owned.made = True
        if fork_id not in self._deleted:
            owned.forks[fork_id] = user
        return self._settle_owned(rref_id)

    def on_fork_request(self, rref_id: RRefId, fork_id: ForkId, sender: int) -> list[Command]:
        """``sender`` holds a reference that it got from another user. The answer is yes, unless Refuse is returned."""
        if sender in self._lost or fork_id in self._deleted:
            return []
        owned = self._find(rref_id)
        if not isinstance(owned, _Owned):
            return [Refuse(fork_id, owned)]
        owned.forks[fork_id] = sender
        return []

    def on_child_accept(self, fork_id: ForkId) -> list[Command]:
        """The owner knows ``fork_id``, which was passed on from here, or it will never."""
        child = self._children.pop(fork_id, None)
        if child is None:
            return []
        self._users[child.covered_by].children.remove(fork_id)
        return self._settle_user(child.covered_by)

    def on_user_delete(self, rref_id: RRefId, fork_id: ForkId, sender: int) -> list[Command]:
        """``sender`` has given up a reference to a value of this process."""
        if sender in self._lost:
            return []
        return self._delete_fork(rref_id, fork_id)

    def on_inquiry(self, fork_ids: Iterable[ForkId]) -> list[ForkId]:
        """Another worker asks which of these references have come here; returns those that have not, and never will.

        It has sent them on a connection that has ended since. One that comes after this answer is dead.
        """
        missing = [each for each in fork_ids if each not in self._users]
        for fork_id in missing:
            self._deleted.add(fork_id)
        return missing

    # Ends

    def peer_lost(self, worker: int, reason: str) -> list[Command]:
        """A worker is gone for good: what it held is free, what it owned is dead, what it was passed is let go."""
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
        # All children first: then no reference settles on the word of one that is about to die, too.
        let_go = [
            fork_id
            for fork_id, child in self._children.items()
            if child.to == worker or self._users[child.covered_by].owner == worker
        ]
        for fork_id in let_go:
            self._users[self._children.pop(fork_id).covered_by].children.remove(fork_id)
        for fork_id, user in list(self._users.items()):
            if user.owner == worker and not user.dead:
                user.dead = self._why_lost(worker)
                commands.append(Lost(fork_id, user.dead))
            commands += self._settle_user(fork_id)
        return commands

    def delete_all(self) -> list[Command]:
        """For shutdown: every user reference is deleted as if its objects were gone.

        Those that wait for a confirmation or a child follow as these come: ``counts().num_users`` says when it is over.
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
        """Which of these, sent by this worker, keep something alive here."""
        return [
            each
            for each in forks
            if each.fork_id in self._children
            or (each.rref_id in self._owned and each.fork_id in self._owned[each.rref_id].forks)
        ]

    def owner_of(self, fork_id: ForkId) -> int | None:
        """Where the value of this reference of ours lives; None if there is no such reference (any more)."""
        user = self._users.get(fork_id)
        return None if user is None else user.owner

    def is_expected(self, rref_id: RRefId) -> bool:
        """Whether anybody refers to this value of this process, be it there or not."""
        return rref_id in self._owned

    def why_absent(self, rref_id: RRefId) -> str:
        """Why a value of this process is not there, and never will be; empty if it is, or may be."""
        owned = self._owned.get(rref_id)
        return self._why_absent(rref_id) if owned is None else owned.orphaned

    def why_dead(self, fork_id: ForkId) -> str:
        """Why this reference of ours can not be used any more; empty if it can."""
        user = self._users.get(fork_id)
        return "it was deleted" if user is None else user.dead

    def pending_confirmations(self, fork_ids: Iterable[ForkId]) -> set[ForkId]:
        """Which of these a function that received them must wait for: Confirmed or Lost will come for each."""
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
        """How many references there are now, by kind."""
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
        """Why a value that is not in the table will not come; empty if it may."""
        creator = rref_id.created_on
        if creator == self.me or rref_id in self._released:
            return (
                f"the value of {rref_id} was released before its owner heard of this reference:"
                " a worker that had passed it on has ended, or given it up"
            )
        if creator in self._lost:
            return (
                f"the value of {rref_id} was never made: worker {creator}, which asked for it,"
                f" is lost: {self._lost[creator]}"
            )
        return ""

    def _find(self, rref_id: RRefId) -> _Owned | str:
        """A value of this process, from now on expected if it is not there; or why it never will be."""
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
        """Release the value if nobody refers to it."""
        owned = self._owned[rref_id]
        if owned.forks or owned.holds:
            return []
        del self._owned[rref_id]
        # One that is only expected may be made yet, by a call whose fork nobody has heard of so far. Ids made
        # here need no memory: what is not in the table is released.
        if owned.made and rref_id.created_on != self.me:
            self._released.add(rref_id)
        return [Release(rref_id)]

    def _settle_user(self, fork_id: ForkId) -> list[Command]:
        """Tell the parent, and delete the reference, if it is time."""
        user = self._users[fork_id]
        commands: list[Command] = []
        # One that failed may cover children, and is not registered for sure: only its own parent keeps them.
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

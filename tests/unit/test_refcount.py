"""Reference counting: traces for each rule, and a network that delays, reorders, repeats and kills for the invariant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.errors import InternalError, RpcError
from rallypoint.rpc.references.commands import (
    Command,
    Confirmed,
    Kind,
    Lost,
    Orphaned,
    Refuse,
    Release,
    Send,
)
from rallypoint.rpc.references.ids import Fork, ForkId, RRefId
from rallypoint.rpc.references.refcount import References


REQUEST, ACCEPT, DELETE = Kind.FORK_REQUEST, Kind.CHILD_ACCEPT, Kind.USER_DELETE


def workers(number: int = 4) -> Iterator[References]:
    return map(References, range(number))


def shared(owner: References, user: References) -> tuple[RRefId, ForkId]:
    """A value of ``owner`` that only ``user`` refers to."""
    rref = owner.create_owned()
    fork = owner.fork_owned(rref, user.me)
    assert user.receive(fork).commands == []
    assert owner.owner_local_dropped(rref) == []
    return rref, fork.fork_id


def passed(user: References, fork: ForkId, to: References) -> Fork:
    """``user`` passes its reference on and drops its own object; the request of ``to`` has not arrived yet."""
    child = user.fork_user(fork, to.me)
    assert to.receive(child).commands == [Send(child.owner, REQUEST, child.rref_id, child.fork_id)]
    assert user.dropped(fork) == []
    return child


def is_empty(references: References) -> bool:
    return not (references._owned or references._users or references._children)


# Rule 1: the owner's own references


def test_a_local_reference_is_nobodys_business_until_it_is_shared() -> None:
    a, *_ = workers()
    rref = a.create_owned()
    assert a.counts().num_owner_rrefs == 0
    a.fork_owned(rref, 1)
    assert (a.counts().num_owner_rrefs, a.counts().num_forks) == (1, 1)


def test_values_and_references_are_numbered_together_as_in_torch() -> None:
    a, *_ = workers()
    assert a.create_owned() == RRefId(0, 0)
    assert a.create_remote(1) == (RRefId(0, 1), ForkId(0, 2))
    assert str(RRefId(0, 1)) == str(ForkId(0, 1)) == "GloballyUniqueId(created_on=0, local_id=1)"


def test_a_value_lives_while_its_first_reference_is_on_its_way() -> None:
    a, b, *_ = workers()
    rref = a.create_owned()
    fork = a.fork_owned(rref, 1, "Tensor")
    assert a.owner_local_dropped(rref) == []
    assert fork == Fork(rref_id=rref, fork_id=ForkId(0, 1), owner=0, parent=0, type_text="Tensor")
    received = b.receive(fork)
    assert received.fork_id == fork.fork_id
    assert b.is_confirmed(fork.fork_id) and not b.pending_confirmations([fork.fork_id])
    assert b.dropped(fork.fork_id) == [Send(0, DELETE, rref, fork.fork_id)]
    assert a.on_user_delete(rref, fork.fork_id, 1) == [Release(rref)]
    assert is_empty(a) and is_empty(b)


def test_a_value_that_the_owner_still_holds_outlives_the_users() -> None:
    a, *_ = workers()
    rref = a.create_owned()
    fork = a.fork_owned(rref, 1).fork_id
    assert a.on_user_delete(rref, fork, 1) == []
    assert a.counts().num_owner_rrefs == 0  # no longer held by anyone else
    assert a.owner_local_held(rref)
    assert a.owner_local_dropped(rref) == []
    assert a.owner_local_dropped(rref) == [Release(rref)]
    assert not a.owner_local_held(rref)
    with pytest.raises(InternalError, match="more often than it was held"):
        a.owner_local_dropped(rref)
    with pytest.raises(InternalError, match="it was released"):
        a.fork_owned(rref, 1)


def test_a_message_that_never_left_leaves_no_reference() -> None:
    a, b, *_ = workers()
    rref, mine = shared(a, b)
    child = b.fork_user(mine, 2)
    assert b.dropped(mine) == []
    assert b.unsent(child) == [Send(0, DELETE, rref, mine)]
    other = a.fork_owned(rref, 3)
    assert a.on_user_delete(rref, mine, 1) == []
    assert a.unsent(other) == [Release(rref)]


def test_a_call_to_oneself_keeps_the_value_until_it_has_arrived() -> None:
    a, *_ = workers()
    rref = a.create_owned()
    fork = a.fork_owned(rref, 0)
    assert a.owner_local_dropped(rref) == []
    received = a.receive(fork)
    assert (received.fork_id, received.commands, received.gone) == (None, [], "")
    assert a.counts().num_forks == 0
    assert a.owner_local_dropped(rref) == [Release(rref)]


def test_what_a_broken_connection_may_have_lost_is_asked_for() -> None:
    a, b, c, _ = workers()
    rref, mine = shared(a, b)
    came, lost = b.fork_user(mine, 2), b.fork_user(mine, 2)
    assert b.unsettled([came, lost]) == [came, lost]
    assert c.receive(came).commands == [Send(0, REQUEST, rref, came.fork_id)]
    assert c.on_inquiry([came.fork_id, lost.fork_id]) == [lost.fork_id]
    assert b.unsent(lost) == []
    assert b.unsettled([came, lost]) == [came]
    # It was only slow; on arrival it is dead, and leaves nothing behind.
    assert "second time" in c.receive(lost).gone
    c.dropped(lost.fork_id)
    assert b.dropped(mine) == [] and b.on_child_accept(came.fork_id) == [
        Send(0, DELETE, rref, mine)
    ]
    assert is_empty(b)


def test_what_an_owner_has_passed_to_nobody_is_let_go() -> None:
    a, b, *_ = workers()
    rref = a.create_owned()
    fork = a.fork_owned(rref, 1)
    assert a.owner_local_dropped(rref) == [] and a.unsettled([fork]) == [fork]
    assert b.on_inquiry([fork.fork_id]) == [fork.fork_id]
    assert a.unsent(fork) == [Release(rref)]
    assert a.unsettled([fork]) == [] and is_empty(a)


# Rule 2: users pass references on


def test_a_users_reference_outlives_its_object_until_the_child_is_accepted() -> None:
    a, b, c, _ = workers()
    rref, mine = shared(a, b)
    child = passed(b, mine, c)
    assert b.counts().num_pending_children == c.counts().num_pending_users == 1
    assert c.pending_confirmations([child.fork_id]) == {child.fork_id}
    assert a.on_fork_request(rref, child.fork_id, 2) == []
    assert c.confirmed(child.fork_id) == [
        Confirmed(child.fork_id),
        Send(1, ACCEPT, rref, child.fork_id),
    ]
    assert c.confirmed(child.fork_id) == []
    assert b.on_child_accept(child.fork_id) == [Send(0, DELETE, rref, mine)]
    assert b.on_child_accept(child.fork_id) == []
    assert a.on_user_delete(rref, mine, 1) == []
    assert a.on_user_delete(rref, mine, 1) == []
    assert c.dropped(child.fork_id) == [Send(0, DELETE, rref, child.fork_id)]
    assert a.on_user_delete(rref, child.fork_id, 2) == [Release(rref)]
    assert is_empty(a) and is_empty(b) and is_empty(c)


def test_a_reference_that_comes_home_is_the_value_again() -> None:
    a, b, *_ = workers()
    rref, mine = shared(a, b)
    home = b.fork_user(mine, 0)
    assert b.dropped(mine) == []
    received = a.receive(home)
    assert received.fork_id is None
    assert received.commands == [Send(1, ACCEPT, rref, home.fork_id)]
    assert b.on_child_accept(home.fork_id) == [Send(0, DELETE, rref, mine)]
    assert a.on_user_delete(rref, mine, 1) == []  # the receiver holds it
    assert a.owner_local_dropped(rref) == [Release(rref)]


def test_a_user_that_calls_itself_sends_itself_nothing() -> None:
    a, b, *_ = workers()
    rref, mine = shared(a, b)
    own = b.fork_user(mine, 1)
    assert b.dropped(mine) == []
    assert b.receive(own).commands == [Send(0, REQUEST, rref, own.fork_id)]
    assert b.confirmed(own.fork_id) == [Confirmed(own.fork_id), Send(0, DELETE, rref, mine)]


def test_a_reference_is_not_deleted_before_it_is_confirmed() -> None:
    a, b, c, _ = workers()
    rref, mine = shared(a, b)
    child = passed(b, mine, c)
    assert c.dropped(child.fork_id) == []
    assert c.confirmed(child.fork_id) == [
        Confirmed(child.fork_id),
        Send(1, ACCEPT, rref, child.fork_id),
        Send(0, DELETE, rref, child.fork_id),
    ]


def test_a_message_that_comes_twice_makes_two_objects_of_one_reference() -> None:
    a, b, *_ = workers()
    rref = a.create_owned()
    fork = a.fork_owned(rref, 1)
    assert b.receive(fork).fork_id == b.receive(fork).fork_id
    assert b.dropped(fork.fork_id) == []
    assert b.dropped(fork.fork_id) == [Send(0, DELETE, rref, fork.fork_id)]
    assert "second time" in b.receive(fork).gone


# Rule 4: remote


def test_the_answer_of_remote_confirms_its_reference() -> None:
    a, b, *_ = workers()
    rref, fork = b.create_remote(0)
    assert b.pending_confirmations([fork]) == {fork} and not b.is_confirmed(fork)
    assert b.dropped(fork) == []
    assert a.accept_remote(rref, fork, 1) == []
    assert a.accept_remote(rref, fork, 1) == []
    assert b.confirmed(fork) == [Confirmed(fork), Send(0, DELETE, rref, fork)]
    assert a.on_user_delete(rref, fork, 1) == [Release(rref)]
    assert a.accept_remote(rref, fork, 1) == [Release(rref)]  # a late duplicate
    assert is_empty(a) and is_empty(b)


def test_remote_to_oneself_keeps_the_value_until_the_call_is_over() -> None:
    a, *_ = workers()
    for end in (a.confirmed, lambda fork: a.failed(fork, "its function raised")):
        rref, fork = a.create_remote(0)
        assert a.accept_remote(rref, fork, 0) == []
        assert a.owner_local_dropped(rref) == []
        assert end(fork) == [Release(rref)]
        assert end(fork) == []
        assert a.accept_remote(rref, fork, 0) == [Release(rref)]  # nobody was waiting for it


def test_a_reference_that_is_faster_than_the_call_that_makes_its_value() -> None:
    a, b, c, _ = workers()
    rref, fork = b.create_remote(0)
    child = passed(b, fork, c)
    assert a.on_fork_request(rref, child.fork_id, 2) == []
    home = c.fork_user(child.fork_id, 0)
    assert a.receive(home).gone == ""  # it is held, though its value has not been made yet
    assert a.accept_remote(rref, fork, 1) == []
    assert a.counts().num_forks == 2


def test_a_value_that_is_given_up_before_it_is_made_is_made_nevertheless() -> None:
    a, b, *_ = workers()
    rref, fork = b.create_remote(0)
    assert a.receive(b.fork_user(fork, 0)).gone == ""
    assert a.owner_local_dropped(rref) == [Release(rref)]  # only the expectation of a value
    assert a.accept_remote(rref, fork, 1) == []
    assert a.counts().num_forks == 1


def test_who_gave_up_waiting_for_remote_leaves_nothing_behind() -> None:
    a, b, *_ = workers()
    rref, fork = b.create_remote(0)
    assert b.failed(fork, "no answer in 60 s") == [Lost(fork, "no answer in 60 s")]
    assert b.why_dead(fork) == "no answer in 60 s" and not b.pending_confirmations([fork])
    assert b.confirmed(fork) == [] and not b.is_confirmed(fork)
    assert b.dropped(fork) == [Send(0, DELETE, rref, fork)]
    assert a.on_user_delete(rref, fork, 1) == []  # overtakes the call
    assert a.accept_remote(rref, fork, 1) == [Release(rref)]
    assert is_empty(a)


# Duplicates, and what is remembered


def test_a_request_that_comes_after_the_delete_registers_nothing() -> None:
    a, *_ = workers()
    rref = a.create_owned()
    assert a.on_user_delete(rref, ForkId(1, 7), 2) == []
    assert a.on_fork_request(rref, ForkId(1, 7), 2) == []
    assert a.counts().num_forks == 0


def test_what_is_remembered_is_bounded() -> None:
    a = References(0, remember=3)
    rref = a.create_owned()
    for number in range(10):
        a.on_user_delete(rref, ForkId(1, number), 1)
    assert len(a._deleted._ids) == 3
    assert a.on_fork_request(rref, ForkId(1, 7), 1) == [] and a.counts().num_forks == 0
    assert a.on_fork_request(rref, ForkId(1, 6), 1) == [] and a.counts().num_forks == 1


# Failures


def test_who_fails_keeps_its_parent_until_its_own_children_are_accepted() -> None:
    a, b, c, d = workers()
    rref, mine = shared(a, b)
    child = passed(b, mine, c)
    grandchild = passed(c, child.fork_id, d)
    assert c.failed(child.fork_id, "no answer") == [Lost(child.fork_id, "no answer")]
    assert a.on_fork_request(rref, grandchild.fork_id, 3) == []
    assert c.on_child_accept(grandchild.fork_id) == [
        Send(1, ACCEPT, rref, child.fork_id),
        Send(0, DELETE, rref, child.fork_id),
    ]


def test_the_references_of_a_lost_worker_are_reclaimed() -> None:
    a, b, _c, _ = workers()
    rref, mine = shared(a, b)
    child = b.fork_user(mine, 2)
    assert b.dropped(mine) == []
    assert b.peer_lost(2, "it hung up") == [Send(0, DELETE, rref, mine)]
    assert b.peer_lost(2, "it hung up") == []
    other = a.fork_owned(rref, 2)
    assert a.peer_lost(2, "it hung up") == []
    assert a.on_user_delete(rref, mine, 1) == [Release(rref)]
    # Nothing that it still sends, or that is sent to it, makes it a holder.
    assert a.on_fork_request(rref, child.fork_id, 2) == []
    assert a.on_user_delete(rref, other.fork_id, 2) == []
    assert a.accept_remote(RRefId(2, 0), ForkId(2, 1), 2) == [Release(RRefId(2, 0))]
    a.fork_owned(a.create_owned(), 2)
    assert a.counts().num_forks == 0


def test_a_reference_to_a_lost_workers_value_is_dead_and_says_why() -> None:
    a, b, c, _ = workers()
    rref, mine = shared(a, b)
    child = passed(b, b.receive(a.fork_owned(rref, 1)).fork_id or ForkId(9, 9), c)
    reason = "worker 0, which owns the value, is lost: killed"
    assert b.peer_lost(0, "killed") == [Lost(mine, reason), Lost(ForkId(0, 2), reason)]
    assert b.why_dead(mine) == reason
    with pytest.raises(RpcError, match="cannot be passed on: worker 0, which owns the value"):
        b.fork_user(mine, 2)
    assert b.dropped(mine) == [] and is_empty(b)
    assert b.why_dead(b.create_remote(0)[1]) == reason
    assert c.peer_lost(0, "killed")[0] == Lost(child.fork_id, reason)
    assert c.confirmed(child.fork_id) == []


def test_who_comes_under_the_id_of_a_lost_worker_shares_and_refers_anew() -> None:
    a, before, *_ = workers()
    _, theirs = shared(before, a)
    rref, mine = shared(a, before)
    assert before.dropped(mine) == [Send(0, DELETE, rref, mine)]
    assert a.on_user_delete(rref, mine, 1) == [Release(rref)]
    a.peer_lost(1, "killed")
    after = References(1, first=100)
    a.peer_came(1)
    _, new = shared(after, a)
    assert a.is_confirmed(new) and not a.why_dead(new) and not a.is_lost(new)
    assert a.is_lost(theirs) and "is lost: killed" in a.why_dead(theirs), "the value is gone"
    called, fork = after.create_remote(0)
    assert a.accept_remote(called, fork, 1) == []
    assert after.confirmed(fork) == [Confirmed(fork)]
    assert a.counts().num_forks == 1


def test_a_reference_of_a_lost_owner_that_still_arrives_is_dead() -> None:
    a, b, c, _ = workers()
    fork = a.fork_owned(a.create_owned(), 1)
    child = b.fork_user(b.receive(fork).fork_id or ForkId(9, 9), 2)
    c.peer_lost(0, "killed")
    received = c.receive(child)
    assert "is lost: killed" in received.gone
    assert received.commands == [Send(1, ACCEPT, child.rref_id, child.fork_id)]
    assert c.dropped(child.fork_id) == [] and is_empty(c)


def test_a_reference_whose_carrier_died_too_early_is_refused() -> None:
    a, b, c, d = workers()
    rref, mine = shared(a, b)
    child = passed(b, mine, c)
    home = c.fork_user(child.fork_id, 0)
    grandchild = passed(c, child.fork_id, d)
    (delete,) = b.peer_lost(2, "killed")
    assert delete == Send(0, DELETE, rref, mine)
    assert a.on_user_delete(rref, mine, 1) == [Release(rref)]
    (refuse,) = a.on_fork_request(rref, grandchild.fork_id, 3)
    assert isinstance(refuse, Refuse) and "was released before its owner heard" in refuse.reason
    assert d.failed(grandchild.fork_id, refuse.reason)[0] == Lost(grandchild.fork_id, refuse.reason)
    assert "was released" in a.receive(home).gone
    assert is_empty(a)


def test_a_value_whose_maker_died_first_never_comes() -> None:
    a, b, _c, _d = workers()
    rref, fork = b.create_remote(0)
    child = b.fork_user(fork, 2)
    assert a.on_fork_request(rref, child.fork_id, 2) == []
    (orphaned,) = a.peer_lost(1, "killed")
    assert isinstance(orphaned, Orphaned) and "worker 1, which asked for it" in orphaned.reason
    assert a.on_fork_request(rref, ForkId(2, 5), 3) == [Refuse(ForkId(2, 5), orphaned.reason)]
    assert a.receive(b.fork_user(fork, 0)).gone == orphaned.reason
    assert not a.owner_local_held(rref)
    assert a.on_user_delete(rref, child.fork_id, 2) == [Release(rref)]
    assert a.on_fork_request(rref, ForkId(2, 6), 3) == [Refuse(ForkId(2, 6), orphaned.reason)]
    assert is_empty(a)


def test_a_released_value_is_not_expected_again() -> None:
    a, b, c, _ = workers()
    rref, fork = b.create_remote(0)
    assert a.accept_remote(rref, fork, 1) == []
    child = passed(b, fork, c)
    assert a.peer_lost(1, "killed") == [Release(rref)]
    (refuse,) = a.on_fork_request(rref, child.fork_id, 2)
    assert isinstance(refuse, Refuse) and "was released" in refuse.reason
    assert is_empty(a)


# Shutdown


def test_shutdown_deletes_what_it_can_and_the_rest_as_it_is_answered() -> None:
    a, b, _c, _ = workers()
    rref, mine = shared(a, b)
    pending_rref, pending = b.create_remote(0)
    assert b.delete_all() == [Send(0, DELETE, rref, mine)]
    assert b.counts().num_users == 1
    assert b.dropped(mine) == b.dropped(pending) == []  # their objects are dropped later
    assert b.why_dead(mine) == "it was deleted"
    for fork in (mine, pending):
        with pytest.raises(RpcError, match=r"Cannot call fork an UserRRef after deletion\."):
            b.fork_user(fork, 2)
    assert b.confirmed(pending)[-1] == Send(0, DELETE, pending_rref, pending)
    assert is_empty(b)


def test_a_leak_says_who_holds_what() -> None:
    a, b, _c, _ = workers()
    rref, _mine = shared(a, b)
    a.fork_owned(rref, 2)
    a.create_owned()
    assert a.leaks() == [
        "RRef GloballyUniqueId(created_on=0, local_id=0) is still held by"
        " worker 1 (fork GloballyUniqueId(created_on=0, local_id=1)),"
        " worker 2 (fork GloballyUniqueId(created_on=0, local_id=2))"
    ]
    assert "by trainer1 (fork" in a.leaks("trainer{}".format)[0]
    assert b.leaks() == []


# The invariant


@dataclass(frozen=True)
class Mail:
    """In transit: a call that carries a reference, a remote call, a control message, an answer, or news of a death."""

    source: int
    to: int
    what: Fork | Send | tuple[RRefId, ForkId] | tuple[ForkId, str] | None
    repeatable: bool = True


@dataclass(frozen=True)
class Handle:
    """An object of a process; ``fork_id`` is None where the value lives."""

    at: int
    rref_id: RRefId
    fork_id: ForkId | None


@dataclass
class World:
    """Workers, their objects, and a network that delivers in any order. It tracks independently who refers to what."""

    number: int
    peers: list[References] = field(init=False)
    alive: set[int] = field(init=False)
    mail: list[Mail] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    owners: dict[RRefId, int] = field(default_factory=dict)
    values: set[RRefId] = field(default_factory=set)  # made and not released
    made: set[RRefId] = field(default_factory=set)
    cover: dict[ForkId, tuple[int, ForkId]] = field(default_factory=dict)  # child: its parent
    registered: set[ForkId] = field(default_factory=set)
    unanswered: list[tuple[int, ForkId]] = field(default_factory=list)
    peaceful: bool = True  # nobody has died or given up

    def __post_init__(self) -> None:
        self.peers = list(workers(self.number))
        self.alive = set(range(self.number))

    # What the test believes

    def protected(self, fork: ForkId | None) -> bool:
        """Whether the guarantee covers this reference."""
        while fork is not None and fork not in self.registered:
            parent, fork = self.cover.get(fork, (-1, None))
            if parent not in self.alive:
                return False
        return fork is not None

    def references(self, rref: RRefId) -> Iterator[ForkId]:
        """The user references that can be used now, or once they arrive."""
        for handle in self.handles:
            fork = handle.fork_id
            if handle.rref_id == rref and fork and not self.peers[handle.at].why_dead(fork):
                yield fork
        for mail in self.mail:
            if isinstance(mail.what, Fork) and mail.what.rref_id == rref and mail.to in self.alive:
                yield mail.what.fork_id

    def carry_out(self, at: int, commands: list[Command], request: Mail | None = None) -> str:
        """Do what the shell does. Returns the answer to a request: empty for yes."""
        answer = ""
        for command in commands:
            match command:
                case Send(to, kind, rref, fork):
                    assert to != at and to not in self.peers[at]._lost
                    if kind is REQUEST:
                        self.unanswered.append((at, fork))
                    self.post(Mail(at, to, command))
                case Release(rref) if rref in self.values:
                    assert self.owners[rref] == at
                    holding = [h for h in self.handles if h.rref_id == rref and h.at == at]
                    assert not holding, f"{rref} is released while {holding} hold it"
                    for each in self.references(rref):
                        assert not self.protected(each), f"{rref} is released, {each} refers to it"
                    self.values.remove(rref)
                case Refuse(fork, reason):
                    assert request is not None and isinstance(request.what, Send)
                    assert fork == request.what.fork_id
                    if request.source in self.alive and request.what.rref_id in self.made:
                        given_up = self.peers[request.source].why_dead(fork)
                        assert given_up or not self.protected(fork), f"{fork} is refused"
                    answer = reason
                case Lost() | Refuse() | Orphaned():
                    assert not self.peaceful, command
                case Confirmed() | Release():
                    pass
        return answer

    def post(self, mail: Mail) -> None:
        if mail.to in self.alive:
            self.mail.append(mail)

    # What may happen

    def create(self, at: int, *_: int) -> None:
        rref = self.peers[at].create_owned()
        self.owners[rref] = at
        self.made.add(rref)
        self.values.add(rref)
        self.handles.append(Handle(at, rref, None))

    def remote(self, at: int, owner: int, *_: int) -> None:
        rref, fork = self.peers[at].create_remote(owner)
        self.owners[rref] = owner
        self.handles.append(Handle(at, rref, None if owner == at else fork))
        self.unanswered.append((at, fork))
        self.post(Mail(at, owner, (rref, fork)))

    def share(self, which: int, to: int, *_: int) -> None:
        if not self.handles:
            return
        handle = self.handles[which % len(self.handles)]
        peer = self.peers[handle.at]
        if handle.fork_id is None:
            fork = peer.fork_owned(handle.rref_id, to)
            self.registered.add(fork.fork_id)
        elif peer.why_dead(handle.fork_id):
            with pytest.raises(RpcError):
                peer.fork_user(handle.fork_id, to)
            return
        else:
            fork = peer.fork_user(handle.fork_id, to)
            self.cover[fork.fork_id] = (handle.at, handle.fork_id)
        self.post(Mail(handle.at, to, fork, repeatable=False))

    def drop(self, which: int, *_: int) -> None:
        if not self.handles:
            return
        handle = self.handles.pop(which % len(self.handles))
        peer = self.peers[handle.at]
        if handle.fork_id is None:
            self.carry_out(handle.at, peer.owner_local_dropped(handle.rref_id))
        else:
            self.carry_out(handle.at, peer.dropped(handle.fork_id))

    def bounce(self, which: int, *_: int) -> None:
        """A call that has not left yet never will."""
        calls = [m for m in self.mail if isinstance(m.what, Fork) and m.source in self.alive]
        if calls:
            mail = calls[which % len(calls)]
            assert isinstance(mail.what, Fork)
            self.mail.remove(mail)
            self.carry_out(mail.source, self.peers[mail.source].unsent(mail.what))

    def give_up(self, which: int, *_: int) -> None:
        if self.unanswered:
            at, fork = self.unanswered.pop(which % len(self.unanswered))
            self.peaceful = False
            self.carry_out(at, self.peers[at].failed(fork, "no answer in time"))

    def die(self, who: int, fate: int, *_: int) -> None:
        """``fate``: whether messages that it sent before still arrive."""
        if who not in self.alive or len(self.alive) < 3:
            return
        self.peaceful = False
        self.alive.remove(who)
        self.handles = [each for each in self.handles if each.at != who]
        self.unanswered = [each for each in self.unanswered if each[0] != who]
        self.mail = [
            mail
            for index, mail in enumerate(self.mail)
            if mail.to != who and (mail.source != who or (index + fate) % 2)
        ]
        self.values = {each for each in self.values if self.owners[each] != who}
        self.mail += [Mail(who, each, None) for each in self.alive]

    def deliver(self, which: int, *_: int) -> None:
        if self.mail:
            self.arrive(self.mail.pop(which % len(self.mail)))

    def repeat(self, which: int, *_: int) -> None:
        if self.mail and self.mail[which % len(self.mail)].repeatable:
            self.arrive(self.mail[which % len(self.mail)])

    def arrive(self, mail: Mail) -> None:
        peer, at = self.peers[mail.to], mail.to
        match mail.what:
            case None:
                self.carry_out(at, peer.peer_lost(mail.source, "killed"))
            case Fork() as fork:
                received = peer.receive(fork)
                if received.fork_id is not None or not received.gone:
                    self.handles.append(Handle(at, fork.rref_id, received.fork_id))
                if received.gone:
                    assert not self.peaceful, received
                self.carry_out(at, received.commands)
            case Send(_, kind, rref, fork):
                if kind is REQUEST:
                    commands = peer.on_fork_request(rref, fork, mail.source)
                    refused = self.carry_out(at, commands, mail)
                    if not refused:
                        self.registered.add(fork)
                    self.post(Mail(at, mail.source, (fork, refused)))
                elif kind is ACCEPT:
                    self.carry_out(at, peer.on_child_accept(fork))
                else:
                    self.carry_out(at, peer.on_user_delete(rref, fork, mail.source))
            case (RRefId() as rref, ForkId() as fork):
                if rref not in self.made and mail.source not in peer._lost:  # a call runs once
                    self.made.add(rref)
                    self.values.add(rref)
                self.carry_out(at, peer.accept_remote(rref, fork, mail.source))
                self.registered.add(fork)
                self.post(Mail(at, mail.source, (fork, "")))
            case (ForkId() as fork, str(refused)):
                if (at, fork) in self.unanswered:
                    self.unanswered.remove((at, fork))
                if refused:
                    self.carry_out(at, peer.failed(fork, refused))
                else:
                    self.carry_out(at, peer.confirmed(fork))

    # How it ends

    def settle(self) -> None:
        for step in range(100_000):
            if not self.mail:
                return
            self.deliver(step * 7)  # in arbitrary order
        raise AssertionError("the network never gets quiet")

    def check_quiet(self) -> None:
        """With nothing in transit, each reference is known to its owner or dead, and no value is kept for nobody."""
        held = {each.rref_id for each in self.handles}
        for handle in self.handles:
            fork = handle.fork_id
            if fork is None:
                usable = True
            elif self.peers[handle.at].why_dead(fork):
                assert not self.peaceful
                continue
            else:
                usable = self.peers[handle.at].is_confirmed(fork) and (
                    self.owners[handle.rref_id] in self.alive
                )
            assert usable, f"{handle} waits for ever"
            assert handle.rref_id in self.values or handle.rref_id not in self.made
        assert self.values <= held, "a value is kept for nobody"
        for at in self.alive:
            peer = self.peers[at]
            counts = peer.counts()
            assert counts.num_pending_users == counts.num_pending_children == 0
            known = {fork for owned in peer._owned.values() for fork in owned.forks}
            assert known <= {each.fork_id for each in self.handles}, "a reference is left behind"
            assert set(peer._users) == {h.fork_id for h in self.handles if h.at == at} - {None}

    def end(self, *, shutdown: bool) -> None:
        if shutdown:
            for at in sorted(self.alive):
                self.carry_out(at, self.peers[at].delete_all())
            self.handles = [each for each in self.handles if each.fork_id is None]
            self.settle()
            assert [self.peers[at].leaks() for at in self.alive] == [[]] * len(self.alive)
        while self.handles:
            self.drop(0)
        self.settle()
        assert not self.values
        for at in self.alive:
            assert is_empty(self.peers[at]), f"worker {at}: {self.peers[at].counts()}"


# Name and weight of each random action.
QUIET = {"create": 1, "remote": 2, "share": 5, "drop": 3, "deliver": 5, "repeat": 2, "bounce": 1}
ROUGH = QUIET | {"give_up": 1, "die": 1}


def run(
    number: int, weights: dict[str, int], script: list[tuple[int, int, int]], shutdown: bool
) -> World:
    world = World(number)
    names = [name for name, weight in weights.items() for _ in range(weight)]
    for step, one, two in script:
        name = names[step % len(names)]
        if name in ("create", "remote", "die"):
            one %= number
        if name in ("create", "remote") and one not in world.alive:
            continue
        getattr(world, name)(one, two % number)
    world.settle()
    world.check_quiet()
    world.end(shutdown=shutdown)
    return world


small = st.integers(0, 40)
scripts = st.lists(st.tuples(small, small, small), min_size=25, max_size=70)


@settings(max_examples=100)
@given(st.integers(3, 5), scripts, st.booleans())
def test_no_value_is_released_too_early_or_too_late(
    number: int, script: list[tuple[int, int, int]], shutdown: bool
) -> None:
    assert run(number, QUIET, script, shutdown).peaceful


@settings(max_examples=150)
@given(st.integers(3, 5), scripts, st.booleans())
def test_nor_when_workers_die_and_answers_are_given_up(
    number: int, script: list[tuple[int, int, int]], shutdown: bool
) -> None:
    run(number, ROUGH, script, shutdown)

"""A group that processes join and leave.

[Note: The cost of a join] At most thirteen calls to the store, plus two per 512 members. There are no locks, and no
other member takes part. If another process is between the two steps of its own join, this one polls until the second
step is done; if the other process has died there, this one goes on after a second.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, Self

from rallypoint._core.clock import MONOTONIC, Clock, Deadline
from rallypoint.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    PeerLost,
    ProtocolError,
    RpcError,
)

from . import membership
from .group import agree_on_kind, no_destination
from .group_store import C10dStore, Calls, Listener, pushes
from .member import MAX_ID, Member
from .membership import VOID, Entry, Event, Gone, Join, Joined, Leave, Lost, Refused, View
from .signing import PUBLIC, Signer


_log = logging.getLogger(__name__)

# Seconds between checks for an entry that is being written: at first, and at most.
SOON: Final = (0.002, 0.05)
# Seconds between checks of the counter in wait_for: the watcher cannot see past a hole if the next writer died, too.
LOOK_EVERY: Final = 1.0
# Seconds to wait for the watcher thread to end.
CLOSING: Final = 1.0
# The most entries that a member reads at once.
MOST_AHEAD: Final = 1 << 17
# How many departed members' reasons are kept.
REMEMBERED: Final = 256

OnJoin = Callable[[Member], object]
OnLeave = Callable[[Member, str], object]


class DynamicGroup:
    """A group that processes join and leave. One thread watches the journal and calls the callbacks.

    All members at the same epoch see the same group. A member that has left or was reported lost sees no later changes.
    """

    is_static = False

    def __init__(
        self,
        store: C10dStore,
        me: Member,
        clock: Clock = MONOTONIC,
        signer: Signer = PUBLIC,
    ) -> None:
        """Private. Use :meth:`join`."""
        self._calls = Calls(store, signer)
        self._me = me
        self._clock = clock
        # Guards what follows. Not held during I/O.
        self._changed = threading.Condition()
        self._view = View()
        self._news: deque[Event] = deque()
        self._callbacks: list[tuple[int, OnJoin | None, OnLeave | None]] = []
        self._gone: dict[str, str] = {}  # incarnation to reason
        self._departed: dict[str | int, tuple[str, str]] = {}  # name or rank to name and reason
        self._members: tuple[int, tuple[Member, ...]] = (0, ())
        # The number of the entry that made this process a member. It tells apart two members of the same rank.
        self.term = 0
        self.expelled: str | None = None  # why this process was reported lost
        self._listens = True  # whether the watcher runs
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    @classmethod
    def join(
        cls,
        store: C10dStore,
        me: Member,
        rank: int | None = None,
        timeout: float | None = None,
        *,
        clock: Clock = MONOTONIC,
        signer: Signer = PUBLIC,
    ) -> Self:
        """Become a member. See [Note: The cost of a join].

        Args:
            me: its ``id`` is ignored.
            rank: None: the group assigns one, see :attr:`me`.
            timeout: seconds to wait for others; None: no limit. Does not limit single calls to the store.
            signer: signs the records in the store.

        Raises:
            ConfigError: the rank is too high, or its device maps conflict with those of a member.
            DeadlineExceeded: the store is so slow that others filled our place in the journal every time.
            RpcError: name or rank is taken, the group is static, or the store is lost.
        """
        if rank is not None and not 0 <= rank <= MAX_ID:
            # Others would reject the record.
            raise ConfigError("rank", rank, f"expected 0 to {MAX_ID}, or none to be assigned one")
        deadline = Deadline(timeout, clock)
        group = cls(store, me, clock, signer)
        calls = group._calls
        agree_on_kind(calls, b"dynamic")
        group._start_from_outline()
        # Refuse what can be refused before others see the join. Later changes are found below.
        group._advance(calls, calls.add("next", 0))
        group._refuse(me.name, rank)
        wanted = Join(replace(me, id=rank or 0), given=rank is not None)
        number = group._append(wanted, deadline)
        match next((each for each in group._news if each.epoch == number), None):
            case Joined(_, member):
                group._me, group.term = member, number
            case Refused(_, _, reason):
                raise RpcError(reason)
            case other:
                raise InternalError(f"our join, membership entry {number}, did {other}")
        group._news.clear()
        try:
            group._refuse_devices()
            group._watch()
        except BaseException:
            group.leave("it could not join")
            raise
        return group

    @property
    def me(self) -> Member:
        return self._me

    @property
    def epoch(self) -> int:
        return self._view.epoch

    def members(self) -> tuple[int, tuple[Member, ...]]:
        with self._changed:
            if self._members[0] != self._view.epoch:
                self._members = self._view.epoch, self._view.members()
            return self._members

    def find(self, key: str | int) -> Member:
        """The member of that name or rank. If it is unknown, first reads the rest of the journal.

        Raises:
            RpcError: there is none, in torch's words; or the store is lost.
            PeerLost: that member has left or was lost.
        """
        member = self._view.find(key)
        if member is None:
            self._read_on()
            member = self._view.find(key)
        if member is None:
            unknown = no_destination(key, self.members()[1])
            gone = self._departed.get(key)
            if gone is not None:
                raise PeerLost(gone[0], f"{unknown}; it is gone: {gone[1]}")
            raise unknown
        return member

    def wait_for(self, names: Iterable[str], timeout: float | None = None) -> tuple[Member, ...]:
        """Wait until members of all these names are in the group at the same time, and return them.

        Raises:
            DeadlineExceeded: some are missing; the error names them.
        """
        wanted = tuple(names)
        deadline = Deadline(timeout, self._clock)
        while True:
            with self._changed:
                view = self._view
                if view.missing(wanted):
                    left = deadline.remaining()
                    self._changed.wait(LOOK_EVERY if left is None else min(left, LOOK_EVERY))
                    unchanged = self._view is view
                    view = self._view
            found = tuple(each for name in wanted if (each := view.find(name)) is not None)
            if len(found) == len(wanted):
                return found
            if deadline.expired():
                there = ", ".join(view.ranks) or "none"
                raise DeadlineExceeded(
                    f"{', '.join(view.missing(wanted))} not in the group after {timeout:g} s (members at epoch"
                    f" {view.epoch}: {there})"
                )
            if unchanged:
                self._read_on()

    def on_join(self, callback: OnJoin) -> tuple[int, tuple[Member, ...]]:
        """Call ``callback(member)`` for each later join, on the watcher's thread, in the journal's order.

        Returns:
            As :meth:`members`: the members for which it is not called.
        """
        return self._call_back(callback, None)

    def on_leave(self, callback: OnLeave) -> tuple[int, tuple[Member, ...]]:
        """Call ``callback(member, reason)`` for each later departure or loss, including our own. See :meth:`on_join`."""
        return self._call_back(None, callback)

    def _call_back(
        self, on_join: OnJoin | None, on_leave: OnLeave | None
    ) -> tuple[int, tuple[Member, ...]]:
        with self._changed:
            self._callbacks.append((self._view.epoch, on_join, on_leave))
            return self.members()

    def last_words(self, member: Member) -> str | None:
        return self._gone.get(member.incarnation)

    def report_lost(self, member: Member, reason: str) -> None:
        """Remove a member from the group. When this returns, this process no longer sees it.

        The first report counts. Reports by processes that are no longer members are ignored. May block for a second if
        another process reported the loss at the same time and then died.
        """
        if self._view.holds(member.id, member.incarnation) is None or not self._is_member():
            return
        mine = self._me.incarnation.encode()
        first = self._calls.put_new(f"gone/{member.id}/{member.incarnation}", mine)
        if first != mine:
            # Another process writes the entry: one per loss is enough.
            deadline = Deadline(membership.HOLE_GRACE, self._clock)
            while not deadline.expired() and not self._closing.is_set():
                self._advance(self._calls, self._calls.add("next", 0))
                if self._view.holds(member.id, member.incarnation) is None:
                    return
                self._closing.wait(SOON[1])
        entry = Lost(member.id, member.incarnation, reason, self._me.incarnation)
        self._append(entry, Deadline(None))

    def leave(self, reason: str = "") -> None:
        """Tell the others that this process leaves. Its name is free from that epoch on."""
        if self._view.holds(self._me.id, self._me.incarnation) is not None:
            self._append(Leave(self._me.id, self._me.incarnation, reason), Deadline(None))

    def close(self) -> None:
        """Stop the watcher within a second. Idempotent. Does not :meth:`leave`."""
        watcher = self._watcher
        if watcher is None or self._closing.is_set():
            return
        self._closing.set()
        if watcher is threading.current_thread():
            return  # called in a callback: the watcher ends after it
        if watcher.is_alive() and not self._end(watcher):
            _log.warning(
                "the store does not answer: the thread that watches the group was not ended"
            )
            return
        self._calls.release()

    def _end(self, watcher: threading.Thread) -> bool:
        """Wake the watcher, which is to end. False if it does not."""
        # In another thread: a store that does not answer must not block this one.
        waker = threading.Thread(target=self._wake, name="rally-group-close", daemon=True)
        waker.start()
        deadline = Deadline(CLOSING)
        watcher.join(deadline.remaining())
        waker.join(deadline.remaining())
        return not watcher.is_alive() and not waker.is_alive()

    def abandon(self) -> None:
        """In a forked child: its copies of the store's connections are closed with the store."""
        self._closing = threading.Event()
        self._closing.set()
        self._changed = threading.Condition()
        del self._calls

    # -- reading and writing the journal ----------------------------------------------------------

    def _start_from_outline(self) -> None:
        """Start from the view of the latest outline, if there is one."""
        calls = self._calls
        empty = membership.encode_outline(membership.Outline())
        try:
            plan = membership.decode_outline(calls.put_new("outline", empty))
            keys = [_entry(number) for number in plan.numbers()]
            if calls.present(keys):
                read = calls.read(keys)
                entries = {
                    number: _decode(each)
                    for number, each in zip(plan.numbers(), read, strict=True)
                    if each is not None
                }
                self._view = membership.restore(plan, entries)
        except ProtocolError as error:
            _log.warning("the journal is read from its beginning: %s", error)

    def _read_on(self) -> None:
        """Read the journal to its current end."""
        self._settle(self._calls, self._calls.add("next", 0))

    def _append(self, entry: Entry, deadline: Deadline) -> int:
        """Write an entry, apply all entries up to it, and return its number."""
        calls, data = self._calls, membership.encode(entry)
        while True:
            number = calls.add("next", 1)
            if calls.announce_new(_entry(number), data) == data:
                break
            # We were too slow: a reader took the place for a hole and filled it.
            if deadline.expired():
                raise DeadlineExceeded(
                    "the store is too slow: an entry in the group's journal took more than a second to write, each time"
                )
        # The writer of an entry fills the holes before it, since no event tells the others of them.
        self._settle(calls, number)
        if number % membership.OUTLINE_EVERY == 0:
            plan = membership.encode_outline(membership.outline(self._view))
            if len(plan) <= membership.MAX_OUTLINE:
                calls.set("outline", plan)
        return number

    def _advance(self, calls: Calls, last: int, known: int = 0) -> tuple[int, ...]:
        """Apply entries up to ``last``, or up to the first missing one. Returns the missing numbers.

        Args:
            known: entries up to this number are known to exist.

        Raises:
            RpcError: ``last`` is implausibly high.
        """
        first = self._view.epoch + 1
        if last - first > MOST_AHEAD:
            raise RpcError(
                f"the counter of the group's journal is {last}, but entry {first} is the next to be read: another program writes"
                " to the store; protect the store, or give the group its own"
            )
        numbers = range(first, last + 1)
        absent: tuple[int, ...] = ()
        if numbers and last > known and not calls.present([_entry(number) for number in numbers]):
            gaps = set(calls.absent([_entry(number) for number in numbers]))
            absent = tuple(number for number in numbers if _entry(number) in gaps)
            # They may all have arrived in the meantime.
            numbers = range(first, absent[0] if absent else last + 1)
        if numbers:
            read = calls.read([_entry(number) for number in numbers])
            # An entry that no member has signed counts as a hole: the owner of the number may still write it.
            holes = tuple(n for n, each in zip(numbers, read, strict=True) if each is None)
            sound = read[: holes[0] - first] if holes else read
            self._apply(first, [_decode(each) for each in sound if each is not None])
            absent = holes + absent
        return absent

    def _settle(self, calls: Calls, last: int) -> None:
        """Apply entries up to ``last``. Wait for missing ones, and eventually fill their places."""
        absent = self._advance(calls, last)
        since: dict[int, float] = {}
        pause = SOON[0]
        while absent and not self._closing.is_set():
            decision = membership.decide_holes(self._clock.now(), since, absent)
            since = dict(decision.since)
            for number in decision.fill:
                _log.info("entry %d of the group's journal was never written: filled", number)
                calls.announce_new(_entry(number), membership.encode(VOID))
            # The filled entries exist now, written by us or by another process.
            patience = Deadline(
                None if decision.look_at is None else decision.look_at - self._clock.now(),
                self._clock,
            )
            wanted = [_entry(number) for number in absent if number not in decision.fill]
            while wanted and not calls.are_there(wanted) and not patience.expired():
                if self._closing.wait(pause):
                    return
                pause = min(2 * pause, SOON[1])
            absent = self._advance(calls, last)

    def _apply(self, first: int, entries: list[Entry]) -> None:
        with self._changed:
            if not entries or first + len(entries) - 1 <= self._view.epoch:
                return  # another thread was faster
            self._view, events = membership.advance(self._view, first, entries)
            for event in events:
                if isinstance(event, Gone):
                    gone = event.member
                    if event.lost and gone.incarnation == self._me.incarnation:
                        self.expelled = event.reason
                    self._gone[gone.incarnation] = event.reason
                    for key in (gone.name, gone.id):
                        self._departed[key] = gone.name, event.reason or "it has left"
                    while len(self._gone) > REMEMBERED:
                        del self._gone[next(iter(self._gone))]
                    while len(self._departed) > REMEMBERED:
                        del self._departed[next(iter(self._departed))]
            if self._listens:
                self._news.extend(events)
            self._changed.notify_all()

    # -- refusing ---------------------------------------------------------------------------------

    def _refuse(self, name: str, rank: int | None) -> None:
        reason = self._view.refusal(name, rank)
        if reason is not None:
            raise RpcError(reason)
        self._refuse_devices()

    def _refuse_devices(self) -> None:
        problem = membership.device_problem(self._view, self._me)
        if problem is not None:
            raise ConfigError("device maps", None, problem)

    # -- the watcher ------------------------------------------------------------------------------

    def _watch(self) -> None:
        listener = Listener.of(self._calls.store, self._calls.signer)
        self._watcher = threading.Thread(
            target=self._run, args=(listener,), name="rally-group", daemon=True
        )
        self._watcher.start()

    def _run(self, listener: Listener) -> None:
        calls = listener.calls
        try:
            while not self._closing.is_set() and self._is_member():
                with self._changed:
                    # Another thread may have read entries meanwhile: call back for them before waiting.
                    untold, upcoming = bool(self._news), self._view.epoch + 1
                if untold:
                    self._tell()
                    continue
                if not listener.wait(_entry(upcoming), self._closing):
                    break
                counted = calls.add("next", 0)
                # The counter is not signed: ignore implausible values.
                is_sane = upcoming <= counted <= upcoming + MOST_AHEAD
                last = counted if is_sane else upcoming
                absent = self._advance(calls, last, known=upcoming)
                self._tell()
                if absent:
                    self._settle(calls, last)
            self._tell()
        except RpcError as error:
            level = logging.DEBUG if self._closing.is_set() else logging.WARNING
            _log.log(
                level,
                "changes of the group are no longer seen (epoch %d): %s",
                self._view.epoch,
                error,
            )
        finally:
            with self._changed:
                self._listens = False
                self._news.clear()
            listener.close()

    def _is_member(self) -> bool:
        return self._view.holds(self._me.id, self._me.incarnation) is not None

    def _tell(self) -> None:
        """Call back for joins and departures, up to our own departure."""
        while not self._closing.is_set():
            with self._changed:
                if not self._news:
                    return
                event = self._news.popleft()
                callbacks = [each for each in self._callbacks if each[0] < event.epoch]
                if isinstance(event, Gone) and event.member == self._me:
                    self._news.clear()
            for _, on_join, on_leave in callbacks:
                try:
                    if isinstance(event, Joined) and on_join is not None:
                        on_join(event.member)
                    elif isinstance(event, Gone) and on_leave is not None:
                        on_leave(event.member, event.reason)
                except Exception:  # noqa: BLE001  # user code; must not prevent the other callbacks
                    _log.exception("a callback of the group failed")

    def _wake(self) -> None:
        """End the watcher's wait with a void entry, which works with every store."""
        if not pushes(self._calls.store):
            return  # the watcher polls
        upcoming, void = self._view.epoch + 1, membership.encode(VOID)
        # If the store is lost, the watcher's wait has ended anyway.
        with contextlib.suppress(RpcError):
            number = self._calls.add("next", 1)
            self._calls.announce_new(_entry(number), void)
            if upcoming < number:  # a hole; a slow writer takes another number
                self._calls.announce_new(_entry(upcoming), void)


def _entry(number: int) -> str:
    return f"entry/{number}"


def _decode(data: bytes) -> Entry:
    try:
        return membership.decode(data)
    except ProtocolError as error:
        # All members read it as void. Failing here would stop them all.
        _log.warning(
            "ignored an entry of the group's journal that this version cannot read: %s", error
        )
        return VOID

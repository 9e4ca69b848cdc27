"""A group that processes join and leave.

[Note: What a join costs] Thirteen calls to the store at most when nothing goes wrong, whatever the number of members
(and two more for every 512 of these); nobody else is asked, and nobody waits for a lock. Where another joiner is
between its two steps, ours asks once in a while whether it is done; where it has died there, one second later on.
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
from .member import Member
from .membership import VOID, Entry, Event, Gone, Join, Joined, Leave, Lost, Refused, View
from .signing import PUBLIC, Signer


_log = logging.getLogger(__name__)

# Seconds between two looks at entries that are just being written: from the first to the last.
SOON: Final = (0.002, 0.05)
# Seconds between two looks at the counter while somebody waits for a name: finds what the watcher cannot, a hole
# behind which the next writer died, too.
LOOK_EVERY: Final = 1.0
# Seconds for the watcher to end.
CLOSING: Final = 1.0
# Entries that somebody may have to read at once.
MOST_AHEAD: Final = 1 << 17
# Members that left whose last words are kept.
REMEMBERED: Final = 256

OnJoin = Callable[[Member], object]
OnLeave = Callable[[Member, str], object]


class DynamicGroup:
    """Processes that come and go. One thread listens for news and calls the callbacks.

    Two members that are at one epoch see the same group. A member that has left, or was reported lost, hears of
    nothing after that.
    """

    is_static = False

    def __init__(
        self,
        store: C10dStore,
        me: Member,
        clock: Clock = MONOTONIC,
        signer: Signer = PUBLIC,
    ) -> None:
        """Not to be called: :meth:`join` makes groups."""
        self._store = store
        self._calls = Calls(store, signer)
        self._me = me
        self._clock = clock
        # Guards the view and what comes of it; held for computing only.
        self._changed = threading.Condition()
        self._view = View()
        self._news: deque[Event] = deque()
        self._callbacks: list[tuple[int, OnJoin | None, OnLeave | None]] = []
        self._gone: dict[str, str] = {}  # incarnation to reason
        self._departed: dict[str | int, tuple[str, str]] = {}  # name or rank to name and reason
        self._members: tuple[int, tuple[Member, ...]] = (0, ())
        self.expelled: str | None = None  # why this very process was taken for lost
        self._listens = True  # somebody will want the news
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
        """Become a member. See [Note: What a join costs].

        Args:
            me: its ``id`` does not count.
            rank: None: the group gives one; :attr:`me` has it.
            timeout: seconds; None: no limit. It ends waiting for others, not for a silent store.
            signer: signs what members put into the store.

        Raises:
            ConfigError: its device maps and a member's do not go together.
            DeadlineExceeded: numbers of the journal were taken again and again before ours could be used.
            RpcError: name or rank is taken, the group is a static one, or the store is lost.
        """
        deadline = Deadline(timeout, clock)
        group = cls(store, me, clock, signer)
        calls = group._calls
        agree_on_kind(calls, b"dynamic")
        group._start_from_outline()
        # What cannot be is best found before others hear of it; what happens after this look is found below.
        group._advance(calls, calls.add("next", 0))
        group._refuse(me.name, rank)
        wanted = Join(replace(me, id=rank or 0), given=rank is not None)
        number = group._append(wanted, deadline)
        match next((each for each in group._news if each.epoch == number), None):
            case Joined(_, member):
                group._me = member
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
        """The member of that name or rank; where it is unknown, the journal is read to its end first.

        Raises:
            RpcError: there is none, in torch's words; or the store is lost.
            PeerLost: there was one.
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
        """The members of these names, once all are in at one epoch.

        Raises:
            DeadlineExceeded: some are not; says which.
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
                there = ", ".join(view.ranks) or "nobody"
                raise DeadlineExceeded(
                    f"{', '.join(view.missing(wanted))} not in the group after {timeout:g} s (at epoch"
                    f" {view.epoch} there are: {there})"
                )
            if unchanged:
                self._read_on()

    def on_join(self, callback: OnJoin) -> tuple[int, tuple[Member, ...]]:
        """Call ``callback(member)`` for everyone who joins from now on, on the watcher's thread, in the journal's order.

        Returns:
            As :meth:`members`: for these it is not called.
        """
        return self._call_back(callback, None)

    def on_leave(self, callback: OnLeave) -> tuple[int, tuple[Member, ...]]:
        """Call ``callback(member, reason)`` for everyone who leaves or is lost from now on: see :meth:`on_join`.

        This process itself is one of them.
        """
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
        """Have the group go on without a member. The first report counts; when this returns, it is out of the view here.

        What one who is out itself reports does not count.

        May block for a second where another has reported it at the same time, and died then.
        """
        if self._view.holds(member.id, member.incarnation) is None or not self._is_member():
            return
        mine = self._me.incarnation.encode()
        first = self._calls.put_new(f"gone/{member.id}/{member.incarnation}", mine)
        if first != mine:
            # Its entry is written by now, or will be: fifty entries for one death are no use.
            deadline = Deadline(membership.HOLE_GRACE, self._clock)
            while not deadline.expired() and not self._closing.is_set():
                self._advance(self._calls, self._calls.add("next", 0))
                if self._view.holds(member.id, member.incarnation) is None:
                    return
                self._closing.wait(SOON[1])
        entry = Lost(member.id, member.incarnation, reason, self._me.incarnation)
        self._append(entry, Deadline(None))

    def leave(self, reason: str = "") -> None:
        """Tell the others that this process goes. Its name is free at the epoch where this stands."""
        if self._view.holds(self._me.id, self._me.incarnation) is not None:
            self._append(Leave(self._me.id, self._me.incarnation, reason), Deadline(None))

    def close(self) -> None:
        """End the watcher, within a second; a second call does nothing. Does not :meth:`leave`."""
        watcher = self._watcher
        if watcher is None or self._closing.is_set():
            return
        self._closing.set()
        if watcher is threading.current_thread() or not watcher.is_alive():
            return  # a callback closes: the thread ends after it
        # A thread of its own: a store that is silent must not hold us up.
        waker = threading.Thread(target=self._wake, name="rally-group-close", daemon=True)
        waker.start()
        deadline = Deadline(CLOSING)
        watcher.join(deadline.remaining())
        waker.join(deadline.remaining())
        if watcher.is_alive() or waker.is_alive():
            _log.warning("the store does not answer: the group's watcher is left to itself")

    def abandon(self) -> None:
        """In a forked child: its copies of the store's connections are closed with the store."""
        self._closing = threading.Event()
        self._closing.set()
        self._changed = threading.Condition()
        del self._store, self._calls

    # -- reading and writing the journal ----------------------------------------------------------

    def _start_from_outline(self) -> None:
        """Begin with the view that an outline tells, where there is one."""
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
        """Know what is in the journal now."""
        self._settle(self._calls, self._calls.add("next", 0))

    def _append(self, entry: Entry, deadline: Deadline) -> int:
        """Write an entry and apply all up to it; its number."""
        calls, data = self._calls, membership.encode(entry)
        while True:
            number = calls.add("next", 1)
            if calls.announce_new(_entry(number), data) == data:
                break
            # We were too slow, and a reader has filled our place.
            if deadline.expired():
                raise DeadlineExceeded(
                    "the store is too slow: our place in the group's journal was taken for a hole each time"
                )
        # Who writes an entry sees to the holes before it: others listen for these in vain.
        self._settle(calls, number)
        if number % membership.OUTLINE_EVERY == 0:
            plan = membership.encode_outline(membership.outline(self._view))
            if len(plan) <= membership.MAX_OUTLINE:
                calls.set("outline", plan)
        return number

    def _advance(self, calls: Calls, last: int, known: int = 0) -> tuple[int, ...]:
        """Apply entries up to ``last``, or to the first that is not there; the numbers that are not.

        Args:
            known: where ``last`` is no more than this, all are there.

        Raises:
            RpcError: there cannot be so many.
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
            # In the meantime all may have come.
            numbers = range(first, absent[0] if absent else last + 1)
        if numbers:
            read = calls.read([_entry(number) for number in numbers])
            # What no member has written is a hole: whoever has this number may still come.
            holes = tuple(n for n, each in zip(numbers, read, strict=True) if each is None)
            sound = read[: holes[0] - first] if holes else read
            self._apply(first, [_decode(each) for each in sound if each is not None])
            absent = holes + absent
        return absent

    def _settle(self, calls: Calls, last: int) -> None:
        """Apply entries up to ``last``; where one is missing, wait for it, and fill its place in the end."""
        absent = self._advance(calls, last)
        since: dict[int, float] = {}
        pause = SOON[0]
        while absent and not self._closing.is_set():
            decision = membership.decide_holes(self._clock.now(), since, absent)
            since = dict(decision.since)
            for number in decision.fill:
                _log.info("entry %d of the group's journal was never written: filled", number)
                calls.announce_new(_entry(number), membership.encode(VOID))
            # Those that are filled are there now, whoever was first.
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
        listener = Listener.of(self._store, self._calls.signer)
        self._watcher = threading.Thread(
            target=self._run, args=(listener,), name="rally-group", daemon=True
        )
        self._watcher.start()

    def _run(self, listener: Listener) -> None:
        calls = listener.calls
        try:
            while not self._closing.is_set() and self._is_member():
                with self._changed:
                    # Another thread may have read entries since the last look: they are told before the next wait.
                    untold, upcoming = bool(self._news), self._view.epoch + 1
                if untold:
                    self._tell()
                    continue
                if not listener.wait(_entry(upcoming), self._closing):
                    break
                counted = calls.add("next", 0)
                # The counter is not signed: what cannot be is not believed.
                is_sane = upcoming <= counted <= upcoming + MOST_AHEAD
                last = counted if is_sane else upcoming
                absent = self._advance(calls, last, known=upcoming)
                self._tell()
                if absent:
                    self._settle(calls, last)
            self._tell()
        except RpcError as error:
            level = logging.DEBUG if self._closing.is_set() else logging.WARNING
            _log.log(level, "no more news of the group (epoch %d): %s", self._view.epoch, error)
        finally:
            with self._changed:
                self._listens = False
                self._news.clear()
            listener.close()

    def _is_member(self) -> bool:
        return self._view.holds(self._me.id, self._me.incarnation) is not None

    def _tell(self) -> None:
        """Call back for what has happened, up to our own end."""
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
                except Exception:  # noqa: BLE001  # a user's; the other callbacks are called all the same
                    _log.exception("a callback of the group failed")

    def _wake(self) -> None:
        """End the watcher's wait: with an entry that says nothing, the one thing that works with every store."""
        if not pushes(self._store):
            return  # it looks by itself whether it is to end
        upcoming, void = self._view.epoch + 1, membership.encode(VOID)
        with contextlib.suppress(
            RpcError
        ):  # the store is lost: then the watcher's wait has ended, too
            number = self._calls.add("next", 1)
            self._calls.announce_new(_entry(number), void)
            if upcoming < number:  # a hole, or a writer that will take another number
                self._calls.announce_new(_entry(upcoming), void)


def _entry(number: int) -> str:
    return f"entry/{number}"


def _decode(data: bytes) -> Entry:
    try:
        return membership.decode(data)
    except ProtocolError as error:
        # All take it for nothing; to stop here would stop all.
        _log.warning("the group's journal holds what no member of this version writes: %s", error)
        return VOID

"""Remote references of one worker: its values, and the execution of reference-counting commands.

``refcount.py`` decides. This module keeps the values, sends the messages, and makes functions wait for references.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from torch.futures import Future

from rallypoint.errors import PeerLost, ProtocolError, RpcError
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.ports import Answerable, ControlCalls, Links, Peers, Tasks

from .commands import (
    Command,
    Confirmed,
    Lost,
    Orphaned,
    Received,
    Refuse,
    Release,
    Send,
)
from .control_sender import ControlSender
from .ids import Fork, ForkId, RRefId
from .refcount import References


_LEFT = "this worker has left the group"


Id = TypeVar("Id", RRefId, ForkId)


def check_id(claimed: Any, kind: type[Id]) -> Id:
    """Check an id from a peer.

    Raises:
        ProtocolError: it is not an id.
    """
    if type(claimed) is kind and type(claimed[0]) is int and type(claimed[1]) is int:
        return claimed
    raise ProtocolError(f"a peer sent {type(claimed).__name__}, expected {kind.__name__}")


def check_ids(rref_id: Any, fork_id: Any) -> tuple[RRefId, ForkId]:
    """Check both ids of a user reference; raises the same error."""
    return check_id(rref_id, RRefId), check_id(fork_id, ForkId)


class RRefTable:
    """All remote references of an agent. Thread-safe.

    Args:
        me: this worker's id.
        first: as for :class:`References`.
        calls: sends the messages.
    """

    def __init__(
        self,
        me: int,
        *,
        first: int,
        calls: ControlCalls,
        peers: Peers,
        links: Links,
        tasks: Tasks,
    ) -> None:
        self._peers = peers
        self._tasks = tasks
        self._control = ControlSender(
            calls,
            peers,
            links,
            tasks,
            confirmed=self.confirmed,
            failed=self.failed,
            settled=self._notify,
        )
        self._lock = threading.RLock()
        self._core = References(me, first=first)
        self._values: dict[RRefId, Future[Any]] = {}
        # Callbacks that wait for a user reference to be confirmed.
        self._waiting: dict[ForkId, list[Callable[[str], None]]] = {}
        # Finalizers, which may run anywhere, only append to it.
        self._dropped: deque[ForkId | RRefId] = deque()
        self._asked = False
        self._settled = threading.Condition(self._lock)
        self._deleted = False
        self._not_made: dict[RRefId, str] = {}
        self._closed = False

    # -- values that live here ----------------------------------------------------------------------

    def own(self, value: Any) -> RRefId:
        """Add a value of this process, and return its id."""
        with self._lock:
            rref_id = self._core.create_owned()
            future: Future[Any] = RpcFuture()
            future.set_result(value)
            self._values[rref_id] = future
        return rref_id

    def value(self, rref_id: RRefId) -> Future[Any]:
        """The future of a value that this worker owns."""
        with self._lock:
            found = self._values.get(rref_id)
            if found is None:
                found = self._values[rref_id] = RpcFuture()
                if self._closed:
                    found.set_exception(RpcError(_LEFT))
            return found

    def fail_value(self, rref_id: RRefId, reason: str) -> None:
        """A value of this worker will not be created."""
        with self._lock:
            if not self._core.is_expected(rref_id):
                # All references to it are gone.
                return
            self._not_made[rref_id] = reason
            future = self.value(rref_id)
        if not future.done():
            future.set_exception(RpcError(reason))

    def why_not_made(self, rref_id: RRefId) -> str:
        """Why a value of this worker could not be created; empty if it was or may be."""
        with self._lock:
            return self._not_made.get(rref_id, "")

    def keep(self, rref_id: RRefId) -> None:
        with self._lock:
            self._core.owner_local_held(rref_id)

    # -- references to others' values ---------------------------------------------------------------

    def create_remote(self, owner: int) -> tuple[RRefId, ForkId]:
        with self._lock:
            return self._core.create_remote(owner)

    def confirmed(self, fork_id: ForkId) -> None:
        with self._lock:
            commands = self._core.confirmed(fork_id)
        self._carry_out(commands)

    def failed(self, fork_id: ForkId, reason: str) -> None:
        with self._lock:
            commands = self._core.failed(fork_id, reason)
        self._carry_out(commands)

    def fork_owned(self, rref_id: RRefId, to: int, type_text: str) -> Fork:
        with self._lock:
            return self._core.fork_owned(rref_id, to, type_text)

    def fork_user(self, fork_id: ForkId, to: int, type_text: str) -> Fork:
        with self._lock:
            return self._core.fork_user(fork_id, to, type_text)

    def unsent(self, forks: Iterable[Fork]) -> None:
        """A message with these forks was not sent."""
        for fork in forks:
            with self._lock:
                commands = self._core.unsent(fork)
            self._carry_out(commands)

    def unsettled(self, forks: Iterable[Fork]) -> list[Fork]:
        """Of these forks, which this worker sent, the ones that still keep something alive here."""
        with self._lock:
            return self._core.unsettled(forks)

    def inquire(self, to: int, forks: Iterable[Fork]) -> None:
        """The connection on which these forks were sent has ended: find out which have arrived."""
        self._control.inquire(to, forks, unsettled=self.unsettled, missing=self.unsent)

    def receive(self, fork: Fork) -> Received:
        """A reference has arrived in a message."""
        with self._lock:
            received = self._core.receive(fork)
        self._carry_out(received.commands)
        return received

    def is_confirmed(self, fork_id: ForkId) -> bool:
        with self._lock:
            return self._core.is_confirmed(fork_id)

    def why_dead(self, fork_id: ForkId) -> str:
        with self._lock:
            return self._core.why_dead(fork_id)

    def is_lost(self, fork_id: ForkId) -> bool:
        with self._lock:
            return self._core.is_lost(fork_id)

    def when_confirmed(
        self, fork_ids: Iterable[ForkId], act: Callable[[RpcError | None], None]
    ) -> bool:
        """Call ``act`` once none of these is pending, with an error if one is dead.

        Returns:
            False if none is pending now, in which case ``act`` is not called.
        """
        with self._lock:
            pending = self._core.pending_confirmations(fork_ids)
            if not pending:
                return False
            left = set(pending)
            errors: list[RpcError] = []

            def one_less(fork_id: ForkId, reason: str) -> None:
                left.discard(fork_id)
                if reason:
                    errors.append(self._dead(fork_id, reason))
                if not left:
                    act(errors[0] if errors else None)

            for fork_id in pending:
                self._waiting.setdefault(fork_id, []).append(partial(one_less, fork_id))
            return True

    def _dead(self, fork_id: ForkId, reason: str) -> RpcError:
        """The error for a reference that cannot be used."""
        with self._lock:
            owner, lost = self._core.owner_of(fork_id), self._core.is_lost(fork_id)
        if owner is not None and (lost or self._peers.is_gone(owner)):
            return PeerLost(f"worker {owner}", reason)
        return RpcError(reason)

    # -- objects that are gone ----------------------------------------------------------------------

    def drop(self, what: ForkId | RRefId) -> None:
        """One object of this reference is gone. Safe in finalizers."""
        self._dropped.append(what)
        if not self._asked:
            self._asked = True
            self._tasks.soon(self.settle)

    def settle(self) -> None:
        """Process dropped objects."""
        self._asked = False
        while self._dropped:
            try:
                what = self._dropped.popleft()
            except IndexError:
                return
            with self._lock:
                if isinstance(what, ForkId):
                    commands = self._core.dropped(what)
                else:
                    commands = self._core.owner_local_dropped(what)
            self._carry_out(commands)

    # -- what the core decides ----------------------------------------------------------------------

    def _carry_out(self, commands: Iterable[Command]) -> None:
        acts: list[Callable[[], None]] = []
        for command in commands:
            match command:
                case Send():
                    self._control.send(command)
                case Confirmed(fork_id):
                    acts += self._wake(fork_id, "")
                case Lost(fork_id, reason):
                    acts += self._wake(fork_id, reason)
                case Release(rref_id):
                    with self._lock:
                        self._values.pop(rref_id, None)
                        self._not_made.pop(rref_id, None)
                case Orphaned(rref_id, reason):
                    with self._lock:
                        if not self._core.is_expected(rref_id):
                            # All references to it are gone.
                            continue
                        future = self.value(rref_id)
                    if not future.done():
                        future.set_exception(RpcError(reason))
                case Refuse():
                    # Handled by serve().
                    continue
        for act in acts:
            act()
        self._notify()

    def _wake(self, fork_id: ForkId, reason: str) -> list[Callable[[], None]]:
        with self._lock:
            waiting = self._waiting.pop(fork_id, [])
        return [partial(act, reason) for act in waiting]

    def _notify(self) -> None:
        with self._settled:
            self._settled.notify_all()

    # -- messages of other workers ------------------------------------------------------------------

    def serve(self, request: Answerable, kind: int, content: Any) -> None:
        """Serve a message about references."""
        sender = request.incoming.peer.id
        match kind:
            case Kind.FETCH | Kind.SCRIPT_FETCH:
                (rref_id,) = content
                self._fetch(request, check_id(rref_id, RRefId))
                return
            case Kind.FORK_REQUEST:
                rref_id, fork_id = check_ids(*content)
                with self._lock:
                    commands = self._core.on_fork_request(rref_id, fork_id, sender)
                refusal = next((each for each in commands if isinstance(each, Refuse)), None)
                if refusal is not None:
                    request.fail(LookupError(refusal.reason), printed=False)
                    return
            case Kind.CHILD_ACCEPT:
                _, fork_id = check_ids(*content)
                with self._lock:
                    commands = self._core.on_child_accept(fork_id)
            case Kind.USER_DELETE:
                rref_id, fork_id = check_ids(*content)
                with self._lock:
                    commands = self._core.on_user_delete(rref_id, fork_id, sender)
            case Kind.INQUIRY:
                (fork_ids,) = content
                checked = [check_id(each, ForkId) for each in fork_ids]
                with self._lock:
                    missing = self._core.on_inquiry(checked)
                request.answer(missing)
                return
            case _:
                request.fail(RpcError(f"this version does not know requests of kind {kind}"))
                return
        self._carry_out(commands)
        request.answer(None)

    def _fetch(self, request: Answerable, rref_id: RRefId) -> None:
        # Hold the value until the request is answered or cancelled: otherwise a value that never arrives would be
        # expected forever.
        with self._lock:
            reason = self._core.why_absent(rref_id)
            if not reason:
                self._core.owner_local_held(rref_id)
                # Under the lock: if the request is already cancelled, the value is released below and must not be recreated.
                future = self.value(rref_id)
        if reason:
            request.fail(RpcError(reason), printed=False)
            return
        # The future keeps its callback until there is a value, perhaps forever. The list lets the request, and with it
        # the connection, be released when the caller gives up.
        waiting = [request]
        holds = [rref_id]

        def let_go() -> None:
            with self._lock:
                commands = self._core.owner_local_dropped(holds.pop()) if holds else []
            self._carry_out(commands)

        def done(future: Future[Any]) -> None:
            try:
                request = waiting.pop()
            except IndexError:
                return
            try:
                value = future.value()
            except BaseException as error:  # noqa: BLE001  # sent to the caller
                request.fail(error, printed=False)
            else:
                request.answer(value)
            let_go()

        def give_up() -> None:
            waiting.clear()
            request.give_up()
            let_go()

        request.on_cancel(give_up)
        future.add_done_callback(done)

    def begin_remote(self, rref_id: RRefId, fork_id: ForkId, user: int) -> Future[Any] | None:
        """The call of ``remote`` has arrived. Returns the future of the value; None if it is no longer wanted."""
        with self._lock:
            commands = self._core.accept_remote(rref_id, fork_id, user)
            future = self.value(rref_id)
        unwanted = any(isinstance(each, Release) for each in commands)
        self._carry_out(commands)
        return None if unwanted else future

    # -- ends -----------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """In a forked child: its copies of references end silently."""
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)
        self._asked = True
        self._closed = True

    def peer_lost(self, worker: int, reason: str) -> None:
        with self._lock:
            commands = self._core.peer_lost(worker, reason)
        self._carry_out(commands)

    def peer_came(self, worker: int) -> None:
        with self._lock:
            self._core.peer_came(worker)

    def delete_all(self, timeout: float) -> bool:
        """Delete all user references and wait until their owners know; False if that takes too long."""
        self.settle()
        with self._lock:
            self._deleted = True
            commands = self._core.delete_all()
        self._carry_out(commands)
        with self._settled:
            return self._settled.wait_for(
                lambda: (
                    self._closed or (self._control.is_settled and not self._core.counts().num_users)
                ),
                timeout,
            )

    @property
    def is_deleted(self) -> bool:
        """Whether :meth:`delete_all` was called: references can no longer be used."""
        return self._deleted

    def leaks(self) -> list[str]:
        """A line for each value of this process that others still refer to."""

        def name_of(worker: int) -> str:
            with contextlib.suppress(RpcError):
                return self._peers.info(worker).name
            return f"worker {worker}"

        with self._lock:
            return self._core.leaks(name_of)

    def debug_info(self) -> dict[str, str]:
        """Debug information under torch's keys."""
        self.settle()
        with self._lock:
            counts = self._core.counts()
            pending = sum(not each.done() for each in self._values.values())
        return {
            "num_owner_rrefs": str(counts.num_owner_rrefs),
            "num_pending_futures": str(pending),
            "num_pending_users": str(counts.num_pending_users),
            "num_forks": str(counts.num_forks),
        }

    def diagnostics(self) -> dict[str, Any]:
        """Values and references of this worker, as plain data."""
        with self._lock:
            counts = self._core.counts()
            return {
                "owned": counts.num_owner_rrefs,
                "forks": counts.num_forks,
                "users": counts.num_users,
                "pending_users": counts.num_pending_users,
                "held_by_others": self._core.leaks(),
            }

    def close(self) -> None:
        """This worker has left: fail the values that do not exist yet. Existing ones stay with their objects."""
        with self._lock:
            self._closed = True
            self._settled.notify_all()
            values = list(self._values.values())
            self._waiting.clear()
        for future in values:
            # A future that never completes leaks its callbacks: torch's C++ references hide them from the collector.
            if not future.done():
                future.set_exception(RpcError(_LEFT))

"""Sends the messages that the reference counting asks for, each until it is acknowledged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rallypoint.errors import RpcError
from rallypoint.rpc.connections.calls import Call
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.ports import ControlCalls, Links, Peers, Tasks

from .commands import Kind as Control, Send
from .ids import Fork, ForkId


logger = logging.getLogger(__name__)

_KINDS = {
    Control.FORK_REQUEST: Kind.FORK_REQUEST,
    Control.CHILD_ACCEPT: Kind.CHILD_ACCEPT,
    Control.USER_DELETE: Kind.USER_DELETE,
}
# A message that was not acknowledged is sent again after so many seconds, then after twice that, and so on.
_RETRY_SECONDS = 0.05
_MOST_RETRIES = 10
# Seconds that an acknowledgement may take, whatever the user's time-out is.
_PATIENCE = 60.0


class ControlSender:
    """Sends control messages, and repeats those that fail. Thread-safe.

    Args:
        confirmed: called with a fork when its owner has taken the FORK_REQUEST.
        failed: called with a fork and the reason when the owner has refused it, or does not answer.
        settled: called after each message that needs no more sending.
    """

    def __init__(
        self,
        calls: ControlCalls,
        peers: Peers,
        links: Links,
        tasks: Tasks,
        *,
        confirmed: Callable[[ForkId], None],
        failed: Callable[[ForkId, str], None],
        settled: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._peers = peers
        self._links = links
        self._tasks = tasks
        self._confirmed = confirmed
        self._failed = failed
        self._settled = settled
        # Each change is one operation of a set, which is atomic.
        self._unacknowledged: set[Send] = set()

    @property
    def is_settled(self) -> bool:
        """Whether every message has been acknowledged, or given up."""
        return not self._unacknowledged

    def send(self, command: Send, attempt: int = 0) -> None:
        """Send a message until it is acknowledged. Does not wait."""
        self._unacknowledged.add(command)

        def finish(call: Call, outgoing: Outgoing) -> None:
            try:
                self._calls.decode(call, outgoing)
            except RpcError as error:
                again(error)
                return
            except Exception as error:  # noqa: BLE001  # the owner's answer to FORK_REQUEST: no
                if command.kind == Control.FORK_REQUEST:
                    self._failed(command.fork_id, str(error))
            else:
                if command.kind == Control.FORK_REQUEST:
                    self._confirmed(command.fork_id)
            over()

        def over() -> None:
            self._unacknowledged.discard(command)
            self._settled()

        def again(error: BaseException) -> None:
            if self._links.is_closed:
                over()
            elif attempt < _MOST_RETRIES and not self._peers.is_gone(command.to):
                pause = _RETRY_SECONDS * 2**attempt
                self._tasks.later(pause, lambda: self.send(command, attempt + 1))
            else:
                if command.kind == Control.FORK_REQUEST:
                    self._failed(command.fork_id, f"its owner does not answer: {error}")
                over()

        def begin() -> None:
            kind, content = _KINDS[command.kind], (command.rref_id, command.fork_id)
            try:
                self._calls.call_control(command.to, kind, content, _PATIENCE, finish)
            except RpcError as error:
                again(error)

        if self._links.is_connected_to(command.to):
            begin()
        else:
            # Connecting takes time, and this may be the leader's thread.
            self._tasks.soon(begin)

    def inquire(
        self,
        to: int,
        forks: Iterable[Fork],
        *,
        unsettled: Callable[[Iterable[Fork]], list[Fork]],
        missing: Callable[[list[Fork]], None],
        attempt: int = 0,
    ) -> None:
        """Ask a worker which of these references have come to it, until it answers. Does not wait.

        Args:
            unsettled: picks those that still keep something alive here.
            missing: called with those that have not come.
        """
        asked = unsettled(forks)
        if not asked or self._links.is_closed or self._peers.is_gone(to) or attempt > _MOST_RETRIES:
            return

        def finish(call: Call, outgoing: Outgoing) -> None:
            try:
                fork_ids = set(self._calls.decode(call, outgoing))
            except RpcError as error:
                again(error)
            else:
                missing([each for each in asked if each.fork_id in fork_ids])

        def again(error: BaseException) -> None:
            logger.debug("worker %d has not said which references have come: %s", to, error)
            self._tasks.later(
                _RETRY_SECONDS * 2**attempt,
                lambda: self.inquire(
                    to, asked, unsettled=unsettled, missing=missing, attempt=attempt + 1
                ),
            )

        try:
            fork_ids = [each.fork_id for each in asked]
            self._calls.call_control(to, Kind.INQUIRY, (fork_ids,), _PATIENCE, finish)
        except RpcError as error:
            again(error)

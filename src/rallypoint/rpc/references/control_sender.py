"""Sending the messages of the reference counting until they are acknowledged."""

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
# Seconds before the first retry; each later pause is twice as long.
_RETRY_SECONDS = 0.05
_MOST_RETRIES = 10
# Timeout for an acknowledgement in seconds, independent of the user's.
_PATIENCE = 60.0


class ControlSender:
    """Sends control messages, and repeats those that fail. Thread-safe.

    Args:
        confirmed: called with a fork when its owner has accepted the FORK_REQUEST.
        failed: called with a fork and a reason when its owner has refused it or does not answer.
        settled: called after each message that is acknowledged or given up.
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
        # Changed by single set operations, which are atomic.
        self._unacknowledged: set[Send] = set()

    @property
    def is_settled(self) -> bool:
        """Whether every message has been acknowledged or given up."""
        return not self._unacknowledged

    def send(self, command: Send, attempt: int = 0) -> None:
        """Send a message until it is acknowledged. Does not block."""
        self._unacknowledged.add(command)

        def finish(call: Call, outgoing: Outgoing) -> None:
            try:
                self._calls.decode(call, outgoing)
            except RpcError as error:
                again(error)
                return
            except Exception as error:  # noqa: BLE001  # the owner refused a FORK_REQUEST
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
            # Connecting blocks, and this may be the leader's thread.
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
        """Ask a worker which of these references it has received, until it answers. Does not block.

        Args:
            unsettled: selects those that still keep something alive here.
            missing: called with those that were not received.
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
            logger.debug("worker %d has not said which references it received: %s", to, error)
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

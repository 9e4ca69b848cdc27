"""A backend that drops, delays and fails messages on purpose, to test code that uses RPC."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.errors import CallCancelled, ConfigError, RpcError

from . import constants
from .agent.agent import Agent
from .agent.caller import Caller
from .connections.calls import Call
from .connections.messages import TORCH_NAMES, Kind
from .connections.outgoing import Outgoing
from .options import NativeRpcBackendOptions
from .serialization import payload as payloads
from .serialization.tensor_writer import TensorWriter


_BY_NAME = {
    **{kind.name: kind for kind in Kind},
    **{name: kind for kind, name in TORCH_NAMES.items()},
}
# Messages of torch that Rallypoint never sends; naming them is not an error.
_NEVER_SENT = {"CLEANUP_AUTOGRAD_CONTEXT_REQ"}
# Messages that are sent again when they fail: torch's default for messages_to_fail.
RETRIED = ("RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE")


class FaultyRpcBackendOptions(NativeRpcBackendOptions):
    """Options of the fault-injecting backend, ``BackendType.RALLYPOINT_FAULTY``.

    Args:
        messages_to_fail: kinds of messages that fail to be sent, such as ``PYTHON_CALL`` or ``RREF_FORK_REQUEST``; None:
            the kinds that are sent again when they fail.
        messages_to_delay: seconds by which messages of each kind are delayed.
        messages_to_drop: kinds that are lost without an error.
        num_fail_sends: how many times a message fails or is lost before it passes; 0: always.
        num_worker_threads: how many functions run at the same time.
        **options: as for :class:`NativeRpcBackendOptions`.

    Raises:
        ConfigError: there is no such kind of message.
    """

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] | None = None,
        messages_to_delay: Mapping[str, float] | None = None,
        messages_to_drop: Sequence[str] = (),
        num_fail_sends: int = 0,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        **options: Any,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, **options)
        self.messages_to_fail = list(RETRIED if messages_to_fail is None else messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.messages_to_drop = list(messages_to_drop)
        self.num_fail_sends = num_fail_sends
        for name in (*self.messages_to_fail, *self.messages_to_delay, *self.messages_to_drop):
            if name not in _BY_NAME and name not in _NEVER_SENT:
                raise ConfigError("message", name, f"expected one of {', '.join(sorted(_BY_NAME))}")


class FaultyCaller(Caller):
    """Makes calls whose requests fail as the agent's options say."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        options: Any = self.options
        self._fail = {_BY_NAME[each] for each in options.messages_to_fail if each in _BY_NAME}
        self._drop = {_BY_NAME[each] for each in options.messages_to_drop if each in _BY_NAME}
        self._delay = {
            _BY_NAME[each]: seconds
            for each, seconds in options.messages_to_delay.items()
            if each in _BY_NAME
        }
        self._most = options.num_fail_sends
        self._failed: Counter[tuple[int, int | str]] = Counter()
        self._count_lock = threading.Lock()

    def _strikes(self, kind: int, payload: bytes) -> bool:
        """Whether this message fails now. Retries of one message are counted together."""
        if not self._most:
            return True
        with self._count_lock:
            key = (kind, hash(payload))
            self._failed[key] += 1
            return bool(self._failed[key] <= self._most)

    def _dispatch(
        self,
        outgoing: Outgoing,
        kind: int,
        call: Call,
        payload: bytes,
        tensors: TensorWriter | None,
        flags: int = 0,
        *,
        block: bool = True,
    ) -> None:
        if kind in self._fail and self._strikes(kind, payload):
            payloads.unsent(tensors)
            raise RpcError(
                f"RPC Error: failed intentionally: a message of kind {Kind(kind).name} to {outgoing.peer!r}"
            )
        if kind in self._drop and self._strikes(kind, payload):
            outgoing.adopt(call, kind)
            payloads.unsent(tensors)
            return
        seconds = self._delay.get(Kind(kind))
        if not seconds:
            super()._dispatch(outgoing, kind, call, payload, tensors, flags, block=block)
            return
        number = outgoing.adopt(call, kind)

        def send() -> None:
            # Sent even if it was given up meanwhile, like a message that the network delayed.
            waits = outgoing.calls.take(number)
            sent = waits or Call(call.what, None, 0.0)
            try:
                super(FaultyCaller, self)._dispatch(
                    outgoing, kind, sent, payload, tensors, flags, block=False
                )
            except RpcError as error:
                outgoing.settle(sent, error)
                return
            if waits is None:
                # The cancellation follows it.
                outgoing.cancel(sent.number, CallCancelled(f"{sent.describe()} was given up"))
            outgoing.attend()

        self._tasks.later(seconds, send)


class FaultyAgent(Agent):
    """An agent whose requests fail as its options say."""

    caller_type = FaultyCaller

"""Introductions of nodes in a store, whichever job they mean to join, so that nodes that do not match learn why.

One node is the host: it serves the store, or was the first in a store that no node serves. It introduces itself under one
key, which all others read in one operation. Only a node that does not match the host leaves an introduction of its own, and
nodes that wait for a round look for these. All of these keys are outside the job's own, which a node with another job name
or secret cannot find.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rallypoint._core.clock import MONOTONIC
from rallypoint.errors import ConfigError

from .introduction import Introduction, Mismatch, Role, mismatches, pack, unpack
from .store import Store


_log = logging.getLogger(__name__)

_HOST, _OTHER = "rally-guests/host", "rally-guests/other/"
# The most introductions read at a time, and in all: a stranger may write any number.
AT_ONCE, MOST = 8, 64
# The most lines printed about them.
MOST_SAID = 8
# Seconds between two checks, and seconds within which the node that serves the store must have introduced itself.
LOOK_EVERY, HOST_PATIENCE = 1.5, 3.0


class Guestbook:
    """One node's view of the introductions. Calls block as the store's do, and raise what the store raises.

    Args:
        mine: this node's introduction.
        secret: its job's secret.
        say: prints a line to the user.
        place: the store's place, if one of the job's nodes should serve it; otherwise empty.
    """

    def __init__(
        self, mine: Introduction, secret: bytes | None, say: Callable[[str], None], place: str
    ) -> None:
        self._mine = mine
        self._secret = secret
        self._say = say
        self._place = place
        self._said: list[str] = []
        self._next = 0
        self._looked = 0.0

    @property
    def said(self) -> str:
        """What was found, for an error."""
        return "; ".join(self._said)

    def visit(
        self, store: Store, *, serves: bool, newcomer: bool, should_serve: bool = False
    ) -> None:
        """Introduce this node in a store to which it has just connected.

        Args:
            store: a connection to that store.
            serves: whether this node serves it.
            newcomer: whether this node has not been in a round yet.
            should_serve: whether this node would serve the store if another program did not have the port.

        Raises:
            ConfigError: a newcomer does not match the node that serves the store.
        """
        self._next = 0
        self._looked = MONOTONIC.now()
        packed = pack(self._mine, self._secret, Role.HOST)
        if serves:
            store.set(_HOST, packed)
            return
        if not newcomer:
            return
        try:
            host = self._read_host(store) if self._place else store.put_new(_HOST, packed)
        except TimeoutError:
            self._note_no_host(in_the_way=should_serve)
            return
        if not (found := self._compare(host, Role.HOST)):
            return
        self._leave(store, pack(self._mine, self._secret, Role.OTHER))
        for each in found:
            # A store that is kept alive from outside the job may still hold the introduction of a killed job.
            if (each.hopeless or should_serve) and self._place:
                raise ConfigError(each.field, each.value or None, each.problem, each.hint)
            self._tell(str(each))

    def _read_host(self, store: Store) -> bytes:
        # Nearly always there: one round trip. To wait for it and then to read it would be two.
        (host,) = store.get_many([_HOST])
        return store.get(_HOST, HOST_PATIENCE) if host is None else host

    def look(self, store: Store) -> None:
        """If it is time, look for new introductions of nodes that do not match this one."""
        now = MONOTONIC.now()
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        keys = [f"{_OTHER}{index}" for index in range(self._next, min(self._next + AT_ONCE, MOST))]
        for data in store.get_many(keys) if keys else ():
            if data is None:
                break
            self._next += 1
            for each in self._compare(data, Role.OTHER):
                self._tell(str(each))

    def _note_no_host(self, *, in_the_way: bool) -> None:
        text = f"the store at {self._place} is not served by a node of a job; it may be torchrun's"
        if in_the_way:
            hint = "choose another port"
            raise ConfigError("--rdzv-endpoint", self._place, f"the port is in use: {text}", hint)
        self._tell(f"{text}; is --rdzv-endpoint right?")

    def _compare(self, data: bytes, role: Role) -> tuple[Mismatch, ...]:
        guest = unpack(data, self._secret, role)
        if guest is None:
            _log.info("an introduction in the store that cannot be read: %.80r", data)
            return ()
        if guest.introduction.node_id == self._mine.node_id:
            return ()
        return mismatches(self._mine, self._secret, guest)

    def _leave(self, store: Store, packed: bytes) -> None:
        for index in range(MOST):
            if store.put_new(f"{_OTHER}{index}", packed) == packed:
                return

    def _tell(self, text: str) -> None:
        if text not in self._said and len(self._said) < MOST_SAID:
            self._said.append(text)
            self._say(text)

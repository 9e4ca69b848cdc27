"""The connections of groups, which can be shut from another thread: every collective that waits on them then raises at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rallypoint._core import clock, forks
from rallypoint.elastic import torch_private
from rallypoint.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends.tcpstore import TcpStore
from rallypoint.rendezvous.c10d import c10d_store

from .communicators import Communicator
from .forming_store import FormingStore
from .gloo_device import GlooDevice, devices
from .works import Lives


# Seconds that connecting one group may take. A member that dies meanwhile is reported by its supervisor; this is for the moment
# when Gloo waits for a member that will not come, and nothing can wake it.
FORMING = 10.0
# Seconds in which Gloo wakes the threads that wait on connections that were shut.
PATIENCE = 0.2
# Seconds for connecting to the workers' store, and between two attempts.
STORE_PATIENCE = 15.0
STORE_AGAIN = 0.1
_CUT = "a member was lost while the group formed"


@dataclass(frozen=True, slots=True)
class Connected:
    """A group whose members are connected.

    Args:
        group: what torch's operations are called on.
        gloo: its backend for tensors in the host's memory, or None.
        nccl: its communicator, or None.
    """

    group: Any
    gloo: Any
    nccl: Communicator | None


class Wiring:
    """The connections of all groups of this process in one generation.

    Args:
        host: where the workers' store is served.
        port: its port.
        prefix: of the keys under which the members find each other; the same on all of them, and never used before.
        generation: the one that the connections are for.
    """

    def __init__(self, host: str, port: int, prefix: str, generation: int = 0) -> None:
        self.generation = generation
        self._address = host, port
        self._prefix = prefix
        self._lock = forks.Lock()
        # Held while connecting to the store; not taken by :meth:`cut`, which must not wait for that.
        self._reaching = forks.Lock()
        self._under_way: socket.socket | None = None  # to the store, being connected
        self._cutting = threading.Event()
        self._devices: list[GlooDevice] = []
        self._pairs = 0  # upper bound of the connections awaited so far
        self._forming = 0  # groups that are being connected
        self._formed: dict[str, int] = {}  # how many groups were formed under each name
        self._cut_at: float | None = None
        self.lives = Lives()
        self._client: TcpStore | None = None
        self._store: Any = None  # c10d's view of it: torch's stubs have no Store
        self._forming_store: FormingStore | None = None
        self._gloo_store: Any = None  # c10d's view of the forming store
        self._patient: Any = None  # the workers' store over a connection of its own, for NCCL
        self._communicators: list[Communicator] = []

    @property
    def is_cut(self) -> bool:
        return self._cutting.is_set()

    def store(self) -> TcpStore:
        """The connection to the workers' store. Blocks until it is established.

        Raises:
            RendezvousConnectionError: no store answers, or the wiring was cut.
        """
        self._connect()
        assert self._client is not None
        return self._client

    def wait(self, key: str, timeout: float) -> bytes:
        """The value of a key below the prefix. Blocks until it exists.

        Raises:
            TimeoutError: it did not appear in time.
            RendezvousConnectionError: the store is gone, or the wiring was cut.
        """
        return self.store().get(f"{self._prefix}/{key}", timeout)

    def wait_all(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Like :meth:`wait`, for several keys."""
        return self.store().get_all([f"{self._prefix}/{key}" for key in keys], timeout)

    def gather(self, size: int, timeout: float, name: str = "") -> None:
        """Wait until all members have called this. Each name can be used once.

        Args:
            size: how many members there are.
            timeout: in seconds.
            name: of the group that they gather for; empty: a meeting.
        Raises:
            TimeoutError: not all have arrived in time.
            RendezvousConnectionError: as for :meth:`wait`.
        """
        place = f"{name}/" if name else ""
        here = self.store().add(f"{self._prefix}/{place}gathered", 1)
        if here == size:
            self.set(f"{place}all", b"1")
        try:
            self.wait(f"{place}all", timeout)
        except TimeoutError:
            here = int(self.store().peek(f"{self._prefix}/{place}gathered") or here)
            what = f"group {name.partition('@')[0]!r}" if name else "a meeting"
            raise TimeoutError(
                f"only {here} of {size} ranks came to {what} within {timeout:g} s; to wait longer, set init_process_group(timeout=…)"
            ) from None

    def set(self, key: str, value: bytes) -> None:
        """Set a key below the prefix."""
        self.store().set(f"{self._prefix}/{key}", value)

    def group(
        self,
        name: str,
        rank: int,
        size: int,
        timeout: timedelta,
        backends: Mapping[str, str],
        options: Any = None,
        *,
        have_met: bool = False,
    ) -> Connected:
        """Connect the members of a group.

        Collective: all members call it with the same ``name``, ``size`` and ``backends``.   Blocks: until all are connected; NCCL
        connects them later (:meth:`.Communicator.connect`).
        Args:
            name: of the group. Groups that share a member must not be connected under the same name at once; after a group is
                destroyed, another with the same members may use its name.
            rank: of this process within the group.
            size: number of members.
            timeout: of its collectives.
            backends: ``gloo`` or ``nccl``, by the type of device.
            options: torch's for NCCL, or None.
            have_met: all members are about to call this.
        Raises:
            TimeoutError: not all arrived within the group's time-out.
            RuntimeError: a member is gone, or the wiring was cut; raised by torch.
            RendezvousConnectionError: the store is gone, or the wiring was cut.
        """
        with self._lock:
            count = self._formed[name] = self._formed.get(name, 0) + 1
        name = f"{name}/{count}"
        if not have_met:
            # Members may be in different places of the script, and arrive minutes apart: Gloo starts once all have arrived.
            self.gather(size, timeout.total_seconds(), name)
        prefix, kinds = f"{self._prefix}/{name}", set(backends.values())
        gloo = self._gloo(prefix, rank, size, timeout) if "gloo" in kinds else None
        nccl = self._nccl(prefix, rank, size, timeout, options) if "nccl" in kinds else None
        made = {
            device: gloo if kind == "gloo" or nccl is None else nccl.backend
            for device, kind in backends.items()
        }
        store = torch_private.prefixed(self._store, prefix)
        group = torch_private.group_over(made, store, rank, size, has_nccl=nccl is not None)
        return Connected(group, gloo, nccl)

    def _gloo(self, prefix: str, rank: int, size: int, timeout: timedelta) -> Any:
        with self._lock:
            if not self._devices:
                self._devices = devices()
            self._pairs += size
            self._forming += 1
        assert self._forming_store is not None
        self._forming_store.expect(f"{prefix}/", size)
        store = torch_private.prefixed(self._gloo_store, prefix)
        options = torch_private.gloo_options(
            [device.handle for device in self._devices], timedelta(seconds=FORMING)
        )
        try:
            backend = dist.ProcessGroupGloo(store, rank, size, options)
        finally:
            self._forming_store.forget(f"{prefix}/")
            with self._lock:
                self._forming -= 1
        if self.is_cut:
            raise RendezvousConnectionError(_CUT)
        backend.set_timeout(timeout)
        return backend

    def _nccl(
        self, prefix: str, rank: int, size: int, timeout: timedelta, options: Any
    ) -> Communicator:
        with self._reaching:
            if self._patient is None:
                # NCCL's members find each other in their first collective, which some may reach late.
                client = self._reach_store()
                with self._lock:
                    self._patient = c10d_store(client, timeout.total_seconds())
        self._close_if_cut()
        store = torch_private.prefixed(self._patient, f"{prefix}/nccl")
        made = Communicator(store, rank, size, timeout, options)
        with self._lock:
            self._communicators.append(made)
        if self._cutting.is_set():
            made.abort()
        return made

    def forget(self, communicator: Communicator) -> None:
        """A communicator's group is dropped."""
        with self._lock:
            self._communicators = [each for each in self._communicators if each is not communicator]

    def cut(self) -> None:
        """Shut everything down, from any thread. Calls that wait on these connections raise.

        Another call shuts what was opened meanwhile; after :data:`PATIENCE`, it also ends calls that Gloo has not woken, and keeps
        Gloo's thread from spinning on what they have left.
        """
        self._cutting.set()
        if (under_way := self._under_way) is not None:
            with suppress(OSError):  # it has not started connecting, or has failed
                under_way.shutdown(socket.SHUT_RDWR)
        now = clock.MONOTONIC.now()
        with self._lock:
            stores = (self._store, self._gloo_store, self._patient)
            devices = list(self._devices)
            communicators = list(self._communicators)
            awaited = self._pairs if self._forming else 0
            self._cut_at = cut_at = now if self._cut_at is None else self._cut_at
        for communicator in communicators:
            communicator.abort()
        for store in stores:
            if store is not None:
                store.close()
        for device in devices:
            device.shut(awaited)
        if now - cut_at >= PATIENCE:
            self.lives.end()
            if not awaited:
                for device in devices:
                    device.quiet()

    def _connect(self) -> None:
        with self._reaching:
            if self._client is None:
                client = self._reach_store()
                with self._lock:
                    self._client = client
                    self._store = c10d_store(client, FORMING)
                    self._forming_store = FormingStore(client)
                    self._gloo_store = c10d_store(self._forming_store, FORMING)
        self._close_if_cut()

    def _close_if_cut(self) -> None:
        """Close what was opened while another thread was cutting."""
        if self.is_cut:
            self.cut()
            raise RendezvousConnectionError(_CUT)

    def _reach_store(self) -> TcpStore:
        """A new connection. Retries: a host whose network was down still finds others unreachable for a moment afterwards.

        Raises:
            RendezvousConnectionError: no store answers, or the wiring is cut before or meanwhile.
        """
        deadline = clock.Deadline(STORE_PATIENCE)
        try:
            while True:
                left = deadline.remaining()
                assert left is not None
                try:
                    return TcpStore(*self._address, timeout=left, begun=self._watch)
                except RendezvousConnectionError:
                    if deadline.expired() or self._cutting.wait(STORE_AGAIN):
                        raise
        finally:
            self._under_way = None

    def _watch(self, sock: socket.socket) -> None:
        self._under_way = sock
        if self.is_cut:
            raise ConnectionAbortedError(_CUT)

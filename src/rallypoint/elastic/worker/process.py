"""What this process is to a job: a worker that can be kept or not, at its first start or in place of a lost one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from rallypoint._core import env as environment, rank_watch, supervisor_line
from rallypoint.elastic.communication.connections import Wiring
from rallypoint.elastic.communication.groups import Groups
from rallypoint.elastic.communication.setup_record import Recorder, Replay
from rallypoint.elastic.replication.copies import Copies
from rallypoint.elastic.replication.partners import guests
from rallypoint.errors import ElasticError, RendezvousConnectionError

from .link import Link, Notice
from .records import Records, RecordsLost


# Set by the supervisor for a worker that takes the place of a lost one.
TAKES_OVER = "RALLY_TAKES_OVER"
# Seconds in which nodes that have lost the store meet again, if they can.
END_PATIENCE = 60.0


class KeptProcess:
    """The part of a worker that survives its peers.

    Args:
        host, port: of the workers' store.
        generation: the one in which this process started.
        rank: the global rank with which it runs the script's set-up. If the session continues with another number of ranks, the
            groups know the current one.
        ranks: how many ranks there were at that time.
        node: the number of its node.
        nodes: how many nodes there are.
        takes_over: whether it takes the place of a lost process.
        is_spare: it waits in its session for such a place; until then, ``rank`` is the one it runs the set-up as.
    """

    def __init__(
        self,
        host: str,
        port: int,
        generation: int,
        rank: int,
        ranks: int,
        node: int,
        nodes: int = 1,
        *,
        takes_over: bool,
        is_spare: bool = False,
    ) -> None:
        self.pid = os.getpid()
        self.generation = generation
        self.node = node
        self.nodes = nodes
        self.ranks_of_node = int(environment.get("LOCAL_WORLD_SIZE") or 1)
        self._rank = rank
        self.takes_over = takes_over
        self._is_spare = is_spare
        self._has_entered = False
        # The number of ranks has changed in this session.
        self.was_resized = False
        self.recorder = Recorder()
        self._records = Records(host, port, ranks, is_new=takes_over)
        self._holds_all = False
        self._forming: Wiring | None = None
        self.copies: Copies | None = None  # on other nodes
        # Called with the rank and the number of ranks when they change.
        self.on_resize: Callable[[int, int], None] | None = None
        if takes_over:
            self.groups = Groups(None, Replay(self._read))
        else:
            self.groups = Groups(self.wiring_of(generation, host, port), None)
            self.groups.observer = self.recorder.observe
        self.groups.install()
        self.link = Link(self._cut)
        if not takes_over:
            self.link.tell({"kind": "kept expected"})

    @property
    def address(self) -> tuple[str, int]:
        """The address of the workers' store."""
        return self._records.address

    def wiring_of(self, generation: int, host: str, port: int) -> Wiring:
        """New connections for a generation."""
        return Wiring(host, port, f"rally/kept/{generation}", generation)

    def enter(self) -> None:
        """A session begins.

        Raises:
            ElasticError: it is not the script's first session.
        """
        if self._has_entered:
            raise ElasticError(
                "elastic.session: this script has had a session already. A process that replaces a lost one begins at the"
                " script's first line, and would not reach the second session: give one session the objects of both, and choose what"
                " to train by the epoch of `session.epochs` or by `session.position`"
            )
        self._has_entered = True
        self.groups.begin_session()
        if self.takes_over and not self._is_spare:
            self._records.note_read(self._rank)  # the set-up has just replayed all of it

    def await_place(self, *, sharded: bool) -> None:
        """In a spare: wait for a place, and become its rank. Blocks: until there is a place; in other workers, not at all.

        Args:
            sharded: each rank's objects hold a part of the state.
        """
        if not self._is_spare:
            return
        if sharded:
            rank_watch.bind("the state is sharded, and its parts are assigned")
        variables, streams = self.link.await_place(rank_watch.why_bound())
        self._is_spare = False
        self._records.forget()  # the record of the rank that it has run the set-up as
        _take_streams(streams)
        environment.process_environment().update(variables)
        before, self._rank = self._rank, int(variables["RANK"])
        self.groups.become(self._rank)
        rank_watch.end(before, self._rank)

    def publish(self) -> None:
        """Store the record of this process's set-up, for processes that may take its place."""
        self._records.publish(self._rank, self.recorder.parts().items())
        for group in self.groups:
            group.observer = None
        self.groups.observer = None

    def hold_records(
        self,
        nodes: Sequence[int],
        groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]],
        copies: int,
    ) -> None:
        """Remember what must be stored again if the store is lost. All ranks have stored theirs, but a new store may lack some.

        Args:
            nodes: each rank's node.
            groups: each rank's groups: names and members.
            copies: how many nodes are to know each rank's record, including the rank's own node.
        """
        if self._holds_all or len(set(nodes)) < 2:
            return
        own = [(group.kept_name, group.setup_rank) for group in self.groups]
        self._records.hold(self._rank, own)
        others = () if self.was_resized else guests(nodes, self._rank, copies)
        for rank in others:
            places = [(name, members.index(rank)) for name, members in groups[rank]]
            self._records.hold(rank, places)
        if self._records.holds_all((self._rank, *others)):
            self._holds_all = True
            self.link.tell({"kind": "kept holds", "copies": copies})

    def _is_outdated(self, notice: Notice) -> bool:
        newest = self.link.newest
        return newest is not None and newest.generation > notice.generation

    def form(self, notice: Notice) -> Wiring:
        """The connections for meeting in the generation of a notice. A newer notice cuts them.

        Raises:
            RendezvousConnectionError: the workers' store is a new one that does not answer; or there is a newer notice.
        """
        self._records.store_again(
            notice.host, notice.port, notice.generation, lambda: self._is_outdated(notice)
        )
        self._take_place(notice.place)
        self._records.say_seen(self._rank)
        wiring = self.wiring_of(notice.generation, notice.host, notice.port)
        self._forming = wiring
        self.link.meet(notice.generation)
        if self._is_outdated(notice):
            wiring.cut()
        return wiring

    def settle(self) -> None:
        """After the set-up, when the supervisor has told this process its place: become the rank of that place."""
        if (newest := self.link.newest) is not None:
            self._take_place(newest.place)

    def _take_place(self, place: Mapping[str, str]) -> None:
        """The session continues with another number of ranks than in its first round."""
        if not place:
            return
        self.was_resized = True
        environment.process_environment().update(place)
        self.node, self.nodes = int(place["GROUP_RANK"]), int(place["GROUP_WORLD_SIZE"])
        rank, ranks = int(place["RANK"]), int(place["WORLD_SIZE"])
        self.groups.resize(rank, ranks)
        if self.on_resize is not None:
            self.on_resize(rank, ranks)

    def cut(self) -> None:
        """Stop every wait on this process's connections. All ranks will meet over new ones, as nodes meet again after a loss."""
        for wiring in {self.groups.wiring, self._forming}:
            if wiring is not None:
                wiring.cut()

    def _cut(self, notice: Notice) -> None:
        """In the link's thread: stop every wait for the lost processes. Newer connections may already be under way."""
        for wiring in {self.groups.wiring, self._forming}:
            if wiring is not None and wiring.generation < notice.generation:
                wiring.cut()
        self._records.cut(notice.generation)
        if self.copies is not None:
            self.copies.cut(notice.generation)

    def _read(self, key: str) -> bytes | None:
        try:
            return self._records.read(key, self._rank, is_spare=self._is_spare)
        except RecordsLost:
            if not self._is_spare:
                # Another process in its place could not read it either.
                self.link.tell({"kind": "kept refused", "record_lost": True})
            raise ElasticError(
                f"the record of the set-up of rank {self._rank} was lost with the nodes that held it, so all workers start again;"
                " elastic.session(copies=...) can keep more copies"
            ) from None
        except RendezvousConnectionError:
            # The store is lost. The supervisor ends this process when it knows the next one, and starts another.
            self.link.await_end(END_PATIENCE)
            raise


def _take_streams(fds: Sequence[int]) -> None:
    """Send what this process writes from now on to where the lost one's output went."""
    for stream, fd, place in zip((sys.stdout, sys.stderr), fds, (1, 2), strict=True):
        stream.flush()
        os.dup2(fd, place)
        os.close(fd)


_process: KeptProcess | None = None


def begin() -> None:
    """Called when this package is imported: in a worker of ``rally run``, groups that are made from now on can be kept.

    If the package was imported by the process that a worker is forked from, this takes effect when the worker starts.
    """
    supervisor_line.when_held(_begin)


def _begin() -> None:
    global _process  # noqa: PLW0603  one process is one worker
    if current() is not None or dist.is_initialized():
        return
    variables = environment.snapshot()
    try:
        host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        generation = int(variables["RALLY_GENERATION"])
        rank, ranks = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        node = int(variables["GROUP_RANK"])
        nodes = int(variables["GROUP_WORLD_SIZE"])
    except (KeyError, ValueError):
        return
    takes_over, is_spare = TAKES_OVER in variables, rank_watch.SPARE in variables
    _process = KeptProcess(
        host, port, generation, rank, ranks, node, nodes, takes_over=takes_over, is_spare=is_spare
    )


def is_worker() -> bool:
    """Whether this process is a worker of ``rally run``."""
    return supervisor_line.held() is not None


def current() -> KeptProcess | None:
    """This process, as a worker that can be kept; None if it is not one."""
    is_own = _process is not None and _process.pid == os.getpid()
    return _process if is_own and is_worker() else None

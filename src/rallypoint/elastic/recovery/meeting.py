"""After a loss: all ranks meet again, agree on a step, and bring one another to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from rallypoint._core import clock, raised
from rallypoint.elastic import hints
from rallypoint.elastic.communication.connections import Wiring
from rallypoint.elastic.communication.kept_group import KeptGroup
from rallypoint.elastic.loops.course import Course
from rallypoint.elastic.replication.copies import Copies
from rallypoint.elastic.replication.copy_line import Door
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.storage.memory import Memory
from rallypoint.elastic.storage.schedule import Held
from rallypoint.elastic.worker.link import Notice
from rallypoint.elastic.worker.process import KeptProcess
from rallypoint.errors import ElasticError, MembershipChanged, RendezvousError

from .agreement import Fetch, Standing, Verdict, differing, judge, longest_timeouts
from .keeping import Begun, Keeping


_log = logging.getLogger(__name__)
# Seconds that an error may be ahead of the notice that explains it.
PATIENCE = 10.0
# Seconds to wait for the others after a loss: a newcomer runs the script's set-up first.
MEETING = 3600.0
# How many nodes keep the record of each rank's set-up if nothing else is kept on other nodes.
RECORD_COPIES = 2
# What a lost peer looks like to the caller of a collective.
_SIGNS = (
    *("connection closed by peer", "connection reset", "broken pipe", "connection refused"),
    *("socket closed", "timed out waiting", "no longer", "gloo", "nccl", "connection was closed"),
)
# Bytes of a message when a snapshot is transferred.
PIECE = 64 << 20
# A checksum has 64 bits, and a tensor's integers are signed.
_HALF = 1 << 32
# The rank whose state is right does not know what its buffers were. (An empty value cannot be waited for.)
_UNKNOWN = b"-"
# Outside of training, any of these is taken for a loss.
LOST: tuple[type[BaseException], ...] = (RuntimeError, RendezvousError, OSError)


class Stage(IntEnum):
    """How far a rank is in a meeting: shows the supervisors whom the others wait for if a rank does not reach the next stage."""

    MEETS = 0  # tells the others its standing, and waits for theirs
    KNOWN = 1  # knows the standings of all
    HAS_MET = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """One recovery, as this rank saw it.

    Args:
        generation: the one that it led to.
        ranks: the lost ranks.
        why: how they were lost.
        steps: how many steps were complete.
        repeated: whether this rank repeats a step.
        redone: how many completed steps this rank redoes, with sharded state.
        formed: seconds from the notice until all were connected again; most of it is the newcomer's set-up.
        transferred: seconds that the transfer of the state took.
        bytes_moved: how many bytes this rank sent or received.
    """

    generation: int
    ranks: tuple[int, ...]
    why: str
    steps: int
    repeated: bool
    formed: float
    transferred: float
    bytes_moved: int
    redone: int = 0


def _pieces(contents: torch.Tensor) -> Iterator[torch.Tensor]:
    for begin in range(0, contents.numel(), PIECE):
        yield contents[begin : begin + PIECE]


class Meeting:
    """One rank's part in the meetings.

    Args:
        kept: this process.
        objects: what the session was given.
        course: the script's.
        keeping: this rank's.
        memory: this rank's.
        copies: on other nodes, if there are any.
        replica: how many ranks together hold the whole state, if the number of replicas may change; else 0.

    Attributes:
        whole: this rank's state is that after its last complete step.
        begun: what the step under way began with; None between two steps.
        history: all recoveries that this process took part in.
        ranks: how many ranks this process's state is for. The code that adapts the state to another number sets it.
        has_moved: this process's rank or the number of ranks changed in the last meeting. The code that acts on it resets it.
    """

    def __init__(
        self,
        kept: KeptProcess,
        objects: Objects,
        course: Course,
        keeping: Keeping,
        memory: Memory,
        copies: Copies | None = None,
        *,
        replica: int = 0,
    ) -> None:
        self._replica = replica
        self._kept = kept
        self._objects = objects
        self._course = course
        self._keeping = keeping
        self._memory = memory
        self._copies = copies
        self._is_new = kept.takes_over
        self._lacks_own = kept.takes_over and memory.held is None
        self.whole = not kept.takes_over
        self._waits = kept.takes_over
        self.begun: Begun | None = None
        self.history: list[Recovery] = []
        self.ranks = dist.get_world_size()
        self.has_moved = False
        self._is_under_way = False
        self._unexplained = (
            0  # the id of an error for whose explanation this rank has waited in vain
        )

    @property
    def _rank(self) -> int:
        default = self._kept.groups.default
        assert default is not None
        return default.getRank()

    @property
    def is_due(self) -> bool:
        """A peer is lost, and this rank has not met the others since."""
        newest = self._kept.link.newest
        return newest is not None and newest.generation > self._kept.generation

    def explains(self, error: BaseException) -> bool:
        """Whether an error in a step is the sign of a loss.   Blocks: until the supervisor says so, at most :data:`PATIENCE`."""
        if not isinstance(error, (*LOST, MembershipChanged)):
            return False
        text = str(error).lower()
        may_be = any(sign in text for sign in _SIGNS) and not self._kept.link.is_stopping
        patience = PATIENCE if may_be and id(error) != self._unexplained else 0.0
        # Nodes may take minutes to meet again. Gloo's thread would spin all the while (see GlooDevice.quiet).
        give_up = self._kept.cut if patience else None
        return self._kept.link.wait(self._kept.generation, patience, give_up) is not None

    def change(self, error: BaseException | None) -> MembershipChanged | None:
        """What a collective of the script raises after a loss.   Blocks: like :meth:`explains`.

        Args:
            error: the one that ended the collective; None: it has not begun.
        """
        if self._is_under_way or (error is None and not self.is_due):
            return None
        if error is not None and not self.explains(error):
            self._unexplained = id(error)
            return None
        notice = self._kept.link.newest
        assert notice is not None
        return MembershipChanged(notice.ranks, notice.why)

    def compare(self) -> None:
        """At the first start: check that all ranks have entered the same session.

        Raises:
            ElasticError: they have not.
        """
        wiring = self._kept.groups.wiring
        assert wiring is not None
        try:
            is_alike = not self._objects.keeps_snapshots
            states = self._objects.digests() if is_alike else ()
            standings = self._introduce(wiring, self._keeping.fingerprint(), states)
            judge(standings)
            for name, one, other in differing(standings):
                hints.say(
                    "the state of %s differs between ranks %d and %d. A process that replaces a lost rank gets another rank's state. If each"
                    " rank needs its own, use elastic.session(…, snapshots=True)",
                    *(name, one, other),
                )
            self._connect_copies(standings, self._kept.generation)
            if self._copies is not None:
                self._keeping.await_copies()
                self._barrier()
        except ElasticError:
            raise
        except LOST as error:
            self.recover(error)

    def confirm(self) -> None:
        """Wait for all ranks, and recover from any loss meanwhile."""
        while True:
            try:
                self._barrier()
                return
            except LOST as error:
                self.recover(error)

    def catch_up(self, error: BaseException | None = None) -> None:
        """Between two steps: recover from the loss that the error is a sign of, or else from one that was reported, if any."""
        if error is None and not self.is_due:
            return
        self.begun = None
        self.recover(error)

    def recover(self, error: BaseException | None) -> None:
        """Meet the others again, and get all to the same step.

        Args:
            error: the one by which this rank noticed the loss; raised again if the supervisor does not explain it.
        """
        self._is_under_way = True
        try:
            self._recover(error)
        finally:
            self._is_under_way = False

    def _recover(self, error: BaseException | None) -> None:
        link = self._kept.link
        give_up = None if error is None else self._kept.cut
        notice = link.wait(self._kept.generation, PATIENCE, give_up)
        while True:
            if notice is None:
                if error is not None:
                    raise error
                raise ElasticError("a peer is gone, and the supervisor does not say why")
            if error is not None:
                # The error holds the frames of the step, and they hold the old group.
                raised.forget_frames(error)
            try:
                self._meet(notice)
            except ElasticError:
                # Another process in this one's place would fail in the same way.
                self._kept.link.tell({"kind": "kept refused"})
                raise
            except LOST as failure:
                _log.debug("meeting of generation %d failed: %s", notice.generation, failure)
                error = failure
                notice = link.wait(notice.generation, PATIENCE, self._kept.cut)
                continue
            return

    def count_anew(self) -> None:
        """All ranks have met: the supervisor compares the collectives that they start from here on."""
        self._count_from(Stage.HAS_MET, self._kept.generation)

    def _count_from(self, stage: Stage, generation: int) -> None:
        place = len(Stage) * generation + stage
        self._memory.progress.restart((each.label for each in self._kept.groups), place)

    def _meet(self, notice: Notice) -> None:
        kept, course = self._kept, self._course
        before = self._rank, dist.get_world_size()
        wiring = kept.form(notice)
        self._count_from(Stage.MEETS, notice.generation)
        if self._copies is not None:
            self._copies.drain()
        if before != (self._rank, dist.get_world_size()):
            self.has_moved = True
            if self._copies is not None:
                self._copies.resize(self._rank, dist.get_world_size())
        standings = self._introduce(wiring)
        # A rank may have stopped since it introduced itself. Gloo would not wait long for it, and cannot be interrupted.
        self._count_from(Stage.KNOWN, notice.generation)
        wiring.gather(len(standings), MEETING)
        if self._is_new:
            kept.groups.take_timeouts(longest_timeouts(standings))
        kept.groups.connect(wiring)
        formed = clock.MONOTONIC.now()
        verdict = judge(standings)
        steps, is_new = course.steps, self._is_new
        self._share_place(wiring, verdict, standings)
        buffers = self._share_buffers(wiring, verdict)
        self._undo_step(verdict)
        moved = self._exchange(verdict)
        if verdict.source is not None and self._rank in verdict.receivers:
            self.ranks = standings[verdict.source].ranks
        self._settle(verdict, buffers)
        self.ranks = self._keeping.ranks or self.ranks
        self._connect_copies(standings, notice.generation)
        self._barrier()
        kept.generation = notice.generation
        self.count_anew()
        recovery = Recovery(
            generation=notice.generation,
            ranks=notice.ranks,
            why=notice.why,
            steps=verdict.steps,
            repeated=self.begun is not None,
            formed=formed - notice.at,
            transferred=clock.MONOTONIC.now() - formed,
            bytes_moved=moved,
            redone=0 if is_new else max(0, steps - verdict.steps),
        )
        self.history.append(recovery)
        record = {
            "generation": recovery.generation,
            "steps": recovery.steps,
            "repeated": recovery.repeated,
            "formed": recovery.formed,
            "transferred": recovery.transferred,
            "redone": recovery.redone,
            "received": 0 if self._rank == verdict.source else moved,
        }
        kept.link.tell({"kind": "kept recovered", "rank": self._rank, **record})

    def _barrier(self) -> None:
        group = self._kept.groups.default
        assert group is not None
        group.barrier_now()

    def _introduce(
        self, wiring: Wiring, fingerprint: int = 0, states: Sequence[tuple[str, str]] = ()
    ) -> list[Standing]:
        """Tell all others this rank's standing, and wait for theirs."""
        copies, (host, port) = self._copies, self._kept.address
        door = None if copies is None else copies.open(host, port)
        mine = Standing(
            rank=self._rank,
            steps=self._course.steps,
            whole=self.whole,
            objects=self._objects.describe(),
            fingerprint=fingerprint,
            states=tuple(states),
            groups=tuple((group.kept_name, group.members) for group in self._kept.groups),
            timeouts=tuple(group.timeout.total_seconds() for group in self._kept.groups),
            # The layout of a rank that is not whole would not count.
            layouts=self._objects.layouts(settle=self.whole or self._objects.keeps_snapshots),
            unused=self._objects.static_graphs.unused(),
            snapshots=self._keeping.held(),
            node=self._kept.node,
            lacks_own=self._lacks_own,
            door=None if door is None else (door.host, door.port, door.token),
            guests=() if copies is None else copies.guests.held(),
            ranks=self.ranks,
            replica=self._replica,
            waits=self._waits,
        )
        wiring.set(f"here/{self._rank}", json.dumps(mine.to_json()).encode())
        places = [f"here/{rank}" for rank in range(dist.get_world_size())]
        told = wiring.wait_all(places, MEETING)
        standings = [Standing.from_json(json.loads(each)) for each in told]
        self._kept.hold_records(
            [each.node for each in standings],
            [each.groups for each in standings],
            RECORD_COPIES if copies is None else copies.count,
        )
        return standings

    def _share_place(self, wiring: Wiring, verdict: Verdict, standings: Sequence[Standing]) -> None:
        """Send ranks whose memory was lost with their node what was kept for them here, and the others' place in the data."""
        if verdict.source is None or not any(each.lacks_own for each in standings):
            return
        copies, nodes = self._copies, [each.node for each in standings]
        for each in standings:
            if copies is not None and each.lacks_own and self._rank in copies.of(nodes, each.rank):
                wiring.set(f"own/{each.rank}/{self._rank}", copies.guests.own_of(each.rank))
        if self._rank == verdict.source:
            wiring.set("place", self._keeping.own_at(verdict.steps))
        if not self._lacks_own:
            return
        for partner in () if copies is None else copies.of(nodes, self._rank):
            record = wiring.wait(f"own/{self._rank}/{partner}", MEETING)
            if self._keeping.take_own(record, verdict.steps):
                return
        if self._rank != verdict.source and (place := wiring.wait("place", MEETING)):
            self._keeping.take_place(place)
            # If the number of ranks changes, this may be an additional rank, which has lost nothing.
            if standings[verdict.source].ranks == len(standings):
                _log.warning(
                    "the random state of rank %d was lost with its node: it continues with the one after the script's set-up",
                    self._rank,
                )

    def _share_buffers(self, wiring: Wiring, verdict: Verdict) -> bytes:
        """Tell the receivers of the state which buffers all ranks have alike. Returns the digests in a receiver, else nothing."""
        if self._rank == verdict.source and verdict.receivers:
            wiring.set("buffers", self._keeping.buffers_behind(verdict.steps) or _UNKNOWN)
        if verdict.source is None or self._rank not in verdict.receivers:
            return b""
        return wiring.wait("buffers", MEETING)

    def _connect_copies(self, standings: Sequence[Standing], generation: int) -> None:
        """All ranks have the state: from here on it is copied to other nodes."""
        if self._copies is None:
            return
        doors = [None if each.door is None else Door(*each.door) for each in standings]
        nodes = [each.node for each in standings]
        self._copies.connect(generation, nodes, doors)
        guests = [dict(each.guests) for each in standings]
        held = [
            set(guests[each].get(self._rank, ())) for each in self._copies.of(nodes, self._rank)
        ]
        self._keeping.copy(sorted(set.intersection(*held)) if held else ())

    def _undo_step(self, verdict: Verdict) -> None:
        """Make what others receive from here the state before the step that is to be repeated."""
        begun = self.begun
        if begun is not None:
            self._objects.drop_gradients(begun.gradients)
        if begun is not None and verdict.source is not None and self._course.steps == verdict.steps:
            self._objects.buffers.restore(begun.buffers)
            if begun.settings is not None:
                self._objects.settings.restore(begun.settings)
            if begun.modes is not None:
                self._objects.modes.restore(begun.modes)

    def _exchange(self, verdict: Verdict) -> int:
        group = self._kept.groups.default
        assert group is not None
        if self._rank == verdict.source:
            return group.transfer(lambda: self._objects.send(group, verdict.receivers))
        if verdict.source is not None and self._rank in verdict.receivers:
            self.whole, self._waits = False, True
            source = verdict.source
            return group.transfer(lambda: self._objects.receive(group, source))
        if verdict.snapshot is not None and any(
            self._rank in (each.rank, each.holder) for each in verdict.fetches
        ):
            held, fetches = verdict.snapshot, verdict.fetches
            return group.transfer(lambda: self._fetch(group, held, fetches))
        return 0

    def _fetch(self, group: KeptGroup, held: Held, fetches: Sequence[Fetch]) -> int:
        """Transfer parts of a snapshot to the ranks that lack theirs. Returns how many bytes this rank sent or received."""
        moved = 0
        for each in fetches:
            if self._rank == each.holder:
                contents, checksum = self._contents(each, held)
                head = torch.tensor([contents.numel(), *divmod(checksum, _HALF)])
                group.send_now(head, each.rank)
                for piece in _pieces(contents):
                    group.send_now(piece, each.rank)
                moved += contents.numel()
            elif self._rank == each.rank:
                head = torch.zeros(3, dtype=torch.int64)
                group.receive_now(head, each.holder)
                size, high, low = head.tolist()

                def receive(contents: torch.Tensor, holder: int = each.holder) -> None:
                    for piece in _pieces(contents):
                        group.receive_now(piece, holder)

                is_own = each.whose == each.rank
                checksum = high * _HALF + low
                self._keeping.take_copy(held, size, checksum, receive, is_own=is_own)
                moved += size
        return moved

    def _contents(self, fetch: Fetch, held: Held) -> tuple[torch.Tensor, int]:
        if fetch.whose == self._rank:
            return self._keeping.contents(held)
        assert self._copies is not None
        return self._copies.guests.contents(fetch.whose, held)

    def _settle(self, verdict: Verdict, buffers: bytes) -> None:
        """Make everything as it was at the beginning of the next step."""
        begun, course = self.begun, self._course
        if self._copies is not None and verdict.snapshot is not None:
            self._copies.guests.drop_after(verdict.snapshot.number)
        receives = self._rank in verdict.receivers
        self._keeping.settle(
            verdict, begun, receives=receives, is_new=self._is_new, buffers=buffers
        )
        self._objects.restore_layouts(verdict.layouts, verdict.known)
        # From here on this rank's state can be the right one.
        self.whole, self._waits = True, False
        self._is_new = self._lacks_own = False
        if course.steps != verdict.steps:
            course.steps, self.begun = verdict.steps, None

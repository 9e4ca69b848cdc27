"""The snapshots of a session with sharded state: taking them, agreeing on them, and going back to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from rallypoint._core import clock
from rallypoint.elastic.loops.own_state import OwnState
from rallypoint.elastic.replication.copies import Copies
from rallypoint.elastic.state.buffers import Place
from rallypoint.elastic.state.objects import Objects
from rallypoint.elastic.storage.schedule import Held, Schedule
from rallypoint.elastic.storage.slots import Slots
from rallypoint.errors import ElasticError

from . import local_state
from .local_state import LocalState


class Snapshots:
    """This rank's snapshots.

    Args:
        objects: what the session was given.
        fd: of this rank's memory.
        every: how many steps a loss may cost, or None.
        copies: on other nodes, if there are any.
        check: raises RuntimeError if what the GPU holds is wrong because a member was lost while it computed.
    """

    def __init__(
        self,
        objects: Objects,
        fd: int,
        every: int | None,
        copies: Copies | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self._state = LocalState(objects)
        self._buffers = objects.buffers
        # number -> which buffer was where. A forward pass may since have put another tensor there that belongs to somebody else,
        # such as a part of a batch, and must not be overwritten.
        self._placed: dict[int, list[Place]] = {}
        self._slots = Slots(fd)
        self._copies = copies
        # While the last snapshot is being copied, the loss of a node leads back to the previous one.
        self._schedule = Schedule(every if every is None or copies is None else max(1, every // 2))
        self._is_copied_at_once = copies is not None and every == 1
        self._last = Held(0, 0)
        self._scope = 0  # of the last snapshot
        self._scopes: dict[int, int] = {}  # number -> where in the program this process took it
        self._is_due_at_once = False
        self.ranks = 0  # how many ranks the snapshot that was restored last was for
        self._cost = self._step = 0.0  # seconds that the last snapshot took, and a step before it
        self._steps_since = clock.MONOTONIC.now()

    @property
    def interval(self) -> int:
        """Steps between the last snapshot and the next."""
        return self._schedule.interval

    def is_due(self, steps: int, scope: int, *, even_early: bool = False) -> bool:
        """Whether the next one is due.

        Args:
            steps: how many are complete.
            scope: the loop over batches that is under way; a snapshot is due where another one begins.
            even_early: a snapshot is due as soon as there was a step since the last.
        """
        if not self._last.number or scope != self._scope or self._is_due_at_once:
            return True
        return self._schedule.is_due(steps) or (even_early and steps != self._last.steps)

    def take(self, own: OwnState, scope: int) -> None:
        """Copy this rank's part into its memory.

        Raises:
            ElasticError: an optimizer's state is sharded differently from its parameters.
            RuntimeError: a member is lost, so the state is not right.
            OSError: out of memory.
        """
        begun = clock.MONOTONIC.now()
        if self._copies is not None:
            # This overwrites the previous snapshot, so each part of the last one must be on another node, too.
            self._copies.wait()
        structure, tensors = self._state.pack()
        record = {
            "own": torch.frombuffer(bytearray(own.pack()), dtype=torch.uint8),
            "structure": structure,
            "sizes": [each.numel() * each.element_size() for each in tensors],
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        }
        size, pieces = local_state.laid_out(local_state.packed(record), tensors)
        held = Held(self._last.number + 1, own.steps)
        self._slots.write(held, size, self._checked(pieces))
        now = clock.MONOTONIC.now()
        self._cost = now - begun
        if self._copies is not None:
            self._cost += self._copies.spent
        steps = own.steps - self._last.steps
        self._step = (begun - self._steps_since) / steps if steps > 0 else 0.0
        self._steps_since = now
        self._last, self._is_due_at_once = held, False
        for number in [each for each in self._scopes if each < held.number - 1]:
            del self._scopes[number]
            self._placed.pop(number, None)
        self._scopes[held.number] = self._scope = scope
        self._placed[held.number] = self._buffers.placed()
        self.copy(())

    def _checked(
        self, pieces: Iterable[tuple[int, torch.Tensor]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Copying the pieces waits for the GPU. An operation that was aborted meanwhile may have left anything in them."""
        yield from pieces
        self._check()

    def copy(self, copied: Sequence[Held]) -> None:
        """Send the last snapshot to other nodes, in the background, unless it is one of these."""
        if self._copies is not None and self._copies.is_connected and self._last not in copied:
            self._copies.wait()
            self._copies.begin(self._last, *self._slots.place(self._last))

    def await_copies(self) -> None:
        """Wait until the last snapshot is on other nodes, too, or a loss prevents it."""
        if self._copies is not None:
            self._copies.wait()

    def agree(self) -> None:
        """Wait until all ranks have the last snapshot, and learn from them when the next is due.

        Collective: all ranks.   Blocks: until all have called it.
        Raises:
            RuntimeError: a rank is lost.
        """
        if self._is_copied_at_once:
            self.await_copies()
        # The slowest copy, and the fastest step.
        figures = torch.tensor([self._cost, -self._step], dtype=torch.float64)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
        cost, step = figures.tolist()
        self._schedule.note(self._last.steps, cost, -step)

    def renew(self) -> None:
        """Make the next snapshot due at once: some rank's part of the last one is not quite its own."""
        self._is_due_at_once = True

    def enter_scope(self, scope: int) -> None:
        """The last snapshot belongs to this part of the program, too."""
        self._scopes[self._last.number] = self._scope = scope

    def held(self) -> tuple[Held, ...]:
        """The complete snapshots in this rank's memory. Reads all of them."""
        return self._slots.check()

    def scope_of(self, held: Held) -> int | None:
        """The scope in which this process took a snapshot; None if it did not take it."""
        return self._scopes.get(held.number)

    def part(self, held: Held) -> tuple[torch.Tensor, int]:
        """This rank's part of a snapshot (``[n]``, uint8; the caller must not keep it), and its checksum."""
        return self._slots.read(held), self._slots.place(held)[2]

    def contents(self, size: int) -> torch.Tensor:
        """Memory for this rank's part of a snapshot from another node (``[size]``, uint8; the caller must not keep it)."""
        return torch.frombuffer(self._slots.prepare(size), dtype=torch.uint8)

    def complete(self, held: Held, size: int, checksum: int) -> None:
        """This rank's part of a snapshot has arrived from another node.

        Raises:
            ElasticError: it is damaged.
        """
        if not self._slots.complete(held, size, checksum):
            raise ElasticError(
                f"this rank's part of the snapshot of step {held.steps} arrived damaged from another node"
            )

    def restore(self, held: Held) -> OwnState:
        """Make the state of a snapshot the current one, and drop newer snapshots.

        Returns:
            This rank's own state at the time of the snapshot.
        """
        head, contents = local_state.taken_apart(self._slots.read(held))
        record = local_state.unpacked(head)
        tensors = local_state.tensors_in(contents, record["sizes"])
        if held.number in self._placed:
            self._buffers.put_back(self._placed[held.number])
        self._state.restore(record["structure"], tensors)
        self.ranks = record["ranks"]
        del tensors, contents
        self._slots.drop_after(held.number)
        self._last = held
        self._scope = self._scopes.get(held.number, 0)
        self._scopes[held.number] = self._scope
        self._schedule.restart(held.steps)
        self._steps_since = clock.MONOTONIC.now()
        return OwnState.unpack(bytes(record["own"].numpy()))

    def close(self) -> None:
        """Release the mappings."""
        self._slots.close()

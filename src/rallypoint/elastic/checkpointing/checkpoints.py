"""A session's checkpoints: taken at the boundary of a step, written by a thread of rank 0, found and loaded at the next start.

Nothing here is a collective. At a boundary, rank 0 copies the state into host memory; every other rank leaves its own state
(generators, place in the data) as a note in the workers' store. The thread gathers these notes and writes everything.

With sharded state, every rank copies its parts, and a thread on each rank writes them. A second note says what is where.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rallypoint._core import clock
from rallypoint._core.checkpoint_folder import entries
from rallypoint._core.checkpoint_records import (
    RECORD,
    Entry,
    Record,
    name_of,
    step_of,
    to_load,
    to_remove,
)
from rallypoint._core.storage import Storage, storage_at
from rallypoint.elastic.communication.board import Board
from rallypoint.elastic.loops.own_state import OwnState
from rallypoint.elastic.state.modes import Modes
from rallypoint.elastic.state.objects import Layout, Objects
from rallypoint.errors import ElasticError

from .checkpoint_state import TENSOR, HostCopy, State
from .last_step import LastStep


if TYPE_CHECKING:
    from .checkpoint_files import Part

_log = logging.getLogger(__name__)
# Seconds in which the notes of all ranks must arrive: all post them at the boundary where rank 0 took its copy.
NOTES = 60.0
# Seconds in which the other ranks must have written their parts of sharded tensors.
PARTS = 900.0
# Seconds for rank 0 to choose what to load: it reads the newest checkpoint once, to check it.
CHOOSING = 3600.0
# Seconds for which a failed session waits at its end for a checkpoint that is being written.
AFTER_FAILURE = 20.0
# After this many seconds at its end, a session says what it waits for.
SILENCE = 10.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where a session continues.

    Args:
        record: the checkpoint's.
        own: this rank's state if the number of ranks is the same as then; else rank 0's.
        is_own: whether ``own`` is this rank's.
        layouts: which gradients each DDP module reduced together, if that was known.
    """

    record: Record
    own: OwnState
    is_own: bool
    layouts: tuple[Layout | None, ...] = ()


class _StillWriting(Exception):
    """Another rank could not write its part, because it is still writing its part of the previous checkpoint."""


class Checkpoints:
    """The checkpoints of one session, as one rank sees them.

    Args:
        where: a directory, or a URL that fsspec understands.
        every: steps between two checkpoints.
        keep: how many complete ones are kept.

    Raises:
        ValueError: ``every`` or ``keep`` is less than 1, or no driver knows the URL's scheme.
        ImportError: the URL's driver is not installed.
    """

    def __init__(self, where: str | os.PathLike[str], every: int, keep: int) -> None:
        for name, value in (("checkpoint_every", every), ("checkpoint_keep", keep)):
            if value < 1:
                raise ValueError(f"elastic.session: {name} is {value!r}, expected at least 1")
        self._storage: Storage = storage_at(where)
        self._every, self._keep = every, keep
        self._state = State(())
        self._modes: Modes | None = None
        self._objects: Objects | None = None
        self._flags: dict[str, bool] = {}  # in the copy
        self._layouts: tuple[Layout | None, ...] = (None,)  # there, too
        self._is_sharded = False
        self._last_step: LastStep | None = None
        self._rank, self._size = 0, 1
        self._board: Board | None = None
        self._new_board: Callable[[], Board] | None = None
        self._copy = HostCopy()
        self._check: Callable[[], None] = lambda: None
        self._newest = 0  # the step of the newest checkpoint that was due or loaded
        self._due = -1  # the step of the newest checkpoint that was due
        self._posted: list[str] = []
        self._passed_over: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None
        self._being_written = -1  # the step of the checkpoint that the thread writes
        self._is_slow = False
        self._ends = False  # no step follows
        self._written = -1  # the step of the last checkpoint that this process has completed
        self._tried = 0  # how many were written or failed

    def begin(
        self,
        objects: Objects,
        rank: int,
        size: int,
        new_board: Callable[[], Board] | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """The session begins.

        Args:
            objects: the session's.
            rank: of this process.
            size: how many ranks there are.
            new_board: makes a board to the other ranks; None if there are none.
            check: raises RuntimeError if what the GPU holds is wrong because a member was lost while it computed.
        """
        self._check = check
        self._objects = objects
        self._state, self._modes = State(objects.given), objects.modes
        self._is_sharded = size > 1 and bool(self._state.owners())
        self._rank, self._size = rank, size
        self._use(new_board)

    def resize(self, rank: int, size: int, new_board: Callable[[], Board] | None) -> None:
        """The session continues with another number of ranks. Arguments as for :meth:`begin`.

        A checkpoint that is being written is skipped if it needs a rank that is lost.
        """
        self._rank, self._size = rank, size
        self._use(new_board)
        self._last_step = None

    def _use(self, new_board: Callable[[], Board] | None) -> None:
        self.close()
        self._new_board = new_board
        self._board = None if new_board is None else new_board()

    # -- at the start -----------------------------------------------------------------------------

    def load(self) -> Loaded | None:
        """Load the newest intact checkpoint, if there is one. Blocks: until rank 0 has chosen it.

        Raises:
            ElasticError: the place cannot be read, or the checkpoint is that of other objects.
        """
        if self._rank == 0:
            chosen = self._choose()
            if self._board is not None:
                self._board.post("load", json.dumps(chosen).encode())
        else:
            assert self._board is not None
            chosen = json.loads(self._board.await_note("load", CHOOSING))
        return None if chosen is None else self._load(chosen)

    def _choose(self) -> str | None:
        try:
            self._storage.make("")
            found = entries(self._storage)
        except (FileExistsError, NotADirectoryError) as error:
            part = "it is" if isinstance(error, FileExistsError) else "a part of the path is"
            raise ElasticError(
                f"elastic.session: checkpoints cannot be kept at {self._storage}: {part} a file, and a folder was"
                " expected; pass another one as checkpoint= (it need not exist yet)"
            ) from error
        except Exception as error:
            raise ElasticError(
                f"elastic.session: checkpoints cannot be kept at {self._storage}: {error}"
            ) from error
        for entry in found:
            if entry.problem:
                self._pass_over(entry, entry.problem)
        candidates = to_load(found)
        if not candidates:
            return None
        from . import checkpoint_files

        for entry in candidates:
            assert entry.record is not None
            try:
                checkpoint_files.check(self._storage, entry.name, entry.record)
            except checkpoint_files.Unreadable as error:
                self._pass_over(entry, error)
                continue
            return entry.name
        _log.warning("no checkpoint at %s can be loaded; training begins at step 0", self._storage)
        return None

    def _pass_over(self, entry: Entry, why: object) -> None:
        self._passed_over |= {entry.name}
        _log.warning(
            "the checkpoint %s at %s is damaged, trying an earlier one: %s",
            *(entry.name, self._storage, why),
        )

    def _load(self, name: str) -> Loaded:
        from . import checkpoint_files

        try:
            record = Record.parse(self._storage.read(f"{name}/{RECORD}"))
            state = checkpoint_files.read(self._storage, name, self._state.owners())
        except Exception as error:
            raise ElasticError(
                f"elastic.session: rank {self._rank} cannot read the checkpoint {name} at {self._storage}, which rank 0"
                f" found intact: {error}. All nodes need access to the same storage"
            ) from error
        try:
            self._state.restore(state)
        except ElasticError as error:
            raise ElasticError(
                f"elastic.session: the checkpoint {name} at {self._storage} does not fit: {error}. To start from"
                " scratch, pass another place as checkpoint="
            ) from error
        # Earlier versions did not write flags.
        self._state.restore_flags(state[checkpoint_files.SESSION].get("flags", {}))
        if self._modes is not None:
            self._modes.note_complete()
        self._newest = record.step
        if self._rank == 0:
            # A warning, because the user may have forgotten that the place was used before.
            _log.warning(
                "training continues at step %d, from the checkpoint %s at %s",
                *(record.step, name, self._storage),
            )
        packed: list[torch.Tensor] = state[checkpoint_files.SESSION]["ranks"]
        is_own = len(packed) == self._size
        own = OwnState.unpack(packed[self._rank if is_own else 0].numpy().tobytes())
        # Nor did they write these.
        layouts = state[checkpoint_files.SESSION].get("layouts", ())
        settled = tuple(None if each is None else tuple(map(tuple, each)) for each in layouts)
        return Loaded(record, own, is_own, settled)

    # -- at the boundary of a step ----------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is taken after this many steps. The same on all ranks."""
        return step // self._every > self._newest // self._every

    def join_at(self, step: int) -> None:
        """This process has taken a lost one's place, after this many steps. The lost one may not have reached this boundary."""
        self._newest = max(step - 1, self._loaded_step())

    def _loaded_step(self) -> int:
        """The step of the checkpoint that all ranks began with; 0 if there was none. No rank takes another one of that step."""
        try:
            note = None if self._board is None else self._board.peek("load")
        except Exception as error:  # noqa: BLE001  of any store
            _log.debug("rank %d does not know which checkpoint was loaded: %s", self._rank, error)
            return 0
        name = None if note is None else json.loads(note)
        return 0 if name is None else step_of(name) or 0

    def is_last(self, step: int) -> bool:
        """The job is told to stop: whether to take the last checkpoint here. At some boundary, it is True on all ranks."""
        if self._last_step is None:
            self._last_step = LastStep(self._board, self._rank, self._size)
        try:
            return self._last_step.is_here(step)
        except Exception as error:  # noqa: BLE001  of any store; there is no last checkpoint then
            _log.debug("rank %d cannot agree on a last checkpoint: %s", self._rank, error)
            return False

    def take_last(self, own: OwnState) -> None:
        """The job stops here. Blocks: until everything that this rank has to write is written."""
        self.end(own)
        if self._rank == 0 and self._written == own.steps:
            _log.warning("told to stop: the last checkpoint, of step %d, is written", own.steps)

    def take(self, own: OwnState) -> None:
        """Take a checkpoint. Returns when the state is copied; rank 0 writes it in the background.

        If the previous one is still being written, this one is skipped.
        """
        self._take(own, str(own.steps))

    def _take(self, own: OwnState, key: str) -> None:
        """Take a checkpoint.

        Args:
            own: this rank's state.
            key: under which the other ranks leave their notes.
        """
        step = own.steps
        self._newest = self._due = step
        if self._rank != 0:
            self._post(f"{key}/{self._rank}", own.pack())
            if not self._is_sharded:
                return
        if self._is_writing():
            if self._rank != 0:
                self._post(_part_key(key, self._rank), b'{"still writing": true}')
            elif self._tried:  # writing the first one takes longer: it imports DCP, too
                self._tell_slow(step)
            return
        self._copy.take(self._state.now())
        if self._modes is not None:
            self._flags = self._state.flags(self._modes.changed())
        if self._objects is not None and None in self._layouts:  # DDP never changes one
            self._layouts = self._objects.layouts()
        try:
            self._check()
        except RuntimeError as error:
            _log.debug("the checkpoint of step %d is left out: %s", step, error)
            if self._rank != 0:
                self._post(_part_key(key, self._rank), b'{"problem": "a rank was lost"}')
            return
        self._being_written = step
        write = self._write if self._rank == 0 else self._write_part
        self._thread = threading.Thread(
            target=write, args=(own, key), name="rally-checkpoint", daemon=True
        )
        self._thread.start()

    def _tell_slow(self, step: int) -> None:
        """Warn once that writing is slow."""
        if not self._is_slow:
            self._is_slow = True
            _log.warning(
                "writing a checkpoint takes longer than %d steps: the one of step %d is skipped, and later ones may be, too",
                *(self._every, step),
            )

    def end(self, own: OwnState | None) -> None:
        """The session ends. Blocks: until everything is written.

        Args:
            own: this rank's state for a last checkpoint; None after a failure, which takes none.
        """
        if own is None:
            if self._thread is not None:
                self._thread.join(AFTER_FAILURE)
            return
        if own.steps != self._newest:
            self._join()
            self._ends = True
            self.take(own)
        elif own.steps == self._due:
            # It was due here, and may have been skipped because the previous one was still being written.
            self._join()
            if self._is_missing(own.steps):
                self._ends = True
                self._take(own, f"{own.steps}/again")
        self._join()

    def close(self) -> None:
        """End the connection to the other ranks, after :meth:`end`. The thread that writes has its own."""
        if self._board is not None:
            self._board.close()

    def _is_missing(self, step: int) -> bool:
        """Whether the checkpoint of this step is missing. The same on all ranks that write a part. Blocks: until rank 0 knows."""
        if self._rank == 0:
            is_missing = self._written != step
            if self._is_sharded:
                self._post(f"{step}/written", b"no" if is_missing else b"yes")
            return is_missing
        if not self._is_sharded:
            return True  # leave the note again
        assert self._board is not None
        try:
            return self._board.await_note(f"{step}/written", PARTS) == b"no"
        except Exception as error:  # noqa: BLE001  of any store
            _log.debug("rank 0 has not said whether step %d is written: %s", step, error)
            return False

    def _join(self) -> None:
        """Wait until nothing is being written. If that takes long, say so."""
        if self._thread is None:
            return
        self._thread.join(SILENCE)
        if self._is_writing():
            _log.warning(
                "rank %d is still writing the checkpoint of step %d to %s; the session ends once that is done",
                *(self._rank, self._being_written, self._storage),
            )
            self._thread.join()

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _post(self, key: str, note: bytes, board: Board | None = None) -> None:
        board = board or self._board
        assert board is not None
        try:
            board.post(key, note)
            self._posted.append(key)
            # Rank 0 is at most one step away, so it has read the older notes or skipped their checkpoints.
            if len(self._posted) > 8:
                board.drop(self._posted.pop(0))
        except Exception as error:  # noqa: BLE001  of any store; rank 0 reports that the checkpoint is skipped
            _log.debug("rank %d could not leave its note %s: %s", self._rank, key, error)

    # -- in the background ------------------------------------------------------------------------

    def _write(self, own: OwnState, key: str) -> None:
        step = own.steps
        try:
            self._write_one(own, key)
        except _StillWriting:
            self._tell_slow(step)
            self._remove_rest(name_of(step))
        except Exception as error:  # noqa: BLE001  whatever it is, training goes on
            what, then = "checkpoint", "training goes on"
            if self._ends:
                what, then = "last checkpoint", f"the one before is of step {self._written}"
                if self._written < 0:
                    then = "this run has written no other"
            _log.warning(
                "the %s of step %d was not written to %s: %s; %s",
                *(what, step, self._storage, error, then),
            )
            self._remove_rest(name_of(step))
        else:
            # The checkpoint is complete: if the folder cannot be listed now, that is no reason to remove it.
            self._prune(name_of(step))
        self._tried += 1

    def _write_one(self, own: OwnState, key: str) -> None:
        from . import checkpoint_files

        started = clock.MONOTONIC.now()
        name = name_of(own.steps)
        owns = [own.pack(), *self._notes(f"{key}/%d", NOTES)]
        structure = dict(self._copy.structure)
        nested = dict(self._copy.nested)
        ranks = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in owns]
        structure[checkpoint_files.SESSION] = {
            "ranks": [
                [TENSOR, f"{checkpoint_files.SESSION}.ranks.{rank}"] for rank in range(len(ranks))
            ],
            "flags": self._flags,
            "layouts": list(self._layouts),
        }
        nested[checkpoint_files.SESSION] = {
            "ranks": ranks,
            "structure": checkpoint_files.packed(structure),
        }
        files = checkpoint_files.write(
            self._storage,
            name,
            nested,
            (lambda: self._parts(key)) if self._is_sharded else None,
        )
        record = Record(
            step=own.steps,
            epoch=own.place.epoch,
            batch=own.place.batch,
            ranks=len(owns),
            time=clock.wall(),
            objects=tuple(self._state.roles),
            files=files,
        )
        checkpoint_files.complete(self._storage, name, record)
        self._written = own.steps
        # A damaged checkpoint of this step has been replaced.
        self._passed_over -= {name}
        _log.info("checkpoint %s: %.2f s", name, clock.MONOTONIC.now() - started)

    def _write_part(self, own: OwnState, key: str) -> None:
        """On ranks other than 0: write the parts of sharded tensors, and tell rank 0 where they are."""
        from . import checkpoint_files

        assert self._new_board is not None
        try:
            part = checkpoint_files.write_part(
                self._storage, name_of(own.steps), self._copy.shards, self._rank
            )
            note = part.to_json()
        except Exception as error:  # noqa: BLE001  rank 0 says that the checkpoint is left out
            note = {"problem": str(error)}
        with closing(self._new_board()) as board:
            self._post(_part_key(key, self._rank), json.dumps(note).encode(), board)

    def _parts(self, key: str) -> list[Part]:
        from .checkpoint_files import Part

        found = []
        for number, note in enumerate(self._notes(_part_key(key, "%d"), PARTS), 1):
            record = json.loads(note)
            if "still writing" in record:
                raise _StillWriting
            if "problem" in record:
                raise ElasticError(f"rank {number} did not write its part: {record['problem']}")
            found.append(Part.from_json(record))
        return found

    def _notes(self, key: str, patience: float) -> list[bytes]:
        """Notes of the other ranks, in order."""
        if self._new_board is None:
            return []
        deadline = clock.Deadline(patience)
        found = []
        with closing(self._new_board()) as board:
            for rank in range(1, self._size):
                try:
                    found.append(board.await_note(key % rank, deadline.remaining() or 0.0))
                except Exception as error:
                    raise ElasticError(f"rank {rank} did not send its part ({error})") from error
        return found

    def _prune(self, written: str) -> None:
        try:
            # A checkpoint whose record cannot be read stays: the problem may be temporary.
            found = [each for each in entries(self._storage) if not each.problem]
        except Exception as error:  # noqa: BLE001  of any storage; the next one tries again
            _log.debug("old checkpoints at %s cannot be listed: %s", self._storage, error)
            return
        self._try_to_remove(
            to_remove(found, written=written, keep=self._keep, passed_over=self._passed_over)
        )

    def _remove_rest(self, name: str) -> None:
        """Remove what there is of a checkpoint that could not be written. A complete one of the same step stays."""
        try:
            self._storage.read(f"{name}/{RECORD}")
        except FileNotFoundError:
            self._try_to_remove([name])
        except Exception as error:  # noqa: BLE001  of any storage
            _log.debug(
                "it is not known whether %s at %s is complete: %s", name, self._storage, error
            )

    def _try_to_remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._storage.remove(name)
            except Exception as error:  # noqa: BLE001  the next one tries again
                _log.debug("%s at %s could not be removed: %s", name, self._storage, error)


def _part_key(key: str, rank: int | str) -> str:
    """The key of the note that says what a rank has written."""
    return f"{key}/{rank}/part"

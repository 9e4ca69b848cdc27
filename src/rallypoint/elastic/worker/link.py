"""What a worker in a session and its supervisor tell each other.

Worker to supervisor, one JSON record per line:

- ``{"kind": "kept expected"}``: the script imports this package before it forms groups, and so will probably enter a session.
- ``{"kind": "kept session", "generation": 0, "rank": 3, "sharded": false, "saves": false, "resizes": false}``: this worker is
  in a session and can be kept. At a first start the record carries a descriptor: the memory that outlives this process
  (:mod:`.memory`). ``sharded``: nobody else has this worker's state, so it is lost if that memory is lost. ``saves``: it takes a
  last checkpoint if the job is told to stop. ``resizes``: it can continue with another number of ranks.
- ``{"kind": "kept fixed"}``: this worker can no longer continue with another number of ranks.
- ``{"kind": "kept spare", "bound": "train.py:7 asks for the rank"}``: this worker has no place yet, and waits for one.
  ``bound``: why it can only be the rank that it has run the set-up as; empty if it can be any.
- ``{"kind": "kept memory"}``: carries a descriptor: a newcomer's memory, if the lost process's was lost with its node.
- ``{"kind": "kept recovered", ...}``: what a recovery has cost.
- ``{"kind": "kept left"}``: the session has ended without an error.
- ``{"kind": "kept failed", "step": 1204}``: an exception of this rank's own ends the session, in this step.
- ``{"kind": "kept refused"}``: the sessions do not match or cannot be kept: this process exits, as any in its place would.
  ``record_lost``: true if that is because the record of a set-up was lost with nodes.

Supervisor to worker:

- ``{"kind": "go", "generation": 0, "host": "127.0.0.1", "port": 29500}``: answers ``session``. Carries the descriptor of the
  memory if this process takes over a lost rank.
- ``{"kind": "told"}``: this node is told to stop: a SIGTERM to this process is held until the next record.
- ``{"kind": "stop"}``: the job is told to stop: take a last checkpoint, and exit.
- ``{"kind": "end"}``: the time for that is over.
- ``{"kind": "become", "env": {"RANK": "3", …}}``: a spare gets a place: these are its variables, and the record carries the
  descriptors of its stdout and stderr.
- ``{"kind": "hold"}``: a node is lost, and the supervisors meet again: wait for the next record, however long it takes.
- ``{"kind": "lost", "generation": 1, "ranks": [3], "why": "…", "host": …, "port": …}``: meet the others in this generation. This
  record and ``go`` have a ``place`` (``{"RANK": "1", "WORLD_SIZE": "2", …}``) if the number of ranks has changed.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rallypoint._core import clock, supervisor_line
from rallypoint.errors import ElasticError

from .termination import Termination, Word


# Seconds until the old connections are shut again: once more in any case, and as long as this process waits on them.
AGAIN = 0.25
# Records about the end of the job.
WORDS = {each.value for each in Word}
# Seconds that the supervisor may take to answer.
ANSWER_PATIENCE = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A generation to meet in, and why there is one."""

    generation: int
    host: str
    port: int
    ranks: tuple[int, ...] = ()
    why: str = ""
    at: float = 0.0
    is_loss: bool = False
    place: Mapping[str, str] = field(default_factory=dict)


class Link:
    """The line to the supervisor.

    Args:
        on_loss: called in the link's thread as soon as the supervisor reports a loss; must not block.
    """

    def __init__(self, on_loss: Callable[[Notice], None]) -> None:
        fd = supervisor_line.held()
        assert fd is not None, "only a worker has a supervisor"
        self._socket = socket.socket(fileno=os.dup(fd))
        self._pid = os.getpid()
        self._on_loss = on_loss
        self._changed = threading.Condition()
        self._newest: Notice | None = None
        self._memory: int | None = None
        self._place: tuple[dict[str, str], list[int]] | None = None  # a spare's, once it has one
        self._awaits_place = False
        self._given: list[int] = []
        self._is_over = False
        self._met = -1
        self._is_held = False
        self._is_cut_again = False
        self.is_stopping = False  # the job is told to stop
        self.termination = Termination()
        self._thread = threading.Thread(target=self._listen, name="rally-elastic", daemon=True)
        self._thread.start()

    def enter(
        self,
        generation: int,
        rank: int,
        memory: int | None,
        *,
        sharded: bool,
        saves: bool = False,
        resizes: bool = False,
    ) -> int | None:
        """Tell the supervisor that this worker can be kept. Blocks: until it answers.

        Args:
            memory: the descriptor of this rank's memory, if this process has created it.
            sharded: no other rank has this one's state.
            saves: this process takes a last checkpoint if the job is told to stop.
            resizes: it can continue with another number of ranks.
        Returns:
            The descriptor of the lost rank's memory, if this process takes that rank over and the memory still exists.
        Raises:
            ElasticError: the supervisor does not answer.
        """
        record = {
            "kind": "kept session",
            "generation": generation,
            "rank": rank,
            "sharded": sharded,
            "saves": saves,
            "resizes": resizes,
        }
        data = json.dumps(record).encode() + b"\n"
        if memory is None:
            self._socket.sendall(data)
        else:
            socket.send_fds(self._socket, [data], [memory])
        if self.wait(-1, ANSWER_PATIENCE) is None:
            raise ElasticError("the supervisor does not answer; is it the same rallypoint version?")
        taken, self._memory = self._memory, None
        return taken

    def await_place(self, why_bound: str) -> tuple[dict[str, str], list[int]]:
        """Tell the supervisor that this spare waits. Blocks: until it gets a place.

        Returns:
            The place's variables, and the descriptors of its stdout and stderr.
        Raises:
            ElasticError: the supervisor is gone.
        """
        self._awaits_place = True
        self.tell({"kind": "kept spare", "bound": why_bound})
        with self._changed:
            while self._place is None:
                if self._is_over:
                    raise ElasticError("the supervisor of this spare is gone")
                self._changed.wait()
            return self._place

    def tell(self, record: dict[str, Any]) -> None:
        """Send a record. A supervisor that is gone is not an error: this process ends with it."""
        if os.getpid() != self._pid:
            return
        try:
            self._socket.sendall(json.dumps(record).encode() + b"\n")
        except OSError:
            pass

    @property
    def newest(self) -> Notice | None:
        return self._newest

    def give(self, memory: int) -> None:
        """Give the supervisor the descriptor of this rank's memory, as the lost process's memory was lost with its node."""
        record = {"kind": "kept memory"}
        socket.send_fds(self._socket, [json.dumps(record).encode() + b"\n"], [memory])

    def meet(self, generation: int) -> None:
        """This process is about to meet the others in this generation, and no longer waits on older connections."""
        self._met = generation

    def wait(
        self, after: int, timeout: float, on_hold: Callable[[], None] | None = None
    ) -> Notice | None:
        """The newest notice, if its generation is later than this one. Blocks: until there is one, or the time is over.

        Args:
            after: a generation.
            timeout: in seconds; not counted once the supervisor has said that there will be a notice.
            on_hold: called when it has, and once more :data:`AGAIN` later.
        """

        def has_come() -> bool:
            return self._is_over or self._is_later(after)

        with self._changed:
            self._changed.wait_for(lambda: has_come() or self._is_held, timeout)
            is_held = self._is_held
        for patience in (AGAIN, None) if is_held else ():
            if on_hold is not None and not has_come():
                on_hold()  # without the lock: it may take a moment
            with self._changed:
                self._changed.wait_for(has_come, patience)
        return self._newest if self._is_later(after) else None

    def _is_later(self, after: int) -> bool:
        return self._newest is not None and self._newest.generation > after

    def await_end(self, timeout: float) -> None:
        """Wait to be ended by the supervisor. Blocks: until the time is over, or the supervisor is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, timeout)

    def _listen(self) -> None:
        data = b""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while True:
            newest = self._newest
            if newest is not None and self._is_to_cut(newest) and not poller.poll(AGAIN * 1000):
                self._is_cut_again = True
                self._on_loss(newest)
                continue
            try:
                more, fds, _, _ = socket.recv_fds(self._socket, 65536, 4)
            except OSError:
                more, fds = b"", []
            if not more:
                break
            if self._awaits_place and fds:
                self._given, fds = fds, []
            for fd in fds:
                if self._memory is not None:
                    os.close(self._memory)
                self._memory = fd
            *lines, data = (data + more).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _is_to_cut(self, newest: Notice) -> bool:
        # A collective may have started at the moment when the connections were shut.
        is_unheeded = self._met < newest.generation
        return newest.is_loss and (is_unheeded or not self._is_cut_again)

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] in WORDS:
            word = Word(record["kind"])
            self.is_stopping = self.is_stopping or word is Word.STOP
            self.termination.heed(word)
            return
        if record["kind"] == "become":
            with self._changed:
                self._place, self._awaits_place = (record["env"], self._given), False
                self._changed.notify_all()
            return
        if record["kind"] == "hold":
            with self._changed:
                self._is_held = True
                self._changed.notify_all()
            return
        notice = Notice(
            generation=int(record["generation"]),
            host=str(record["host"]),
            port=int(record["port"]),
            ranks=tuple(record.get("ranks", ())),
            why=str(record.get("why", "")),
            at=clock.MONOTONIC.now(),
            is_loss=record["kind"] == "lost",
            place=record.get("place", {}),
        )
        with self._changed:
            if self._newest is None or notice.generation >= self._newest.generation:
                self._newest = notice
            self._is_held = self._is_held and not notice.is_loss
            self._changed.notify_all()
        # Last: a thread that starts to form an older generation right now either sees the newer notice, or is seen here.
        if notice.is_loss:
            self._is_cut_again = False
            self._on_loss(notice)

"""Detects a job that hangs: nothing moves anywhere, and some ranks wait in a collective, or others have ended.

Every supervisor notes what its workers use, which costs them nothing. If those of node 0 idle for a while, its
supervisor asks the others. If all stand still, it reads the stacks and reports what it finds: at once if a collective
has been pending for long; if only the stacks show it, once a second look confirms it. Until it has found the ranks that
the others wait for, it keeps looking.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rallypoint import events
from rallypoint._core import clock, side_thread
from rallypoint.control import usage
from rallypoint.errors import RallyError
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Worker

from .stillness import Standstill, Stillness


if TYPE_CHECKING:
    from rallypoint.control.stacks.hang_report import Hang

# How many looks there are in the time after which a job counts as hanging.
LOOKS = 4
# If some workers are busy, the others may wait this many times longer: an evaluation on one rank takes its time.
LONGER = 3
# Long steps count for at most this many seconds: a script may count epochs.
MOST = 600.0
# How long the answers of other nodes, and stacks, may take.
PATIENCE = 10.0
# After a look without result, the next one is at most this many seconds away: a job may idle for hours with good reason.
LONGEST = 600.0
# How long workers may take to say how many collectives they have begun.
COUNT_PATIENCE = 0.5

_log = logging.getLogger(__name__)

# Asks all nodes; see :class:`.job_questions.JobQuestions`.
Ask = Callable[[Mapping[str, Any]], Callable[[], Mapping[str, Any]]]


class HangWatch:
    """Watches the workers of one node. Called in the supervisor's loop.

    Args:
        after: seconds without movement after which a job hangs.
        say: prints for people.
        steps: at least this many of the usual steps that workers report must pass, but not more than :data:`MOST` seconds.
        shows_stacks: whether it prints where every worker is, or only which ranks are missing.
    """

    def __init__(
        self,
        after: float,
        say: Callable[[str], None],
        steps: int = 0,
        *,
        shows_stacks: bool = True,
    ) -> None:
        self._found: tuple[int, str] | None = None  # generation, and why
        self._told: tuple[int, Hang] | None = None  # generation; since then, nothing has moved
        self._doubtful: Hang | None = None  # found by stacks alone; another look must confirm it
        self.interval = after / LOOKS
        self._least, self._steps = after, steps
        self._after = after
        self._say = say
        self._shows_stacks = shows_stacks
        self._stillness = Stillness()
        self._standstill = Standstill()
        self._frozen = (
            0.0  # for how many seconds no worker had begun a collective, at the last look
        )
        self._quiet_until = 0.0  # no look before then
        self._others_move = False  # as the last look found
        self._asked_at = 0.0
        self._next_wait = after

    def still(self) -> dict[int, float]:
        """By rank: for how many seconds a worker of this node has done nothing."""
        return self._stillness.still(clock.MONOTONIC.now())

    def hanging(self, generation: int) -> str:
        """Why this generation hangs, if it does, as far as the last look could tell."""
        found, self._found = self._found, None
        return found[1] if found is not None and found[0] == generation else ""

    def hang(self, generation: int) -> Hang | None:
        """What was reported of this generation, if nothing has moved since."""
        told = self._told
        return told[1] if told is not None and told[0] == generation else None

    def look(self, workers: Iterable[Worker], ready: RoundReady, ask: Ask) -> None:
        """Note what the workers use, and report if the job hangs.

        Args:
            workers: this node's workers.
            ready: the round.
            ask: asks all nodes.
        """
        workers = list(workers)
        self._after = self._needed(workers)
        alive = [each for each in workers if each.status is None and each.pid]
        found = {each.ranks.rank: {"pid": each.pid, **usage.usage(each.pid)} for each in alive}
        still = self._stillness.look(clock.MONOTONIC.now(), found)
        # If all workers of this node have ended, those of other nodes may still wait for them.
        none_left = bool(workers) and all(each.status is not None for each in workers)
        everybody = none_left or (bool(still) and min(still.values()) >= self._after)
        many = bool(still) and sorted(still.values())[len(still) // 2] >= LONGER * self._after
        # A worker that waits in CUDA keeps a core busy.
        frozen = self._frozen >= LONGER * self._after
        if (not everybody and not many and not frozen) or self._has_moved():
            self._quiet_until, self._next_wait = 0.0, self._after
            self._doubtful = self._told = None
        world_size = workers[0].ranks.world_size if workers else 0
        if ready.node_rank != 0 or world_size < 2:
            return
        if (not everybody and not many) or self._told or math.isinf(self._quiet_until):
            lines = side_thread.duplicates({each.pid: each.questions_fd for each in alive})
            if lines is not None and not self._begin(partial(self._count, lines)):
                side_thread.close(lines)
        if clock.MONOTONIC.now() < self._quiet_until or not (everybody or many or frozen):
            return
        self._quiet_until, self._asked_at = math.inf, clock.MONOTONIC.now()  # it is reported once
        question: dict[str, Any] = {"ask": "stacks", "patience": PATIENCE}
        # Those of other nodes may be at work, though nobody of this one is.
        working = not everybody or (many and self._others_move)
        self._others_move = False
        if not working:
            # The other nodes look at other times.
            question["if_still"] = self._after - self.interval
        seconds = LONGER * self._after if working else self._after
        try:
            stacks = ask(question)
        except OSError:  # no descriptor is left
            self._look_again()
            return
        by_stacks = everybody or many
        begun = self._begin(
            lambda: self._find_out(
                ready.generation, world_size, seconds, working, by_stacks, stacks
            )
        )
        if not begun:
            self._look_again()

    def _has_moved(self) -> bool:
        """Whether a collective has begun since the last question: steps may need so little CPU that they do not show."""
        moved_at = self._standstill.moved_at
        if moved_at is None or not (self._told or math.isinf(self._quiet_until)):
            return False
        return moved_at > self._asked_at

    def _needed(self, workers: Iterable[Worker]) -> float:
        """After how many seconds without movement these workers hang."""
        if not self._steps:
            return self._least
        rates = [found["rate"] for each in workers if (found := each.progress()) is not None]
        usual = max((1 / rate for rate in rates if rate), default=0.0)
        return max(self._least, min(self._steps * usual, MOST))

    def _begin(self, work: Callable[[], None]) -> bool:
        return side_thread.begin(work, "rally-hang")

    def _count(self, lines: Mapping[int, int]) -> None:
        """Note how many collectives the workers have begun. Closes the descriptors."""
        from rallypoint.control.collectives import (
            collective_probe,  # a launch need not wait for its import
        )

        try:
            begun = collective_probe.begun(lines, COUNT_PATIENCE)
        finally:
            side_thread.close(lines)
        self._frozen = self._standstill.look(clock.MONOTONIC.now(), lines.keys(), begun)

    def _look_again(self) -> None:
        """Schedule another look. This one found nothing: a busy host may have kept the workers from answering."""
        self._quiet_until = clock.MONOTONIC.now() + self._next_wait
        self._next_wait = min(2 * self._next_wait, LONGEST)

    def _find_out(
        self,
        generation: int,
        world_size: int,
        seconds: float,
        working: bool,
        by_stacks: bool,
        stacks: Callable[[], Mapping[str, Any]],
    ) -> None:
        from rallypoint.control.stacks import hang_report  # a launch need not wait for its import

        try:
            found = stacks()
        except (RallyError, OSError, ValueError) as error:
            _log.info("cannot find out whether the job hangs: %s", error)
            self._look_again()
            return
        if found["moving"]:
            self._quiet_until, self._told = 0.0, None
            self._others_move = True
            return
        doubtful = self._doubtful
        hang = hang_report.explain(
            found["processes"],
            seconds,
            world_size,
            ended=found["ended"],
            unheard=found["unheard"],
            working=working,
            by_stacks=by_stacks,
        )
        if hang is None:
            self._told = None
            self._look_again()
            return
        if not hang.confirms(doubtful):
            self._doubtful = hang
            if doubtful is None:
                # By then, steps that go on will show. A call may take longer.
                wait = self.interval / 2 if hang.is_certain else self._after
                self._quiet_until = clock.MONOTONIC.now() + wait
            else:
                self._look_again()  # the steps do go on, and need little CPU
            return
        if not hang.missing:
            self._look_again()  # a node too busy to answer may have them
            if self.hang(generation) is not None:
                return
        why = hang.text.partition("\n")[0]
        self._say(hang.text if self._shows_stacks else why)
        self._told = generation, hang
        if hang.is_certain:
            self._found = generation, why
        events.emit(
            events.JobHangs(
                generation=generation,
                missing=hang.missing,
                waiting=hang.waiting,
                seconds=seconds,
            )
        )

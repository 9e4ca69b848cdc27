"""Reports which ranks of this node are slow: the others wait for them at collectives, for a while and by more than a little.

Three times in that while, the workers of this node are asked when they entered their last collectives. A thread that they
already have gives the answer. Everything else is read from /proc, the more expensive parts only once a rank is slow.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rallypoint import events
from rallypoint._core import clock, side_thread
from rallypoint.launch.generation import Worker


if TYPE_CHECKING:
    from rallypoint.control.slowness.lateness import Lateness
    from rallypoint.control.slowness.slow_ranks import SlowRanks
    from rallypoint.control.slowness.surroundings import Counters

# How many looks there are in the time after which a rank is slow.
LOOKS = 3
# Looks are this many times rarer while no rank is late: torch takes up to 35 ms to write down 2000 NCCL calls, and the
# script stands still meanwhile.
RARER = 8
# How long workers may take to answer.
PATIENCE = 1.0
# How often, and for how many seconds, a slow rank is asked where it is.
PLACES, PLACES_TIME = 10, 1.0


@dataclass(slots=True)
class _Slow:
    """A rank that is or was slow: since when, when last, until when if it no longer is, and by which share of the time."""

    since: float
    share: float
    last: float
    until: float | None = None


class SlowWatch:
    """Watches the workers of one node. Called in the supervisor's loop; looks in a thread.

    Args:
        after: seconds after which a rank is slow.
        say: prints for people.
    """

    def __init__(self, after: float, say: Callable[[str], None]) -> None:
        self.interval = after / LOOKS
        self._after = after
        self._say = say
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._generation = -1
        self._ranks: SlowRanks | None = None
        self._counters: dict[tuple[int, int], Counters] = {}
        self._slow: list[tuple[int, _Slow]] = []
        self._skipped = self._to_skip = 0

    def look(self, workers: Iterable[Worker], generation: int) -> None:
        """Look at the workers of this node, unless the last look is still going on, or no rank was late recently."""
        alive = [each for each in workers if each.status is None and each.pid]
        if generation == self._generation and self._skipped < self._to_skip:
            self._skipped += 1
            return
        if len(alive) < 2 or not self._looking.acquire(blocking=False):
            return
        self._skipped = 0
        if generation != self._generation:
            self._generation, self._ranks = generation, None
            self._to_skip = 0
            self._end_all()
        ranks = {each.pid: each.ranks.rank for each in alive}
        lines = side_thread.duplicates({each.pid: each.questions_fd for each in alive})
        if lines is None:
            self._looking.release()
            return

        def look() -> None:
            try:
                self._look(generation, ranks, lines)
            finally:
                side_thread.close(lines)
                self._looking.release()

        if not side_thread.begin(look, "rally-slow"):
            side_thread.close(lines)
            self._looking.release()

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()

    def told(self) -> dict[int, dict[str, Any]]:
        """By rank, as far as known: ``step`` (seconds), ``late`` and ``waits`` (shares of it), and whether it is ``slow``."""
        ranks = self._ranks
        if ranks is None:
            return {}
        slow = set(ranks.slow)
        return {
            rank: {
                "step": round(each.step, 6),
                "late": round(each.share, 4),
                "waits": round(each.waiting, 4),
                "slow": rank in slow,
            }
            for rank, each in ranks.last.items()
        }

    def summary(self) -> tuple[str, ...]:
        """Which ranks were slow, in words, and for how long."""
        from rallypoint.control.slowness import slow_words  # a launch need not wait for its import

        now = clock.MONOTONIC.now()
        return tuple(
            slow_words.was_slow(rank, each.share, (each.until or now) - each.since)
            for rank, each in self._slow
        )

    def _end_all(self) -> None:
        for _, each in self._slow:
            each.until = each.until or clock.MONOTONIC.now()

    def _look(self, generation: int, ranks: Mapping[int, int], lines: Mapping[int, int]) -> None:
        from rallypoint.control.collectives import collective_probe  # as above
        from rallypoint.control.slowness import lateness, slow_ranks, surroundings

        if self._ranks is None:
            self._ranks = slow_ranks.SlowRanks(self._after)
        told = collective_probe.entered(lines, PATIENCE)
        known = {ranks[pid]: groups for pid, groups in told.items()}
        found = lateness.lateness(known, self._after)
        before, now = self._counters, {}
        for pid, rank in ranks.items():
            if (counted := surroundings.counters(pid)) is not None:
                now[rank, pid] = counted
        self._counters = now
        shares = [
            surroundings.between(before[each], counted).cpu_wait
            for each, counted in now.items()
            if each in before
        ]
        contention = sorted(shares)[len(shares) // 2] if shares else 0.0
        is_even = not any(slow_ranks.makes_wait(each, contention) for each in found.values())
        self._to_skip = (
            min(2 * self._to_skip + 1, RARER - 1) if is_even and not self._ranks.slow else 0
        )
        at = clock.MONOTONIC.now()
        news = self._ranks.look(at, found, contention)
        for rank, each in self._slow:
            if each.until is None and rank in found:
                if slow_ranks.makes_wait(found[rank], contention):
                    each.share, each.last = found[rank].share, at
                each.until = each.last if rank in news.over else None
        for rank in news.over:
            self._say(f"rank {rank} is no longer slow")
        pids = {rank: pid for pid, rank in ranks.items()}
        for rank in news.slow:
            self._slow.append((rank, _Slow(at - self._after, found[rank].share, at)))
            self._explain(generation, rank, found[rank], pids, before, lines)

    def _explain(
        self,
        generation: int,
        rank: int,
        found: Lateness,
        pids: Mapping[int, int],
        before: Mapping[tuple[int, int], Counters],
        lines: Mapping[int, int],
    ) -> None:
        """Find out what differs about a slow rank, and report it."""
        from dataclasses import replace

        from rallypoint.control.slowness import differences, slow_words, surroundings

        ran, began = surroundings.running(), clock.MONOTONIC.now()
        place = self._usual_place(pids[rank], lines)
        passed = max(1e-3, clock.MONOTONIC.now() - began)
        others = {
            each: surroundings.between(before[each, pid], counted)
            for each, pid in pids.items()
            if (each, pid) in before and (counted := surroundings.counters(pid)) is not None
        }
        differ: list[str] = []
        slow = others.pop(rank, None)
        if slow is not None:
            beside = surroundings.neighbours(
                slow.cpus, {os.getpid(), pids[rank]}, ran, surroundings.running(), passed
            )
            slow = surroundings.with_memory(pids[rank], replace(slow, neighbours=beside))
            near = [surroundings.with_memory(pids[each], one) for each, one in others.items()]
            differ = differences.differences(slow, near)
        events.emit(
            events.WorkerSlow(
                generation=generation,
                rank=rank,
                share=round(found.share, 4),
                late=round(found.late, 6),
                step=round(found.step, 6),
                place=place,
                differences="; ".join(differ),
            )
        )
        self._say(slow_words.is_slow(rank, found, place, differ))

    def _usual_place(self, slow: int, lines: Mapping[int, int]) -> str:
        """Where a worker's main thread is most often in the next second, beyond how often the others are there."""
        from rallypoint.control.collectives import collective_probe
        from rallypoint.control.slowness import places

        seen: dict[int, Counter[str]] = {}
        asked = dict(lines)
        for _ in range(PLACES):
            for pid, place in collective_probe.places(asked, PATIENCE).items():
                seen.setdefault(pid, Counter())[place] += 1
            # A worker that does not answer would be waited for each time.
            asked = {pid: asked[pid] for pid in asked if pid in seen or pid == slow}
            if self._ended.wait(PLACES_TIME / PLACES):
                break
        return places.own_place(seen.pop(slow, {}), list(seen.values()))

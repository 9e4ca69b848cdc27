"""The step that a worker is in, as it reports itself: numbers in memory that its supervisor reads without asking.

The worker shares a page of memory when it reports its first step (:mod:`.shared_page`). From then on a report is a write to it.

Between two batches, the processor's caches hold the model. Code that runs once a step comes from memory, and takes ten times
longer than in a loop of its own: 70 us for a whole report. So that is written ten times a second, and only the step in between.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from time import monotonic
from typing import Any, NamedTuple, SupportsFloat, SupportsInt

from . import shared_page


# The name of the page.
NAME = "rally-steps"
# A name is cut after this many bytes; metrics beyond the limit are left out: everything fits in the page.
MAX_METRICS, MAX_NAME = 16, 40
# Seconds after which a step counts for 1/e in the rate.
MEMORY = 20.0
# Steps are late when the last one is this many times longer ago than usual, and at least this many seconds.
LATE, LATE_SECONDS = 3.0, 10.0
# Who reports, in order of how much each knows about the script: join.batches, a session, the script itself.
BY_LOOP, BY_SESSION, BY_SCRIPT = 1, 2, 3
# Step, total (-1: unknown), time on this host's monotonic clock, steps and seconds of the rate, number of metrics.
_BODY = struct.Struct("=qqdddI")
# At the end of the page, without a checksum: a step, its time, and the step again. Native: one write a number.
_LATEST = struct.Struct("qdq")
_AT = shared_page.SIZE - _LATEST.size
# The same places among numbers of eight bytes.
_STEP, _WHEN, _AGAIN = (_AT // 8 + each for each in range(3))
# Seconds from one whole report to the next.
WHOLE_EVERY = 0.1


class Steps(NamedTuple):  # importing dataclasses would take longer than this package
    """What a worker has reported.

    Args:
        step, total: as it counts them; None: it does not know the total.
        at: when it reached this step, on the host's monotonic clock.
        rate: recent steps per second; None before the second step.
        metrics: its numbers, in its order.
    """

    step: int
    total: int | None
    at: float
    rate: float | None
    metrics: dict[str, float]

    def facts(self, now: float) -> dict[str, Any]:
        """The same for those who ask, as JSON values.

        Args:
            now: the time on the host's monotonic clock.
        """
        ago = max(0.0, now - self.at)
        is_late = self.rate is not None and ago > max(LATE_SECONDS, LATE / self.rate)
        left = None
        if self.rate and self.total is not None and not is_late:
            left = round(max(0.0, (self.total - self.step) / self.rate - ago), 1)
        return {
            "step": self.step,
            "total": self.total,
            "rate": None if self.rate is None else round(self.rate, 6),
            "seconds_ago": round(ago, 3),
            "late": is_late,
            "seconds_left": left,
            # JSON has no NaN.
            "metrics": {
                name: value if math.isfinite(value) else str(value)
                for name, value in self.metrics.items()
            },
        }


def read(fd: int) -> Steps | None:
    """What a worker has reported; None if it has reported nothing, or it cannot be read just now."""
    content = shared_page.read(fd)
    whole = None if content is None or len(content) < _BODY.size else _parsed(content)
    if whole is None:
        return None
    try:
        step, at, again = _LATEST.unpack(os.pread(fd, _LATEST.size, _AT))
    except (OSError, struct.error):
        return whole
    is_newer = step == again and step > whole.step and math.isfinite(at)
    return whole._replace(step=step, at=at) if is_newer else whole


def _parsed(body: bytes) -> Steps | None:
    step, total, at, steps, seconds, count = _BODY.unpack_from(body)
    end = _BODY.size + 8 * count
    names = body[end:].decode(errors="replace").split("\n")
    if count > MAX_METRICS or len(body) < end or (count and len(names) != count):
        return None  # written by somebody else
    values = struct.unpack_from(f"={count}d", body, _BODY.size)
    return Steps(
        step=step,
        total=None if total < 0 else total,
        at=at,
        rate=steps / seconds if seconds > 0 else None,
        metrics=dict(zip(names, values, strict=False)),
    )


class Reporter:
    """The worker's side.

    Args:
        memory: the page.

    Attributes:
        given: how many metrics the last whole report was given.
    """

    # Used in each step, and found faster than in a dictionary.
    __slots__ = (
        *("_at", "_by", "_floats", "_integers", "_latest", "_memory", "_metrics", "_names"),
        *("_seconds", "_step", "_steps", "_whole_at", "given"),
    )

    def __init__(self, memory: mmap.mmap) -> None:
        self._by = BY_LOOP
        self._memory = memory
        # Writing through these takes half the time of `struct`.
        view = memoryview(memory)
        self._integers, self._floats = view.cast("q"), view.cast("d")
        self._step: int | None = None  # of the last whole report
        self._at = 0.0
        self._latest = -1  # of the last report
        self._whole_at = 0.0  # when the next whole report is due; 0: there is no rate yet
        self.given = 0
        self._steps = self._seconds = 0.0
        self._metrics: tuple[str, ...] = ()
        self._names = b""

    def note_step(self, by: int, step: object, total: object, now: float, given: int = 0) -> bool:
        """Write only the step; False if a whole report is due, or more than the step has changed."""
        if (
            now < self._whole_at
            and type(step) is int
            and self._latest < step < _LIMIT
            and step != total
            and given == self.given
            and by == self._by
        ):
            self._latest = step
            integers = self._integers
            integers[_STEP] = step
            self._floats[_WHEN] = now
            integers[_AGAIN] = step
            return True
        return False

    def note(
        self, by: int, step: int, total: int | None, metrics: dict[str, float], now: float
    ) -> None:
        """Write a whole report: this process has reached a step."""
        if by < self._by:
            return
        last = self._step
        if (
            last is None or step < self._latest or by > self._by
        ):  # the first one, or another loop starts
            self._steps = self._seconds = 0.0
            self._step, self._at, self._by = step, now, by
        elif step > last:
            # The same step once more: it started when it was first reported.
            at = now if step > self._latest else self._floats[_WHEN]
            passed = at - self._at
            decay = math.exp(-passed / MEMORY)
            self._steps = self._steps * decay + (step - last)
            self._seconds = self._seconds * decay + passed
            self._step, self._at = step, at
        self._latest, self._whole_at = step, now + WHOLE_EVERY if self._seconds else 0.0
        names = tuple(metrics)
        if names != self._metrics:
            self._metrics = names
            self._names = b"\n".join(_name(each) for each in names)
        body = _BODY.pack(
            step, -1 if total is None else total, self._at, self._steps, self._seconds, len(names)
        )
        if names:
            body += struct.pack(f"={len(names)}d", *metrics.values()) + self._names
        # First, so that an earlier loop's step is not taken for a later one of this loop.
        _LATEST.pack_into(self._memory, _AT, step, self._at, step)
        shared_page.write(self._memory, body)


def _name(text: str) -> bytes:
    return text.replace("\n", " ").encode()[:MAX_NAME].decode(errors="ignore").encode()


_LIMIT = 1 << 63
_reporter: Reporter | None = None


def progress(step: SupportsInt, total: SupportsInt | None = None, **metrics: SupportsFloat) -> None:
    """Report how far this worker is: for the progress bar of ``rally run``, ``rally ps``, ``rally top`` and metrics.

    Costs some 15 microseconds of a step. Without ``rally run``, and in children of a worker, it does nothing. Every rank may
    call it; the bar shows rank 0's. Not collective, never blocks.

    Args:
        step: the number of complete steps, in any unit that the script counts in. A smaller number than before starts a
            new loop.
        total: how many there will be, if known.
        metrics: numbers to show with it, such as ``loss=0.31``; at most 16. A tensor on a GPU is waited for, as ``float``
            does.

    The total and the metrics are taken ten times a second, and with the last step. What is not a number is left out: a
    message for people must not end a training run.
    """
    reporter = _reporter
    if reporter is not None and reporter.note_step(
        BY_SCRIPT, step, total, monotonic(), len(metrics)
    ):
        return
    reporter = _current()
    if reporter is None:
        return
    whole = _whole(step)
    if whole is not None:
        found = _numbers(metrics) if metrics else {}
        whole_total = None if total is None else _whole(total)
        reporter.note(BY_SCRIPT, whole, whole_total, found, monotonic())
        reporter.given = len(metrics)


def report(by: int, step: int, total: int | None = None) -> None:
    """The same, from parts of this package that count for scripts that do not call :func:`progress`.

    Args:
        by: :data:`BY_LOOP` or :data:`BY_SESSION`.
        step, total: see there.
    """
    now = monotonic()
    reporter = _reporter
    if reporter is not None and reporter.note_step(by, step, total, now):
        return
    reporter = _current()
    if reporter is not None:
        reporter.note(by, step, total, {}, now)


def _whole(value: SupportsInt) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if 0 <= number < _LIMIT else None


def _numbers(metrics: dict[str, SupportsFloat]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
        if len(found) == MAX_METRICS:
            break
    return found


def _current() -> Reporter | None:
    """This process's reporter; the first call makes it. None in a process that is not a worker."""
    global _reporter  # noqa: PLW0603  one process is one worker
    if _reporter is not None:
        return _reporter
    memory = shared_page.share(NAME)
    if memory is None:
        return None
    _reporter = Reporter(memory)
    return _reporter


def _forget() -> None:
    """A forked child's steps are not its parent's."""
    global _reporter  # noqa: PLW0603
    _reporter = None


os.register_at_fork(after_in_child=_forget)

"""Warnings about a script that works until a process is lost. Each is given once, before that happens."""

from __future__ import annotations

import gc
import inspect
import logging

import torch.distributed as dist

from .late_collectives import place_in_script


_log = logging.getLogger(__name__)


class Hints:
    """The hints of one session."""

    def __init__(self) -> None:
        self._has_asked = True  # for the position, since the last step
        self._loops: set[int] = set()
        self._said: set[str] = set()

    def ask_position(self) -> None:
        """The script asks for the position between two steps."""
        self._has_asked = True

    def begin_step(self) -> None:
        """A step begins outside any loop over batches. A loop around it must ask for the position."""
        if not self._has_asked:
            self._say(
                "%s begins a step, but the script has not asked for session.position since the step before. A count of its own (`for step in"
                " range(n)`) is wrong after a loss: an interrupted step does not count, and a new process begins at the present step."
                " Loop over session.batches(…), or write `while session.position < n:` around one step"
            )
        self._has_asked = False

    def begin_loop(self, number: int, batches: object) -> None:
        """A loop over batches begins. What counts them must be the session.

        Args:
            number: of the loop within its epoch.
            batches: the iterator that the script has got.
        """
        if number in self._loops:
            return
        self._loops.add(number)
        if any(type(each) is enumerate for each in gc.get_referrers(batches)):
            self._say(
                "%s counts batches with enumerate. That count is wrong after a loss: a batch that comes again is counted twice, and a new"
                " process begins to count at the present batch. If steps or functions depend on it, the ranks no longer match. Use"
                " session.batch_index"
            )

    def communicate(self, operation: str) -> None:
        """A collective of the script begins outside of a step."""
        self._say(
            "%s communicates (%s) outside of a step. If a process is lost there, the call raises MembershipChanged, and nothing"
            " repeats it. Put it into session.step(), or into a function for session.run()",
            operation,
        )

    def change_outside(self, what: str) -> None:
        """A step begins, and since the one before the script has changed what the session holds."""
        self._say(
            "before %s, the script has changed %s outside of a step. After a loss, some ranks change it once more, and the ranks differ"
            " from then on. Put it into session.step(), or into a function for session.run(), such as `session.run(scheduler.step)`",
            what,
        )

    def _say(self, text: str, *args: str) -> None:
        if text in self._said:
            return
        self._said.add(text)
        say(text, place_in_script(inspect.currentframe()) or "the script", *args)


def say(text: str, *args: object) -> None:
    """Warn the user of something that all ranks find: only rank 0 warns.

    Args:
        text: as for :meth:`logging.Logger.log`.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    _log.log(logging.WARNING if is_first else logging.DEBUG, "elastic.session: " + text, *args)

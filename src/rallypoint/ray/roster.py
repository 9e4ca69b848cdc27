"""The bundles of a job on Ray, and the job's state as they start, end and are lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Bundle:
    """A bundle as the driver knows it: requested, its node started, or its node ended.

    Args:
        started: whether its node is running, or has run.
        exit_code: its node's exit code; None until the node has ended.
        worker_failed: whether a worker is to blame for that exit code.
    """

    started: bool = False
    exit_code: int | None = None
    worker_failed: bool = False


@dataclass(slots=True)
class Roster:
    """The job's state as bundles start, end and are lost.

    Args:
        num_bundles: the number of bundles in the placement group.
        max_losses: how many losses are allowed in all.
    """

    num_bundles: int
    max_losses: int
    losses: int = 0
    bundles: list[Bundle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bundles = [Bundle() for _ in range(self.num_bundles)]

    def start(self, index: int) -> None:
        self.bundles[index].started = True

    def end(self, index: int, exit_code: int, *, worker_failed: bool) -> None:
        self.bundles[index].exit_code = exit_code
        self.bundles[index].worker_failed = worker_failed

    def lose(self, index: int) -> bool:
        """Record the loss. Returns whether to request the bundle again."""
        self.losses += 1
        self.bundles[index] = Bundle()
        return not self._over and self.losses <= self.max_losses

    @property
    def too_many_losses(self) -> bool:
        return self.losses > self.max_losses

    @property
    def _over(self) -> bool:
        return any(each.exit_code is not None for each in self.bundles)

    @property
    def running(self) -> Sequence[int]:
        """The bundles whose nodes are running."""
        found = enumerate(self.bundles)
        return [at for at, each in found if each.started and each.exit_code is None]

    @property
    def done(self) -> bool:
        """Whether the job has ended: some node has ended, and none is running. Bundles still requested are not needed."""
        return self._over and not self.running

    @property
    def exit_code(self) -> int:
        """The job's. A node that fails alone, with no worker to blame, has left the job, and the others may finish it."""
        for each in self.bundles:
            if each.worker_failed and each.exit_code:
                return each.exit_code
        codes = [each.exit_code for each in self.bundles if each.exit_code is not None]
        return 0 if 0 in codes else next(iter(codes), 1)

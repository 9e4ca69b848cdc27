"""The driver's metrics of a job. They appear beside Ray's own, with the tag ``job``.

Metrics of the workers (steps, losses, rpc) come from the nodes, with ``--metrics`` of ``rally run``.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from .roster import Roster


class JobMetrics:
    """The metrics of one job.

    Args:
        job: its name.
        roster: its bundles.
    """

    def __init__(self, job: str, roster: Roster) -> None:
        self._roster = roster
        self._counted = 0
        tags = {"job": job}
        self._running = Gauge(
            "rally_nodes_running",
            description="nodes that run workers of the job",
            tag_keys=("job",),
        )
        self._wanted = Gauge(
            "rally_nodes_wanted", description="nodes that the job asks for", tag_keys=("job",)
        )
        self._lost = Counter(
            "rally_nodes_lost", description="nodes that the job has lost", tag_keys=("job",)
        )
        for each in (self._running, self._wanted, self._lost):
            each.set_default_tags(tags)

    def update(self) -> None:
        """Report the current state of the bundles."""
        roster = self._roster
        self._running.set(len(roster.running))
        self._wanted.set(0 if roster.done else roster.num_bundles)
        if roster.losses > self._counted:
            self._lost.inc(roster.losses - self._counted)
            self._counted = roster.losses

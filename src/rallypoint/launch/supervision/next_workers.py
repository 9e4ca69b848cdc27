"""Workers that the fork server forks before they are needed, for jobs in which lost ones are replaced."""

from __future__ import annotations

from rallypoint.launch.server.channel import Channel


class NextWorkers:
    """Asks for such workers.

    Args:
        server: the line to the fork server.
    """

    def __init__(self, server: Channel) -> None:
        self._server = server
        self._count = 0

    def keep(self, count: int) -> None:
        """Keep this many ready: that many may be needed at once."""
        if count > self._count:
            self._count = count
            self._server.send({"do": "ahead", "count": count})

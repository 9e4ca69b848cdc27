"""Workers that the fork server has forked before they are needed, where lost ones are replaced."""

from __future__ import annotations

from rallypoint.launch.server.channel import Channel


class NextWorkers:
    """Asks for them.

    Args:
        server: the line to the fork server.
    """

    def __init__(self, server: Channel) -> None:
        self._server = server
        self._count = 0

    def keep(self, count: int) -> None:
        """So many may be needed at once."""
        if count > self._count:
            self._count = count
            self._server.send({"do": "ahead", "count": count})

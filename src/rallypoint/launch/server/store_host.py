"""The process that serves one generation's store.

Workers meet at a c10d ``TCPStore``. It is served by a process of its own, so rank 0 may end early,
and it is new in every generation, so no worker can read what an earlier generation wrote. The
supervisor has bound the socket already: its port is known before torch is imported anywhere, and
between "free" and "bound" there is no moment at which somebody else could take it. Workers that
connect before we serve wait in the socket's backlog.
"""

from __future__ import annotations

import signal
from datetime import timedelta

from rallypoint._core.resolver import without_name_servers


def serve(listen_fd: int, port: int) -> None:
    """Serve a store on an already listening socket until killed. Does not return."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it by *

    # A TCPStore server also makes itself a client: "localhost" is this very process.
    with without_name_servers():
        _store = TCPStore(
            "localhost",
            port,
            None,
            is_master=True,
            timeout=timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    while True:
        signal.pause()

"""The coordination of a job: with the other nodes, or alone."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.launch.config import LaunchConfig

from .interface import Coordination, LoneNode


def coordination_for(config: LaunchConfig, say: Callable[[str], None]) -> Coordination:
    """The connection to the other nodes, or a stand-in for it if there is only one node."""
    if config.num_nodes == 1 and config.rendezvous.plug_in is None:
        return LoneNode()
    from .peers import PeerNodes  # a job of one node does not pay for the import

    return PeerNodes(config, say)

"""Who is in this round, with which rank, over which store.

Handlers are made by the name of their backend (:data:`rendezvous_handler_registry`); :mod:`.registry` says how to add one.
"""

from rallypoint.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeout,
)

from .api import Member, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from .endpoint import Endpoint, HostPort, parse_endpoint
from .parameters import RendezvousParameters
from .registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    rendezvous_handler_registry,
)
from .store import Store


# torch's name for it: programs that catch it keep working.
RendezvousTimeoutError = RendezvousTimeout

__all__ = [
    "Endpoint",
    "HostPort",
    "Member",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeout",
    "RendezvousTimeoutError",
    "Store",
    "parse_endpoint",
    "rendezvous_handler_registry",
]

"""Which nodes are in this round, with which ranks, over which store.

:data:`rendezvous_handler_registry` makes a handler from the name of its backend. To add a backend, write a
:class:`Backend` that gives the job a :class:`Store`.
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
from .backend import Backend, Endpoint, HostPort, Meeting, Scheme
from .catalogue import parse_endpoint, register_backend
from .fixed_home import fixed_home
from .option import Option
from .parameters import RendezvousParameters
from .registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    rendezvous_handler_registry,
)
from .store import Store


# torch's name for it, so that programs that catch it keep working.
RendezvousTimeoutError = RendezvousTimeout

__all__ = [
    "Backend",
    "Endpoint",
    "HostPort",
    "Meeting",
    "Member",
    "Option",
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
    "Scheme",
    "Store",
    "fixed_home",
    "parse_endpoint",
    "register_backend",
    "rendezvous_handler_registry",
]

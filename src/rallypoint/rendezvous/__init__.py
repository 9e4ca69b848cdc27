"""Who is in this round, with which rank, over which store.

Membership is fixed: the number of nodes is given. :class:`StaticRendezvous` meets over c10d's ``TCPStore``.
"""

from .api import Member, RendezvousHandler, RendezvousInfo
from .static import StaticRendezvous
from .store import Store


__all__ = ["Member", "RendezvousHandler", "RendezvousInfo", "StaticRendezvous", "Store"]

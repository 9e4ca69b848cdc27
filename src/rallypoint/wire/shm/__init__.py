"""Large blocks of bytes for another process on this host, in memory that both map.

Theory of operation
-------------------
What is dear about a large tensor is not its bytes but its pages: a copy into memory that was never touched
runs at a tenth of the speed of one into memory that was. So memory is kept, and used again, newest first.

A **segment** is a nameless file in memory (``memfd``) that both ends map. It has no name in any file system, so
nothing is left over however the processes end; it does not count against ``/dev/shm``. Its descriptor travels
once, with the first message about it; then neither end keeps one open. A segment holds one **block** at a time.

Each connection has its own segments: what was ever mapped by one peer never carries another's data. What the
pools of a process share is only a ``Budget``.

Giving a block back takes no message. Beside the segments there is one **control page** per connection, a byte
for each segment, and the segment's number is the place of its byte:

    ============  ==================================================  ==============================
    byte          meaning                                             written by
    ============  ==================================================  ==============================
    0             free                                                receiver, when nothing uses it
    1             on its way: the message may not have been read yet  sender, in ``Pool.lease``
    2             gone: free, and its memory was given back           sender, in ``Pool.trim``
    3             held: something in the receiver uses the memory     receiver, in ``Mapped.view``
    5             going home: the receiver's answer hands it back     receiver, in ``Mapped.give_home``
                  with what is in it now
    ============  ==================================================  ==============================

A block that **goes home** is lent to the sender itself until its own program has let it go: what came, and is sent
back, is not copied a second time.

The sender looks at the page when it wants a block. A receiver that writes nonsense there harms what it receives
itself and nothing else: the page says when memory is free, never where it is.

Giving memory back takes no message either: the sender frees the pages of an idle file (``MADV_REMOVE``), however
many still map it; the receiver drops its mapping when it next hears of a new segment. The number of a segment
that is gone is used again, the lowest first, and another file is sent under it.

Pages are touched by whoever copies, not beforehand (``MAP_POPULATE``): populating costs what it saves, and a copy
by several threads touches pages in several.
"""

from __future__ import annotations

from .budget import Budget
from .control import MAX_SEGMENTS, Statistics
from .mapped import Mapped
from .pool import Block, Pool
from .segment import SMALLEST, capacity_for


__all__ = [
    "MAX_SEGMENTS",
    "SMALLEST",
    "Block",
    "Budget",
    "Mapped",
    "Pool",
    "Statistics",
    "capacity_for",
]

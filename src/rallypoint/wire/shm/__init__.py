"""Large blocks of bytes for another process on this host, in memory that both map.

Theory of operation
-------------------
The cost of a large tensor is in its pages: a copy into fresh memory has a tenth of the speed of one into memory that was
used before. So memory is kept and reused, most recently used first.

A **segment** is an anonymous file in memory (``memfd``) that both ends map. It has no name in a file system, so nothing
is left over however the processes end, and it does not count against ``/dev/shm``. Its descriptor is sent once, with the
first message about it; then neither end keeps one open. A segment holds one **block** at a time.

Each connection has its own segments, so memory that one peer has mapped never contains another's data. The pools of a
process share only a ``Budget``.

Blocks are returned without a message. Each connection has a **control page** with a byte for each segment, at the index
that is the segment's number:

    ============  ==================================================  ==============================
    byte          meaning                                             written by
    ============  ==================================================  ==============================
    0             free                                                receiver, when nothing uses it
    1             sent: the message may not have been read yet        sender, in ``Pool.lease``
    2             gone: free, and its memory was released             sender, in ``Pool.trim``
    3             held: something in the receiver uses the memory     receiver, in ``Mapped.view``
    5             going home: the receiver's answer returns the       receiver, in ``Mapped.give_home``
                  block with its present content
    ============  ==================================================  ==============================

A block that **goes home** is lent to the sender until the sender's program releases it: data that is received and sent
back is not copied a second time.

The sender reads the page when it needs a block. A receiver that writes wrong values can only damage the data it receives
itself: the page says when memory is free, never where it is.

Memory is released without a message, too. The sender frees the pages of an idle file (``MADV_REMOVE``), even while it is
mapped; the receiver drops its mapping when the next new segment arrives. The numbers of released segments are reused for
new files, lowest first.

Pages are touched by the copy, not beforehand (``MAP_POPULATE``): that would cost what it saves, while a copy with
several threads also touches pages in several.
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

"""Process groups that end after the C++ parts of the DistributedDataParallel modules that use them.

When ``main()`` calls ``destroy_process_group()`` and returns, its model is often the group's last owner. Whoever ends a Gloo group
waits for the group's threads. These may need the GIL, to let go of what the last backward pass has left with its collectives. torch
releases the GIL if Python ends the group; but a module's reducer, which is C++, keeps it, and the process would hang.
"""

from __future__ import annotations

import weakref
from typing import Any


def hold(net: Any) -> None:
    """Have Python let go of a DistributedDataParallel module's group after the module's reducer has done so.

    Call it again if the module gets another reducer.
    """
    # The second one owns the first one, too. Weak references to such objects are cleared after what is in C++.
    for owner in (net.reducer, net.logger):
        weakref.finalize(owner, _let_go, net.process_group).atexit = False


def _let_go(group: object) -> None:
    """Called with the last reference."""

"""Python's garbage collector in processes that import what workers need, and fork them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing by itself: imports make hundreds of thousands of objects that stay, and every collection visits all of them.

    ``gc.isenabled()`` remains as it is, and a module that sets thresholds of its own has its way.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)


def keep() -> None:
    """Keep what has been imported, and never visit it: for torch, which leaves about 1 MB that could be freed."""
    gc.freeze()


def settle() -> None:
    """Free what can be, and leave the rest out of later collections.

    The collector writes to the objects it visits, which would copy their pages in every worker.
    """
    gc.collect()
    gc.freeze()

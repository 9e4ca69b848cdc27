"""Python's garbage collector in processes that import what workers need, and fork them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Suspend automatic collection: imports make hundreds of thousands of objects that stay, and each run visits them all.

    ``gc.isenabled()`` does not change, and a module that sets its own thresholds keeps them.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)


def keep() -> None:
    """Exempt what has been imported from collection, garbage included: for torch, which leaves only about 1 MB of it."""
    gc.freeze()


def settle() -> None:
    """Free what can be freed, and exempt the rest from later collections.

    The collector writes to the objects it visits, which would copy their pages in every worker.
    """
    gc.collect()
    gc.freeze()

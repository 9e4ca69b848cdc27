"""Python's garbage collector in processes that import much, and fork others."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


# Seconds for which a thread keeps the interpreter's lock, if it does not wait for anything.
_LONG = 1000.0


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
    """Free what can be freed, exempt the rest from later collections, and prepare the names of modules for forks.

    The collector writes to the objects it visits, which would copy their pages in every worker.
    """
    gc.collect()
    _gather_names()
    gc.freeze()


def _gather_names() -> None:
    """Put the names in ``sys.modules`` next to each other in memory.

    Whoever looks through them counts references to each, which copies its page in a fork. They are made one by one while
    modules are imported, so thousands of names lie on hundreds of pages: 1.6 MiB for each worker.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG)  # no other thread finds a module missing
    try:
        for name, module in list(sys.modules.items()):
            del sys.modules[name]
            sys.modules[_copy(name) if type(name) is str else name] = module
    finally:
        sys.setswitchinterval(interval)


def _copy(name: str) -> str:
    return name.encode(errors="surrogatepass").decode(errors="surrogatepass")

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
    """Prepare the names of modules for forks, free what can be freed, and exempt the rest from later collections.

    The collector writes to the objects it visits, which would copy their pages in every worker.
    """
    _gather_names()  # first: what is freed leaves gaps, and the names would go into these
    # Also empties the interpreter's lists of unused objects, or each fork would, page by page, in its first collection.
    gc.collect()
    gc.freeze()


# Identities of the names that have been gathered, here or in a process that this one is a fork of.
_gathered: set[int] = set()


def _gather_names() -> None:
    """Put the names in ``sys.modules`` next to each other in memory.

    Whoever looks through them counts references to each, which copies its page in a fork. They are made one by one while
    modules are imported, so thousands of names lie on hundreds of pages: 1.6 MiB for each worker.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_LONG)  # no other thread finds a module missing
    try:
        names = list(sys.modules)
        new = (place for place, name in enumerate(names) if id(name) not in _gathered)
        for name in names[next(new, len(names)) :]:  # all that follow, for their order
            module = sys.modules.pop(name)
            gathered = _copy(name) if type(name) is str else name
            sys.modules[gathered] = module
            _gathered.add(id(gathered))
    finally:
        sys.setswitchinterval(interval)


def _copy(name: str) -> str:
    return name.encode(errors="surrogatepass").decode(errors="surrogatepass")

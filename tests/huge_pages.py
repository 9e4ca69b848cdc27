"""Makes forks of a large process cheaper: a fork, and its end, touch far fewer page table entries."""

from __future__ import annotations

import ctypes
import gc


MADV_COLLAPSE, HUGE_PAGE = 25, 1 << 21


def use_huge_pages() -> None:
    """Move this process's memory to huge pages, if the kernel can. Takes half a second with torch."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    for addresses, access, *_, name in (each if len(each) > 5 else [*each, ""] for each in maps):
        begin, end = (int(each, 16) for each in addresses.split("-"))
        first, last = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if access.startswith("rw") and name in {"", "[heap]"} and first < last:
            libc.madvise(first, last - first, MADV_COLLAPSE)
    # What this has used and no longer needs: forks would free it one by one in their first collection.
    del maps
    gc.collect()
    gc.freeze()

"""Detecting NumPy arrays whose memory arrived with a message and can be returned in place. Does not import NumPy."""

from __future__ import annotations

import ctypes
import gc
import io
import pickle
import sys
from typing import Any

from rallypoint.wire.shm import SMALLEST


def is_array(value: Any) -> bool:
    """Whether this is a NumPy array, not an instance of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def memory_of_array(array: Any) -> int:
    """The address of a large array's memory, if that arrived with a message and nothing else refers to it; else 0.

    Call it as ``memory_of_array(variable)``: like :func:`.sole_reference.memory_of_one`, it expects exactly one variable
    of the caller to refer to the array.
    """
    if array.nbytes < SMALLEST or not array.flags.c_contiguous or not array.flags.writeable:
        return 0
    found = _references(array)
    return int(array.ctypes.data) if found and found == _alone() else 0


def _references(array: Any) -> tuple[int, ...]:
    """Reference counts of all objects from an array to its memory; empty if there are any unexpected ones.

    The expected ones are the array, the array that it is a view of, the latter's memoryview, that view's managed buffer,
    and the memory.
    """
    inner = array.base
    if not is_array(inner):
        return ()
    view = inner.base
    if type(view) is not memoryview or view.nbytes != array.nbytes:
        return ()
    shared = [each for each in gc.get_referents(view) if type(each).__name__ == "managedbuffer"]
    if len(shared) != 1:
        return ()
    memory = view.obj
    return (
        sys.getrefcount(array),
        sys.getrefcount(inner),
        sys.getrefcount(view),
        sys.getrefcount(shared[0]),
        sys.getrefcount(memory),
    )


_found_alone: tuple[int, ...] | None = None


def _alone() -> tuple[int, ...]:
    """The counts for an array without other references, in this Python and NumPy.

    Empty from Python 3.14 on, which does not count all references from running functions.
    """
    global _found_alone  # noqa: PLW0603  # found once
    if _found_alone is None:
        _found_alone = _find_alone()
    return _found_alone


def _find_alone() -> tuple[int, ...]:
    import numpy as np

    def found(array: Any) -> tuple[int, ...]:
        return _references(array)

    if sys.version_info >= (3, 14):
        return ()
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(np.zeros(8, np.uint8), 5, buffer_callback=buffers.append)
    memory = [memoryview((ctypes.c_ubyte * 8)()).cast("B")[:8]]
    array = pickle.Unpickler(io.BytesIO(data), buffers=memory).load()  # noqa: S301  # just made
    del memory
    return found(array)

"""NumPy's arrays whose memory came with a message and may go back as it is. NumPy itself is not imported here."""

from __future__ import annotations

import ctypes
import gc
import io
import pickle
import sys
from typing import Any

from rallypoint.wire.shm import SMALLEST


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's own class."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def memory_of_array(array: Any) -> int:
    """Where a large array's memory begins, if nothing in this process refers to the array but one variable of the caller,
    and nothing but the array to its memory, which came with a message; else 0.

    To be called as ``memory_of_array(variable)``, as :func:`.sole_reference.memory_of_one` is.
    """
    if array.nbytes < SMALLEST or not array.flags.c_contiguous or not array.flags.writeable:
        return 0
    found = _references(array)
    return int(array.ctypes.data) if found and found == _alone() else 0


def _references(array: Any) -> tuple[int, ...]:
    """To everything between an array and the memory that it came in; empty if there is something else between them.

    That is: the array, the one it is a reshaped view of, the latter's view of the memory, what all such views share, and
    the memory.
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
    """What :func:`memory_of_array` finds where there is no other reference, in this Python and this NumPy.

    Nothing from Python 3.14 on, which does not count all references of running functions: nobody is taken to be alone.
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

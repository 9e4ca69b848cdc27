"""Memory for buffers, where a buffer's bytes are, and copies from one to another."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc only from Python 3.12 on


# Below this, asking for the addresses costs more than the interpreter's lock is worth.
_COPY_UNLOCKED: Final = 256 * 1024

# A handle of our own: argument types set on a shared one would be set for everyone.
_python = ctypes.PyDLL(None)


class _View(ctypes.Structure):
    """Python's own Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int]
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_View)]
_release_buffer.restype = None

Memory = ctypes.Array[ctypes.c_ubyte]

Move = Callable[[int, int, int], object]


def on_demand(size: int) -> mmap.mmap:
    """Memory that the kernel provides page by page, when it is first written to."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def copy_into(view: memoryview, source: Buffer, move: Move = ctypes.memmove) -> None:
    """Copy all of ``source`` into ``view``, without the interpreter's lock if it is large.

    Args:
        move: called for large copies, with the target's address, the source's, and the number of bytes.

    Raises:
        ValueError: they differ in size.
        BufferError: ``source`` is not contiguous.
    """
    size = memoryview(source).nbytes
    if view.nbytes != size:
        raise ValueError(f"cannot copy {size} bytes into a view of {view.nbytes}")
    if size < _COPY_UNLOCKED:
        view[:] = memoryview(source).cast("B")
        return
    target, origin = _View(), _View()
    _get_buffer(view, target, 1)  # PyBUF_WRITABLE
    try:
        _get_buffer(source, origin, 0)  # PyBUF_SIMPLE: contiguous, or BufferError
        try:
            move(target.buf, origin.buf, size)
        finally:
            _release_buffer(origin)
    finally:
        _release_buffer(target)


def address_of(view: memoryview) -> int:
    """The address at which its bytes start."""
    found = _View()
    _get_buffer(view, found, 0)
    _release_buffer(found)
    return int(found.buf or 0)

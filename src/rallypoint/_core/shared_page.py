"""A page of memory that a worker writes and its supervisor reads, without asking: no system call, no lock, nobody to wait for.

The memory is an anonymous file. The worker makes it, and sends its supervisor the descriptor over the socket that they share.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib

from rallypoint._core import linux

from . import supervisor_line


SIZE = 4096
# Length and checksum of the rest: the reader may read during a write.
_HEAD = struct.Struct("=II")
# The longest content, in bytes.
ROOM = SIZE - _HEAD.size


def share(name: str) -> mmap.mmap | None:
    """Memory whose descriptor the supervisor of this process has.

    Args:
        name: tells pages of one kind from others.

    Returns:
        :data:`SIZE` bytes; None if this process has no supervisor, no descriptor is left, or the supervisor is gone.
    """
    line = supervisor_line.held()
    if line is None:
        return None
    import socket  # not needed to import this package

    try:
        # With a default time-out, a socket object makes the descriptor non-blocking for all.
        blocks = os.get_blocking(line)
        fd = linux.memfd_create(name, linux.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, SIZE)
            memory = mmap.mmap(fd, SIZE)
            with socket.socket(fileno=os.dup(line)) as end:
                socket.send_fds(end, [b'{"kind": "kept page"}\n'], [fd], socket.MSG_DONTWAIT)
        finally:
            os.close(fd)
            os.set_blocking(line, blocks)
    except OSError:
        return None
    return memory


def write(memory: mmap.mmap, content: bytes) -> None:
    """Replace the content; at most :data:`ROOM` bytes."""
    memory[: _HEAD.size + len(content)] = _HEAD.pack(len(content), zlib.crc32(content)) + content


def is_page(fd: int, name: str) -> bool:
    """Whether a descriptor that a worker has sent is a page of this name."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{name} ")
    except OSError:
        return False


def read(fd: int) -> bytes | None:
    """The content; None if there is none yet, or it cannot be read just now."""
    for _ in range(3):  # the worker may be writing
        try:
            data = os.pread(fd, SIZE, 0)
        except OSError:
            return None
        if len(data) < _HEAD.size:
            return None
        length, checksum = _HEAD.unpack_from(data)
        content = data[_HEAD.size : _HEAD.size + length]
        if 0 < len(content) == length and zlib.crc32(content) == checksum:
            return content
    return None

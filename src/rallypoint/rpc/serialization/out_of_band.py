"""Large parts of a pickle as separate buffers: arrays, bytes, anything that supports pickle's buffers. No I/O.

There are two kinds:

- *Out of band:* objects that offer their memory to the pickler (``pickle.PickleBuffer``: NumPy arrays, pandas frames).
  The pickle only says that the next such buffer belongs there.
- *Cut out:* data that the pickler writes in one piece (``bytes``, ``bytearray``, long strings, even inside other
  objects). The pickler passes pieces of 64 KiB or more to its file without a copy.

A message with either begins with a table, followed by the pickle without the pieces that were cut out::

    sign        1 byte    no pickle begins with it
    cuts        u32       how many; for each, its position in the pickle (u64) and its buffer (u32)
    out of band u32       how many; for each, its buffer (u32)
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

from rallypoint.wire.buffers import copy_into


# Bytes. Smaller pieces stay in the pickle: a buffer of their own costs more than copying them.
LEAST_OUT_OF_BAND = 16 * 1024
LEAST_CUT = 256 * 1024
# The most buffers of these kinds in a message; further pieces stay in the pickle. Half of a frame's limit.
MOST_BUFFERS = 1 << 13

_SIGN = b"\x01"
_COUNT = struct.Struct("<I")
_CUT = struct.Struct("<QI")

Payload = bytes | bytearray | memoryview


def assemble(pieces: Sequence[Any], out_of_band: Sequence[int], buffers: list[memoryview]) -> bytes:
    """A payload from the pieces that a pickler wrote.

    Args:
        pieces: in order.
        out_of_band: the indices of the out-of-band buffers, in the pickle's order.
        buffers: the message's; pieces that are cut out are appended.
    """
    if len(pieces) == 1 and not out_of_band:
        whole: bytes = pieces[0]
        return whole
    left: list[Any] = []
    cuts: list[bytes] = []
    length = 0
    for piece in pieces:
        size = len(piece) if type(piece) is bytes else memoryview(piece).nbytes
        if size >= LEAST_CUT and len(buffers) < MOST_BUFFERS:
            cuts.append(_CUT.pack(length, len(buffers)))
            buffers.append(pickle.PickleBuffer(piece).raw())
        else:
            left.append(piece)
            length += size
    if not cuts and not out_of_band:
        return b"".join(left)
    numbers = struct.pack(f"<I{len(out_of_band)}I", len(out_of_band), *out_of_band)
    return b"".join([_SIGN, _COUNT.pack(len(cuts)), *cuts, numbers, *left])


def load(
    payload: Payload,
    buffers: Sequence[Any],
    unpickler: Callable[..., Any] = pickle.Unpickler,
) -> Any:
    """Unpickle a payload from :func:`assemble`.

    Args:
        unpickler: called with a file and the out-of-band ``buffers``.

    Raises:
        UnpicklingError: the payload is damaged.
        Exception: whatever unpickling raises.
    """
    data = memoryview(payload)
    try:
        (count,) = _COUNT.unpack_from(data, 1)
        at = 1 + _COUNT.size
        cuts = list(_CUT.iter_unpack(data[at : at + count * _CUT.size]))
        at += count * _CUT.size
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        numbers = struct.unpack_from(f"<{count}I", data, at)
        out_of_band = [buffers[number] for number in numbers]
        file = _Spliced(data[at + 4 * count :], [(where, buffers[n]) for where, n in cuts])
    except (struct.error, IndexError, ValueError) as error:
        raise pickle.UnpicklingError(
            f"the table before a message's pickle is damaged: {error}"
        ) from None
    return unpickler(file, buffers=out_of_band).load()


def has_table(payload: Payload) -> bool:
    return payload[:1] == _SIGN


class _Spliced:
    """A file in several pieces, for an unpickler.

    Args:
        rest: the pickle without the pieces that were cut out.
        cuts: positions in ``rest`` and pieces, in order.
    """

    __slots__ = ("_left",)

    def __init__(self, rest: memoryview, cuts: Sequence[tuple[int, Any]]) -> None:
        left: list[memoryview] = []
        done = 0
        for where, piece in cuts:
            if not done <= where <= len(rest):
                raise ValueError(
                    f"position {where} of a piece is not between {done} and {len(rest)}"
                )
            left += [rest[done:where], memoryview(piece).cast("B")]
            done = where
        left.append(rest[done:])
        # Reversed: read from the end.
        self._left = [each for each in reversed(left) if each]

    def read(self, size: int) -> bytes:
        left = self._left
        if left and len(left[-1]) > size:
            first = left[-1]
            left[-1] = first[size:]
            return bytes(first[:size])
        found = []
        while size and left:
            first = left.pop()
            if len(first) > size:
                left.append(first[size:])
                first = first[:size]
            found.append(first)
            size -= len(first)
        return b"".join(found)

    def readinto(self, target: memoryview) -> int:
        left, done = self._left, 0
        while done < len(target) and left:
            first = left.pop()
            room = len(target) - done
            if len(first) > room:
                left.append(first[room:])
                first = first[:room]
            copy_into(target[done : done + len(first)], first)
            done += len(first)
        return done

    def readline(self) -> bytes:
        found = b""
        while self._left and not found.endswith(b"\n"):
            found += self.read(1)
        return found


# -- memoryviews, which Python does not pickle -----------------------------------------------------


def reduce_view(view: memoryview) -> tuple[Any, ...]:
    """Reduce a memoryview. It arrives as a memoryview, with its shape, and read-only if it was.

    Raises:
        TypeError: only its exporter can read its format.
    """
    try:
        memoryview(bytes(view.itemsize)).cast(view.format)  # type: ignore[call-overload]  # any format
    except ValueError:
        raise TypeError(
            f"a memoryview of format {view.format!r} cannot be sent: send the viewed object, or view.cast('B')"
        ) from None
    data: Any = pickle.PickleBuffer(view) if view.c_contiguous else view.tobytes()
    if not view.readonly and not view.c_contiguous:
        data = bytearray(data)
    return rebuild_view, (data, view.format, view.shape)


def rebuild_view(data: Any, code: str, shape: tuple[int, ...]) -> memoryview:
    flat = memoryview(data)
    if flat.ndim != 1 or flat.format != "B":
        flat = flat.cast("B")
    kind: Any = code
    return flat.cast(kind) if len(shape) == 1 or 0 in shape else flat.cast(kind, shape)

"""The messages of c10d's ``TCPStore``, as its client sends and reads them. No I/O.

Each function makes an :class:`Exchange`: the bytes of a request, and a reader for the reply. The reader is a generator
that yields how many bytes it needs next, is sent them, and returns the result.

The protocol (``torch/csrc/distributed/c10d/TCPStoreBackend.hpp``; undocumented, unchanged since torch 2.0 except for additions):
a request is one byte that says what is wanted, then its fields; the server answers the requests in order, except `set`. Numbers
are in the host's byte order, as in c10d, so all hosts of a job must share one. ``tests/contract/test_store_messages.py``
checks this file against the installed torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Generic, TypeAlias, TypeVar

from rallypoint.errors import ProtocolError


class Query(IntEnum):
    """What a request wants: its first byte."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE = 8
    MULTI_GET = 10
    CANCEL_WAIT = 12
    PING = 13


MAGIC: Final = 0x3C85F7CE
# c10d's client puts this before every key.
KEY_PREFIX: Final = b"/"
# This package stores no larger value, and reads no larger one.
MOST: Final = 64 << 20

# Answers to CHECK and WAIT.
_READY: Final = 0
_COME, _CANCELLED = 0, 1

_HELLO = struct.Struct("=BIBI")
_ECHO = struct.Struct("=I")
_SIZE = struct.Struct("=Q")
_NUMBER = struct.Struct("=q")

T = TypeVar("T")
U = TypeVar("U")
Reading: TypeAlias = Generator[int, bytes, T]


@dataclass(frozen=True, slots=True)
class Exchange(Generic[T]):
    """A request, and how its reply is read.

    Args:
        request: the bytes to send.
        reply: makes the reader of the reply.
    """

    request: bytes
    reply: Callable[[], Reading[T]]


def hello(number: int) -> bytes:
    """What a client sends first; the server answers with :func:`echo` of the same number."""
    return _HELLO.pack(Query.VALIDATE, MAGIC, Query.PING, number)


def echo(number: int) -> bytes:
    return _ECHO.pack(number)


def set_value(key: str, value: bytes) -> Exchange[None]:
    """Sets a value. There is no reply; the next request's reply confirms it."""
    return Exchange(_request(Query.SET, _key(key), _bytes(value)), _nothing)


def compare_set(key: str, expected: bytes, desired: bytes) -> Exchange[bytes]:
    """The value afterwards; ``expected`` if there is no key and one was expected."""
    return Exchange(
        _request(Query.COMPARE_SET, _key(key), _bytes(expected), _bytes(desired)), _value
    )


def get(key: str) -> Exchange[bytes]:
    """The value. The key must exist: servers differ in what they do if it does not."""
    return Exchange(_request(Query.GET, _key(key)), _value)


def get_many(keys: Sequence[str]) -> Exchange[list[bytes]]:
    """As :func:`get`, for several keys."""
    return Exchange(_request(Query.MULTI_GET, _keys(keys)), lambda: _values(len(keys)))


def add(key: str, amount: int) -> Exchange[int]:
    """The sum."""
    return Exchange(_request(Query.ADD, _key(key), _NUMBER.pack(amount)), _number)


def check(keys: Sequence[str]) -> Exchange[bool]:
    """Whether all keys exist."""
    return Exchange(_request(Query.CHECK, _keys(keys)), _is_ready)


def check_each(keys: Sequence[str]) -> Exchange[list[bool]]:
    """Which keys exist: many requests, sent together."""
    request = b"".join(_request(Query.CHECK, _keys([key])) for key in keys)
    return Exchange(request, lambda: _are_ready(len(keys)))


def delete(key: str) -> Exchange[bool]:
    """Whether the key existed."""
    return Exchange(_request(Query.DELETE, _key(key)), _was_deleted)


def wait(keys: Sequence[str]) -> Exchange[None]:
    """The reply comes when all keys exist. To give up before that, use :func:`cancel_wait`."""
    return Exchange(_request(Query.WAIT, _keys(keys)), _come)


def cancel_wait() -> Exchange[bool]:
    """Ends a :func:`wait` whose reply has not come. The result is whether the keys appeared at that very moment."""
    return Exchange(_request(Query.CANCEL_WAIT), _come_or_cancelled)


def both(first: Exchange[T], second: Exchange[U]) -> Exchange[tuple[T, U]]:
    """Two requests, sent together."""
    return Exchange(first.request + second.request, lambda: _both(first.reply(), second.reply()))


# -- requests --------------------------------------------------------------------------------------


def _request(query: Query, *fields: bytes) -> bytes:
    return b"".join((query.to_bytes(), *fields))


def _bytes(value: bytes) -> bytes:
    return _SIZE.pack(len(value)) + value


def _key(key: str) -> bytes:
    return _bytes(KEY_PREFIX + key.encode())


def _keys(keys: Sequence[str]) -> bytes:
    return _SIZE.pack(len(keys)) + b"".join(map(_key, keys))


# -- replies ---------------------------------------------------------------------------------------


def _nothing() -> Reading[None]:
    return
    yield


def _both(first: Reading[T], second: Reading[U]) -> Reading[tuple[T, U]]:
    return (yield from first), (yield from second)


def _value() -> Reading[bytes]:
    (size,) = _SIZE.unpack((yield _SIZE.size))
    if size > MOST:
        raise ProtocolError(f"a value of {size} bytes was announced; at most {MOST} are accepted")
    return (yield size) if size else b""


def _values(count: int) -> Reading[list[bytes]]:
    found = []
    for _ in range(count):
        found.append((yield from _value()))  # noqa: PERF401  a comprehension cannot yield
    return found


def _number() -> Reading[int]:
    (number,) = _NUMBER.unpack((yield _NUMBER.size))
    return int(number)


def _is_ready() -> Reading[bool]:
    return (yield 1)[0] == _READY


def _are_ready(count: int) -> Reading[list[bool]]:
    return [each == _READY for each in (yield count)]


def _was_deleted() -> Reading[bool]:
    return (yield from _number()) > 0


def _come() -> Reading[None]:
    (answer,) = yield 1
    if answer != _COME:
        raise ProtocolError(f"answer {answer} to a wait, expected {_COME}")


def _come_or_cancelled() -> Reading[bool]:
    (answer,) = yield 1
    if answer == _CANCELLED:
        return False
    if answer == _COME:
        (answer,) = yield 1  # the first byte was the answer to the wait, already on its way
    if answer != _CANCELLED:
        raise ProtocolError(f"answer {answer} to the end of a wait, expected {_CANCELLED}")
    return True

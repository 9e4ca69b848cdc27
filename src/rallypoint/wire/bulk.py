"""MACs of long data, by the fastest method that this Python has.

``aes-128-gmac`` (NIST SP 800-38D) and ``poly1305`` (RFC 8439: the AEAD with ChaCha20, without a plaintext) run at 7 to 12 GB/s,
five times as fast as SHA-256 on a processor that has instructions for it. GMAC is the faster one on processors with AES
and carry-less multiplication, Poly1305 on those with AVX-512; a short race decides. Python has no interface to either
without another package, but every Python with ``ssl`` has loaded OpenSSL, whose ``EVP`` functions have not changed since
1.0.1. They are called by ctypes, and checked against known answers first. If they cannot be found (OpenSSL is linked into
the interpreter, with its symbols hidden), ``sha-256`` is used, which every Python has. The two ends agree in their handshake.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Final, Protocol

from .buffers import address_of


KEY_BYTES: Final = 32
_TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_GET_TAG: Final = 0x10  # EVP_CTRL_AEAD_GET_TAG
# The most bytes of one call: the length is a C int.
_MOST: Final = 1 << 30


class Bulk(Protocol):
    """Computes one value at a time. Not thread-safe."""

    def begin(self, number: int) -> None:
        """Start a new value.

        Args:
            number: one that has not been given before, under this key.
        """

    def update(self, data: memoryview) -> None:
        """Add ``data``. Releases the GIL."""

    def finish(self) -> bytes:
        """The value."""


class Sha256:
    """A hash without a key: its user must sign the result."""

    name = "sha-256"

    def __init__(self, key: bytes) -> None:
        del key
        self._hash = hashlib.sha256()

    def begin(self, number: int) -> None:
        del number
        self._hash = hashlib.sha256()

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def finish(self) -> bytes:
        return self._hash.digest()


class _Aead:
    """Authenticated encryption of nothing: the bytes are the additional data."""

    name: ClassVar[str]
    # OpenSSL's function that returns the cipher, and the bytes of its key.
    cipher: ClassVar[str]
    key_bytes: ClassVar[int]
    # Tags of some data, under a key and a nonce of zeros.
    known: ClassVar[tuple[tuple[bytes, str], ...]]

    def __init__(self, key: bytes) -> None:
        crypto = _crypto()
        if crypto is None:
            raise LookupError("this Python's OpenSSL cannot be called")
        self._crypto = crypto
        self._context = crypto.new()
        if not self._context:
            raise MemoryError
        self._pointer = ctypes.c_void_p(self._context)
        self._count = ctypes.c_int()
        self._at_count = ctypes.addressof(self._count)
        self._tag = ctypes.create_string_buffer(_TAG_BYTES)
        self._at_tag = ctypes.addressof(self._tag)
        cipher = crypto.ciphers[self.cipher]()
        self._check(crypto.init(self._pointer, cipher, None, key[: self.key_bytes], None))

    def begin(self, number: int) -> None:
        nonce = number.to_bytes(_NONCE_BYTES, "big")
        self._check(self._crypto.init(self._pointer, None, None, None, nonce))

    def update(self, data: memoryview) -> None:
        size, at = data.nbytes, address_of(data)
        for start in range(0, size, _MOST):
            count = min(_MOST, size - start)
            self._check(self._crypto.update(self._pointer, None, self._at_count, at + start, count))

    def finish(self) -> bytes:
        self._check(self._crypto.final(self._pointer, None, self._at_count))
        self._check(self._crypto.control(self._pointer, _GET_TAG, _TAG_BYTES, self._at_tag))
        return self._tag.raw

    def __del__(self) -> None:
        context, self._context = getattr(self, "_context", None), None
        if context:
            self._crypto.free(context)

    def _check(self, result: int) -> None:
        if result != 1:
            raise OSError(f"OpenSSL has refused {self.name}")


class Gmac(_Aead):
    """AES-128 in Galois/counter mode."""

    name = "aes-128-gmac"
    cipher, key_bytes = "EVP_aes_128_gcm", 16
    # The first is test case 1 of "The Galois/Counter Mode of Operation" (McGrew and Viega).
    known = (
        (b"", "58e2fccefa7e3061367f1d57a4e7455a"),
        (bytes(range(40)), "6f24f2e53545cd402469ae78b39eae65"),
    )


class Poly1305(_Aead):
    """Poly1305 under a key of ChaCha20 that is new for each value."""

    name = "poly1305"
    cipher, key_bytes = "EVP_chacha20_poly1305", 32
    # Computed from the key stream of RFC 8439, appendix A.1, test vector 1.
    known = (
        (b"", "4eb972c9a8fb3a1b382bb4d36f5ffad1"),
        (bytes(range(40)), "c2f9c57bffbdbdfcb1547ee653c7e4be"),
    )


class _Crypto:
    """Functions of OpenSSL. AttributeError: the library does not have them."""

    def __init__(self, path: str | None) -> None:
        # Short calls keep the GIL: releasing it costs more than they do.
        short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        self.new = _function(short.EVP_CIPHER_CTX_new, pointer)
        self.free = _function(short.EVP_CIPHER_CTX_free, None, pointer)
        # OpenSSL can be built without some of them.
        self.ciphers = {
            each.cipher: _function(getattr(short, each.cipher), pointer)
            for each in _AEADS
            if hasattr(short, each.cipher)
        }
        self.init = _function(
            short.EVP_EncryptInit_ex, number, pointer, pointer, pointer, text, text
        )
        self.update = _function(
            long.EVP_EncryptUpdate, number, pointer, pointer, pointer, pointer, number
        )
        self.final = _function(short.EVP_EncryptFinal_ex, number, pointer, pointer, pointer)
        self.control = _function(
            short.EVP_CIPHER_CTX_ctrl, number, pointer, number, number, pointer
        )


def _function(found: Any, result: Any, *arguments: Any) -> Any:
    found.restype, found.argtypes = result, arguments
    return found


@cache
def _crypto() -> _Crypto | None:
    """This process's OpenSSL, if it can be called."""
    try:
        import ssl
    except ImportError:
        return None
    extension = sys.modules[ssl.MemoryBIO.__module__]
    # In the module itself, the symbols of the libraries that it is linked to are found; in the interpreter, its own.
    for path in (getattr(extension, "__file__", None), None):
        try:
            return _Crypto(path)
        except (AttributeError, OSError):
            continue
    return None


_AEADS: Final[tuple[type[_Aead], ...]] = (Gmac, Poly1305)
_KINDS: Final[dict[str, Callable[[bytes], Bulk]]] = {
    Sha256.name: Sha256,
    **{each.name: each for each in _AEADS},
}
# How many bytes a race is over: few enough that all races take less than a millisecond.
_RACE_BYTES: Final = 128 * 1024
_RACES: Final = 3


def _works(kind: type[_Aead]) -> bool:
    try:
        mac = kind(bytes(KEY_BYTES))
        for data, expected in kind.known:
            mac.begin(0)
            mac.update(memoryview(data[:7]))
            mac.update(memoryview(data[7:]))
            if mac.finish().hex() != expected:
                return False
    except (LookupError, OSError, MemoryError):
        return False
    return True


@cache
def available() -> tuple[str, ...]:
    """What this process can compute, the fastest first. Processes on one host may differ in that."""
    working = [each for each in _AEADS if _works(each)]
    data = memoryview(bytearray(_RACE_BYTES))
    best = dict.fromkeys(working, float("inf"))
    for race in range(_RACES if len(working) > 1 else 0):
        for kind in working:
            mac = kind(bytes(KEY_BYTES))
            began = time.perf_counter()
            mac.begin(race)
            mac.update(data)
            mac.finish()
            best[kind] = min(best[kind], time.perf_counter() - began)
    return (*(each.name for each in sorted(working, key=lambda each: best[each])), Sha256.name)


def new(name: str, key: bytes) -> Bulk:
    """One of :func:`available`, with a key of ``KEY_BYTES`` that nothing else uses."""
    return _KINDS[name](key)

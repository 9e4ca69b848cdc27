"""Signed values in the group's store: those written without the secret are ignored. Pure.

A value is a version, a 16-byte keyed BLAKE2b over key and content, and the content. Each group has a signing key of its
own, so values that were altered, moved to another key, or copied from another group are invalid. Deleting a key or
restoring its earlier value is not detected here: the groups handle that (``group.py``).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from rallypoint._core.secret import derive


_VERSION: Final = b"S1"
_TAG_BYTES: Final = 16
_HEAD: Final = len(_VERSION) + _TAG_BYTES


class Signer:
    """Signs for one group.

    Args:
        secret: the group's secret.
        group: distinguishes it from other groups with the same secret.
    """

    def __init__(self, secret: bytes, group: str) -> None:
        self._key = derive(secret, "rpc member records", group)

    def sign(self, key: str, content: bytes) -> bytes:
        """The value to store under ``key``."""
        return _VERSION + self._tag(key, content) + content

    def read(self, key: str, value: bytes) -> bytes | None:
        """The content of a value stored under ``key``; None if the signature is invalid."""
        content = value[_HEAD:]
        if not value.startswith(_VERSION) or len(value) < _HEAD:
            return None
        given = value[len(_VERSION) : _HEAD]
        return content if hmac.compare_digest(given, self._tag(key, content)) else None

    def _tag(self, key: str, content: bytes) -> bytes:
        signed = hashlib.blake2b(key=self._key, digest_size=_TAG_BYTES)
        name = key.encode()
        signed.update(len(name).to_bytes(4, "little") + name)
        signed.update(content)
        return signed.digest()


# For groups without a secret: anyone can sign with it.
PUBLIC: Final = Signer(b"no secret", "")

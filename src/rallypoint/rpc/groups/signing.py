"""What members put into the group's store, signed: whoever can write there and does not know the secret is not believed. Pure.

A value is the version, a keyed BLAKE2b of 16 bytes over its key and its content, and the content. The signing key belongs
to one group. So a value that was altered, that stands under another key, or is from another group is none. What is under
a key can be deleted, or put back to an earlier value of that very key: the groups see to that (``group.py``).
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
        secret: what its members know.
        group: what tells it from others that have the same secret.
    """

    def __init__(self, secret: bytes, group: str) -> None:
        self._key = derive(secret, "rpc member records", group)

    def sign(self, key: str, content: bytes) -> bytes:
        """What to put under ``key``."""
        return _VERSION + self._tag(key, content) + content

    def read(self, key: str, value: bytes) -> bytes | None:
        """The content of what stands under ``key``; None: no member has put it there."""
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


# Of those who have no secret: everybody can sign so.
PUBLIC: Final = Signer(b"no secret", "")

"""What a node answers another one, as a record of the job's store. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final


# Bytes of an answer, unpacked.
MAX_ANSWER: Final = 64 * 1024 * 1024


def key(generation: int, name: str, node_rank: int) -> str:
    """Where a node's answer to a question is.

    Args:
        generation: of both nodes.
        name: of the question.
        node_rank: of the one that answers.
    """
    return f"{generation}/answer/{name}/{node_rank}"


def pack(body: Mapping[str, Any]) -> dict[str, Any]:
    """As a record. Compressed: the stacks of a hundred workers are more than a record may hold."""
    return {"zlib": base64.b64encode(zlib.compress(json.dumps(body).encode())).decode()}


def unpack(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer; None if it is none, or has more than :data:`MAX_ANSWER` bytes."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(record["zlib"]), MAX_ANSWER)
        body = json.loads(data)
    except (KeyError, TypeError, ValueError, zlib.error):
        return None
    return body if isinstance(body, dict) else None

"""Requests to a supervisor and its answers: one line of JSON each, versioned. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from rallypoint.errors import ControlError


VERSION: Final = 1
MAX_REQUEST: Final = 64 * 1024
# The stacks of a thousand workers.
MAX_ANSWER: Final = 256 * 1024 * 1024


def pack(body: Mapping[str, Any]) -> bytes:
    """A request or an answer in the form in which it is sent."""
    return json.dumps({"version": VERSION, **body}, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes, sender: str) -> dict[str, Any]:
    """Parse a received message.

    Args:
        line: of any length here; the reader has limited it.
        sender: the sender's name, for error messages.
    Raises:
        ControlError: it is not a message, or is of another version.
    """
    try:
        body = json.loads(line)
    except ValueError:
        raise ControlError(f"{sender} sent a message that is not JSON") from None
    if not isinstance(body, dict) or type(body.get("version")) is not int:
        raise ControlError(f"{sender} sent a message without a version")
    if body["version"] != VERSION:
        raise ControlError(
            f"{sender} speaks version {body['version']} of the control protocol, this is version {VERSION}:"
            " use the same rallypoint as the job"
        )
    return body

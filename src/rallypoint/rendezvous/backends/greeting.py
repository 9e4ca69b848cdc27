"""What a node sends first at an endpoint, and what the answer tells about the server there.

Every c10d store echoes the greeting: c10d's magic number, then a ping with a number of ours. A node that
will serve the store but is still importing torch answers with another number. Anything else is some other server.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import Enum


_NUMBER = 0x52414C4C
GREETING = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, _NUMBER)
ECHO = struct.pack("=I", _NUMBER)
STARTING = struct.pack("=I", _NUMBER + 1)
# Sent if the greeting gets no answer, because HTTP servers answer this.
QUESTION = b"GET / HTTP/1.0\r\n\r\n"
# The most bytes read of an answer, and the most characters shown of a server's name.
LONGEST_ANSWER, LONGEST_NAME = 512, 60


class Door(Enum):
    """What serves an endpoint."""

    SERVES = "serves"
    STARTING = "starting"
    REFUSED = "refused"  # no listener
    UNKNOWN = "unknown"  # the name has no address
    UNREACHED = "unreached"
    STRANGER = "stranger"  # a listener that is not a store


@dataclass(frozen=True, slots=True)
class Reply:
    """What serves the endpoint; ``why`` says why it is not a store, and is empty if it is one."""

    door: Door
    why: str = ""


def read(answer: bytes) -> Reply:
    """What the received bytes mean; no bytes mean that the other end hung up."""
    known = {ECHO: Door.SERVES, STARTING: Door.STARTING}
    door = known.get(answer)
    if door is not None:
        return Reply(door)
    if not answer:
        return Reply(Door.STRANGER, "another program answers there, or the store just ended")
    return Reply(Door.STRANGER, f"{server(answer)} answers there, not a rendezvous")


SILENT = Reply(Door.STRANGER, "a program listens there but does not answer")


def server(answer: bytes) -> str:
    """What kind of server gives this answer, in words."""
    text = answer.decode("latin-1")
    if found := re.match(r"SSH-[\d.]+-([^\s]*)", text):
        return _named("an SSH server", found[1])
    if text.startswith("HTTP/"):
        found = re.search(r"^server:[ \t]*([^\r\n]+)", text, re.IGNORECASE | re.MULTILINE)
        return _named("an HTTP server", found[1] if found else "")
    first = _printable(text.splitlines()[0] if text.splitlines() else "")
    return _named("another program", f"it says {first!r}" if first else "")


def _named(kind: str, name: str) -> str:
    shown = _printable(name).strip()
    return f"{kind} ({shown})" if shown else kind


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isascii() and each.isprintable())[:LONGEST_NAME]

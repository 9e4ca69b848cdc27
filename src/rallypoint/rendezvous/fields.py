"""Reads fields of records without trusting them: another program, or another version, may have written them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


# Host names and labels are cut to this.
MAX_NAME = 255


def facts_in(record: Mapping[str, Any]) -> Mapping[str, Any]:
    facts = record.get("facts")
    return facts if isinstance(facts, dict) else {}


def number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**62 else 0


def node_id(value: object) -> str:
    """A node's id, which becomes part of a key; empty if it is invalid."""
    good = isinstance(value, str) and value.isascii() and value.isalnum() and len(value) <= MAX_NAME
    return str(value) if good else ""


def generation(head: Mapping[str, Any] | None) -> int:
    return 0 if head is None else number(head.get("generation"))


def beat_number(beat: Mapping[str, Any] | None) -> int:
    return -1 if beat is None else number(beat.get("beat"))


def has_left(beat: Mapping[str, Any] | None) -> bool:
    return beat is not None and beat.get("left") is True

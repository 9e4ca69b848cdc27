"""Words in characters that no shell interprets, for a command line that passes through several shells. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence

from rallypoint.errors import ConfigError


def pack(words: Sequence[str]) -> str:
    """The words, encoded in letters, digits, ``-``, ``_`` and ``=``."""
    return base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()


def unpack(text: str, shown: str) -> list[str]:
    """The words that :func:`pack` was given.

    Args:
        text: what it returned.
        shown: the option that has it, for errors.

    Raises:
        ConfigError: it is something else.
    """
    try:
        words = json.loads(base64.b64decode(text, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        words = None
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
        problem = "expected what rally submit writes there"
        raise ConfigError(shown, text, problem, "-- train.py gives the words as they are")
    return words

"""How far those who follow a job's output on other nodes have read that of this node.

Each node remembers that itself: a question goes to all nodes, and with the places in the files of a thousand of them it would be too
large. A question has ``reader``, who asks; ``number``, counted up from 0; and ``missed``, the nodes whose last answer it did not
get, or :data:`ALL`. What is in a missed answer is told again.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import log_answers


# No node's last answer came.
ALL = "all"
# So many readers are remembered. One that is forgotten hears the last lines again.
MAX_READERS = 16


@dataclass(slots=True)
class _Reader:
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = -1
    heard: dict[str, Any] = field(default_factory=dict)  # places, up to which it has heard all
    told: dict[str, Any] = field(default_factory=dict)  # the same, once it has the last answer


class LogReaders:
    """Those who follow the job's output. Methods may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: collections.OrderedDict[str, _Reader] = collections.OrderedDict()

    def answer(
        self, folder: Path | None, question: Mapping[str, Any], node_rank: int
    ) -> dict[str, Any] | None:
        """This node's answer; None if a later question has been answered.

        Args:
            folder: of this node's run, if it has one.
            question: see :mod:`.log_answers`.
            node_rank: of this node.
        """
        name, number, missed = (question.get(key) for key in ("reader", "number", "missed"))
        if not isinstance(name, str) or type(number) is not int:
            return log_answers.told(folder, {}, question)
        reader = self._reader(name)
        with reader.lock:
            if number <= reader.number:
                return None
            if missed != ALL and not (isinstance(missed, list) and node_rank in missed):
                reader.heard = reader.told
            answer = log_answers.told(folder, reader.heard, question)
            reader.told = log_answers.places_after(reader.heard, answer)
            reader.number = number
        return answer

    def _reader(self, name: str) -> _Reader:
        with self._lock:
            reader = self._readers.setdefault(name, _Reader())
            self._readers.move_to_end(name)
            if len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
            return reader

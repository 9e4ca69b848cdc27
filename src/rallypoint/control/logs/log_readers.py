"""How far readers on other nodes, which follow a job's output, have read the output of this node.

Each node keeps track of that itself: a question goes to all nodes, and would be too large with the places in the files of a
thousand nodes. A question has ``reader`` (the asker's id), ``number`` (counted up from 0), and ``missed`` (the nodes whose
last answer the reader did not get, or :data:`ALL`). The contents of a missed answer are sent again.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import log_answers


# No node's last answer arrived.
ALL = "all"
# How many readers are remembered. One that was forgotten gets the last lines again.
MAX_READERS = 16


@dataclass(slots=True)
class _Reader:
    lock: threading.Lock = field(default_factory=threading.Lock)
    number: int = -1
    heard: dict[str, Any] = field(default_factory=dict)  # the places up to which it has all
    told: dict[str, Any] = field(default_factory=dict)  # the same, if it gets the last answer


class LogReaders:
    """The readers that follow the job's output. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: collections.OrderedDict[str, _Reader] = collections.OrderedDict()

    def answer(
        self, folder: Path | None, question: Mapping[str, Any], node_rank: int
    ) -> dict[str, Any] | None:
        """This node's answer; None if this or a later question has already been answered.

        Args:
            folder: the folder of this node's run, if it has one.
            question: see :mod:`.log_answers`.
            node_rank: this node's rank.
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

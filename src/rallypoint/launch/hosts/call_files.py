"""A function call on its way to a host's supervisor, and what comes back from the job: unnamed files.

The call and its results are pickles, which are not loaded here. What comes back is a line of JSON, followed by the
results one after another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rallypoint._core import env as environment, linux


VARIABLE = "RALLY_CALL"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFiles:
    """The files of one job.

    Args:
        call: what workers call; None: they run a script.
        answer: for what comes back.
        path: the caller's ``sys.path``.
    """

    call: int | None
    answer: int
    path: tuple[str, ...]

    @classmethod
    def inherited(cls) -> Self | None:
        """The files that this supervisor was given; workers must not see them."""
        text = environment.process_environment().pop(VARIABLE, None)
        if text is None:
            return None
        record = json.loads(text)
        for fd in (record["call"], record["answer"]):
            if fd is not None:
                os.set_inheritable(fd, False)
        return cls(call=record["call"], answer=record["answer"], path=tuple(record["path"]))

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(each for each in (self.call, self.answer) if each is not None)

    def in_environment(self) -> dict[str, str]:
        """The variable that hands them to a child, which has to inherit the descriptors."""
        record = {"call": self.call, "answer": self.answer, "path": self.path}
        return {VARIABLE: json.dumps(record)}

    def write(self, answer: bytes) -> None:
        with os.fdopen(self.answer, "wb") as file:
            file.write(answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of a host's part of a job.

    Args:
        results: what a call returned on the host's workers, in rank order; none if it failed.
        first_rank: the first rank on the host.
        report: why it failed, as JSON; None if no worker did.
    """

    results: Sequence[bytes] = ()
    first_rank: int = 0
    report: Mapping[str, Any] | None = None

    def to_bytes(self) -> bytes:
        sizes = [len(each) for each in self.results]
        head = {"sizes": sizes, "first_rank": self.first_rank, "report": self.report}
        return b"".join([json.dumps(head).encode(), b"\n", *self.results])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        line, _, rest = data.partition(b"\n")
        head: dict[str, Any] = json.loads(line)
        results, at = [], 0
        for size in head["sizes"]:
            results.append(rest[at : at + size])
            at += size
        return cls(results=tuple(results), first_rank=head["first_rank"], report=head["report"])


def make() -> int:
    """A file for what comes back, to be inherited."""
    return linux.memfd_create("rally-answer", 0)


def read(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()

"""The output of several hosts in one terminal, and how their parts of the job ended: pure.

The first host has rank 0, and its lines are shown as they are, so a program in which only rank 0 prints looks as
it does on one host. Lines of other hosts start with the host's name. What `rally` says in the same words on several
hosts is shown once.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


_SAID = b"rally: "
# A progress bar ends its lines with a carriage return.
_LINES = re.compile(rb"[^\r\n]*[\r\n]+")
_DROPPED = re.compile(rb"\b(?:kex|ssh)_exchange_identification: ")
# A host's private messages to the terminal start with this byte and the job's token.
_MARK = b"\x1e"


def told(token: str, what: str, **more: Any) -> bytes:
    """A line for the terminal's host, to be written to standard output."""
    return _MARK + token.encode() + json.dumps({"what": what, **more}).encode() + b"\n"


@dataclass(slots=True)
class Part:
    """One host's part of the job.

    Args:
        host: its name.
        started: its orders were read.
        exit_code: its supervisor's exit code.
        report: its failure report.
        troubles: what its supervisor says has happened to hosts, as records.
        answer: what came of its part of a function call (:mod:`.call_files`).
        ssh_code: how ssh ended; None while it runs.
        was_told: it ended after it was told to, or after the terminal had hung up.
        attempts: how often its connection was started.
        said: what ssh said before the part started, or the first part of that.
    """

    host: str
    started: bool = False
    exit_code: int | None = None
    report: str = ""
    troubles: Sequence[dict[str, Any]] = ()
    answer: bytearray = field(default_factory=bytearray)
    ssh_code: int | None = None
    was_told: bool = False
    attempts: int = 0
    said: bytearray = field(default_factory=bytearray)

    @property
    def was_dropped(self) -> bool:
        """Whether the server, or one on the way, closed the connection before identifying itself: it had too many of them."""
        return not self.started and _DROPPED.search(self.said) is not None

    @property
    def ended(self) -> bool:
        return self.ssh_code is not None

    @property
    def lost(self) -> bool:
        """The connection ended before the supervisor did."""
        return self.ended and self.exit_code is None


@dataclass(slots=True)
class Merger:
    """Takes the output of all hosts in pieces, and returns whole lines to show.

    Args:
        parts: the job's parts, in the order of the hosts.
        token: see :func:`told`.
    """

    parts: Sequence[Part]
    token: str
    _rest: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    _said_by: dict[bytes, int] = field(default_factory=dict)

    def take(self, index: int, stream: int, data: bytes) -> bytes:
        """Take what a host has written. Returns the lines to show.

        Args:
            index: the host's index.
            stream: 1 or 2.
            data: what it has written; empty: it will write no more.
        """
        rest = self._rest.setdefault((index, stream), bytearray())
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        rest += data[:end]
        # Only text that ends with a line end is searched, and only once: on an unfinished line the pattern would look for
        # a line end from each of its bytes, for each piece (35 s for 300 KB).
        lines = _LINES.findall(bytes(rest)) if end else []
        if end:
            rest.clear()
        rest += data[end:]
        if rest and not data:
            lines.append(bytes(rest) + b"\n")
            rest.clear()
        return b"".join(self._shown(index, stream, line) for line in lines)

    def _shown(self, index: int, stream: int, line: bytes) -> bytes:
        mark = _MARK + self.token.encode()
        if stream == 1 and mark in line:
            shown, _, record = line.partition(mark)
            self._note(self.parts[index], record)
            return self._shown(index, stream, shown + b"\n") if shown else b""
        if stream == 2 and line.startswith(_SAID):
            first = self._said_by.setdefault(line, index)
            if first != index:
                return b""
        if index == 0:
            return line
        name = self.parts[index].host.encode()
        if stream == 2 and line.startswith(_SAID):
            return _SAID + b"[" + name + b"] " + line.removeprefix(_SAID)
        return b"[" + name + b"] " + line

    def _note(self, part: Part, record: bytes) -> None:
        told = json.loads(record)
        if told["what"] == "started":
            part.started = True
        elif told["what"] == "answer":
            part.answer += base64.b64decode(told["data"])
        else:
            part.exit_code, part.report = int(told["exit_code"]), str(told["report"])
            part.troubles = told.get("troubles", ())


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the job ended.

    Args:
        exit_code: for the shell.
        report: to be printed; may be empty.
        remarks: about hosts.
    """

    exit_code: int
    report: str
    remarks: tuple[str, ...]


def verdict(parts: Sequence[Part], least: int) -> Verdict:
    """The end of the job, from the ends of its parts.

    Args:
        parts: all of them, ended.
        least: the fewest hosts that may run the job.
    """
    remarks = tuple(_remark(each) for each in parts if each.lost)
    report = next((each.report for each in parts if each.report), "")
    codes = [each.exit_code for each in parts if each.exit_code is not None]
    failed = next((code for code in codes if code), 0)
    if not failed and len(codes) < least:
        failed = 1
    return Verdict(failed, report, remarks)


def _remark(part: Part) -> str:
    if part.started:
        return f"{part.host} is lost: its connection ended (ssh exit code {part.ssh_code})"
    hint = f"try: ssh {part.host} true" if part.ssh_code == 255 else "see above"
    if part.was_dropped:
        times = f"{part.attempts} times"
        hint = f"sshd there, or on a host on the way, has closed the connection {times}: is its MaxStartups too small?"
    return f"nothing could be started on {part.host} (ssh exit code {part.ssh_code}); {hint}"


def must_end(parts: Sequence[Part], least: int) -> str:
    """Why the other hosts must be told to end, as they may not notice by themselves; empty if they need not end."""
    refused = [each.host for each in parts if each.exit_code == 2]
    if refused:
        return f"{refused[0]} refuses the command line"
    absent = [each.host for each in parts if each.lost and not each.started]
    if len(parts) - len(absent) < least:
        return f"{absent[0]} cannot take part"
    return ""

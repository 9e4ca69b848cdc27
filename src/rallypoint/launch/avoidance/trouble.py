"""What counts against a host: it was lost, or a worker failed there for a reason that lies with the host. Pure.

What a script does on its own says nothing about the host: an exception of its own, an exit code, a segmentation fault.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rallypoint.launch.output.failure import WorkerFailure
from rallypoint.launch.output.report import in_a_line


# The kernel's when memory runs out, or somebody's on that host; a page cannot be read; this CPU lacks an instruction.
_SIGNALS = frozenset({signal.SIGKILL, signal.SIGBUS, signal.SIGILL})
# Of errno: EIO, ENXIO, ENODEV, ENOSPC, EROFS, ESTALE, EREMOTEIO, EUCLEAN. Of the CUDA runtime's errors: ECCUncorrectable,
# NvlinkUncorrectable, HardwareStackError, DevicesUnavailable, NoDevice, SystemNotReady, Contained.
_MESSAGES = (
    *("input/output error", "no such device", "no space left on device"),
    *("read-only file system", "stale file handle", "remote i/o error", "structure needs cleaning"),
    *("uncorrectable ecc error", "uncorrectable nvlink error", "hardware stack error"),
    *("device(s) is/are busy or unavailable", "no cuda-capable device is detected"),
    *("system not yet initialized", "or a hardware error"),
)


class Kind(StrEnum):
    """What happened to a host."""

    LOST = "lost"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Something that counts against a host.

    Args:
        host: its name, as the engine or the command line has it.
        kind: what happened to it.
        incident: names the generation of the job; the host is counted once for it.
        why: in words.
    """

    host: str
    kind: Kind
    incident: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {
            "host": self.host,
            "kind": self.kind.value,
            "incident": self.incident,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Trouble:
        """Read what :meth:`to_json` made.

        Raises:
            KeyError, ValueError: it is not such a record.
        """
        return cls(
            host=str(record["host"]),
            kind=Kind(record["kind"]),
            incident=str(record["incident"]),
            why=str(record["why"]),
        )


def is_of_host(failure: WorkerFailure) -> bool:
    """Whether a worker failed for a reason that lies with its host."""
    if failure.stopped_by_us or failure.hung or failure.left_early:
        return False
    if failure.signal in _SIGNALS:
        return True
    raised = failure.raised
    if raised is None or failure.is_symptom():
        return False
    told = f"{raised.shown[0]}: {raised.shown[1]}".lower()
    return any(each in told for each in _MESSAGES)


def of_failure(failure: WorkerFailure, incident: str) -> Trouble | None:
    """What a worker's failure says about its host; None: nothing."""
    if not is_of_host(failure):
        return None
    why = f"rank {failure.rank} {in_a_line(failure)}"
    return Trouble(host=failure.host, kind=Kind.FAILED, incident=incident, why=why)

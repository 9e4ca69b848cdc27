"""What the ends of the hosts' parts say about the hosts, for ``--avoid-hosts``: pure."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.launch.avoidance.trouble import Kind, Trouble

from .merging import Part


def troubles_of(parts: Sequence[Part], incident: str) -> tuple[Trouble, ...]:
    """What counts against a host, by the name that the command line has for it.

    A host that ssh could not reach counts only if others could be reached: else it may be this one's network.

    Args:
        parts: of the job, ended.
        incident: names this job.
    """
    any_started = any(each.started for each in parts)
    found = []
    for part in parts:
        host = part.host.rpartition("@")[2]
        if (
            part.lost
            and not part.was_told
            and (part.started or (any_started and part.ssh_code == 255))
        ):
            how = "its connection ended" if part.started else "ssh did not reach it"
            found.append(Trouble(host=host, kind=Kind.LOST, incident=incident, why=how))
        for record in part.troubles:
            told = Trouble.from_json(record)
            # What a supervisor says of other hosts, this terminal knows itself.
            if told.kind is Kind.FAILED:
                found.append(
                    Trouble(host=host, kind=told.kind, incident=told.incident, why=told.why)
                )
    return tuple(found)

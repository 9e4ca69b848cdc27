"""What the hosts' parts of a job, once ended, say about the hosts, for ``--avoid-hosts``: pure."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.launch.avoidance.trouble import Kind, Trouble

from .merging import Part


def troubles_of(parts: Sequence[Part], incident: str) -> tuple[Trouble, ...]:
    """What counts against each host, under its name on the command line.

    A host that ssh could not reach counts only if others could be reached: else this machine's network may be at fault.

    Args:
        parts: the job's parts, all ended.
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
            # This terminal knows for itself what a supervisor says about other hosts.
            if told.kind is Kind.FAILED:
                found.append(
                    Trouble(host=host, kind=told.kind, incident=told.incident, why=told.why)
                )
    return tuple(found)

"""The name under which this machine is reported to people and engines."""

from __future__ import annotations

from . import addresses, env as environment


# Slurm's name of the node: what `scontrol update NodeName=…` and `--exclude` take. It need not be the host name.
_SLURM = "SLURMD_NODENAME"
VARIABLE = "RALLY_HOST_NAME"


def host_name() -> str:
    """``RALLY_HOST_NAME``, else the name that Slurm knows, else the machine's own."""
    return environment.get(VARIABLE) or environment.get(_SLURM) or addresses.hostname()

"""Volcano: pods of a job with one task, and the plug-ins env and svc. Pure.

In a job with several tasks (`ps` and `worker`, `master` and `worker`) nothing says which of them train together: there
Volcano's plug-in pytorch sets MASTER_ADDR, RANK and WORLD_SIZE.

Source: Volcano, user guides of the plug-ins env, svc and pytorch,
https://github.com/volcano-sh/volcano/tree/master/docs/user-guide
"""

from __future__ import annotations

import re

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.defaults import MASTER_PORT

from .cluster import Cluster, ClusterLevel, Placement
from .variables import (
    FLAGS_HINT,
    ClusterVariables,
    Text,
    check_below,
    hosts_in,
    names,
    own_address,
    own_port,
)


_INDEX = ("VC_TASK_INDEX", "VK_TASK_INDEX")  # the plug-in sets both, to the same number


def _tasks(variables: ClusterVariables) -> list[Text]:
    """The variables that list the hosts of a task: VC_<TASK>_HOSTS."""
    listed = (name for name in variables.env if re.fullmatch(r"VC_.+_HOSTS", name))
    return [found for name in sorted(listed) if (found := variables.text(name)) is not None]


def _detect(variables: ClusterVariables) -> bool:
    return variables.text(*_INDEX) is not None and len(_tasks(variables)) == 1


def _place(variables: ClusterVariables) -> Placement | None:
    index = variables.need(*_INDEX)
    listed = _tasks(variables)[0]
    size = variables.need(f"{listed.name.removesuffix('HOSTS')}NUM")
    hosts = hosts_in(listed, listed.text.split(","), size)
    check_below(index, size, FLAGS_HINT)
    other = variables.number(_INDEX[1])
    if other is not None and other.value != index.value:
        problem = f"differs from {index.name}, which is {index.value}"
        raise ConfigError(other.name, str(other.value), problem, FLAGS_HINT)
    if size.value == 1:
        return None
    address = own_address(variables, size.value) or Text(listed.name, hosts[0])
    port = own_port(variables)
    return Placement.one_per_machine(
        source="Volcano",
        num_nodes=size.value,
        node_rank=index.value,
        master_addr=address.text,
        master_port=MASTER_PORT if port is None else port.value,
        variables=names(index, size, address, port),
    )


VOLCANO = Cluster(name="Volcano", level=ClusterLevel.PLATFORM, detect=_detect, place=_place)

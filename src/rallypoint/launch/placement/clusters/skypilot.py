"""SkyPilot: nodes that execute the `run` section of a task. Pure.

`setup` has other variables (SKYPILOT_SETUP_NODE_RANK), and no job of several nodes runs there.

Source: SkyPilot, "Environment variables" and "Distributed multi-node jobs",
https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html,
https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
"""

from __future__ import annotations

import re

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.defaults import MASTER_PORT

from .cluster import Cluster, ClusterLevel, Placement
from .variables import (
    FLAGS_HINT,
    ClusterVariables,
    Number,
    Text,
    check_below,
    hosts_in,
    names,
    own_address,
    own_port,
    port_from_name,
)


def _place(variables: ClusterVariables) -> Placement | None:
    rank = variables.need("SKYPILOT_NODE_RANK")
    listed = variables.text("SKYPILOT_NODE_IPS")
    if listed is None:
        raise ConfigError(
            "SKYPILOT_NODE_IPS", None, f"not set, although {rank.name} is", FLAGS_HINT
        )
    lines = listed.text.splitlines()
    # SkyPilot before 0.6 gives the number of nodes only by the list.
    size = variables.number("SKYPILOT_NUM_NODES") or Number(listed.name, len(lines))
    hosts = hosts_in(listed, lines, size)
    check_below(rank, size, FLAGS_HINT)
    if size.value == 1:
        return None
    address = own_address(variables, size.value) or Text(listed.name, hosts[0])
    port = own_port(variables)
    # Tasks that each need only a part of the cluster run side by side on it.
    task = variables.text("SKYPILOT_TASK_ID")
    derived_port = MASTER_PORT if task is None else port_from_name(task.text)
    return Placement.one_per_machine(
        source="SkyPilot",
        num_nodes=size.value,
        node_rank=rank.value,
        master_addr=address.text,
        master_port=derived_port if port is None else port.value,
        run_id=None if task is None else re.sub(r"[^\w.-]+", "-", task.text),
        variables=names(rank, size, address, port or task),
    )


SKYPILOT = Cluster(
    name="SkyPilot",
    level=ClusterLevel.PLATFORM,
    detect=lambda variables: variables.text("SKYPILOT_NODE_RANK") is not None,
    place=_place,
)

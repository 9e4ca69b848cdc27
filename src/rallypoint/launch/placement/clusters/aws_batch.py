"""AWS Batch: nodes of a multi-node parallel job. Pure.

Source: AWS Batch User Guide, "Environment variables" of multi-node parallel jobs,
https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
"""

from __future__ import annotations

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.defaults import MASTER_PORT

from .cluster import Cluster, ClusterLevel, Placement
from .variables import (
    FLAGS_HINT,
    LOOPBACK,
    ClusterVariables,
    Text,
    check_below,
    names,
    own_address,
    own_port,
)


def _place(variables: ClusterVariables) -> Placement | None:
    index = variables.need("AWS_BATCH_JOB_NODE_INDEX")
    size = variables.need("AWS_BATCH_JOB_NUM_NODES")
    check_below(index, size, FLAGS_HINT)
    main = variables.need("AWS_BATCH_JOB_MAIN_NODE_INDEX")
    check_below(main, size, FLAGS_HINT)
    if size.value == 1:
        return None
    # Any node may be the main one; its address is the only one that others know, so it is node 0.
    rank = (index.value - main.value) % size.value
    address = own_address(variables, 1 if rank == 0 else size.value)
    if address is None:
        # The main node is not told its own address, and needs none: it serves the store.
        address = (
            Text(main.name, LOOPBACK)
            if rank == 0
            else variables.text("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
        )
    if address is None:
        raise ConfigError(
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
            None,
            "not set, and neither is MASTER_ADDR",
            FLAGS_HINT,
        )
    port = own_port(variables)
    return Placement.one_per_machine(
        source="AWS Batch",
        num_nodes=size.value,
        node_rank=rank,
        master_addr=address.text,
        master_port=MASTER_PORT if port is None else port.value,
        variables=names(index, main, size, address, port),
    )


AWS_BATCH = Cluster(
    name="AWS Batch",
    level=ClusterLevel.PLATFORM,
    detect=lambda variables: variables.text("AWS_BATCH_JOB_NODE_INDEX") is not None,
    place=_place,
)

"""Kubeflow's PyTorchJob (v1) and the like: MASTER_ADDR, RANK and WORLD_SIZE, which count pods, not workers. Pure."""

from __future__ import annotations

from rallypoint.rendezvous.defaults import MASTER_PORT

from .cluster import Cluster, ClusterLevel, Placement
from .variables import ClusterVariables, check_below, names, own_address, own_port


def _detect(variables: ClusterVariables) -> bool:
    env = variables.env
    # LOCAL_RANK marks the environment of a *worker* that some other launcher made: `rally run` there
    # starts a job of its own, as with TORCHELASTIC_RUN_ID.
    needed = env.get("MASTER_ADDR") and env.get("RANK") and env.get("WORLD_SIZE")
    return bool(needed and not env.get("LOCAL_RANK"))


def _place(variables: ClusterVariables) -> Placement | None:
    rank, size = variables.need("RANK"), variables.need("WORLD_SIZE")
    check_below(
        rank, size, "here both count nodes (pods), as Kubeflow's PyTorchJob sets them, not workers"
    )
    if size.value == 1:
        return None
    # A loopback address is fine here: PyTorchJob gives "localhost" to its master pod.
    address = own_address(variables, 1)
    port = own_port(variables)
    return Placement.one_per_machine(
        source="MASTER_ADDR/RANK/WORLD_SIZE",
        num_nodes=size.value,
        node_rank=rank.value,
        master_addr=None if address is None else address.text,
        master_port=MASTER_PORT if port is None else port.value,
        variables=names(rank, size, address, port),
    )


PLAIN = Cluster(
    name="MASTER_ADDR/RANK/WORLD_SIZE", level=ClusterLevel.VARIABLES, detect=_detect, place=_place
)

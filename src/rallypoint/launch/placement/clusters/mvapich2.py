"""MVAPICH2: `mpirun_rsh`, or Hydra. Pure."""

from __future__ import annotations

from .cluster import Cluster, ClusterLevel, Placement
from .mpi import hydra, place_in_mpi
from .variables import ClusterVariables


def _place(variables: ClusterVariables) -> Placement | None:
    rank = variables.need("MV2_COMM_WORLD_RANK")
    size = variables.need("MV2_COMM_WORLD_SIZE")
    local = ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)
    job = hydra(variables.ancestors())
    return place_in_mpi(variables, "MVAPICH2", rank, size, local, job)


MVAPICH2 = Cluster(
    name="MVAPICH2",
    level=ClusterLevel.LAUNCHER,
    detect=lambda variables: bool(variables.env.get("MV2_COMM_WORLD_RANK")),
    place=_place,
)

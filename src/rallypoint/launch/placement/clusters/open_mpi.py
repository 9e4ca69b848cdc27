"""Open MPI: `mpirun`. Pure."""

from __future__ import annotations

from .cluster import Cluster, ClusterLevel, Placement
from .mpi import place_in_mpi
from .variables import ClusterVariables


def _place(variables: ClusterVariables) -> Placement | None:
    rank = variables.need("OMPI_COMM_WORLD_RANK")
    size = variables.need("OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    # mpirun's number for this very start
    job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return place_in_mpi(variables, "Open MPI", rank, size, local, job)


OPEN_MPI = Cluster(
    name="Open MPI",
    level=ClusterLevel.LAUNCHER,
    detect=lambda variables: bool(variables.env.get("OMPI_COMM_WORLD_RANK")),
    place=_place,
)

"""MPICH, Intel MPI and others with PMI: Hydra's `mpiexec`, or HPE's PALS. Pure."""

from __future__ import annotations

from . import flux
from .cluster import Cluster, ClusterLevel, Placement
from .mpi import hydra, place_in_mpi
from .slurm import in_step, set_pmi
from .variables import ClusterVariables


# For MPI jobs that a launcher other than Hydra has started: HPE's PALS numbers them. Failing that, the number of
# the batch job, in which there may be several. Only Hydra hands the caller's whole environment to every
# task; the other mpiruns may leave these on one machine and not on the next.
_JOB_IDS = ("PALS_APID", "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID")


def _detect(variables: ClusterVariables) -> bool:
    if not variables.env.get("PMI_RANK"):
        return False
    # If they repeat those of a Slurm step or a Flux task, that launcher is asked: it knows more.
    if flux.is_task(variables) and flux.gave_pmi(variables):
        return False
    return not (in_step(variables) and set_pmi(variables))


def _place(variables: ClusterVariables) -> Placement | None:
    rank, size = variables.need("PMI_RANK"), variables.need("PMI_SIZE")
    # MPI_LOCAL*: Hydra (MPICH, Intel MPI). PMI_LOCAL_*: the MPICH of HPE Cray machines.
    local = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    source = "Intel MPI" if variables.env.get("I_MPI_MPIRUN") else "MPICH"
    job = hydra(variables.ancestors()) or variables.text(*_JOB_IDS)
    return place_in_mpi(variables, source, rank, size, local, job)


MPICH = Cluster(name="MPICH", level=ClusterLevel.LAUNCHER, detect=_detect, place=_place)

"""Which cluster has started this supervisor, and its place in the job.

To add a built-in kind, write its file and name its :class:`~.cluster.Cluster` in :data:`BUILT_IN`. A package declares one
with an entry point in the group :data:`CLUSTERS`; its level decides its place in the order, before the built-in ones
of that level:

    [project.entry-points."rallypoint.clusters"]
    skynet = "my_package.cluster:SKYNET"

    level       found                                   taken for                       hosts come from
    LAUNCHER    OMPI_COMM_WORLD_RANK                    Open MPI                        MASTER_ADDR, mpirun's address, Slurm
                MV2_COMM_WORLD_RANK                     MVAPICH2                        MASTER_ADDR, Slurm
                PMI_RANK                                MPICH, Intel MPI                MASTER_ADDR, Slurm
    SCHEDULER   FLUX_TASK_RANK                          Flux                            MASTER_ADDR
                SLURM_PROCID and a step of srun         Slurm                           the step's node list
    PLATFORM    AWS_BATCH_JOB_NODE_INDEX                AWS Batch, several nodes        the main node's address
                SM_HOSTS and SM_CURRENT_HOST            SageMaker                       SM_HOSTS
                SKYPILOT_NODE_RANK                      SkyPilot                        SKYPILOT_NODE_IPS
                VC_TASK_INDEX and one VC_<TASK>_HOSTS   Volcano, one task               VC_<TASK>_HOSTS
                JOB_COMPLETION_INDEX, MASTER_ADDR and   Kubernetes, indexed Job         MASTER_ADDR
                WORLD_SIZE without RANK
    VARIABLES   MASTER_ADDR, RANK and WORLD_SIZE        Kubeflow's PyTorchJob and kin   MASTER_ADDR

[Note: the innermost launcher wins]
Launchers nest: `sbatch` runs a script, the script runs `mpirun`, and Open MPI's `mpirun` starts its
own daemons with `srun`, one per machine. A task then sees both OMPI_COMM_WORLD_RANK and the
SLURM_PROCID of *the daemon above it*; tasks on mpirun's own machine see no step at all. Only the
MPI variables are about the task, so OMPI_* and MV2_*, which nothing but mpirun sets, come first.
PMI_RANK and PMI_SIZE are different: `srun --mpi=pmi2` sets them too. If they say what the Slurm
step says, then srun set them and Slurm is taken, as it also knows the hosts; if they differ, a
Hydra `mpiexec` below srun did, and they are about the task while SLURM_PROCID is about its proxy.
Flux sets PMI_* too, and is told apart from a Hydra below it in the same way. Flux is often started by srun: then
FLUX_TASK_RANK is about the task and SLURM_PROCID, if still set, about Flux's own broker, so Flux is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint._core.plug_ins import declared, where
from rallypoint.errors import LaunchError

from .aws_batch import AWS_BATCH
from .cluster import Cluster, ClusterLevel, Placement
from .flux import FLUX
from .kubernetes import KUBERNETES
from .mpich import MPICH
from .mvapich2 import MVAPICH2
from .open_mpi import OPEN_MPI
from .plain import PLAIN
from .sagemaker import SAGEMAKER
from .skypilot import SKYPILOT
from .slurm import SLURM
from .variables import ClusterVariables
from .volcano import VOLCANO


CLUSTERS = "rallypoint.clusters"
BUILT_IN = (
    OPEN_MPI,
    MVAPICH2,
    MPICH,
    FLUX,
    SLURM,
    AWS_BATCH,
    SAGEMAKER,
    SKYPILOT,
    VOLCANO,
    KUBERNETES,
    PLAIN,
)

# A rally (or torchrun) worker that itself calls `rally run` starts a job of its own: its cluster
# variables describe the job it is already part of.
_INSIDE_A_WORKER = ("TORCHELASTIC_RUN_ID", "RALLY_GENERATION")
_FLAG_DEFAULTS = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")


def detect(
    env: Mapping[str, str], ancestors: Callable[[], Sequence[Sequence[str]]] = tuple
) -> Placement | None:
    """This process's place in a job of several supervisors. Flags win over it.

    Args:
        env: the environment, as it was when `rally run` started.
        ancestors: gives the command lines of the processes above this one, the nearest first.

    Returns:
        None if this is a run of its own: no cluster, a job of one task, a shell or script that
        merely runs inside an allocation, a worker of another job, or an environment whose
        ``PET_*`` variables already set the flags.

    Raises:
        ConfigError: a cluster's variables are set but cannot be right, or do not say where node
            0 runs; names the variable and its value.
        LaunchError: a plug-in cannot be loaded.
    """
    if any(env.get(name) for name in (*_INSIDE_A_WORKER, *_FLAG_DEFAULTS)):
        return None
    return place(ClusterVariables(env, ancestors), ordered([*plug_ins(), *BUILT_IN]))


def ordered(clusters: Iterable[Cluster]) -> list[Cluster]:
    """The clusters in the order in which they are asked: the innermost launcher first."""
    return sorted(clusters, key=lambda each: each.level)


def place(variables: ClusterVariables, clusters: Sequence[Cluster]) -> Placement | None:
    """Like :func:`detect`, with these clusters in this order."""
    for cluster in clusters:
        if cluster.level is not ClusterLevel.VARIABLES and cluster.detect(variables):
            if (found := cluster.place(variables)) is not None:
                return found
            # The innermost launcher made a single task. Plain variables still count, for scripts that
            # call `srun -n1 -w $host env RANK=$i … rally run` once for each host.
            break
    plain = (each for each in clusters if each.level is ClusterLevel.VARIABLES)
    return next((each.place(variables) for each in plain if each.detect(variables)), None)


def plug_ins() -> list[Cluster]:
    """The clusters of installed packages.

    Raises:
        LaunchError: one cannot be loaded: without it, the job would start as a different one.
    """
    found = []
    for point in declared(CLUSTERS):
        try:
            cluster = point.load()
        except Exception as error:
            problem = f"cannot be loaded: {type(error).__name__}: {error}"
            raise LaunchError(f"cluster {point.name!r} {problem} ({where(point)})") from error
        if not isinstance(cluster, Cluster):
            problem = f"is {type(cluster).__name__}, not a Cluster"
            raise LaunchError(f"cluster {point.name!r} {problem} ({where(point)})")
        found.append(cluster)
    return found

"""What engines call a job and its nodes, from the variables they document: for a site's own tools. Pure.

Sources: sbatch(1) "Output environment variables"; kubernetes.io, "Expose Pod Information to Containers Through Environment
Variables" and "Indexed Job"; PBS Professional Reference Guide, qsub(1B); LSF "Environment variables set for job execution";
SGE qsub(1); flux-environment(7); AWS Batch "Job environment variables"; SageMaker training toolkit "Environment variables";
SkyPilot "Environment variables". Ray's are set by :mod:`rallypoint.ray`.
"""

from __future__ import annotations

from collections.abc import Mapping


# Engine -> the variable that is set where it runs a job, and what its variables tell, by the name in the report.
_ENGINES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "slurm": (
        "SLURM_JOB_ID",
        {
            "job": "SLURM_JOB_ID",
            "step": "SLURM_STEP_ID",
            "node": "SLURMD_NODENAME",
            "nodes": "SLURM_JOB_NODELIST",
            "cluster": "SLURM_CLUSTER_NAME",
            "array_job": "SLURM_ARRAY_JOB_ID",
            "array_task": "SLURM_ARRAY_TASK_ID",
            "restarts": "SLURM_RESTART_COUNT",
        },
    ),
    "kubernetes": (
        "KUBERNETES_SERVICE_HOST",
        {
            "pod": "HOSTNAME",
            "node": "RALLY_HOST_NAME",
            "index": "JOB_COMPLETION_INDEX",
        },
    ),
    "ray": ("RALLY_RAY_NODE", {"job": "RALLY_RAY_JOB", "node": "RALLY_RAY_NODE"}),
    "pbs": ("PBS_JOBID", {"job": "PBS_JOBID", "array_task": "PBS_ARRAY_INDEX"}),
    "lsf": ("LSB_JOBID", {"job": "LSB_JOBID", "array_task": "LSB_JOBINDEX", "hosts": "LSB_HOSTS"}),
    "sge": ("SGE_TASK_ID", {"job": "JOB_ID", "array_task": "SGE_TASK_ID", "queue": "QUEUE"}),
    "flux": ("FLUX_JOB_ID", {"job": "FLUX_JOB_ID"}),
    "aws_batch": (
        "AWS_BATCH_JOB_ID",
        {
            "job": "AWS_BATCH_JOB_ID",
            "attempt": "AWS_BATCH_JOB_ATTEMPT",
            "node": "AWS_BATCH_JOB_NODE_INDEX",
            "queue": "AWS_BATCH_JQ_NAME",
        },
    ),
    "sagemaker": ("SM_CURRENT_HOST", {"job": "TRAINING_JOB_NAME", "node": "SM_CURRENT_HOST"}),
    "skypilot": ("SKYPILOT_TASK_ID", {"job": "SKYPILOT_TASK_ID", "node": "SKYPILOT_NODE_RANK"}),
}


def found(env: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What the engines that run this process say; there may be several, one inside another.

    Args:
        env: variables.
    """
    return {
        engine: {name: env[variable] for name, variable in told.items() if env.get(variable)}
        for engine, (sign, told) in _ENGINES.items()
        if env.get(sign)
    }

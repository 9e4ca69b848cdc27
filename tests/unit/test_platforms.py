"""Environments made by platforms that start pods or machines, and how launchers nest in them."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.placement.clusters import Placement, detect
from rallypoint.launch.placement.clusters.variables import port_from_name


Env = dict[str, str]

# Node 2 of a multi-node parallel job of 4 whose main node is node 1.
AWS_BATCH = {
    "AWS_BATCH_JOB_ID": "6f0a1c5e-32cd-4c55-91c4-dd9d9fcdd0a3#2",
    "AWS_BATCH_JOB_ATTEMPT": "1",
    "AWS_BATCH_CE_NAME": "p5-spot",
    "AWS_BATCH_JQ_NAME": "training",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.17.4",
}
AWS_BATCH_MAIN = {
    name: value for name, value in AWS_BATCH.items() if not name.endswith("IPV4_ADDRESS")
} | {"AWS_BATCH_JOB_NODE_INDEX": "1"}

SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2","algo-3"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "8",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_MODEL_DIR": "/opt/ml/model",
}

SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.1.0.7\n10.1.0.9\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-03-06-21-18-31-563597_mycluster_1",
}
SKYPILOT_PORT = port_from_name(SKYPILOT["SKYPILOT_TASK_ID"])

# The second pod of a job with the single task `worker`, as the plug-ins env and svc set it up.
VOLCANO = {
    "VK_TASK_INDEX": "1",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "train-worker-0.train,train-worker-1.train",
}
# A pod of a job with a master and two workers; the pytorch plug-in adds the last line.
VOLCANO_TASKS = VOLCANO | {"VC_MASTER_NUM": "1", "VC_MASTER_HOSTS": "train-master-0.train"}
PYTORCH = {"MASTER_PORT": "23456", "RANK": "2", "WORLD_SIZE": "3"}
VOLCANO_PYTORCH = VOLCANO_TASKS | PYTORCH | {"MASTER_ADDR": "train-master-0.train"}

# Pod 3 of an indexed Job with MASTER_ADDR and WORLD_SIZE in its template.
INDEXED_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "HOSTNAME": "train-3",
    "JOB_COMPLETION_INDEX": "3",
    "MASTER_ADDR": "train-0.train-svc",
    "WORLD_SIZE": "4",
}
# Kubeflow's TrainJob runs a JobSet, so its pods have an index as well.
TRAINJOB = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
# Kubeflow's PyTorchJob with an elasticPolicy and a master: both sets of variables.
PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}

# Rank 1 of `mpirun -np 2` (Open MPI 5), one task on each of two machines.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "node-a",
}


PLATFORMS = [AWS_BATCH, SAGEMAKER, SKYPILOT, VOLCANO, INDEXED_JOB]

# Inside a batch job, where only mpirun's variables are about a task.
PBS = {
    "PBS_JOBID": "4217.pbs01",
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_NODEFILE": "/var/spool/pbs/aux/4217.pbs01",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
    "PBS_O_WORKDIR": "/home/u",
}
LSF = {
    "LSB_JOBID": "8812",
    "LSB_JOBINDEX": "0",
    "LSB_HOSTS": "node-a node-b",
    "LSB_MCPU_HOSTS": "node-a 1 node-b 1",
    "LSB_QUEUE": "gpu",
}


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def found(env: Env) -> Placement:
    placement = detect(env)
    assert placement is not None
    return placement


# ---- what is found -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(AWS_BATCH, ("AWS Batch", 4, 1, "10.0.17.4", 29500, None), id="aws batch"),
        pytest.param(
            AWS_BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "0"},
            ("AWS Batch", 4, 3, "10.0.17.4", 29500, None),
            id="aws batch, a node before the main one",
        ),
        pytest.param(
            AWS_BATCH_MAIN,
            ("AWS Batch", 4, 0, "127.0.0.1", 29500, None),
            id="aws batch, the main node is not told its address",
        ),
        pytest.param(
            AWS_BATCH | {"MASTER_ADDR": "efa-1", "MASTER_PORT": "7000"},
            ("AWS Batch", 4, 1, "efa-1", 7000, None),
            id="aws batch, the user's own master wins",
        ),
        pytest.param(SAGEMAKER, ("SageMaker", 3, 1, "algo-1", 29500, None), id="sagemaker"),
        pytest.param(
            SAGEMAKER | {"SM_HOSTS": '["algo-3", "algo-1", "algo-2"]'},
            ("SageMaker", 3, 1, "algo-1", 29500, None),
            id="sagemaker, hosts in another order",
        ),
        pytest.param(
            SKYPILOT,
            (
                "SkyPilot",
                2,
                1,
                "10.1.0.7",
                SKYPILOT_PORT,
                "sky-2026-03-06-21-18-31-563597_mycluster_1",
            ),
            id="skypilot",
        ),
        pytest.param(
            without(SKYPILOT, "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"),
            ("SkyPilot", 2, 1, "10.1.0.7", 29500, None),
            id="skypilot, which told the addresses only",
        ),
        pytest.param(
            SKYPILOT | {"MASTER_ADDR": "head", "MASTER_PORT": "8008"},
            ("SkyPilot", 2, 1, "head", 8008, "sky-2026-03-06-21-18-31-563597_mycluster_1"),
            id="skypilot, the user's own master wins",
        ),
        pytest.param(
            VOLCANO, ("Volcano", 2, 1, "train-worker-0.train", 29500, None), id="volcano, one task"
        ),
        pytest.param(
            without(VOLCANO, "VC_TASK_INDEX"),
            ("Volcano", 2, 1, "train-worker-0.train", 29500, None),
            id="volcano, the older name of the index",
        ),
        pytest.param(
            VOLCANO_PYTORCH,
            ("MASTER_ADDR/RANK/WORLD_SIZE", 3, 2, "train-master-0.train", 23456, None),
            id="volcano, plug-in pytorch",
        ),
        pytest.param(
            INDEXED_JOB,
            ("Kubernetes Job", 4, 3, "train-0.train-svc", 29500, None),
            id="kubernetes, an index beside what the template says",
        ),
        pytest.param(
            INDEXED_JOB | {"RANK": "1", "MASTER_PORT": "3389"},
            ("MASTER_ADDR/RANK/WORLD_SIZE", 4, 1, "train-0.train-svc", 3389, None),
            id="kubernetes, RANK of the template wins over the index",
        ),
    ],
)
def test_realistic_environments(env: Env, expected: tuple[object, ...]) -> None:
    it = found(env)
    assert (
        it.source,
        it.num_nodes,
        it.node_rank,
        it.master_addr,
        it.master_port,
        it.run_id,
    ) == expected
    assert (it.local_rank, it.tasks_per_machine) == (0, 1)
    assert (it.machine_rank, it.num_machines) == (it.node_rank, it.num_nodes)
    assert not it.one_worker_per_task


def test_the_nodes_of_a_batch_job_have_one_rank_each_and_the_main_node_is_0() -> None:
    for main in range(4):
        ranks = []
        for index in range(4):
            env = AWS_BATCH if index != main else AWS_BATCH_MAIN
            numbers = {
                "AWS_BATCH_JOB_NODE_INDEX": str(index),
                "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(main),
            }
            ranks.append(found(env | numbers).node_rank)
        assert sorted(ranks) == [0, 1, 2, 3]
        assert ranks[main] == 0


def test_two_tasks_on_one_skypilot_cluster_have_ports_of_their_own() -> None:
    tasks = [
        found(SKYPILOT | {"SKYPILOT_TASK_ID": f"sky-2026-03-06-21-18-31-563597_mycluster_{number}"})
        for number in range(1, 5)
    ]
    assert len({task.master_port for task in tasks}) == 4
    assert all(15000 <= (task.master_port or 0) < 25000 for task in tasks)


# ---- what is left alone ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(
            {"AWS_BATCH_JOB_ID": "6f0a", "AWS_BATCH_JOB_ATTEMPT": "1"}, id="a job of one container"
        ),
        pytest.param(
            {"AWS_BATCH_JOB_ID": "6f0a:3", "AWS_BATCH_JOB_ARRAY_INDEX": "3"}, id="an array job"
        ),
        pytest.param(
            AWS_BATCH_MAIN
            | {
                "AWS_BATCH_JOB_NUM_NODES": "1",
                "AWS_BATCH_JOB_NODE_INDEX": "0",
                "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            },
            id="a multi-node job of one node",
        ),
        pytest.param(
            SAGEMAKER | {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
            id="one sagemaker host",
        ),
        pytest.param({"SM_MODEL_DIR": "/opt/ml/model", "SM_NUM_GPUS": "1"}, id="no hosts"),
        pytest.param(
            {
                "SKYPILOT_NODE_RANK": "0",
                "SKYPILOT_NODE_IPS": "10.1.0.7",
                "SKYPILOT_NUM_NODES": "1",
            },
            id="a skypilot cluster of one node",
        ),
        pytest.param(
            {
                "SKYPILOT_SETUP_NODE_RANK": "1",
                "SKYPILOT_SETUP_NODE_IPS": "10.1.0.7\n10.1.0.9",
                "SKYPILOT_TASK_ID": "sky-1",
            },
            id="skypilot's setup",
        ),
        pytest.param(VOLCANO_TASKS, id="a volcano job with several tasks"),
        pytest.param(
            without(VOLCANO, "VC_WORKER_HOSTS", "VC_WORKER_NUM"), id="volcano without plug-in svc"
        ),
        pytest.param(
            without(VOLCANO, "VC_TASK_INDEX", "VK_TASK_INDEX"), id="volcano without plug-in env"
        ),
        pytest.param(
            VOLCANO
            | {
                "VC_TASK_INDEX": "0",
                "VK_TASK_INDEX": "0",
                "VC_WORKER_NUM": "1",
                "VC_WORKER_HOSTS": "train-worker-0.train",
            },
            id="one volcano pod",
        ),
        pytest.param(without(INDEXED_JOB, "MASTER_ADDR", "WORLD_SIZE"), id="pods that work alone"),
        pytest.param(without(INDEXED_JOB, "WORLD_SIZE"), id="an index and a master only"),
        pytest.param(
            INDEXED_JOB | {"WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "0"}, id="one indexed pod"
        ),
        pytest.param(INDEXED_JOB | {"LOCAL_RANK": "0"}, id="a worker in an indexed pod"),
        pytest.param(TRAINJOB, id="PET_* of a TrainJob, beside the index"),
        pytest.param(PYTORCHJOB, id="PET_* of a PyTorchJob, beside RANK"),
        pytest.param(INDEXED_JOB | {"PET_NNODES": "4"}, id="PET_NNODES in an indexed pod"),
        *(
            pytest.param(env | {name: "7"}, id=f"{name} beside {kind}")
            for kind, env in {
                "aws batch": AWS_BATCH,
                "sagemaker": SAGEMAKER,
                "skypilot": SKYPILOT,
                "volcano": VOLCANO,
                "an index": INDEXED_JOB,
            }.items()
            for name in ("RALLY_GENERATION", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
        ),
    ],
)
def test_a_run_of_its_own_is_left_alone(env: Env) -> None:
    assert detect(env) is None


# ---- nesting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_mpirun_on_a_platform_decides(platform: Env) -> None:
    it = found(platform | OPEN_MPI)
    assert (it.source, it.num_nodes, it.node_rank, it.master_addr) == ("Open MPI", 2, 1, "node-a")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_single_task_of_mpirun_on_a_platform_is_a_job_of_its_own(platform: Env) -> None:
    alone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert detect(platform | OPEN_MPI | alone) is None


@pytest.mark.parametrize("batch", [PBS, LSF])
def test_in_a_batch_job_mpirun_makes_tasks_and_a_script_is_none(batch: Env) -> None:
    it = found(batch | OPEN_MPI)
    assert (it.source, it.num_nodes, it.node_rank, it.master_addr) == ("Open MPI", 2, 1, "node-a")
    assert detect(batch) is None
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    it = found(batch | hydra | {"MASTER_ADDR": "node-a"})
    assert (it.source, it.node_rank) == ("MPICH", 1)
    assert it.run_id in {"4217.pbs01", "8812"}


# ---- what cannot be right ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "field", "value"),
    [
        (AWS_BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "4"}, "AWS_BATCH_JOB_NODE_INDEX", "4"),
        (AWS_BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "two"}, "AWS_BATCH_JOB_NODE_INDEX", "two"),
        (AWS_BATCH | {"AWS_BATCH_JOB_NUM_NODES": ""}, "AWS_BATCH_JOB_NUM_NODES", None),
        (AWS_BATCH | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "9"}, "AWS_BATCH_JOB_MAIN_NODE_INDEX", "9"),
        (
            AWS_BATCH_MAIN | {"AWS_BATCH_JOB_NODE_INDEX": "3"},
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
            None,
        ),
        (AWS_BATCH | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR", "localhost"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS", "algo-1,algo-2"),
        (SAGEMAKER | {"SM_HOSTS": "[]"}, "SM_HOSTS", "[]"),
        (SAGEMAKER | {"SM_HOSTS": "[1, 2]"}, "SM_HOSTS", "[1, 2]"),
        (
            SAGEMAKER | {"SM_HOSTS": '["algo-2","algo-2"]'},
            "SM_HOSTS",
            '["algo-2","algo-2"]',
        ),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-4"}, "SM_CURRENT_HOST", "algo-4"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK", "2"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "-1"}, "SKYPILOT_NODE_RANK", "-1"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS", None),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "10.1.0.7"}, "SKYPILOT_NODE_IPS", "10.1.0.7"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "a\n\nb"}, "SKYPILOT_NODE_IPS", "a\n\nb"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "a b\nc"}, "SKYPILOT_NODE_IPS", "a b\nc"),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "x"}, "SKYPILOT_NUM_NODES", "x"),
        (SKYPILOT | {"MASTER_PORT": "0"}, "MASTER_PORT", "0"),
        (VOLCANO | {"VC_TASK_INDEX": "2"}, "VC_TASK_INDEX", "2"),
        (VOLCANO | {"VC_TASK_INDEX": "0"}, "VK_TASK_INDEX", "1"),
        (VOLCANO | {"VC_WORKER_NUM": ""}, "VC_WORKER_NUM", None),
        (VOLCANO | {"VC_WORKER_NUM": "3"}, "VC_WORKER_HOSTS", VOLCANO["VC_WORKER_HOSTS"]),
        (VOLCANO | {"VC_WORKER_HOSTS": "a,"}, "VC_WORKER_HOSTS", "a,"),
        (INDEXED_JOB | {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX", "4"),
        (INDEXED_JOB | {"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX", "x"),
        (INDEXED_JOB | {"WORLD_SIZE": "four"}, "WORLD_SIZE", "four"),
        (INDEXED_JOB | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR", "localhost"),
    ],
)
def test_values_that_contradict_are_named(env: Env, field: str, value: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(env)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert field in str(caught.value)


EVERY = [*PLATFORMS, AWS_BATCH_MAIN, VOLCANO_PYTORCH]


@example(AWS_BATCH_MAIN, {"MASTER_ADDR": "[[]]"})
@given(
    st.sampled_from(EVERY),
    st.dictionaries(
        st.sampled_from(sorted({name for env in EVERY for name in env} | {"MASTER_ADDR"})),
        st.sampled_from(["", "0", "1", "2", "4", "-1", "x", "a,b", "a\nb", "[[]]", '["x"]']),
        max_size=4,
    ),
)
def test_a_damaged_environment_gives_a_sound_placement_or_a_config_error(
    env: Env, damage: Env
) -> None:
    try:
        placement = detect(env | damage)
    except ConfigError:
        return
    if placement is None:
        return
    assert 0 <= placement.node_rank < placement.num_nodes
    assert placement.num_nodes > 1
    assert 0 <= placement.local_rank < placement.tasks_per_machine <= placement.num_nodes
    assert 0 <= placement.machine_rank < placement.num_machines <= placement.num_nodes
    assert placement.master_addr
    assert 0 < (placement.master_port or 0) < 65536
    assert set(placement.variables) <= {name for name, value in (env | damage).items() if value}


# ---- what is shown -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            AWS_BATCH,
            "AWS Batch: node 1 of 4, master 10.0.17.4:29500 (from AWS_BATCH_JOB_NODE_INDEX,"
            " AWS_BATCH_JOB_MAIN_NODE_INDEX, AWS_BATCH_JOB_NUM_NODES,"
            " AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS)",
        ),
        (
            SAGEMAKER,
            "SageMaker: node 1 of 3, master algo-1:29500 (from SM_CURRENT_HOST, SM_HOSTS)",
        ),
        (
            SKYPILOT,
            f"SkyPilot: node 1 of 2, master 10.1.0.7:{SKYPILOT_PORT} (from SKYPILOT_NODE_RANK,"
            " SKYPILOT_NUM_NODES, SKYPILOT_NODE_IPS, SKYPILOT_TASK_ID)",
        ),
        (
            VOLCANO,
            "Volcano: node 1 of 2, master train-worker-0.train:29500 (from VC_TASK_INDEX,"
            " VC_WORKER_NUM, VC_WORKER_HOSTS)",
        ),
        (
            INDEXED_JOB,
            "Kubernetes Job: node 3 of 4, master train-0.train-svc:29500 (from"
            " JOB_COMPLETION_INDEX, WORLD_SIZE, MASTER_ADDR)",
        ),
    ],
)
def test_the_line_shown_says_what_was_found_and_where(env: Env, line: str) -> None:
    assert found(env).describe() == line

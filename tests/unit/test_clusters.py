"""Environments as clusters make them, and what `rally run` must conclude from them."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.placement.clusters import (
    Cluster,
    ClusterLevel,
    Placement,
    detect,
    slurm,
)
from rallypoint.launch.placement.clusters.detection import BUILT_IN, ordered, place
from rallypoint.launch.placement.clusters.nodelist import expand_nodelist, first_host
from rallypoint.launch.placement.clusters.variables import ClusterVariables


# What `srun` (Slurm 23) puts into task 1 of `sbatch --nodes=4 --ntasks-per-node=1`, step 0.
SLURM_ONE_PER_NODE = {
    "SLURM_JOB_ID": "1230234",
    "SLURM_JOBID": "1230234",
    "SLURM_JOB_NAME": "train.sh",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURM_NODELIST": "node[01-04]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[01-04]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node02",
    "SLURM_SRUN_COMM_HOST": "10.19.0.68",
}

# The script of the same job, where no srun has run yet.
SLURM_BATCH_SCRIPT = {
    name: value for name, value in SLURM_ONE_PER_NODE.items() if "STEP" not in name
} | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node01"}

# A shell of `salloc` with LaunchParameters=use_interactive_step; it has the job's task count.
SLURM_INTERACTIVE_STEP = {
    "SLURM_JOB_ID": "1808417",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "gpu[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "16",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PTY_PORT": "34889",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEPID": "4294967290",
    "SLURM_STEP_NODELIST": "gpu0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}

# Rank 5 of `mpirun -np 8` (Open MPI 4) on two machines, started on the first.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "8",
    "OMPI_MCA_orte_hnp_uri": "3236233216.0;tcp://172.20.102.82,192.168.7.82:33559",
    "OMPI_MCA_orte_local_daemon_uri": "3236233216.1;tcp://172.20.102.83,192.168.7.83:41021",
    "PMIX_NAMESPACE": "3236233217",
    "PMIX_RANK": "5",
    "PMIX_SERVER_URI2": "3236233216.1;tcp4://127.0.0.1:40013",
}

INTEL_MPI = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
    "I_MPI_MPIRUN": "mpirun",
    "MASTER_ADDR": "icx07",
}

MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "mv-a",
    "MASTER_PORT": "31000",
}

PYTORCHJOB = {
    "MASTER_ADDR": "resnet-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "PYTHONUNBUFFERED": "0",
}


def facts(placement: Placement | None) -> dict[str, object]:
    assert placement is not None
    names = (
        "source num_nodes node_rank master_addr master_port run_id"
        " local_rank tasks_per_machine machine_rank num_machines machines_known"
    )
    return {name: getattr(placement, name) for name in names.split()}


# ---- what is found -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(
            SLURM_ONE_PER_NODE,
            ("Slurm job 1230234", 4, 1, "node01", 15234, "1230234.0", 0, 1, 1, 4, True),
            id="slurm, one task per node",
        ),
        pytest.param(
            # --ntasks=7 on 2 nodes, cyclic: task 5 is on the second node.
            SLURM_ONE_PER_NODE
            | {
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": "3",
                "SLURM_STEP_NODELIST": "gpu-[3,11]-ib",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_NUM_TASKS": "7",
                "SLURM_STEP_TASKS_PER_NODE": "4,3",
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "2",
                "SLURM_NODEID": "1",
            },
            ("Slurm job 77", 7, 5, "gpu-3-ib", 18104, "77.3", 2, 3, 1, 2, True),
            id="slurm, uneven tasks in a step on part of the job's nodes",
        ),
        pytest.param(
            SLURM_ONE_PER_NODE
            | {
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NODELIST": "node03",
                "SLURM_STEP_TASKS_PER_NODE": "4",
                "SLURM_PROCID": "3",
                "SLURM_LOCALID": "3",
                "SLURM_NODEID": "0",
            },
            ("Slurm job 1230234", 4, 3, "127.0.0.1", 15234, "1230234.0", 3, 4, 0, 1, True),
            id="slurm, all tasks on one machine need no network",
        ),
        pytest.param(
            SLURM_ONE_PER_NODE | {"MASTER_ADDR": "ib-node01", "MASTER_PORT": "12321"},
            ("Slurm job 1230234", 4, 1, "ib-node01", 12321, "1230234.0", 0, 1, 1, 4, True),
            id="slurm, the user's own master wins",
        ),
        pytest.param(
            {k: v for k, v in SLURM_ONE_PER_NODE.items() if not k.startswith("SLURM_STEP_N")},
            ("Slurm job 1230234", 4, 1, "node01", 15234, "1230234.0", 0, 1, 1, 4, True),
            id="slurm, job-level variables only",
        ),
        pytest.param(
            # srun typed into the shell of salloc: job name and terminal leak into the step.
            SLURM_ONE_PER_NODE | {"SLURM_JOB_NAME": "interactive", "SLURM_PTY_PORT": "34889"},
            ("Slurm job 1230234", 4, 1, "node01", 15234, "1230234.0", 0, 1, 1, 4, True),
            id="slurm, srun from an interactive shell",
        ),
        pytest.param(
            SLURM_ONE_PER_NODE | {"SLURM_JOB_NAME": "bash"},
            ("Slurm job 1230234", 4, 1, "node01", 15234, "1230234.0", 0, 1, 1, 4, True),
            id="slurm, srun below `salloc bash`",
        ),
        pytest.param(
            # sbatch called in a terminal of srun --pty: SLURM_PTY_PORT leaks into the job.
            SLURM_ONE_PER_NODE | {"SLURM_PTY_PORT": "34889"},
            ("Slurm job 1230234", 4, 1, "node01", 15234, "1230234.0", 0, 1, 1, 4, True),
            id="slurm, submitted from a terminal of another job",
        ),
        pytest.param(
            OPEN_MPI,
            ("Open MPI", 8, 5, "172.20.102.82", 18217, "3236233217", 1, 4, 1, 2, False),
            id="open mpi 4, mpirun's address",
        ),
        pytest.param(
            OPEN_MPI | {"MASTER_ADDR": "c3n1", "MASTER_PORT": "29999"},
            ("Open MPI", 8, 5, "c3n1", 29999, "3236233217", 1, 4, 1, 2, False),
            id="open mpi, -x MASTER_ADDR",
        ),
        pytest.param(
            # --map-by node: 8 tasks dealt out to 2 machines, rank 5 is the third on machine 1.
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            ("Open MPI", 8, 5, "172.20.102.82", 18217, "3236233217", 2, 4, 1, 2, False),
            id="open mpi, ranks by node",
        ),
        pytest.param(
            {
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "PMIX_NAMESPACE": "prterun-work5-104711@1",
                "PMIX_SERVER_URI41": "prterun-work5-104711@0.0;tcp4://127.0.0.1:53557",
            },
            ("Open MPI", 4, 3, "127.0.0.1", 19711, "prterun-work5-104711-1", 3, 4, 0, 1, True),
            id="open mpi 5 on a workstation",
        ),
        pytest.param(
            # mpirun inside sbatch: its daemon on the second node is task 0 of a step of one.
            {k: v for k, v in OPEN_MPI.items() if "orte" not in k}
            | SLURM_ONE_PER_NODE
            | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node02"},
            ("Open MPI", 8, 5, "node01", 18217, "3236233217", 1, 4, 1, 2, False),
            id="open mpi 5 under slurm",
        ),
        pytest.param(
            INTEL_MPI,
            ("Intel MPI", 4, 2, "icx07", 29500, None, 0, 2, 1, 2, False),
            id="intel mpi",
        ),
        pytest.param(
            {k: v for k, v in INTEL_MPI.items() if k != "I_MPI_MPIRUN"}
            | {"PBS_JOBID": "4217.pbs01", "MPI_LOCALRANKID": "1"},
            ("MPICH", 4, 2, "icx07", 19217, "4217.pbs01", 1, 2, 0, 2, False),
            id="mpich under pbs, dealt out by node",
        ),
        pytest.param(
            # srun --mpi=pmi2 sets PMI_* itself: Slurm knows more.
            SLURM_ONE_PER_NODE | {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "12"},
            ("Slurm job 1230234", 4, 1, "node01", 15234, "1230234.0", 0, 1, 1, 4, True),
            id="slurm with pmi2",
        ),
        pytest.param(
            SLURM_ONE_PER_NODE | {"PMI_RANK": "0"},
            ("Slurm job 1230234", 4, 1, "node01", 15234, "1230234.0", 0, 1, 1, 4, True),
            id="slurm with a stray PMI_RANK",
        ),
        pytest.param(
            # mpiexec.hydra inside sbatch: its proxy is task 1 of 4, the task below it is rank 3 of 8.
            SLURM_ONE_PER_NODE
            | {
                "PMI_RANK": "3",
                "PMI_SIZE": "8",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
            },
            ("MPICH", 8, 3, "node01", 15234, "1230234", 1, 2, 1, 4, False),
            id="hydra below slurm",
        ),
        pytest.param(
            MVAPICH2,
            ("MVAPICH2", 2, 1, "mv-a", 31000, None, 0, 1, 1, 2, False),
            id="mvapich2",
        ),
        pytest.param(
            PYTORCHJOB,
            ("MASTER_ADDR/RANK/WORLD_SIZE", 3, 2, "resnet-master-0", 23456, None, 0, 1, 2, 3, True),
            id="pytorchjob",
        ),
        pytest.param(
            PYTORCHJOB | {"MASTER_ADDR": "localhost", "RANK": "0", "MASTER_PORT": ""},
            ("MASTER_ADDR/RANK/WORLD_SIZE", 3, 0, "localhost", 29500, None, 0, 1, 0, 3, True),
            id="pytorchjob, its master pod",
        ),
        pytest.param(
            # for i in 0 1 2; do srun -N1 -n1 -w $host env RANK=$i … rally run & done
            SLURM_ONE_PER_NODE
            | PYTORCHJOB
            | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "node03"},
            ("MASTER_ADDR/RANK/WORLD_SIZE", 3, 2, "resnet-master-0", 23456, None, 0, 1, 2, 3, True),
            id="a step of one task per host, numbered by a script",
        ),
    ],
)
def test_realistic_environments(env: dict[str, str], expected: tuple[object, ...]) -> None:
    assert tuple(facts(detect(env)).values()) == expected


def _proxy(port: int, name: str = "/usr/bin/hydra_pmi_proxy") -> list[str]:
    return [name, "--control-port", f"login1:{port}", "--rmk", "user", "--proxy-id", "0"]


def test_two_mpiexecs_in_one_allocation_are_two_jobs() -> None:
    shell = ["/bin/sh", "-c", "rally run train.py"]
    env = INTEL_MPI | {"PBS_JOBID": "4217.pbs01"}
    upstream = [
        "/opt/intel/hydra_bstrap_proxy",
        "--upstream-host",
        "n1",
        "--upstream-port",
        "40123",
    ]
    jobs = [
        detect(env, lambda: [shell, _proxy(34415)]),
        detect(env, lambda: [_proxy(34416), shell]),
        detect(env, lambda: [upstream]),
        detect(env, lambda: [shell]),
        detect(MVAPICH2 | {"MASTER_PORT": ""}, lambda: [_proxy(34417)]),
    ]
    assert [(job.run_id, job.master_port) for job in jobs if job] == [
        ("login1-34415", 19415),
        ("login1-34416", 19416),
        ("n1-40123", 15123),
        ("4217.pbs01", 19217),
        ("login1-34417", 19417),
    ]


def test_two_steps_of_one_allocation_are_two_jobs() -> None:
    steps = [detect(SLURM_ONE_PER_NODE | {"SLURM_STEP_ID": str(step)}) for step in (0, 1, 2)]
    assert len({step.run_id for step in steps if step}) == 3
    assert len({step.master_port for step in steps if step}) == 3


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="nothing"),
        pytest.param(SLURM_BATCH_SCRIPT, id="in a batch script, not below srun"),
        pytest.param(
            SLURM_ONE_PER_NODE | {"SLURM_STEP_ID": "4294967291"}, id="the batch step by number"
        ),
        pytest.param(SLURM_ONE_PER_NODE | {"SLURM_STEP_ID": "batch"}, id="the batch step by name"),
        pytest.param(SLURM_INTERACTIVE_STEP, id="shell of salloc"),
        pytest.param(
            # The same, in case Slurm sets the step's variables from the job's.
            SLURM_INTERACTIVE_STEP
            | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            id="shell of salloc with the job's task count",
        ),
        pytest.param(
            SLURM_ONE_PER_NODE
            | {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "4000", "SLURM_PROCID": "0"},
            id="srun -N4 --pty bash",
        ),
        pytest.param(
            SLURM_ONE_PER_NODE | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            id="srun -n1",
        ),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, id="mpirun -np 1"
        ),
        pytest.param(
            # The daemon's step has 4 tasks, but mpirun started one.
            SLURM_ONE_PER_NODE | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
            id="mpirun -np 1 below srun",
        ),
        pytest.param(PYTORCHJOB | {"WORLD_SIZE": "1", "RANK": "0"}, id="a job of one pod"),
        pytest.param(PYTORCHJOB | {"LOCAL_RANK": "0"}, id="a worker of another launcher"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, id="no master"),
        *(
            pytest.param(env | {name: "7"}, id=f"{name} beside {kind}")
            for kind, env in {
                "slurm": SLURM_ONE_PER_NODE,
                "mpi": OPEN_MPI,
                "pods": PYTORCHJOB,
            }.items()
            for name in ("TORCHELASTIC_RUN_ID", "RALLY_GENERATION", "PET_NNODES", "PET_NODE_RANK")
        ),
        pytest.param(PYTORCHJOB | {"PET_MASTER_ADDR": "x"}, id="PET_MASTER_ADDR"),
        pytest.param(PYTORCHJOB | {"PET_RDZV_ENDPOINT": "x:1"}, id="PET_RDZV_ENDPOINT"),
    ],
)
def test_a_run_of_its_own_is_left_alone(env: dict[str, str]) -> None:
    assert detect(env) is None


def test_all_tasks_of_a_step_agree_and_none_is_counted_twice() -> None:
    tasks = [4, 4, 1, 3]
    placements = []
    for machine, count in enumerate(tasks):
        for local_rank in range(count):
            placement = detect(
                SLURM_ONE_PER_NODE
                | {
                    "SLURM_STEP_NUM_TASKS": "12",
                    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1,3",
                    "SLURM_PROCID": str(sum(tasks[:machine]) + local_rank),
                    "SLURM_LOCALID": str(local_rank),
                    "SLURM_NODEID": str(machine),
                }
            )
            assert placement is not None
            assert placement.tasks_per_machine == count
            assert placement.one_worker_per_task  # also the one that is alone on its machine
            placements.append(placement)
    assert [p.node_rank for p in placements] == list(range(12))
    assert {(p.master_addr, p.master_port, p.run_id, p.num_nodes) for p in placements} == {
        ("node01", 15234, "1230234.0", 12)
    }


@pytest.mark.parametrize(
    ("machines", "each", "by_node"),
    [
        *((machines, each, False) for machines in (2, 3, 5) for each in (1, 2, 4)),
        # When tasks are dealt out one by one, a task alone cannot always tell which of the two ways it was (rank 2 of 8
        # on 4 machines looks the same): machines_known=False says so.
        (2, 2, True),
        (2, 4, True),
    ],
)
def test_mpi_machines_are_numbered_for_evenly_filled_machines(
    machines: int, each: int, by_node: bool
) -> None:
    for machine in range(machines):
        for local_rank in range(each):
            rank = local_rank * machines + machine if by_node else machine * each + local_rank
            placement = detect(
                OPEN_MPI
                | {
                    "OMPI_COMM_WORLD_SIZE": str(machines * each),
                    "OMPI_COMM_WORLD_RANK": str(rank),
                    "OMPI_COMM_WORLD_LOCAL_SIZE": str(each),
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
                    "MASTER_ADDR": "a",
                }
            )
            assert placement is not None
            assert (placement.machine_rank, placement.num_machines) == (machine, machines)
            assert placement.one_worker_per_task is (each > 1)
            assert not placement.machines_known


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("1.0;tcp://10.0.0.1:4000", "10.0.0.1"),
        ("1.0;tcp://127.0.0.1,169.254.95.120,10.3.1.121:56578", "10.3.1.121"),
        ("1.0;tcp://172.20.102.82:33559;tcp://172.40.102.82:33559", "172.20.102.82"),
        ("1.0;tcp6://[fe80::1,2001:db8::7]:4000", "2001:db8::7"),
        ("1.0;tcp6://[2001:db8::7]:4000;tcp://10.0.0.9:4000", "10.0.0.9"),
    ],
)
def test_mpiruns_address_is_one_that_others_can_reach(uri: str, address: str) -> None:
    placement = detect(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri})
    assert placement is not None
    assert placement.master_addr == address


@pytest.mark.parametrize(
    "uri", ["", "1.0;tcp://127.0.0.1:4000", "1.0;tcp://login.site.org:4000", "oob:xyz"]
)
def test_no_master_is_made_up_from_an_address_that_is_not_one(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: not set.*mpirun -x MASTER_ADDR"):
        detect(OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri})


def test_rank_0_notices_that_mpirun_runs_elsewhere() -> None:
    rank_0 = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match="another machine than rank 0"):
        detect(rank_0)
    same = rank_0 | {"OMPI_MCA_orte_local_daemon_uri": rank_0["OMPI_MCA_orte_hnp_uri"]}
    assert facts(detect(same))["master_addr"] == "172.20.102.82"


def test_rank_0_notices_that_it_is_not_on_the_first_host_of_the_slurm_job() -> None:
    env = SLURM_BATCH_SCRIPT | {k: v for k, v in INTEL_MPI.items() if k != "MASTER_ADDR"}
    rank_0 = env | {"PMI_RANK": "0"}
    assert facts(detect(rank_0))["master_addr"] == "node01"
    with pytest.raises(ConfigError, match=r"node03.*node01.*-genv MASTER_ADDR"):
        detect(rank_0 | {"SLURMD_NODENAME": "node03"})
    assert facts(detect(env | {"SLURMD_NODENAME": "node03"}))["master_addr"] == "node01"


# ---- what cannot be right ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "field", "value"),
    [
        (SLURM_ONE_PER_NODE | {"SLURM_PROCID": "4"}, "SLURM_PROCID", "4"),
        (SLURM_ONE_PER_NODE | {"SLURM_PROCID": "one"}, "SLURM_PROCID", "one"),
        (SLURM_ONE_PER_NODE | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID", "x"),
        (SLURM_ONE_PER_NODE | {"SLURM_STEP_NUM_TASKS": "4.0"}, "SLURM_STEP_NUM_TASKS", "4.0"),
        (SLURM_ONE_PER_NODE | {"SLURM_NODEID": "4"}, "SLURM_NODEID", "4"),
        (SLURM_ONE_PER_NODE | {"SLURM_NODEID": "-1"}, "SLURM_NODEID", "-1"),
        (SLURM_ONE_PER_NODE | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID", "1"),
        (SLURM_ONE_PER_NODE | {"SLURM_LOCALID": ""}, "SLURM_LOCALID", None),
        (
            SLURM_ONE_PER_NODE | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"},
            "SLURM_STEP_TASKS_PER_NODE",
            "2(x4)",
        ),
        (
            SLURM_ONE_PER_NODE | {"SLURM_STEP_TASKS_PER_NODE": "4"},
            "SLURM_STEP_TASKS_PER_NODE",
            "4",
        ),
        (
            SLURM_ONE_PER_NODE | {"SLURM_STEP_TASKS_PER_NODE": "1(4x)"},
            "SLURM_STEP_TASKS_PER_NODE",
            "1(4x)",
        ),
        (
            SLURM_ONE_PER_NODE | {"SLURM_STEP_TASKS_PER_NODE": "1(x99999999999)"},
            "SLURM_STEP_TASKS_PER_NODE",
            "1(x99999999999)",
        ),
        (
            SLURM_ONE_PER_NODE | {"SLURM_STEP_NODELIST": "node[01-03]"},
            "SLURM_STEP_NODELIST",
            "node[01-03]",
        ),
        (
            SLURM_ONE_PER_NODE | {"SLURM_STEP_NODELIST": "node[01-04"},
            "SLURM_STEP_NODELIST",
            "node[01-04",
        ),
        (SLURM_ONE_PER_NODE | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR", "localhost"),
        (SLURM_ONE_PER_NODE | {"MASTER_ADDR": "127.0.1.1"}, "MASTER_ADDR", "127.0.1.1"),
        (SLURM_ONE_PER_NODE | {"MASTER_PORT": "0"}, "MASTER_PORT", "0"),
        (SLURM_ONE_PER_NODE | {"MASTER_PORT": "65536"}, "MASTER_PORT", "65536"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK", "8"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "eight"}, "OMPI_COMM_WORLD_SIZE", "eight"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE", None),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK", "4"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, "OMPI_COMM_WORLD_LOCAL_SIZE", "9"),
        (OPEN_MPI | {"MASTER_ADDR": "::1"}, "MASTER_ADDR", "::1"),
        (INTEL_MPI | {"MPI_LOCALRANKID": ""}, "MPI_LOCALRANKID or PMI_LOCAL_RANK", None),
        (INTEL_MPI | {"PMI_RANK": "٢"}, "PMI_RANK", "٢"),
        (MVAPICH2 | {"MASTER_ADDR": ""}, "MASTER_ADDR", None),
        (PYTORCHJOB | {"RANK": "3"}, "RANK", "3"),
        (PYTORCHJOB | {"WORLD_SIZE": "-3"}, "WORLD_SIZE", "-3"),
        (PYTORCHJOB | {"MASTER_PORT": "http"}, "MASTER_PORT", "http"),
    ],
)
def test_values_that_contradict_are_named(
    env: dict[str, str], field: str, value: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(env)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert field in str(caught.value)


def test_a_step_over_the_components_of_a_heterogeneous_job_is_one_job() -> None:
    """Its tasks' variables that distinguish it from another step, as Slurm 22.05 sets them."""
    env = SLURM_ONE_PER_NODE | {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "1230234",
        "SLURM_JOB_ID_HET_GROUP_1": "1230235",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "node01",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node[02-04]",
        "SLURM_NTASKS_HET_GROUP_0": "1",
        "SLURM_NTASKS_HET_GROUP_1": "3",
    }
    assert detect(env) == detect(SLURM_ONE_PER_NODE)


def test_a_heterogeneous_step_whose_numbers_are_those_of_a_component_is_refused() -> None:
    env = SLURM_ONE_PER_NODE | {"SLURM_HET_SIZE": "2", "SLURM_PROCID": "5"}
    with pytest.raises(ConfigError, match=r"heterogeneous job.*--node-rank"):
        detect(env)


# ---- what is shown -----------------------------------------------------------------------------


def test_the_line_shown_says_what_was_found_and_where() -> None:
    one = detect(SLURM_ONE_PER_NODE)
    assert one is not None
    assert one.describe() == (
        "Slurm job 1230234: node 1 of 4, master node01:15234"
        " (from SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST, SLURM_JOB_ID)"
    )
    several = detect(OPEN_MPI | {"MASTER_ADDR": "[2001:db8::7]", "MASTER_PORT": "1234"})
    assert several is not None
    assert several.describe() == (
        "Open MPI: node 5 of 8 (task 1 of 4 on its machine), master [2001:db8::7]:1234"
        " (from OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)"
    )


# ---- node lists --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login1", "login1"),
        (
            "node[01-03,07],gpu-[1-2]-ib,login1",
            "node01 node02 node03 node07 gpu-1-ib gpu-2-ib login1",
        ),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("n[1,01,001]", "n1 n01 n001"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("a[1-2],b[3],c", "a1 a2 b3 c"),
        ("node03,node01", "node03 node01"),
        ("gpu-a1-7.site.org,gpu-a1-8.site.org", "gpu-a1-7.site.org gpu-a1-8.site.org"),
    ],
)
def test_nodelists_as_scontrol_expands_them(nodelist: str, hosts: str) -> None:
    assert expand_nodelist(nodelist) == hosts.split()
    assert first_host(nodelist) == hosts.split()[0]


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        ",",
        "a,,b",
        "a,",
        "node[1-2",
        "node1-2]",
        "node[[1-2]]",
        "node[]",
        "node[1,]",
        "node[1--2]",
        "node[-2]",
        "node[3-1]",
        "node[a-c]",
        "node[1-2],b[",
        "node 1",
        "node[1- 2]",
        "node[0-99999999]",
        "a[1-2000]b[1-2000]",
    ],
)
def test_a_malformed_nodelist_is_named_with_its_variable(nodelist: str) -> None:
    for function in (expand_nodelist, first_host):
        with pytest.raises(ConfigError) as caught:
            function(nodelist, variable="SLURM_X")
        assert (caught.value.field, caught.value.value) == ("SLURM_X", nodelist)


def compress(hosts: list[str]) -> str:
    """Slurm's notation for ``hosts``, in their order: consecutive hosts with one prefix become one bracket."""
    groups: list[tuple[str, str, list[str]]] = []
    for host in hosts:
        match = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", host)
        if match is None:
            groups.append((host, "", []))
        elif groups and groups[-1][2] and groups[-1][:2] == (match[1], match[3]):
            groups[-1][2].append(match[2])
        else:
            groups.append((match[1], match[3], [match[2]]))
    entries = []
    for prefix, suffix, numbers in groups:
        runs: list[list[str]] = []
        for number in numbers:
            last = runs[-1][-1] if runs else None
            if last is not None and number == str(int(last) + 1).zfill(len(last)):
                runs[-1] = [runs[-1][0], number]
            else:
                runs.append([number])
        inside = ",".join("-".join(run) for run in runs)
        entries.append(f"{prefix}[{inside}]{suffix}" if numbers else prefix)
    return ",".join(entries)


hosts_lists = st.lists(
    st.one_of(
        st.from_regex(r"[a-z][a-z0-9-]{0,6}", fullmatch=True),
        st.builds(
            lambda prefix, number, width, suffix: f"{prefix}{number:0{width}d}{suffix}",
            st.sampled_from(["n", "node-", "rack3-n"]),
            st.integers(0, 120),
            st.integers(1, 4),
            st.sampled_from(["", "-ib"]),
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(hosts_lists)
def test_expanding_undoes_compressing(hosts: list[str]) -> None:
    assert expand_nodelist(compress(hosts)) == hosts
    assert first_host(compress(hosts)) == hosts[0]


@given(st.sampled_from(["n", "gpu-"]), st.integers(0, 9999), st.integers(0, 300), st.integers(1, 5))
def test_a_range_names_each_host_once_in_order(
    prefix: str, low: int, length: int, width: int
) -> None:
    names = [f"{prefix}{low + i:0{width}d}" for i in range(length + 1)]
    first, last = (name.removeprefix(prefix) for name in (names[0], names[-1]))
    assert expand_nodelist(f"{prefix}[{first}-{last}]") == names


@given(st.text(alphabet="ab01-,[] ", max_size=14))
def test_no_text_is_expanded_to_something_that_is_not_a_host_name(text: str) -> None:
    try:
        hosts = expand_nodelist(text)
    except ConfigError:
        return
    assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)
    assert first_host(text) == hosts[0]


names = st.sampled_from(
    sorted({*SLURM_ONE_PER_NODE, *OPEN_MPI, *INTEL_MPI, *MVAPICH2, *PYTORCHJOB})
)
values = st.sampled_from(
    ["", "0", "1", "2", "4", "-1", "x", "a[1-2]", "1(x2)", "localhost", "2(x2)"]
)


@given(
    st.sampled_from([SLURM_ONE_PER_NODE, OPEN_MPI, INTEL_MPI, MVAPICH2, PYTORCHJOB, {}]),
    st.dictionaries(names, values, max_size=5),
)
def test_a_damaged_environment_gives_a_sound_placement_or_a_config_error(
    env: dict[str, str], damage: dict[str, str]
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
    assert placement.master_port is not None
    assert 0 < placement.master_port < 65536
    assert set(placement.variables) <= {name for name, value in (env | damage).items() if value}


# ---- the order ---------------------------------------------------------------------------------


def cluster(name: str, level: ClusterLevel, variable: str, *, alone: bool = False) -> Cluster:
    """A cluster that is detected by a single variable."""
    found = detect(PYTORCHJOB)
    assert found is not None
    here = None if alone else dataclasses.replace(found, source=name)
    return Cluster(
        name=name,
        level=level,
        detect=lambda variables: bool(variables.env.get(variable)),
        place=lambda _: here,
    )


def test_the_innermost_launcher_is_asked_first() -> None:
    assert [each.name for each in ordered(reversed(BUILT_IN))] == [
        "MPICH",
        "MVAPICH2",
        "Open MPI",
        "Slurm",
        "Flux",
        "Kubernetes Job",
        "Volcano",
        "SkyPilot",
        "SageMaker",
        "AWS Batch",
        "MASTER_ADDR/RANK/WORLD_SIZE",
    ]


@pytest.mark.parametrize(
    ("level", "env", "source"),
    [
        (ClusterLevel.LAUNCHER, SLURM_ONE_PER_NODE, "Skynet"),
        (ClusterLevel.LAUNCHER, OPEN_MPI, "Skynet"),
        (ClusterLevel.SCHEDULER, OPEN_MPI, "Open MPI"),
        (ClusterLevel.SCHEDULER, SLURM_ONE_PER_NODE, "Skynet"),
        (ClusterLevel.PLATFORM, SLURM_ONE_PER_NODE, "Slurm job 1230234"),
        (ClusterLevel.PLATFORM, PYTORCHJOB, "Skynet"),
        (ClusterLevel.VARIABLES, SLURM_ONE_PER_NODE, "Slurm job 1230234"),
    ],
)
def test_the_level_of_a_cluster_decides_which_others_it_goes_before(
    level: ClusterLevel, env: dict[str, str], source: str
) -> None:
    ours = cluster("Skynet", level, "SKYNET")
    found = place(ClusterVariables({**env, "SKYNET": "1"}), ordered([ours, *BUILT_IN]))
    assert found is not None
    assert found.source == source


def test_plain_variables_count_where_the_innermost_launcher_has_started_one_task() -> None:
    alone = cluster("Skynet", ClusterLevel.LAUNCHER, "SKYNET", alone=True)
    clusters = ordered([alone, *BUILT_IN])
    found = place(ClusterVariables({**SLURM_ONE_PER_NODE, **PYTORCHJOB, "SKYNET": "1"}), clusters)
    assert found is not None
    assert found.source == "MASTER_ADDR/RANK/WORLD_SIZE"
    assert place(ClusterVariables({**SLURM_ONE_PER_NODE, "SKYNET": "1"}), clusters) is None


@pytest.mark.parametrize(
    ("srun", "env", "told"),
    [
        ("srun rally run", {}, "a node is lost"),
        ("srun --no-kill rally run", {}, ""),
        ("srun -k --kill-on-bad-exit=0 rally run -K", {}, ""),
        ("srun rally run --no-kill", {}, "a node is lost"),
        ("srun --no-kill=off rally run", {"SLURM_NO_KILL": "1"}, "a node is lost"),
        ("srun rally run", {"SLURM_NO_KILL": "1"}, ""),
        ("srun --no-kill -K rally run", {}, "a task fails"),
        ("srun --no-kill --kill-on-bad-exit=1 rally run", {}, "a task fails"),
        ("srun --no-kill rally run", {"SLURM_KILL_BAD_EXIT": "1"}, "a task fails"),
        ("srun --no-kill -K0 rally run", {}, ""),
        ("srun --no-kill -K1 rally run", {}, "a task fails"),
    ],
)
def test_whether_slurm_ends_an_elastic_job(srun: str, env: dict[str, str], told: str):
    remark = slurm.ends_with_a_node(srun.split(), env)
    assert told in remark
    assert bool(told) == bool(remark)

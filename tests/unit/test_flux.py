"""Environments of Flux's tasks, alone and nested."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.placement.clusters import Placement, detect
from rallypoint.launch.placement.clusters.variables import port_from_name


Env = dict[str, str]

# Task 5 of `flux run -N2 -n8`, with MASTER_ADDR from flux hostlist.
FLUX = {
    "FLUX_JOB_ID": "ƒ3ETxsR9H",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "5",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_URI": "local:///run/flux/local",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_FD": "17",
    "MASTER_ADDR": "tuo1",
}
PORT = port_from_name("f3ETxsR9H")


def found(env: Env) -> Placement:
    placement = detect(env)
    assert placement is not None
    return placement


def test_a_task_of_flux_run() -> None:
    it = found(FLUX)
    assert (it.source, it.num_nodes, it.node_rank) == ("Flux job f3ETxsR9H", 8, 5)
    assert (it.master_addr, it.master_port, it.run_id) == ("tuo1", PORT, "f3ETxsR9H")
    assert (it.local_rank, it.tasks_per_machine) == (1, 4)
    assert (it.machine_rank, it.num_machines, it.machines_known) == (1, 2, False)
    assert it.one_worker_per_task
    assert it.describe() == (
        f"Flux job f3ETxsR9H: node 5 of 8 (task 1 of 4 on its machine), master tuo1:{PORT}"
        " (from FLUX_TASK_RANK, FLUX_JOB_SIZE, MASTER_ADDR, FLUX_JOB_ID)"
    )


def test_both_spellings_of_a_job_are_one_job() -> None:
    """Locales may differ between tasks: then Flux writes f for ƒ, or the bytes are not valid text."""
    for spelling in ("ƒ3ETxsR9H", "f3ETxsR9H", "\udcc6\udc923ETxsR9H"):
        it = found(FLUX | {"FLUX_JOB_ID": spelling})
        assert (it.run_id, it.master_port) == ("f3ETxsR9H", PORT)


@pytest.mark.parametrize("pmi", [FLUX, {k: v for k, v in FLUX.items() if "PMI" not in k}])
def test_one_task_per_machine_is_a_job_of_nodes(pmi: Env) -> None:
    numbers = {"FLUX_JOB_NNODES": "8", "FLUX_TASK_LOCAL_ID": "0"}
    it = found(pmi | numbers)
    assert (it.machine_rank, it.num_machines, it.tasks_per_machine) == (5, 8, 1)
    assert it.machines_known
    assert not it.one_worker_per_task


def test_all_tasks_on_one_machine_need_no_network() -> None:
    env = {k: v for k, v in FLUX.items() if k != "MASTER_ADDR"}
    it = found(env | {"FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "5"})
    assert (it.master_addr, it.tasks_per_machine, it.machines_known) == ("127.0.0.1", 8, True)


@pytest.mark.parametrize(
    ("machines", "tasks"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 8),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], 8),  # --taskmap=cyclic
        ([[0, 1, 2], [3, 4], [5, 6]], 7),
        ([[0, 1], [2], [3], [4]], 5),
    ],
)
def test_machines_are_numbered_for_evenly_spread_tasks(
    machines: list[list[int]], tasks: int
) -> None:
    for machine, ranks in enumerate(machines):
        for local_rank, rank in enumerate(ranks):
            numbers = {
                "FLUX_JOB_SIZE": tasks,
                "FLUX_JOB_NNODES": len(machines),
                "FLUX_TASK_RANK": rank,
                "FLUX_TASK_LOCAL_ID": local_rank,
                "PMI_RANK": rank,
                "PMI_SIZE": tasks,
            }
            it = found(FLUX | {name: str(value) for name, value in numbers.items()})
            assert (it.machine_rank, it.tasks_per_machine) == (machine, len(ranks)), rank
            assert it.num_machines == len(machines)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"FLUX_URI": "local:///run/flux/local"}, id="shell of flux alloc"),
        pytest.param(
            FLUX | {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0", "PMI_SIZE": "1", "PMI_RANK": "0"},
            id="flux run -n1",
        ),
        pytest.param(FLUX | {"PET_NNODES": "2"}, id="PET_NNODES"),
        pytest.param(FLUX | {"RALLY_GENERATION": "0"}, id="a worker"),
    ],
)
def test_a_run_of_its_own_is_left_alone(env: Env) -> None:
    assert detect(env) is None


# ---- nesting -----------------------------------------------------------------------------------


def test_an_mpirun_in_a_flux_task_decides() -> None:
    ompi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }
    assert found(FLUX | ompi).source == "Open MPI"


def test_a_hydra_in_a_flux_task_decides() -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    it = found(FLUX | hydra)
    assert (it.source, it.num_nodes, it.node_rank) == ("MPICH", 4, 1)


def test_flux_that_srun_started_decides() -> None:
    broker = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "tuo[1-2]",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
    }
    assert found(FLUX | broker).source == "Flux job f3ETxsR9H"


# ---- what cannot be right ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "field", "value"),
    [
        ({"FLUX_TASK_RANK": "8", "PMI_RANK": ""}, "FLUX_TASK_RANK", "8"),
        ({"FLUX_TASK_RANK": "x"}, "FLUX_TASK_RANK", "x"),
        ({"FLUX_JOB_SIZE": ""}, "FLUX_JOB_SIZE", None),
        ({"FLUX_JOB_NNODES": "9"}, "FLUX_JOB_NNODES", "9"),
        ({"FLUX_JOB_NNODES": "0"}, "FLUX_JOB_NNODES", "0"),
        ({"FLUX_TASK_LOCAL_ID": "7"}, "FLUX_TASK_LOCAL_ID", "7"),
        ({"FLUX_TASK_LOCAL_ID": ""}, "FLUX_TASK_LOCAL_ID", None),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR", None),
        ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR", "localhost"),
    ],
)
def test_values_that_contradict_are_named(damage: Env, field: str, value: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(FLUX | damage)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert field in str(caught.value)


small = st.integers(0, 9)


@given(small, small, small, small)
def test_any_numbers_give_a_sound_placement_or_a_config_error(
    size: int, machines: int, rank: int, local_rank: int
) -> None:
    numbers = {
        "FLUX_JOB_SIZE": size,
        "FLUX_JOB_NNODES": machines,
        "FLUX_TASK_RANK": rank,
        "FLUX_TASK_LOCAL_ID": local_rank,
    }
    env = {"MASTER_ADDR": "a", **{name: str(value) for name, value in numbers.items()}}
    try:
        it = detect(env)
    except ConfigError:
        return
    if it is None:
        return
    assert 0 <= it.node_rank < it.num_nodes
    assert 0 <= it.local_rank < it.tasks_per_machine <= it.num_nodes
    assert 0 <= it.machine_rank < it.num_machines <= it.num_nodes


def test_without_a_master_the_error_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"flux hostlist --nth=0"):
        detect({k: v for k, v in FLUX.items() if k != "MASTER_ADDR"})

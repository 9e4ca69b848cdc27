"""A worker's environment variables."""

from __future__ import annotations

import dataclasses

import pytest

from rallypoint.errors import ConfigError
from rallypoint.launch.placement.ranks import assign
from rallypoint.launch.placement.worker_env import (
    RoundFacts,
    common_defaults,
    fill_in,
    log_prefix,
    worker_env,
)


FACTS = RoundFacts(
    master_addr="node0",
    master_port=29500,
    generation=3,
    restart_count=3,
    max_restarts=5,
    run_id="job",
    role="trainer",
    signals="SIGTERM,SIGINT",
)
# Node 1 of two, each with three workers.
RANKS = assign((3, 3), 1)


def test_the_whole_of_it():
    assert worker_env({}, RANKS[2], FACTS, "/logs/error.json") == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "RALLY_GENERATION": "3",
    }


def test_what_the_user_has_chosen_for_nccl_stays():
    env = worker_env({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, RANKS[0], FACTS, "")
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(
    ("env", "workers", "defaults"),
    [
        ({}, 1, {}),
        ({}, 2, {"OMP_NUM_THREADS": "1"}),
        ({"OMP_NUM_THREADS": "4"}, 2, {}),
        ({"OMP_NUM_THREADS": ""}, 2, {}),
    ],
)
def test_one_thread_per_worker_unless_chosen_or_alone(env, workers, defaults):
    assert common_defaults(env, workers) == defaults


VIRTUAL = dataclasses.replace(FACTS, virtual_local_rank=True)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0", "1", "2"]),
        ("4,5,6", ["4", "5", "6"]),
        (" 4, GPU-1b2c ,6,7", ["4", "GPU-1b2c", "6"]),
        ("", ["", "", ""]),  # hidden on purpose: a job on CPUs
    ],
)
def test_a_virtual_local_rank_has_a_device_of_its_own(visible, devices):
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    got = [worker_env(env, ranks, VIRTUAL, "") for ranks in RANKS]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in got] == devices
    assert {each["LOCAL_RANK"] for each in got} == {"0"}
    assert [each["RANK"] for each in got] == ["3", "4", "5"]


def test_a_virtual_local_rank_without_a_device_is_refused():
    with pytest.raises(ConfigError, match="local rank 2, but 2 are visible"):
        worker_env({"CUDA_VISIBLE_DEVICES": "0,1"}, RANKS[2], VIRTUAL, "")


def test_devices_are_the_users_own_otherwise():
    env = worker_env({"CUDA_VISIBLE_DEVICES": "0,1"}, RANKS[2], FACTS, "")
    assert "CUDA_VISIBLE_DEVICES" not in env  # inherited


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        (None, "[trainer2]:"),
        ("${role_name}/${rank}/${local_rank} ", "trainer/5/2 "),
        ("$rank $unknown $$ 100%", "5 $unknown $ 100%"),
        ("$", "$"),
    ],
)
def test_prefix_of_teed_lines(template, prefix):
    assert log_prefix(template, "trainer", RANKS[2]) == prefix


def test_templates_in_arguments_are_a_workers_own_numbers():
    args = (
        "--out=part{rank}.{local_rank}",
        "{node_rank}/{generation}",
        "{a: {rank}}",
        "{Rank}",
        "$",
    )
    filled = ("--out=part4.1", "1/3", "{a: 4}", "{Rank}", "$")
    assert fill_in(args, RANKS[1], 3) == filled


def test_workers_know_where_the_job_was_told_to_listen() -> None:
    assert "RALLY_BIND" not in worker_env({}, RANKS[0], FACTS, "")
    told = dataclasses.replace(FACTS, bind="10.0.0.1")
    assert worker_env({}, RANKS[0], told, "")["RALLY_BIND"] == "10.0.0.1"

"""MultiprocessConfig: what is refused, and what unset fields become. Starts no processes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from rallypoint.errors import ConfigError
from rallypoint.launch import (
    MultiprocessConfig,
    default_backend,
    get_distributed_backend,
    set_distributed_backend,
)
from rallypoint.launch.worker import backends


@pytest.fixture(autouse=True)
def no_backend_in_the_environment(monkeypatch):
    monkeypatch.delenv("TORCH_DISTRIBUTED_BACKEND", raising=False)


@pytest.fixture
def devices(monkeypatch):
    """Pretend that the machine has a given number of CUDA devices."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(backends, "num_cuda_devices", lambda: count)
        monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)

    return pretend


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"world_size": 0}, "world_size", "expected 1 or more"),
        ({"world_size": -3}, "world_size", "expected 1 or more"),
        ({"world_size": "4"}, "world_size", "whole number"),
        ({"world_size": True}, "world_size", "whole number"),
        ({"local_world_size": 0}, "local_world_size", "expected 1 or more"),
        ({"local_world_size": 3, "world_size": 2}, "local_world_size", "at most world_size"),
        ({"rank": -2}, "rank", "expected 0 or more"),
        ({"local_rank": -1.0}, "local_rank", "whole number"),
        ({"rank": 2, "world_size": 2}, "rank", "expected 0 to 1"),
        ({"local_rank": 1, "local_world_size": 1}, "local_rank", "expected 0 to 0"),
        ({"master_port": 65536}, "master_port", "expected 0 to 65535"),
        ({"master_addr": ""}, "master_addr", "expected a name"),
        ({"backend": " "}, "backend", "expected a name"),
        ({"data_parallel_backend": 1}, "data_parallel_backend", "expected a name"),
        ({"model_parallelism": 0}, "model_parallelism", "expected 1 or more"),
        ({"pipeline_parallelism": None}, "pipeline_parallelism", "whole number"),
        (
            {"world_size": 8, "model_parallelism": 3, "pipeline_parallelism": 2},
            "world_size",
            "model_parallelism (3) times pipeline_parallelism (2) = 6",
        ),
        ({"launch_method": "forksever"}, "launch_method", "did you mean forkserver?"),
        ({"launch_method": "thread"}, "launch_method", "forkserver, spawn, fork"),
        ({"init_method": "etcd://host:2379"}, "init_method", "expected env://, tcp://"),
        ({"init_method": "env://host"}, "init_method", "expected env://, tcp://"),
        ({"init_method": ""}, "init_method", "expected env://, tcp://"),
        ({"init_method": "tcp://host"}, "init_method", "tcp://HOST:PORT"),
        ({"init_method": "tcp://host:port"}, "init_method", "tcp://HOST:PORT"),
        ({"init_method": "file://store"}, "init_method", "three slashes"),
        (
            {"init_method": "tcp://a:1", "master_addr": "b"},
            "master_addr",
            "init_method says 'a'",
        ),
        ({"init_method": "tcp://a:1", "master_port": 2}, "master_port", "init_method says 1"),
    ],
)
def test_what_cannot_be_is_refused_with_field_value_and_what_is_allowed(fields, field, words):
    with pytest.raises(ConfigError) as caught:
        MultiprocessConfig(**fields)
    assert caught.value.field == field
    assert caught.value.value == fields[field]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_is_frozen_and_takes_its_fields_in_order():
    cfg = MultiprocessConfig(world_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.world_size = 3
    cfg = MultiprocessConfig(1, 0, 2, 1, "node0", 29511, "env://", 2, 1, "gloo")
    assert (cfg.rank, cfg.local_rank, cfg.world_size, cfg.local_world_size) == (1, 0, 2, 1)
    assert (cfg.master_addr, cfg.master_port, cfg.init_method) == ("node0", 29511, "env://")
    assert (cfg.model_parallelism, cfg.pipeline_parallelism, cfg.backend) == (2, 1, "gloo")


def test_a_rank_of_minus_one_is_unset(devices):
    devices(0)
    cfg = MultiprocessConfig(rank=-1, local_rank=-1, world_size=2)
    assert cfg == MultiprocessConfig(world_size=2)
    assert dataclasses.replace(cfg, rank=1).resolve().local_rank == 1
    assert cfg.with_environment({"RANK": "1", "LOCAL_RANK": "0"}).rank == 1


def test_unset_fields_without_devices(devices):
    devices(0)
    found = MultiprocessConfig().resolve()
    assert (found.world_size, found.local_world_size, found.rank, found.local_rank) == (1, 1, 0, 0)
    assert (found.backend, found.data_parallel_backend) == ("gloo", "gloo")
    assert found.master_addr == "localhost"
    assert found.master_port is None, "the port is chosen when it is bound, not before"


def test_unset_fields_with_devices(devices):
    devices(4)
    found = MultiprocessConfig(rank=3).resolve()
    assert (found.world_size, found.local_world_size, found.local_rank) == (4, 4, 3)
    assert (found.backend, found.model_parallel_backend) == ("nccl", "nccl")


def test_set_fields_stay_and_sizes_follow_each_other(devices):
    devices(4)
    cfg = MultiprocessConfig(
        world_size=16, local_world_size=8, rank=11, backend="gloo", data_parallel_backend="nccl"
    )
    found = cfg.resolve()
    assert (found.world_size, found.local_world_size, found.local_rank) == (16, 8, 3)
    assert (found.backend, found.data_parallel_backend) == ("gloo", "nccl")
    assert (found.pipeline_parallel_backend, found.model_parallel_backend) == ("gloo", "gloo")
    assert found.resolve() == found
    assert MultiprocessConfig(local_world_size=2).resolve().world_size == 2


def test_degrees_are_checked_against_the_devices_found(devices):
    devices(4)
    assert MultiprocessConfig(model_parallelism=2).resolve().data_parallelism == 2
    with pytest.raises(ConfigError, match="world_size 4: expected a multiple of"):
        MultiprocessConfig(model_parallelism=3).resolve()


def test_tcp_names_host_and_port():
    found = MultiprocessConfig(init_method="tcp://node0:29511", world_size=2).resolve()
    assert (found.master_addr, found.master_port) == ("node0", 29511)
    found = MultiprocessConfig(init_method="tcp://[::1]:29511", world_size=2).resolve()
    assert (found.master_addr, found.master_port) == ("::1", 29511)


def test_a_worker_takes_what_is_unset_from_its_variables():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    found = MultiprocessConfig(local_rank=0).with_environment(env)
    assert (found.rank, found.world_size, found.local_world_size) == (3, 4, 2)
    assert found.local_rank == 0, "what is set is set"
    assert (found.master_addr, found.master_port) == ("node0", 29500)
    with pytest.raises(ConfigError, match="RANK 'first': expected a number"):
        MultiprocessConfig().with_environment({"RANK": "first"})
    with pytest.raises(ConfigError, match="rank 3: expected 0 to 1"):
        MultiprocessConfig(world_size=2).with_environment(env)


def test_the_backend_is_the_variable_then_the_devices(devices, monkeypatch):
    devices(0)
    assert (default_backend(), get_distributed_backend()) == ("gloo", "gloo")
    devices(1)
    assert (default_backend(), get_distributed_backend()) == ("nccl", "nccl")
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "ucc")
    assert (default_backend(), get_distributed_backend()) == ("nccl", "ucc")
    set_distributed_backend("gloo")
    assert get_distributed_backend() == MultiprocessConfig().resolve().backend == "gloo"
    with pytest.raises(ConfigError, match="backend '': expected the name of a backend"):
        set_distributed_backend("")


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), ("nccl", "cuda"), ("NCCL", "cuda"), ("cpu:gloo,cuda:nccl", "cpu")],
)
def test_the_device_of_a_backend(backend, device):
    assert backends.device_of(backend) == device


def test_a_config_is_made_and_sized_without_torch():
    code = (
        "import sys; from rallypoint.launch import MultiprocessConfig, launch_subprocesses;"
        "MultiprocessConfig(world_size=2).with_sizes(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

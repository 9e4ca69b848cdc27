"""Options: what cannot work is refused where it is given, with its name, its value and what was expected."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from rallypoint import rpc
from rallypoint.errors import ConfigError
from rallypoint.rpc import Device, NativeRpcBackendOptions, TensorPipeRpcBackendOptions


def test_the_defaults_are_torchs_where_torch_has_them():
    options = NativeRpcBackendOptions()
    assert options.rpc_timeout == 60.0
    assert options.init_method == "env://"
    assert options.num_worker_threads == 16
    assert options.device_maps == {}
    assert options.transports == ("memory", "uds", "tcp")
    assert options.allowed_modules is None
    assert not options.pickle_by_value


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_worker_threads", 0),
        ("num_worker_threads", -1),
        ("rpc_timeout", -1.0),
        ("rpc_timeout", float("nan")),
        ("heartbeat", -0.1),
        ("transports", []),
        ("transports", ["uds", "carrier pigeon"]),
        ("port", 70_000),
        ("port", -1),
        ("port", (6000, 5000)),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_name_and_itself(option, value):
    with pytest.raises(ConfigError) as caught:
        NativeRpcBackendOptions(**{option: value})
    assert option in str(caught.value)
    shown = value[0] if isinstance(value, (list, tuple)) and value else value
    assert str(shown).strip("[]") in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize("value", [timedelta(seconds=5), "5", None, True])
def test_a_timeout_that_is_no_number_is_a_type_error_in_torchs_words(value):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        NativeRpcBackendOptions(rpc_timeout=value)


def test_a_timeout_of_nought_means_for_ever_and_integers_are_numbers():
    assert NativeRpcBackendOptions(rpc_timeout=0).rpc_timeout == 0.0
    assert NativeRpcBackendOptions(rpc_timeout=5).rpc_timeout == 5.0


def test_an_option_that_there_is_not_is_a_type_error():
    with pytest.raises(TypeError, match="num_workers"):
        NativeRpcBackendOptions(num_workers=3)


def test_what_only_tensorpipe_has_is_taken_and_has_no_effect():
    options = TensorPipeRpcBackendOptions(
        _transports=["shm"], _channels=["basic"], num_worker_threads=3
    )
    assert options.num_worker_threads == 3
    assert isinstance(options, NativeRpcBackendOptions)
    with pytest.raises(TypeError):
        NativeRpcBackendOptions(_transports=["shm"])


def test_a_port_is_one_or_a_range():
    assert list(NativeRpcBackendOptions(port=5000).ports) == [5000]
    assert list(NativeRpcBackendOptions(port=(5000, 5002)).ports) == [5000, 5001, 5002]
    assert list(NativeRpcBackendOptions().ports) == [0]


def test_a_secret_is_bytes_or_text():
    text, data = "a secret of the job", b"a secret of the job"
    assert NativeRpcBackendOptions(secret=text).secret == data
    assert NativeRpcBackendOptions(secret=data).secret == data


# -- device maps --------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, "cuda:0", torch.device("cuda:0"), "cuda"])
def test_devices_are_told_in_any_of_torchs_forms(zero):
    options = NativeRpcBackendOptions(device_maps={"w1": {zero: "cuda:1"}})
    assert options.device_maps == {"w1": {Device("cuda", 0): Device("cuda", 1)}}


@pytest.mark.parametrize(
    "pairs", [{0: 1, 1: 1}, {"cuda:0": "cuda:1", "cuda:2": "cuda:1"}, {"cpu": "cpu", 0: "cpu"}]
)
def test_several_devices_cannot_become_one(pairs):
    with pytest.raises(ValueError, match="only supports 1-to-1 mapping"):
        NativeRpcBackendOptions(device_maps={"w1": pairs})


def test_one_device_cannot_become_several_not_even_one_after_the_other():
    options = NativeRpcBackendOptions()
    options.set_device_map("w1", {0: 1})
    options.set_device_map("w1", {0: 1, 1: 0})
    with pytest.raises(ValueError, match="only supports 1-to-1 mapping"):
        options.set_device_map("w1", {0: 2})
    assert options.device_maps["w1"] == {
        Device("cuda", 0): Device("cuda", 1),
        Device("cuda", 1): Device("cuda", 0),
    }
    options.set_device_map("w2", {0: 2})


@pytest.mark.parametrize("value", ["gpu 0", "cuda:x", "CUDA:0", "", "cpu:1", True, -1])
def test_what_is_no_device_is_refused(value: Any):
    with pytest.raises(ConfigError, match="device"):
        NativeRpcBackendOptions(device_maps={"w1": {value: 0}})
    with pytest.raises(ConfigError, match="device"):
        NativeRpcBackendOptions(devices=[value])


# -- what init_rpc makes of them ----------------------------------------------------------------


class Foreign(rpc.RpcBackendOptions):
    pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "TENSORPIPE"}, "must be a member of BackendType"),
        ({"backend": 3}, "must be a member of BackendType"),
        ({"rpc_backend_options": {"rpc_timeout": 3}}, "must be an instance of RpcBackendOptions"),
        ({"rpc_backend_options": Foreign()}, "Could not infer backend for options"),
        (
            {"backend": rpc.BackendType.RALLYPOINT, "rpc_backend_options": Foreign()},
            "must be a `TensorPipeRpcBackendOptions`",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_before_anything_is_begun(arguments, words):
    import torch.distributed as dist

    with pytest.raises(TypeError, match=words):
        rpc.init_rpc("me", rank=0, world_size=1, store=dist.HashStore(), **arguments)
    assert not rpc.api._is_current_rpc_agent_set()

"""The installed torch, checked against each private name that a package's ``torch_private.py`` uses.

If a new torch changes one, a test here fails, naming it and what of ours depends on it.
"""

import ast
import atexit
import concurrent.futures.process
import dataclasses
import enum
import gc
import importlib
import importlib.util
import inspect
import math
import multiprocessing.process
import multiprocessing.util
import pickle
import pickletools
import runpy
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd
import torch.distributed.checkpoint.filesystem
import torch.distributed.tensor._redistribute
import torch.distributed.tensor.debug
import torch.jit._builtins
import torch.library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils.data import DataLoader, TensorDataset

from private_names import foreign_private_names
from rallypoint._core import ddp_groups, tested_torch
from rallypoint.compat import torch_private as of_compat
from rallypoint.elastic import torch_private as of_elastic
from rallypoint.elastic.loops import samples
from rallypoint.elastic.state.hook_states import HookState
from rallypoint.elastic.state.objects import Objects
from rallypoint.errors import ElasticError
from rallypoint.join import torch_private as of_join
from rallypoint.launch import torch_private as of_launch
from rallypoint.parallel import torch_private as of_parallel
from rallypoint.rpc import torch_private as of_rpc


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch announces that it will remove its functional optimizers
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

DDP = DistributedDataParallel
ENGINE = torch.autograd.Variable._execution_engine
OPERATORS = torch.ops._c10d_functional
TORCH_RPC = importlib.import_module("torch.distributed.rpc")


class Callee(NamedTuple):
    """A private function: what it was when this was written, and our function that calls it."""

    owner: Any
    name: str
    signature: (
        str  # for torch's C++ functions: the start of their docstrings; for operators: their schema
    )
    ours: str


def callees() -> Iterator[Callee]:
    join, parallel = "join/torch_private.py: ", "parallel/torch_private.py: "
    leaf = "is_leaf"
    for name, parameters in {
        "tree_flatten": f"tree, {leaf}",
        "tree_leaves": f"tree, {leaf}",
        "tree_map": f"func, tree, rests, {leaf}",
        "tree_map_only": f"type_or_types_or_pred, func, tree, {leaf}",
        "tree_structure": f"tree, {leaf}",
        "tree_unflatten": "leaves, treespec",
        "treespec_dumps": "treespec, protocol",
        "treespec_loads": "serialized",
    }.items():
        yield Callee(_pytree, name, parameters, join + name)
    config = "enable, throw_on_early_termination, is_first_joinable"
    yield Callee(torch.distributed.algorithms.join, "_JoinConfig", config, join + "configure_join")
    check_sync = "_check_global_requires_backward_grad_sync"
    yield Callee(DDP, check_sync, "self, is_joined_rank", join + "asks_for_sync, answer_sync")
    yield Callee(DDP, "_check_and_sync_module_buffers", "self", join + "sync_buffers")
    common = "self, input_rank, rank_cond"
    yield Callee(DDP, "_find_common_rank", common, join + "answer_common_rank")
    c_plus_plus = "self: torch._C._distributed_c10d.Reducer"
    bucket = "torch._C._distributed_c10d.GradBucket"
    for name, signature, ours in (
        (
            "_set_forward_pass_work_handle",
            f"({c_plus_plus}, arg0: c10d::Work, arg1: bool) -> None",
            "divide_by_count",
        ),
        ("_rebuild_buckets", f"({c_plus_plus}) -> bool", "rebuild_buckets"),
        ("_get_zeros_like_grad_buckets", f"({c_plus_plus}) -> list[{bucket}]", "empty_buckets"),
        ("_run_comm_hook", f"({c_plus_plus}, arg0: {bucket}) -> torch.Future", "reduce_bucket"),
        ("_push_all_rebuilt_params", f"({c_plus_plus}) -> None", "share_parameter_order"),
        ("_get_local_used_map", f"({c_plus_plus}) -> torch.Tensor", "usage_counts"),
    ):
        yield Callee(dist.Reducer, name, signature, join + ours)
    yield Callee(
        torch.distributed.checkpoint.filesystem,
        "_StorageInfo",
        "relative_path, offset, length, transform_descriptors",
        "elastic/torch_private.py: storage_info",
    )
    launch = "launch/torch_private.py: "
    for owner, name, parameters, ours in (
        (subprocess, "_args_from_interpreter_flags", "", "interpreter_flags"),
        (runpy, "_run_module_as_main", "mod_name, alter_argv", "run_module_as_main"),
        (torch._logging._internal, "_init_logs", "log_file_name", "read_log_settings"),
        (
            type(torch.jit._state._enabled),
            "parse_env",
            "self, name, default, true_message, false_message",
            "read_jit_setting",
        ),
        (threading, "_shutdown", "", "join_threads"),
        (atexit, "_run_exitfuncs", "() -> None", "run_exit_functions"),
        (
            multiprocessing.util,
            "_exit_function",
            "info, debug, _run_finalizers, active_children, current_process",
            "end_multiprocessing",
        ),
        (
            torch.library,
            "_del_library",
            "captured_impls, op_impls, captured_defs, op_defs, registration_handles, m, schema_to_signature_cache",
            "keep_operators_at_exit",
        ),
        (concurrent.futures.process, "_RemoteTraceback", "tb", "REMOTE_TRACEBACKS"),
        (sys, "_current_frames", "", "frame_of_main_thread"),
        (
            torch._C._distributed_c10d,
            "_dump_fr_trace_json",
            "(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes",
            "flight_records",
        ),
        (torch._C, "_c10d_init", "(", "store_class"),
        (
            distributed_c10d,
            "_new_process_group_helper",
            "group_size, group_rank, global_ranks_in_group, backend, store, group_name, backend_options, timeout,"
            " pg_tag, device_id, group_desc",
            "around_groups",
        ),
        (
            sys.modules["torch.distributed.rendezvous"],  # the attribute is a function
            "_create_c10d_store",
            "hostname, port, rank, world_size, timeout, use_libuv",
            "_separate_keys",
        ),
    ):
        yield Callee(owner, name, parameters, launch + ours)
    number = "typing.SupportsInt | typing.SupportsIndex"
    yield Callee(
        dist,
        "_broadcast_coalesced",
        "(process_group: torch._C._distributed_c10d.ProcessGroup, tensors:"
        f" collections.abc.Sequence[torch.Tensor], buffer_size: {number}, src: {number} = 0) -> None",
        join + "broadcast_coalesced",
    )
    yield Callee(
        dist.ProcessGroup,
        "_get_backend",
        "(self: torch._C._distributed_c10d.ProcessGroup, device: torch.device) -> c10d::Backend",
        f"{join}timeout_of, {parallel}timeout_of",
    )
    yield Callee(
        distributed_c10d,
        "_get_default_store",
        "",
        "elastic/torch_private.py: clone_of_default_store",
    )
    yield Callee(distributed_c10d, "_get_default_group", "", join + "group_or_default")
    yield Callee(distributed_c10d, "_get_process_group_store", "pg", join + "store_of")
    yield Callee(sys, "_getframe", "depth", join + "caller")
    for name, schema in {
        "all_to_all_single": "Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, Any group_name",
        "all_gather_into_tensor": "Tensor input, int group_size, Any group_name",
        "reduce_scatter_tensor": "Tensor input, str reduce_op, int group_size, Any group_name",
        "all_reduce": "Tensor input, str reduce_op, Any group_name",
        "broadcast": "Tensor input, int src, Any group_name",
        "wait_tensor": "Tensor tensor",
    }.items():
        yield Callee(OPERATORS, name, f"({schema}) -> Tensor", parallel + "functional")
    elastic = "elastic/torch_private.py: "
    group, kind = "torch._C._distributed_c10d.ProcessGroup", "c10d::ProcessGroup::BackendType"
    new_group = (
        "group_size, group_rank, global_ranks_in_group, backend, store, group_name,"
        " backend_options, timeout, pg_tag, device_id, group_desc"
    )
    in_world = "pg, backend_name, store, group_name, backend_config, rank_mapping, pg_tag, user_tag, add_to_default_tag"
    for owner, name, signature, ours in (
        (distributed_c10d, "_new_process_group_helper", new_group, "replace_group_factory"),
        (distributed_c10d, "_register_pg_in_world", in_world, "register"),
        (distributed_c10d, "_find_pg_by_ranks_and_tag", "tag, ranks", "group_by_tag"),
        (
            dist.ProcessGroup,
            "_set_default_backend",
            f"(self: {group}, backend_type: {kind}) -> None",
            "group_over",
        ),
        (
            dist.ProcessGroup,
            "_register_backend",
            f"(self: {group}, device: torch.device, backend_type: {kind},"
            " backend: c10d::Backend | None = None) -> None",
            "group_over",
        ),
        (
            dist.ProcessGroup,
            "_set_group_name",
            f"(self: {group}, arg0: str) -> None",
            "register, name_group",
        ),
        (dist.ProcessGroup, "_set_group_desc", f"(self: {group}, arg0: str) -> None", "register"),
        (torch._C, "_current_graph_task_id", "(", "backward_under_way"),
        (dist.Reducer, "_reset_state", f"({c_plus_plus}) -> None", "reset_reducer"),
        (dist.Reducer, "_set_static_graph", f"({c_plus_plus}) -> None", "renew_reducer"),
        (DDP, "_build_params_for_reducer", "self", "parts_of_reducer"),
        (DDP, "_build_debug_param_to_name_mapping", "self, parameters", "parts_of_reducer"),
        (
            DDP,
            "_ddp_init_helper",
            "self, parameters, expect_sparse_gradient, param_to_name_mapping, static_graph",
            "renew_reducer, launch/torch_private.py: hold_groups",
        ),
        (
            dist,
            "_register_comm_hook",
            "(reducer: c10d::Reducer, state: object, comm_hook: object) -> None",
            "renew_reducer",
        ),
        (
            torch.amp.grad_scaler,
            "_refresh_per_optimizer_state",
            "",
            "reset_scaler",
        ),
        (DeviceMesh, "_compute_coordinate_on_dim", "self", "renew_mesh"),
        (torch.distributed.tensor.debug, "_clear_sharding_prop_cache", "", "forget_traces"),
        (
            torch.distributed.tensor._redistribute,
            "_gen_transform_infos",
            "src_spec, dst_spec, use_graph_based_transform",
            "forget_traces",
        ),
    ):
        yield Callee(owner, name, signature, elastic + ours)
    rpc = "rpc/torch_private.py: "
    storage, tensor, seconds = torch.UntypedStorage, torch.Tensor, "typing.SupportsFloat"
    for owner, name, signature, ours in (
        (torch.jit._builtins, "_get_builtin_table", "", "operator_names"),
        (torch._jit_internal, "_qualified_name", "obj, mangle_name", "script_name"),
        (
            torch._C,
            "_jit_get_schemas_for_operator",
            "(arg0: str) -> list[torch._C.FunctionSchema]",
            "operator_schemas",
        ),
        (
            torch._C.Future,
            "_set_unwrap_func",
            "(self: torch._C.Future, arg0: collections.abc.Callable) -> None",
            "fail_future",
        ),
        (torch._C, "_storage_Use_Count", f"(arg0: {number}) -> int", "storage_uses"),
        (torch._C, "_is_any_autocast_enabled", "(", "is_any_autocast_enabled"),
        (torch._C, "_autocast_supported_devices", "() -> list[str]", "autocast_kinds"),
        # Methods of tensors and storages do not expose their signatures.
        (storage, "_share_cuda_", "(", "share_cuda"),
        (storage, "_new_shared_cuda", "(", "open_cuda"),
        (storage, "_release_ipc_counter_cuda", "(", "release_cuda"),
        (tensor, "_is_zerotensor", "(", "is_zero_tensor"),
        (tensor, "_use_count", "(", "tensor_uses"),
        (tensor, "_indices", "(", "sparse_parts"),
        (tensor, "_values", "(", "sparse_parts"),
        (torch, "_is_functional_tensor", "(arg0: torch.Tensor) -> bool", "stand_in"),
        (torch.distributed.autograd, "_init", f"(arg0: {number}) -> None", "init_autograd"),
        (
            torch.distributed.autograd,
            "_get_debug_info",
            "() -> dict[str, int]",
            "autograd_debug_info",
        ),
        (
            TORCH_RPC,
            "_init_rpc_backend",
            "backend, store, name, rank, world_size, rpc_backend_options",
            "start_torch_agent",
        ),
        (
            TORCH_RPC,
            "_set_rpc_timeout",
            f"(arg0: {seconds} | typing.SupportsIndex) -> None",
            "set_torch_timeout",
        ),
        (TORCH_RPC, "_rref_context_get_debug_info", "() -> dict[str, str]", "torch_rref_info"),
        (
            TORCH_RPC.api,
            "_get_current_rpc_agent",
            "() -> torch._C._distributed_rpc.RpcAgent",
            "torch_agent",
        ),
    ):
        yield Callee(owner, name, signature, rpc + ours)


CALLEES = list(callees())


def signature_of(found: Any) -> str:
    if isinstance(found, torch._ops.OpOverloadPacket):
        return "(" + str(found.default._schema).partition("(")[2]
    try:
        return ", ".join(inspect.signature(found).parameters)
    except ValueError:  # pybind11: the docstring's first line
        return "(" + (found.__doc__ or "").partition("\n")[0].partition("(")[2]


@pytest.mark.parametrize("callee", CALLEES, ids=lambda each: each.name)
def test_private_functions_are_as_we_call_them(callee: Callee) -> None:
    found = getattr(callee.owner, callee.name, None)
    assert found is not None, f"torch has no {callee.name}; it is used by {callee.ours}"
    now = signature_of(found)
    assert now == callee.signature, f"{callee.name} has changed; it is used by {callee.ours}"


@pytest.fixture
def nothing_is_left() -> None:
    """Overrides the check: the group lives as long as pytest holds what ``ddp`` yielded."""


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        ddp_groups.hold(model)
        yield model
    finally:
        dist.destroy_process_group()


# Attributes of objects: their names, and what each test below finds through our functions.
ATTRIBUTES = {
    # elastic: run_uncompiled
    "_FrameAction",
    "_FrameExecStrategy",
    "_dynamo",
    "_C",
    "_Options",
    "_all_gather_result",
    "_coordinate_on_dim",
    "_flatten_rank_map",
    "_hash",
    "_layout",
    "_rank",
    "_rank_map",
    "_redistribute",
    "_st_info",
    "_fsdp_param_groups",
    "_get_fsdp_state",
    "_is_root",
    "_registry",
    "_profiler",
    "_ExperimentalConfig",
    "_prepare_trace",
    "_unsharded_param",
    "_StorageBase",
    "_devices",
    "_comm_hooks",
    "_has_rebuilt_buckets",
    "_iterator",
    "_shared_seed",
    "_BaseDataLoaderIter",
    "_index_sampler",
    "_inst",
    "_orig_mod",
    "_optimizer_step_post_hooks",
    "_per_optimizer_states",
    "_version",
    "_num_iter_calls",  # of Fabric: tested in tests/wild
    "_world",
    "_distributed_c10d",
    "_current_frames",
    "_dump_nccl_trace_json",  # only in builds with NCCL
    "_set_sequence_number_for_group",
    "_authoritative_rank",
    "_buffers",
    "_builtins",
    "_c10d_functional",
    "_cdata",
    "_children",
    "_native_id",
    "_startTime",
    "_str",
    "_enabled",
    "_internal",
    "_state",
    "_logging",
    "_core",
    "_divide_by_initial_world_size",
    "_execution_engine",
    "_frombuffer",
    "_get_layout",
    "_MEM_FORMAT_ENCODING",
    "_functorch",
    "_jit_internal",
    "_join_config",
    "_module_parameters",
    "_param_to_rank",
    "_parameters",
    "_pytree",
    "_reconstruct",
    "_scale",
    "_Unpickler",
    "_static_graph_delay_allreduce_enqueued",
    "_subclasses",
    "_thread",
    "_timeout",
}
# Not documented either, though without an underscore.
UNDERSCORELESS = (
    *("broadcast_bucket_size", "device", "find_unused_parameters", "forward_sync_buffers"),
    *("parameters_to_ignore", "process_group", "reducer", "require_backward_grad_sync"),
    *("require_forward_param_sync", "static_graph"),
)


def test_private_attributes_of_ddp(ddp: Any) -> None:
    missing = [name for name in UNDERSCORELESS if not hasattr(ddp, name)]
    assert not missing, f"join/hooks/ddp.py reads {missing}"
    assert of_join.ddp_parameters(ddp) == list(ddp.module.parameters())
    assert not of_join.has_comm_hook(ddp)
    static = DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=True)
    assert not of_join.has_learned_static_graph(static)
    static(torch.ones(1, 2)).sum().backward()
    assert of_join.has_learned_static_graph(static)
    # Set to what it already is: an attribute that torch no longer reads would be set in vain.
    assert "_authoritative_rank" in inspect.getsource(DDP)
    with ExitStack() as stack:
        of_join.keep_divisor(ddp, stack)
        ddp.join_hook(divide_by_initial_world_size=False)
        assert not of_join.divides_by_world_size(ddp)
    assert not hasattr(ddp, "_divide_by_initial_world_size")
    with ExitStack() as stack:
        of_join.keep_join_config(ddp, stack)
        of_join.configure_join(ddp, throws=True, is_first=True)
        assert of_join.is_first_joinable(ddp)
        assert ddp._join_config == _JoinConfig(True, True, True)
    assert not of_join.is_first_joinable(ddp)
    with ExitStack() as stack:
        of_join.answer_sync(ddp, lambda is_joined_rank: is_joined_rank, stack)
        of_join.answer_common_rank(ddp, lambda *_: 7, stack)
        assert of_join.asks_for_sync(ddp)
        assert ddp._find_common_rank(0, True) == 7
    (bucket,) = of_join.empty_buckets(ddp)
    assert not bucket.buffer().any()
    unused = DistributedDataParallel(torch.nn.Linear(2, 2), find_unused_parameters=True)
    counts = of_join.usage_counts(unused)  # not filled before the first forward
    assert (counts.shape, counts.dtype) == ((2,), torch.int32)


def test_private_attributes_of_a_group(ddp: Any) -> None:
    group, cpu = of_join.group_or_default(None), torch.device("cpu")
    assert group is dist.group.WORLD
    of_join.store_of(group).set("key", "value")
    assert of_join.timeout_of(group, cpu).total_seconds() == of_parallel.timeout_of(group, cpu)
    assert of_parallel.timeout_of(group, cpu) == 1800.0


def test_private_attributes_of_optimizers(ddp: Any) -> None:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    assert set(of_join.shard_owners(zero).values()) == {0}
    scaler = GradScaler("cpu")
    assert not of_join.has_scale(scaler)
    scaler.scale(torch.zeros(1))
    assert of_join.has_scale(scaler)


def test_a_joinable_without_its_constructor_is_seen() -> None:
    class Whole(Joinable):
        join_hook = join_device = join_process_group = None

        def __init__(self) -> None:
            super().__init__()

    class Half(Whole):
        def __init__(self) -> None:
            pass

    assert of_join.has_join_config(Whole())
    assert not of_join.has_join_config(Half())


def test_what_is_to_be_called_after_backward_is_called_last() -> None:
    calls: list[str] = []
    x = torch.ones(1, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        of_join.after_backward(lambda: calls.append("after"))
        ENGINE.queue_callback(lambda: calls.append("ddp"))

    x.register_hook(hook)
    (2 * x).sum().backward()
    assert calls == ["ddp", "after"]


def test_the_caller_is_counted_from_the_function_that_asks() -> None:
    def inner() -> str:
        return of_join.caller(1).f_code.co_name

    assert inner() == "test_the_caller_is_counted_from_the_function_that_asks"


def test_private_attributes_of_tensors_and_futures() -> None:
    tensor = torch.zeros(3)
    assert (of_rpc.tensor_uses(tensor), of_rpc.storage_uses(tensor.untyped_storage())) == (1, 2)
    twin = tensor.view(3)
    assert of_rpc.storage_uses(twin.untyped_storage()) == 3
    assert of_rpc.is_zero_tensor(torch._efficientzerotensor(3))
    assert of_rpc.stand_in(tensor) is None
    kinds: list[str | None] = []
    torch.func.vmap(lambda x: kinds.append(of_rpc.stand_in(x)) or x)(tensor)  # type: ignore[func-returns-value]
    torch.func.grad(lambda x: kinds.append(of_rpc.stand_in(x)) or x.sum())(tensor)  # type: ignore[func-returns-value]
    assert [each and each.rpartition(".")[2] for each in kinds] == ["vmap", "grad, vjp or jvp"]
    torch.func.functionalize(lambda x: kinds.append(of_rpc.stand_in(x)) or x)(tensor)  # type: ignore[func-returns-value]
    assert "functional tensor" in str(kinds[-1])
    with FakeTensorMode():
        assert "fake tensor" in str(of_rpc.stand_in(torch.empty(1)))
    assert type(torch.futures.Future().then(lambda done: done)) is of_rpc.NativeFuture
    of_rpc.fail_future(failed := torch.futures.Future(), KeyError("k"))
    with pytest.raises(KeyError):
        failed.wait()
    for base, name in of_rpc.PUBLIC_NAMES.items():
        assert base in eval(name).__mro__, name
    assert of_rpc.operator_names()[id(torch.add)] == "aten::add"
    leaf, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    edges = [torch.autograd.graph.get_gradient_edge(each) for each in (3 * leaf, leaf, other)]
    found = of_rpc.gradients(edges[:1], [torch.ones(2)], edges[1:], retain_graph=False)
    assert found[0].tolist() == [3, 3] and found[1] is None  # type: ignore[union-attr]
    indices, values = of_rpc.sparse_parts(torch.eye(2).to_sparse())
    assert indices.tolist() == [[0, 1], [0, 1]]
    assert values.tolist() == [1, 1]
    for array in (np.arange(3), np.float64(1)):
        words = [str(arg) for _, arg, _ in pickletools.genops(pickle.dumps(array, protocol=5))]
        assert {each.rpartition(".")[2] for each in of_rpc.NUMPY_REBUILDERS} & set(words)


def test_torch_has_the_names_that_compat_puts_in_its_place() -> None:
    native = of_compat.native_rpc()
    assert {"PyRRef", "WorkerInfo", of_compat.IS_AGENT_SET, "get_rpc_timeout"} <= set(dir(native))
    assert {"backward", "get_gradients", of_compat.NEW_CONTEXT} <= set(
        dir(of_compat.native_autograd())
    )
    rpc = importlib.import_module("torch.distributed.rpc")
    for name in (
        of_compat.UNSET_TIMEOUT,
        of_compat.DEFAULT_TIMEOUT,
        of_compat.DEFAULT_INIT_METHOD,
        of_compat.DEFAULT_THREADS,
        of_compat.IS_AGENT_SET,
        of_compat.PROFILE,
    ):
        assert hasattr(rpc, name), name
    assert hasattr(rpc.api, of_compat.REQUIRE_INITIALIZED)
    for name in (of_compat.TESTING, of_compat.PROFILER):
        assert importlib.util.find_spec(f"torch.distributed.rpc.{name}"), name


def test_multiprocessing_keeps_its_children_in_a_set_that_can_be_emptied() -> None:
    import multiprocessing.process

    children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
    before = set(children)
    try:
        children.add("somebody's child")
        of_launch.forget_children()
        assert not children
    finally:
        children.update(before)


def test_torch_knows_the_names_and_ranks_of_its_groups() -> None:
    assert of_launch.group_ranks() == {}
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.new_group([0])
        assert list(of_launch.group_ranks().values()) == [[0], [0]]
        assert dist.group.WORLD in of_launch.process_groups()
        assert len(of_launch.process_groups()) == 2
        group = dist.group.WORLD
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        ddp_groups.hold(model)
    finally:
        dist.destroy_process_group()
    assert of_launch.process_groups() == [group], "its last owner is the model"
    del model
    gc.collect()
    assert of_launch.process_groups() == []


def test_only_a_group_that_has_formed_uses_up_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(rendezvous, "_create_c10d_store", rendezvous._create_c10d_store)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    has_formed = of_launch._separate_keys(distributed_c10d)

    def meet(world_size: int = 2) -> str:
        store = rendezvous._create_c10d_store(
            "127.0.0.1", server.port, 1, world_size, timedelta(seconds=60)
        )
        store.set("key", "")
        found = next(each for each in ("key", "group_1/key", "group_2/key") if server.check([each]))
        server.delete_key(found)
        return found

    assert meet() == meet() == "key", "the first attempt has failed"
    has_formed()
    has_formed()  # a group of some ranks
    assert meet() == "group_1/key"
    assert meet(3) == "key", "other ranks may meet at the same store"
    has_formed()
    assert meet() == "group_1/key"
    has_formed()
    assert meet() == "group_2/key"
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert meet() == "key", "each group has a store of its own"


# Around a program that imports torch: collections during that, and taking torch apart at exit, are a third of its time.
BEFORE_TORCH = "import gc; gc.disable()"
AT_EXIT = "import os, sys; sys.stdout.flush(); os._exit(0)"


def test_torch_records_collectives_over_gloo() -> None:
    script = f"""
{BEFORE_TORCH}
import contextlib, time, torch, torch.distributed as dist
from rallypoint._core import flight_records
from rallypoint.launch import torch_private
started = []
torch_private.around_groups(lambda: started.append(1), contextlib.nullcontext)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert started == [1]
dist.all_reduce(torch.ones(2))
deadline = time.monotonic() + 60
while True:  # Gloo's thread marks a call as done after it has woken those who wait for it
    (group,) = flight_records.compact(torch_private.flight_records(calls=True), torch_private.group_ranks(), 0)
    (call,) = group["calls"]
    if call["done"] or time.monotonic() > deadline:
        break
assert (group["about"], group["ranks"]) == ("default_pg", [0])
assert (call["op"], call["seq"], call["sizes"], call["dtype"], call["done"]) == ("all_reduce", 1, [[2]], "Float", True)
assert flight_records.begun(torch_private.flight_records(calls=False)) == 1
dist.destroy_process_group()
{AT_EXIT}
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_setting_of_the_jit_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.jit._state._enabled
    assert state.enabled
    try:
        monkeypatch.setenv("PYTORCH_JIT", "0")
        of_launch.read_jit_setting()
        assert not state.enabled
    finally:
        state.enabled = True


def test_log_lines_count_their_time_from_now() -> None:
    import logging

    before = logging._startTime  # type: ignore[attr-defined]
    try:
        of_launch.begin_now()
        assert 0 <= logging.makeLogRecord({}).relativeCreated < 5000
        assert logging._startTime > before  # type: ignore[attr-defined]
    finally:
        logging._startTime = before  # type: ignore[attr-defined]
    assert threading.main_thread().native_id == threading.get_native_id()


def test_the_metadata_of_a_checkpoint_is_made_of_what_we_know() -> None:
    """tests/unit/test_checkpoint_metadata.py reads back what torch writes."""
    assert all(dataclasses.is_dataclass(each) for each in of_elastic.metadata_classes())
    formats, layout = of_elastic.metadata_values()
    assert issubclass(formats, enum.Enum)
    assert layout("torch.strided") is torch.strided


def test_every_operation_of_a_group_is_known() -> None:
    known = {
        *of_elastic.COLLECTIVES,
        *of_elastic.POINT_TO_POINT,
        *of_elastic.PASSED_ON,
        of_elastic.END_COALESCING,
    }
    assert not [name for name in known if not hasattr(dist.ProcessGroup, name)]
    work = {
        name
        for name, method in vars(dist.ProcessGroup).items()
        if "-> c10d::Work" in (getattr(method, "__doc__", "") or "")
    }
    assert not work - known, "torch's groups have new operations: elastic must pass them on"


def test_private_attributes_that_sessions_use(ddp: Any) -> None:
    assert of_elastic.layout_of_buckets(ddp) is None
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    settled = of_elastic.layout_of_buckets(ddp)
    assert settled is not None and sorted(chain(*settled)) == [0, 1]
    of_elastic.reset_reducer(ddp)
    assert of_elastic.layout_of_buckets(ddp) is None
    of_elastic.settle_buckets(ddp)
    assert of_elastic.layout_of_buckets(ddp) is not None
    assert of_elastic.group_of_ddp(ddp) is ddp.process_group
    assert not of_elastic.is_static(ddp)
    assert "0" in of_elastic.names_of_groups()
    assert of_elastic.backends_of("gloo") == {"cpu": "gloo"}
    changed = torch.zeros(1)
    assert not of_elastic.is_sharded(changed)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    assert of_elastic.is_sharded(torch.distributed.tensor.distribute_tensor(changed, mesh))
    before = of_elastic.version(changed)
    changed += 1
    assert of_elastic.version(changed) == before + 1
    norm = torch.nn.BatchNorm1d(1)
    norm.register_buffer("later", None)
    (held,) = of_elastic.buffers_of([torch.nn.Linear(1, 1), norm])
    assert held["running_mean"] is norm.running_mean and held["later"] is None
    compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert of_elastic.is_compiled(compiled) and not of_elastic.is_compiled(torch.nn.Linear(1, 1))
    assert next(iter(compiled.state_dict())).startswith(of_elastic.COMPILED)
    of_elastic.clone_of_default_store().set("cloned", "1")
    scaler = torch.amp.GradScaler("cpu")
    state = scaler._per_optimizer_states[0]
    of_elastic.reset_scaler(scaler)
    assert scaler._per_optimizer_states[0] == state


def test_a_reducer_with_a_static_graph_begins_anew(ddp: Any) -> None:
    calls: list[str] = []

    def reduced(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        calls.append("hook")
        if len(calls) == 1:
            of_elastic.call_behind_backward(lambda: calls.append("behind"))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    net = DistributedDataParallel(torch.nn.Linear(2, 2), static_graph=True)
    # torch reads annotations, but not those that are strings.
    net.register_comm_hook(None, lambda _, bucket: reduced(bucket))
    assert of_elastic.is_static(net) and not of_elastic.has_met_static_graph(net)
    parts = of_elastic.parts_of_reducer(net)
    assert parts[0] == list(net.parameters())
    net(torch.ones(1, 2))  # a pass that does not finish
    of_elastic.renew_reducer(net, parts)
    net(torch.ones(1, 2)).sum().backward()
    assert of_elastic.has_met_static_graph(net)
    assert calls == ["hook", "behind"]
    of_elastic.push_parameters(net)
    net(torch.ones(1, 2)).sum().backward()
    assert of_elastic.layout_of_buckets(net) is not None
    assert of_elastic.broadcast_from(2).rootRank == 2


def test_a_reducer_goes_back_to_its_first_layout(ddp: Any) -> None:
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    parts = of_elastic.parts_of_reducer(net)
    for _ in range(2):
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
        assert of_elastic.layout_of_buckets(net) is not None
        of_elastic.renew_reducer(net, parts)
        assert of_elastic.layout_of_buckets(net) is None


def test_private_attributes_of_meshes_that_sessions_use(ddp: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    assert any(each is mesh for each in of_elastic.meshes())
    assert of_elastic.ranks_of_mesh(mesh) == ((0,), (0,))
    kind = type(of_elastic.layout_of_mesh(mesh))
    wider = kind.from_sizes_strides((4, 2), (2, 1))
    assert of_elastic.first_size(wider) == 4 and of_elastic.first_size(kind([])) == 1
    narrower = of_elastic.with_first_size(wider, 3)
    assert narrower == kind.from_sizes_strides((3, 2), (2, 1))
    before = hash(mesh)
    of_elastic.renew_mesh(mesh, range(6), narrower, 0)
    assert (mesh.shape, mesh.get_coordinate()) == ((3, 2), (0, 0))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5]] and hash(mesh) != before
    assert mesh["replicas"].mesh.tolist() == [0, 2, 4]
    assert mesh == init_device_mesh_without_groups((3, 2))


def init_device_mesh_without_groups(shape: tuple[int, ...]) -> DeviceMesh:
    ranks = torch.arange(math.prod(shape)).view(shape)
    return DeviceMesh(
        "cpu", ranks, mesh_dim_names=("replicas", "shards"), _init_backend=False, _rank=0
    )


def test_private_attributes_of_replicated_fsdp_that_sessions_use(ddp: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    net = torch.nn.Sequential(torch.nn.Linear(2, 3))
    for each in (*net, net):
        fully_shard(each, mesh=mesh)
    (weight, _) = net.parameters()
    groups = of_elastic.groups_of_tensor(weight)
    assert [is_split for _, is_split in groups] == [False, True]
    assert groups[0][0] is mesh.get_group("replicas")
    assert of_elastic.groups_of_tensor(torch.zeros(1)) == []
    (group,) = net[0]._get_fsdp_state()._fsdp_param_groups
    group.mesh_info.replicate_mesh_size = group.mesh_info.replicate_mesh_rank = 7
    of_elastic.renew_fsdp_meshes([net])
    assert (group.mesh_info.replicate_mesh_size, group.mesh_info.replicate_mesh_rank) == (1, 0)
    of_elastic.forget_traces()


def test_wrappers_whose_parameters_cannot_be_kept_are_refused(ddp: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(torch.nn.Linear(2, 2), mesh["tp"], ColwiseParallel())
    within = DistributedDataParallel(model, device_mesh=mesh["dp"])
    assert all(map(of_elastic.is_localized, within.parameters()))
    with pytest.raises(ElasticError, match="around a tensor-parallel model cannot be kept"):
        Objects([within])
    alone = FullyShardedDataParallel(
        torch.nn.Linear(2, 2),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
    )
    with pytest.raises(ElasticError, match="FullyShardedDataParallel cannot be kept"):
        Objects([alone])
    Objects([ddp])


def test_private_attributes_of_fsdp_that_sessions_use(ddp: Any) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    for each in (*net, net):
        fully_shard(each, mesh=mesh)
    before = list(net.parameters())
    loss = net(torch.ones(1, 2)).sum()  # its parameters stay whole until the backward pass
    assert net[0].weight is before[0]
    (group,) = net[0]._get_fsdp_state()._fsdp_param_groups
    group.unshard()
    group.wait_for_unshard()
    assert net[0].weight is not before[0]
    loss.backward()
    group.unshard()
    for each in group.fsdp_params:
        each._unsharded_param.grad = each.unsharded_accumulated_grad = torch.ones_like(
            each._unsharded_param
        )
    of_elastic.reset_fsdp(net)
    assert group._all_gather_result is None
    assert not [each for each in group.fsdp_params if each._unsharded_param.grad is not None]
    assert not [each for each in group.fsdp_params if each.unsharded_accumulated_grad is not None]
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))
    assert net._get_fsdp_state()._is_root and net[0]._get_fsdp_state()._is_root is False
    part = of_elastic.local_part(before[0])
    assert type(part) is torch.Tensor and part.shape == (3, 2)
    assert of_elastic.local_part(part) is part
    assert of_elastic.is_sharded_alike(torch.zeros_like(before[0]), before[0])
    assert not of_elastic.is_sharded_alike(before[1], before[0])
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    assert of_elastic.local_optimizer(zero) is zero.optim
    sgd = torch.optim.SGD(ddp.parameters())
    assert of_elastic.local_optimizer(sgd) is sgd
    assert of_elastic.calls_hooks(sgd) and of_elastic.calls_hooks(zero)
    assert not of_elastic.calls_hooks(PostLocalSGDOptimizer(sgd, None))  # type: ignore[arg-type]


def test_operators_that_are_registered_now_stay_at_exit() -> None:
    def at_exit() -> int:
        alive = [(each, each.peek()) for each in list(weakref.finalize._registry)]  # type: ignore[attr-defined]
        return sum(
            each.atexit and found is not None and found[1] is torch.library._del_library
            for each, found in alive
        )

    before = at_exit()
    changed = [
        each
        for each in list(weakref.finalize._registry)  # type: ignore[attr-defined]
        if each.atexit
    ]
    try:
        of_launch.keep_operators_at_exit()
        assert before > 50
        assert at_exit() == 0
        assert len([each for each in changed if each.atexit]) == len(changed) - before
    finally:
        for each in changed:
            each.atexit = True


def test_the_message_of_a_traceback_can_be_cut() -> None:
    found = traceback.TracebackException.from_exception(ValueError("x" * 100))
    of_launch.cut_message(found, 10)
    assert str(found) == "x" * 10 + "…"


@pytest.mark.parametrize("name", of_launch.LEARNABLE)
def test_parts_of_torch_that_are_learned_exist(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


def test_a_function_may_be_kept_from_the_compiler() -> None:
    def runs() -> bool:
        return torch.compiler.is_compiling()

    def calls(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return x + 1, runs()

    of_elastic.run_uncompiled(calls)
    compiled = torch.compile(calls, backend="eager")
    assert compiled(torch.zeros(1)) == (torch.ones(1), False)


def test_hooks_of_ddp_with_state_are_known(ddp: DistributedDataParallel) -> None:
    assert of_elastic.states_of_hooks(ddp) == []
    state = powerSGD_hook.PowerSGDState(None)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    assert of_elastic.states_of_hooks(ddp) == [state]
    names = of_elastic.COUNTS_OF_HOOKS, of_elastic.MEMORY_OF_HOOKS, of_elastic.GENERATORS_OF_HOOKS
    assert all(hasattr(state, name) for name in chain(*names))
    local = post_localSGD_hook.PostLocalSGDState(None, None, 1)
    assert [name for name in chain(*names) if hasattr(local, name)] == ["iter"]
    # The rest is set by the script.
    settings = {
        *("process_group", "matrix_approximation_rank", "start_powerSGD_iter", "warm_start"),
        *("min_compression_rate", "orthogonalization_epsilon", "use_error_feedback"),
        *("batch_tensors_with_same_shape", "compression_stats_logging_frequency"),
    }
    assert set(state.__slots__) == {*chain(*names), *settings}


def test_averages_of_models_are_known(ddp: DistributedDataParallel) -> None:
    averager = PeriodicModelAverager(period=2)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    assert of_elastic.averager_of(averager) is of_elastic.averager_of(optimizer) is averager
    assert of_elastic.averager_of(inner) is None and of_elastic.averager_of(ddp) is None
    assert optimizer.optim is inner and vars(averager).keys() >= {"step", "period"}


def test_the_state_of_a_hook_goes_on_in_another_one() -> None:
    first, second = (powerSGD_hook.PowerSGDState(None, random_seed=seed) for seed in (1, 2))
    first.iter, first.error_dict[3] = 7, torch.ones(4)
    first.rng.randint(10)
    memory = second.error_dict
    saved = HookState(first, torch.device("cpu")).state_dict()
    HookState(second, torch.device("cpu")).load_state_dict(saved)
    assert second.iter == 7 and second.error_dict is memory and memory[3].tolist() == [1.0] * 4
    assert first.rng.randint(1 << 30) == second.rng.randint(1 << 30)


@pytest.mark.filterwarnings("ignore")  # fork with threads
def test_whether_the_workers_of_a_loader_run_is_known_and_draws_are_alike() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(torch.arange(8)), shuffle=True, num_workers=1, persistent_workers=True
        )

    def order(of: DataLoader[Any]) -> list[int]:
        torch.manual_seed(0)
        with samples.drawn_alike(of):
            return [batch.item() for (batch,) in of]

    first = loader()
    assert not of_elastic.has_workers(first)
    at_the_start = order(first)
    assert of_elastic.has_workers(first)
    # In the second iteration, and in a process that starts with it.
    assert order(first) == order(loader()) == at_the_start
    assert first.generator is None


RECORDS = f"""
{BEFORE_TORCH}
import json, os, sys, torch, torch.distributed as dist
from rallypoint.launch import torch_private
before = dict(os.environ)
torch_private.begin_flight_recorder(7)
assert dict(os.environ) == before
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(20):
    dist.all_reduce(torch.ones(1))
print([len(json.loads(each).get("entries") or ()) for each in torch_private.flight_records(calls=True)][0])
dist.destroy_process_group()
{AT_EXIT}
"""


@pytest.mark.parametrize(("said", "kept"), [(None, 7), ("12", 12), ("0", 0)])
def test_the_flight_recorder_keeps_as_many_calls_as_it_is_told(
    said: str | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", said)
    found = subprocess.run(
        [sys.executable, "-c", RECORDS], capture_output=True, text=True, timeout=240, check=True
    )
    assert found.stdout.split() == [str(kept)]


def test_a_module_holds_a_tensor_that_is_no_parameter() -> None:
    module, loose = torch.nn.Module(), torch.ones(2, requires_grad=True)
    of_elastic.hold(module, "0", loose)
    assert [*module.parameters()] == [loose] and next(module.parameters()) is loose
    module.load_state_dict({"0": torch.zeros(2)})
    assert loose.tolist() == module.state_dict()["0"].tolist() == [0, 0]


@pytest.mark.parametrize("size", [2, None])
def test_what_gives_the_iterator_of_a_loader_its_indices_is_known(size: int | None) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=size)
    expected = loader.sampler if size is None else loader.batch_sampler
    assert of_elastic.sampler_of_iterator(iter(loader)) is expected
    assert of_elastic.sampler_of_iterator(loader) is None


def test_every_private_name_is_asked_for_above() -> None:
    asked = {each.name for each in CALLEES} | ATTRIBUTES
    asked |= {part for name in of_launch.LEARNABLE for part in name.split(".")}
    asked |= {*of_elastic.COLLECTIVES, *of_elastic.PASSED_ON, of_elastic.END_COALESCING}
    for module in (of_elastic, of_join, of_launch, of_parallel, of_rpc):
        path = Path(module.__file__ or "")
        own = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        names = {name for _, name in foreign_private_names(path, "rallypoint", own)}
        assert names - asked == set()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.13.0+cpu", False),
        ("2.13.1", False),
        ("a build of mine", False),
        ("2.12.1", True),
        ("2.14.0.dev20261101+cu130", True),
        ("3.0.0", True),
    ],
)
def test_a_torch_that_is_not_tested_is_said_once(
    version: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested_torch, "_warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tested_torch.warn_if_untested(version)
        tested_torch.warn_if_untested(version)
    assert len(seen) == said
    assert all(version in str(each.message) for each in seen)


def test_the_tested_range_is_the_one_that_is_installed_and_asked_for() -> None:
    root = Path(__file__).parents[2]
    oldest = ".".join(map(str, tested_torch.OLDEST))
    newest = ".".join(map(str, tested_torch.NEWEST))
    assert f'"torch>={oldest}"' in (root / "pyproject.toml").read_text()
    assert f"torch=={newest}." in (root / "constraints.txt").read_text()

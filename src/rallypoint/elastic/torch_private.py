"""Every private name of torch that this package uses, and what for.

Nothing else in ``elastic`` uses one, and ``tests/test_architecture.py`` enforces that. ``tests/unit/test_torch_private.py``
checks each name and its signature in the installed torch.
"""

from __future__ import annotations

import functools
import gc
import pickle
import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


# Any: torch's stubs have none of these.
_c10d: Any = c10d


# -- groups over connections of our own -----------------------------------------------------------------------


def gloo_device(interface: str) -> Any:
    """A Gloo device on a network interface, or by default on the address of this host's name, as torch chooses it."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def gloo_options(devices: Sequence[Any], timeout: timedelta) -> Any:
    """Options for ``ProcessGroupGloo``: its devices and its time-out."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = list(devices)
    options._timeout = timeout
    return options


def timeout_of(backend: Any) -> timedelta:
    """The current time-out of a backend of Gloo or NCCL."""
    timeout: timedelta = backend.options._timeout
    return timeout


def nccl_backend(store: Any, rank: int, size: int, timeout: timedelta, options: Any) -> Any:
    """NCCL's backend of a group.

    Args:
        options: what the script gave ``init_process_group`` or ``new_group`` as ``pg_options``, or None.
    """
    module: Any = dist
    options = options or module.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = module.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def group_over(
    backends: Mapping[str, Any], store: Any, rank: int, size: int, *, has_nccl: bool
) -> dist.ProcessGroup:
    """A native group with a backend for each type of device, as ``init_process_group`` makes it, but not registered anywhere."""
    group: Any = dist.ProcessGroup(store, rank, size)
    kinds: Any = dist.ProcessGroup.BackendType
    default = kinds.NCCL if has_nccl else kinds.GLOO
    group._set_default_backend(default)
    for device, backend in backends.items():
        is_gloo = isinstance(backend, dist.ProcessGroupGloo)
        group._register_backend(torch.device(device), kinds.GLOO if is_gloo else default, backend)
    made: dist.ProcessGroup = group
    return made


def prefixed(store: Any, prefix: str) -> Any:
    """A c10d store whose keys all begin with ``prefix``."""
    return _c10d.PrefixStore(prefix, store)


def clone_of_default_store() -> Any:
    """The store that ``init_process_group`` was given, over a connection of its own."""
    return _c10d._get_default_store().clone()


def name_group(group: Any, name: str) -> None:
    """Give a group that is not registered the name that torch's logs show."""
    group._set_group_name(name)


# Blocks until it has ended, and returns no work.
MONITORED_BARRIER = "monitored_barrier"
# A group's operations. Some have two names: an old one, and the one of torch 2.13. All members get the same result from these.
SAME_FOR_ALL = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "allgather"),
        *("allgather_coalesced", "_allgather_base", "all_gather_single"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        MONITORED_BARRIER,
    }
)
REDUCE_SCATTERS = (
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)
COLLECTIVES = (
    *sorted(SAME_FOR_ALL),
    *("reduce", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
    *REDUCE_SCATTERS,
)
# These change the tensors that they are given.
IN_PLACE = frozenset(
    {
        "allreduce",
        "allreduce_coalesced",
        "broadcast",
        "barrier",
        "reduce",
        "send",
        MONITORED_BARRIER,
    }
)
SEND = "send"
POINT_TO_POINT = (SEND, "recv", "recv_anysource")
END_COALESCING = "_end_coalescing"
# A group's other methods, and what they return if it has no connections.
PASSED_ON = {
    "_start_coalescing": None,
    "_get_backend": None,
    "_has_hooks": False,
    "_set_sequence_number_for_group": None,
    "_get_sequence_number_for_group": 0,
    "_register_on_completion_hook": None,
    "_wait_for_pending_works": None,
    "_enable_collectives_timing": None,
}


def end_coalescing(group: Any, *args: Any, **kwargs: Any) -> Any:
    """The work of the operations since ``_start_coalescing``."""
    return group._end_coalescing(*args, **kwargs)


# -- making torch's groups ours -------------------------------------------------------------------------------


def replace_group_factory(factory: Callable[..., Any]) -> None:
    """Have ``init_process_group`` and ``new_group`` call ``factory(original, …)`` to make a group."""
    original = _c10d._new_process_group_helper

    def make(*args: Any, **kwargs: Any) -> Any:
        return factory(original, *args, **kwargs)

    _c10d._new_process_group_helper = make


def backends_of(backend: Any) -> dict[str, str]:
    """The backends that a name such as ``gloo`` or ``cpu:gloo,cuda:nccl`` stands for here, by the type of device."""
    by_device: dict[str, str] = _c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    here = {"cpu"}
    if torch.accelerator.is_available():
        here.add(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
    found = {device: str(kind) for device, kind in by_device.items() if device in here}
    return found or {device: str(kind) for device, kind in by_device.items()}


def is_known(group: Any) -> bool:
    """Whether a group has not been destroyed."""
    return group in _c10d._world.pg_map


def is_first_group() -> bool:
    """Whether the group that is being made will be the default group."""
    return not _c10d._world.pg_map


def names_of_groups() -> set[str]:
    return set(_c10d._world.pg_names.values())


def global_rank() -> int:
    return int(_c10d._get_default_group().rank())


def register(group: Any, backend: str, store: Any, name: str, description: str, tag: Any) -> None:
    """Make a group known to torch under its name, as the end of ``_new_process_group_helper`` does."""
    group._set_group_name(name)
    group._set_group_desc(description)
    default_tag = tag in (None, "")
    more = {"add_to_default_tag": True} if default_tag else {"pg_tag": f"user:{tag}"}
    _c10d._register_pg_in_world(
        group,
        backend_name=dist.Backend(backend),
        store=store,
        group_name=name,
        backend_config=str(_c10d.BackendConfig(dist.Backend(backend))),
        **more,
    )


def set_members(group: Any, ranks: Sequence[int]) -> None:
    """Give a group that torch knows these members from now on: global ranks, in the order of their group ranks."""
    _c10d._world.pg_group_ranks[group] = {each: at for at, each in enumerate(ranks)}


def group_by_tag(tag: Any, ranks: Sequence[int]) -> Any:
    """An existing group with the same tag and ranks, and its store; None if there is none."""
    if tag in (None, ""):
        return None
    found = _c10d._find_pg_by_ranks_and_tag(tag, list(ranks))
    return None if found is None else (found, _c10d._world.pg_map[found][1])


NOT_A_MEMBER: Any = _c10d.GroupMember.NON_GROUP_MEMBER


# -- DDP --------------------------------------------------------------------------------------------------------


def layout_of_buckets(net: Any) -> list[list[int]] | None:
    """Which gradients DDP reduces together, as numbers of the reduced parameters; None before the layout is final.

    DDP settles the layout after its first iteration, by the order in which gradients arrived.

    Raises:
        RuntimeError: a bucket of sparse gradients has received none since the layout was settled.
    """
    if not net._has_rebuilt_buckets:
        return None
    buckets = [bucket.parameters() for bucket in net.reducer._get_zeros_like_grad_buckets()]
    # Parameters that were frozen when DDP was created have no number. Whether one is frozen now does not matter.
    reduced = {id(each) for bucket in buckets for each in bucket}
    numbered = (each for each in net._module_parameters if id(each) in reduced)
    place = {id(each): number for number, each in enumerate(numbered)}
    return [[place[id(each)] for each in bucket] for bucket in buckets]


def reset_reducer(net: Any) -> None:
    """Allow the next forward pass after a backward pass that did not end. The layout is forgotten."""
    net.reducer._reset_state()
    net._has_rebuilt_buckets = False


def settle_buckets(net: Any) -> None:
    """Have DDP settle its layout now. It broadcasts rank 0's layout, in two tensors: see :class:`.Scripted`."""
    push_parameters(net)
    rebuild_buckets(net)


def rebuild_buckets(net: Any) -> None:
    """Have DDP settle its layout now, by the order in which gradients have arrived. It broadcasts rank 0's layout.

    Raises:
        RuntimeError: not all gradients have arrived.
    """
    if net.reducer._rebuild_buckets():
        net._has_rebuilt_buckets = True


def is_static(net: Any) -> bool:
    """Whether DDP learns in its first iteration which gradients it gets, and in which order."""
    return bool(net.static_graph)


def has_met_static_graph(net: Any) -> bool:
    """Whether the first backward pass of a DDP module with a static graph has begun."""
    return bool(net._static_graph_delay_allreduce_enqueued)


def parts_of_reducer(net: Any) -> tuple[Any, ...]:
    """What DDP makes its reducer from. The first are the parameters that it reduces."""
    parameters, sparse = net._build_params_for_reducer()
    return parameters, sparse, net._build_debug_param_to_name_mapping(parameters)


def renew_reducer(net: Any, parts: tuple[Any, ...]) -> None:
    """Let a DDP module make its first pass again, with the layout of buckets that it first had.

    No reducer goes back to its first layout, and one with a static graph cannot even forget half a pass. So it gets a new one;
    the old one removes its hooks from the parameters.

    Args:
        parts: from :func:`parts_of_reducer`.
    """
    net._ddp_init_helper(*parts, net.static_graph)
    if net.static_graph:
        net.reducer._set_static_graph()
        net.logger._set_static_graph()
    net._static_graph_delay_allreduce_enqueued = False
    net._has_rebuilt_buckets = False
    module: Any = dist
    for hook, state in net._comm_hooks:
        module._register_comm_hook(net.reducer, state, hook)


def syncs_buffers_next(net: Any) -> bool:
    """Whether DDP's next forward pass broadcasts buffers, if it does so at all: it does not after a pass without gradients."""
    return bool(net.require_forward_param_sync)


def set_syncs_buffers_next(net: Any, syncs: bool) -> None:
    """See :func:`syncs_buffers_next`."""
    net.require_forward_param_sync = syncs


def push_parameters(net: Any) -> None:
    """Pretend that all gradients have arrived, in the parameters' order: DDP settles its layout in the next pass."""
    net.reducer._push_all_rebuilt_params()


def backward_under_way() -> int | None:
    """A number for the backward pass that this thread is in; None if it is in none."""
    number: int = torch._C._current_graph_task_id()
    return None if number < 0 else number


def call_behind_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass if it succeeds, after the functions already queued there."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def broadcast_from(root: int) -> Any:
    """Options of a broadcast from a group rank."""
    options = _c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def states_of_hooks(net: Any) -> list[Any]:
    """The states of a DDP module's communication hooks, for those hooks of torch whose state changes from step to step."""
    hooks = "torch.distributed.algorithms.ddp_comm_hooks."
    kinds = (
        getattr(sys.modules.get(hooks + "powerSGD_hook"), "PowerSGDState", None),
        getattr(sys.modules.get(hooks + "post_localSGD_hook"), "PostLocalSGDState", None),
    )
    known = tuple(kind for kind in kinds if kind is not None)
    return [state for _, state in net._comm_hooks if isinstance(state, known)]


# What such a state has: counts; tensors by the number of their bucket; NumPy generators.
COUNTS_OF_HOOKS = (
    *("iter", "total_numel_before_compression", "total_numel_after_compression"),
    "next_stats_report",
)
MEMORY_OF_HOOKS = ("error_dict", "p_memory_dict", "q_memory_dict")
GENERATORS_OF_HOOKS = ("rng",)


def averager_of(each: Any) -> Any:
    """The model averager that an object is, or that an optimizer calls in its step; None if there is none."""
    averagers = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
    optimizers = sys.modules.get("torch.distributed.optim")
    kind = getattr(averagers, "ModelAverager", None)
    if kind is not None and isinstance(each, kind):
        # The script's own averager may have methods for its state.
        return None if hasattr(each, "state_dict") else each
    kind = getattr(optimizers, "PostLocalSGDOptimizer", None)
    return each.averager if kind is not None and isinstance(each, kind) else None


def group_of_ddp(net: Any) -> Any:
    return net.process_group


def is_joined(net: Any) -> bool:
    """Whether a block of torch's ``Join`` is open around a DDP module."""
    return bool(net._join_config.enable)


def has_workers(loader: Any) -> bool:
    """Whether the worker processes of a DataLoader with ``persistent_workers`` are running."""
    return loader._iterator is not None


@contextmanager
def sent_to_workers(loader: Any, content: object) -> Generator[None, None, None]:
    """An iteration that starts in this block sends something to each of the worker processes, which already run, ahead of indices."""
    iterator = loader._iterator
    # Torch sends it along; only data pipes read it, for which it is drawn anew.
    iterator._shared_seed = content
    try:
        yield
    finally:
        if iterator._shared_seed is content:
            iterator._shared_seed = None


def sampler_of_iterator(iterator: Any) -> Any:
    """What gives the iterator of a DataLoader its indices; None if the object is not such an iterator."""
    from torch.utils.data import dataloader

    iterators: Any = dataloader._BaseDataLoaderIter
    return iterator._index_sampler if isinstance(iterator, iterators) else None


# -- modules, tensors ---------------------------------------------------------------------------------------


def hold(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Make a tensor a parameter of a module, even if it is not an ``nn.Parameter``."""
    module._parameters[name] = tensor  # type: ignore[assignment]


def is_sharded(each: Any) -> bool:
    """Whether a tensor or optimizer has a part on each rank, as those of FSDP2, tensor-parallel modules and ZeRO do.

    This does not import their classes: whoever has such an object has imported them.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    optimizers = sys.modules.get("torch.distributed.optim")
    kinds = (
        getattr(tensors, "DTensor", None),
        getattr(optimizers, "ZeroRedundancyOptimizer", None),
    )
    return any(kind is not None and isinstance(each, kind) for kind in kinds)


def run_uncompiled(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` trace neither this function nor what it calls: C++ calls it from within compiled code.

    ``torch.compiler.disable`` does that as well, but imports ``torch._dynamo``.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


# The name of the module in a wrapper of ``torch.compile``.
COMPILED = "_orig_mod"


def is_compiled(module: Any) -> bool:
    """Whether ``torch.compile`` wraps a module."""
    return isinstance(getattr(module, COMPILED, None), torch.nn.Module)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, not a copy; for any other tensor, the tensor itself."""
    kind = _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    wait = getattr(part, "wait", None)  # a pending result is not a plain tensor
    return part if wait is None else wait()


def is_tensor_sharded(tensor: Any) -> bool:
    """Whether an object is a tensor with a part on each rank."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def place_of_part(tensor: Any) -> tuple[tuple[int, ...], bool]:
    """Where this rank's part of a sharded tensor begins, and whether it is the first rank with this part."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return (0,) * tensor.dim(), False
    (chunk,) = tensor.__create_chunk_list__()
    is_first = all(
        number == 0 or not placement.is_replicate()
        for number, placement in zip(here, tensor.placements, strict=True)
    )
    return tuple(chunk.offsets), is_first


def storage_info(path: str, offset: int, length: int) -> Any:
    """Where ``torch.distributed.checkpoint`` finds something: a file, and a place in it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def is_sharded_alike(one: Any, other: Any) -> bool:
    """Whether two sharded tensors have their parts in the same places."""
    kind = _dtensor()
    return (
        kind is not None
        and isinstance(other, kind)
        and (one.shape, one.device_mesh, one.placements)
        == (other.shape, other.device_mesh, other.placements)
    )


def _dtensor() -> Any:
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local_optimizer(optimizer: Any) -> Any:
    """The optimizer whose state is on this rank: ZeRO has one for its part of the parameters."""
    optimizers = sys.modules.get("torch.distributed.optim")
    kind = getattr(optimizers, "ZeroRedundancyOptimizer", None)
    return optimizer.optim if kind is not None and isinstance(optimizer, kind) else optimizer


def calls_hooks(optimizer: Any) -> bool:
    """Whether an optimizer's steps call the hooks that are registered on it: torch's ``__init__`` sees to that."""
    is_patched = getattr(type(optimizer).step, "hooked", False)
    return is_patched and hasattr(optimizer, "_optimizer_step_post_hooks")


def fsdp_parts(module: Any) -> list[Any]:
    """The parts of a module that were given to FSDP2."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [each for each in module.modules() if isinstance(each, kind)]


def is_fsdp1(module: Any) -> bool:
    """Whether a module is wrapped by the first FSDP."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def is_gradient(grad: torch.Tensor) -> bool:
    """Whether a gradient, or this rank's part of it, is worth applying: it is not zero, and all its elements are finite."""
    part = local_part(grad)
    values = part.coalesce().values() if part.is_sparse else part
    return bool(values.any()) and bool(values.isfinite().all())


# -- device meshes --------------------------------------------------------------------------------------------------------


def meshes() -> list[Any]:
    """All device meshes of this process."""
    from torch.distributed.device_mesh import DeviceMesh

    # By type, not isinstance: an object may pretend to be of another class, and load something to find out which.
    return [each for each in gc.get_objects() if issubclass(type(each), DeviceMesh)]


def ranks_of_mesh(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The ranks of the mesh that a mesh is a part of, and its own in the order of its dimensions; None if it lacks this rank."""
    here = getattr(mesh, "_coordinate_on_dim", None)
    return mesh._flatten_rank_map, None if here is None else tuple(mesh.mesh.flatten().tolist())


def layout_of_mesh(mesh: Any) -> Any:
    """The sizes of a mesh's dimensions, and how they are laid out over the ranks of the whole mesh."""
    return mesh._layout


def first_size(layout: Any) -> int:
    """The size of the first dimension with more than one rank, or of its first part if it was made of several; 1 if none."""
    shapes = [each.shape for each in layout if each.shape]
    return shapes[0][0] if shapes else 1


def with_first_size(layout: Any, size: int) -> Any:
    """The layout with another first size: see :func:`first_size`."""
    axes = list(layout)
    at = next(at for at, each in enumerate(axes) if each.shape)
    axes[at] = type(axes[at])((size, *axes[at].shape[1:]), axes[at].stride)
    return type(layout)(axes)


def renew_mesh(mesh: Any, rank_map: Sequence[int], layout: Any, rank: int) -> None:
    """Make a mesh consist of other ranks from now on.

    Args:
        rank_map: of the mesh that it is a part of.
        layout: the mesh's own.
        rank: of this process.
    """
    mesh._rank_map = torch.tensor(rank_map, dtype=torch.int)
    mesh._flatten_rank_map = tuple(rank_map)
    mesh._layout, mesh._rank, mesh._hash = layout, rank, None
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()


def renew_fsdp_meshes(modules: Iterable[Any]) -> None:
    """Update the sizes and ranks that FSDP2 has read from its meshes."""
    states = [each._get_fsdp_state() for module in modules for each in fsdp_parts(module)]
    for group in (group for state in states for group in state._fsdp_param_groups):
        infos = [group.mesh_info, *(each.mesh_info for each in group.fsdp_params)]
        for info in infos:
            if info.replicate_mesh_dim is not None:
                info.replicate_mesh_size = info.mesh.size(info.replicate_mesh_dim)
                info.replicate_mesh_rank = info.replicate_process_group.rank()


def forget_traces() -> None:
    """Forget what was computed or compiled for meshes of other sizes."""
    from torch.distributed.tensor import _redistribute, debug

    of_dtensor: Any = debug
    of_dtensor._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def groups_of_tensor(tensor: Any) -> list[tuple[Any, bool]]:
    """The groups of a tensor's mesh, and whether it is sharded among their members; empty for a tensor without a mesh."""
    if not is_tensor_sharded(tensor):
        return []
    return [
        (tensor.device_mesh.get_group(dim), not placement.is_replicate())
        for dim, placement in enumerate(tensor.placements)
    ]


def is_localized(parameter: Any) -> bool:
    """Whether DDP has replaced a sharded parameter by this rank's part, until the first forward pass."""
    return hasattr(parameter, "_st_info")


def reset_fsdp(module: Any) -> None:
    """Allow the next forward pass of FSDP2's modules after a pass that did not end. Their parameters are shards again."""
    parts = fsdp_parts(module)
    states = [each._get_fsdp_state() for each in parts]
    for group in (group for state in states for group in state._fsdp_param_groups):
        # Waiting for it would raise: its group is gone.
        group._all_gather_result = None
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
    for part, state in zip(parts, states, strict=True):
        if state._is_root:
            part.reset_iter_state()
        elif state._is_root is None:
            part.reshard()


def buffers_of(modules: Iterable[Any]) -> list[dict[str, torch.Tensor | None]]:
    """The dicts in which modules hold their buffers, if they have any; :meth:`Module.named_buffers` skips places without one."""
    return [held for module in modules if (held := module._buffers)]


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def sum_of_versions(tensors: Iterable[torch.Tensor]) -> int:
    """How often tensors were changed in place, in total."""
    return sum([each._version for each in tensors])  # faster than a generator


# The attributes in which loaders of frameworks count how often they were iterated: accelerate's, and Fabric's.
LOADER_COUNTS = ("iteration", "_num_iter_calls")


# -- devices and mixed precision ------------------------------------------------------------------------------------------


def cuda_is_in_use() -> bool:
    """Whether this process has a CUDA context."""
    in_use: Any = torch.cuda.is_initialized
    return bool(in_use())


def reset_scaler(scaler: Any) -> None:
    """Forget that gradients were unscaled in a step that did not end."""
    from collections import defaultdict

    from torch.amp import grad_scaler

    fresh: Any = grad_scaler._refresh_per_optimizer_state
    scaler._per_optimizer_states = defaultdict(fresh)


# -- Python's generator ---------------------------------------------------------------------------------------


def python_generator() -> int | None:
    """The address of the state of ``random``'s generator (a position, then 624 words of key); None if there is no such object.

    CPython's ``_random.Random`` keeps it after the object's header.
    """
    generator = getattr(random, "_inst", None)
    if generator is None or sys.implementation.name != "cpython":
        return None
    return id(generator) + object.__basicsize__


def python_gauss() -> float | None:
    """The number that ``random.gauss`` holds back for its next call."""
    held: float | None = random._inst.gauss_next  # type: ignore[attr-defined]
    return held


# -- metadata of checkpoints ----------------------------------------------------------------------------------

# The unpickler in Python. The one in C does not let a subclass decide on each instruction.
PythonUnpickler: Any = pickle._Unpickler


@functools.cache
def metadata_classes() -> tuple[type, ...]:
    """The classes of the instances in the metadata of a checkpoint."""
    from torch.distributed.checkpoint import filesystem, metadata as of

    return (
        of.BytesStorageMetadata,
        of.ChunkStorageMetadata,
        of.Metadata,
        of.MetadataIndex,
        of.StorageMeta,
        of.TensorProperties,
        of.TensorStorageMetadata,
        filesystem._StorageInfo,
    )


@functools.cache
def metadata_values() -> tuple[Any, ...]:
    """What their attributes are created with, besides plain data: memory formats and layouts."""
    from torch.distributed.checkpoint import metadata as of

    return of._MEM_FORMAT_ENCODING, torch.serialization._get_layout

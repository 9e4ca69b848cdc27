"""Every private name of torch and Python that this package uses, and what for.

No other module in ``join`` uses one; ``tests/test_architecture.py`` enforces that. ``tests/unit/test_torch_private.py``
checks each name and its signature in the installed torch, so a new torch shows at once which of these functions to check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree


# torch has no public module for nested containers. Batches, outputs and optimizer states go through these.
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_structure = _pytree.tree_structure
tree_unflatten = _pytree.tree_unflatten
treespec_dumps = _pytree.treespec_dumps
treespec_loads = _pytree.treespec_loads


# -- Joinable: the block tells each joinable what to do in a step --------------------------------------------


def has_join_config(joinable: object) -> bool:
    """Whether Joinable's constructor ran: it sets the attribute that the block writes to."""
    return hasattr(joinable, "_join_config")


def configure_join(joinable: Joinable, *, throws: bool, is_first: bool) -> None:
    """Switch a joinable on for the length of a block.

    Args:
        joinable: a DDP module, a ZeroRedundancyOptimizer, or an object of a class of the user's own.
        throws: whether the block ends on all ranks when the first one runs out.
        is_first: whether this joinable issues the all-reduce that counts the ranks with inputs in each step.
    """
    joinable._join_config = _JoinConfig(
        enable=True, throw_on_early_termination=throws, is_first_joinable=is_first
    )


def keep_join_config(joinable: Joinable, stack: ExitStack) -> None:
    """Have ``stack`` restore the joinable's configuration."""
    stack.callback(setattr, joinable, "_join_config", joinable._join_config)


def is_first_joinable(joinable: Any) -> bool:
    """Whether torch's ``notify_join_context`` tells this joinable how many ranks have inputs."""
    return bool(joinable._join_config.is_first_joinable)


# -- DistributedDataParallel: a rank without inputs matches its collectives ----------------------------------

# Private, and read before it exists: DDP sets it only in join_hook.
_DIVISOR = "_divide_by_initial_world_size"
_COMMON_RANK = "_find_common_rank"
_CHECK_SYNC = "_check_global_requires_backward_grad_sync"


def ddp_parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP handles, without those it was told to ignore."""
    return ddp._module_parameters


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether the user registered a communication hook, which then divides the gradients itself."""
    return bool(ddp._comm_hooks)


def has_learned_static_graph(ddp: DistributedDataParallel) -> bool:
    """Whether this rank has run the backward pass that ``static_graph`` learns from; call it only with ``static_graph``."""
    return bool(ddp._static_graph_delay_allreduce_enqueued)


def divides_by_world_size(ddp: DistributedDataParallel) -> bool:
    """Whether gradients are divided by all ranks of the group, not by those that still have inputs."""
    return bool(getattr(ddp, _DIVISOR))


def keep_divisor(ddp: DistributedDataParallel, stack: ExitStack) -> None:
    """Have ``stack`` restore the divisor setting that ``join_hook`` changes."""
    if _DIVISOR in ddp.__dict__:
        stack.callback(setattr, ddp, _DIVISOR, ddp.__dict__[_DIVISOR])
    else:
        stack.callback(ddp.__dict__.pop, _DIVISOR, None)


def set_buffer_source(ddp: DistributedDataParallel, rank: int) -> None:
    """Name the rank that sent the final model, as torch's own hook does."""
    ddp._authoritative_rank = rank


def answer_common_rank(
    ddp: DistributedDataParallel, answer: Callable[..., int], stack: ExitStack
) -> None:
    """Until ``stack`` ends, tell DDP which rank's buffers to use, instead of letting it ask all ranks."""
    _override(ddp, _COMMON_RANK, answer, stack)


def answer_sync(
    ddp: DistributedDataParallel, answer: Callable[[bool], bool | None], stack: ExitStack
) -> None:
    """Until ``stack`` ends, tell DDP whether a step exchanges gradients, instead of letting it ask all ranks."""
    _override(ddp, _CHECK_SYNC, answer, stack)


def _override(ddp: Any, name: str, answer: Callable[..., Any], stack: ExitStack) -> None:
    ddp.__dict__[name] = answer
    stack.callback(ddp.__dict__.pop, name, None)


def asks_for_sync(ddp: DistributedDataParallel) -> bool:
    """Whether the ranks with inputs exchange gradients in this step; a rank without inputs asks this."""
    return bool(ddp._check_global_requires_backward_grad_sync(is_joined_rank=True))  # type: ignore[no-untyped-call]


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Take part in the exchange of buffers before a forward pass."""
    ddp._check_and_sync_module_buffers()  # type: ignore[no-untyped-call]


def divide_by_count(ddp: DistributedDataParallel, count: dist.Work, *, initial: bool) -> None:
    """Set what the next backward pass divides gradients by.

    Args:
        ddp: the module.
        count: the all-reduce that counts the ranks with inputs.
        initial: divide by all ranks of the group instead.
    """
    ddp.reducer._set_forward_pass_work_handle(count, initial)


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Arrange gradient buckets in the order of the first backward pass. DDP does this once, in its second forward."""
    ddp.reducer._rebuild_buckets()


def empty_buckets(ddp: DistributedDataParallel) -> list[Any] | None:
    """DDP's gradient buckets (``torch.distributed.GradBucket``), filled with zeros.

    None if DDP has not made a sparse bucket yet: it makes one from the first gradient, and again after it has rearranged
    the buckets.
    """
    try:
        return list(ddp.reducer._get_zeros_like_grad_buckets())
    except RuntimeError:
        if not has_sparse_gradients(ddp):
            raise
        return None


def has_sparse_gradients(ddp: DistributedDataParallel) -> bool:
    """Whether DDP expects sparse gradients; it tells by these modules."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return any(isinstance(each, kinds) and each.sparse for each in ddp.module.modules())


def bucket_gradients(bucket: Any) -> list[torch.Tensor]:
    """The gradients in a bucket, one for each of its parameters, as views of the bucket's buffer.

    ``GradBucket.gradients()`` returns none for a sparse gradient, and the wrong halves of complex ones: the buffer holds
    them as pairs of real numbers, but the method counts each pair as one element.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        return [buffer]
    parameters = bucket.parameters()
    if buffer.is_complex() or not any(each.is_complex() for each in parameters):
        return list(bucket.gradients())
    flat = torch.view_as_complex(buffer.view(-1, 2))
    parts = flat.split([each.numel() for each in parameters])  # type: ignore[no-untyped-call]
    return [
        # A gradient has its parameter's layout, unless that has gaps.
        part.as_strided(each.shape, each.stride()) if _is_dense(each) else part.view(each.shape)
        for part, each in zip(parts, parameters, strict=True)
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def reduce_bucket(ddp: DistributedDataParallel, bucket: Any) -> torch.futures.Future[Any]:
    """Start the all-reduce of one bucket, or the user's communication hook."""
    return ddp.reducer._run_comm_hook(bucket)


def share_parameter_order(ddp: DistributedDataParallel) -> None:
    """Note that all gradients of this step are ready, so that buckets are rebuilt as on the other ranks."""
    ddp.reducer._push_all_rebuilt_params()


def usage_counts(ddp: DistributedDataParallel) -> torch.Tensor:
    """Which parameters this rank used: ``[parameters]``, int32. DDP sums it over the ranks."""
    return ddp.reducer._get_local_used_map()


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], bucket_size: int, source: int
) -> None:
    """Broadcast many tensors in buckets, in place.   Collective.

    Args:
        group: the process group.
        tensors: equal in number, shape and dtype on all ranks.
        bucket_size: bytes per message.
        source: the sender's rank in the group.
    """
    dist._broadcast_coalesced(group, list(tensors), bucket_size, source)  # type: ignore[attr-defined]


# -- optimizers ----------------------------------------------------------------------------------------------


def shard_owners(zero: Any) -> dict[torch.Tensor, int]:
    """The rank that updates each parameter of a ZeroRedundancyOptimizer."""
    owners: dict[torch.Tensor, int] = zero._param_to_rank
    return owners


def has_scale(scaler: GradScaler) -> bool:
    """Whether the scaler has made its state, which it does at the first loss."""
    return scaler._scale is not None


# -- process groups ------------------------------------------------------------------------------------------


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group for None."""
    return group or distributed_c10d._get_default_group()


def store_of(group: dist.ProcessGroup) -> Any:
    """The store that the group's ranks share. The type is Any because the stubs of torch's stores lack some methods."""
    return distributed_c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The time limit of the group's collectives on this kind of device."""
    # Any: the stubs lack both.
    backend: Any = group._get_backend(device)
    timeout: timedelta = backend.options._timeout
    return timeout


# -- autograd and Python -------------------------------------------------------------------------------------


def after_backward(call: Callable[[], None]) -> None:
    """Have ``call`` run at the end of the current backward pass, after DDP has put its gradients in place."""
    engine: Any = torch.autograd.Variable._execution_engine
    # DDP queues its own callback when its last bucket is full: later than now, but before the pass ends.
    engine.queue_callback(lambda: engine.queue_callback(call))


def caller(depth: int) -> FrameType:
    """The frame ``depth`` calls above the caller of this function."""
    return sys._getframe(depth + 1)

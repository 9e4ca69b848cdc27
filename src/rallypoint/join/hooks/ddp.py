"""DistributedDataParallel in a Join."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from rallypoint.errors import JoinError
from rallypoint.join.members import Member
from rallypoint.join.run import Run
from rallypoint.join.schedule import Schedule

from .sync_batch_norm import exchanges_statistics


# DDP asks the other ranks with these; where all have the schedule it answers by itself.
ASKS = ("_find_common_rank", "_check_global_requires_backward_grad_sync")

# What torch's hook sets on it.
DIVISOR = "_divide_by_initial_world_size"


class DdpMember(Member):
    """Matches DDP's forward (buffers) and backward (buckets of gradients).

    torch's own hook throws away the reduced gradients. This one puts them where they belong, so that what steps
    after it (an optimizer, sharded or not) keeps this rank's state the same as the others'.

    Args:
        ddp: the module.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp: Any = ddp
        self.name = "DistributedDataParallel"
        self.group = ddp.process_group
        self.device = ddp.join_device
        self.module = ddp
        self._exchanges_statistics = any(map(exchanges_statistics, ddp.modules()))
        self._run: Run | None = None
        self._hook = JoinHook()

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        self._run = run
        before = self.ddp.__dict__.get(DIVISOR)
        self._hook = self.ddp.join_hook(**kwargs)
        if before is None:
            stack.callback(self.ddp.__dict__.pop, DIVISOR, None)
        else:
            stack.callback(setattr, self.ddp, DIVISOR, before)
        # DDP goes on dividing by how many ranks had inputs last, unless it is told to take all of them.
        stack.callback(self.ddp.reducer._set_forward_pass_work_handle, dist.Work(), True)  # noqa: SLF001

    def planned(self, run: Run, stack: ExitStack) -> None:
        answers = (lambda *_: run.source, self._answer_sync)
        for name, answer in zip(ASKS, answers, strict=True):
            self.ddp.__dict__[name] = answer
            stack.callback(self.ddp.__dict__.pop, name, None)

    def _answer_sync(self, is_joined_rank: bool) -> bool | None:
        assert self._run is not None
        return self._run.syncs if is_joined_rank else None

    def unmatched(self, schedule: Schedule | None) -> str:
        if self._exchanges_statistics:
            return "its SyncBatchNorm exchanges statistics in forward and backward"
        someone_has_none = schedule is not None and schedule.least == 0 < schedule.total
        if someone_has_none and self._has_to_learn:
            return "static_graph is learnt in each rank's own first backward, and a rank has no inputs for it"
        return ""

    @property
    def _has_to_learn(self) -> bool:
        ddp = self.ddp
        return ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued  # noqa: SLF001

    def main_hook(self) -> None:
        ddp = self.ddp
        if self._has_to_learn:
            raise JoinError(
                "a DistributedDataParallel with static_graph has had no inputs on this rank: its graph is learnt in"
                " its own first backward; iterate over join.batches(loader)"
            )
        ddp.reducer._rebuild_buckets()  # noqa: SLF001  # as DDP's forward does, once
        ddp._check_and_sync_module_buffers()  # noqa: SLF001
        syncs = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)  # noqa: SLF001
        # As after a forward under no_sync(): the next one does not exchange buffers either.
        ddp.require_forward_param_sync = syncs
        assert self._run is not None
        self._run.exchanged = bool(syncs)
        if not syncs:
            return
        buckets = ddp.reducer._get_zeros_like_grad_buckets()  # noqa: SLF001
        reduced = []
        for bucket in buckets:
            self._bring(bucket)
            reduced.append(ddp.reducer._run_comm_hook(bucket))  # noqa: SLF001
        results = [_tensor(each.wait()) for each in reduced]
        unused = ddp.find_unused_parameters and not ddp.static_graph
        used = self._used_anywhere() if unused else None
        for bucket, result in zip(buckets, results, strict=True):
            self._take(bucket, result, used)
        ddp.reducer._push_all_rebuilt_params()  # noqa: SLF001

    def _bring(self, bucket: Any) -> None:
        """What this rank has accumulated and not yet exchanged counts, too."""
        run = self._run
        assert run is not None
        if not run.pending:
            return
        # DDP divides before its own all-reduce; a communication hook of the user divides by itself.
        divisor = 1 if self.ddp._comm_hooks else run.world_size  # noqa: SLF001
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter.grad is not None:
                gradient.copy_(parameter.grad / divisor)

    def _take(self, bucket: Any, result: torch.Tensor, used: set[int] | None) -> None:
        buffer = bucket.buffer()
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # An optimizer passes over a parameter that has none.
            parameter.grad = None if used is not None and id(parameter) not in used else gradient

    def _used_anywhere(self) -> set[int]:
        ddp = self.ddp
        counts = ddp.reducer._get_local_used_map()  # noqa: SLF001
        counts.zero_()  # here nothing was used
        ddp.process_group.allreduce(counts).wait()
        found = counts.tolist()
        counts.zero_()
        ignored = set(ddp.parameters_to_ignore)
        parameters = [
            parameter
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        return {id(p) for p, count in zip(parameters, found, strict=True) if count}

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)

    def after_replay(self, source: int) -> None:
        # Parameters and what optimizers hold are the same everywhere; buffers are one rank's.
        ddp = self.ddp
        if ddp.forward_sync_buffers:
            buffers = [buffer for _, buffer in ddp.module.named_buffers()]
            for buffer in buffers:
                dist.broadcast(buffer, group=self.group, group_src=source)


def _tensor(result: Any) -> torch.Tensor:
    """What a communication hook's future holds: one tensor, or a list of one."""
    tensor: torch.Tensor = result[0] if isinstance(result, list | tuple) else result
    return tensor

"""DistributedDataParallel in a Join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.errors import JoinError
from rallypoint.join import exchange, torch_private
from rallypoint.join.members import Member
from rallypoint.join.run import Run
from rallypoint.join.schedule import Schedule
from rallypoint.join.state import Part, dense_parts, digest, share
from rallypoint.join.torch_private import tree_leaves
from rallypoint.join.weights import accumulation_of

from .sync_batch_norm import exchanges_statistics


# The value that stands for no step.
NEVER = -2
# Kinds of gradients.
MISSING, STRIDED, SPARSE = range(3)


class DdpMember(Member):
    """Matches DDP's forward (buffers) and backward (buckets of gradients).

    torch's own hook discards the reduced gradients. This one stores them in the parameters, so that an optimizer that
    steps after it, sharded or not, keeps this rank's state equal to the others'. At the end of the block, a rank that
    ran out takes the gradients of a rank that did not: only a loop that ran to the end knows whether it kept, cleared
    or changed them.

    Gradients not cleared before a backward pass are part of what DDP averages. They are equal on all ranks, but a
    rank that has run out cannot know that they were kept, so the ranks with inputs contribute its share. Only gradients
    accumulated in an earlier block and not exchanged since may differ; :meth:`level` makes them equal if some rank has
    no inputs to contribute its own with.

    Args:
        ddp: the module.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp: Any = ddp
        self.name = "DistributedDataParallel"
        self.group = ddp.process_group
        self.device = ddp.join_device
        self.world_size = dist.get_world_size(ddp.process_group)
        self.module = ddp
        self._exchanges_statistics = any(map(exchanges_statistics, ddp.modules()))
        # Parameters that DDP must ignore are often experts, to which other ranks send tokens.
        self.exchanges_within = self._exchanges_statistics or bool(ddp.parameters_to_ignore)
        self._run: Run | None = None
        self._parameters: list[nn.Parameter] = []
        self._index = 0
        # The accumulation whose kept gradients have been scaled. What an exchange leaves is scaled before the next one.
        self._accumulation = NEVER
        # The last shadowed step that exchanged gradients.
        self._brought = NEVER
        # Whether a forward pass has had no backward pass yet.
        self._waits = False
        # Whether the last backward pass exchanged gradients; whether a shadowed step did.
        self._exchanged, self._shadowed = True, False
        # Whether the step being shadowed exchanges gradients.
        self._syncs = True
        # Whether this rank's loop clears gradients by zeroing them; None: not known yet.
        self._zeros: bool | None = None

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        self._run = run
        self._accumulation = self._brought = NEVER
        self._index = run.add_module()
        run.averaged |= {id(p) for p in torch_private.ddp_parameters(self.ddp)}
        self._exchanged, self._shadowed, self._zeros = True, False, None
        # By DDP's own flag, the last forward pass was in no_sync(), or without gradients.
        self.ran_back = not self.ddp.require_forward_param_sync
        # This includes parameters that are frozen now: DDP exchanges their gradients if they were not when it was made.
        self._parameters = torch_private.ddp_parameters(self.ddp)
        self._waits = False
        stack.callback(self.ddp.register_forward_hook(self._after_forward).remove)
        for each in self._parameters:
            node = accumulation_of(each)  # DDP keeps it
            stack.callback(node.register_prehook(self._before_accumulation).remove)
        torch_private.answer_sync(self.ddp, self._tell_sync, stack)
        torch_private.keep_divisor(self.ddp, stack)
        self.ddp.join_hook(**kwargs)  # it sets the divisor, and notes it in DDP's log
        # Otherwise DDP keeps dividing by the number of ranks that had inputs last.
        stack.callback(torch_private.divide_by_count, self.ddp, dist.Work(), initial=True)

    def planned(self, run: Run, stack: ExitStack) -> None:
        torch_private.answer_common_rank(self.ddp, lambda *_: run.source, stack)
        torch_private.answer_sync(self.ddp, self._answer_sync, stack)

    def _answer_sync(self, is_joined_rank: bool) -> bool | None:
        assert self._run is not None
        return self._run.syncs if is_joined_rank else None

    def unmatched(self, schedule: Schedule | None) -> str:
        if self._exchanges_statistics:
            return "its SyncBatchNorm exchanges statistics in forward and backward"
        someone_has_none = schedule is not None and schedule.least == 0 < schedule.total
        if someone_has_none and self._has_to_learn:
            return "static_graph learns from each rank's own first backward, and some rank has no inputs"
        if schedule is not None and self._lacks_buckets(schedule):
            return (
                "it learns the form of its sparse gradients from each rank's own first two exchanges of gradients, and some"
                " rank runs out before"
            )
        return ""

    def _lacks_buckets(self, schedule: Schedule) -> bool:
        run = self._run
        assert run is not None
        runs_out_early = schedule.least < min(2 * run.accumulation, schedule.total)
        return runs_out_early and torch_private.empty_buckets(self.ddp) is None

    @property
    def _has_to_learn(self) -> bool:
        ddp = self.ddp
        return ddp.static_graph and not torch_private.has_learned_static_graph(ddp)

    def _tell_sync(self, is_joined_rank: bool) -> bool | None:
        """Like DDP's own method, but keeps the result: how many ranks exchange gradients."""
        exchanges = not is_joined_rank and self.ddp.require_backward_grad_sync
        count = torch.full((1,), float(exchanges), device=self.ddp.device)
        work = dist.all_reduce(count, group=self.group, async_op=True)
        if not is_joined_rank:
            assert self._run is not None
            self._run.told = (work, count)
            if not torch_private.is_first_joinable(self.ddp):
                # torch passes the number to divide by only to the first joinable.
                initial = torch_private.divides_by_world_size(self.ddp)
                torch_private.divide_by_count(self.ddp, work, initial=initial)
            return None
        work.wait()
        return bool(count.item())

    # -- a rank that has inputs -----------------------------------------------------------------

    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        assert self._run is not None
        passes, step, index = self._run.passes, self._run.step, self._index
        passes.note(step, index, forward=True)
        self._syncs = bool(self.ddp.require_backward_grad_sync)
        outputs = [output] if isinstance(output, torch.Tensor) else _tensors(output)
        self._waits = any(each.requires_grad for each in outputs)
        if not self._waits:
            passes.note(step, index, forward=False)  # its backward pass cannot be observed

    def _before_accumulation(self, _: Sequence[torch.Tensor | None]) -> None:
        # Not at the outputs: autograd.grad() runs back through them without an exchange, and several forward passes can
        # share one backward pass. DDP exchanges once after its last forward pass, as parameters receive their gradients.
        if not self._waits:
            return
        self._waits = False
        run = self._run
        assert run is not None
        run.passes.note(run.step, self._index, forward=False)
        exchanged, self._exchanged = self._exchanged, bool(self.ddp.require_backward_grad_sync)
        self.ran_back = not self._exchanged
        if run.replays:
            return  # every rank contributes its own gradients
        if run.schedule is not None:
            start = run.accumulation_at(run.step)
            if start != self._accumulation:
                self._accumulation = start
                self._raise_standing(lambda: run.sharing(run.step))
            elif exchanged:  # earlier in this step, with all that ranks without inputs had to bring
                self._raise_standing(lambda: run.num_active)
        elif exchanged and self._exchanged and run.told is not None:
            # In other steps, torch's protocol does not count the ranks.
            work, count = run.told
            initial = torch_private.divides_by_world_size(self.ddp)
            if initial or torch_private.has_comm_hook(self.ddp):
                self._raise_standing(lambda: int(count.item()) if work.wait() else 0)

    def _raise_standing(self, sharing: Callable[[], int]) -> None:
        """Scale the gradients kept from before, on behalf of the ranks that do not contribute theirs."""
        standing = [p.grad for p in self._trained if p.grad is not None]
        if not standing or not 0 < (number := sharing()) < self.world_size:
            return
        before = []
        if self.ddp.find_unused_parameters and not self.ddp.static_graph:
            before = [(gradient, gradient.clone()) for gradient in standing]
        with torch.no_grad():
            for gradient in standing:
                gradient.mul_(self.world_size / number)
        if before:
            raised = [gradient.clone() for gradient in standing]
            torch_private.after_backward(partial(_lower_unused, before, raised))

    def level(self) -> None:
        trained = self._trained
        own = [digest([p.grad for p in trained]), *[_kind(p.grad) for p in trained]]
        told = exchange.gather(own, len(own), self.ddp.device, self.group)
        digests, *kinds = zip(*told, strict=True)
        if len(set(digests)) == 1:
            return
        for parameter, every in zip(trained, kinds, strict=True):
            if any(every):
                mean = _held(parameter, max(every)) / self.world_size
                mean = mean.coalesce() if mean.is_sparse else mean  # as collectives need it
                dist.all_reduce(mean, group=self.group)
                if parameter.grad is None or mean.is_sparse:
                    parameter.grad = mean
                else:
                    parameter.grad.detach().copy_(mean)  # it may be a view of DDP's bucket

    def begun_in(self, step: int) -> bool:
        assert self._run is not None
        return not any(each.module == self._index for each in self._run.passes.missing(step))

    # -- a rank that has run out ----------------------------------------------------------------

    def main_hook(self) -> None:
        assert self._run is not None
        for each in self._run.passes.missing(self._run.step):
            if each.module == self._index:
                self.match(forward=each.forward)

    def match(self, *, forward: bool) -> None:
        """Match the collectives of one pass of the other ranks.

        Args:
            forward: a forward pass; False: a backward pass.

        Raises:
            Deserted: all ranks have left their loops.
            JoinError: on this rank, ``static_graph`` has not learned its graph, or DDP the form of its sparse gradients.
        """
        ddp, run = self.ddp, self._run
        assert run is not None
        if self._has_to_learn:
            raise JoinError(
                "DistributedDataParallel with static_graph learns its graph from the rank's first backward pass, and this"
                " rank had no inputs; iterate over join.batches(loader)"
            )
        if forward:
            torch_private.rebuild_buckets(ddp)
            torch_private.sync_buffers(ddp)
            self._syncs = torch_private.asks_for_sync(ddp)
            # As in DDP, a forward pass after a step under no_sync() does not exchange buffers.
            ddp.require_forward_param_sync = self._syncs
            return
        run.exchanged = self._syncs
        if not self._syncs:
            return
        buckets = torch_private.empty_buckets(ddp)
        if buckets is None:
            raise JoinError(
                "DistributedDataParallel learns the form of its sparse gradients from the rank's own first two exchanges of"
                " gradients, and this rank ran out before; iterate over join.batches(loader)"
            )
        reduced = []
        for bucket in buckets:
            self._bring(bucket)
            reduced.append(torch_private.reduce_bucket(ddp, bucket))
        results = [_tensor(each.wait()) for each in reduced]
        unused = ddp.find_unused_parameters and not ddp.static_graph
        used = self._used_anywhere(buckets) if unused else None
        run.confirm()
        self._shadowed, self._brought = True, run.step
        for bucket, result in zip(buckets, results, strict=True):
            self._take(bucket, result, used)
        torch_private.share_parameter_order(ddp)

    def _bring(self, bucket: Any) -> None:
        """Add gradients that this rank has accumulated but not yet exchanged."""
        run = self._run
        assert run is not None
        if not run.pending or self._brought == run.step:
            return
        # DDP divides before its own all-reduce; a user's communication hook divides on its own.
        divisor = 1 if torch_private.has_comm_hook(self.ddp) else run.world_size
        gradients = torch_private.bucket_gradients(bucket)
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            if parameter.grad is not None:
                gradient.copy_(parameter.grad / divisor)

    def _take(self, bucket: Any, result: torch.Tensor, used: set[int] | None) -> None:
        buffer = bucket.buffer()
        if result.is_sparse or result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result)
        gradients = torch_private.bucket_gradients(bucket)
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            if used is None or id(parameter) in used:
                parameter.grad = gradient
            elif self._clears_by_zeros() and not buffer.is_sparse:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad = None  # optimizers skip it

    def _clears_by_zeros(self) -> bool:
        """Whether this rank's loop clears gradients by zeroing them, judging by the gradients it left."""
        if self._zeros is None:
            left = [p.grad for p in self._trained if p.grad is not None]
            values = [dense_parts(each)[-1] for each in left]
            self._zeros = bool(left) and not any(bool(each.count_nonzero()) for each in values)
        return self._zeros

    def _used_anywhere(self, buckets: Sequence[Any]) -> set[int]:
        ddp = self.ddp
        exchanged = {id(p) for bucket in buckets for p in bucket.parameters()}
        parameters = [p for p in self._parameters if id(p) in exchanged]
        counts = torch_private.usage_counts(ddp)
        counts.zero_()  # this rank used none
        ddp.process_group.allreduce(counts).wait()
        found = counts.tolist()
        counts.zero_()
        return {id(p) for p, count in zip(parameters, found, strict=True) if count}

    # -- all ranks have finished ------------------------------------------------------------------

    def parts(self) -> Sequence[Part]:
        assert self._run is not None
        ddp = self.ddp
        named = ddp.module.named_buffers() if ddp.forward_sync_buffers else ()
        buffers = [each for name, each in named if name not in ddp.parameters_to_ignore]
        parts = [
            Part(self.name, partial(list, tensors), partial(self._send, tensors))
            for tensors in (torch_private.ddp_parameters(ddp), buffers)
            if tensors
        ]
        if not self._run.replays:  # with replay, each rank takes part in the last exchange
            parts.append(Part(self.name, self._gradients, self._share_gradients))
        return parts

    def _send(self, tensors: Sequence[torch.Tensor], source: int, keep: bool) -> None:
        # As with torch's hook, ranks that had inputs to the end receive the tensors, too.
        self._broadcast([each.detach() for each in tensors], source)

    def _broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        assert self.group is not None
        size = self.ddp.broadcast_bucket_size
        torch_private.broadcast_coalesced(self.group, tensors, size, source)

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._parameters if p.requires_grad]

    def _gradients(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self._parameters]

    def _share_gradients(self, source: int, is_last_joiner: bool) -> None:
        """Take the gradients of rank ``source``, unless its last backward passes exchanged nothing."""
        parameters = self._parameters
        there = [_kind(p.grad) for p in parameters]
        told = torch.tensor([self._exchanged, *there], dtype=torch.uint8, device=self.ddp.device)
        dist.broadcast(told, group=self.group, group_src=source)
        exchanged, *kinds = told.tolist()
        stand = [p for p, kind in zip(parameters, kinds, strict=True) if kind == STRIDED]
        sparse = [p for p, kind in zip(parameters, kinds, strict=True) if kind == SPARSE]
        if not exchanged:
            if not is_last_joiner and self._is_spent():
                for parameter in self._trained:
                    stands = any(each is parameter for each in stand)
                    parameter.grad = torch.zeros_like(parameter) if stands else None
            return
        is_source = dist.get_rank(self.group) == source
        gradients = []
        for parameter in stand:
            own = parameter.grad if is_source else torch.empty_like(parameter)
            assert own is not None
            gradients.append(own.detach())
        if gradients:
            self._broadcast(gradients, source)
        if sparse:
            held = [p.grad for p in sparse] if is_source else None
            gradients += share(held, source, self.ddp.device, self.group, "gradients")
        if is_last_joiner:
            return
        for parameter in parameters:
            parameter.grad = None
        for parameter, gradient in zip(stand + sparse, gradients, strict=True):
            parameter.grad = gradient

    def _is_spent(self) -> bool:
        """Whether the other ranks already hold everything in this rank's gradients."""
        run = self._run
        assert run is not None
        return self._shadowed if run.schedule is None else not run.pending


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return MISSING
    return SPARSE if gradient.is_sparse else STRIDED


def _held(parameter: nn.Parameter, kind: int) -> torch.Tensor:
    """The parameter's gradient, or zeros of the given kind."""
    if parameter.grad is not None:
        return parameter.grad.detach()
    if kind == STRIDED:
        return torch.zeros_like(parameter)
    # Like an embedding's gradient, it is sparse in the first dimension.
    rows = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_zeros((0, *parameter.shape[1:]))
    shape = list(parameter.shape)
    return torch.sparse_coo_tensor(rows, values, shape, is_coalesced=True, check_invariants=False)


def _lower_unused(
    before: list[tuple[torch.Tensor, torch.Tensor]], raised: list[torch.Tensor]
) -> None:
    """Undo the scaling for parameters that no rank used: DDP does not touch their gradients."""
    with torch.no_grad():
        for (gradient, old), untouched in zip(before, raised, strict=True):
            parts = zip(dense_parts(gradient), dense_parts(untouched), strict=True)
            if all(torch.equal(*each) for each in parts):
                gradient.copy_(old)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in a module's output, including those in dataclasses."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors([getattr(leaf, each.name) for each in fields(leaf)])
    return found


def _tensor(result: Any) -> torch.Tensor:
    """The tensor in a communication hook's result, which is a tensor or a list of one."""
    tensor: torch.Tensor = result[0] if isinstance(result, list | tuple) else result
    return tensor

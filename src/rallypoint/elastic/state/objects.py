"""The objects of a session: their state as tensors and a little structure, sent from one rank to another.

A module's tensors are received in place. Everything else goes through ``state_dict`` and ``load_state_dict``. The structure is
read by torch's restricted unpickler, which executes nothing.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.serialization.config  # torch.save and torch.load import it when they are called: in a recovery
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.elastic import torch_private
from rallypoint.elastic.checksum import checksum
from rallypoint.elastic.communication.kept_group import KeptGroup
from rallypoint.elastic.communication.setup_record import Scripted, Unchanged, bytes_of
from rallypoint.errors import ElasticError

from . import bundles, optimizer_state
from .buffers import Buffers
from .copied import copied
from .digests import digest
from .hook_states import AveragerState, HookState, of_hooks, with_averagers
from .loose_parameters import of_no_module
from .modes import Flags, Modes
from .param_groups import Members, add_missing, members
from .plain_data import of_kind, plain, unreadable
from .settings import Settings
from .static_graphs import StaticGraphs, Unused
from .wrapped_optimizers import unwrapped


_TENSOR = "rallypoint tensor"
# Which gradients a DDP module reduces together: numbers of parameters.
Layout = tuple[tuple[int, ...], ...]
# Parameters, buffers, everything else, modes.
Saved = tuple[list[torch.Tensor], list[Any], list[Any], Flags]

_log = logging.getLogger(__name__)


class Objects:
    """What ``elastic.session`` was given.

    Args:
        given: modules, optimizers, schedulers, anything with ``state_dict`` and ``load_state_dict``.
        snapshots: keep each rank's state in snapshots, even if nothing here requires it.

    Raises:
        TypeError: an object lacks one of these methods.
        ElasticError: a DDP module has sharded parameters; a module is wrapped by the first FSDP; a parameter or buffer is sparse.

    Attributes:
        is_sharded: a part of the state is on one rank only.
        ranks_differ: state that is not sharded may differ between ranks, too, as the memory of a communication hook does; or no
            rank has all of it partway through a step.
        keeps_snapshots: for either reason, each rank's state is kept in snapshots.
    """

    def __init__(self, given: Sequence[Any], *, snapshots: bool = False) -> None:
        given = list(with_averagers(map(unwrapped, given)))
        for each in given:
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(
                    f"elastic.session: {type(each).__name__!r} has no state_dict and load_state_dict; expected modules,"
                    " optimizers, schedulers, scalers, or objects with these two methods"
                )
            _check_wrappers(each)
            if isinstance(each, nn.Module):
                _check_layouts(each)
                # A forward pass before the session may have left whole parameters in the place of shards.
                torch_private.reset_fsdp(each)
        self.optimizers = [each for each in given if isinstance(each, torch.optim.Optimizer)]
        modules = [each for each in given if isinstance(each, nn.Module)]
        given = self.given = (*given, *of_no_module(self.optimizers, modules))
        self.modules = [each for each in given if isinstance(each, nn.Module)]
        parts = [part for module in self.modules for part in module.modules()]
        self.ddp = [each for each in parts if isinstance(each, DistributedDataParallel)]
        submodules = list({id(each): each for each in parts}.values())
        # Everything else that has a state of its own, in the same order on all ranks.
        self.others = [
            *(each for each in given if not isinstance(each, nn.Module)),
            *(ExtraState(each) for each in submodules if ExtraState.is_in(each)),
            *of_hooks(self.ddp),
        ]
        self._parameters = [
            parameter for module in self.modules for parameter in module.parameters()
        ]
        self.modes = Modes(submodules, self._parameters)
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        self._tensors = *self._parameters, *buffers
        sharded = map(torch_private.is_sharded, (*self._tensors, *self.others))
        self.is_sharded = any(sharded)
        # LBFGS alternates between changing parameters and calling the closure, which communicates.
        kinds = HookState | AveragerState | torch.optim.LBFGS
        self.ranks_differ = snapshots or any(isinstance(each, kinds) for each in self.others)
        self.keeps_snapshots = self.is_sharded or self.ranks_differ
        self.has_zero = any(
            torch_private.local_optimizer(each) is not each for each in self.optimizers
        )
        self.buffers = Buffers(submodules)
        self._to_check = 2
        self.settings = Settings(self.optimizers, self.others)
        # How often each optimizer has stepped: fused ones change parameters without counting that in the tensors' versions.
        self._steps = dict.fromkeys(self.optimizers, 0)
        self._new_at = {net: self._age(net) for net in self.ddp}
        # Layouts that were settled here. DDP never changes one, but it reports the first that it had; with sparse gradients, it
        # reports none before it has had some.
        self._settled: dict[DistributedDataParallel, Layout] = {}
        self.static_graphs = StaticGraphs(self.ddp)
        self._made_of = {net: torch_private.parts_of_reducer(net) for net in self.ddp}
        # How many passes each module has made before the next step, counting only those that DDP makes before it settles the
        # layout. (All processes make the passes of the set-up.)
        self._passes = {
            net: self._passes_to_layout(net) if _has_gradients(net) else 0 for net in self.ddp
        }
        self._goes_back: dict[DistributedDataParallel, int] = {}  # to which pass, once all have met
        # Layouts to be settled after the next pass.
        self._coming: dict[DistributedDataParallel, Layout] = {}

    def split_among(self) -> list[KeptGroup]:
        """The groups among whose members parameters or buffers are sharded."""
        found = (
            group
            for each in self._tensors
            for group, is_split in torch_private.groups_of_tensor(each)
            if is_split
        )
        return list(dict.fromkeys(found))

    def are_replicated(self) -> bool:
        """Whether every parameter is known to be on all replicas: by its mesh or by DDP, if their group is over all replicas."""
        by_ddp = {
            parameter
            for net in self.ddp
            if _is_over_replicas(torch_private.group_of_ddp(net))
            for parameter in net.parameters()
        }
        return all(
            each in by_ddp
            or any(
                _is_over_replicas(group) and not is_split
                for group, is_split in torch_private.groups_of_tensor(each)
            )
            for each in self._parameters
        )

    @property
    def is_joined(self) -> bool:
        """Whether a block of torch's Join is open around one of the DDP modules."""
        return any(map(torch_private.is_joined, self.ddp))

    def local_tensors(self) -> Iterator[torch.Tensor]:
        """This rank's part of all parameters and buffers, in the same order on all ranks."""
        for each in self._tensors_of_modules():
            yield torch_private.local_part(each)

    def describe(self) -> str:
        """A description in words, the same on all ranks: classes, and how many parameters and elements."""
        words = []
        for each in self.given:
            text = type(each).__name__
            if isinstance(each, nn.Module):
                tensors = list(each.parameters())
                text += (
                    f" ({len(tensors)} parameters, {sum(t.numel() for t in tensors):,} elements)"
                )
            words.append(text)
        return ", ".join(words) or "nothing"

    def fingerprint(self, of_each: int | None = None) -> int:
        """A number that depends on all parameters: the same on ranks that hold the same values.

        Args:
            of_each: how many elements of each parameter to read; None: all.
        """
        total = 0
        for each in self._parameters:
            flat = each.detach().reshape(-1)
            if of_each is not None:
                flat = flat[:: max(1, flat.numel() // of_each)]
            flat = flat.contiguous().view(torch.uint8)
            if flat.storage_offset() % 8:  # a part of a flat tensor, which need not start at a word
                flat = flat.clone()
            whole = flat.numel() // 8 * 8
            # Word by word: a sum of bytes would first widen each of them to an integer, in eight times the memory.
            rest = int(flat[whole:].sum().item())
            total = (31 * total + checksum(flat[:whole].view(torch.int64)) + rest) % (1 << 63)
        return total

    def digests(self) -> list[tuple[str, str]]:
        """For each of the other objects, what it is and a digest of its state."""
        return [(_named(each), digest(optimizer_state.part_of(each))) for each in self.others]

    # -- one step -----------------------------------------------------------------------------------

    def changes(self) -> int:
        """How often parameters were changed in place; only if none is sharded. Called in each step."""
        return torch_private.sum_of_versions(self._parameters)

    def gradients(self) -> list[tuple[torch.Tensor, int] | None]:
        """All gradients, and how often each was changed in place."""
        found = (each.grad for each in self._parameters)
        return [None if each is None else (each, _version(each)) for each in found]

    def accumulated(
        self, before: Sequence[tuple[torch.Tensor, int] | None]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters with gradients that a step has left but did not find. Zero or non-finite gradients do not count."""
        for parameter, held in zip(self._parameters, before, strict=True):
            grad = parameter.grad
            if grad is None:
                continue
            changed = held is None or held[0] is not grad or held[1] != _version(grad)
            if changed and torch_private.is_gradient(grad):
                yield parameter, grad

    def fsdp_parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of FSDP2, whose gradients do not arrive through autograd."""
        for module in self.modules:
            for part in torch_private.fsdp_parts(module):
                yield from part.parameters()

    def drop_gradients(self, before: Sequence[tuple[torch.Tensor, int] | None]) -> None:
        """After a step that did not end, make each gradient None or zero, depending on whether the step began with one."""
        for parameter, held in zip(self._parameters, before, strict=True):
            parameter.grad = None if held is None else torch.zeros_like(held[0])
        self._reset_scalers()

    def set_gradients(self, present: Sequence[bool]) -> None:
        """Make each gradient zero or None."""
        for parameter, is_there in zip(self._parameters, present, strict=True):
            parameter.grad = torch.zeros_like(parameter) if is_there else None
        self._reset_scalers()

    def _reset_scalers(self) -> None:
        for each in self.others:
            if isinstance(each, torch.amp.GradScaler):
                torch_private.reset_scaler(each)

    # -- rehearsals ---------------------------------------------------------------------------------

    def save(self, into: Saved | None = None) -> Saved:
        """Copies of everything except gradients.

        Args:
            into: earlier copies, which are overwritten.
        """
        held, _, others, _ = into or (None, None, None, None)
        tensors, rest = self.state()
        return copied(tensors, held), self.buffers.copied(), copied(rest, others), self.modes.now()

    def state(self) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """The parameters, and the states of the other objects; not copies."""
        rest = [optimizer_state.part_of(each) for each in self.others]
        return [each.detach() for each in self._parameters], rest

    def put_back(self, saved: Saved) -> None:
        """Put back what :meth:`save` returned. Optimizers then have that copy as their state."""
        tensors, buffers, rest, modes = saved
        with torch.no_grad():
            for each, held in zip(self._parameters, tensors, strict=True):
                each.copy_(held)
        self.buffers.restore(buffers)
        for each, state in zip(self.others, rest, strict=True):
            optimizer_state.load_part(each, state)
        self.modes.restore(modes)

    # -- DDP ------------------------------------------------------------------------------------------

    def layouts(self, *, settle: bool = False) -> tuple[Layout | None, ...]:
        """For each DDP module, which gradients it reduces together.

        Args:
            settle: DDP settles its layout at the beginning of its second pass. Do it now for modules whose first pass was in a
                complete step: without the loss, their next pass would have had this layout, and another layout rounds sums in
                another order. Only after a loss: the reducer cannot be used until :meth:`restore_layouts`.
        """
        found = []
        for net in self.ddp:
            layout = self._layout_of(net)
            if layout is None and settle and self._has_stepped(net):
                with self._answered(net, Unchanged()), contextlib.suppress(RuntimeError):
                    torch_private.rebuild_buckets(net)
                layout = self._layout_of(net)
            found.append(layout)
        return tuple(found)

    def _layout_of(self, net: DistributedDataParallel) -> Layout | None:
        """A module's layout; None also if this rank cannot tell it. If no rank can, all settle it again."""
        for known in (self._settled, self._coming):
            if net in known:
                return known[net]
        with contextlib.suppress(RuntimeError):
            layout = torch_private.layout_of_buckets(net)
            return None if layout is None else tuple(map(tuple, layout))
        return None

    def _has_stepped(self, net: DistributedDataParallel) -> bool:
        """Whether an optimizer has changed the module since its reducer was new."""
        return self._age(net) != self._new_at.get(net)

    def _age(self, net: DistributedDataParallel) -> tuple[int, int]:
        """How often the module's parameters were changed in place, and how often their optimizers have stepped."""
        own = set(net.parameters())
        steps = sum(
            count
            for optimizer, count in self._steps.items()
            if any(each in own for group in optimizer.param_groups for each in group["params"])
        )
        return _versions(net), steps

    def note_applied(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    @contextlib.contextmanager
    def _answered(self, net: DistributedDataParallel, answerer: Any) -> Iterator[None]:
        """The module's collectives are answered locally, without the other members."""
        group = torch_private.group_of_ddp(net)
        inner, group.inner, group.answerer = group.inner, None, answerer
        amend, group.amend = group.amend, None
        try:
            yield
        finally:
            group.inner, group.answerer, group.amend = inner, None, amend

    def note_complete(self) -> None:
        """A step is complete."""
        self.modes.note_complete()
        learned = self.static_graphs.note_complete()
        for net in self.ddp if self.keeps_snapshots else ():
            is_early = self._passes[net] < self._passes_to_layout(net)
            if is_early and (net in learned or self._has_stepped(net)):
                self._passes[net] += 1
        for net in learned:
            # DDP settles its layout after one more pass.
            self._new_at[net] = self._age(net)
            if (layout := self._coming.pop(net, None)) is not None:
                self._settle(net, layout)

    def _passes_to_layout(self, net: DistributedDataParallel) -> int:
        """How many passes a module makes before it settles its layout. With a static graph, the first only counts gradients."""
        return 2 if torch_private.is_static(net) else 1

    def passed(self) -> list[int]:
        """How many passes each DDP module has made before the next step. Passes after its first layout do not count.

        Only counted if there are snapshots.
        """
        return [self._passes[net] for net in self.ddp]

    def go_back_to(self, passed: Sequence[int]) -> None:
        """All ranks go back to a snapshot, and this is what :meth:`passed` returned when it was taken.

        A pass since then may have settled the layout, but the next pass comes before that: see :meth:`restore_layouts`.
        """
        self._passes = dict(zip(self.ddp, passed, strict=True))
        self._goes_back = dict(self._passes)

    def _forget_passes(self, net: DistributedDataParallel) -> None:
        """Let a module start with the layout of a new one, as it does on all other ranks."""
        torch_private.renew_reducer(net, self._made_of[net])
        self.static_graphs.forget(net)

    def restore_layouts(
        self,
        layouts: Sequence[Layout | None],
        known: Sequence[tuple[int, Unused]] | None = None,
    ) -> None:
        """Make each DDP module ready for a first pass, with this layout.

        A module that goes back to a pass before it had a layout (:meth:`go_back_to`) starts as a new one. With a static graph,
        that may have been its second pass: this reduces the same in the same order as a first pass, and the layout follows it.

        DDP has no way to set a layout. But it settles one by asking rank 0 for it, so here the answer is this layout.

        Args:
            layouts: one for each module.
            known: what each rank knows of static graphs (:class:`.StaticGraphs`); None: as before.
        """
        for net, layout in zip(self.ddp, layouts, strict=True):
            self._settled.pop(net, None)
            self._coming.pop(net, None)
            passes = self._goes_back.get(net, self._passes_to_layout(net))
            is_early = passes < self._passes_to_layout(net)
            if passes == 0 or (is_early and layout is not None):
                self._forget_passes(net)
                if passes and layout is not None:
                    self._coming[net] = layout
            else:
                torch_private.reset_reducer(net)
                self.static_graphs.prepare(net, known, has_layout=layout is not None)
                if layout is not None:
                    self._settle(net, layout)
            self._new_at[net] = self._age(net)
        self._goes_back = {}

    def start_with_layouts(self, layouts: Sequence[Layout | None]) -> None:
        """Training continues from a checkpoint, with the layouts that DDP's modules had there.

        DDP's first pass in a process has another layout, which rounds sums in another order.

        Args:
            layouts: from :meth:`layouts`; one that does not fit its module is ignored.
        """
        if len(layouts) != len(self.ddp):
            return
        for net, layout in zip(self.ddp, layouts, strict=True):
            count = len(self._made_of[net][0])
            fits = layout is not None and sorted(itertools.chain(*layout)) == list(range(count))
            # Outside of `rally run`, nobody answers what DDP asks rank 0 for.
            if (
                layout is None
                or not fits
                or not isinstance(torch_private.group_of_ddp(net), KeptGroup)
            ):
                continue
            torch_private.reset_reducer(net)
            self.static_graphs.prepare(net, None, has_layout=True)
            self._settle(net, layout)
            self._new_at[net], self._passes[net] = self._age(net), self._passes_to_layout(net)

    def _settle(self, net: DistributedDataParallel, layout: Layout) -> None:
        self._settled[net] = layout
        indices = [index for bucket in layout for index in bucket]
        script = Scripted([[*indices, len(layout)], [len(bucket) for bucket in layout]])
        with self._answered(net, script):
            torch_private.settle_buckets(net)

    # -- from one rank to another -----------------------------------------------------------------

    def unreadable(self) -> str:
        """What another process could not read of the current state: the object, and the keys. Empty if it can read all."""
        parts = [optimizer_state.part_of(each) for each in self.others]
        states = [each["other"] if "other" in each else each["optimizer"] for each in parts]
        return self._unreadable([_emptied(each, []) for each in states])

    def _unreadable(self, rest: Sequence[Any]) -> str:
        for each, state in zip(self.others, rest, strict=True):
            if found := unreadable(state):
                return f"the state of {_named(each)} holds {found.removeprefix(', ')}"
        return ""

    def check_state(self) -> None:
        """A step begins. At the first two, check for state that another process could not read, and warn of it."""
        if not self._to_check:
            return
        self._to_check -= 1
        if not (found := self.unreadable()):
            return
        self._to_check = 0
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        _log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "elastic.session: %s, which a process that replaces a lost rank cannot read: the job would fail then. Keep only numbers,"
            " strings, tensors, and lists and dicts of these in it, or pass the class to torch.serialization.add_safe_globals",
            found,
        )

    def send(self, group: KeptGroup, to: Sequence[int]) -> int:
        """Send everything to each of these ranks. Returns the number of bytes.

        Raises:
            ElasticError: something could not be read back.
        """
        structure, tensors = self._state()
        if found := self._unreadable(structure["rest"]):
            raise ElasticError(
                f"{found}, which a process that replaces a lost rank cannot read. Keep only numbers, strings, tensors, and lists and"
                " dicts of these in it, or pass the class to torch.serialization.add_safe_globals"
            )
        head = io.BytesIO()
        torch.save(structure, head)
        data = torch.frombuffer(bytearray(head.getbuffer()), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        group.send_now(size, *to)
        group.send_now(data, *to)
        moved = bundles.send(tensors, group, to)
        return len(to) * (moved + data.nbytes + size.nbytes)

    def receive(self, group: KeptGroup, source: int) -> int:
        """Receive everything. Returns the number of bytes.

        Raises:
            RuntimeError: the sender is gone; only a part was received.
            ElasticError: the sender's modules have other shapes.
        """
        size = torch.zeros(1, dtype=torch.int64)
        group.receive_now(size, source)
        data = torch.zeros(int(size.item()), dtype=torch.uint8)
        group.receive_now(data, source)
        structure = torch.load(io.BytesIO(bytes_of(data)), weights_only=True)
        received = data.numel() + 8
        if structure["modules"] != _shapes(self._parameters):
            raise ElasticError(
                "the parameters of this rank differ in shape or type from those of the other ranks"
            )
        self.buffers.take(structure["buffers"])
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in json.loads(structure["tensors"])
        ]
        with torch.no_grad():
            received += bundles.receive([*self._tensors_of_modules(), *tensors], group, source)
        states = [_filled(state, tensors) for state in structure["rest"]]
        self.add_missing_groups(
            structure["groups"], [state.get("param_groups", ()) for state in states]
        )
        for each, state in zip(self.others, states, strict=True):
            optimizer_state.load(each, state)
        self.modes.take(structure["modes"])
        self.set_gradients(structure["gradients"])
        return received

    def groups(self) -> list[Members]:
        """For each of the other objects, which parameters are in which group. Empty for those that are not optimizers."""
        return [
            members(each, self._parameters) if isinstance(each, torch.optim.Optimizer) else []
            for each in self.others
        ]

    def add_missing_groups(
        self, wanted: Sequence[Members], options: Sequence[Sequence[dict[str, Any]]]
    ) -> None:
        """Add the groups that only the other process has.

        Args:
            wanted: the other process's :meth:`groups`.
            options: for each of the other objects, its ``param_groups`` there.
        Raises:
            ElasticError: that cannot be done.
        """
        for each, groups, given in zip(self.others, wanted, options, strict=True):
            if isinstance(each, torch.optim.Optimizer):
                add_missing(each, self._parameters, groups, given)

    def _tensors_of_modules(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        # FSDP puts whole parameters in place of the shards during a pass: these are the shards.
        buffers = (buffer for module in self.modules for buffer in module.buffers())
        for each in (*self._parameters, *buffers):
            if id(each) not in seen:
                seen.add(id(each))
                yield each

    def _state(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        rest = [_emptied(each.state_dict(), tensors) for each in self.others]
        structure = {
            "modules": _shapes(self._parameters),
            "buffers": self.buffers.told(),
            "tensors": _shapes(tensors),
            "rest": rest,
            "groups": self.groups(),
            "modes": self.modes.told(),
            # To an optimizer, zeros are a gradient: it decays weights and updates moments. A sparse zero has no elements.
            "gradients": [
                each.grad is not None and each.grad.layout == torch.strided
                for each in self._parameters
            ],
        }
        return structure, [*self._tensors_of_modules(), *tensors]


class ExtraState:
    """What a module keeps besides tensors: ``get_extra_state`` and ``set_extra_state``.

    Args:
        module: the one that defines them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @staticmethod
    def is_in(module: nn.Module) -> bool:
        kind, base = type(module), nn.Module
        return (
            kind.get_extra_state is not base.get_extra_state
            and kind.set_extra_state is not base.set_extra_state
        )

    def state_dict(self) -> dict[str, Any]:
        return {"extra": self.module.get_extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.set_extra_state(state["extra"])


def _named(given: Any) -> str:
    if isinstance(given, ExtraState):
        return f"a {type(given.module).__name__} (get_extra_state)"
    return f"a {type(given).__name__}"


def _check_layouts(module: nn.Module) -> None:
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if each.layout is not torch.strided:
            kind = str(each.layout).removeprefix("torch.")
            raise ElasticError(
                f"elastic.session: {name!r} of a {type(module).__name__} has the layout {kind}, and only dense tensors can be kept."
                " If it does not change in training, assign it as a plain attribute instead of registering it as a buffer"
            )


def _is_over_replicas(group: Any) -> bool:
    return isinstance(group, KeptGroup) and group.span is not None and group.span.is_over_all


def _check_wrappers(given: Any) -> None:
    for part in given.modules() if isinstance(given, nn.Module) else ():
        if torch_private.is_fsdp1(part):
            raise ElasticError(
                "elastic.session: FullyShardedDataParallel cannot be kept: its parameters are parts of flat tensors that only it can read."
                " Use torch.distributed.fsdp.fully_shard"
            )
        if isinstance(part, DistributedDataParallel) and any(
            map(torch_private.is_localized, part.parameters())
        ):
            raise ElasticError(
                "elastic.session: DistributedDataParallel around a tensor-parallel model cannot be kept: torch takes the parameters"
                " out of the model in its first forward pass. Give the model to fully_shard, or to"
                " torch.distributed._composable.replicate_with_fsdp.replicate, with the mesh of the replicas"
            )


def _has_gradients(net: nn.Module) -> bool:
    return any(each.grad is not None for each in net.parameters())


def _versions(net: nn.Module) -> int:
    """How often the module's parameters were changed in place."""
    return sum(_version(each) for each in net.parameters())


def _version(tensor: torch.Tensor) -> int:
    return torch_private.version(torch_private.local_part(tensor))


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    """Shapes and types, as JSON: torch's restricted unpickler would take far longer to read that many lists."""
    return json.dumps(
        [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in tensors]
    )


def _emptied(state: Any, tensors: list[torch.Tensor]) -> Any:
    """``state``, with each tensor replaced by its place in ``tensors``."""
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return [_TENSOR, len(tensors) - 1]
    if isinstance(state, dict):
        items = {plain(key): _emptied(value, tensors) for key, value in state.items()}
        return of_kind(state, items)
    if type(state) in (list, tuple):
        return type(state)(_emptied(each, tensors) for each in state)
    return plain(state)


def _filled(state: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(state, list) and len(state) == 2 and state[0] == _TENSOR:
        return tensors[state[1]]
    if isinstance(state, dict):
        return of_kind(state, {key: _filled(value, tensors) for key, value in state.items()})
    if type(state) in (list, tuple):
        return type(state)(_filled(each, tensors) for each in state)
    return state

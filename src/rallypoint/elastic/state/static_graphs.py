"""DDP modules with a static graph: what each learns in its first pass, and how a process that starts later learns it.

In its first backward pass, such a module counts how many gradients each parameter gets. It reduces all of them at the end, along
with a map of the parameters that any rank uses. From the second pass on it expects the same, and has no map to reduce.

A process that takes over a lost rank makes its first pass while the others make a later one. The buckets are the same and in the
same order, but nobody else reduces a map, so the process gets the others' map. Nor does it see the order in which gradients
arrive, from which DDP settles the layout of its buckets: if that is still to come, the layout is that of a rank that has seen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rallypoint.elastic import torch_private
from rallypoint.elastic.communication.kept_group import KeptGroup
from rallypoint.elastic.communication.works import done


# For each DDP module, the parameters that no rank uses, by number. None: this rank does not know, or the graph is not static.
Unused = tuple[tuple[int, ...] | None, ...]
# DDP settles a layout with two broadcasts: the indices and the number of buckets, then the buckets' sizes.
BROADCASTS = 2


class StaticGraphs:
    """The static graphs of a session.

    Args:
        nets: all DDP modules of the session.
    """

    def __init__(self, nets: Sequence[DistributedDataParallel]) -> None:
        self._nets = list(nets)
        self._graphs = {net: StaticGraph(net) for net in nets if torch_private.is_static(net)}
        for group in {each.group for each in self._graphs.values()}:
            if isinstance(group, KeptGroup):
                group.amend = self._amend

    def unused(self) -> Unused:
        """What this rank knows, to tell the others."""
        graphs = map(self._graphs.get, self._nets)
        return tuple(None if each is None else each.unused for each in graphs)

    def note_complete(self) -> list[DistributedDataParallel]:
        """A step is complete: what was learned in it is kept. Returns the modules whose first pass was in it."""
        return [net for net, each in self._graphs.items() if each.note_complete()]

    def note_rehearsed(self) -> None:
        """Steps were rehearsed. A first pass among them counts only if other ranks have made theirs."""
        for each in self._graphs.values():
            each.note_rehearsed()

    def forget(self, net: DistributedDataParallel) -> None:
        """All ranks have gone back to before the first pass of a module."""
        if net in self._graphs:
            self._graphs[net].forget()

    def prepare(
        self,
        net: DistributedDataParallel,
        known: Iterable[tuple[int, Unused]] | None,
        *,
        has_layout: bool,
    ) -> None:
        """The next pass of a module follows one that did not count.

        Args:
            net: the module.
            known: what each rank knows of all modules; None: as before.
            has_layout: the layout of its buckets is settled.
        """
        graph = self._graphs.get(net)
        if graph is None:
            return
        if known is not None:
            at = self._nets.index(net)
            graph.compare({rank: unused[at] for rank, unused in known})
        graph.prepare(has_layout=has_layout)

    def _amend(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> Any:
        for each in self._graphs.values():
            if each.group is group:
                args = each.amend(operation, args)
                if isinstance(args, dist.Work):
                    return args
        return args


class StaticGraph:
    """The static graph of one module.

    Args:
        net: the module.
    """

    def __init__(self, net: DistributedDataParallel) -> None:
        self.group = torch_private.group_of_ddp(net)
        self._net = net
        self._made_of = torch_private.parts_of_reducer(net)
        # A process that starts later makes a pass in the set-up, too, and has it answered from the record.
        self._is_known = torch_private.has_met_static_graph(net)
        self._has_run = False  # the first pass, in the step under way
        self._map: torch.Tensor | None = (
            None  # of the parameters that any rank uses, once it is reduced
        )
        self._given: tuple[int, ...] | None = None  # what others know
        self._learns = False  # some rank has yet to learn the graph, while others know it
        self._root = 0  # the rank whose order of gradients then determines the layout
        self._broadcasts = 0  # how many broadcasts are still to come from that rank

    @property
    def unused(self) -> tuple[int, ...] | None:
        if not self._is_known:
            return None
        return () if self._map is None else tuple((self._map == 0).nonzero().flatten().tolist())

    def note_complete(self) -> bool:
        is_new = self._has_run and not self._is_known
        self._is_known = self._is_known or self._has_run
        return is_new

    def note_rehearsed(self) -> None:
        # In the rest of a void body, nobody has made it, and the map is this rank's alone: prepare() then renews the reducer.
        if self._given is not None:
            self.note_complete()

    def compare(self, known: dict[int, tuple[int, ...] | None]) -> None:
        """All ranks have met. ``known``: for each rank, the parameters that are not used, if it knows them."""
        members = [known[rank] for rank in self.group.members]
        knows = next((at for at, unused in enumerate(members) if unused is not None), None)
        self._learns = knows is not None and None in members
        self._root = knows or 0
        self._given = members[self._root]

    def forget(self) -> None:
        """No rank knows anything about the graph. The reducer is new."""
        self._is_known = self._has_run = self._learns = False
        self._map = self._given = None
        self._root = self._broadcasts = 0

    def prepare(self, *, has_layout: bool) -> None:
        """A pass did not count. If it was the first one, the next one is the first again."""
        if not self._is_known:
            torch_private.renew_reducer(self._net, self._made_of)
            self._map, self._has_run = None, False
        self._broadcasts = BROADCASTS if self._learns and not has_layout else 0

    def amend(self, operation: str, args: tuple[Any, ...]) -> Any:
        """A collective of the module's group: returns its arguments, or its work if nobody else takes part in it."""
        if operation == "allreduce":
            return self._reduce_map(args) if self._is_map(args[0][0]) else args
        if operation == "broadcast" and self._broadcasts and self._is_layout(args[0][0]):
            self._broadcasts -= 1
            return args[0], torch_private.broadcast_from(self._root)
        return args

    def _reduce_map(self, args: tuple[Any, ...]) -> Any:
        self._map = args[0][0]
        torch_private.call_behind_backward(self._end_pass)
        if self._given is None:
            return args
        unused = torch.tensor(self._given, dtype=torch.int64, device=self._map.device)
        self._map.fill_(1).index_fill_(0, unused, 0)
        return done(args[0])

    def _end_pass(self) -> None:
        self._has_run = True
        if self._broadcasts:
            # Like the others, which have seen the order and settle the layout at the beginning of their next pass.
            torch_private.push_parameters(self._net)

    def _is_map(self, tensor: torch.Tensor) -> bool:
        # In the first backward pass, nothing else passes such a tensor to the group.
        return (
            not self._is_known
            and self._map is None
            and tensor.dtype == torch.int32
            and tensor.numel() == len(self._made_of[0])
            and torch_private.has_met_static_graph(self._net)
        )

    def _is_layout(self, tensor: torch.Tensor) -> bool:
        is_second = self._broadcasts < BROADCASTS
        return tensor.dtype == torch.int32 and (
            is_second or tensor.numel() == len(self._made_of[0]) + 1
        )

"""The groups of this process that outlive their members, in the order in which the script made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rallypoint._core import rank_watch
from rallypoint.elastic import torch_private
from rallypoint.errors import ElasticError

from .connections import Wiring
from .kept_group import Answerer, KeptGroup, Observer
from .replicas import Span, replica_size, span_of
from .works import GIVEN_UP


class Groups:
    """The groups of this process, in the order in which they were made; the first one is the default group.

    Args:
        wiring: the connections of the first generation; None in a newcomer, whose groups answer from a record.
        answerer: what a newcomer has in place of connections.
    """

    def __init__(self, wiring: Wiring | None, answerer: Answerer | None) -> None:
        self._wiring, self._answerer = wiring, answerer
        self._groups: list[KeptGroup] = []
        self._in_session = False
        self._replica: int | None = (
            None  # how many ranks a replica has, if the number of replicas may change
        )
        self._on_misfit: Callable[[], None] | None = None
        self.observer: Observer | None = None

    @property
    def default(self) -> KeptGroup | None:
        return self._groups[0] if self._groups else None

    def __iter__(self) -> Iterator[KeptGroup]:
        return iter(list(self._groups))

    @property
    def wiring(self) -> Wiring | None:
        return self._wiring

    def begin_session(self) -> None:
        """From now on, groups are formed again after a loss. The script is at the same place in all members."""
        self._forget_destroyed()
        self._in_session = True

    def _forget_destroyed(self) -> None:
        """Keep only the groups that torch still knows."""
        self._groups = [each for each in self._groups if torch_private.is_known(each)]

    def install(self) -> None:
        """From now on, the groups that this process makes over Gloo and NCCL are :class:`.KeptGroup` objects."""
        torch_private.replace_group_factory(self._make)

    def connect(self, wiring: Wiring) -> None:
        """Form all groups again.

        Collective: all members of the default group, which have just met.   Blocks: until all are connected.
        """
        self._wiring, self._answerer = wiring, None
        for number, group in enumerate(self._groups):
            group.connect(wiring, have_met=number == 0)
        self.connect_gpus()

    def take_timeouts(self, timeouts: Mapping[tuple[str, tuple[int, ...]], float]) -> None:
        """Set these time-outs, in seconds, given by name and members."""
        for group in self._groups:
            group.set_timeout(timedelta(seconds=timeouts[group.kept_name, group.members]))

    def connect_gpus(self) -> None:
        """Connect the groups over NCCL. Otherwise NCCL connects in the first collective.

        Collective: all members of the default group.   Blocks: until all are connected.
        """
        for group in self._groups:
            group.connect_gpus()

    def check(self) -> None:
        """Check that what the GPU holds is right: nothing in it has arrived over a group that was aborted.

        Raises:
            RuntimeError: a member is lost.
        """
        wiring = self._wiring
        if wiring is not None and wiring.is_cut and any(each.has_nccl for each in self._groups):
            raise RuntimeError(GIVEN_UP)

    def become(self, rank: int) -> None:
        """Become another global rank. For a spare, which has made only groups of all ranks or else keeps its rank."""
        for group in self._groups:
            group.become(group.members.index(rank))

    def find_replicas(
        self,
        split: Sequence[KeptGroup],
        ranks_of_node: int,
        on_misfit: Callable[[], None],
    ) -> int | None:
        """How many ranks a replica has, if the number of replicas may change from now on; None if the groups rule that out.

        Args:
            split: the groups among whose members tensors are sharded.
            ranks_of_node: how many ranks are on this node.
            on_misfit: called when a group is made later that rules it out.
        """
        ranks = len(self._groups[0].members)
        members, parts = ([each.members for each in some] for some in (self._groups, split))
        size = self._replica = replica_size(members, parts, ranks, ranks_of_node)
        if size is not None:
            self._on_misfit = on_misfit
            for group in self._groups:
                self._note_span(group, size, ranks)
        return size

    def _note_span(self, group: KeptGroup, size: int, ranks: int) -> None:
        if len(group.members) == ranks:
            group.span = Span(tuple(range(size)), is_over_all=True)
        else:
            group.span = span_of(group.members, size, ranks)

    def resize(self, rank: int, ranks: int) -> None:
        """There are this many ranks from now on, and this process is one of them. No group has connections."""
        assert self._replica is not None
        for group in self._groups:
            if group.span is None:
                raise ElasticError(
                    f"the group of ranks {list(group.members)}, made in the session, cannot be adapted to a different number of ranks"
                )
            members = group.span.members(self._replica, rank, ranks)
            group.resize(members.index(rank), members)

    def _make(
        self,
        original: Callable[..., Any],
        size: int,
        rank: int,
        ranks: Sequence[int],
        backend: Any,
        store: Any,
        group_name: Any,
        **options: Any,
    ) -> Any:
        backends = torch_private.backends_of(backend)
        if not set(backends.values()) <= {"gloo", "nccl"} or str(group_name) in (
            torch_private.names_of_groups()
        ):
            return original(size, rank, ranks, backend, store, group_name, **options)
        # In a session, a member may not have destroyed a group yet that others form again.
        if not self._in_session or torch_private.is_first_group():
            self._forget_destroyed()
        if ranks and self._groups and len(ranks) < len(self._groups[0].members):
            rank_watch.bind("a group of some ranks is made")
        tag = options.get("pg_tag")
        if (existing := torch_private.group_by_tag(tag, ranks)) is not None:
            return existing
        if ranks and torch_private.global_rank() not in ranks:
            return torch_private.NOT_A_MEMBER, None
        timeout = options.get("timeout") or timedelta(minutes=30)
        members = list(ranks) or list(range(size))
        given = options.get("backend_options") or options.get("pg_options")
        group = KeptGroup(
            str(group_name),
            rank,
            members,
            timeout,
            backends,
            is_for_session=not self._groups,
            options=given,
            device=options.get("device_id"),
        )
        group.observer = self.observer
        if self._answerer is not None:
            group.disconnect(self._answerer)
        else:
            assert self._wiring is not None
            group.connect(self._wiring)
        prefixed = torch_private.prefixed(store, f"{group_name}/")
        description = options.get("group_desc") or "undefined"
        torch_private.register(group, str(backend), prefixed, str(group_name), description, tag)
        self._groups.append(group)
        if self._replica is not None and self._on_misfit is not None:
            self._note_span(group, self._replica, len(self._groups[0].members))
            if group.span is None:
                self._on_misfit()
        return group, prefixed

"""The process groups of a layout: made, kept, destroyed.

[Note: Names] torch numbers its groups, and the number is the group's prefix in the store. Ranks find each other only if
all have counted alike, and a number that is used twice reads what is left of its first use. So every rank makes every
group of an axis, in one order, also those it is not in (where ``new_group`` only counts on). The generation is in each
group's description, which logs and flight recorders show; the store of a generation is the launcher's to keep apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rallypoint._core import env as environment
from rallypoint.errors import ConfigError

from . import members, torch_private
from .layout import AXES, GRID, ParallelLayout


# What `build` makes unless told otherwise: each axis, and the ranks over which gradients are averaged.
STANDARD: tuple[tuple[str, ...], ...] = (*((axis,) for axis in AXES), ("dp", "cp"))


class ParallelMesh:
    """A layout's process groups, as this rank sees them.

        mesh = ParallelMesh(ParallelLayout(tp=2))
        mesh.build()
        y = all_reduce(x, mesh.group("tp"))
        model = fully_shard(model, mesh=mesh.device_mesh("dp"))

    Making one does not communicate; groups are made by :meth:`build`, all at once, or by the first :meth:`group` that asks
    for them. Both are collective over *all ranks of the job*, not only over those of the group: each rank asks for the
    same axes in the same order. A group that is there already costs nothing to ask for.

    Several axes share what they can: where all other degrees are 1 an axis without a backend of its own is the
    default group, and all axes of degree 1 are one group of this rank alone.

    Without a default group it is the mesh of one process: all groups are None, which the collectives of
    this package take for "nobody else".

    Args:
        layout: degrees that make up the job; -1 is resolved.
        backends: of an axis, where it is not the default group's: ``{"dp": "gloo"}``. Joined axes have that of the
            first axis named that has one; ``ep`` and ``edp`` have that of ``dp`` unless they have their own.
        device_type: for :meth:`device_mesh`. Default: what the default group's backend works on.
        generation: shown in the groups' descriptions. Default: ``RALLY_GENERATION``, else 0.
        timeout: in seconds, of the collectives of these groups. Default: as the default group's.

    Raises:
        ConfigError: the layout does not fit the number of ranks; an axis that is none; a backend without a name.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        backends: Mapping[str, str] | None = None,
        device_type: str | None = None,
        generation: int | None = None,
        timeout: float | None = None,
    ) -> None:
        given: object = layout
        if not isinstance(given, ParallelLayout):
            raise ConfigError(
                "layout",
                type(given).__name__,
                "expected a ParallelLayout",
                "as in ParallelMesh(ParallelLayout(tp=2))",
            )
        by_axis: object = backends
        if by_axis is not None and not isinstance(by_axis, Mapping):
            raise ConfigError(
                "backends", by_axis, "expected a backend for each axis", "as in {'tp': 'nccl'}"
            )
        self.layout = layout.resolve(members.size_of(None))
        self.rank = members.rank_in(None)
        self.generation = _generation() if generation is None else generation
        self._world = dist.group.WORLD if dist.is_initialized() else None
        self._backends = dict(backends or {})
        for axis, name in self._backends.items():
            if axis not in AXES:
                raise ConfigError("backends", axis, f"expected one of {', '.join(AXES)}")
            named: object = name
            if not isinstance(named, str) or not named.strip():
                raise ConfigError(f"backends[{axis!r}]", name, "expected the name of a backend")
            # As torch names it: "gloo", or one per device, "cpu:gloo,cuda:nccl".
            parts = [part.rpartition(":")[2] for part in name.split(",")]
            if self._world is not None and not all(map(dist.is_backend_available, parts)):
                known = ", ".join(filter(dist.is_backend_available, dist.Backend.backend_list))
                raise ConfigError(f"backends[{axis!r}]", name, f"expected one of {known}")
        self._device_type = device_type
        self._timeout = timeout
        self._groups: dict[tuple[tuple[str, ...], str | None], dist.ProcessGroup] = {}
        self._device_meshes: dict[tuple[tuple[str, ...], tuple[str, ...]], DeviceMesh] = {}
        self._destroyed = False

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Where this rank stands, along each axis; also its rank in the group of that axis."""
        return MappingProxyType(dict(self.layout.coordinates(self.rank)))

    def degree(self, *axes: str) -> int:
        """Number of ranks along ``axes``: one, or several joined."""
        return self.layout.degree(*axes)

    def peers(self, *axes: str) -> tuple[int, ...]:
        """The ranks of ``group(*axes)``, this one included, in its order: no communication."""
        return self.layout.peers(self.rank, *axes)

    def backend_of(self, *axes: str) -> str | None:
        """What was chosen for these axes; None: the default group's backend."""
        self.layout.degree(*axes)  # are there such axes
        for axis in axes:
            for name in (axis, "dp") if axis in {"ep", "edp"} else (axis,):
                if name in self._backends:
                    return self._backends[name]
        return None

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The group of this rank and those that differ from it along these axes only.

        Collective: over all ranks of the job, if these axes have no group yet (the class says more). Else none.
        Args:
            axes: one, or several to be joined: ``group("dp", "cp")`` is what gradients are averaged over.
        Returns:
            The group, whose ranks are in the order of :meth:`peers`; None where there is no default group.
        Raises:
            ConfigError: no such axes, or one twice; the mesh or its default group has been destroyed.
        """
        along = self._moving(axes)
        self._check_alive()
        if self._world is None:
            return None
        backend = self.backend_of(*axes)
        if backend is None and along == self._moving(GRID):
            return self._world
        found = self._groups.get((along, backend))
        if found is None:
            found = self._groups[along, backend] = self._make(axes, backend)
        return found

    def build(self, *joined: tuple[str, ...] | str) -> Self:
        """Make the groups of every axis and of ``("dp", "cp")``, or only of these.

        Collective: every rank of the job calls it, with the same arguments.   Blocks: until members have found each other.
        Args:
            joined: axes (``"tp"``), and axes to be joined (``("cp", "tp")``). Default: :data:`STANDARD`.
        Returns:
            This mesh.
        Raises:
            ConfigError: an axis is none.
        """
        for axes in joined or STANDARD:
            given: object = axes
            if not isinstance(given, str | Sequence):
                raise ConfigError(
                    "axes", given, "expected an axis or a tuple of them", "as in 'tp', ('dp', 'cp')"
                )
            self.group(*((axes,) if isinstance(axes, str) else axes))
        return self

    def device_mesh(self, *axes: str, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """These axes as torch's ``DeviceMesh``, for FSDP2, DTensor and DDP; over the same groups.

        Collective: as :meth:`group`, for each of the axes.
        Args:
            axes: in the order of the mesh's dimensions. ``("edp", "ep")`` are the two halves of ``dp``.
            names: what the dimensions are called there. Default: as the axes.
        Raises:
            ConfigError: as :meth:`group`; there is no default group; as many names as axes were expected.
        """
        names = axes if names is None else names
        given: object = names
        if not isinstance(given, tuple | list):
            raise ConfigError("names", given, "expected a tuple of names, one for each axis")
        names = tuple(names)
        self._check_alive()
        if (axes, names) in self._device_meshes:
            return self._device_meshes[axes, names]
        if len(names) != len(axes):
            raise ConfigError("names", names, f"expected {len(axes)}, one for each of {axes}")
        ranks = torch.tensor(self.peers(*axes), dtype=torch.int)
        groups = []
        for axis in axes:
            group = self.group(axis)
            if group is None:
                raise ConfigError(
                    "device_mesh",
                    axes,
                    "there is no default group",
                    "call torch.distributed.init_process_group() before the mesh is made",
                )
            groups.append(group)
        # Peers come in the order of the grid, whatever the order of the axes here.
        order = sorted(range(len(axes)), key=lambda i: _place(axes[i]))
        grid = ranks.view([self.degree(axes[i]) for i in order])
        grid = grid.permute([order.index(i) for i in range(len(axes))]).contiguous()
        device = self._device_type or members.device_of(None).type
        if len(axes) == 1:
            found = DeviceMesh.from_group(groups[0], device, mesh_dim_names=names)
        else:
            found = DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=names)
        self._device_meshes[axes, names] = found
        return found

    def destroy(self) -> None:
        """Destroy the groups that were made; the default group stays. Once is enough, twice does no harm.

        To build anew, make another mesh: of the next generation, over the same default group or another.

        Collective: every rank of the job calls it, with no collective of these groups under way.
        """
        groups, self._groups = list(self._groups.values()), {}
        self._device_meshes.clear()
        self._destroyed = True
        if self._world is not None and self._is_current():
            for group in groups:
                dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        degrees = ", ".join(f"{axis}={self.degree(axis)}" for axis in AXES)
        return f"ParallelMesh({degrees}, rank={self.rank}, generation={self.generation})"

    @property
    def stands(self) -> bool:
        """Whether it can be used: neither it nor the default group under it has been destroyed."""
        return not self._destroyed and self._is_current()

    def _is_current(self) -> bool:
        return self._world is (dist.group.WORLD if dist.is_initialized() else None)

    def _check_alive(self) -> None:
        if self._destroyed:
            raise ConfigError("mesh", self, "it has been destroyed", "make another one")
        if not self._is_current():
            raise ConfigError(
                "mesh", self, "the default group is not the one it was made over", "make another"
            )

    def _moving(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of the grid among these along which there is more than one rank."""
        self.layout.degree(*axes)  # are there such axes
        parts = {part for axis in axes for part in (("edp", "ep") if axis == "dp" else (axis,))}
        return tuple(axis for axis in GRID if axis in parts and self.degree(axis) > 1)

    def _make(self, axes: tuple[str, ...], backend: str | None) -> dist.ProcessGroup:
        own: dist.ProcessGroup | None = None
        name = f"rallypoint {'x'.join(axes)} generation {self.generation}"
        timeout = _timeout_of_default() if self._timeout is None else self._timeout
        for ranks in self.layout.groups(*axes):
            made = dist.new_group(
                list(ranks),
                backend=backend,
                timeout=None if timeout is None else timedelta(seconds=timeout),
                group_desc=name,
            )
            if self.rank in ranks:
                own = made
        assert own is not None, "every rank is in exactly one group"
        # A rank that is connected could go on and destroy the group while another one still connects to it,
        # which then fails. (NCCL connects when a group is first used.)
        if own.size() > 1 and members.device_of(own).type == "cpu":
            dist.barrier(own)
        return own


def _place(axis: str) -> int:
    return GRID.index("edp" if axis == "dp" else axis)


def _generation() -> int:
    return int(environment.get("RALLY_GENERATION") or 0)


def _timeout_of_default() -> float | None:
    """torch gives new groups its own default, half an hour, whatever the default group was given."""
    world = dist.group.WORLD
    return None if world is None else torch_private.timeout_of(world, members.device_of(None))

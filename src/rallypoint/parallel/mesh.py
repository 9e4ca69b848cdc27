"""The process groups of a layout: created, kept, destroyed.

[Note: Names] torch numbers its groups, and the number is the group's prefix in the store. Ranks find each other only if
all of them have counted alike, and a number used twice reads leftovers of its first use. So every rank creates every
group of an axis, in the same order, including groups it is not in (for those, ``new_group`` only counts). The generation is
part of each group's description, which logs and flight recorders show; the launcher keeps generations' stores apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rallypoint._core import env as environment, resizable
from rallypoint.errors import ConfigError

from . import members, torch_private
from .layout import AXES, GRID, ParallelLayout


# The groups `build` creates by default: each axis, and the ranks that average gradients.
STANDARD: tuple[tuple[str, ...], ...] = (*((axis,) for axis in AXES), ("dp", "cp"))
# Seconds (31 years): torch cannot count many more.
_FOREVER = 1e9


class ParallelMesh:
    """A layout's process groups, as this rank sees them::

        mesh = ParallelMesh(ParallelLayout(tp=2))
        mesh.build()
        y = all_reduce(x, mesh.group("tp"))
        model = fully_shard(model, mesh=mesh.device_mesh("dp"))

    Creating a mesh does not communicate. Groups are created by :meth:`build`, all at once, or by the first :meth:`group`
    call that needs them. Both are collective over *all ranks of the job*, not only over the group's members: every rank
    must ask for the same axes in the same order. Asking again for an existing group costs nothing.

    Axes share groups where they can: an axis without a backend of its own is the default group if all other
    degrees are 1, and all axes of degree 1 share one group that holds only this rank.

    Without a default group, this is the mesh of one process: all groups are None, and the collectives of this package
    return their argument.

    Args:
        layout: the degrees of parallelism. Any -1 is resolved.
        backends: backends by axis, if they differ from the default group's: ``{"dp": "gloo"}``. Joined axes use the
            backend of the first named axis that has one. ``ep`` and ``edp`` use that of ``dp`` unless they have their own.
        device_type: the device type for :meth:`device_mesh`. Default: that of the default group's backend.
        generation: a number to show in the groups' descriptions. Default: ``RALLY_GENERATION``, or 0 if that is not set.
        timeout: time limit of the groups' collectives, in seconds. Default: the default group's.

    Raises:
        ConfigError: the layout does not fit the number of ranks; an axis or backend is unknown; or an argument has a wrong type.
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
            # "gloo", or one backend per device: "cpu:gloo,cuda:nccl".
            parts = [part.rpartition(":")[2] for part in name.split(",")]
            if self._world is not None and not all(map(dist.is_backend_available, parts)):
                known = ", ".join(filter(dist.is_backend_available, dist.Backend.backend_list))
                raise ConfigError(f"backends[{axis!r}]", name, f"expected one of {known}")
        self._device_type = device_type
        self._timeout = None if timeout is None else _seconds(timeout)
        self._groups: dict[tuple[tuple[str, ...], str | None], dist.ProcessGroup] = {}
        self._device_meshes: dict[tuple[tuple[str, ...], tuple[str, ...]], DeviceMesh] = {}
        self._destroyed = False
        self._first = self.layout  # the layout that the groups were made for
        are_gloo = set(self._backends.values()) <= {"gloo"}
        self._resizing = _Resizing(weakref.ref(self), are_gloo=are_gloo)
        resizable.register(self._resizing)

    @property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's index along each axis, which is also its rank in that axis's group."""
        return MappingProxyType(dict(self.layout.coordinates(self.rank)))

    def degree(self, *axes: str) -> int:
        """Number of ranks along one axis, or along several joined. No communication.

        Args:
            axes: names such as ``"tp"``.
        Returns:
            The product of the axes' degrees.
        Raises:
            ConfigError: an unknown axis, or one named twice.
        """
        return self.layout.degree(*axes)

    def peers(self, *axes: str) -> tuple[int, ...]:
        """The members of ``group(*axes)``. No communication.

        Args:
            axes: names such as ``"tp"``.
        Returns:
            Global ranks in group-rank order, this one included.
        Raises:
            ConfigError: an unknown axis, or one named twice.
        """
        return self.layout.peers(self.rank, *axes)

    def backend_of(self, *axes: str) -> str | None:
        """The backend chosen for these axes. No communication.

        Args:
            axes: names such as ``"tp"``.
        Returns:
            The backend's name. None: the default group's backend.
        Raises:
            ConfigError: an unknown axis, or one named twice.
        """
        self.layout.degree(*axes)  # raises for unknown axes
        for axis in axes:
            for name in (axis, "dp") if axis in {"ep", "edp"} else (axis,):
                if name in self._backends:
                    return self._backends[name]
        return None

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of this rank and the ranks that differ from it only along these axes.

        Collective: over all ranks of the job if these axes have no group yet (see the class); otherwise no communication.
        Blocks: if it creates the group, until its members have connected.
        Args:
            axes: one axis, or several to join: gradients are averaged over ``group("dp", "cp")``.
        Returns:
            The group, with ranks in the order of :meth:`peers`. None without a default group.
        Raises:
            ConfigError: an unknown axis, or one named twice; or the mesh or its default group was destroyed.
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
        """Create the groups of every axis and of ``("dp", "cp")``, or only the given ones.

        Collective: every rank of the job calls it, with the same arguments.   Blocks: until members have connected.
        Args:
            joined: axes (``"tp"``), or tuples of axes to join (``("cp", "tp")``). Default: :data:`STANDARD`.
        Returns:
            This mesh.
        Raises:
            ConfigError: an unknown axis, or the mesh or its default group was destroyed.
        """
        for axes in joined or STANDARD:
            given: object = axes
            if not isinstance(given, str | Sequence):
                raise ConfigError(
                    "axes", given, "expected an axis or a tuple of axes", "as in 'tp', ('dp', 'cp')"
                )
            self.group(*((axes,) if isinstance(axes, str) else axes))
        return self

    def device_mesh(self, *axes: str, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A torch ``DeviceMesh`` over the groups of these axes, for FSDP2, DTensor and DDP.

        Collective: as :meth:`group`, for each axis.
        Args:
            axes: one axis per mesh dimension, in order. ``("edp", "ep")`` splits ``dp`` in two.
            names: names of the dimensions. Default: the axes' names.
        Returns:
            The mesh. Equal arguments return the same object.
        Raises:
            ConfigError: as :meth:`group`; or there is no default group; or ``names`` and ``axes`` differ in length.
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
                    "call torch.distributed.init_process_group() before creating the mesh",
                )
            groups.append(group)
        # peers() uses the grid's order, whatever the order of the axes here.
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
        """Destroy the mesh's groups. The default group stays. A second call does nothing.

        To continue, create a new mesh, over the same default group or another.

        Collective: every rank of the job calls it, with no collective of these groups in progress.
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
        """Whether the mesh is usable: neither it nor its default group has been destroyed."""
        return not self._destroyed and self._is_current()

    def _is_current(self) -> bool:
        return self._world is (dist.group.WORLD if dist.is_initialized() else None)

    def _check_alive(self) -> None:
        if self._destroyed:
            raise ConfigError("mesh", self, "it has been destroyed", "create a new one")
        if not self._is_current():
            raise ConfigError(
                "mesh",
                self,
                "its default group was replaced or destroyed",
                "create a new mesh over the current one",
            )

    def _moving(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the axes, as grid axes, that have more than one rank."""
        self.layout.degree(*axes)  # raises for unknown axes
        parts = {part for axis in axes for part in (("edp", "ep") if axis == "dp" else (axis,))}
        return tuple(axis for axis in GRID if axis in parts and self._first.degree(axis) > 1)

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
        # Without this barrier, a connected rank could destroy the group while another is still connecting, whose attempt
        # would then fail. (NCCL connects when a group is first used.)
        if own.size() > 1 and members.device_of(own).type == "cpu":
            dist.barrier(own)
        return own


class _Resizing:
    """Adapts a mesh when an elastic session goes on with another number of ranks."""

    def __init__(self, mesh: weakref.ref[ParallelMesh], *, are_gloo: bool) -> None:
        self._mesh = mesh
        self._are_gloo = are_gloo

    def can_resize(self, replica: int) -> bool:
        mesh = self._mesh()
        if mesh is None:
            return True
        inner = mesh.layout.degree("ep", "cp", "tp")
        # Replicas of the model are along the outermost axis.
        return mesh.layout.pp == 1 and replica % inner == 0 and self._are_gloo

    def resize(self, rank: int, ranks: int) -> None:
        mesh = self._mesh()
        if mesh is not None:
            mesh.rank = rank
            mesh.layout = replace(mesh.layout, dp=ranks // mesh.layout.degree("cp", "tp"))


def _place(axis: str) -> int:
    return GRID.index("edp" if axis == "dp" else axis)


def _generation() -> int:
    return int(environment.get("RALLY_GENERATION") or 0)


def _seconds(timeout: float) -> float:
    try:
        if 0 < timeout < _FOREVER:
            return float(timeout)
    except TypeError:
        pass
    raise ConfigError("timeout", timeout, "expected seconds: a number above 0, such as 30 or 0.5")


def _timeout_of_default() -> float | None:
    """The default group's time limit, in seconds; torch would give new groups its own default of half an hour."""
    world = dist.group.WORLD
    return None if world is None else torch_private.timeout_of(world, members.device_of(None))

"""This process's mesh: created once, available everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.errors import ConfigError

from .layout import ParallelLayout
from .mesh import ParallelMesh


@dataclass(slots=True)
class _State:
    mesh: ParallelMesh | None = None


_state = _State()


def init_parallelism(
    model_parallelism: int = 1,
    pipeline_parallelism: int = 1,
    mp_backend: str | None = None,
    pp_backend: str | None = None,
    dp_backend: str | None = None,
) -> ParallelMesh:
    """Create this process's mesh from two degrees; the remaining factor is data parallel.

    :func:`current_mesh` returns the mesh from now on. Its axes are ``tp`` (model), ``pp`` and ``dp``. Their groups are
    created here, unless everything is data parallel. Without a default group, it is the mesh of one process.

    Collective: every rank of the job calls it.   Blocks: until the groups' members have connected.
    Args:
        model_parallelism: number of ranks that share a layer. They are neighbours in the job.
        pipeline_parallelism: number of pipeline stages. Their ranks are furthest apart.
        mp_backend, pp_backend, dp_backend: the backends of the groups along ``tp``, ``pp`` and ``dp``. Default: the
            default group's.
    Returns:
        The mesh.
    Raises:
        ConfigError: a degree is not a whole number of at least 1; the degrees do not divide the number of ranks (the message
            lists some that do); or this process already has a mesh.
    """
    given: dict[str, object] = {
        "model_parallelism": model_parallelism,
        "pipeline_parallelism": pipeline_parallelism,
    }
    for name, degree in given.items():
        # A layout accepts -1 for "the rest"; here, the rest is always data parallel.
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise ConfigError(name, degree, "expected a whole number, 1 or more")
    chosen = {"tp": mp_backend, "pp": pp_backend, "dp": dp_backend}
    mesh = ParallelMesh(
        ParallelLayout(tp=model_parallelism, pp=pipeline_parallelism),
        backends={axis: name for axis, name in chosen.items() if name is not None},
    )
    set_current_mesh(mesh)
    # With both degrees 1, dp is the default group, and along the other axes each rank is alone.
    if model_parallelism * pipeline_parallelism > 1:
        try:
            mesh.build("pp", "dp", "tp")
        except BaseException:
            _state.mesh = None
            raise
    return mesh


def set_current_mesh(mesh: ParallelMesh) -> ParallelMesh:
    """Make :func:`current_mesh` return ``mesh``, for layouts with more axes than :func:`init_parallelism` has.

    No communication.
    Args:
        mesh: this process's mesh from now on.
    Returns:
        ``mesh``.
    Raises:
        ConfigError: ``mesh`` is not a :class:`ParallelMesh`, or this process already has another mesh.
    """
    given: object = mesh
    if not isinstance(given, ParallelMesh):
        raise ConfigError(
            "mesh",
            given,
            "expected a ParallelMesh",
            "destroy_parallelism() removes the current one",
        )
    here = current_mesh()
    if here is not None and here is not mesh:
        raise ConfigError(
            "mesh", here, "this process has a mesh already", "call destroy_parallelism() first"
        )
    _state.mesh = mesh
    return mesh


def current_mesh() -> ParallelMesh | None:
    """This process's mesh.

    Returns:
        The mesh. None before one is created, and after the mesh or its default group has been destroyed.
    """
    if _state.mesh is not None and not _state.mesh.stands:
        _state.mesh = None
    return _state.mesh


def destroy_parallelism() -> None:
    """Destroy this process's mesh, if it has one. The default group stays.

    Collective: every rank of the job calls it, with no collective of the mesh's groups in progress.
    """
    mesh, _state.mesh = current_mesh(), None
    if mesh is not None:
        mesh.destroy()

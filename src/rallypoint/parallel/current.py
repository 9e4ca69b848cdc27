"""The mesh of this process: made once, asked for anywhere."""

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
    """The simple form: this many ranks share a layer, so many stages follow each other, the rest is data parallel.

    The mesh is also what :func:`current_mesh` returns from now on. Its axes are ``tp`` (model), ``pp`` and ``dp``; their
    groups are made here, unless all is data parallel. Without a default group it is the mesh of one process.

    Collective: every rank of the job calls it.   Blocks: until the groups' members have found each other.
    Args:
        model_parallelism: ranks that share one model, neighbours in the job.
        pipeline_parallelism: stages; the ranks furthest apart.
        mp_backend, pp_backend, dp_backend: of the groups along ``tp``, ``pp`` and ``dp``. Default: the default group's.
    Raises:
        ConfigError: the degrees do not go into the number of ranks (it says which would); there is a mesh already.
    """
    given: dict[str, object] = {
        "model_parallelism": model_parallelism,
        "pipeline_parallelism": pipeline_parallelism,
    }
    for name, degree in given.items():
        # -1 would be "the rest" for a layout; here the rest is data parallel.
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise ConfigError(name, degree, "expected a whole number, 1 or more")
    chosen = {"tp": mp_backend, "pp": pp_backend, "dp": dp_backend}
    mesh = ParallelMesh(
        ParallelLayout(tp=model_parallelism, pp=pipeline_parallelism),
        backends={axis: name for axis, name in chosen.items() if name is not None},
    )
    set_current_mesh(mesh)
    # With neither, dp is the default group, and of the others each rank is alone.
    if model_parallelism * pipeline_parallelism > 1:
        try:
            mesh.build("pp", "dp", "tp")
        except BaseException:
            _state.mesh = None
            raise
    return mesh


def set_current_mesh(mesh: ParallelMesh) -> ParallelMesh:
    """Make ``mesh`` what :func:`current_mesh` returns: for layouts with more axes than the simple form has.

    Raises:
        ConfigError: there is another one already.
    """
    given: object = mesh
    if not isinstance(given, ParallelMesh):
        raise ConfigError(
            "mesh", given, "expected a ParallelMesh", "destroy_parallelism() ends the one there is"
        )
    here = current_mesh()
    if here is not None and here is not mesh:
        raise ConfigError("mesh", here, "there is one already", "call destroy_parallelism() first")
    _state.mesh = mesh
    return mesh


def current_mesh() -> ParallelMesh | None:
    """This process's mesh; None before one was made, and after it or its default group was destroyed."""
    if _state.mesh is not None and not _state.mesh.stands:
        _state.mesh = None
    return _state.mesh


def destroy_parallelism() -> None:
    """Destroy this process's mesh, if there is one; the default group stays.

    Collective: as :meth:`ParallelMesh.destroy`.
    """
    mesh, _state.mesh = current_mesh(), None
    if mesh is not None:
        mesh.destroy()

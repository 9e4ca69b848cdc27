"""Parallel training: layouts of ranks, their process groups, and differentiable collectives."""

import torch

from rallypoint._core.tested_torch import warn_if_untested

from .collectives import all_gather, all_reduce, broadcast, reduce_scatter
from .current import current_mesh, destroy_parallelism, init_parallelism, set_current_mesh
from .exchange import all_to_all, all_to_all_dynamic
from .layout import ParallelLayout
from .mesh import ParallelMesh
from .tensor_parallel import (
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
)


__all__ = [
    "ParallelLayout",
    "ParallelMesh",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_dynamic",
    "broadcast",
    "copy_to",
    "current_mesh",
    "destroy_parallelism",
    "gather_from",
    "gather_sequence",
    "init_parallelism",
    "reduce_from",
    "reduce_scatter",
    "reduce_scatter_sequence",
    "scatter_to",
    "set_current_mesh",
]

warn_if_untested(torch.__version__)

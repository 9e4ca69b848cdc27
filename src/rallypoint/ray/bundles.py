"""``launch_subprocesses(…, hosts=rallypoint.ray)``: a function on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rallypoint.launch import host_functions
from rallypoint.launch.multiprocess_config import MultiprocessConfig
from rallypoint.launch.worker import payload

from .installation import trainer_type
from .sizes import shape_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundles:
    """Where the workers of a function launch are: ``hosts=Bundles(num_nodes=2, resources_per_node={"GPU": 4})``.

    What is unset follows from the sizes of the config. With ``local_world_size``, or GPUs, each node has that many workers;
    otherwise each worker has its own bundle, and Ray packs them.

    Args:
        num_nodes: how many bundles.
        resources_per_node: a bundle's resources, such as ``{"CPU": 8, "GPU": 4}``. Default: a CPU for each worker.
        strategy: how Ray places the bundles.
        flags: flags of ``rally run``, such as ``["--max-restarts", "3"]``.
        placement_timeout: seconds to wait until the cluster has room for all bundles; None: without limit.
    """

    num_nodes: int | None = None
    resources_per_node: Mapping[str, float] | None = None
    strategy: str | None = None
    flags: Sequence[str] = ()
    placement_timeout: float | None = None

    def call_on_hosts(self, call: payload.Call, cfg: MultiprocessConfig) -> list[Any]:
        """Make a call on all workers.

        Blocks: until the job and all its processes have ended.
        Args:
            call: the function and its arguments.
            cfg: the sizes, backends and parallelism.
        Returns:
            The results, by rank.
        Raises:
            ConfigError: sizes contradict one another, or Ray is not installed.
            WorkersFailed: a worker failed; the text is the report.
            LaunchError: the job could not be run.
        """
        host_functions.check_config(cfg)
        gpus = int((self.resources_per_node or {}).get("GPU", 0))
        shape = shape_of(cfg.world_size, cfg.local_world_size, self.num_nodes, gpus)
        return trainer_type()(
            call.func,
            args=call.args,
            kwargs=call.kwargs,
            num_nodes=shape.nodes,
            workers_per_node=shape.workers,
            resources_per_node=self.resources_per_node,
            strategy=self.strategy or shape.strategy,
            flags=self.flags,
            config=replace(cfg, world_size=None, local_world_size=None),
            setup=call.setup,
            placement_timeout=self.placement_timeout,
        ).fit_all()

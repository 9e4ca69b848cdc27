"""The sizes of a job on Ray: its bundles, and the flags that pass them to `rally run`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line.flags import FLAGS
from rallypoint.launch.command_line.given import Given


# Flags that the trainer sets itself.
_OWN = (
    *("--nnodes", "--node-rank", "--nproc-per-node", "--rdzv-endpoint", "--rdzv-backend"),
    *("--rdzv-id", "--standalone", "--master-addr", "--master-port", "--local-addr"),
    *("--hosts", "--hostfile", "--avoid-hosts", "--secret-file", "--insecure"),
)
STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How many nodes, and what each of them has.

    Args:
        least: the fewest nodes that the job runs with.
        most: how many bundles are requested.
        workers: workers per node.
        bundle: the resources of one node.
        strategy: how Ray places the bundles.
    """

    least: int
    most: int
    workers: int
    bundle: Mapping[str, float]
    strategy: str = STRATEGIES[0]

    @property
    def nodes(self) -> str:
        """The number of nodes in the form of ``--nnodes``."""
        return f"{self.least}" if self.least == self.most else f"{self.least}:{self.most}"


def sizes_from(
    num_nodes: int | tuple[int, int],
    workers_per_node: int | None,
    resources_per_node: Mapping[str, float] | None,
    strategy: str,
) -> Sizes:
    """The sizes that a trainer's arguments ask for.

    Raises:
        ConfigError: they cannot work.
    """
    least, most = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
    if not 1 <= least <= most:
        raise ConfigError("num_nodes", num_nodes, "expected N, or (MIN, MAX) with 1 <= MIN <= MAX")
    if strategy not in STRATEGIES:
        raise ConfigError("strategy", strategy, f"expected one of {', '.join(STRATEGIES)}")
    asked = dict(resources_per_node or {})
    if any(amount < 0 for amount in asked.values()):
        raise ConfigError("resources_per_node", asked, "expected amounts of 0 or more")
    if "object_store_memory" in asked:
        problem = "Ray gives no bundle a part of its object store"
        raise ConfigError("resources_per_node", asked, problem, "leave object_store_memory out")
    gpus = asked.get("GPU", 0)
    workers = workers_per_node if workers_per_node is not None else max(1, int(gpus))
    if workers < 1:
        raise ConfigError("workers_per_node", workers_per_node, "expected 1 or more")
    if gpus and workers > gpus:
        problem = f"a node has {gpus:g} GPUs (resources_per_node)"
        raise ConfigError("workers_per_node", workers_per_node, problem)
    bundle = {"CPU": float(workers), **asked}
    return Sizes(
        least=least,
        most=most,
        workers=workers,
        bundle={name: amount for name, amount in bundle.items() if amount},
        strategy=strategy,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How the workers of a function launch are divided among bundles.

    Args:
        nodes: how many bundles.
        workers: workers per bundle.
        strategy: how Ray places them, unless the caller says.
    """

    nodes: int
    workers: int
    strategy: str


def shape_of(
    world_size: int | None, local_world_size: int | None, num_nodes: int | None, gpus: int
) -> Shape:
    """The bundles that the sizes of a function launch ask for.

    Args:
        world_size: workers in all, if given.
        local_world_size: workers per node, if given.
        num_nodes: how many nodes, if given.
        gpus: GPUs per node; with 0, and without another size, each worker has its own bundle.

    Raises:
        ConfigError: sizes are missing, or contradict one another.
    """
    workers = local_world_size or gpus or None
    if workers is None and num_nodes is not None and world_size is not None:
        workers = _divided(world_size, num_nodes, f"{num_nodes} nodes")
    strategy = STRATEGIES[0] if workers is not None or num_nodes is not None else "PACK"
    workers = workers or 1
    if num_nodes is None:
        if world_size is None:
            hint = "or hosts=ray.Bundles(num_nodes=2)"
            raise ConfigError("world_size", None, "is not set, and no number of nodes either", hint)
        num_nodes = _divided(world_size, workers, f"nodes of {workers} workers")
    if world_size not in {None, num_nodes * workers}:
        problem = f"{num_nodes} nodes of {workers} workers have {num_nodes * workers}"
        raise ConfigError("world_size", world_size, problem)
    return Shape(nodes=num_nodes, workers=workers, strategy=strategy)


def _divided(world_size: int, among: int, whom: str) -> int:
    if world_size % among or world_size < among:
        raise ConfigError("world_size", world_size, f"cannot be divided among {whom}")
    return world_size // among


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the nodes meet: at a store that the driver serves.

    Args:
        run_id: the job's name.
        host: the driver's address.
        port: the store's port.
    """

    run_id: str
    host: str
    port: int


def words_of(
    given: Given, sizes: Sizes, meeting: Meeting | None, more: Mapping[str, str]
) -> tuple[str, ...]:
    """The arguments of ``rally run``, the same on all nodes.

    Args:
        given: flags and the target.
        sizes: the job's sizes.
        meeting: where the nodes meet; None: there is one node.
        more: defaults for flags that ``given`` does not have.

    Raises:
        ConfigError: a flag is one that the trainer sets.
    """
    for name in _OWN:
        if name in given.values:
            why = "is set by RallyTrainer" if name != "--avoid-hosts" else "Ray chooses the hosts"
            raise ConfigError(name, None, f"{why}: leave it out")
    values = {**more, **given.values, "--nproc-per-node": str(sizes.workers)}
    if meeting is not None:
        host = f"[{meeting.host}]" if ":" in meeting.host else meeting.host
        conf = [each for each in (given.values.get("--rdzv-conf", ""), "is_host=false") if each]
        values |= {
            # Membership changes while the job runs, even if the number of nodes is fixed.
            "--nnodes": sizes.nodes,
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{host}:{meeting.port}",
            "--rdzv-id": meeting.run_id,
            "--rdzv-conf": ",".join(conf),
        }
    switches = {flag.name for flag in FLAGS if flag.is_switch}
    flags = [name if name in switches else f"{name}={text}" for name, text in values.items()]
    return (*flags, "--", *given.target)

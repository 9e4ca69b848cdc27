"""Predictions and metrics of ranks with uneven inputs: every sample once, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import data

from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError, JoinError

from .batches import described, zeros_like_described
from .exchange import broadcast_text, check_group, gather
from .torch_private import tree_leaves, tree_map, tree_structure, tree_unflatten


# Dimensions of a tensor, beside the one of samples.
MAX_DIMS = 8
# What may be gathered; the position is told to the other ranks.
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)


class ShardSampler(data.Sampler[int]):
    """A rank's share of a data set, without repeating or dropping a sample.

    The shares differ by one sample at most. Rank ``r`` of ``W`` has the samples ``r``, ``r + W``, ``r + 2 W`` and so on
    of the order, which is the same on all ranks.

    Args:
        data_source: what has a length: the data set.
        rank: default: this process's.
        world_size: default: that of the process group.
        shuffle: another order in each epoch (:meth:`set_epoch`).
        seed: of the order; the same on all ranks.

    Raises:
        ConfigError: there is no such rank.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        given: object = data_source
        if not isinstance(given, Sized):
            raise ConfigError(
                "data_source",
                type(given).__name__,
                "expected a data set with a length: len() of it fails",
            )
        for name, value in (("rank", rank), ("world_size", world_size), ("seed", seed)):
            if value is not None and not is_whole(value):
                raise ConfigError(name, value, "expected a whole number")
        self.rank = dist.get_rank() if rank is None else rank
        self.world_size = dist.get_world_size() if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ConfigError("rank", self.rank, f"expected 0 to {self.world_size - 1}")
        self._total = len(data_source)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Have the order of this epoch come next.

        Args:
            epoch: the same number on every rank; each has an order of its own, if the sampler shuffles.

        Raises:
            ConfigError: it is no whole number.
        """
        if not is_whole(epoch):
            raise ConfigError("epoch", epoch, "expected a whole number")
        self._epoch = epoch

    @property
    def indices(self) -> torch.Tensor:
        """Which samples, in this rank's order: ``[len(self)]``, int64."""
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._total, generator=generator)
        else:
            order = torch.arange(self._total)
        return order[self.rank :: self.world_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices.tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self._total, self.world_size))


def gather_samples(
    values: Any, indices: torch.Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Any:
    """What all ranks have, one row for each sample, on every rank.

    Collective: every rank calls it.   Blocks: until all have.
    Args:
        values: a tensor ``[N, ...]``, or lists, tuples and dicts of such, with a row for each of this rank's ``N``
            samples. ``N`` may differ between ranks; a rank without samples may pass None.
        indices: ``[N]``: which sample of the data set each row is. Rows then come in that order, and a
            sample that several ranks have (padding, say) once; else in rank order.
        group: default: all ranks.
    Returns:
        The same structure, of tensors ``[sum of N, ...]`` (with ``indices``: one row for each sample), on the device of
        the values. None if no rank has anything.
    Raises:
        JoinError: on every rank, and names the ranks: structures, shapes or types differ.
        ConfigError: on this rank: rows and indices do not go together.
    """
    given: object = indices
    if given is not None and not (
        isinstance(given, torch.Tensor) and not given.is_floating_point()
    ):
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise ConfigError(
            "indices", kind, "expected a tensor of whole numbers", "as in sampler.indices"
        )
    check_group("group", group)
    leaves = [] if values is None else tree_leaves(values)
    for leaf in leaves:
        _check_leaf(leaf, leaves[0], indices)
    device = leaves[0].device if leaves else _device_of(group)
    # Rows and indices, or neither of both; the same number of collectives on all ranks.
    own = [
        len(leaves[0]) if leaves else 0,
        -1 if values is None else len(leaves),
        int(indices is not None),
    ]
    heads = gather(own, 3, device, group)
    holders = [rank for rank, head in enumerate(heads) if head[1] >= 0]
    if not holders:
        return None
    _agree("number of tensors", {rank: heads[rank][1] for rank in holders})
    _agree("giving indices", {rank: bool(heads[rank][2]) for rank in holders})
    counts = [max(head[0], 0) for head in heads]
    if len(holders) < len(heads):
        structure = described(_no_rows(values)) if values is not None else ""
        structure = broadcast_text(structure, holders[0], device, group)
        if values is None:
            values = tree_map(lambda t: t.to(device), zeros_like_described(structure))
            leaves = tree_leaves(values)
            indices = torch.zeros(0, dtype=torch.int64) if heads[holders[0]][2] else None
    _agree_on_shapes(leaves, device, group)
    every = [_gather_rows(leaf, counts, group) for leaf in leaves]
    if indices is not None:
        which = _gather_rows(indices.to(device=device, dtype=torch.int64), counts, group)
        first = _first_of_each(which)
        every = [rows[first] for rows in every]
    return tree_unflatten(every, tree_structure(values))


def mean_over_samples(
    metrics: Mapping[str, float | torch.Tensor],
    num_samples: int,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """The mean over all samples of all ranks, of metrics that are means over each rank's own.

    Collective: one all-reduce.   Blocks: until all have called it.
    Args:
        metrics: names and means; the same names in the same order on every rank. Where ``num_samples`` is 0 the
            values do not count, whatever they are (a mean over nothing is NaN).
        num_samples: this rank's.
    Raises:
        ConfigError: ``num_samples`` is below 0, or a metric is not one number.
    Returns:
        ``sum(n * mean) / sum(n)`` of each; NaN if no rank has a sample.
    """
    count: Any = num_samples
    if not is_whole(count) or count < 0:
        shown = "None" if count is None else count
        raise ConfigError("num_samples", shown, "expected a whole number, 0 or more")
    given: object = metrics
    if not isinstance(given, Mapping):
        raise ConfigError(
            "metrics", type(given).__name__, "expected names and means", "as in {'loss': loss}"
        )
    check_group("group", group)
    sums = [
        _number(name, value) * num_samples if num_samples else 0.0
        for name, value in metrics.items()
    ]
    total = torch.tensor([*sums, float(num_samples)], dtype=torch.float64)
    total = total.to(_device_of(group))
    dist.all_reduce(total, group=group)
    *means, samples = total.tolist()
    return {
        name: mean / samples if samples else float("nan")
        for name, mean in zip(metrics, means, strict=True)
    }


def _number(name: str, value: object) -> float:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    try:
        if one or (not isinstance(value, torch.Tensor | str) and value is not None):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    shown = list(value.shape) if isinstance(value, torch.Tensor) else value
    raise ConfigError(
        f"metrics[{name!r}]", shown, "expected one number: the mean over this rank's samples"
    )


def _check_leaf(leaf: Any, first: torch.Tensor, indices: torch.Tensor | None) -> None:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.dim() > MAX_DIMS + 1:
        raise ConfigError(
            "values", type(leaf).__name__, "expected tensors with a row for each sample"
        )
    if leaf.dtype not in DTYPES:
        raise ConfigError("values", leaf.dtype, "expected a dense type of numbers")
    if len(leaf) != len(first):
        raise ConfigError("values", len(leaf), f"rows, and the first tensor has {len(first)}")
    if indices is not None and indices.shape != (len(leaf),):
        raise ConfigError(
            "indices", tuple(indices.shape), f"expected [{len(leaf)}]: one for each row"
        )


def _no_rows(values: Any) -> Any:
    return tree_map(lambda leaf: leaf[:0], values)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    backend = dist.get_backend(group)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl"
        else torch.device("cpu")
    )


def _agree(what: str, values: Mapping[int, object]) -> None:
    """Every rank has the same facts and raises the same."""
    if len(set(values.values())) > 1:
        shown = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
        raise JoinError(f"gather_samples: the ranks differ in {what} ({shown})")


def _agree_on_shapes(
    leaves: list[torch.Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> None:
    own = []
    for leaf in leaves:
        rest = list(leaf.shape[1:])
        own += [DTYPES.index(leaf.dtype), len(rest), *rest, *[0] * (MAX_DIMS - len(rest))]
    width = MAX_DIMS + 2
    every = gather(own, width * len(leaves), device, group)
    for index in range(len(leaves)):
        facts = [row[index * width : (index + 1) * width] for row in every]
        shapes = {
            rank: f"[N, {', '.join(map(str, fact[2 : 2 + fact[1]]))}] {DTYPES[fact[0]]}".replace(
                ", ]", "]"
            )
            for rank, fact in enumerate(facts)
        }
        _agree(f"tensor {index}", shapes)


def _gather_rows(
    rows: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """All ranks' rows, in rank order: filled up to the most for the exchange, and cut back."""
    most = max(counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    # Not all backends take every type; bytes go everywhere.
    packed = padded.contiguous().view(torch.uint8) if padded.numel() else padded.to(torch.uint8)
    every = [torch.empty_like(packed) for _ in counts]
    dist.all_gather(every, packed, group=group)
    if not padded.numel():
        return rows.new_zeros((sum(counts), *rows.shape[1:]))
    return torch.cat(
        [each.view(rows.dtype)[:count] for each, count in zip(every, counts, strict=True)]
    )


def _first_of_each(indices: torch.Tensor) -> torch.Tensor:
    """Positions that sort the indices, each value once: where it comes first."""
    order = torch.argsort(indices, stable=True)
    ordered = indices[order]
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return order[fresh]

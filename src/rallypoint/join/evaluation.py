"""Predictions and metrics from ranks with uneven inputs: every sample exactly once, in order."""

from __future__ import annotations

import hashlib
import re
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


# The most dimensions a gathered tensor may have after its first.
MAX_DIMS = 8
# The dtypes that can be gathered. Ranks exchange the position in this tuple.
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)


class ShardSampler(data.Sampler[int]):
    """One rank's share of a data set: no sample is repeated, and none is dropped.

    Shares differ by at most one sample. All ranks use the same order of samples, from which rank ``r`` of ``W`` takes
    samples ``r``, ``r + W``, ``r + 2 W`` ... There is no communication.

    Args:
        data_source: the data set, or anything with a length.
        rank: this rank. Default: the process's rank in the default group.
        world_size: number of ranks. Default: the size of the default group.
        shuffle: use a new random order in each epoch (:meth:`set_epoch`).
        seed: seed of the random order; the same on all ranks.

    Raises:
        ConfigError: ``data_source`` has no length, a number is not a whole number, or ``rank`` is not in the range 0 to
            ``world_size - 1``.
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
                "expected a data set with a length; len() of this one fails",
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
        """Choose the order for the next iteration. Call it before each epoch if the sampler shuffles.

        Args:
            epoch: the number of the epoch; the same on every rank.

        Raises:
            ConfigError: ``epoch`` is not a whole number.
        """
        if not is_whole(epoch):
            raise ConfigError("epoch", epoch, "expected a whole number")
        self._epoch = epoch

    @property
    def indices(self) -> torch.Tensor:
        """The indices of this rank's samples, in order: ``[len(self)]``, int64."""
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
    """Gather per-sample values from all ranks onto every rank.

    Collective: every rank of ``group`` calls it.   Blocks: until all ranks have called it.
    Args:
        values: a tensor ``[N, ...]``, or nested lists, tuples and dicts of such tensors, with one row for each of this
            rank's ``N`` samples. The keys of a dict must have the same order on all ranks. ``N`` may differ between ranks.
            A rank without samples may pass None.
        indices: ``[N]``, integers: the data set's index of each row. Rows are then returned in index order; if an index
            occurs several times (padding, for example), only its first row is kept. None: rows are in rank order.
        group: the ranks that take part. Default: the default group.
    Returns:
        The same structure with tensors ``[sum of N, ...]``, or one row per distinct index, on the device of
        ``values``. None if no rank has values.
    Raises:
        JoinError: on every rank: structures, shapes or dtypes differ between ranks, or a rank passes None and the
            others' structure cannot be sent to it; the message names the ranks.
        ConfigError: on this rank only: an argument has a wrong type, or rows and indices do not match.
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
    # All ranks must issue the same collectives, whether they have rows or not.
    own = [
        len(leaves[0]) if leaves else 0,
        -1 if values is None else len(leaves),
        int(indices is not None),
        _number_of(_shown(values)),
    ]
    heads = gather(own, 4, device, group)
    holders = [rank for rank, head in enumerate(heads) if head[1] >= 0]
    if not holders:
        return None
    _agree("number of tensors", {rank: heads[rank][1] for rank in holders})
    _agree("whether indices are given", {rank: bool(heads[rank][2]) for rank in holders})
    if len({heads[rank][3] for rank in holders}) > 1:
        texts = [broadcast_text(_shown(values), rank, device, group) for rank in range(len(heads))]
        _agree("structure", {rank: texts[rank] for rank in holders})
    counts = [max(head[0], 0) for head in heads]
    if len(holders) < len(heads):
        structure = described(_no_rows(values)) if values is not None else ""
        structure = broadcast_text(structure, holders[0], device, group)
        if not structure:
            lacking = ", ".join(str(rank) for rank in range(len(heads)) if rank not in holders)
            shown = broadcast_text(_shown(values), holders[0], device, group)
            raise JoinError(
                f"gather_samples: rank {lacking} passes None, and the structure {shown} of rank {holders[0]} cannot be sent"
                " to it, only lists, tuples, and dicts with text or numbers for keys; pass the same structure with"
                " tensors of no rows"
            )
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
    """Combine each rank's mean metrics into means over all samples of all ranks.

    Collective: every rank of ``group`` calls it: one all-reduce.   Blocks: until all ranks have called it.
    Args:
        metrics: this rank's means by name; the same names in the same order on every rank. If ``num_samples`` is 0, the
            values are ignored (the mean over no samples is NaN).
        num_samples: the number of samples behind this rank's means.
        group: the ranks that take part. Default: the default group.
    Returns:
        For each name ``sum(n * mean) / sum(n)`` over the ranks; NaN if no rank has a sample.
    Raises:
        ConfigError: on this rank only: ``num_samples`` is not a whole number of at least 0, or a metric is not one number.
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
            # Without the graph: torch would warn about it.
            return float(value.detach() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    shown = list(value.shape) if isinstance(value, torch.Tensor) else value
    raise ConfigError(
        f"metrics[{name!r}]", shown, "expected one number, the mean over this rank's samples"
    )


def _check_leaf(leaf: Any, first: torch.Tensor, indices: torch.Tensor | None) -> None:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.dim() > MAX_DIMS + 1:
        raise ConfigError("values", type(leaf).__name__, "expected tensors with one row per sample")
    if leaf.dtype not in DTYPES:
        raise ConfigError("values", leaf.dtype, f"expected one of {', '.join(map(str, DTYPES))}")
    if len(leaf) != len(first):
        raise ConfigError(
            "values", len(leaf), f"expected {len(first)} rows, as in the first tensor"
        )
    if indices is not None and indices.shape != (len(leaf),):
        raise ConfigError(
            "indices", tuple(indices.shape), f"expected shape [{len(leaf)}], one index per row"
        )


def _shown(values: Any) -> str:
    """A structure as text, the same on all ranks."""
    text = repr(tree_map(lambda _: "tensor", values))
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # a defaultdict shows its function


def _number_of(text: str) -> int:
    """A signed 64-bit number that stands for the text, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


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
    """Raise if the ranks' values differ. Every rank raises, because all see the same values."""
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
    """All ranks' rows in rank order: padded to the longest for the exchange, then cut back."""
    most = max(counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    # No backend supports every dtype, but each supports bytes.
    packed = padded.contiguous().view(torch.uint8) if padded.numel() else padded.to(torch.uint8)
    every = [torch.empty_like(packed) for _ in counts]
    dist.all_gather(every, packed, group=group)
    if not padded.numel():
        return rows.new_zeros((sum(counts), *rows.shape[1:]))
    return torch.cat(
        [each.view(rows.dtype)[:count] for each, count in zip(every, counts, strict=True)]
    )


def _first_of_each(indices: torch.Tensor) -> torch.Tensor:
    """Positions that sort the indices; of equal indices, only the first."""
    order = torch.argsort(indices, stable=True)
    ordered = indices[order]
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return order[fresh]

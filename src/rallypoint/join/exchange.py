"""What ranks tell each other before the first step, and once per window if loaders have no length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.errors import ConfigError

from .schedule import Inputs


# How many runs fit into the first message: equal batches and a shorter last one need two.
NUM_INLINE = 2
# The value that stands for an unknown number of samples.
UNKNOWN = -1

# The last block number of each group, by the group's name.
_numbers: dict[str, int] = {}


def all_inputs(
    inputs: Inputs | None, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[list[Inputs] | None, int]:
    """Every rank's inputs, and a block number that this group has not used before.

    Collective: one all-gather, and a second one if some rank's batch sizes are irregular.

    Returns:
        The inputs in rank order, or None if some rank passed None; and the number.
    """
    runs = () if inputs is None else inputs.runs
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]  # there is a default group
    own = _numbers.get(name, 0)
    head = [own, UNKNOWN if inputs is None else len(runs), *_flat(runs[:NUM_INLINE])]
    heads = gather(head, 2 + 2 * NUM_INLINE, device, group)
    # Use the maximum, because a process that joined later has counted fewer blocks.
    number = max(each[0] for each in heads) + 1
    _numbers[name] = number
    counts = [each[1] for each in heads]
    if UNKNOWN in counts:
        return None, number
    if max(counts) > NUM_INLINE:
        tables = gather(_flat(runs), 2 * max(counts), device, group)
    else:
        tables = [each[2:] for each in heads]
    every = [Inputs(_runs(table, count)) for table, count in zip(tables, counts, strict=True)]
    return every, number


def check_group(name: str, group: object) -> None:
    """Raise ConfigError unless ``group`` is a process group or None."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            name, type(group).__name__, "expected a process group, or None for the default one"
        )


def gather(
    values: Sequence[int], width: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[list[int]]:
    """Every rank's values, padded with zeros to ``width``.   Collective: one all-gather."""
    own = torch.tensor([*values, *[0] * (width - len(values))], dtype=torch.int64, device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    found: list[list[int]] = torch.stack(every).tolist()
    return found


def broadcast_text(
    text: str, source: int, device: torch.device, group: dist.ProcessGroup | None
) -> str:
    """The text of rank ``source`` of the group.   Collective: two broadcasts."""
    data = text.encode()
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    # Any: torch's stubs lack the argument.
    from_source: dict[str, Any] = {"group": group, "group_src": source}
    dist.broadcast(size, **from_source)
    held = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if dist.get_rank(group) == source:
        held.copy_(torch.tensor(list(data), dtype=torch.uint8))
    dist.broadcast(held, **from_source)
    return bytes(held.cpu().tolist()).decode()


def broadcast_into(
    tensor: torch.Tensor, source: int, device: torch.device, group: dist.ProcessGroup | None
) -> None:
    """Copy the values of rank ``source`` of the group into the tensor.   Collective: one broadcast.

    Args:
        tensor: a dense tensor of the same shape and dtype on every rank; on the receiving ranks contiguous, without a gradient.
        source: the sender's rank in the group.
        device, group: as above.
    """
    held = tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()
    # No backend supports every dtype, but each supports bytes.
    if held.numel():
        dist.broadcast(held.view(-1).view(torch.uint8), group=group, group_src=source)
    if dist.get_rank(group) != source:
        tensor.copy_(held)


def _flat(runs: Sequence[tuple[int, int | None]]) -> list[int]:
    return [number for steps, size in runs for number in (steps, UNKNOWN if size is None else size)]


def _runs(table: Sequence[int], count: int) -> tuple[tuple[int, int | None], ...]:
    pairs = zip(table[: 2 * count : 2], table[1 : 2 * count : 2], strict=True)
    return tuple((steps, None if size == UNKNOWN else size) for steps, size in pairs)

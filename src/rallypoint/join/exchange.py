"""What the ranks tell each other before the first step, and once per window where loaders have no length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.errors import ConfigError

from .schedule import Inputs


# A loader of equal batches and a shorter last one: what fits into the first message.
NUM_INLINE = 2
# No size: nobody knows how many samples there are.
UNKNOWN = -1

# The last number of each group, by its name.
_numbers: dict[str, int] = {}


def all_inputs(
    inputs: Inputs | None, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[list[Inputs] | None, int]:
    """What each rank has, and a number that this group has not had before.

    Collective: one all-gather, and a second one if the batches of some rank are irregular.

    Returns:
        In rank order; None if any of them does not know (``inputs`` is None there). And the number.
    """
    runs = () if inputs is None else inputs.runs
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]  # there is a default group
    own = _numbers.get(name, 0)
    head = [own, UNKNOWN if inputs is None else len(runs), *_flat(runs[:NUM_INLINE])]
    heads = gather(head, 2 + 2 * NUM_INLINE, device, group)
    # The greatest: a process that came later has counted fewer.
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
    """Raises ConfigError if it is none."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            name, type(group).__name__, "expected a process group, or None for the default one"
        )


def gather(
    values: Sequence[int], width: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[list[int]]:
    """The values of every rank, filled up to ``width`` with zeros.   Collective: one all-gather."""
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
    # Any: the argument came with torch 2.6, its stubs later.
    from_source: dict[str, Any] = {"group": group, "group_src": source}
    dist.broadcast(size, **from_source)
    held = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if dist.get_rank(group) == source:
        held.copy_(torch.tensor(list(data), dtype=torch.uint8))
    dist.broadcast(held, **from_source)
    return bytes(held.cpu().tolist()).decode()


def _flat(runs: Sequence[tuple[int, int | None]]) -> list[int]:
    return [number for steps, size in runs for number in (steps, UNKNOWN if size is None else size)]


def _runs(table: Sequence[int], count: int) -> tuple[tuple[int, int | None], ...]:
    pairs = zip(table[: 2 * count : 2], table[1 : 2 * count : 2], strict=True)
    return tuple((steps, None if size == UNKNOWN else size) for steps, size in pairs)

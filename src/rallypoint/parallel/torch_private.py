"""Every private name of torch that this package uses, and what for.

No other module in ``parallel`` uses one; ``tests/test_architecture.py`` enforces that. ``tests/unit/test_torch_private.py``
checks each name and its signature in the installed torch, so a new torch shows at once which of these to check.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


# Collectives as operators without side effects, which torch.compile can put into a graph. torch's own compiler
# passes are written for these, and there are no others. Any: operators have no types.
functional: Any = torch.ops._c10d_functional


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """The time limit of a group's collectives on this kind of device, in seconds.

    Returns:
        None if the backend has none, or does not say.
    """
    try:
        # Any: the stubs lack both.
        backend: Any = group._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None

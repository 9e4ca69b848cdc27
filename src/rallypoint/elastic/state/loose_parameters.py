"""Parameters that an optimizer has but no module: a learned temperature, or float32 copies of a model's parameters.

They are part of the state, as the modules' parameters are. So they get a module of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from rallypoint.elastic import torch_private
from rallypoint.errors import ElasticError


class LooseParameters(nn.Module):
    """Holds parameters by their number.

    Args:
        parameters: the objects themselves.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        for number, each in enumerate(parameters):
            torch_private.hold(self, str(number), each)


def of_no_module(
    optimizers: Iterable[torch.optim.Optimizer], modules: Sequence[nn.Module]
) -> list[LooseParameters]:
    """A module with the parameters that the optimizers have and the modules lack; an empty list if there are none.

    Raises:
        ElasticError: such a parameter is sharded, so it belongs to some module.
    """
    held = {id(each) for module in modules for each in module.parameters()}
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update((id(each), each) for each in group["params"] if id(each) not in held)
    if any(map(torch_private.is_sharded, found.values())):
        raise ElasticError(
            "elastic.session: an optimizer has sharded parameters that belong to no module of the session; give the session"
            " their module, too"
        )
    return [LooseParameters(found.values())] if found else []

"""The kinds of objects that Join accepts: how to recognize each, the member that handles it, and its place in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rallypoint.errors import ConfigError

from . import torch_private
from .hooks.ddp import DdpMember
from .hooks.local_sgd import LocalSgdMember, is_local_sgd
from .hooks.optimizer import ScalerMember, StepMember
from .hooks.replay import ModuleMember
from .members import HookMember, Member


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object.

    Args:
        handles: whether an object is of this kind.
        member: makes the member that handles it.
        place: a training loop runs objects with lower places first in a step. None: such an object may come anywhere.
    """

    handles: Callable[[Any], bool]
    member: Callable[[Any], Member]
    place: int | None


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda joined: isinstance(joined, types)


def check_constructed(joinable: Any) -> None:
    """Check that the constructor of a Joinable has run.

    Raises:
        ConfigError: the constructor has not run.
    """
    if not torch_private.has_join_config(joinable):
        raise ConfigError(
            "joinables",
            type(joinable).__name__,
            "its constructor did not call Joinable's",
            "add super().__init__()",
        )


def _with_own_hook(joinable: Any) -> Member:
    check_constructed(joinable)
    return HookMember(joinable)


# An object's kind is the first one that handles it. A ZeroRedundancyOptimizer is both an optimizer and a Joinable.
KINDS = (
    Kind(_is(DistributedDataParallel), DdpMember, 0),
    Kind(is_local_sgd, LocalSgdMember, 1),
    Kind(_is(Optimizer), StepMember, 1),
    Kind(_is(LRScheduler), StepMember, 2),
    Kind(_is(GradScaler), ScalerMember, 3),
    Kind(
        lambda each: isinstance(each, Joinable) and isinstance(each, nn.Module), _with_own_hook, 0
    ),
    Kind(_is(Joinable), _with_own_hook, None),
    Kind(_is(nn.Module), ModuleMember, 0),
)


def kind_of(joined: Any) -> Kind:
    """The kind of an object.

    Raises:
        ConfigError: Join cannot handle this type.
    """
    for kind in KINDS:
        if kind.handles(joined):
            return kind
    raise ConfigError(
        "joinables",
        type(joined).__name__,
        "expected a Joinable, a module, an optimizer, a learning-rate scheduler, or a GradScaler",
    )


def in_order(joinables: Iterable[Any]) -> list[Any]:
    """The objects in the order in which a training loop runs them: modules, optimizers, schedulers, scalers.

    An object that may come anywhere in a step keeps its position in the list.

    Raises:
        ConfigError: Join cannot handle one of them.
    """
    found = [(each, kind_of(each).place) for each in joinables]
    ordered = iter(
        sorted((each for each in found if each[1] is not None), key=lambda each: each[1] or 0)
    )
    return [each if place is None else next(ordered)[0] for each, place in found]


def member_of(joined: Any) -> Member:
    """The member that handles an object.

    Raises:
        ConfigError: Join cannot handle this type, or the object's constructor did not run.
    """
    return kind_of(joined).member(joined)

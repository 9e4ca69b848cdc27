"""What may be passed to Join, each behind the same few calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from .run import Run
from .schedule import Schedule
from .state import Part


class Member:
    """Something that takes part in a Join.

    Attributes:
        name: for messages.
        group: over which it communicates; None: it has no opinion.
        device: of its tensors; None: no opinion.
        module: whose gradients are averaged over the group, and whose forward passes are steps; or None.
        needs_plan: whether its hook has to know who has inputs.
    """

    name: str = ""
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    module: nn.Module | None = None
    needs_plan: bool = False

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        """The block begins. Whatever is changed is put back by ``stack``."""

    def planned(self, run: Run, stack: ExitStack) -> None:
        """All ranks have the schedule: no step needs a collective to agree on anything."""

    def unmatched(self, schedule: Schedule | None) -> str:
        """Why hooks cannot match its collectives, and only running the loop's body again does; else empty."""
        return ""

    def begun_in(self, step: int) -> bool:
        """Whether it exchanged something in this step: at least in part, if hooks cannot match its exchanges."""
        return True

    def main_hook(self) -> None:
        """This rank has run out, or left: match what the others do in one step."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out."""

    def parts(self) -> Sequence[Part]:
        """What a rank that only matched the others' steps must have as they have it, when all are through.

        As many, in the same order, on all ranks.
        """
        return ()


class HookMember(Member):
    """A class written for torch's Join (or ours): its own hook does everything.

    Args:
        joinable: the object.
    """

    def __init__(self, joinable: Any) -> None:
        self.joinable = joinable
        self.name = type(joinable).__name__
        self.group = joinable.join_process_group
        self.device = joinable.join_device
        self._hook: JoinHook = JoinHook()

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        self._hook = self.joinable.join_hook(**kwargs)

    def main_hook(self) -> None:
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)

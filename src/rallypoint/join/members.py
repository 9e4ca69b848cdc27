"""The kinds of objects that Join accepts, behind one interface."""

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
    """An object's part in a Join.

    Attributes:
        name: the object's name, for messages.
        group: the group it communicates over. None: any.
        device: where its tensors are. None: anywhere.
        module: the module whose gradients are averaged over the group, and whose forward passes count as steps; or None.
        needs_plan: whether its hook must know which ranks have inputs.
        exchanges_within: whether ranks exchange anything between the module's outputs and its parameters, so that
            gradients must be weighted at the outputs.
        ran_back: whether the module has run backward since its last exchange (in ``no_sync()``).
    """

    name: str = ""
    group: dist.ProcessGroup | None = None
    device: torch.device | None = None
    module: nn.Module | None = None
    needs_plan: bool = False
    exchanges_within: bool = True
    ran_back: bool = False

    def enter(self, run: Run, stack: ExitStack, kwargs: dict[str, Any]) -> None:
        """The block starts. ``stack`` restores whatever this changes."""

    def planned(self, run: Run, stack: ExitStack) -> None:
        """All ranks know the schedule, so no step needs a collective to agree on it."""

    def unmatched(self, schedule: Schedule | None) -> str:
        """Why hooks cannot match its collectives, so that the loop's body must be replayed. Empty if they can."""
        return ""

    def level(self) -> None:
        """Some rank has no inputs: equalize what the ranks hold from before and would combine in the first step.

        Collective.
        """

    def begun_in(self, step: int) -> bool:
        """Whether this member has issued this step's collectives; if hooks cannot match them, whether it has issued any."""
        return True

    def main_hook(self) -> None:
        """This rank has run out, or left its loop: match the other ranks' collectives of one step."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out."""

    def parts(self) -> Sequence[Part]:
        """The state that must be equal on all ranks at the end of the block.

        All ranks return the same number of parts, in the same order.
        """
        return ()


class HookMember(Member):
    """A class written for torch's Join or ours: its own hook does everything.

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

"""A node's current situation."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.launch import policy
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Generation


@dataclass(slots=True)
class Situation:
    """What the parts of a supervisor read. Only the supervisor writes ``state``.

    Args:
        state: the policy's state.
        workers: this node's workers in the current generation.
        round: the last round; None before the first.
    """

    state: policy.State
    workers: Generation
    round: RoundReady | None = None

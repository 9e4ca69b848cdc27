"""What is so on a node at the moment."""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint.launch import policy
from rallypoint.launch.coordination.interface import RoundReady
from rallypoint.launch.generation import Generation


@dataclass(slots=True)
class Situation:
    """What the parts of a supervisor read. Only the supervisor writes ``state``.

    Args:
        state: of the policy.
        workers: of the current generation on this node.
        round: the last one; None before the first.
    """

    state: policy.State
    workers: Generation
    round: RoundReady | None = None

"""The commands that the supervisor executes."""

from __future__ import annotations

from dataclasses import dataclass

from .state import Aim, State, Verdict


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the other nodes for a generation. ``restarts`` and ``verdict``: what this node knows about the budget."""

    generation: int
    restarts: int = 0
    verdict: Verdict = Verdict.NONE


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """``takes_over``: in place of a lost node's workers, whose peers are in a session."""

    takes_over: bool = False


@dataclass(frozen=True, slots=True)
class HoldWorkers:
    """A node is lost: the workers in a session wait until the nodes have met again."""


@dataclass(frozen=True, slots=True)
class KeepWorkers:
    """The nodes have met again: tell the workers in a session where to meet, and start a worker in place of each of ``lost``."""

    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a worker in place of a lost one, and tell the workers in a session. None: another node starts it."""

    index: int | None


@dataclass(frozen=True, slots=True)
class TellLoss:
    """Tell all nodes, this one included, that a worker of a session is lost."""

    index: int
    survivors: bool


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    number: int


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send the workers a signal that does not end the job."""

    number: int


@dataclass(frozen=True, slots=True)
class AskWorkers:
    """Ask running workers which exception they are handling."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """End the remaining processes: SIGTERM, ``grace`` seconds, SIGKILL."""

    grace: float


@dataclass(frozen=True, slots=True)
class TellPeers:
    """``failed``, ``done``, ``stopped`` (job), ``leaving`` (this node), ``in session``, ``out of session`` or ``not kept``."""

    what: str


@dataclass(frozen=True, slots=True)
class ReportRestart:
    """Print why the workers are restarted.

    Args:
        not_replaced: why a lost worker of a session was not replaced in place, in words.
        alone: only this node's workers are restarted; the others go on.
    """

    not_replaced: str = ""
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    aim: Aim


Command = (
    Join
    | StartWorkers
    | HoldWorkers
    | KeepWorkers
    | Replace
    | TellLoss
    | SignalWorkers
    | PassOn
    | AskWorkers
    | Sweep
    | TellPeers
    | ReportRestart
    | Finish
)


@dataclass(frozen=True, slots=True)
class Decision:
    state: State
    commands: tuple[Command, ...]
    reason: str

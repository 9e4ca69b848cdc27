"""The events that a job emits as it runs, and how to receive them.

A process delivers its events to the functions passed to :func:`subscribe`. To have all processes of a job write their
events, set ``RALLY_EVENTS`` to the path of a file (JSON lines), or to ``log``.

    from rallypoint import events

    def on_event(event: events.Event) -> None:
        if isinstance(event, events.MemberGone):
            print(f"{event.worker} is gone: {event.reason}")

    with events.subscribe(on_event):
        ...

Ranks and generations count from 0. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from rallypoint._core.event_sinks import Event, JsonLines, Subscription, emit, is_wanted, subscribe


__all__ = [
    "AgentStarted",
    "AgentStopped",
    "Event",
    "GenerationEnded",
    "GenerationStarted",
    "JobEnded",
    "JobHangs",
    "JobStarted",
    "JoinEnded",
    "JsonLines",
    "MemberGone",
    "NodeLost",
    "NodeReported",
    "RanOut",
    "RoundFormed",
    "SessionRecovered",
    "SignalReceived",
    "StoreLost",
    "Subscription",
    "WorkerEnded",
    "WorkerReplaced",
    "WorkerSlow",
    "WorkerStarted",
    "emit",
    "is_wanted",
    "subscribe",
]


# -- rally run and function launches: from the supervisor of each node ------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStarted(Event):
    """A supervisor has started a job.

    Args:
        run_id: the job's name.
        target: the script, module, program or function.
        min_nodes: the fewest nodes the job runs with.
        max_nodes: the most.
        max_restarts: the restart budget.
    """

    run_id: str
    target: str
    min_nodes: int
    max_nodes: int
    max_restarts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationStarted(Event):
    """The nodes have agreed, and this node starts its workers.

    Args:
        run_id: the job's name.
        generation: its number.
        node_rank: this node's rank.
        num_nodes: the number of nodes.
        world_size: the number of workers on all nodes.
        restarts: how much of the restart budget is used.
    """

    run_id: str
    generation: int
    node_rank: int
    num_nodes: int
    world_size: int
    restarts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStarted(Event):
    """A worker's process runs.

    Args:
        generation: the worker's generation.
        rank: its rank.
        local_rank: its rank on this node.
        worker_pid: its pid.
    """

    generation: int
    rank: int
    local_rank: int
    worker_pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnded(Event):
    """A worker's process has ended.

    Args:
        generation: the worker's generation.
        rank: its rank.
        local_rank: its rank on this node.
        worker_pid: its pid.
        exit_code: its exit code, or None if a signal ended it.
        signal: the number of that signal, or None.
        error: how it failed, in a few words ("raised ValueError: …"); empty if it ended well.
        stopped: whether it was stopped because of another failure or a signal to the job.
    """

    generation: int
    rank: int
    local_rank: int
    worker_pid: int
    exit_code: int | None
    signal: int | None
    error: str
    stopped: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReplaced(Event):
    """A worker of a session (:mod:`rallypoint.elastic`) was lost; another process takes its place. Emitted on every node.

    Args:
        generation: the job's generation.
        replaced: how many workers have been replaced since the generation began, including this one.
        rank: the lost worker's rank.
        node_rank: its node.
        error: how it was lost, in a few words.
    """

    generation: int
    replaced: int
    rank: int
    node_rank: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHangs(Event):
    """No worker has made progress for a while, and some wait for others, or have not ended as others have.

    Emitted by node 0, once until something moves.

    Args:
        generation: the job's generation.
        missing: the ranks that the others wait for, whose call does not match theirs, or that have not ended; empty if unknown.
        waiting: the ranks that wait, in a collective, a recovery or for a call.
        seconds: how long nothing has moved.
    """

    generation: int
    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSlow(Event):
    """The other workers have waited markedly for this one in their collectives. Emitted by its node, once until that is over.

    Args:
        generation: the job's generation.
        rank: the slow worker's rank.
        share: the share of the time in which the others wait for it, from 0 to 1.
        late: how many seconds later than the others it arrives in each step.
        step: seconds that a step takes, or a repeating part of it.
        place: where its main thread is most often, in words; may be empty.
        differences: how it differs from the others, in words; may be empty.
    """

    generation: int
    rank: int
    share: float
    late: float
    step: float
    place: str
    differences: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecovered(Event):
    """All workers of this node are back in the session after a loss.

    Args:
        generation: the job's generation.
        replaced: the loss recovered from, numbered as in :class:`WorkerReplaced`.
        steps: how many steps are complete.
        repeated: whether a worker of this node repeats a step.
        formed: seconds from the loss until all were connected again; most of that is the new process's set-up.
        transferred: seconds that the transfer of the state took.
        bytes_received: bytes of state that this node's workers received.
    """

    generation: int
    replaced: int
    steps: int
    repeated: bool
    formed: float
    transferred: float
    bytes_received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalReceived(Event):
    """The supervisor was told to stop, or to pass a signal on.

    Args:
        name: the signal's name, such as ``SIGTERM``.
    """

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReported(Event):
    """Another node has reported something.

    Args:
        generation: the generation that the report is about.
        node_rank: the reporting node's rank.
        what: ``failed``, ``stopped``, ``leaving``, ``lost`` or ``waiting`` (to be admitted).
        reason: in words; may be empty.
    """

    generation: int
    node_rank: int
    what: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationEnded(Event):
    """All processes of a generation are gone from this node.

    Args:
        generation: its number.
        aim: what follows: ``succeed``, ``restart``, ``fail`` or ``signalled``.
        failed_ranks: workers of this node that failed, the one most to blame first.
    """

    generation: int
    aim: str
    failed_ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnded(Event):
    """The job has ended on this node.

    Args:
        run_id: the job's name.
        aim: how: ``succeed``, ``fail`` or ``signalled``.
        generation: the last one.
        restarts: how much of the restart budget was used.
        cause: the failure that ended it, in a few words, or empty.
    """

    run_id: str
    aim: str
    generation: int
    restarts: int
    cause: str


# -- rendezvous --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFormed(Event):
    """This node is a member of a round.

    Args:
        run_id: the job's name.
        generation: the round's generation.
        rank: this node's rank in the round.
        num_nodes: the number of members.
        seconds: how long this node waited for the round.
    """

    run_id: str
    generation: int
    rank: int
    num_nodes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost(Event):
    """A member of the round is gone.

    Args:
        run_id: the job's name.
        generation: the round's generation.
        rank: the lost member's rank.
        certain: whether its end was seen, and not only its silence.
        reason: in words.
    """

    run_id: str
    generation: int
    rank: int
    certain: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLost(Event):
    """The job's store can no longer be reached; the nodes look for it, or for its successor.

    Args:
        run_id: the job's name.
        reason: in words.
    """

    run_id: str
    reason: str


# -- rpc ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStarted(Event):
    """This process is a worker of an rpc group.

    Args:
        worker: its name.
        id: its id in the group.
    """

    worker: str
    id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStopped(Event):
    """This process is no longer a worker of its rpc group.

    Args:
        worker: its name.
    """

    worker: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberGone(Event):
    """Another worker of the rpc group has left, or was lost.

    Args:
        worker: its name.
        id: its id.
        reason: in words.
    """

    worker: str
    id: int
    reason: str


# -- join --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RanOut(Event):
    """This rank has no inputs left, and now matches the other ranks' steps.

    Args:
        rank: its rank in the Join's group.
        steps: how many steps of its own it made.
    """

    rank: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinEnded(Event):
    """All ranks have finished a loop.

    Args:
        rank: this rank in the Join's group.
        own_steps: steps in which this rank had inputs.
        steps: steps of the rank with the most.
    """

    rank: int
    own_steps: int
    steps: int

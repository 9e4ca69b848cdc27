"""What happens, on this node and on others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundFormed:
    """The nodes have agreed.

    Args:
        num_workers: how many to start on this node.
        generation: the job's generation.
        restarts: how much of the job's budget is used.
        ages: with a window, how many seconds ago each of these restarts was; one that leads to this round is not among them.
        serves: this node serves the job's store.
        nodes: how many are in the round.
        keepers: ranks of the nodes that keep their workers; the others' workers take over lost ones. None: all start afresh.
        bare: the keepers that have said that none of their workers has the session's state.
        is_keeper: this node is a keeper.
        is_bare: this node is one of ``bare``.
        replaced: how many workers were replaced since the session began, if any node keeps its own.
        not_kept: why all start afresh although some nodes held their workers, in words.
        relied_on: this node may be the only one that has what newcomers need to run the script's set-up.
        grows: this node's workers come in addition to those that are kept; they take nobody's place.
    """

    num_workers: int
    generation: int = 0
    restarts: int = 0
    serves: bool = False
    nodes: int = 1
    keepers: frozenset[int] | None = None
    is_keeper: bool = False
    replaced: int = 0
    ages: tuple[float, ...] = ()
    grows: bool = False
    bare: frozenset[int] = frozenset()
    is_bare: bool = False
    not_kept: str = ""
    relied_on: bool = False


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker has ended.

    Args:
        symptom: it only reports a lost peer, or the supervisor stopped it.
        again: it raised what a replaced worker had raised at the same step, and another one in its place would, too.
        refused: its session cannot be kept, nor could that of another worker in its place.
        record_lost: it is refused because the record of a set-up was lost with nodes.
    """

    index: int
    failed: bool
    symptom: bool = False
    again: bool = False
    refused: bool = False
    record_lost: bool = False


@dataclass(frozen=True, slots=True)
class SessionEntered:
    """A worker is in a session: it survives the loss of others.

    Args:
        sharded: no other worker has its state.
        resizes: it can go on with another number of ranks.
    """

    index: int
    sharded: bool = False
    resizes: bool = False


@dataclass(frozen=True, slots=True)
class SessionFixed:
    """A session of this node cannot go on with another number of ranks after all."""


@dataclass(frozen=True, slots=True)
class SessionMet:
    """A worker of this node has met all others in a session that goes on."""


@dataclass(frozen=True, slots=True)
class SessionLeft:
    """A worker's session has ended well."""

    index: int


@dataclass(frozen=True, slots=True)
class NodeInSession:
    """All workers of a node, which may be this one, are in a session; or, if not ``inside``, one of them has left it."""

    node_rank: int
    inside: bool


@dataclass(frozen=True, slots=True)
class LossTold:
    """Several nodes: a worker of a session is lost. All nodes are told of losses in the same order.

    Args:
        node_rank: the node that lost it.
        index: its local index, if it is this node's worker.
        survivors: whether other workers of that node are in the session.
    """

    node_rank: int
    index: int | None = None
    survivors: bool = True


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """Another node reported a failure in a generation."""

    node_rank: int
    generation: int
    symptom: bool = False


@dataclass(frozen=True, slots=True)
class JobHangs:
    """This node or another has found that nothing moves, and the job must not go on like that.

    Args:
        is_own: this node has found it.
        restarts: all workers are restarted while restarts are left; otherwise the job fails in any case.
    """

    is_own: bool
    restarts: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Another node is lost, or (``is_own``) the others consider this one lost. With fixed membership, it is not replaced."""

    node_rank: int
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The next round has formed without this node, which waits for a later one."""


@dataclass(frozen=True, slots=True)
class NotKept:
    """A node, which may be this one, has had to stop workers that the round counts on."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class PeerLeaves:
    """Another node leaves in an orderly way, for example because it is preempted."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class SessionExpected:
    """The script of this node's workers will probably enter a session."""


@dataclass(frozen=True, slots=True)
class AdmissionAsked:
    """A node asks to be admitted, and there is room. Repeated, and only on the node that tells the others."""


@dataclass(frozen=True, slots=True)
class NodeWaiting:
    """A node is to be admitted. All nodes are told so, including the one that tells them."""


@dataclass(frozen=True, slots=True)
class PeersDone:
    """All nodes have succeeded."""


@dataclass(frozen=True, slots=True)
class PeersStopped:
    """A user stopped another node: the job ends without a restart."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """``everywhere``: all nodes of an elastic job have received it."""

    number: int
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The time ``kill_at`` has come."""


@dataclass(frozen=True, slots=True)
class Swept:
    """No process of the generation is left."""


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """The job succeeded while this node waited for a round."""


@dataclass(frozen=True, slots=True)
class Broken:
    """This node cannot continue: it has lost its fork server."""

    reason: str


Event = (
    RoundFormed
    | WorkerEnded
    | SessionEntered
    | SessionFixed
    | SessionMet
    | SessionLeft
    | NodeInSession
    | LossTold
    | JobHangs
    | PeerFailed
    | PeerLost
    | LeftOut
    | NotKept
    | PeerLeaves
    | AdmissionAsked
    | NodeWaiting
    | SessionExpected
    | PeersDone
    | PeersStopped
    | SignalReceived
    | GraceOver
    | Swept
    | NotNeeded
    | Broken
)

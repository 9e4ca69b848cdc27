"""The supervisor's interface to the other nodes.

With one node it is :class:`LoneNode`; several nodes meet through a rendezvous (:mod:`rallypoint.launch.coordination.peers`). Both
look the same to the supervisor: requests return at once, their results are events, and a descriptor is readable while
events are waiting.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rallypoint.launch.output.failure import WorkerFailure
from rallypoint.launch.policy import Verdict
from rallypoint.rendezvous.kept_round import Held, Kept


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What this node contributes to a round.

    Args:
        num_workers: how many workers it will start.
        store_addr: the address of the workers' store, if this becomes node 0. Empty: the address at which the other
            nodes reach this one.
        store_port: its port.
        restarts: how much of the restart budget is used, as far as this node knows.
        ages: with a restart window, how many seconds ago these restarts were.
        verdict: what the end of the last generation means for the budget.
        held: workers of a session that this node keeps if the round allows it.
    """

    num_workers: int
    store_addr: str = ""
    store_port: int = 0
    restarts: int = 0
    ages: tuple[float, ...] = ()
    verdict: Verdict = Verdict.NONE
    held: Held | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundReady:
    """The nodes have agreed on a round.

    Args:
        node_rank: this node's rank.
        workers_of_nodes: number of workers of each node, by node rank.
        master_addr: host of the workers' store.
        master_port: its port.
        restarts: how much of the restart budget is used, as all nodes count it.
        ages: with a restart window, how many seconds ago these restarts were, without the newest, which led to this round.
        serves: this node serves the job's store.
        replaced: how many workers were replaced since the session began.
        kept: which nodes keep their workers; None: all start afresh.
        not_kept: why all start afresh although some nodes held their workers, in words.
        is_keeper: this node keeps its workers.
        network: variables that tell workers the interface to the other nodes.
        incident: a name that the round shares with no other round of any job.
    """

    generation: int
    node_rank: int
    workers_of_nodes: tuple[int, ...]
    master_addr: str
    master_port: int
    restarts: int = 0
    ages: tuple[float, ...] = ()
    serves: bool = False
    replaced: int = 0
    kept: Kept | None = None
    not_kept: str = ""
    is_keeper: bool = False
    network: Mapping[str, str] = field(default_factory=dict)
    incident: str = ""

    @property
    def store(self) -> str:
        """Where the workers' store is."""
        return f"{self.master_addr}:{self.master_port}"


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """``failed``, ``stopped``, ``leaving``, ``lost``, ``waiting`` (a node is to be admitted), ``asks for admission`` (the same,
    before the others are told; only on node 0).

    From or about a node, in a generation. ``all_done`` and ``reports`` arrive once all nodes have reported, ``told`` once all
    were told to stop. If many nodes fail or are stopped together, only the first to say so are heard. From all nodes, this one
    included: ``in session``, ``out of session``, ``worker lost`` (with ``survivors`` if other workers of the node are in the
    session) and ``standstill`` (with the ``progress`` of its ranks since a ``meeting``). ``not kept``: the node has had to stop
    workers that the round counts on. ``left out``: the next round has formed without this node. ``is_own``: the others have
    given up this node as lost. ``host``: the host of a lost node, if known.
    """

    what: str
    node_rank: int
    generation: int
    failures: tuple[WorkerFailure, ...] = ()
    reason: str = ""
    survivors: bool = True
    progress: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    meeting: int = 0
    is_own: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True)
class NodeAsked:
    """Another node has a question (:meth:`Coordination.ask_nodes`).

    Args:
        node_rank: the node that asks.
        generation: the one that both nodes are in.
        name: the question's name.
        question: what it asks.
    """

    node_rank: int
    generation: int
    name: str
    question: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Advice:
    """What members advise (:meth:`Coordination.advise`) while this node waits to take part. It may have any form."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """The job succeeded while this node waited to take part."""


@dataclass(frozen=True, slots=True)
class CoordinationFailed:
    """No further round can be formed; ``error`` says why."""

    error: Exception


@dataclass(frozen=True, slots=True)
class ServeStore:
    """This node is to serve the job's store, and needs a process for that (see :mod:`.server.job_store`).

    The receiver must close both.

    Args:
        listener: the bound socket.
        line: the new process's end of its connection to this one.
    """

    listener: socket.socket
    line: socket.socket


CoordinationEvent = (
    RoundReady | PeerEvent | NodeAsked | Advice | NotNeeded | CoordinationFailed | ServeStore
)


class Coordination(Protocol):
    """What the supervisor needs from the other nodes. Calls block only if they say so; :meth:`close` does, for a bounded time."""

    @property
    def serves_store(self) -> bool | None:
        """Whether this node is to serve the workers' store. None: ranks are not known yet."""

    @property
    def broken(self) -> bool:
        """Whether the other nodes can no longer be reached."""

    @property
    def arrived(self) -> int | None:
        """How many nodes have come to the round that is about to form, as far as this one knows; 0: it waits to be
        admitted to one; None: nothing is known yet."""

    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`take` has events."""

    def join(self, generation: int, facts: NodeFacts) -> None:
        """Meet the others. The event that follows is :class:`RoundReady`, :class:`NotNeeded` or :class:`CoordinationFailed`.

        ``generation`` is the expected one; in an elastic job, the round determines it.
        """

    def tell(
        self, what: str, generation: int, failures: tuple[WorkerFailure, ...], reason: str = ""
    ) -> None:
        """Tell the others ``failed``, ``stopped``, ``leaving``, ``done``, ``report`` (all failures of a generation),
        ``in session``, ``out of session``, or ``told``: this node was told to stop, and waits to hear whether the others were.

        Args:
            reason: why this node fails or leaves, if neither a worker nor a signal is the cause.
        """

    def tell_loss(self, generation: int, failure: WorkerFailure, *, survivors: bool) -> None:
        """A worker of a session is lost: all nodes get ``worker lost``, in the same order as other such losses."""

    def tell_standstill(
        self, generation: int, meeting: int, progress: Mapping[int, Mapping[int, int]]
    ) -> None:
        """The workers of this node's session stand still: all nodes get ``standstill``.

        Args:
            progress: rank -> group -> collectives that it has begun since the meeting.
        """

    def advise(self, body: Mapping[str, Any]) -> None:
        """Publish what nodes may do while they wait to take part: each gets :class:`Advice`. The latest one counts.

        Args:
            body: JSON values.
        """

    def ask_nodes(
        self, question: Mapping[str, Any], patience: float, nodes: frozenset[int] | None = None
    ) -> dict[int, dict[str, Any] | None]:
        """Ask the other nodes of the round; each gets a :class:`NodeAsked`. Blocks: call it in a thread of its own.

        Args:
            question: JSON values.
            patience: seconds.
            nodes: only these ranks, without this node's; None: all.
        Returns:
            By node rank: its answer; None if none arrived in time.
        Raises:
            RendezvousError: the store cannot be reached.
        """

    def answer(self, asked: NodeAsked, body: Mapping[str, Any]) -> None:
        """Answer another node's question. Blocks: call it in a thread of its own.

        Raises:
            RendezvousError: the store cannot be reached.
            ValueError: the answer is too long.
        """

    def reports(self) -> tuple[WorkerFailure, ...]:
        """The failures that all nodes have reported (``report``), the root cause first."""

    def take(self) -> list[CoordinationEvent]:
        """The events since the last call."""

    def close(self, ending: str, if_last: str = "") -> None:
        """Leave.

        Args:
            ending: why there will be no further round, for nodes that wait for one; empty if there may be.
            if_last: the same, if all other nodes have already left.
        """


class LoneNode:
    """A single node: its rounds are always complete."""

    serves_store = True
    broken = False
    arrived = None

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._events: list[CoordinationEvent] = []

    def fileno(self) -> int:
        return self._read

    def join(self, generation: int, facts: NodeFacts) -> None:
        charged = facts.verdict is not Verdict.NONE
        self._events.append(
            RoundReady(
                generation=generation,
                node_rank=0,
                workers_of_nodes=(facts.num_workers,),
                master_addr=facts.store_addr,
                master_port=facts.store_port,
                restarts=facts.restarts + charged,
                ages=facts.ages,
                incident=uuid.uuid4().hex[:8],
            )
        )
        os.write(self._write, b"x")

    def tell(
        self, what: str, generation: int, failures: tuple[WorkerFailure, ...], reason: str = ""
    ) -> None:
        pass

    def tell_loss(self, generation: int, failure: WorkerFailure, *, survivors: bool) -> None:
        pass

    def tell_standstill(
        self, generation: int, meeting: int, progress: Mapping[int, Mapping[int, int]]
    ) -> None:
        pass

    def advise(self, body: Mapping[str, Any]) -> None:
        pass

    def ask_nodes(
        self, question: Mapping[str, Any], patience: float, nodes: frozenset[int] | None = None
    ) -> dict[int, dict[str, Any] | None]:
        return {}

    def answer(self, asked: NodeAsked, body: Mapping[str, Any]) -> None:
        pass

    def reports(self) -> tuple[WorkerFailure, ...]:
        return ()

    def take(self) -> list[CoordinationEvent]:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        events, self._events = self._events, []
        return events

    def close(self, ending: str, if_last: str = "") -> None:
        os.close(self._read)
        os.close(self._write)

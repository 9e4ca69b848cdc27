"""Fixed membership: a round is complete when all N nodes are there.

Each node writes one record under its own key; the leader, which serves the store, reads all of them
and publishes the plan; the others wait for the plan in one blocking wait. That is a constant number
of store operations for each node and N for the leader, in every round.

Ranks are given beforehand (``--node-rank``) or assigned by the leader (:mod:`.ordering`). Every key
holds the generation, so nothing of an earlier round can be read in a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, RendezvousError, RendezvousTimeout

from .api import Member, RendezvousHandler, RendezvousInfo
from .ordering import assign_node_ranks
from .record_store import RecordStore
from .records import Codec
from .store import Store


# How long the leader waits in silence before it says for whom.
PATIENCE = 3.0


class StaticRendezvous(RendezvousHandler):
    """One node of a job with a fixed number of nodes.

    Args:
        store: the job's store.
        leader: whether this node serves it.
        run_id: the job's name; jobs with different names do not see each other.
        num_nodes: how many nodes there are.
        node_rank: this node's rank, or None to have one assigned.
        host: this node's name, for people.
        node_id: tells this node from all others; the same in every round.
        join_timeout: seconds to wait for the others, in each round.
        say: prints a line for the person at the terminal.
        secret: what all nodes of the job know; records that do not prove it count as not there.
    """

    def __init__(
        self,
        store: Store,
        *,
        leader: bool,
        run_id: str,
        num_nodes: int,
        node_rank: int | None,
        host: str,
        node_id: str,
        join_timeout: float,
        say: Callable[[str], None],
        secret: bytes | None = None,
    ) -> None:
        self._store = store
        self._records = RecordStore(store, Codec(run_id, secret))
        self._leader = leader
        self._run_id = run_id
        self._num_nodes = num_nodes
        self._node_rank = node_rank
        self._host = host
        self._node_id = node_id
        self._join_timeout = join_timeout
        self._say = say
        self._generation = 0
        self._facts: Mapping[str, Any] = {}

    def get_backend(self) -> str:
        return "static"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return self._records.peek("closed") is not None

    def set_closed(self) -> None:
        self._records.write("closed", {})

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def bring(self, generation: int, facts: Mapping[str, Any]) -> None:
        """Set what the next round is about.

        Args:
            generation: its number.
            facts: what this node tells the others, as JSON.
        """
        self._generation = generation
        self._facts = facts

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = Deadline(self._join_timeout)
        index = self._register()
        plan = self._lead(deadline, index) if self._leader else self._follow(deadline)
        members = [
            Member(rank=rank, host=record["host"], facts=record["facts"])
            for rank, record in enumerate(plan)
        ]
        own = [rank for rank, record in enumerate(plan) if record["id"] == self._node_id]
        if len(own) != 1:
            raise RendezvousError(
                f"round {self._generation} of {self._run_id!r} was formed without this node: the job"
                f" has its {self._num_nodes} nodes already"
            )
        return RendezvousInfo(
            self._store, own[0], len(members), members=members, generation=self._generation
        )

    def _node_key(self, index: int) -> str:
        return f"{self._generation}/node/{index}"

    def _register(self) -> int:
        record = {"id": self._node_id, "host": self._host, "facts": self._facts}
        index = self._node_rank
        if index is None:
            index = self._records.increment(f"{self._generation}/arrivals") - 1
            if index >= self._num_nodes:
                raise RendezvousError(
                    f"the job {self._run_id!r} has its {self._num_nodes} nodes already;"
                    " give another --rdzv-id, or a larger --nnodes on all nodes"
                )
        there = self._records.claim(self._node_key(index), record)
        if there["id"] != self._node_id:
            raise ConfigError(
                "--node-rank",
                str(index),
                f"host {there['host']} has this rank in the job {self._run_id!r}",
                "each node needs its own, and each job its own --rdzv-id or port",
            )
        return index

    def _lead(self, deadline: Deadline, own: int) -> list[dict[str, Any]]:
        records: dict[int, dict[str, Any]] = {}
        told = False
        for index in range(self._num_nodes):
            while index not in records:
                left = deadline.remaining() or 0.0
                patience = left if told else min(PATIENCE, left)
                record = self._records.wait(self._node_key(index), patience)
                if record is not None:
                    records[index] = record
                else:
                    if deadline.expired():
                        raise self._timeout()
                    told = True
                    arrived = len(self._arrived())
                    self._say(
                        f"{arrived} of {self._num_nodes} nodes are here; waiting for the others for"
                        f" up to {deadline.remaining():.0f} s"
                    )
        order = range(self._num_nodes)
        if self._node_rank is None:
            hosts = [records[index]["host"] for index in order]
            plan = [records[index] for index in assign_node_ranks(hosts, own)]
        else:
            plan = [records[index] for index in order]
        self._records.claim(f"{self._generation}/plan", {"nodes": plan})
        return plan

    def _follow(self, deadline: Deadline) -> list[dict[str, Any]]:
        body = self._records.wait(f"{self._generation}/plan", deadline.remaining() or 0.0)
        if body is None:
            raise self._timeout()
        plan: list[dict[str, Any]] = body["nodes"]
        return plan

    def _arrived(self) -> dict[int, str]:
        keys = [self._node_key(index) for index in range(self._num_nodes)]
        return {
            index: record["host"]
            for index, record in enumerate(self._records.look(keys))
            if record is not None
        }

    def _timeout(self) -> RendezvousTimeout:
        arrived = self._arrived()
        missing: tuple[int, ...] = ()
        if self._node_rank is not None:
            missing = tuple(index for index in range(self._num_nodes) if index not in arrived)
        names = tuple(f"node {index} ({host})" for index, host in arrived.items())
        return RendezvousTimeout(self._join_timeout, self._num_nodes, names, missing)

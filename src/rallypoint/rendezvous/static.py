"""Fixed membership: a round is complete when all N nodes are there.

Each node writes one record under its own key; the leader, which serves the store, reads all of them
and publishes the plan; the others wait for the plan in one blocking wait. That is a constant number
of store operations for each node and N for the leader, in every round.

Ranks are given beforehand (``--node-rank``) or assigned by the leader (:mod:`.ordering`). Every key
holds the generation, so nothing of an earlier round can be read in a later one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, RendezvousError, RendezvousTimeout

from .api import Member, RendezvousHandler, RendezvousInfo
from .ordering import assign_node_ranks
from .store import Store


RECORD_VERSION = 1
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
    ) -> None:
        self._store = store
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
        return self._store.exists(self._key("closed"))

    def set_closed(self) -> None:
        self._store.set(self._key("closed"), b"1")

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

    def _key(self, name: str) -> str:
        return f"rally/{self._run_id}/{name}"

    def _node_key(self, index: int) -> str:
        return self._key(f"{self._generation}/node/{index}")

    def _register(self) -> int:
        record = {"version": RECORD_VERSION, "id": self._node_id, "host": self._host}
        data = json.dumps({**record, "facts": self._facts}).encode()
        index = self._node_rank
        if index is None:
            index = self._store.add(self._key(f"{self._generation}/arrivals"), 1) - 1
            if index >= self._num_nodes:
                raise RendezvousError(
                    f"the job {self._run_id!r} has its {self._num_nodes} nodes already;"
                    " give another --rdzv-id, or a larger --nnodes on all nodes"
                )
        there = _read(self._store.put_new(self._node_key(index), data))
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
                try:
                    patience = left if told else min(PATIENCE, left)
                    records[index] = _read(self._store.get(self._node_key(index), patience))
                except TimeoutError:
                    if deadline.expired():
                        raise self._timeout() from None
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
        self._store.set(self._key(f"{self._generation}/plan"), json.dumps(plan).encode())
        return plan

    def _follow(self, deadline: Deadline) -> list[dict[str, Any]]:
        try:
            data = self._store.get(
                self._key(f"{self._generation}/plan"), deadline.remaining() or 0.0
            )
        except TimeoutError:
            raise self._timeout() from None
        plan: list[dict[str, Any]] = json.loads(data)
        return plan

    def _arrived(self) -> dict[int, str]:
        found = {}
        for index in range(self._num_nodes):
            if self._store.exists(self._node_key(index)):
                found[index] = _read(self._store.get(self._node_key(index), 1.0))["host"]
        return found

    def _timeout(self) -> RendezvousTimeout:
        arrived = self._arrived()
        missing: tuple[int, ...] = ()
        if self._node_rank is not None:
            missing = tuple(index for index in range(self._num_nodes) if index not in arrived)
        names = tuple(f"node {index} ({host})" for index, host in arrived.items())
        return RendezvousTimeout(self._join_timeout, self._num_nodes, names, missing)


def _read(data: bytes) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(data)
    if record.get("version") != RECORD_VERSION:
        raise RendezvousError(
            f"a node speaks version {record.get('version')} of the rendezvous, this one"
            f" {RECORD_VERSION}: install the same version of rallypoint on all nodes"
        )
    return record

"""What a cluster says about itself, and about this process. Pure.

A cluster is one file with a :class:`Cluster`, named in a table (:mod:`.detection`) or in an entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from .variables import ClusterVariables


class ClusterLevel(IntEnum):
    """How deep inside others a launcher runs. The innermost one decides, so lower levels are asked first."""

    LAUNCHER = 1
    """An ``mpirun``: it may be started inside any of the others."""
    SCHEDULER = 2
    """A batch system's own launcher, such as ``srun``: its tasks may run an ``mpirun``."""
    PLATFORM = 3
    """What starts pods or machines, such as Kubernetes: they may contain any of the above."""
    VARIABLES = 4
    """Plain variables that anybody may have set. Asked as well if a launcher has started a single task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A kind of cluster, MPI or platform that starts several supervisors.

    Args:
        name: its name, for messages.
        level: where its tasks stand among those of other launchers.
        detect: whether it started this process as one of its tasks; a shell or script that merely runs inside an
            allocation does not count. Must be cheap.
        place: if so, this process's place in the job; None if there is a single task. Raises ConfigError, which names
            variable and value, if the variables cannot be right.
    """

    name: str
    level: ClusterLevel
    detect: Callable[[ClusterVariables], bool]
    place: Callable[[ClusterVariables], Placement | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What the cluster says about this supervisor.

    Two shapes of jobs are common. With one task per machine each supervisor starts
    ``--nproc-per-node`` workers. With several tasks per machine (``srun --ntasks-per-node=4``,
    ``mpirun -np 8``) the cluster has already made one process per worker, and each supervisor starts
    a single worker: see :attr:`one_worker_per_task`.

    Args:
        source: the cluster, for messages: ``"Slurm job 1234"``, ``"Open MPI"``.
        num_nodes: how many supervisors the job has: the number of the cluster's tasks.
        node_rank: which of them this one is, from 0.
        master_addr: the host of node 0.
        master_port: a port there, the same in every task.
        run_id: a name all tasks of this start share, if the cluster gives one.
        local_rank: this task's number among those on its machine.
        tasks_per_machine: how many tasks there are on *this* machine; machines may differ.
        machine_rank: this machine's number among the machines.
        num_machines: how many machines there are.
        machines_known: False where the launcher tells only how many tasks share this machine:
            ``machine_rank`` and ``num_machines`` then assume that all machines have as many.
        variables: the environment variables that decided.
    """

    source: str
    num_nodes: int
    node_rank: int
    master_addr: str | None
    master_port: int | None
    run_id: str | None
    local_rank: int
    tasks_per_machine: int
    machine_rank: int
    num_machines: int
    machines_known: bool = True
    variables: tuple[str, ...] = ()

    @classmethod
    def one_per_machine(
        cls,
        *,
        source: str,
        num_nodes: int,
        node_rank: int,
        master_addr: str | None,
        master_port: int | None,
        run_id: str | None = None,
        variables: tuple[str, ...] = (),
    ) -> Self:
        """A place in a job with one task per machine or pod.

        Args:
            source, num_nodes, node_rank, master_addr, master_port, run_id, variables: as for the class.
        Returns:
            The placement.
        """
        return cls(
            source=source,
            num_nodes=num_nodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            run_id=run_id,
            local_rank=0,
            tasks_per_machine=1,
            machine_rank=node_rank,
            num_machines=num_nodes,
            variables=variables,
        )

    @property
    def one_worker_per_task(self) -> bool:
        """Whether the cluster has started a task per worker, so that each supervisor starts one worker.

        A property of the whole job: a task that is alone on its machine also starts one worker if another
        machine has several tasks.
        """
        return self.num_nodes > self.num_machines

    def describe(self) -> str:
        """One line for the user: what was found, and where.

        Returns:
            Such as ``Slurm job 7: node 1 of 4, master node01:15007 (from SLURM_PROCID, …)``.
        """
        text = f"{self.source}: node {self.node_rank} of {self.num_nodes}"
        if self.one_worker_per_task:
            text += f" (task {self.local_rank} of {self.tasks_per_machine} on its machine)"
        if self.master_addr is not None:
            host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
            text += f", master {host}:{self.master_port}"
        if self.variables:
            text += f" (from {', '.join(self.variables)})"
        return text

"""Flux: tasks of a job that flux run or flux submit has started. Pure.

The shell of flux alloc and the script of flux batch are not tasks: Flux unsets the variables there. Flux names no
hosts, and sets PMI_RANK and PMI_SIZE for each task: see [Note: the innermost launcher wins].

Source: flux-environment(7), flux-hostlist(1),
https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
"""

from __future__ import annotations

import re

from rallypoint.errors import ConfigError

from .cluster import Cluster, ClusterLevel, Placement
from .variables import (
    FLAGS_HINT,
    LOOPBACK,
    ClusterVariables,
    Text,
    check_below,
    names,
    own_address,
    own_port,
    port_from_name,
)


def is_task(variables: ClusterVariables) -> bool:
    """Whether Flux started this process as one of a job's tasks."""
    return variables.text("FLUX_TASK_RANK") is not None


def gave_pmi(variables: ClusterVariables) -> bool:
    """Whether PMI's variables are those of the Flux task."""
    if variables.text("PMI_SIZE") is None:
        return True  # a stray PMI_RANK contradicts nothing
    pmi = variables.need("PMI_RANK").value, variables.need("PMI_SIZE").value
    return pmi == (variables.need("FLUX_TASK_RANK").value, variables.need("FLUX_JOB_SIZE").value)


def _place(variables: ClusterVariables) -> Placement | None:
    rank, size = variables.need("FLUX_TASK_RANK"), variables.need("FLUX_JOB_SIZE")
    check_below(rank, size, FLAGS_HINT)
    if size.value == 1:
        return None
    machines = variables.need("FLUX_JOB_NNODES")
    if not 0 < machines.value <= size.value:
        problem = f"expected 1 to {size.value}, which is {size.name}"
        raise ConfigError(machines.name, str(machines.value), problem, FLAGS_HINT)
    local_rank = variables.need("FLUX_TASK_LOCAL_ID")
    # At least one task is on each of the other machines.
    most_here = size.value - machines.value + 1
    if local_rank.value >= most_here:
        problem = (
            f"expected at most {most_here - 1}: {size.value} tasks on {machines.value} machines"
        )
        raise ConfigError(local_rank.name, str(local_rank.value), problem, FLAGS_HINT)

    address = own_address(variables, machines.value)
    if address is None and machines.value == 1:
        address = Text(machines.name, LOOPBACK)
    if address is None:
        raise ConfigError(
            "MASTER_ADDR",
            None,
            "not set, and Flux does not tell its tasks on which machine rank 0 runs",
            "in each task: MASTER_ADDR=$(flux hostlist --nth=0) rally run …",
        )
    port = own_port(variables)
    job = variables.text("FLUX_JOB_ID")
    # Flux writes `ƒ3ETxsR9H`, or `f3ETxsR9H`, depending on the terminal. It becomes a folder name.
    name = None if job is None else "f" + re.sub(r"[^A-Za-z0-9]", "", job.text).removeprefix("f")
    here, machine = _suppose_machine(rank.value, size.value, local_rank.value, machines.value)
    return Placement(
        source="Flux" if name is None else f"Flux job {name}",
        num_nodes=size.value,
        node_rank=rank.value,
        master_addr=address.text,
        master_port=port_from_name(name or "flux") if port is None else port.value,
        run_id=name,
        local_rank=local_rank.value,
        tasks_per_machine=here,
        machine_rank=machine,
        num_machines=machines.value,
        machines_known=machines.value in (1, size.value),
        variables=names(rank, size, address, port or job),
    )


def _suppose_machine(rank: int, size: int, local_rank: int, machines: int) -> tuple[int, int]:
    """The number of tasks on this machine, and its rank, if Flux has spread the tasks evenly."""
    fewest, larger = divmod(size, machines)
    # In blocks, the machines with one more task come first.
    first = larger * (fewest + 1)
    if rank < first:
        machine, local, here = rank // (fewest + 1), rank % (fewest + 1), fewest + 1
    else:
        machine, local, here = larger + (rank - first) // fewest, (rank - first) % fewest, fewest
    if local != local_rank and rank // machines == local_rank:  # dealt out one by one
        machine = rank % machines
        here = fewest + (machine < larger)
    return max(here, local_rank + 1), machine


FLUX = Cluster(name="Flux", level=ClusterLevel.SCHEDULER, detect=is_task, place=_place)

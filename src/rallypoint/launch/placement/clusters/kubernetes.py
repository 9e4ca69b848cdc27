"""Kubernetes: pods of an indexed Job, also in a JobSet. Pure.

[Note: an index is not yet a job of several nodes]
Kubernetes gives each pod its index, and no more: neither the number of pods nor a host. Most indexed Jobs are pods that
work alone. So the index counts only beside MASTER_ADDR and WORLD_SIZE (the number of pods) in the pod's template; the
index then adds what the template cannot say. If the template sets RANK, the plain variables are complete, and decide.

A JobSet with several Jobs repeats the indexes in each of them: RANK must be set there.

Source: Kubernetes, "Indexed Job for parallel processing with static work assignment" and "Job with pod-to-pod
communication", https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static/,
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
"""

from __future__ import annotations

from rallypoint.rendezvous.defaults import MASTER_PORT

from .cluster import Cluster, ClusterLevel, Placement
from .variables import ClusterVariables, check_below, names, own_address, own_port


_INDEX = "JOB_COMPLETION_INDEX"


def _detect(variables: ClusterVariables) -> bool:
    needed = (_INDEX, "MASTER_ADDR", "WORLD_SIZE")
    complete = all(variables.text(name) is not None for name in needed)
    return complete and variables.text("RANK", "LOCAL_RANK") is None


def _place(variables: ClusterVariables) -> Placement | None:
    index, size = variables.need(_INDEX), variables.need("WORLD_SIZE")
    check_below(index, size, "WORLD_SIZE is the number of pods here, not of workers")
    if size.value == 1:
        return None
    address = own_address(variables, size.value)
    port = own_port(variables)
    return Placement.one_per_machine(
        source="Kubernetes Job",
        num_nodes=size.value,
        node_rank=index.value,
        master_addr=None if address is None else address.text,
        master_port=MASTER_PORT if port is None else port.value,
        variables=names(index, size, address, port),
    )


KUBERNETES = Cluster(
    name="Kubernetes Job", level=ClusterLevel.PLATFORM, detect=_detect, place=_place
)

"""A third party's cluster: pods find their place in environment variables. It uses only rallypoint's public names."""

from rallypoint.errors import ConfigError
from rallypoint.launch import Cluster, ClusterLevel, ClusterVariables, Placement


def place(variables: ClusterVariables) -> Placement | None:
    pod, pods = variables.need("SKYNET_POD"), variables.need("SKYNET_PODS")
    if pods.value == 1:
        return None
    if pod.value >= pods.value:
        raise ConfigError(pod.name, pod.value, f"expected 0 to {pods.value - 1}")
    job = variables.text("SKYNET_JOB")
    return Placement.one_per_machine(
        source="Skynet" if job is None else f"Skynet job {job.text}",
        num_nodes=pods.value,
        node_rank=pod.value,
        master_addr="127.0.0.1",
        master_port=variables.need("SKYNET_PORT").value,
        run_id=None if job is None else job.text,
        variables=(pod.name, pods.name),
    )


SKYNET = Cluster(
    name="Skynet",
    level=ClusterLevel.PLATFORM,
    detect=lambda variables: variables.text("SKYNET_POD") is not None,
    place=place,
)

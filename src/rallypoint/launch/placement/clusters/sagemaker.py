"""Amazon SageMaker: hosts of a training job. Pure.

Source: SageMaker Training Toolkit, ENVIRONMENT_VARIABLES.md,
https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
"""

from __future__ import annotations

import json

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.defaults import MASTER_PORT

from .cluster import Cluster, ClusterLevel, Placement
from .variables import FLAGS_HINT, ClusterVariables, Text, names, own_address, own_port


def _detect(variables: ClusterVariables) -> bool:
    return None not in (variables.text("SM_HOSTS"), variables.text("SM_CURRENT_HOST"))


def _place(variables: ClusterVariables) -> Placement | None:
    listed, here = variables.text("SM_HOSTS"), variables.text("SM_CURRENT_HOST")
    if listed is None or here is None:
        return None
    hosts = _hosts(listed)
    if here.text not in hosts:
        problem = f"not one of {listed.name}, which is {listed.text}"
        raise ConfigError(here.name, here.text, problem, FLAGS_HINT)
    if len(hosts) == 1:
        return None
    address = own_address(variables, len(hosts)) or Text(listed.name, hosts[0])
    port = own_port(variables)
    return Placement.one_per_machine(
        source="SageMaker",
        num_nodes=len(hosts),
        node_rank=hosts.index(here.text),
        master_addr=address.text,
        master_port=MASTER_PORT if port is None else port.value,
        variables=names(here, listed, address, port),
    )


def _hosts(listed: Text) -> list[str]:
    """The hosts, in the same order on all of them: the toolkit documents an order for resourceconfig.json only."""
    try:
        hosts = json.loads(listed.text)
    except (ValueError, RecursionError):
        hosts = None
    valid = isinstance(hosts, list) and all(isinstance(host, str) and host for host in hosts)
    if not valid or not hosts or len(set(hosts)) != len(hosts):
        raise ConfigError(
            listed.name, listed.text, 'expected a JSON list of hosts such as ["algo-1","algo-2"]'
        )
    return sorted(hosts)


SAGEMAKER = Cluster(name="SageMaker", level=ClusterLevel.PLATFORM, detect=_detect, place=_place)

"""What all MPIs have in common: ranks on a machine, and no word about where rank 0 runs. Pure.

[Note: which job is this]
Two jobs may run side by side, on one machine, in one allocation: two steps of srun, two mpiexecs. So the name of a job and
its port are derived from something unique to its launcher. Slurm numbers its steps, PMIx names what it starts. Hydra
tells its tasks nothing of the kind, but all its proxies, the tasks' parents, have on their command line the port at
which their mpiexec listens: `hydra_pmi_proxy --control-port login1:34415 …`.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Sequence

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.defaults import MASTER_PORT

from .cluster import Placement
from .nodelist import first_host
from .variables import (
    FLAGS_HINT,
    LOOPBACK,
    ClusterVariables,
    Number,
    Text,
    check_below,
    names,
    own_address,
    own_port,
    port_from,
)


def hydra(ancestors: Sequence[Sequence[str]]) -> Text | None:
    """Where the mpiexec that started this process listens: [Note: which job is this]."""
    for words in ancestors:
        if not words or "proxy" not in words[0].rpartition("/")[2]:
            continue
        flags = dict(itertools.pairwise(words))
        if "--control-port" in flags:  # MPICH
            return Text("--control-port of its proxy", flags["--control-port"])
        if "--upstream-host" in flags and "--upstream-port" in flags:  # Intel MPI
            place = f"{flags['--upstream-host']}:{flags['--upstream-port']}"
            return Text("--upstream-port of its proxy", place)
    return None


def place_in_mpi(
    variables: ClusterVariables,
    source: str,
    rank: Number,
    size: Number,
    local_names: tuple[tuple[str, ...], tuple[str, ...]],
    job: Text | None,
) -> Placement | None:
    check_below(rank, size, FLAGS_HINT)
    if size.value == 1:
        return None
    local_rank = variables.need(*local_names[0])
    local_size = variables.need(*local_names[1])
    check_below(local_rank, local_size, FLAGS_HINT)
    if local_size.value > size.value:
        raise ConfigError(
            local_size.name,
            str(local_size.value),
            f"more tasks on this machine than in the whole job ({size.name} is {size.value})",
            FLAGS_HINT,
        )
    one_machine = local_size.value == size.value
    address = own_address(variables, 1 if one_machine else 2)
    if address is None:
        # Not mpirun's address where all are on one machine: 127.0.0.1 works without any network.
        address = (
            Text(local_size.name, LOOPBACK)
            if one_machine
            else _mpi_master(variables, source, rank.value)
        )
    port = own_port(variables)
    derived_port = MASTER_PORT if job is None else port_from(job.text)
    machine_rank, num_machines = _suppose_machines(
        rank.value, size.value, local_rank.value, local_size.value
    )
    return Placement(
        source=source,
        num_nodes=size.value,
        node_rank=rank.value,
        master_addr=address.text,
        master_port=derived_port if port is None else port.value,
        # It becomes a folder name: PMIx writes `prterun-login1-4711@1`, PBS `1234[7].server`.
        run_id=None if job is None else re.sub(r"[^\w.-]+", "-", job.text),
        local_rank=local_rank.value,
        tasks_per_machine=local_size.value,
        machine_rank=machine_rank,
        num_machines=num_machines,
        machines_known=one_machine,
        variables=names(rank, size, address, port or job),
    )


def _mpi_master(variables: ClusterVariables, source: str, rank: int) -> Text:
    """The host of rank 0, which no MPI tells outright.

    Two things come close: the address of mpirun's own process (Open MPI up to 4), and the first host
    of a surrounding Slurm job. Both hold rank 0 unless the user placed ranks by hand or started
    mpirun on a machine without tasks (a login node, a launcher pod). The other ranks cannot see that, but
    rank 0 can, and its error makes mpirun end them all.

    PMIX_SERVER_URI* is no help: it is the address of the task's *own* machine's daemon.
    """
    mpirun = variables.text("OMPI_MCA_orte_hnp_uri")
    address = None if mpirun is None else _address_in_uri(mpirun.text)
    if mpirun is not None and address is not None:
        daemon = variables.text("OMPI_MCA_orte_local_daemon_uri")
        if rank == 0 and daemon is not None and daemon.text != mpirun.text:
            raise _no_master(source, "mpirun runs on another machine than rank 0")
        return Text(mpirun.name, address)
    hosts = variables.text("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts is not None:
        first = first_host(hosts.text, variable=hosts.name)
        here = variables.text("SLURMD_NODENAME")
        if rank == 0 and here is not None and here.text != first:
            raise _no_master(
                source, f"rank 0 is on {here.text}, not on the job's first host {first}"
            )
        return Text(hosts.name, first)
    raise _no_master(source, f"{source} does not tell its tasks on which machine rank 0 runs")


def _no_master(source: str, why: str) -> ConfigError:
    flag = "-x MASTER_ADDR=HOST" if source == "Open MPI" else "-genv MASTER_ADDR HOST"
    if source == "MVAPICH2":
        flag = "MASTER_ADDR=HOST"
    return ConfigError(
        "MASTER_ADDR", None, f"not set, and {why}", f"name the host of rank 0: mpirun {flag} …"
    )


def _address_in_uri(uri: str) -> str | None:
    """An address other machines can reach, from ``4711.0;tcp://10.0.0.1,192.168.1.1:40001``.

    Open MPI lists each interface, either comma-separated or as one URI each.
    """
    usable: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for match in re.finditer(r"tcp[46]?://([^;]+):[0-9]+", uri):
        for text in match[1].strip("[]").split(","):
            try:
                address = ipaddress.ip_address(text.strip())
            except ValueError:
                return None  # not the format we know: better no answer than half of one
            if not (address.is_loopback or address.is_link_local or address.is_unspecified):
                usable.append(address)
    usable.sort(key=lambda address: address.version)  # stable: mpirun's order within each family
    return str(usable[0]) if usable else None


def _suppose_machines(rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """This machine's rank and the number of machines, if all have as many tasks as this one."""
    num_machines = -(-size // local_size)
    if rank % local_size != local_rank and rank // num_machines == local_rank:
        return rank % num_machines, num_machines  # dealt out one by one (--map-by node)
    return min(rank // local_size, num_machines - 1), num_machines

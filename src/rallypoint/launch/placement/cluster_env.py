"""Where this supervisor stands in the job, read from what the cluster put in the environment.

Sans-I/O: a mapping and command lines go in, a :class:`Placement` (or None) comes out. Flags win over all of this,
so nothing here is a guess that a user cannot overrule.

    found                                   taken for                       hosts come from
    OMPI_COMM_WORLD_RANK                    Open MPI                        MASTER_ADDR, mpirun's address, Slurm
    MV2_COMM_WORLD_RANK                     MVAPICH2                        MASTER_ADDR, Slurm
    SLURM_PROCID and a step of srun         Slurm                           the step's node list
    PMI_RANK                                MPICH, Intel MPI                MASTER_ADDR, Slurm
    MASTER_ADDR, RANK and WORLD_SIZE        Kubeflow's PyTorchJob and kin   MASTER_ADDR

[Note: the innermost launcher wins]
Launchers nest: `sbatch` runs a script, the script runs `mpirun`, and Open MPI's `mpirun` starts its
own daemons with `srun`, one per machine. A task then sees both OMPI_COMM_WORLD_RANK and the
SLURM_PROCID of *the daemon above it*; tasks on mpirun's own machine see no step at all. Only the
MPI variables are about the task, so OMPI_* and MV2_*, which nothing but mpirun sets, come first.
PMI_RANK and PMI_SIZE are different: `srun --mpi=pmi2` sets them too. If they say what the Slurm
step says, then srun set them and Slurm is taken, as it also knows the hosts; if they differ, a
Hydra `mpiexec` below srun did, and they are about the task while SLURM_PROCID is about its proxy.

[Note: which job is this]
Two jobs may run side by side, on one machine, in one allocation: two steps of srun, two mpiexecs. The name of a job
and its port come from what is the launcher's own, so that they never meet. Slurm numbers its steps, PMIx names what it
starts. Hydra tells its tasks nothing of the kind, but all its proxies, the tasks' parents, are called with the port at
which their mpiexec listens: `hydra_pmi_proxy --control-port login1:34415 …`.

[Note: a step or just a shell]
Slurm sets SLURM_NTASKS, and often SLURM_PROCID=0, in places where exactly one process runs: the
script of `sbatch`, the shell of `salloc`. Taking part in a job of SLURM_NTASKS there would mean to
wait for tasks nobody starts. What tells them apart is SLURM_STEP_ID: absent in the script, and a
reserved number (0xfffffff0 and above) in the batch, extern and interactive steps. SLURM_JOB_NAME
alone tells nothing: it stays "interactive" in every srun typed into an salloc shell.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.errors import ConfigError


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


DEFAULT_PORT = 29500  # torchrun's, and what every example on the web uses

# 15000 + the last four digits of the job's number: what Slurm users know from other launchers, and
# below the range (32768 and up) from which Linux hands out ports for outgoing connections.
_FIRST_DERIVED_PORT = 15000

_LOOPBACK = "127.0.0.1"

# slurm.h, SLURM_MAX_NORMAL_STEP_ID: from here on it is the batch, extern, interactive … step.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_RESERVED_STEP_NAMES = frozenset({"batch", "extern", "interactive", "pending"})
_SHELLS = frozenset({"bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"})

# A rally (or torchrun) worker that itself calls `rally run` wants a job of its own: its cluster
# variables describe the job it is already part of.
_INSIDE_A_WORKER = ("TORCHELASTIC_RUN_ID", "RALLY_GENERATION")
_FLAG_DEFAULTS = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")

# For jobs of MPI that another launcher than Hydra has started: HPE's PALS numbers them. Then the batch
# system's number of the job, in which there may be several. Only Hydra hands the caller's whole environment to every
# task; the other mpiruns may leave these on one machine and not on the next.
_JOB_IDS = ("PALS_APID", "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID")

# A node list longer than this is a typing mistake (`node[0-99999999]`), not a cluster.
_MAX_HOSTS = 1 << 20

_FLAGS_HINT = "or say it yourself: --nnodes, --node-rank and --master-addr"
_HETEROGENEOUS_HINT = (
    "a step over several components of a heterogeneous job is not understood;"
    " pass --nnodes, --node-rank and --master-addr"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What the cluster says about this supervisor.

    Two shapes of jobs are common. With one task per machine each supervisor starts
    ``--nproc-per-node`` workers. With several tasks per machine (``srun --ntasks-per-node=4``,
    ``mpirun -np 8``) the cluster has already made one process per worker, and each supervisor starts
    a single worker: see :attr:`one_worker_per_task`.

    Args:
        source: who said so, for people: ``"Slurm job 1234"``, ``"Open MPI"``.
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
            ``machine_rank`` and ``num_machines`` then suppose that all machines have as many.
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

    @property
    def one_worker_per_task(self) -> bool:
        """True if the cluster made a task per worker, so that each supervisor starts one.

        A property of the whole job: a task alone on its machine starts one worker as well if another
        machine has several tasks.
        """
        return self.num_nodes > self.num_machines

    def describe(self) -> str:
        """One line for the person who started the job: what was found, and where."""
        text = f"{self.source}: node {self.node_rank} of {self.num_nodes}"
        if self.one_worker_per_task:
            text += f" (task {self.local_rank} of {self.tasks_per_machine} on its machine)"
        if self.master_addr is not None:
            host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
            text += f", master {host}:{self.master_port}"
        if self.variables:
            text += f" (from {', '.join(self.variables)})"
        return text


def may_need_ancestors(env: Mapping[str, str]) -> bool:
    """Whether :func:`detect` wants to know what started this process."""
    return bool(env.get("PMI_RANK") or env.get("MV2_COMM_WORLD_RANK"))


def detect(env: Mapping[str, str], ancestors: Sequence[Sequence[str]] = ()) -> Placement | None:
    """Find this process's place in a job of several supervisors.

    Args:
        env: the environment, as it was when `rally run` started.
        ancestors: command lines of the processes above this one, the nearest first.

    Returns:
        None if this is a run of its own: no cluster, a job of one task, a shell or script that
        merely runs inside an allocation, a worker of another job, or an environment whose
        ``PET_*`` variables already set the flags.

    Raises:
        ConfigError: a cluster's variables are there and cannot be right, or do not say where node
            0 runs; names the variable and its value.
    """
    if any(env.get(name) for name in (*_INSIDE_A_WORKER, *_FLAG_DEFAULTS)):
        return None
    # Falling through to the plain variables where the launcher made a single task is for scripts
    # that call `srun -n1 -w $host env RANK=$i … rally run` once for each host.
    return _from_launcher(env, ancestors) or _from_plain_variables(env)


def _from_launcher(env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> Placement | None:
    # [Note: the innermost launcher wins] is about this order.
    if env.get("OMPI_COMM_WORLD_RANK"):
        return _from_open_mpi(env)
    if env.get("MV2_COMM_WORLD_RANK"):
        return _from_mvapich2(env, ancestors)
    in_step = _in_slurm_step(env)
    if env.get("PMI_RANK") and not (in_step and _pmi_repeats_slurm(env)):
        return _from_pmi(env, ancestors)
    return _from_slurm(env) if in_step else None


# ---- Slurm -------------------------------------------------------------------------------------


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of its tasks: [Note: which job is this]
    Two jobs may run side by side, on one machine, in one allocation: two steps of srun, two mpiexecs. The name of a job
    and its port come from what is the launcher's own, so that they never meet. Slurm numbers its steps, PMIx names what it
    starts. Hydra tells its tasks nothing of the kind, but all its proxies, the tasks' parents, are called with the port at
    which their mpiexec listens: `hydra_pmi_proxy --control-port login1:34415 …`.

    [Note: a step or just a shell]."""
    reader = _Reader(env)
    if reader.text("SLURM_PROCID") is None:
        return False
    named = reader.text("SLURM_STEP_ID", "SLURM_STEPID")
    if named is None or named.text.lower() in _RESERVED_STEP_NAMES:
        return False
    step = reader.need("SLURM_STEP_ID", "SLURM_STEPID").value
    if step >= _FIRST_RESERVED_STEP:
        return False
    # `srun -N2 --pty bash` is a real step of several tasks, but all shells except task 0's end at
    # once for want of a terminal. Everything srun exports leaks into what is started below it
    # (SLURM_PTY_PORT even through sbatch), hence three signs together: the shell gave the job its
    # name, it is the first step, and it has a terminal.
    return not (
        step == 0 and env.get("SLURM_PTY_PORT") and env.get("SLURM_JOB_NAME", "") in _SHELLS
    )


def _pmi_repeats_slurm(env: Mapping[str, str]) -> bool:
    reader = _Reader(env)
    if reader.text("PMI_SIZE") is None:
        return True  # a stray PMI_RANK contradicts nothing
    pmi = reader.need("PMI_RANK").value, reader.need("PMI_SIZE").value
    return pmi == (reader.need("SLURM_PROCID").value, _slurm_num_tasks(reader).value)


def _slurm_num_tasks(reader: _Reader) -> _Number:
    # The step's own variables first, here and below: without them (very old Slurm) the job-level
    # ones are the step's as well, unless the step leaves nodes out; the cross-checks notice that.
    return reader.need("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")


def _from_slurm(env: Mapping[str, str]) -> Placement | None:
    reader = _Reader(env)
    job_id = reader.need("SLURM_JOB_ID", "SLURM_JOBID")
    step_id = reader.need("SLURM_STEP_ID", "SLURM_STEPID").value
    hint = _HETEROGENEOUS_HINT if env.get("SLURM_HET_SIZE") else _FLAGS_HINT
    rank = reader.need("SLURM_PROCID")
    size = _slurm_num_tasks(reader)
    _check_below(rank, size, hint)
    if size.value == 1:
        return None

    machine_rank = reader.need("SLURM_NODEID")
    num_machines = reader.need("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    _check_below(machine_rank, num_machines, hint)
    local_rank = reader.need("SLURM_LOCALID")
    tasks = _slurm_tasks(reader, size, num_machines, hint)
    here = tasks[machine_rank.value]
    if local_rank.value >= here:
        raise ConfigError(
            local_rank.name,
            str(local_rank.value),
            f"machine {machine_rank.value} has only {here} tasks",
            hint,
        )

    hosts = reader.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts is not None:
        listed = len(expand_nodelist(hosts.text, variable=hosts.name))
        if listed != num_machines.value:
            raise ConfigError(
                hosts.name,
                hosts.text,
                f"names {listed} hosts, but {num_machines.name} is {num_machines.value}",
                hint,
            )
    address = _own_address(reader, num_machines.value)
    if address is None and num_machines.value == 1:
        address = _Text(num_machines.name, _LOOPBACK)
    if address is None and hosts is not None:
        # Task 0 is on the first machine of the step in every task distribution Slurm has.
        address = _Text(hosts.name, first_host(hosts.text, variable=hosts.name))
    if address is None:
        raise ConfigError("SLURM_STEP_NODELIST", None, "not set, and neither is MASTER_ADDR", hint)
    port = _own_port(reader)
    return Placement(
        source=f"Slurm job {job_id.value}",
        num_nodes=size.value,
        node_rank=rank.value,
        master_addr=address.text,
        master_port=port.value if port is not None else _port_of_step(job_id.value, step_id),
        run_id=f"{job_id.value}.{step_id}",
        local_rank=local_rank.value,
        tasks_per_machine=here,
        machine_rank=machine_rank.value,
        num_machines=num_machines.value,
        variables=_names(rank, size, address, port or job_id),
    )


def _slurm_tasks(
    reader: _Reader, size: _Number, num_machines: _Number, hint: str
) -> tuple[int, ...]:
    """How many tasks there are on each machine of the step."""
    layout = reader.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if layout is None:
        if size.value % num_machines.value:
            raise ConfigError(
                "SLURM_STEP_TASKS_PER_NODE",
                None,
                f"not set, and {size.value} tasks ({size.name}) do not divide evenly among"
                f" {num_machines.value} machines ({num_machines.name})",
                hint,
            )
        return (size.value // num_machines.value,) * num_machines.value
    tasks = _expand_counts(layout, limit=num_machines.value)
    if len(tasks) != num_machines.value or sum(tasks) != size.value:
        raise ConfigError(
            layout.name,
            layout.text,
            f"does not describe {size.value} tasks ({size.name}) on"
            f" {num_machines.value} machines ({num_machines.name})",
            hint,
        )
    return tasks


def _expand_counts(layout: _Text, *, limit: int) -> tuple[int, ...]:
    """``4(x2),3`` is ``4, 4, 3``; stops soon after ``limit`` machines, enough to see a mismatch."""
    counts: list[int] = []
    for item in layout.text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item.strip())
        if match is None:
            raise ConfigError(layout.name, layout.text, "expected task counts such as '4(x2),3'")
        repeat = int(match[2]) if match[2] else 1
        counts += [int(match[1])] * min(repeat, limit + 1)
        if len(counts) > limit:
            break
    return tuple(counts)


# ---- MPI ---------------------------------------------------------------------------------------


def _from_open_mpi(env: Mapping[str, str]) -> Placement | None:
    reader = _Reader(env)
    rank = reader.need("OMPI_COMM_WORLD_RANK")
    size = reader.need("OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)
    # mpirun's number for this very start
    job = reader.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _from_mpi(reader, "Open MPI", rank, size, local, job)


def _from_mvapich2(env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> Placement | None:
    reader = _Reader(env)
    rank = reader.need("MV2_COMM_WORLD_RANK")
    size = reader.need("MV2_COMM_WORLD_SIZE")
    local = ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)
    return _from_mpi(reader, "MVAPICH2", rank, size, local, _hydra(ancestors))


def _from_pmi(env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> Placement | None:
    reader = _Reader(env)
    rank, size = reader.need("PMI_RANK"), reader.need("PMI_SIZE")
    # MPI_LOCAL*: Hydra (MPICH, Intel MPI). PMI_LOCAL_*: the MPICH of HPE Cray machines.
    local = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    source = "Intel MPI" if env.get("I_MPI_MPIRUN") else "MPICH"
    job = _hydra(ancestors) or reader.text(*_JOB_IDS)
    return _from_mpi(reader, source, rank, size, local, job)


def _hydra(ancestors: Sequence[Sequence[str]]) -> _Text | None:
    """Where the mpiexec that started us listens: [Note: which job is this]."""
    for words in ancestors:
        if not words or "proxy" not in words[0].rpartition("/")[2]:
            continue
        flags = dict(itertools.pairwise(words))
        if "--control-port" in flags:  # MPICH
            return _Text("--control-port of its proxy", flags["--control-port"])
        if "--upstream-host" in flags and "--upstream-port" in flags:  # Intel MPI
            place = f"{flags['--upstream-host']}:{flags['--upstream-port']}"
            return _Text("--upstream-port of its proxy", place)
    return None


def _from_mpi(
    reader: _Reader,
    source: str,
    rank: _Number,
    size: _Number,
    local_names: tuple[tuple[str, ...], tuple[str, ...]],
    run_id: _Text | None,
) -> Placement | None:
    _check_below(rank, size, _FLAGS_HINT)
    if size.value == 1:
        return None
    local_rank = reader.need(*local_names[0])
    local_size = reader.need(*local_names[1])
    _check_below(local_rank, local_size, _FLAGS_HINT)
    if local_size.value > size.value:
        raise ConfigError(
            local_size.name,
            str(local_size.value),
            f"more tasks on this machine than in the whole job ({size.name} is {size.value})",
            _FLAGS_HINT,
        )
    one_machine = local_size.value == size.value
    address = _own_address(reader, 1 if one_machine else 2)
    if address is None:
        # Not mpirun's address where all are on one machine: 127.0.0.1 works without any network.
        address = (
            _Text(local_size.name, _LOOPBACK)
            if one_machine
            else _mpi_master(reader, source, rank.value)
        )
    port = _own_port(reader)
    derived_port = DEFAULT_PORT if run_id is None else _port_from(run_id.text)
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
        run_id=None if run_id is None else re.sub(r"[^\w.-]+", "-", run_id.text),
        local_rank=local_rank.value,
        tasks_per_machine=local_size.value,
        machine_rank=machine_rank,
        num_machines=num_machines,
        machines_known=one_machine,
        variables=_names(rank, size, address, port or run_id),
    )


def _mpi_master(reader: _Reader, source: str, rank: int) -> _Text:
    """The host of rank 0, which no MPI tells outright.

    Two things come close: the address of mpirun's own process (Open MPI up to 4), and the first host
    of a surrounding Slurm job. Both hold rank 0 unless the user placed ranks by hand or started
    mpirun on a machine without tasks (a login node, a launcher pod). Others cannot see that, but
    rank 0 can, and its error makes mpirun end them all.

    PMIX_SERVER_URI* is no help: it is the address of the task's *own* machine's daemon.
    """
    mpirun = reader.text("OMPI_MCA_orte_hnp_uri")
    address = None if mpirun is None else _address_in_uri(mpirun.text)
    if mpirun is not None and address is not None:
        daemon = reader.text("OMPI_MCA_orte_local_daemon_uri")
        if rank == 0 and daemon is not None and daemon.text != mpirun.text:
            raise _no_master(source, "mpirun runs on another machine than rank 0")
        return _Text(mpirun.name, address)
    hosts = reader.text("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts is not None:
        first = first_host(hosts.text, variable=hosts.name)
        here = reader.text("SLURMD_NODENAME")
        if rank == 0 and here is not None and here.text != first:
            raise _no_master(
                source, f"rank 0 is on {here.text}, not on the job's first host {first}"
            )
        return _Text(hosts.name, first)
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


# ---- MASTER_ADDR, RANK, WORLD_SIZE --------------------------------------------------------------


def _from_plain_variables(env: Mapping[str, str]) -> Placement | None:
    """Kubeflow's PyTorchJob (v1) and its kin: RANK and WORLD_SIZE count pods, not workers."""
    # LOCAL_RANK marks the environment of a *worker* that some other launcher made: whoever calls
    # `rally run` there wants a job of its own, as with TORCHELASTIC_RUN_ID.
    if not (env.get("MASTER_ADDR") and env.get("RANK") and env.get("WORLD_SIZE")):
        return None
    if env.get("LOCAL_RANK"):
        return None
    reader = _Reader(env)
    rank, size = reader.need("RANK"), reader.need("WORLD_SIZE")
    _check_below(
        rank, size, "here both count nodes (pods), as Kubeflow's PyTorchJob sets them, not workers"
    )
    if size.value == 1:
        return None
    # A loopback address is fine here: PyTorchJob gives "localhost" to its master pod.
    address = _own_address(reader, 1)
    port = _own_port(reader)
    return Placement(
        source="MASTER_ADDR/RANK/WORLD_SIZE",
        num_nodes=size.value,
        node_rank=rank.value,
        master_addr=None if address is None else address.text,
        master_port=DEFAULT_PORT if port is None else port.value,
        run_id=None,
        local_rank=0,
        tasks_per_machine=1,
        machine_rank=rank.value,
        num_machines=size.value,
        variables=_names(rank, size, address, port),
    )


# ---- node lists --------------------------------------------------------------------------------


class _Range(NamedTuple):
    low: int
    high: int
    width: int  # digits, with leading zeros: [008-010]

    def format(self, number: int) -> str:
        return str(number).zfill(self.width)


# `rack[1-2]-n[01,03-04]` is literal, ranges, literal, ranges.
_Entry = tuple[str | tuple[_Range, ...], ...]


def expand_nodelist(nodelist: str, *, variable: str = "nodelist") -> list[str]:
    """The hosts a Slurm node list names, in its order, as ``scontrol show hostnames`` has them.

    Done here and not by calling scontrol, which containers seldom have.

    Args:
        nodelist: ``node[01-03,07],gpu-[1-2]-ib,login1``; several bracket groups in one name multiply.
        variable: where it came from, for the error.

    Raises:
        ConfigError: not such a list.
    """
    hosts: list[str] = []
    for entry in _parse_nodelist(nodelist, variable):
        columns = [
            [part]
            if isinstance(part, str)
            else [span.format(n) for span in part for n in range(span.low, span.high + 1)]
            for part in entry
        ]
        hosts += ["".join(pieces) for pieces in itertools.product(*columns)]
    return hosts


def first_host(nodelist: str, *, variable: str = "nodelist") -> str:
    """The first of :func:`expand_nodelist`; the whole list is checked all the same."""
    entry = _parse_nodelist(nodelist, variable)[0]
    return "".join(part if isinstance(part, str) else part[0].format(part[0].low) for part in entry)


def _parse_nodelist(nodelist: str, variable: str) -> list[_Entry]:
    def malformed(problem: str) -> ConfigError:
        return ConfigError(variable, nodelist, f"not a list of hosts: {problem}")

    entries: list[_Entry] = []
    total = 0
    # Commas that no `]` follows before the next `[` are the ones between entries.
    for text in re.split(r",(?![^\[]*\])", nodelist.strip()):
        if not re.fullmatch(r"(?:[^\[\],\s]|\[[0-9,-]+\])+", text):
            what = f"{text!r} has unbalanced or unexpected brackets" if text else "an empty name"
            raise malformed(what)
        entry: list[str | tuple[_Range, ...]] = []
        count = 1
        for group, literal in re.findall(r"\[([0-9,-]+)\]|([^\[\]]+)", text):
            if literal:
                entry.append(literal)
                continue
            spans: list[_Range] = []
            for item in group.split(","):
                match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item)
                if match is None:
                    raise malformed(f"{item!r} in {text!r} is not a number or a range")
                low, high = int(match[1]), int(match[2] or match[1])
                if low > high:
                    raise malformed(f"the range {item!r} in {text!r} runs backwards")
                spans.append(_Range(low, high, len(match[1])))
            count *= sum(span.high - span.low + 1 for span in spans)
            entry.append(tuple(spans))
        total += count
        if total > _MAX_HOSTS:
            raise malformed(f"more than {_MAX_HOSTS} hosts")
        entries.append(tuple(entry))
    return entries


# ---- reading -----------------------------------------------------------------------------------


class _Text(NamedTuple):
    name: str
    text: str


class _Number(NamedTuple):
    name: str
    value: int


class _Reader:
    """Typed look-ups; remembers what it found, for the error about what is missing beside it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._found_first: str | None = None

    def text(self, *names: str) -> _Text | None:
        """The first of ``names`` that is set; an empty variable counts as unset."""
        for name in names:
            text = self._env.get(name, "").strip()
            if text:
                self._found_first = self._found_first or name
                return _Text(name, text)
        return None

    def number(self, *names: str) -> _Number | None:
        found = self.text(*names)
        if found is None:
            return None
        # int() would also take '1_0', '+3' and other scripts' digits.
        if not re.fullmatch(r"[0-9]{1,18}", found.text):
            raise ConfigError(found.name, found.text, "expected a whole number, 0 or more")
        return _Number(found.name, int(found.text))

    def need(self, *names: str) -> _Number:
        found = self.number(*names)
        if found is None:
            beside = f", although {self._found_first} is" if self._found_first else ""
            raise ConfigError(" or ".join(names), None, f"not set{beside}", _FLAGS_HINT)
        return found


def _check_below(rank: _Number, size: _Number, hint: str) -> None:
    if rank.value >= size.value:
        raise ConfigError(
            rank.name, str(rank.value), f"must be below {size.name}, which is {size.value}", hint
        )


def _names(*found: _Text | _Number | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in found if one is not None))


def _own_address(reader: _Reader, num_machines: int) -> _Text | None:
    """MASTER_ADDR, if it is set: that is the user's own word, so it beats any host list."""
    found = reader.text("MASTER_ADDR")
    if found is None:
        return None
    host = found.text.strip("[]")
    loopback = host in {"localhost", "::1"} or re.fullmatch(r"127(\.[0-9]+){3}", host)
    if loopback and num_machines > 1:
        raise ConfigError(
            found.name,
            found.text,
            "means 'this machine' on every machine, and the job has several",
            "unset it, or set it to the host name of node 0",
        )
    return _Text(found.name, host)


def _own_port(reader: _Reader) -> _Number | None:
    found = reader.number("MASTER_PORT")
    # 0 ("any free port") would be another port in each task.
    if found is not None and not 0 < found.value < 65536:
        raise ConfigError(found.name, str(found.value), "expected a port, 1 to 65535")
    return found


def _port_of_step(job: int, step: int) -> int:
    """That of the job for its first step, another one for each further: two may run side by side on one machine."""
    return _port_from(f"{(job + 1009 * step) % 10000}")


def _port_from(run_id: str) -> int:
    """A port all tasks agree on: 15000 + the last four digits of the job's number.

    That is the first number in ``1234[7].server1``, the process id in PMIx's ``prterun-login1-4711@1``, and
    Hydra's port in ``login1:34415``.
    """
    before, at, _ = run_id.rpartition("@")
    if re.fullmatch(r".+:[0-9]+", run_id):
        before, at = run_id, ":"
    numbers = re.findall(r"[0-9]+", before if at else run_id)
    if not numbers:
        return DEFAULT_PORT
    return _FIRST_DERIVED_PORT + int(numbers[-1 if at else 0][-4:])

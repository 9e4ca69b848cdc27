"""Slurm: tasks of a step that srun has started. Pure.

[Note: a step or just a shell]
Slurm sets SLURM_NTASKS, and often SLURM_PROCID=0, in places where exactly one process runs: the
script of `sbatch`, the shell of `salloc`. Taking part in a job of SLURM_NTASKS there would mean
waiting for tasks that nobody starts. What tells them apart is SLURM_STEP_ID: absent in the script, and a
reserved number (0xfffffff0 and above) in the batch, extern and interactive steps. SLURM_JOB_NAME
alone says nothing: it stays "interactive" in every srun typed into an salloc shell.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from rallypoint.errors import ConfigError

from .cluster import Cluster, ClusterLevel, Placement
from .nodelist import expand_nodelist, first_host
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
    port_of_step,
)


# slurm.h, SLURM_MAX_NORMAL_STEP_ID: from here on it is the batch, extern, interactive … step.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_RESERVED_STEP_NAMES = frozenset({"batch", "extern", "interactive", "pending"})
_SHELLS = frozenset({"bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"})

_HETEROGENEOUS_HINT = (
    "this Slurm counts the components of a heterogeneous job separately;"
    " pass --nnodes, --node-rank and --master-addr"
)


def in_step(variables: ClusterVariables) -> bool:
    """Whether srun started this process as one of its tasks: [Note: a step or just a shell]."""
    if variables.text("SLURM_PROCID") is None:
        return False
    named = variables.text("SLURM_STEP_ID", "SLURM_STEPID")
    if named is None or named.text.lower() in _RESERVED_STEP_NAMES:
        return False
    step = variables.need("SLURM_STEP_ID", "SLURM_STEPID").value
    if step >= _FIRST_RESERVED_STEP:
        return False
    # `srun -N2 --pty bash` is a real step of several tasks, but all shells except task 0's end at
    # once for want of a terminal. Everything srun exports leaks into what is started below it
    # (SLURM_PTY_PORT even through sbatch), hence three signs together: the shell gave the job its
    # name, it is the first step, and it has a terminal.
    return not (
        step == 0
        and variables.env.get("SLURM_PTY_PORT")
        and variables.env.get("SLURM_JOB_NAME", "") in _SHELLS
    )


def set_pmi(variables: ClusterVariables) -> bool:
    """Whether PMI's variables are those of the Slurm step: `srun --mpi=pmi2` sets them too."""
    if variables.text("PMI_SIZE") is None:
        return True  # a stray PMI_RANK contradicts nothing
    pmi = variables.need("PMI_RANK").value, variables.need("PMI_SIZE").value
    return pmi == (variables.need("SLURM_PROCID").value, _slurm_num_tasks(variables).value)


def _slurm_num_tasks(variables: ClusterVariables) -> Number:
    # The step's own variables first, here and below: without them (very old Slurm) the job-level
    # ones are the step's as well, unless the step leaves nodes out; the cross-checks notice that.
    return variables.need("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")


def _place(variables: ClusterVariables) -> Placement | None:
    job_id = variables.need("SLURM_JOB_ID", "SLURM_JOBID")
    step_id = variables.need("SLURM_STEP_ID", "SLURM_STEPID").value
    hint = _HETEROGENEOUS_HINT if variables.env.get("SLURM_HET_SIZE") else FLAGS_HINT
    rank = variables.need("SLURM_PROCID")
    size = _slurm_num_tasks(variables)
    check_below(rank, size, hint)
    if size.value == 1:
        return None

    machine_rank = variables.need("SLURM_NODEID")
    num_machines = variables.need("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    check_below(machine_rank, num_machines, hint)
    local_rank = variables.need("SLURM_LOCALID")
    tasks = _slurm_tasks(variables, size, num_machines, hint)
    here = tasks[machine_rank.value]
    if local_rank.value >= here:
        raise ConfigError(
            local_rank.name,
            str(local_rank.value),
            f"machine {machine_rank.value} has only {here} tasks",
            hint,
        )

    hosts = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts is not None:
        listed = len(expand_nodelist(hosts.text, variable=hosts.name))
        if listed != num_machines.value:
            raise ConfigError(
                hosts.name,
                hosts.text,
                f"names {listed} hosts, but {num_machines.name} is {num_machines.value}",
                hint,
            )
    address = own_address(variables, num_machines.value)
    if address is None and num_machines.value == 1:
        address = Text(num_machines.name, LOOPBACK)
    if address is None and hosts is not None:
        # Task 0 is on the first machine of the step in every task distribution Slurm has.
        address = Text(hosts.name, first_host(hosts.text, variable=hosts.name))
    if address is None:
        raise ConfigError("SLURM_STEP_NODELIST", None, "not set, and neither is MASTER_ADDR", hint)
    port = own_port(variables)
    return Placement(
        source=f"Slurm job {job_id.value}",
        num_nodes=size.value,
        node_rank=rank.value,
        master_addr=address.text,
        master_port=port.value if port is not None else port_of_step(job_id.value, step_id),
        run_id=_run_id(variables, job_id.value, step_id),
        local_rank=local_rank.value,
        tasks_per_machine=here,
        machine_rank=machine_rank.value,
        num_machines=num_machines.value,
        variables=names(rank, size, address, port or job_id),
    )


def hosts_of_step(env: Mapping[str, str]) -> list[str]:
    """The hosts of the step of which this process is a task; empty if it is not one.

    Raises:
        ConfigError: the variables cannot be right.
    """
    variables = ClusterVariables(env)
    if not in_step(variables):
        return []
    named = variables.text("SLURM_STEP_NODELIST")
    return [] if named is None else expand_nodelist(named.text, variable=named.name)


def ends_with_a_node(srun: Sequence[str], env: Mapping[str, str]) -> str:
    """What to tell the user whose elastic job Slurm would end when it loses a node; empty if it would not.

    Slurm tells a task nothing about these options; the command line of its srun does.

    Args:
        srun: the command line of the step's srun.
        env: the environment; srun also takes its options from there.
    Returns:
        One line.
    """
    # The program's own options come after its name.
    options = list(itertools.takewhile(lambda word: "rally" not in word, srun[1:]))
    words = {word.partition("=")[0]: word.partition("=")[2] for word in options}
    keeps = env.get("SLURM_NO_KILL") is not None or "-k" in words or "--no-kill" in words
    keeps = keeps and words.get("--no-kill") != "off"
    if "-K1" in words:
        words["-K"] = "1"
    strict = words.get("--kill-on-bad-exit", words.get("-K", env.get("SLURM_KILL_BAD_EXIT", "0")))
    if keeps and strict == "0":
        return ""
    why = "a task fails" if keeps else "a node is lost"
    return (
        f"Slurm ends this elastic job when {why}: use srun --no-kill --kill-on-bad-exit=0,"
        " and --no-kill for sbatch or salloc as well"
    )


def _run_id(variables: ClusterVariables, job: int, step: int) -> str:
    """A requeued job keeps its number and starts numbering its steps again: it must not meet what is left of it elsewhere."""
    restarts = variables.number("SLURM_RESTART_COUNT")
    again = f"-{restarts.value}" if restarts is not None and restarts.value else ""
    return f"{job}.{step}{again}"


def _slurm_tasks(
    variables: ClusterVariables, size: Number, num_machines: Number, hint: str
) -> tuple[int, ...]:
    """How many tasks there are on each machine of the step."""
    layout = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
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


def _expand_counts(layout: Text, *, limit: int) -> tuple[int, ...]:
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


SLURM = Cluster(name="Slurm", level=ClusterLevel.SCHEDULER, detect=in_step, place=_place)

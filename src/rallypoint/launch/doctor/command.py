"""``rally doctor``, and what ``rally run --preflight`` does first."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rallypoint._core import env as environment
from rallypoint.errors import ConfigError, RallyError
from rallypoint.launch.command_line import given as command_lines
from rallypoint.launch.config import (
    Job,
    LaunchConfig,
    LogConfig,
    StartMethod,
    StreamChoice,
    Streams,
    TargetKind,
)
from rallypoint.rendezvous.defaults import JOIN_TIMEOUT

from . import finding_table, judgement, probe, visit
from .facts import AllReduce, Link, NodeFacts


HELP = """\
usage: rally doctor [--json] [flags of rally run]

Check, before a job runs, whether it can: limits, CPUs, memory, disk, /dev/shm, GPUs, the network and the versions. With
several nodes, run it on each, with the flags by which the job's nodes meet (--nnodes, --rdzv-endpoint, --node-rank,
--secret-file …): they meet as the job would, compare their versions, connect to each other, and measure latency and
bandwidth of each pair and an all-reduce. The worst comes first.

  --json    one JSON object

Exit code: 0 if there is no problem, 1 if there is one, 2 if a flag is wrong."""

# How long doctors wait for each other, if --rdzv-conf join_timeout= does not say.
PATIENCE = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found.

    Args:
        findings: problems first.
        nodes: by rank; only this one if they could not meet.
        links: the links between them.
        all_reduce: the all-reduce over all of them, or None.
        problem: why they could not meet; empty if they did, or need not.
    """

    findings: list[judgement.Finding]
    nodes: list[NodeFacts]
    links: list[Link]
    all_reduce: AllReduce | None
    problem: str = ""

    @property
    def is_healthy(self) -> bool:
        return judgement.is_healthy(self.findings)

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": 1,
                "healthy": self.is_healthy,
                "findings": [asdict(each) for each in self.findings],
                "nodes": [each.to_json() for each in self.nodes],
                "links": [asdict(each) for each in self.links],
                "all_reduce": None if self.all_reduce is None else asdict(self.all_reduce),
            }
        )


def command(words: Sequence[str], show: Say, say: Say) -> int:
    """Run ``rally doctor``. Returns the exit code.

    Args:
        words: its arguments.
        show: prints the result.
        say: prints a remark.

    Raises:
        ConfigError: a flag is wrong.
    """
    as_json = "--json" in words
    given = command_lines.parse([word for word in words if word != "--json"])
    if given.help:
        show(HELP)
        return 0
    if given.target:
        raise ConfigError(
            "doctor",
            given.target[0],
            "takes no script",
            "rally run --preflight … checks and runs one",
        )
    found = examine(given.values, say)
    if as_json:
        show(found.to_json())
    else:
        show(f"{finding_table.text(found.findings)}\n{finding_table.verdict(found.findings)}")
    return 0 if found.is_healthy else 1


def preflight(config: LaunchConfig, say: Say) -> bool:
    """Check before a job, and print what is not fine. Returns whether it may start."""
    found = _examine(config, lambda _remark: None)  # the job makes the remarks again
    if found.problem and (config.min_nodes or config.num_nodes) < config.num_nodes:
        # The others may train already: a newcomer is admitted on its own facts.
        say(
            f"preflight: no other node took part, so this one was checked by itself ({found.problem})"
        )
        found = replace(found, findings=judgement.judge(found.nodes))
    if brief := finding_table.text(found.findings, briefly=True):
        say(f"preflight: {finding_table.verdict(found.findings)}\n{brief}")
    return found.is_healthy


def examine(values: Mapping[str, str], say: Say) -> Examination:
    """Examine this node, and with several nodes all of them, together.

    Args:
        values: flags of ``rally run``.
        say: prints a remark.

    Raises:
        ConfigError: a flag is wrong.
    """
    for name in ("--hosts", "--hostfile"):
        if name in values:
            hint = f"rally run {name} … --preflight train.py checks all of them, and runs a job"
            raise ConfigError(name, values[name], "rally doctor checks the node it runs on", hint)
    from rallypoint.launch.command_line.settings import config_from

    # What the job would run does not matter: take something that is always there.
    without = {"--module", "--no-python", "--start-method", "--warm", "--preflight"}
    asked = {name: value for name, value in values.items() if name not in without}
    target = command_lines.Given({**asked, "--module": "1"}, (visit.__name__,))
    config, remarks = config_from(target, environment.snapshot())
    for remark in remarks:
        say(remark)
    return _examine(config, say)


def _examine(config: LaunchConfig, say: Say) -> Examination:
    if config.num_nodes == 1 and config.rendezvous.plug_in is None:
        nodes = [probe.facts(config.workers_per_node, config.logs.folder)]
        return Examination(judgement.judge(nodes), nodes, [], None)
    return _together(config, say)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="rally-doctor-")
    except OSError as error:
        problem = f"cannot create a temporary folder: {error.strerror or error}"
        raise ConfigError("TMPDIR", None, problem, "set it to a writable folder") from None


def _together(config: LaunchConfig, say: Say) -> Examination:
    nodes: list[NodeFacts] = []
    links: list[Link] = []
    reduced: AllReduce | None = None
    with _temporary_folder() as folder:
        result = Path(folder, "found.json")
        problem = _visit(config, result, say)
        try:
            nodes, links, reduced = visit.read(result)
        except OSError:
            problem = problem or "the nodes have met, but lost each other"
        else:
            problem = ""
    if problem:
        with environment.overlay(_network_of_workers(config)):
            nodes = [probe.facts(config.workers_per_node, config.logs.folder)]
    findings = judgement.judge(nodes, links, reduced, several=True, meeting=problem)
    return Examination(findings, nodes, links, reduced, problem)


def _network_of_workers(config: LaunchConfig) -> Mapping[str, str]:
    """The variables that make workers use the interface that leads to the other nodes."""
    from rallypoint.launch.coordination.network import choice_for

    host = config.rendezvous.host
    if not host:
        return {}
    return choice_for(environment.snapshot(), config.local_addr, host).variables


def _visit(config: LaunchConfig, result: Path, say: Say) -> str:
    """Run one worker on each node; the workers visit each other. Returns why that did not work; empty if it did."""
    from rallypoint.launch.coordination.coordinator import coordination_for
    from rallypoint.launch.output.console import Console
    from rallypoint.launch.supervisor import Supervisor

    workers = "" if config.workers_per_node is None else str(config.workers_per_node)
    rendezvous = config.rendezvous
    if rendezvous.join_timeout == JOIN_TIMEOUT:
        rendezvous = replace(rendezvous, join_timeout=PATIENCE)
    # Not the job's id: a job that starts a moment earlier on another node must not meet a doctor.
    rendezvous = replace(rendezvous, run_id=f"{rendezvous.run_id}-doctor")
    job = Job(
        kind=TargetKind.MODULE,
        name=visit.__name__,
        args=(str(result), workers, config.logs.folder or ""),
    )
    config = replace(
        config,
        job=job,
        rendezvous=rendezvous,
        # Nobody needs what torch says about the network; how a worker fails is reported.
        logs=LogConfig(folder=str(result.parent), redirects=StreamChoice(everyone=Streams.BOTH)),
        workers_per_node=1,
        accelerator=None,
        max_restarts=0,
        hang_after=0.0,
        slow_after=0.0,
        step_timeout=0.0,
        start_method=StartMethod.FORKSERVER,
        preload=(),
        warm=None,
        templates=False,
        numa_binding=None,
        virtual_local_rank=False,
        local_rank_base=0,
        local_world_size=None,
        group_rank=None,
        group_world_size=None,
    )

    def say_waiting(text: str) -> None:
        if "waiting" in text:  # the rest is among the findings
            say(text)

    try:
        supervisor = Supervisor(
            config,
            coordination=coordination_for(config, say_waiting),
            console=Console(),
            say=say_waiting,
            token=uuid.uuid4().hex,
        )
        outcome = supervisor.run()
    except RallyError as error:
        return " ".join(str(error).split())
    if outcome.report is not None:
        return " ".join(outcome.report.cause().split())
    if outcome.signal is not None:
        raise KeyboardInterrupt
    return ""

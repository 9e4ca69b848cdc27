"""``rally ps``: the jobs of this host or, with flags of ``rally run``, a job at the store where its nodes meet."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint._core import env as environment
from rallypoint.control.tables import ps
from rallypoint.errors import ConfigError


# How many seconds nodes have to answer.
PATIENCE = 5.0
# Flags of this command, not about where nodes meet.
_OWN = frozenset({"-h", "--help", "--json"})


def command(words: Sequence[str]) -> str:
    """Run ``rally ps``; returns the text to print.

    Raises:
        ConfigError: a flag is wrong, or there are two jobs.
        ControlError: there is no such job, or it cannot be asked.
    """
    flags_given = any(word.startswith("-") and word not in _OWN for word in words)
    if not flags_given or {"-h", "--help"} & set(words):
        return ps.command(words)
    return _at_store(words)


def _at_store(words: Sequence[str]) -> str:
    from .command_line import given as command_lines
    from .command_line.settings import config_from
    from .coordination.observer import Observer

    rest = [word for word in words if word not in _OWN]
    job = [rest.pop(0)] if not rest[0].startswith("-") else []
    for word in rest:
        if word.startswith("--"):
            try:
                command_lines.find(word.partition("=")[0])
            except ConfigError as error:
                near = f"{error.hint} " if "did you mean" in error.hint else ""
                known = "--json, and those of rally run that say where nodes meet"
                problem = f"no such flag (known: {known})"
                raise ConfigError("ps", word, problem, f"{near}rally ps --help") from None
    given = command_lines.parse(rest)
    job += given.target
    if len(job) > 1:
        raise ConfigError("ps", " ".join(job), "expected one job", "rally ps --help")
    # It only matters that there may be several nodes, not how many there are or what they run.
    values = {"--nnodes": "2", **given.values, **({"--rdzv-id": job[0]} if job else {})}
    without = {"--module", "--no-python", "--start-method", "--warm", "--preflight"}
    asked = {name: value for name, value in values.items() if name not in without}
    config, _ = config_from(
        command_lines.Given({**asked, "--module": "1"}, (__name__,)), environment.snapshot()
    )
    nodes = Observer(config).nodes(PATIENCE)
    return ps.of_nodes(config.rendezvous.run_id, nodes, as_json="--json" in words)

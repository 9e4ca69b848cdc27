"""The command ``rally``: from a command line to a running job, and from its end to an exit code."""

from __future__ import annotations

import difflib
import os
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import rallypoint
from rallypoint._core import env as environment, event_sinks, limits, logs, standard_streams
from rallypoint.errors import ConfigError, RallyError

from .command_line import flags
from .config import LaunchConfig
from .hosts import report_file
from .hosts.call_files import Answer, CallFiles


if TYPE_CHECKING:
    from .supervision.job_end import Outcome


_USAGE = """\
usage: rally COMMAND …

  rally run [flags] script.py [args]   start, watch and explain a distributed PyTorch job
  rally submit slurm|k8s|ssh|ray … -- …   hand such a job to Slurm, Kubernetes, hosts or Ray
  rally ps                             list the jobs of this user on this host
  rally top [JOB]                      show what each worker uses, live; the odd ones are marked
  rally stacks [JOB]                   show where each worker is, the odd ones out first
  rally memory [JOB]                   show what the memory of each worker is: private, shared, by mapping
  rally logs [JOB | FOLDER]            show what the workers have written
  rally profile [JOB]                  record what the workers do for some seconds, as one trace
  rally web [JOB]                      serve a page about the jobs on this host
  rally doctor [flags]                 check limits, network, versions and GPUs before a job runs
  rally warm [--stop]                  list or end the processes that rally run --warm keeps
  rally checkpoints PLACE              list the checkpoints of sessions
  rally secret [FILE]                  make the secret that the nodes of a job share
  rally env                            list the environment variables that rally reads
  rally --version

rally run --help lists the flags."""

_COMMANDS = (
    *("run", "ps", "top", "stacks", "memory", "profile", "logs", "web", "warm", "doctor"),
    *("submit", "checkpoints", "secret", "env", "help"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _fill_standard_descriptors()
    standard_streams.set_up()
    try:
        return _exit_code(words)
    finally:
        standard_streams.settle()


def _exit_code(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except standard_streams.ReaderGone:  # `rally … | head`: it has seen enough
        return 0
    except ConfigError as error:
        _say(str(error))
        return 2
    except RallyError as error:
        _say(str(error))
        return 1
    except (OSError, RuntimeError) as error:
        reached = limits.explain(error)
        if reached is None:
            raise
        _say(reached)
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else ""
    match command:
        case "run":
            return run(words[1:])
        case "stacks":
            from rallypoint.control.stacks import command as stacks

            _print(stacks.command(words[1:]))
            return 0
        case "ps":
            from rallypoint.control.tables import ps

            _print(ps.command(words[1:]))
            if words == ["ps"]:
                from .command_line import warm_command

                if kept := warm_command.lines():
                    _print(f"\n{kept}")
            return 0
        case "memory":
            from rallypoint.control.memory import command as memory

            _print(memory.command(words[1:]))
            return 0
        case "profile":
            from rallypoint.control.profiling import command as profile

            _print(profile.command(words[1:]))
            return 0
        case "web":
            from rallypoint.control.web import page_server

            return page_server.command(words[1:], _print)
        case "doctor":
            from .doctor import command as doctor

            logs.set_up(environment.snapshot())
            return doctor.command(words[1:], _print, _say)
        case "warm":
            from .command_line import warm_command

            _print(warm_command.command(words[1:]))
            return 0
        case "top":
            from rallypoint.control.tables import top

            return top.command(words[1:])
        case "logs":
            from rallypoint.control.logs import command as worker_logs

            return worker_logs.command(words[1:])
        case "checkpoints":
            from .command_line import checkpoint_table

            _print(checkpoint_table.command(words[1:]))
            return 0
        case "submit":
            from .submit import command as submit

            return submit.command(words[1:], _print)
        case "node":  # of `rally run --hosts`, not for people
            from .hosts import node

            return node.command()
        case "secret":
            from .command_line import secret_file

            _print(secret_file.command(words[1:], environment.snapshot()))
            return 0
        case "env":
            _print("\n".join(f"{name:<40} {text}" for name, text in environment.KNOWN.items()))
            return 0
        case "--version" | "-V":
            _print(f"rally {rallypoint.__version__}")
            return 0
        case "-h" | "--help" | "help":
            _print(_USAGE)
            return 0
        case "":
            _say(_USAGE, bare=True)
            return 2
        case _:
            raise _no_such_command(words)


def _no_such_command(words: list[str]) -> ConfigError:
    command = words[0]
    if command.startswith("-") or os.path.exists(command):
        hint = "did you mean: rally run " + " ".join(words)[:60]
    else:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_COMMANDS)}"
    return ConfigError("command", command, "no such command", hint)


def run(words: Sequence[str]) -> int:
    """``rally run``. Returns the exit code: the root cause's, 0, 128 + signal, or 2."""
    given = flags.parse(words)
    if given.help:
        from rallypoint.rendezvous.catalogue import catalogue

        _print(flags.help_text(catalogue.backends()))
        return 0
    if (problem := limits.working_directory()) is not None:
        raise ConfigError("working directory", None, problem, "cd to another one")
    report_fd, files = report_file.inherited(), CallFiles.inherited()
    env = environment.snapshot()
    logs.set_up(env)
    event_sinks.check(env)
    if not {"--hosts", "--hostfile"}.isdisjoint(given.values):
        from .hosts import launcher

        return launcher.run(given, env, _say)
    from .command_line.settings import config_from

    config, remarks = config_from(
        given, env, files.path if files is not None and files.call is not None else None
    )
    for remark in remarks:
        _say(remark)
    if config.avoid_hosts is not None:
        from .avoidance import own_host

        if own_host.is_left_out(config, env, _say):
            return 0
    if "--preflight" in given.values:
        from .doctor import command as doctor

        if not doctor.preflight(config, _say):
            return 1
    return launch(config, report_fd, files)


def launch(
    config: LaunchConfig, report_fd: int | None = None, files: CallFiles | None = None
) -> int:
    """Run a job from this terminal and print how it failed, if it did.

    Args:
        config: the job.
        report_fd: where the report goes instead: to the terminal of another host.
        files: what workers call, if that came from another host, and what goes back there.
    """
    from .coordination.coordinator import coordination_for
    from .output.console import Console
    from .policy import Aim
    from .supervisor import Supervisor

    say = _say_json if config.logs.as_json else _say
    coordination = coordination_for(config, say)
    supervisor = Supervisor(
        config,
        coordination=coordination,
        console=Console(),
        say=say,
        token=uuid.uuid4().hex,
        payload_fd=None if files is None else files.call,
    )
    outcome = supervisor.run()
    text = _report_text(outcome, in_colour=_colour() and not config.logs.as_json)
    if report_fd is not None:
        troubles = tuple(each.to_json() for each in outcome.troubles)
        report_file.write(report_fd, report_file.HostEnd(text, troubles))
    if files is not None:
        report = None if outcome.report is None else outcome.report.to_json()
        answer = Answer(results=outcome.results, first_rank=outcome.first_rank, report=report)
        files.write(answer.to_bytes())
    if outcome.aim is Aim.SUCCEED:
        return 0
    code = _tell_end(outcome, text if report_fd is None else "", say)
    if code in config.requeue_on and outcome.ends_job:
        from .placement.requeue import requeue

        requeue(code, environment.snapshot(), say, is_first=outcome.first_rank == 0)
    return code


def _report_text(outcome: Outcome, *, in_colour: bool) -> str:
    report = outcome.report
    return "" if report is None else report.text(width=_width(), colour=in_colour)


def _tell_end(outcome: Outcome, report: str, say: Callable[..., None]) -> int:
    """Print why the job has failed, unless another host's terminal does, or was stopped. Returns its exit code."""
    if report:
        say(report, bare=True)
    if outcome.report is not None:
        return outcome.report.exit_code
    number = outcome.signal or 15
    import signal

    say(f"stopped by {signal.Signals(number).name}; all workers have ended")
    return 128 + number


def _fill_standard_descriptors() -> None:
    """`rally … 2>&-`: else a pipe of ours would become descriptor 2, and workers' stderr lead there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _width() -> int:
    try:
        return min(os.get_terminal_size(2).columns, 120)
    except OSError:
        return 100


def _colour() -> bool:
    return standard_streams.has_colour(2, environment.snapshot())


def _say(text: str, *, bare: bool = False) -> None:
    standard_streams.say(text if bare else f"rally: {text}")


def _say_json(text: str, *, bare: bool = False) -> None:
    """The same with ``--log-format json``."""
    from rallypoint._core import clock, log_records

    host = socket.gethostname()
    origin = log_records.Origin(host=host, rank=-1, local_rank=-1, generation=-1, stream="rally")
    now = clock.MONOTONIC.now()
    record = log_records.pack(origin, clock.wall(), now, text.encode(errors="replace"))
    _say(record.decode(), bare=True)


def _print(text: str) -> None:
    standard_streams.write(text + "\n")

"""``rally run``: starts a job from a command line and turns its outcome into an exit code."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rallypoint._core import env as environment, event_sinks, limits, logs, standard_streams
from rallypoint.errors import ConfigError

from . import piped_script
from .command_line import flag_help, given as command_lines
from .config import LaunchConfig
from .hosts import report_file
from .hosts.call_files import Answer, CallFiles


if TYPE_CHECKING:
    from .supervision.job_end import Outcome


def run(words: Sequence[str]) -> int:
    """``rally run``. Returns the exit code: the root cause's, 0, 128 + signal, or 2."""
    given = command_lines.parse(words)
    if given.help:
        from rallypoint.rendezvous.catalogue import catalogue

        standard_streams.write(flag_help.help_text(catalogue.backends()) + "\n")
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
    piped_script.keep(config.job)
    return launch(config, report_fd, files)


def launch(
    config: LaunchConfig, report_fd: int | None = None, files: CallFiles | None = None
) -> int:
    """Run a job from this terminal and print how it failed, if it did.

    Args:
        config: the job.
        report_fd: where the report goes instead of this terminal: to another host's.
        files: the call that workers make, if it came from another host, and the answer that goes back there.
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
    """Print why the job failed (unless another host's terminal shows it) or that it was stopped. Returns its exit code."""
    if report:
        say(report, bare=True)
    if outcome.report is not None:
        return outcome.report.exit_code
    number = outcome.signal or 15
    import signal

    say(f"stopped by {signal.Signals(number).name}; all workers have ended")
    return 128 + number


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
    """``_say`` with ``--log-format json``."""
    from rallypoint._core import clock, log_records

    host = socket.gethostname()
    origin = log_records.Origin(host=host, rank=-1, local_rank=-1, generation=-1, stream="rally")
    now = clock.MONOTONIC.now()
    record = log_records.pack(origin, clock.wall(), now, text.encode(errors="replace"))
    _say(record.decode(), bare=True)

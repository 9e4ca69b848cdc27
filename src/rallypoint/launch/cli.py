"""The ``rally`` command: runs the subcommand that a command line names and turns its outcome into an exit code.

Each subcommand imports only what it needs, so that ``rally --help`` answers quickly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import rallypoint
from rallypoint._core import env as environment, near_words, standard_streams
from rallypoint.errors import ConfigError, RallyError


_USAGE = """\
usage: rally COMMAND …

  rally run [flags] script.py [args]   start, watch and explain a distributed PyTorch job
  rally submit slurm|k8s|ssh|ray … -- …   hand such a job to Slurm, Kubernetes, hosts or Ray
  rally ps [JOB]                       list the jobs of this user on this host
  rally top [JOB]                      show what each worker uses, live, and mark the odd ones
  rally stacks [JOB]                   show where each worker is, the odd ones out first
  rally memory [JOB]                   show the memory of each worker: private, shared, by mapping
  rally logs [JOB | FOLDER]            show what the workers have written
  rally profile [JOB]                  record what the workers do for some seconds, as one trace
  rally web [JOB]                      serve a page about the jobs on this host
  rally doctor [flags]                 check limits, network, versions and GPUs before a job runs
  rally warm [--stop]                  list or end the processes that rally run --warm keeps
  rally checkpoints PLACE              list the checkpoints of sessions
  rally secret [FILE]                  make the secret that the nodes of a job share
  rally env                            list the environment variables that rally reads
  rally --version

rally run --help lists the flags, rally help COMMAND those of another command."""

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
    except standard_streams.ReaderGone:  # `rally … | head`: the reader has seen enough
        return 0
    except ConfigError as error:
        _say(str(error))
        return 2
    except RallyError as error:
        _say(str(error))
        return 1
    except (OSError, RuntimeError) as error:
        from rallypoint._core import limits

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
            from .run_command import run

            return run(words[1:])
        case "stacks":
            from rallypoint.control.stacks import command as stacks

            _print(stacks.command(words[1:]))
            return 0
        case "ps":
            from . import ps_command

            _print(ps_command.command(words[1:]))
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
            from rallypoint._core import logs

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
        case "node":  # started by `rally run --hosts`, not by people
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
        case "help" if len(words) > 1 and words[1] != "help":
            return _dispatch([words[1], "--help"])
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
        near = near_words.nearest(command, _COMMANDS)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(_COMMANDS)}"
    return ConfigError("command", command, "no such command", hint)


def _fill_standard_descriptors() -> None:
    """After `rally … 2>&-`, a pipe of ours would otherwise become descriptor 2, and workers' stderr would go there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _say(text: str, *, bare: bool = False) -> None:
    standard_streams.say(text if bare else f"rally: {text}")


def _print(text: str) -> None:
    standard_streams.write(text + "\n")

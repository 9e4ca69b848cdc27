"""``--requeue-on``: when a job ends with certain exit codes, ask Slurm to start it again.

Slurm requeues on its own when a node fails and on preemption, but after an exit code only where the site has said so
(``RequeueExit`` of slurm.conf). ``scontrol requeue`` works everywhere.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping

from rallypoint.errors import ConfigError


_JOB = "SLURM_JOB_ID"
# How often Slurm has started this job again; not set before the first time.
_COUNT = "SLURM_RESTART_COUNT"
# Slurm's controller may be busy for this long; after that we give up.
_PATIENCE = 60.0
# The first node asks at once, and Slurm ends the others with it. If they still run after this long, it was lost.
_TURN = 10.0


def check(env: Mapping[str, str], text: str, shown: str) -> None:
    """Check that there is a Slurm to ask.

    Args:
        env: variables.
        text: the flag's value.
        shown: the flag's name, for errors.

    Raises:
        ConfigError: this is not a Slurm job, or Slurm's commands are not here.
    """
    if not env.get(_JOB):
        raise ConfigError(shown, text, f"only Slurm starts a job again, and {_JOB} is not set")
    for command in ("squeue", "scontrol"):
        if shutil.which(command, path=env.get("PATH")) is None:
            raise ConfigError(shown, text, f"{command} is not on the PATH of this node")


def requeue(
    code: int, env: Mapping[str, str], say: Callable[[str], None], *, is_first: bool
) -> None:
    """Ask Slurm to start this job again. Slurm first ends it, and this process with it.

    Args:
        code: the exit code of the job.
        env: variables.
        say: prints a line for the user.
        is_first: whether this is the first node of the job; the others wait for Slurm to end them.
    """
    job = env[_JOB]
    if not is_first:
        threading.Event().wait(_TURN)  # for Slurm, which ends this process
    try:
        # A job that was cancelled has ended because somebody wanted that. One that Slurm starts again anyway is no
        # longer running either.
        state = _ask(("squeue", "--noheader", f"--jobs={job}", "--format=%T"), env)
        if state != "RUNNING":
            say(f"exit code {code}: Slurm's job {job} is {state or 'gone'}, so it is not requeued")
            return
        times = f" (requeued {env[_COUNT]} times so far)" if env.get(_COUNT) else ""
        say(f"exit code {code}: Slurm's job {job} is requeued{times}")
        _ask(("scontrol", "requeue", job), env)
    except subprocess.CalledProcessError as error:
        say(f"Slurm's job {job} cannot be requeued: {error.stderr.strip() or error}")
    except (OSError, subprocess.SubprocessError) as error:
        say(f"Slurm's job {job} cannot be requeued: {error}")


def _ask(words: tuple[str, ...], env: Mapping[str, str]) -> str:
    done = subprocess.run(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=True,
    )
    return done.stdout.strip()

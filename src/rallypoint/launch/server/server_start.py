"""Starting the fork server of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rallypoint._core import env as environment, limits, process
from rallypoint.errors import LaunchError
from rallypoint.launch.config import LaunchConfig, StartMethod, TargetKind
from rallypoint.launch.worker.job import WorkerFds

from .server_process import ServerProcess


# Modules that every fork server imports.
TORCH = ("torch", "torch.distributed")


def start_server(
    config: LaunchConfig,
    env: Mapping[str, str],
    token: str,
    call: Callable[[WorkerFds], None] | None,
    say: Callable[[str], None],
) -> ServerProcess:
    """Start the fork server. It may still be importing when this returns.

    Args:
        config: what to run.
        env: what is added to the supervisor's environment.
        token: identifies the job among the user's jobs.
        call: for function launches by ``fork``, what a worker calls.
        say: prints a line for the user.

    Raises:
        LaunchError: it could not be started.
    """
    if not process.is_proc_mounted():
        raise LaunchError(
            "/proc is not mounted, and rally finds the processes of a job there"
            " (mount -t proc proc /proc; in a chroot, before entering it)"
        )
    if not process.is_proc_ours():
        raise LaunchError(
            "/proc shows another pid namespace, and rally finds the processes of a job there, which have other numbers here"
            " (unshare --mount-proc, bwrap --proc /proc)"
        )
    if config.start_method is StartMethod.FORK:
        assert call is not None
        with environment.overlay({"RALLY_JOB": token}):
            return ServerProcess.fork(config.job, call, token, config.secret)
    # A function launch runs in the user's program, which has limits of its own, and may have children.
    is_alone = config.job.kind is not TargetKind.FUNCTION
    server = ServerProcess.start(
        config.job,
        config.start_method,
        (*TORCH, *config.preload),
        env,
        token,
        config.secret,
        alone=is_alone,
        open_files=limits.allow_open_files() if is_alone else None,
        learns=config.learned_preload,
        warm=config.warm,
    )
    if server.why_cold:
        say(f"--warm has no effect: {server.why_cold}")
    return server

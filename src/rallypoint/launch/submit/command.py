"""``rally submit``: writes what the engine's own client takes, and hands it over."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rallypoint._core import env as environment, linux
from rallypoint.errors import ConfigError
from rallypoint.launch.avoidance import avoid_file

from . import kubernetes, ray, slurm, ssh, template_files
from .request import DEFAULT_NAME, USAGE, Request, avoided_list, read
from .template import fill


# The command that takes each engine's text, and the program that it needs.
_CLIENTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "slurm": (("sbatch",), "sbatch"),
    "k8s": (("kubectl", "create", "-f", "-"), "kubectl"),
    "ssh": (("bash",), "ssh"),
    "ray": (("bash",), "ray"),
}


def command(words: Sequence[str], show: Callable[[str], None]) -> int:
    """Submit a job. Returns an exit code; if there is something to be handed over, that of the engine's client.

    Raises:
        ConfigError: the command line cannot work, or the client is missing.
    """
    if {"-h", "--help"} & set(words[: words.index("--") if "--" in words else None]):
        show(USAGE)
        return 0
    if words and words[0] == "--detached":  # on the first host of `rally submit ssh`
        from . import detached

        return detached.command(words[1:])
    request = read(words)
    env = environment.snapshot()
    template, shown = template_files.read(request.engine, request.template, env)
    if request.print_template:
        show(template.rstrip("\n"))
        return 0
    if request.engine == "k8s" and request.name == DEFAULT_NAME:
        # A job that has ended keeps its name there until somebody deletes it.
        request = dataclasses.replace(request, name=f"{DEFAULT_NAME}-{secrets.token_hex(3)}")
    text = fill(template, _fields(request, env), shown)
    if not request.dry_run:
        _hand_over(request.engine, text)
    show(text.rstrip("\n"))
    return 0


def _hand_over(engine: str, text: str) -> NoReturn:
    client, needed = _CLIENTS[engine]
    if shutil.which(needed) is None and not (needed == "ray" and _own_ray().exists()):
        hint = "--dry-run shows what it would be given"
        raise ConfigError("submit", engine, f"{needed} is not installed", hint)
    # This process becomes the client, so that signals and the closing of the terminal reach it.
    given = linux.memfd_create("rally-submit")
    os.write(given, text.encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.execvp(client[0], client)


def _fields(request: Request, env: Mapping[str, str]) -> Mapping[str, str]:
    match request.engine:
        case "slurm":
            listed = avoided_list(request)
            avoided = avoid_file.read(Path(listed), "--avoid-hosts").hosts() if listed else ()
            return slurm.fields(request, sys.executable, avoided)
        case "k8s":
            return kubernetes.fields(request)
        case "ssh":
            return ssh.fields(request, sys.executable, os.getcwd(), env)
        case _:
            found = shutil.which("ray") is None and _own_ray().exists()
            return ray.fields(request, str(_own_ray()) if found else "ray")


def _own_ray() -> Path:
    """Ray's command in this interpreter's folder, which need not be on the path."""
    return Path(sys.executable).with_name("ray")

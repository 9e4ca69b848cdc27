"""``rally submit``: writes what the engine's own client takes, and hands it over."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from rallypoint.errors import ConfigError

from . import kubernetes, slurm
from .request import USAGE, read


def command(words: Sequence[str], show: Callable[[str], None]) -> int:
    """Submit a job. Returns the exit code of the engine's client.

    Raises:
        ConfigError: the command line cannot work, or the client is missing.
    """
    if words and words[0] in {"-h", "--help"}:
        show(USAGE)
        return 0
    request = read(words)
    if request.engine == "slurm":
        text, client = slurm.script(request, sys.executable), ["sbatch"]
    else:
        text, client = kubernetes.manifest(request), ["kubectl", "create", "-f", "-"]
    if request.dry_run:
        show(text.rstrip("\n"))
        return 0
    if shutil.which(client[0]) is None:
        hint = "--dry-run shows what it would be given"
        raise ConfigError("rally submit", request.engine, f"{client[0]} is not installed", hint)
    return subprocess.run(client, input=text.encode(), check=False).returncode

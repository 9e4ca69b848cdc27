"""The command line of ``rally submit``: pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.errors import ConfigError


ENGINES = ("slurm", "k8s")
USAGE = """\
usage: rally submit slurm [--nodes N] [--gpus N] [--name NAME] [--dry-run] [sbatch options] -- [run flags] train.py …
       rally submit k8s --image IMAGE [--nodes N] [--gpus N] [--name NAME] [--dry-run] -- [run flags] train.py …

Hand a job to Slurm (sbatch) or Kubernetes (kubectl). What follows -- is the command line of `rally run`.
--gpus is per node. --dry-run prints the script or manifest instead."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A job for an engine.

    Args:
        engine: one of :data:`ENGINES`.
        words: of ``rally run``.
        nodes: how many.
        gpus: on each node; 0: none are asked for.
        name: of the job.
        image: of the container; Kubernetes alone.
        options: for the engine's client, as they are; Slurm alone.
        dry_run: show what would be handed over.
    """

    engine: str
    words: tuple[str, ...]
    nodes: int = 1
    gpus: int = 0
    name: str = "rally"
    image: str = ""
    options: tuple[str, ...] = ()
    dry_run: bool = False


def read(words: Sequence[str]) -> Request:
    """The request that a command line makes.

    Raises:
        ConfigError: it cannot work.
    """
    engine = words[0] if words else None
    if engine not in ENGINES:
        raise ConfigError("rally submit", engine, f"expected one of {', '.join(ENGINES)}")
    if "--" not in words or not words[list(words).index("--") + 1 :]:
        hint = f"rally submit {engine} --nodes 2 -- train.py"
        raise ConfigError("rally submit", None, "expected -- and a script", hint)
    at = list(words).index("--")
    ours = list(words[1:at])
    values: dict[str, str] = {}
    options = []
    dry_run = False
    while ours:
        word = ours.pop(0)
        name, equals, value = word.partition("=")
        if word == "--dry-run":
            dry_run = True
        elif name in {"--nodes", "--gpus", "--name", "--image"}:
            if not equals and not ours:
                raise ConfigError(name, None, "expected a value after it")
            values[name] = value if equals else ours.pop(0)
        else:
            options.append(word)
    if engine == "k8s" and options:
        raise ConfigError("rally submit k8s", options[0], "no such option")
    if loose := [each for each in options if not each.startswith("-") or each.split() != [each]]:
        hint = "write --partition=gpu"
        raise ConfigError(
            "rally submit slurm", loose[0], "expected an option of sbatch, without spaces", hint
        )
    name = values.get("--name", "rally")
    if not _NAME.fullmatch(name):
        raise ConfigError("--name", name, "expected lower-case letters, digits and dashes")
    if engine == "k8s" and not values.get("--image"):
        raise ConfigError(
            "--image", None, "Kubernetes needs the image that has torch, rally, and your program"
        )
    return Request(
        engine=engine,
        words=tuple(words[at + 1 :]),
        nodes=_number(values, "--nodes", 1),
        gpus=_number(values, "--gpus", 0),
        name=name,
        image=values.get("--image", ""),
        options=tuple(options),
        dry_run=dry_run,
    )


def _number(values: dict[str, str], name: str, least: int) -> int:
    text = values.get(name, str(least))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(name, text, f"expected a whole number, {least} or more")
    return int(text)


def run_words(request: Request) -> tuple[str, ...]:
    """The words of ``rally run``: a worker for each GPU, unless they say otherwise."""
    given = any(
        each.partition("=")[0].replace("_", "-") == "--nproc-per-node" for each in request.words
    )
    if request.gpus and not given:
        return (f"--nproc-per-node={request.gpus}", *request.words)
    return request.words

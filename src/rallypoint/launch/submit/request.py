"""The command line of ``rally submit``: pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line import given as command_lines, nodes
from rallypoint.launch.command_line.values import exit_codes


ENGINES = ("slurm", "k8s", "ssh", "ray")
USAGE = """\
usage: rally submit slurm [--nodes N | --nodes MIN:MAX] [sbatch options] … -- [run flags] train.py …
       rally submit k8s --image IMAGE [--nodes N | --nodes MIN:MAX] … -- [run flags] train.py …
       rally submit ssh --hosts a,b:8 [--ssh-options WORDS] … -- [run flags] train.py …
       rally submit ray [--nodes N | --nodes MIN:MAX] [options of ray job submit] … -- [run flags] train.py …

Hand a job to Slurm (sbatch), Kubernetes (kubectl), hosts (ssh) or Ray (ray job submit). What follows -- is the command line
of `rally run`. With ssh the job goes on when the terminal is closed.

  --nodes MIN:MAX    MAX nodes; the job goes on with MIN of them (as --nnodes of `rally run`)
  --gpus N           GPUs per node; one worker for each, unless --nproc-per-node says otherwise
  --name NAME        name of the job [rally; for Kubernetes, where a name can be used once, rally- and some letters]
  --dry-run          print what would be handed over, and submit nothing
  --template FILE    use this template instead of the first one found in ~/.config/rallypoint/submit,
                     /etc/rallypoint/submit, or the package itself
  --print-template   print the template that would be used, so that you can change it"""
DEFAULT_NAME = "rally"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A job for an engine.

    Args:
        engine: one of :data:`ENGINES`.
        words: the words of ``rally run``.
        nodes: how many.
        gpus: on each node; 0: none are asked for.
        name: the job's name.
        image: the container's image; Kubernetes only.
        hosts: as for ``rally run --hosts``; ssh only.
        ssh_options: for the connection to the first of them.
        min_nodes: how many the job can continue with; None: all, unless its words say otherwise.
        options: passed to the engine's client as they are; Slurm and Ray only.
        dry_run: show what would be handed over.
        template: the file to write it from; empty: the first one that is found.
        print_template: show the template, and submit nothing.
    """

    engine: str
    words: tuple[str, ...]
    nodes: int = 1
    gpus: int = 0
    name: str = DEFAULT_NAME
    image: str = ""
    hosts: str = ""
    ssh_options: str = ""
    min_nodes: int | None = None
    options: tuple[str, ...] = ()
    dry_run: bool = False
    template: str = ""
    print_template: bool = False


# Each engine's options, which take a value.
_COMMON = ("--name", "--gpus", "--template")
_OPTIONS = {
    "slurm": (*_COMMON, "--nodes"),
    "k8s": (*_COMMON, "--nodes", "--image"),
    "ssh": (*_COMMON, "--hosts", "--ssh-options"),
    "ray": (*_COMMON, "--nodes"),
}
_CLIENTS = {"slurm": "sbatch", "ray": "ray job submit"}
# How these engines are told not to use a host.
_DRAINS = {"k8s": "kubectl cordon NODE", "ray": "ray drain-node --node-id ID"}


def read(words: Sequence[str]) -> Request:
    """The request that a command line makes.

    Raises:
        ConfigError: it cannot work.
    """
    engine = words[0] if words else None
    if engine not in ENGINES:
        raise ConfigError("submit", engine, f"expected one of {', '.join(ENGINES)}")
    at = list(words).index("--") if "--" in words else len(words)
    ours = list(words[1:at])
    values: dict[str, str] = {}
    options = []
    switches = set()
    while ours:
        word = ours.pop(0)
        name, equals, value = word.partition("=")
        if word in {"--dry-run", "--print-template"}:
            switches.add(word)
        elif name in _OPTIONS[engine]:
            if not equals and not ours:
                raise ConfigError(name, None, "expected a value after it")
            values[name] = value if equals else ours.pop(0)
        else:
            options.append(word)
    if at == len(words) and (scripts := [each for each in options if each.endswith(".py")]):
        hint = f"rally submit {engine} … -- {scripts[0]}"
        raise ConfigError(f"submit {engine}", scripts[0], "expected -- before the script", hint)
    _check_options(engine, options)
    template = values.get("--template", "")
    if "--template" in values and not template:
        problem = "expected a file"
        raise ConfigError("--template", template, problem, "is a variable of the shell not set?")
    if "--print-template" in switches:
        return Request(engine=engine, words=(), template=template, print_template=True)
    if not words[at + 1 :]:
        hint = (
            f"rally submit {engine} {'--hosts a,b' if engine == 'ssh' else '--nodes 2'} -- train.py"
        )
        raise ConfigError("submit", None, "expected -- and a script", hint)
    _check_words(words[at + 1 :], engine)
    name = values.get("--name", DEFAULT_NAME)
    if not _NAME.fullmatch(name):
        raise ConfigError("--name", name, "expected lower-case letters, digits and dashes")
    if engine == "k8s" and not values.get("--image"):
        raise ConfigError(
            "--image", None, "Kubernetes needs the image that has torch, rally, and your program"
        )
    if engine == "ssh" and not values.get("--hosts"):
        raise ConfigError("--hosts", None, "expected the hosts of the job", "--hosts a,b:8")
    least = None
    if ":" in (text := values.get("--nodes", "")):
        if "--nnodes" in command_lines.parse(words[at + 1 :]).values:
            raise ConfigError("--nodes", text, "cannot be combined with --nnodes after --")
        fewest, most = nodes.fewest_and_most(text, "--nodes")
        values["--nodes"] = str(most)
        least = fewest if fewest < most else None
    return Request(
        engine=engine,
        words=tuple(words[at + 1 :]),
        nodes=_number(values, "--nodes", 1),
        gpus=_number(values, "--gpus", 0),
        name=name,
        image=values.get("--image", ""),
        hosts=values.get("--hosts", ""),
        ssh_options=values.get("--ssh-options", ""),
        min_nodes=least,
        options=tuple(options),
        dry_run="--dry-run" in switches,
        template=template,
    )


def _check_words(words: Sequence[str], engine: str) -> None:
    """Refuse what `rally run` would refuse on the job's hosts, perhaps hours later. Only they know whether the script exists."""
    given = command_lines.parse(words)
    if given.help:
        raise ConfigError("submit", "--help", "expected a script after --", "rally run --help")
    command_lines.resolve(given, {})
    if "--nnodes" in given.values:
        nodes.fewest_and_most(given.values["--nnodes"], "--nnodes")
    if "--requeue-on" in given.values:
        if engine != "slurm":
            problem = "only Slurm starts a job again"
            raise ConfigError("--requeue-on", given.values["--requeue-on"], problem)
        exit_codes(given.values["--requeue-on"], "--requeue-on")
    if "--avoid-hosts" in given.values:
        text = given.values["--avoid-hosts"]
        if not text.strip():
            hint = "is a variable of the shell not set?"
            raise ConfigError("--avoid-hosts", text, "expected a file", hint)
        if engine in {"k8s", "ray"}:
            problem = f"{'Kubernetes' if engine == 'k8s' else 'Ray'} chooses the hosts itself"
            raise ConfigError("--avoid-hosts", text, problem, _DRAINS[engine])
    if not given.target or not given.target[0]:
        hint = f"rally submit {engine} … -- [flags of rally run] train.py"
        raise ConfigError("submit", None, "no script given after --", hint)


def _check_options(engine: str, options: Sequence[str]) -> None:
    if options and engine not in _CLIENTS:
        raise ConfigError(f"submit {engine}", options[0], "no such option")
    # A line of an sbatch script has no quotes.
    spaces = engine == "ray"
    loose = [
        each
        for each in options
        if not each.startswith("-") or (each.split() != [each] and not spaces)
    ]
    if loose:
        without = "" if spaces else ", without spaces"
        problem = f"expected an option of {_CLIENTS[engine]}{without}"
        hint = "write --address=http://head:8265" if spaces else "write --partition=gpu"
        raise ConfigError(f"submit {engine}", loose[0], problem, hint)


def _number(values: dict[str, str], name: str, least: int) -> int:
    text = values.get(name, str(least))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(name, text, f"expected a whole number, {least} or more")
    return int(text)


def run_words(request: Request) -> tuple[str, ...]:
    """The words of ``rally run``: with the range of nodes, and a worker for each GPU unless they say otherwise."""
    words = request.words
    given = any(each.partition("=")[0].replace("_", "-") == "--nproc-per-node" for each in words)
    if request.gpus and not given:
        words = (f"--nproc-per-node={request.gpus}", *words)
    if request.min_nodes is not None:
        words = (f"--nnodes={request.min_nodes}:{request.nodes}", *words)
    return words


def is_elastic(request: Request) -> bool:
    """Whether the job can continue without some of its nodes."""
    return nodes.is_range(command_lines.parse(run_words(request)).values.get("--nnodes", ""))


def avoided_list(request: Request) -> str:
    """The file that lists hosts to avoid; empty: there is none."""
    return command_lines.parse(request.words).values.get("--avoid-hosts", "")


def is_requeued(request: Request) -> bool:
    """Whether Slurm may be asked to start the job again."""
    return "--requeue-on" in command_lines.parse(request.words).values

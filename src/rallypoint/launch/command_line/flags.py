"""The flags of ``rally run``: one table, from which the parser and ``--help`` are made.

The names, meanings and defaults are torchrun 2.13's, so that a command line carries over; flags that only we have are
marked. Each of torchrun's flags may be written ``--a-b`` or ``--a_b`` and, with a few exceptions, takes its default
from ``PET_A_B``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rallypoint.errors import ConfigError
from rallypoint.rendezvous.backend import Backend
from rallypoint.rendezvous.defaults import COMMON_OPTIONS, MASTER_PORT, RENDEZVOUS_PORT


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag.

    Args:
        name: with dashes: ``--nproc-per-node``.
        short: one-letter form, or "".
        metavar: name of its value in help; "" for a switch.
        default: None where "not given" has a meaning of its own.
        env: whether ``PET_…`` gives its default.
        group: heading in help.
        help: one or two sentences.
        choices: the values allowed, if they are few.
        own: torchrun does not have it.
    """

    name: str
    help: str
    group: str
    short: str = ""
    metavar: str = ""
    default: str | None = None
    env: bool = True
    choices: tuple[str, ...] = ()
    own: bool = False

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        return f"PET_{self.dest.upper()}"

    @property
    def is_switch(self) -> bool:
        return not self.metavar


_SIZE, _RESTART, _LOGS = "size of the job", "failure and restart", "output and logs"
_NODES, _START, _OTHER = "several nodes", "how workers start", "accepted for torchrun command lines"

FLAGS: tuple[Flag, ...] = (
    Flag(
        name="--nproc-per-node",
        metavar="N",
        default="1",
        group=_SIZE,
        help="workers on this machine: a number, auto (one per accelerator, or per CPU if there is"
        " none), gpu, cpu, xpu",
    ),
    Flag(
        name="--nnodes",
        metavar="N|MIN:MAX",
        default="1:1",
        group=_SIZE,
        help="number of nodes; with MIN:MAX nodes may come and go while the job runs",
    ),
    Flag(
        name="--standalone",
        group=_SIZE,
        help="run on this machine alone; other flags about nodes have no effect",
    ),
    Flag(
        name="--max-restarts",
        metavar="K",
        default="0",
        group=_RESTART,
        help="start all workers again after a failure, at most K times",
    ),
    Flag(
        name="--restart-window",
        own=True,
        metavar="S",
        default="0",
        env=False,
        group=_RESTART,
        help="seconds after which a restart no longer counts against --max-restarts (0: it always does)",
    ),
    Flag(
        name="--max-losses",
        own=True,
        metavar="K",
        default="10",
        env=False,
        group=_RESTART,
        help="in a session of rallypoint.elastic, replace at most K lost workers within --loss-window, while the others"
        " keep what they have; beyond that, a loss is a failure (0: always)",
    ),
    Flag(
        name="--loss-window",
        own=True,
        metavar="S",
        default="600",
        env=False,
        group=_RESTART,
        help="seconds after which a loss no longer counts",
    ),
    Flag(
        name="--requeue-on",
        own=True,
        metavar="RC,…",
        env=False,
        group=_RESTART,
        help="have Slurm start the job again if it ends with one of these exit codes: 143 after an early signal"
        " (sbatch --signal=TERM@300), or one of the script's own",
    ),
    Flag(
        name="--avoid-hosts",
        own=True,
        metavar="FILE",
        env=False,
        group=_RESTART,
        help="file of hosts, one per line, that --hosts, elastic jobs and rally submit slurm leave out. rally adds hosts that were"
        " lost or failed (killed, memory, disk, GPU); these are left out once they have two lines",
    ),
    Flag(
        name="--spares",
        own=True,
        metavar="N",
        default="0",
        env=False,
        group=_RESTART,
        help="processes per node that run the script up to its session of rallypoint.elastic, and wait there to take over"
        " the rank of a lost worker at once",
    ),
    Flag(
        name="--step-timeout",
        own=True,
        metavar="S",
        default="0",
        env=False,
        group=_RESTART,
        help="in a session of rallypoint.elastic, kill and replace a worker that has begun no collective for S seconds"
        " while the others wait for it (0: never)",
    ),
    Flag(
        name="--hang-after",
        own=True,
        metavar="S",
        default="60",
        env=False,
        group=_RESTART,
        help="if no worker has done anything for S seconds and some wait for others, print where each of them is"
        " (0: never); by default also at least ten of the steps that the script reports, up to ten minutes",
    ),
    Flag(
        name="--on-hang",
        own=True,
        metavar="WHAT",
        default="tell",
        choices=("tell", "restart", "fail"),
        env=False,
        group=_RESTART,
        help="what to do about a hang: only tell; restart all workers, which counts as a failure (--max-restarts); or fail."
        " Must be the same on every node",
    ),
    Flag(
        name="--stacks-on-hang",
        own=True,
        env=False,
        group=_RESTART,
        help="show where every worker is when the job hangs (the default)",
    ),
    Flag(
        name="--no-stacks-on-hang",
        own=True,
        env=False,
        group=_RESTART,
        help="only say which ranks are missing; rally stacks and Ctrl-\\ show where the workers are",
    ),
    Flag(
        name="--slow-after",
        own=True,
        metavar="S",
        default="60",
        env=False,
        group=_RESTART,
        help="if the others have waited for a rank for S seconds, in more than a tenth of each step, name it and print what is"
        " different about it (0: never)",
    ),
    Flag(
        name="--shutdown-timeout",
        metavar="S",
        group=_RESTART,
        help="seconds between SIGTERM and SIGKILL when workers are stopped (default 30, or"
        " TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
    ),
    Flag(
        name="--cause-timeout",
        own=True,
        metavar="S",
        default="5",
        env=False,
        group=_RESTART,
        help="if workers failed only because a peer is gone, seconds to wait for the worker that caused it,"
        " which may still be cleaning up, before the rest get SIGTERM",
    ),
    Flag(
        name="--signals-to-handle",
        metavar="LIST",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        group=_RESTART,
        help="signals that are forwarded to the workers and end the job; SIGTERM, SIGINT and SIGHUP always do so."
        " SIGQUIT (Ctrl-\\) does so only if you name it here; otherwise it shows the workers' stacks",
    ),
    Flag(
        name="--signals-to-pass",
        own=True,
        metavar="LIST",
        default="",
        env=False,
        group=_RESTART,
        help="signals that are forwarded to the workers while the job continues: USR1,USR2",
    ),
    Flag(
        name="--log-dir",
        metavar="DIR",
        group=_LOGS,
        help="folder for logs and failure reports; each run adds a folder of its own",
    ),
    Flag(
        name="--redirects",
        short="-r",
        metavar="S",
        default="0",
        group=_LOGS,
        help="streams that go to files instead: 1 stdout, 2 stderr, 3 both, or per local rank:"
        " 0:3,11:1",
    ),
    Flag(
        name="--tee",
        short="-t",
        metavar="S",
        default="0",
        group=_LOGS,
        help="streams that go to files and, with a prefix, to the console; values as --redirects",
    ),
    Flag(
        name="--local-ranks-filter",
        metavar="LIST",
        default="",
        group=_LOGS,
        help="show only these local ranks on the console: 0,1,10",
    ),
    Flag(
        name="--duplicate-stdout-filters",
        metavar="WORDS",
        default="",
        group=_LOGS,
        help="also write teed stdout lines that contain one of these words to filtered_stdout.log",
    ),
    Flag(
        name="--duplicate-stderr-filters",
        metavar="WORDS",
        default="",
        group=_LOGS,
        help="the same for stderr",
    ),
    Flag(
        name="--log-format",
        own=True,
        metavar="HOW",
        default="text",
        env=False,
        group=_LOGS,
        choices=("text", "json"),
        help="json: each line of output is a JSON object with its time, host, rank, generation and stream, in files and on"
        " the console",
    ),
    Flag(
        name="--log-max-size",
        own=True,
        metavar="SIZE",
        default="0",
        env=False,
        group=_LOGS,
        help="start a new log file when one reaches this size (500K, 100M, 2G); four full ones are kept of each (0: no limit)",
    ),
    Flag(
        name="--metrics",
        own=True,
        metavar="WHERE",
        env=False,
        group=_LOGS,
        help="metrics of this node as OpenMetrics text: :9400 serves them on that port of the loopback, HOST:9400 on an"
        " address, *:9400 on all; or a file, which is written every 10 s",
    ),
    Flag(
        name="--traces",
        own=True,
        metavar="EXPORTER",
        env=False,
        group=_LOGS,
        help="send launch, rendezvous, recoveries and rpc calls as spans of OpenTelemetry: otlp (to"
        " OTEL_EXPORTER_OTLP_ENDPOINT), console, or another exporter that is installed",
    ),
    Flag(
        name="--progress",
        own=True,
        metavar="HOW",
        default="auto",
        env=False,
        group=_LOGS,
        choices=("auto", "lines", "off"),
        help="how to show what scripts report with rallypoint.progress: auto (a bar on a terminal, otherwise an"
        " occasional line), lines, or off",
    ),
    Flag(
        name="--node-rank",
        metavar="R",
        default="0",
        group=_NODES,
        help="rank of this node (0 to nnodes-1); if left out with --rdzv-endpoint, one is assigned",
    ),
    Flag(
        name="--master-addr",
        metavar="HOST",
        default="127.0.0.1",
        group=_NODES,
        help="host of node 0, reachable from all nodes",
    ),
    Flag(
        name="--master-port",
        metavar="PORT",
        group=_NODES,
        help=f"port on node 0 (default {MASTER_PORT} with several nodes, else any free one)",
    ),
    Flag(
        name="--rdzv-backend",
        metavar="NAME",
        default="static",
        group=_NODES,
        help="how nodes meet: one of the backends below. With static, each node has its --node-rank; with the others, ranks are"
        " assigned and lost nodes replaced. If left out, it follows from --rdzv-endpoint and --node-rank",
    ),
    Flag(
        name="--rdzv-endpoint",
        metavar="WHERE",
        default="",
        group=_NODES,
        help=f"where nodes meet: HOST[:{RENDEZVOUS_PORT}] of one of them, which serves the store (several"
        " hosts with commas), or a URL as listed below",
    ),
    Flag(
        name="--rdzv-id",
        metavar="ID",
        default="none",
        group=_NODES,
        help="name of the job, the same on all its nodes",
    ),
    Flag(
        name="--rdzv-conf",
        metavar="K=V,…",
        default="",
        group=_NODES,
        help="options of the rendezvous, as listed below; those of the backend may also follow the"
        " endpoint: etcds://HOST?ca=/etc/ca.pem",
    ),
    Flag(
        name="--secret-file",
        own=True,
        metavar="FILE",
        group=_NODES,
        env=False,
        help="the job's secret, the same on all nodes; `rally secret FILE` makes one. Default: RALLY_SECRET,"
        " RALLY_SECRET_FILE or ~/.config/rallypoint/secret; a job of one node makes its own",
    ),
    Flag(
        name="--bind",
        own=True,
        metavar="ADDRESS",
        group=_NODES,
        help="address of this node to listen on, * for all. Default: the one that the other nodes use; with one"
        " node, the loopback",
    ),
    Flag(
        name="--insecure",
        own=True,
        group=_NODES,
        env=False,
        help="run several nodes without a secret: whoever can reach the job's ports is trusted",
    ),
    Flag(
        name="--local-addr",
        metavar="HOST",
        group=_NODES,
        help="address of this node that the other nodes can reach",
    ),
    Flag(
        name="--hosts",
        own=True,
        metavar="A,B:8,…",
        group=_NODES,
        env=False,
        help="start the job on these hosts, over ssh from here; HOST:N starts N workers there",
    ),
    Flag(
        name="--hostfile",
        own=True,
        metavar="FILE",
        group=_NODES,
        env=False,
        help="like --hosts, from a file with one host per line: HOST, HOST:N, or HOST slots=N",
    ),
    Flag(
        name="--ssh-options",
        own=True,
        metavar="OPTIONS",
        group=_NODES,
        env=False,
        help="options for ssh: --ssh-options='-p 2222 -i key'",
    ),
    Flag(
        name="--forward-env",
        own=True,
        metavar="A,B_*",
        group=_NODES,
        env=False,
        help="variables that --hosts passes on, in addition to RALLY_*, PET_*, PYTHON*, TORCH*, NCCL_*, GLOO_*, TP_*, OMP_*",
    ),
    Flag(
        name="--role", metavar="NAME", default="default", group=_OTHER, help="ROLE_NAME of workers"
    ),
    Flag(
        name="--module",
        short="-m",
        group=_START,
        help="the target is a module, as in python -m",
    ),
    Flag(
        name="--no-python",
        group=_START,
        help="the target is any program, not a Python script",
    ),
    Flag(
        name="--start-method",
        metavar="HOW",
        group=_START,
        choices=("forkserver", "exec", "spawn", "fork"),
        help="forkserver (default): workers are forks of a process that has imported torch;"
        " exec: plain interpreters",
    ),
    Flag(
        name="--preload",
        own=True,
        metavar="A,B",
        default="",
        group=_START,
        env=False,
        help="modules to import before the workers fork, in addition to torch",
    ),
    Flag(
        name="--no-learned-preload",
        own=True,
        group=_START,
        help="for restarted workers, do not preload the parts of torch and rallypoint that earlier workers imported",
    ),
    Flag(
        name="--preflight",
        own=True,
        group=_START,
        env=False,
        help="run `rally doctor` first, with the same flags, and start only if it finds no problem",
    ),
    Flag(
        name="--warm",
        own=True,
        group=_START,
        env=False,
        help="keep a process that has imported torch after the job, and start from it if there is one: no waiting"
        " for `import torch`; `rally warm` shows and ends it",
    ),
    Flag(
        name="--warm-timeout",
        own=True,
        metavar="S",
        default="600",
        env=False,
        group=_START,
        help="with --warm, seconds without a job after which that process ends",
    ),
    Flag(
        name="--unbuffered",
        own=True,
        short="-u",
        group=_START,
        env=False,
        help="workers' stdout is unbuffered, as with python -u and torchrun; by default, a line is"
        " written when it is complete",
    ),
    Flag(
        name="--block-buffered",
        own=True,
        group=_START,
        env=False,
        help="workers' stdout is buffered in blocks if it is a file or pipe: faster for megabytes"
        " of output, but lost if a worker is killed",
    ),
    Flag(
        name="--templates",
        own=True,
        group=_START,
        env=False,
        help="replace {rank}, {local_rank}, {node_rank} and {generation} in the script's arguments with"
        " the worker's own values",
    ),
    Flag(
        name="--virtual-local-rank",
        group=_START,
        help="each worker sees one device: LOCAL_RANK=0, its own CUDA_VISIBLE_DEVICES",
    ),
    Flag(
        name="--numa-binding",
        metavar="HOW",
        env=False,
        group=_START,
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind each worker to CPUs near its GPU: node, socket, exclusive, core-complex",
    ),
    Flag(
        name="--monitor-interval",
        metavar="S",
        default="0.1",
        group=_OTHER,
        help="no effect: a worker that ends is noticed at once",
    ),
    Flag(
        name="--event-log-handler",
        metavar="NAME",
        default="null",
        group=_OTHER,
        help="no effect: set RALLY_EVENTS=FILE instead",
    ),
    Flag(
        name="--logs-specs",
        metavar="NAME",
        env=False,
        group=_OTHER,
        help="no effect: use the flags for logs above",
    ),
    Flag(
        name="--run-path",
        group=_OTHER,
        help="no effect: scripts always run this way",
    ),
)

# What argparse, too, takes for a value although it starts with a dash.
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+", re.ASCII)

BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS} | {
    flag.short: flag for flag in FLAGS if flag.short
}


@dataclass(frozen=True, slots=True)
class Given:
    """A parsed command line.

    Args:
        values: flag -> value ("1" for switches), for flags on the command line alone.
        target: what follows the flags: the script and its arguments; may be empty.
        help: ``-h`` was among the flags.
    """

    values: Mapping[str, str]
    target: tuple[str, ...]
    help: bool = False


def parse(argv: Sequence[str]) -> Given:
    """Parse flags, then the target: the first word that is not a flag, and all that follows it.

    Raises:
        ConfigError: an unknown or ambiguous flag (the nearest is named), or one without its value.
    """
    values: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words[0]
        if word == "--":
            words.pop(0)
            break
        if not word.startswith("-") or word == "-":
            break
        words.pop(0)
        if word in {"-h", "--help"}:
            return Given(values, tuple(words), help=True)
        name, equals, value = word.partition("=")
        short_and_more = not word.startswith("--") and len(word) > 2
        if short_and_more:
            # -r3 and -r=3, as argparse takes them
            name, equals, value = word[:2], "=", word[2:].removeprefix("=")
        flag = find(name)
        if flag.is_switch:
            values[flag.name] = "1"
            if short_and_more and word[2] != "=":
                words.insert(0, "-" + word[2:])  # -mr3 is -m -r3
            elif equals:
                raise ConfigError(name, value, "this flag takes no value")
            continue
        if not equals:
            value = _value_after(name, flag, words)
        values[flag.name] = value
    return Given(values, tuple(words))


def _value_after(name: str, flag: Flag, words: list[str]) -> str:
    """Take the next word, unless it is a flag itself: then the value was forgotten."""
    expected = f"expected a value ({flag.metavar}) after it"
    if not words:
        raise ConfigError(name, None, expected)
    word = words[0]
    is_flag = word.startswith("-") and len(word) > 1 and " " not in word.partition("=")[0]
    if is_flag and not _NEGATIVE_NUMBER.fullmatch(word):
        hint = f"write {name}={word} if that is the value"
        raise ConfigError(name, None, f"{expected}, found {word}", hint)
    return words.pop(0)


# `mpirun -n 2`, `mpirun -np 2`, `srun -N 2`.
_OF_OTHERS = {"-n": "nproc-per-node", "-N": "nnodes"}


def find(name: str) -> Flag:
    """The flag with this name, written with dashes or underscores, or with an unambiguous abbreviation of it."""
    plain = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    if plain in BY_NAME:
        return BY_NAME[plain]
    if plain.startswith("--") and len(plain) > 2:
        beginning = [flag for flag in FLAGS if flag.name.startswith(plain)]
        # An abbreviation for one of torchrun's flags means that flag here, too.
        beginning = [flag for flag in beginning if not flag.own] or beginning
        if len(beginning) == 1:
            return beginning[0]
        if beginning:
            names = ", ".join(flag.name for flag in beginning)
            raise ConfigError(name, None, f"could be one of {names}")
    near = _OF_OTHERS.get(plain) or _nearest(plain.lstrip("-"))
    hint = f"did you mean --{near}?" if near else "rally run --help lists the flags"
    raise ConfigError(name, None, "no such flag", hint)


def _nearest(word: str) -> str | None:
    """The flag most like ``word``, written without the dashes that all share, or None if none is."""
    known = [flag.name.removeprefix("--") for flag in FLAGS] + ["help"]
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return near[0]
    # A misspelt abbreviation: `nprc` is near the beginning of nproc-per-node. Stricter, since
    # beginnings are short and many.
    beginnings = {name[: len(word) + 1]: name for name in reversed(known)}
    near = difflib.get_close_matches(word, beginnings, n=1, cutoff=0.8)
    return beginnings[near[0]] if near else None


def resolve(given: Given, env: Mapping[str, str]) -> tuple[dict[str, str | None], dict[str, str]]:
    """Values by precedence: flag, then ``PET_…``, then default.

    Returns:
        Each flag's value by its ``dest`` (None: not set at all), and where it came from: ``flag``,
        the variable's name, or ``default``.
    """
    values: dict[str, str | None] = {}
    origins: dict[str, str] = {}
    for flag in FLAGS:
        if flag.name in given.values:
            value, origin = given.values[flag.name], "flag"
        elif flag.env and flag.variable in env:
            value, origin = env[flag.variable], flag.variable
        else:
            values[flag.dest] = "0" if flag.is_switch else flag.default
            origins[flag.dest] = "default"
            continue
        shown = flag.name if origin == "flag" else origin
        if flag.is_switch and not _is_whole_number(value):
            raise ConfigError(shown, value, "expected 0 or 1")
        if flag.choices and value not in flag.choices:
            raise ConfigError(shown, value, f"expected one of {', '.join(flag.choices)}")
        values[flag.dest], origins[flag.dest] = value, origin
    return values, origins


def _is_whole_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def help_text(backends: Sequence[Backend] = (), width: int = 100) -> str:
    """What ``rally run --help`` prints.

    Args:
        backends: the rendezvous backends to list.
        width: the screen's width in characters.
    """
    import textwrap

    def entry(head: str, text: str) -> list[str]:
        body = textwrap.wrap(text, width - 34)
        first = [f"{head:<33} {body[0]}"] if len(head) < 33 else [head]
        return [*first, *(" " * 34 + line for line in body[len(head) < 33 :])]

    lines = [
        "usage: rally run [flags] script.py [its arguments]",
        "       rally run [flags] -m package.module [its arguments]",
        "       rally run [flags] --no-python program [its arguments]",
        "",
        "Start a distributed PyTorch job on this machine, or this machine's part of one. If it fails, report",
        "why. Command lines of torchrun work unchanged.",
        "",
        "  rally run --nproc-per-node 4 train.py --epochs 3",
        "  rally run --nproc-per-node gpu --max-restarts 3 train.py",
        "  rally run --nnodes 2 --rdzv-endpoint node0 --nproc-per-node 8 train.py   (on both nodes)",
    ]
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        lines += ["", f"{group}:"]
        for flag in FLAGS:
            if flag.group == group:
                short = f"{flag.short}, " if flag.short else ""
                head = f"  {short}{flag.name} {flag.metavar}".rstrip()
                default = f" [{flag.default}]" if flag.default and flag.group != _OTHER else ""
                lines += entry(head, flag.help + default)
    lines += ["", "--rdzv-conf, with any backend:"]
    for option in COMMON_OPTIONS:
        lines += entry(f"  {option.name}=", option.help)
    for backend in backends:
        if backend.one_process:
            continue
        also = f" (also {', '.join(backend.aliases)})" if backend.aliases else ""
        lines += ["", f"--rdzv-backend {backend.name}{also}: {backend.help}"]
        lines += [f"  --rdzv-endpoint {scheme.example}" for scheme in backend.schemes]
        for option in backend.options:
            lines += entry(f"  {option.name}=", option.help)
    lines += [
        "",
        "Flags may be written --a-b or --a_b, and shortened as long as they are unambiguous. Without a flag,",
        "PET_FLAG_NAME gives its value (PET_NPROC_PER_NODE=4), as with torchrun. Nodes and ranks are",
        "detected with Slurm, Open MPI, MPICH, and clusters that set MASTER_ADDR, RANK and WORLD_SIZE.",
        "Exit code: that of the worker that failed first; 128+N if signal N ended it; 2 if the command line",
        "is wrong.",
    ]
    return "\n".join(lines)
